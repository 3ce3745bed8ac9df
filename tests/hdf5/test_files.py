"""Datasets of one file and of several: any kind, in any process, and what is said of files that cannot be read."""

from __future__ import annotations

import errno
import os
import pickle
import resource
from pathlib import Path
from typing import Any

import h5py
import hdf5_kit
import numpy as np
import pytest
from hdf5_kit import flip, read_alone, read_natively, stored

from fastpipe.core.native import native
from fastpipe.core.reads import MADE
from fastpipe.errors import HDF5Error, OptionError
from fastpipe.hdf5 import library
from fastpipe.hdf5.files import SampleFile, SampleFiles
from fastpipe.hdf5.opening import DamagedError
from fastpipe.hdf5.reader import RowReader
from fastpipe.volumes.opening import open_volume

ROWS = np.random.default_rng(0).standard_normal((40, 6, 5)).astype("f4")
NAMES = ["chunked", "contiguous", "packed", "texts", "deep/labels"]
ORDER = np.array([39, 0, 17, 17, 3])
COUNTS = [3, 0, 5, 1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("chunked", data=ROWS, chunks=(7, 6, 3), compression="gzip", shuffle=True)
        file["contiguous"] = ROWS[:, 0]
        file.create_dataset("packed", data=np.arange(40), chunks=(16,), scaleoffset=0)
        file["texts"] = [f"text {number}" for number in range(40)]
        file["deep/labels"] = np.arange(40) % 3
        file["short"], file["one"] = np.arange(39), 5
    return tmp_path / "x.h5"


def write(path: Path, rows: int, first: int, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        data = first + np.arange(rows)[:, None] * np.ones(4, "i4")
        file.create_dataset("x", data=data, dtype="i4", **options)
        file.create_dataset("text", data=[str(first + row) for row in range(rows)], dtype=h5py.string_dtype())
    return path


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    firsts = np.cumsum([0, *COUNTS]).tolist()
    options = {"chunks": (2, 4), "maxshape": (None, 4), "compression": "gzip"}
    return [write(tmp_path / f"{n}.h5", rows, firsts[n], **options) for n, rows in enumerate(COUNTS)]


def of(path: Path, names: list[str]) -> SampleFiles:
    return SampleFiles([path], names)


def read(source: SampleFiles | RowReader, samples: Any = ORDER) -> list[Any]:
    """Reads samples of files, or by the reader that is given, in three threads."""
    reader = RowReader(source, threads=3) if isinstance(source, SampleFiles) else source
    found = hdf5_kit.read(reader, samples, threads=3)
    return found if isinstance(found, list) else [found]


def check(outs: list[Any], samples: Any = ORDER) -> None:
    np.testing.assert_array_equal(outs[0], ROWS[samples])
    np.testing.assert_array_equal(outs[1], ROWS[samples, 0])
    np.testing.assert_array_equal(outs[2], samples)
    assert [text.decode() for text in outs[3]] == [f"text {number}" for number in samples]
    np.testing.assert_array_equal(outs[4], samples % 3)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_datasets_of_every_kind_are_read_in_every_process(path: Path, in_child: Any) -> None:
    files = of(path, NAMES)
    in_child(lambda: check(read(files)))  # before the parent has opened anything
    assert files.count == 40
    kinds = [layout.kind for layout in files.layouts]
    assert kinds == ["chunked", "contiguous", "h5py", "h5py", "contiguous"]
    reader = RowReader(files, threads=3)
    check(read(reader))
    in_child(lambda: check(read(files)))
    in_child(lambda: check(read(of(path, NAMES))))
    check(read(reader, np.arange(40)[::-1]), np.arange(40)[::-1])
    check(read(pickle.loads(pickle.dumps(files))))
    check(read_alone(reader, ORDER))
    assert [len(out) for out in read(reader, np.array([], int))] == [0] * 5


def test_files_are_closed_with_the_reader(path: Path, no_gc: None) -> None:
    before, outs = open_files(), [np.empty((5, 6, 5), "f4")]
    reader = RowReader(of(path, NAMES))
    check(read(reader))
    assert open_files() > before
    del reader
    assert open_files() == before
    for names in (["nothing"], ["chunked", "short"]):
        with pytest.raises((KeyError, OptionError)):
            SampleFile(path, names)
    assert open_files() == before
    # A batch that waits keeps its file open.
    reader = RowReader(of(path, ["chunked"]))
    started = reader.start(ORDER, np.arange(5), outs)
    del reader
    native.run_here(started.batch)
    assert (started.statuses[:, 0] == MADE).all()
    np.testing.assert_array_equal(outs[0], ROWS[ORDER])
    assert open_files() == before + 1
    del started
    assert open_files() == before


def test_samples_of_several_files_follow_each_other(paths: list[Path]) -> None:
    files = SampleFiles(paths, ["x", "text"])
    assert (files.count, files.firsts.tolist()) == (9, [0, 3, 3, 8, 9])
    for source in (files, pickle.loads(pickle.dumps(files))):
        order = [8, 0, 3, 7, 2, 2, 5]
        numbers, texts = read(source, order)
        assert numbers[:, 2].tolist() == [int(text) for text in texts] == order
    shown = [files.shown_of(sample) for sample in (0, 2, 3, 7, 8)]
    assert shown == [str(paths[number]) for number in (0, 0, 2, 2, 3)]


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    """Files that the core reads take no more than the lower half of the descriptors."""
    paths = [write(tmp_path / f"{number}.h5", 1, number, chunks=(1, 4)) for number in range(80)]
    before = open_files()
    reader = RowReader(SampleFiles(paths, ["x"]))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * before + 60, limits[1]))
    try:
        for order in (np.arange(80), np.arange(80)[::-1]):
            np.testing.assert_array_equal(read(reader, order)[0][:, 0], order)
            assert before < open_files() <= before + 40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    del reader
    assert open_files() == before


