"""Files and options that cannot be, and damaged chunks under each policy."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from failure import failure

from fastpipe import FastHDF5Dataset, FastLoader
from fastpipe.errors import BadSampleError, HDF5Error, OptionError

ROWS, CHUNK = 40, 8
GOOD = [number for number in range(ROWS) if number not in range(8, 16)]  # with the second chunk damaged


def write(path: Path, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        data = np.arange(ROWS)[:, None] + np.zeros((ROWS, 20), "i8")
        file.create_dataset("x", data=data, **{"chunks": (CHUNK, 20), "compression": "gzip", **options})
        file["n"] = np.arange(ROWS)
    return path


def damage(path: Path, chunk: int = 1, change: Callable[[bytes], bytes] | None = None) -> Path:
    """Flips bits in the middle of a chunk, or changes it."""
    with h5py.File(path, "r") as file:
        info = file["x"].id.get_chunk_info(chunk)
    raw, first, stop = bytearray(path.read_bytes()), info.byte_offset, info.byte_offset + info.size
    raw[(first + stop) // 2] ^= 0x55
    if change:
        raw[first:stop] = change(bytes(raw[first:stop]))
    path.write_bytes(bytes(raw))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "x.h5")


@pytest.mark.parametrize(
    ("keys", "options", "message"),
    [
        (["x"], {"sample_dims": -1}, "sample_dims must be a number from 0, got -1"),
        (["x"], {"sample_dims": 3}, "'x' has 2 dimensions, and sample_dims=3"),
        (["x", "n"], {"sample_dims": 2}, "'n' has 1 dimensions"), ({}, {}, r"paths, got {}"),
        ([], {}, r"keys must name datasets by their paths, got \[\]"), (5, {}, "mapping of some, got 5"),
        (None, {}, "a sequence or mapping of some, got None"), (b"x", {}, "mapping of some, got b'x'"),
        ([1, 2], {}, r"by their paths, got \[1, 2\]"), ({"a": 1}, {}, "by their paths, got {'a': 1}"),
        (["x"], {"target_transform": abs}, r"second value of a tuple: give keys=\[inputs, targets\], got keys="),
        ("x", {"target_transform": abs}, "second value of a tuple"),
        ({"a": "x", "b": "n"}, {"target_transform": abs}, "second value of a tuple"),
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_named(path: Path, keys: Any, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        FastHDF5Dataset(path, keys, **options)


def test_files_that_cannot_be_read_are_named(path: Path, tmp_path: Path) -> None:
    (tmp_path / "text.h5").write_text("this is not an HDF5 file")
    (tmp_path / "short.h5").write_bytes(path.read_bytes()[:1500])
    with h5py.File(tmp_path / "uneven.h5", "w") as file:
        file["x"], file["n"], file["f"] = np.zeros((5, 2)), np.zeros(4), np.zeros(5)
    for names, keys, error, message in (
        (["nothing.h5"], "x", FileNotFoundError, r"nothing\.h5"),
        (["x.h5", "nothing.h5"], "x", FileNotFoundError, r"nothing\.h5"),
        (["x.h5"], ["x", "y"], KeyError, r"x\.h5 has no dataset 'y'; it has n, x"),
        ([], "x", OptionError, "no HDF5 file was named"),
        (["text.h5"], "x", HDF5Error, r"text\.h5 is not an HDF5 file"),
        (["short.h5"], "x", HDF5Error, r"short\.h5 cannot be opened, it may be cut off"),
        (["uneven.h5"], ["x", "n"], OptionError, r"different samples .*: 'x' \(5,\), 'n' \(4,\)"),
    ):  # fmt: skip
        paths: Any = [tmp_path / name for name in names]
        with pytest.raises(error, match=message):
            FastHDF5Dataset(paths[0] if len(paths) == 1 else paths, keys)


@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
@pytest.mark.parametrize("how", ["written to", "deleted", "replaced, library"])
def test_a_change_of_the_file_is_an_error_under_every_policy(path: Path, how: str, policy: Any) -> None:
    if how == "replaced, library":
        with h5py.File(path, "a") as file:
            file["s"] = ["text"] * ROWS
    dataset = FastHDF5Dataset(
        path, ["x", "s"] if "library" in how else ["x"], bad_samples=policy, cache="off"
    )
    if how == "deleted":
        path.unlink()
    elif how == "written to":
        dataset[0]
        with h5py.File(path, "a") as file:
            file["x"][39] = 1
    else:
        os.replace(write(path.with_name("new.h5")), path)
    for call in (
        lambda: dataset[30],
        lambda: dataset.__getitems__([3]),
        lambda: list(FastLoader(dataset, 4)),
    ):
        error = failure(call, FileNotFoundError if how == "deleted" else HDF5Error)
        assert not isinstance(error, BadSampleError)
        if how != "deleted":
            assert "x.h5 has changed since it was opened; make the dataset anew" in str(error)


DAMAGE: dict[str, Any] = {
    "gzip": ({}, None, "gzip: "),
    "fletcher32": ({"compression": None, "fletcher32": True}, None, "fletcher32: the checksum is not that"),
    "too long": ({}, lambda raw: zlib.compress(bytes(10**6))[: len(raw)].ljust(len(raw), b"\0"), "gzip: "),
    "zeros": ({}, lambda raw: bytes(len(raw)), "gzip: Error -3"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_chunk_names_everything(tmp_path: Path, kind: str) -> None:
    options, change, reason = DAMAGE[kind]
    path = damage(write(tmp_path / "x.h5", **options), 1, change)
    dataset = FastHDF5Dataset(path, ["x", "n"], threads=2)
    for call in (lambda: dataset[8], lambda: list(FastLoader(dataset, 4))):
        error = failure(call)
        assert type(error) is BadSampleError
        assert f"sample 8 could not be read: '{path}' ({path.stat().st_size:,} bytes)" in str(error)
        assert f"{path}, dataset /x, chunk 1 at [8:16, 0:20]: {reason}" in str(error)
        assert "bad_samples='replace' or 'skip'" in str(error)
    error = failure(lambda: dataset[-30])
    assert (error.index, error.path) == (10, str(path))
    assert [int(dataset[index][0][3]) for index in GOOD] == GOOD


def test_a_file_of_bad_samples_alone_is_an_error(path: Path) -> None:
    for chunk in range(5):
        damage(path, chunk)
    replacing, skipping = (FastHDF5Dataset(path, "x", bad_samples=one) for one in ("replace", "skip"))
    error = str(failure(lambda: replacing[4]))
    assert "sample 4" in error and "nor could any of 39 tried in its place" in error
    assert "sample" in str(failure(lambda: list(FastLoader(skipping, 4))))
    assert failure(lambda: skipping[3]).index == 3


def test_damaged_chunks_are_not_kept(path: Path, settled: Any) -> None:
    dataset = FastHDF5Dataset(settled(damage(path)), ["x", "n"], bad_samples="skip", cache="ram")
    for _ in range(3):
        assert sorted(sum((batch[1].tolist() for batch in FastLoader(dataset, 7)), [])) == GOOD
