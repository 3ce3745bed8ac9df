"""A file's datasets together: any kind, any process, and what is said of files that cannot be read."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hdf5_kit import read, read_alone, read_natively

from fastpipe.core.native import native
from fastpipe.core.reads import MADE
from fastpipe.errors import HDF5Error, OptionError
from fastpipe.hdf5.files import SampleFile, SampleFiles
from fastpipe.hdf5.opening import DamagedError, library_errors
from fastpipe.hdf5.reader import RowReader
from fastpipe.volumes.opening import open_volume

ROWS = np.random.default_rng(0).standard_normal((40, 6, 5)).astype("f4")
NAMES = ["chunked", "contiguous", "packed", "texts", "deep/labels"]
ORDER = np.array([39, 0, 17, 17, 3])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("chunked", data=ROWS, chunks=(7, 6, 3), compression="gzip", shuffle=True)
        file["contiguous"] = ROWS[:, 0]
        file.create_dataset("packed", data=np.arange(40), chunks=(16,), scaleoffset=0)
        file["texts"] = [f"text {number}" for number in range(40)]
        file["deep/labels"] = np.arange(40) % 3
        file["short"] = np.arange(39)
        file["one"] = 5
        file["square"] = np.arange(40 * 6).reshape(40, 6)
    return tmp_path / "x.h5"


@pytest.fixture
def read() -> Any:
    """Reads datasets of a file, or of the reader that is given, in three threads."""

    def run(source: SampleFiles | RowReader, samples: Any = ORDER) -> list[Any]:
        reader = RowReader(source) if isinstance(source, SampleFiles) else source
        found = read(reader, samples, threads=3)
        return found if isinstance(found, list) else [found]

    return run


def of(path: Path, names: list[str], sample_dims: int = 1) -> SampleFiles:
    return SampleFiles([path], names, sample_dims)


def _are_right(outs: list[Any], samples: Any = ORDER) -> None:
    np.testing.assert_array_equal(outs[0], ROWS[samples])
    np.testing.assert_array_equal(outs[1], ROWS[samples, 0])
    np.testing.assert_array_equal(outs[2], samples)
    assert [text.decode() for text in outs[3]] == [f"text {number}" for number in samples]
    np.testing.assert_array_equal(outs[4], samples % 3)


def test_datasets_of_every_kind(path: Path) -> None:
    files = of(path, NAMES)
    assert files.count == 40
    assert [layout.kind for layout in files.layouts] == [
        "chunked",
        "contiguous",
        "h5py",
        "h5py",
        "contiguous",
    ]
    reader = RowReader(files, threads=3)
    _are_right(read(reader))
    _are_right(read(reader))
    _are_right(read(reader, np.arange(40)[::-1]), np.arange(40)[::-1])


def test_each_is_read_alone_as_well(path: Path) -> None:
    _are_right(read_alone(RowReader(of(path, NAMES)), ORDER))


def test_several_dimensions_count_samples(path: Path) -> None:
    files = of(path, ["chunked", "square"], sample_dims=2)
    assert (files.count, files.sample_shape(0), files.sample_shape(1)) == (240, (5,), ())
    samples = np.random.default_rng(1).permutation(240)
    outs = read(files, samples)
    np.testing.assert_array_equal(outs[0], ROWS.reshape(240, 5)[samples])
    np.testing.assert_array_equal(outs[1], samples)


def test_no_samples_are_asked_for(path: Path) -> None:
    assert [len(out) for out in read(of(path, NAMES), np.array([], int))] == [0] * 5


def test_what_is_open_goes_with_the_object(path: Path, no_gc: None) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reader = RowReader(of(path, NAMES))
    _are_right(read(reader))
    assert len(os.listdir("/proc/self/fd")) > before
    del reader
    assert len(os.listdir("/proc/self/fd")) == before


def test_dropped_while_a_batch_waits(path: Path, no_gc: None) -> None:
    """A batch reads from the file that it was made for, and closes it in the end."""
    before = os.listdir("/proc/self/fd")
    reader = RowReader(of(path, ["chunked"]))
    outs = [np.empty((5, 6, 5), "f4")]
    started = reader.start(ORDER, np.arange(5), outs)
    del reader
    native.run_here(started.batch)
    assert (started.statuses[:, 0] == MADE).all()
    np.testing.assert_array_equal(outs[0], ROWS[ORDER])
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    del started
    assert os.listdir("/proc/self/fd") == before


def test_other_processes(path: Path, in_child: Callable[[Callable[[], object]], None]) -> None:
    files = of(path, NAMES)
    in_child(lambda: _are_right(read(files)))  # before the parent has opened anything
    reader = RowReader(files)
    _are_right(read(reader))
    in_child(lambda: _are_right(read(files)))
    in_child(lambda: np.testing.assert_array_equal(read(of(path, ["chunked"]))[0], ROWS[ORDER]))
    _are_right(read(reader))
    copy = pickle.loads(pickle.dumps(files))
    _are_right(read(copy))


# ---- files that cannot be read ------------------------------------------------------------------


def test_there_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.h5"):
        SampleFile(tmp_path / "nothing.h5", ["x"])


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="run it as a user who is not root"
)
def test_a_file_that_may_not_be_read(path: Path) -> None:
    path.chmod(0)
    with pytest.raises(PermissionError):
        SampleFile(path, ["chunked"])


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        SampleFile(tmp_path, ["x"])


@pytest.mark.parametrize("content", [b"", b"this is text", b"\x89HDF\r\n\x1a"])
def test_no_hdf5_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.h5").write_bytes(content)
    with pytest.raises(HDF5Error, match=r"x\.h5 is no HDF5 file"):
        SampleFile(tmp_path / "x.h5", ["x"])


def test_a_file_that_is_cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(HDF5Error, match=r"x\.h5 cannot be opened, it may be cut off"):
        SampleFile(path, ["chunked"])


def test_no_such_dataset(path: Path) -> None:
    with pytest.raises(
        KeyError, match="has no dataset 'labels'; it has chunked, contiguous, deep/labels, one"
    ):
        SampleFile(path, ["labels"])
    with pytest.raises(KeyError, match="no dataset 'deep'"):  # a group
        SampleFile(path, ["deep"])


def test_datasets_that_do_not_belong_together(path: Path) -> None:
    with pytest.raises(OptionError, match=r"different samples .*: 'chunked' \(40,\), 'short' \(39,\)"):
        SampleFile(path, ["chunked", "short"])
    with pytest.raises(OptionError, match="sample_dims must be a number from 1, got 0"):
        SampleFile(path, ["chunked"], sample_dims=0)
    with pytest.raises(OptionError, match="no dataset was named"):
        SampleFile(path, [])
    with pytest.raises(OptionError, match="'one' is a single value"):
        SampleFile(path, ["one"])
    with pytest.raises(OptionError, match="'short' has 1 dimensions, and sample_dims=2"):
        SampleFile(path, ["chunked", "short"], sample_dims=2)


def test_a_damaged_chunk(path: Path) -> None:
    layout = SampleFile(path, ["chunked"]).layouts[0]
    raw = bytearray(path.read_bytes())
    raw[layout.offsets[0] : layout.offsets[0] + layout.sizes[0]] = bytes(int(layout.sizes[0]))
    path.write_bytes(bytes(raw))
    files = of(path, ["chunked"])
    with pytest.raises(DamagedError, match=r"x\.h5, dataset /chunked, chunk 0 at \[0:7, 0:6, 0:3\]: gzip: "):
        read(files, np.array([1]))
    np.testing.assert_array_equal(read(files, np.array([39]))[0], ROWS[[39]])


def flip(path: Path, signature: bytes, behind: int) -> None:
    """Change a bit of one of the file's records."""
    content = bytearray(path.read_bytes())
    content[content.index(signature) + behind] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("libver", "signature", "behind"), [("latest", b"FADB", 20), ("earliest", b"TREE\1", 7)]
)
def test_damage_of_the_records_of_chunks(tmp_path: Path, libver: str, signature: bytes, behind: int) -> None:
    """Which rows are damaged the library decides, one by one."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver=libver) as file:
        file.create_dataset("x", data=np.arange(60).reshape(10, 6), chunks=(3, 4), compression="gzip")
    flip(path, signature, behind)
    files = of(path, ["x"])
    assert "its list of chunks is damaged: " in files.layouts[0].why
    with pytest.raises(
        DamagedError, match=r"x\.h5, dataset /x cannot be read, it may be damaged: .*; restore it from a copy"
    ):
        read(files, np.array([1]))


def test_what_a_damaged_list_of_chunks_still_finds_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        file.create_dataset("x", data=np.arange(400).reshape(200, 2), chunks=(1, 2))
    content = bytearray(path.read_bytes())
    content[content.rindex(b"TREE\1")] ^= 1  # one of several nodes
    path.write_bytes(content)
    with h5py.File(path) as file:
        rows = [_row_of_h5py(file["x"], number) for number in range(200)]
    assert any(row is None for row in rows)
    assert any(row is not None for row in rows)
    files = of(path, ["x"])
    for number, row in enumerate(rows):
        if row is None:
            with pytest.raises(DamagedError):
                read(files, np.array([number]))
        else:
            np.testing.assert_array_equal(read(files, np.array([number]))[0][0], row)


def _row_of_h5py(dataset: Any, number: int) -> Any:
    try:
        return dataset[number]
    except (OSError, RuntimeError):
        return None


def test_damage_of_the_records_of_names(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        file["x"] = np.arange(5)
    flip(path, b"SNOD", 0)
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


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("x"), ValueError("x")])
def test_errors_of_others_are_not_called_damage(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, library_errors("x.h5"):
        raise error
    assert raised.value is error


def test_damage_that_the_library_finds(path: Path) -> None:
    with h5py.File(path, "a") as file:
        dataset = file.create_dataset(
            "both", data=np.arange(40), chunks=(40,), scaleoffset=0, compression="gzip"
        )
        dataset.id.write_direct_chunk((0,), b"no gzip")
    files = of(path, ["both"])
    assert "scale-offset" in files.layouts[0].why
    with pytest.raises(DamagedError, match=r"x\.h5, dataset /both cannot .*(read|filter)"):
        read(files)


@pytest.mark.parametrize("how", ["written to", "replaced"])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_file_that_changes(path: Path, how: str, is_open: bool) -> None:
    reader = RowReader(of(path, ["chunked"]))
    if is_open:
        read(reader)
    if how == "written to":
        with h5py.File(path, "a") as changed:
            changed["chunked"][0] = 5
            changed["more"] = np.zeros(1000)
    else:
        path.with_suffix(".new").write_bytes(path.read_bytes())
        os.replace(path.with_suffix(".new"), path)
    if is_open and how == "replaced":  # what is open is what it was
        np.testing.assert_array_equal(read(reader)[0], ROWS[ORDER])
    else:
        with pytest.raises(HDF5Error, match=r"x\.h5 has changed since it was opened"):
            read(reader)


@pytest.mark.parametrize("how", ["written to", "replaced"])
def test_a_file_that_changes_while_the_library_has_it_open(path: Path, how: str) -> None:
    with h5py.File(path, "a") as file:
        file.create_dataset("scaled", data=np.arange(40), chunks=(4,), scaleoffset=0)
    reader = RowReader(of(path, ["scaled"]))
    read(reader)
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    with h5py.File(other, "a") as file:
        file["scaled"][...] = 0
    if how == "replaced":
        os.replace(other, path)
    else:
        before = path.stat()
        path.write_bytes(other.read_bytes())
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(HDF5Error, match=r"x\.h5 has changed since it was opened"):
        read(reader)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_file_that_is_removed(path: Path, is_open: bool) -> None:
    reader = RowReader(of(path, ["chunked"]))
    if is_open:
        read(reader)
    path.unlink()
    if is_open:
        np.testing.assert_array_equal(read(reader)[0], ROWS[ORDER])
    else:
        with pytest.raises(FileNotFoundError, match=r"x\.h5"):
            read(reader)


def test_a_file_that_is_cut_off_while_it_is_open(path: Path) -> None:
    reader = RowReader(of(path, ["chunked"]))
    read(reader)
    os.truncate(path, 4000)
    rows = read_natively(reader, ORDER)
    assert not rows.is_made.any()
    assert {tuple(status) for status in rows.statuses[:, :2].tolist()} == {(2, 1)}  # declined: unreadable
    assert set(rows.statuses[:, 4:].copy().view("i4")[:, 0].tolist()) == {errno.ESTALE}
    with pytest.raises(HDF5Error, match=r"x\.h5 has changed since it was opened"):
        read(reader)


def test_a_file_that_is_open_for_writing_elsewhere(path: Path) -> None:
    code = "import h5py, sys; file = h5py.File(sys.argv[1], 'a'); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        with pytest.raises(
            HDF5Error, match="open for writing elsewhere: close it there, or set HDF5_USE_FILE"
        ):
            SampleFile(path, ["chunked"])
        writer.communicate("")
    SampleFile(path, ["chunked"])


def test_a_file_that_is_open_for_writing_in_this_process(path: Path) -> None:
    """The library would hand that file out again, whose latest values may not be on the disk."""
    with (
        h5py.File(path, "a"),
        pytest.raises(HDF5Error, match=r"x\.h5 is open for writing in this process: close it"),
    ):
        SampleFile(path, ["chunked"])
    with h5py.File(path, "r"):
        SampleFile(path, ["chunked"])


def test_nothing_is_left_open_by_what_fails(path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for names in (["nothing"], ["chunked", "short"]):
        with pytest.raises((KeyError, OptionError)):
            SampleFile(path, names)
    assert len(os.listdir("/proc/self/fd")) == before