def test_the_library_has_few_files_open_at_a_time(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_MOST_OPEN", 2)
    reader = RowReader(SampleFiles([*paths, *paths], ["text"]))
    before = open_files()
    order = [17, 0, 9, 8, 3, 12, 1, 16]
    for samples in ([0], order, order[::-1]):
        assert [int(text) for text in read(reader, samples)[0]] == [sample % 9 for sample in samples]
        assert open_files() <= before + 2


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="run it as a user who is not root"
)
def test_a_file_that_may_not_be_read_is_named(path: Path) -> None:
    path.chmod(0)
    with pytest.raises(PermissionError):
        SampleFile(path, ["chunked"])


def test_a_path_without_an_hdf5_file_is_an_error(tmp_path: Path) -> None:
    for content in (b"", b"\x89HDF\r\n\x1a"):
        (tmp_path / "x.h5").write_bytes(content)
        with pytest.raises(HDF5Error, match=r"x\.h5 is not an HDF5 file"):
            SampleFile(tmp_path / "x.h5", ["chunked"])
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        SampleFile(tmp_path, ["chunked"])


@pytest.mark.parametrize(
    ("names", "sample_dims", "error", "said"),
    [
        (["labels"], 1, KeyError, "has no dataset 'labels'; it has chunked, contiguous, deep/labels, one"),
        (["deep"], 1, KeyError, "no dataset 'deep'"),  # a group
        (["chunked", "short"], 1, OptionError, r"different samples .*: 'chunked' \(40,\), 'short' \(39,\)"),
        (["chunked"], 0, OptionError, "sample_dims must be a number from 1, got 0"),
        ([], 1, OptionError, "no dataset was named"), (["one"], 1, OptionError, "'one' is a single value"),
        (["chunked", "short"], 2, OptionError, "'short' has 1 dimensions, and sample_dims=2"),
    ],
)  # fmt: skip
def test_datasets_that_do_not_belong_together_are_refused(
    path: Path, names: list[str], sample_dims: int, error: Any, said: str
) -> None:
    with pytest.raises(error, match=said):
        SampleFile(path, names, sample_dims)


@pytest.mark.parametrize(("libver", "signature", "at"), [("latest", b"FADB", 20), ("earliest", b"TREE\1", 7)])
def test_damaged_records_of_chunks_are_named(tmp_path: Path, libver: Any, signature: bytes, at: int) -> None:
    options = {"libver": libver, "chunks": (3, 4), "compression": "gzip"}
    path = stored(tmp_path / "x.h5", np.arange(60).reshape(10, 6), **options)
    flip(path, path.read_bytes().index(signature) + at)
    files = of(path, ["x"])
    assert "its list of chunks is damaged: " in files.layouts[0].why
    said = r"x\.h5, dataset /x cannot be read, it may be damaged: .*; restore it from a copy"
    with pytest.raises(DamagedError, match=said):
        read(files, [1])


def test_rows_that_a_damaged_list_of_chunks_still_finds_are_read(tmp_path: Path) -> None:
    found, data = 0, np.arange(400).reshape(200, 2)
    path = stored(tmp_path / "x.h5", data, libver="earliest", chunks=(1, 2))
    flip(path, path.read_bytes().rindex(b"TREE\1"))  # one of several nodes
    files = of(path, ["x"])
    with h5py.File(path) as file:
        for number in range(200):
            try:
                row = file["x"][number]
            except (OSError, RuntimeError):
                with pytest.raises(DamagedError):
                    read(files, [number])
            else:
                np.testing.assert_array_equal(read(files, [number])[0][0], row)
                found += 1
    assert 0 < found < 200


def test_damaged_records_of_names_are_named(tmp_path: Path) -> None:
    path = stored(tmp_path / "x.h5", np.arange(5), libver="earliest")
    flip(path, path.read_bytes().index(b"SNOD"))
    for name in ("x", "none"):
        with pytest.raises(HDF5Error, match=r"x\.h5 cannot be read, it may be damaged: "):
            SampleFile(path, [name])


def test_a_name_that_is_no_text_is_listed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = file[b"caf\xe9"] = np.arange(5)
    with pytest.raises(KeyError, match=r"has no dataset 'none'; it has caf.*, x"):
        SampleFile(tmp_path / "x.h5", ["none"])
    with pytest.raises(OptionError, match=r"has no dataset 'none'; it has caf.*, x"):
        open_volume(tmp_path / "x.h5" / "none")


def test_damage_that_the_library_finds_is_named(path: Path) -> None:
    with h5py.File(path, "a") as file:
        options = {"chunks": (40,), "scaleoffset": 0, "compression": "gzip"}
        file.create_dataset("both", data=np.arange(40), **options).id.write_direct_chunk((0,), b"no gzip")
    with pytest.raises(DamagedError, match=r"x\.h5, dataset /both cannot .*(read|filter)"):
        read(of(path, ["both"]))


CHANGED = r"x\.h5 has changed since it was opened"


@pytest.mark.parametrize("how", ["written to", "replaced", "removed", "cut off"])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_file_that_changes_is_noticed_unless_the_old_one_is_open(
    path: Path, how: str, is_open: bool
) -> None:
    reader = RowReader(of(path, ["chunked"]))
    if is_open:
        read(reader)
    if how == "written to":
        with h5py.File(path, "a") as changed:
            changed["chunked"][0] = 5
            changed["more"] = np.zeros(1000)
    elif how == "replaced":
        path.with_suffix(".new").write_bytes(path.read_bytes())
        os.replace(path.with_suffix(".new"), path)
    elif how == "removed":
        path.unlink()
    else:
        os.truncate(path, 4000)
    if is_open and how in ("replaced", "removed"):  # what is open is what it was
        np.testing.assert_array_equal(read(reader)[0], ROWS[ORDER])
        return
    if is_open:
        rows = read_natively(reader, ORDER)
        assert {tuple(status) for status in rows.statuses[:, :2].tolist()} == {(2, 1)}  # declined: unreadable
        assert set(rows.statuses[:, 4:].copy().view("i4")[:, 0].tolist()) == {errno.ESTALE}
    error, said = (FileNotFoundError, r"x\.h5") if how == "removed" else (HDF5Error, CHANGED)
    with pytest.raises(error, match=said):
        read(reader)


@pytest.mark.parametrize("how", ["written to", "replaced"])
def test_a_file_that_changes_while_the_library_has_it_open_is_noticed(path: Path, how: str) -> None:
    reader, other, before = RowReader(of(path, ["packed"])), path.with_suffix(".new"), path.stat()
    read(reader)
    other.write_bytes(path.read_bytes())
    with h5py.File(other, "a") as file:
        file["packed"][...] = 0
    if how == "replaced":
        os.replace(other, path)
    else:
        path.write_bytes(other.read_bytes())
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(HDF5Error, match=CHANGED):
        read(reader)


def test_a_batch_of_several_files_says_which_has_changed(paths: list[Path]) -> None:
    files = SampleFiles(paths, ["x"])
    write(paths[2], 5, 100)
    assert read_natively(RowReader(files), [0, 4, 8]).is_made.tolist() == [True, False, True]
    with pytest.raises(HDF5Error, match=r"2\.h5 has changed"):
        read(files, [0, 4, 8])
    assert read(files, [0, 8])[0][:, 0].tolist() == [0, 8]
