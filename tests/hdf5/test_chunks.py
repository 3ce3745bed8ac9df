"""Chunks, with all combinations of filters: many in a batch, one by one, and what is said of damaged ones."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

from fastpipe.core.reads import ChunkError
from fastpipe.errors import HDF5Error
from fastpipe.hdf5.chunks import ChunkReader, FileState
from fastpipe.hdf5.filters import FilterStep, why_not
from fastpipe.hdf5.layout import read_layout
from fastpipe.hdf5.opening import DamagedError
from fastpipe.hdf5.reader import RowReader

ReaderOf = Callable[..., RowReader]
ROWS = 60
OPTIONS: dict[str, dict[str, Any]] = {
    "gzip": {"compression": "gzip"},
    "gzip of bytes in another order": {"compression": "gzip", "shuffle": True},
    "lzf": {"compression": "lzf"},
    "lzf of bytes in another order": {"compression": "lzf", "shuffle": True},
    "another order": {"shuffle": True},
    "a checksum": {"fletcher32": True},
    "everything": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "lz4": dict(hdf5plugin.LZ4()),
    "lz4 in small blocks, a checksum": {**hdf5plugin.LZ4(nbytes=16), "fletcher32": True},
    "zstd of bytes in another order": {**hdf5plugin.Zstd(), "shuffle": True},
    "blosc": dict(hdf5plugin.Blosc()),
    "blosc2": dict(hdf5plugin.Blosc2()),
    "bits in another order": dict(hdf5plugin.Bitshuffle(cname="none")),
    "bits in another order, lz4": dict(hdf5plugin.Bitshuffle(cname="lz4")),
    "bits in another order, zstd": dict(hdf5plugin.Bitshuffle(cname="zstd")),
}


def chunks_of(path: Path) -> ChunkReader:
    with h5py.File(path, "r") as file:
        return ChunkReader(read_layout(file["x"]), FileState.of(os.stat(path)))


@pytest.mark.parametrize("dtype", ["u1", "<i2", ">f4", "<f8", "S3", "V5"])
@pytest.mark.parametrize("options", OPTIONS)
def test_they_are_the_same(
    tmp_path: Path, reader_of: ReaderOf, read_natively: Any, read_alone: Any, options: str, dtype: str
) -> None:
    raw = np.random.default_rng(0).choice(
        np.array([0, 1, 7, 255], np.uint8), ROWS * 7 * np.dtype(dtype).itemsize
    )
    data = raw.view(dtype).reshape(ROWS, 7)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=data, chunks=(3, 5), **OPTIONS[options])
    reader = reader_of(tmp_path / "x.h5", threads=2)
    for order, threads in ((slice(None), 0), (slice(None, None, -3), 2)):
        rows = read_natively(reader, np.arange(ROWS)[order], threads=threads)
        assert rows.is_made.all()
        np.testing.assert_array_equal(rows.arrays[0], data[order])
    np.testing.assert_array_equal(read_alone(reader, range(ROWS)), data)
    chunks = chunks_of(tmp_path / "x.h5")
    numbers = np.array([39, 0, 7])
    out = np.zeros((3, chunks.nbytes), np.uint8)
    chunks.decode(numbers, out)
    assert [one.tobytes() for one in out] == [chunks.decode_alone(int(one)).tobytes() for one in numbers]
    np.testing.assert_array_equal(out[1].view(dtype).reshape(3, 5), data[:3, :5])


def test_chunks_without_some_of_the_filters(
    tmp_path: Path, reader_of: ReaderOf, read_natively: Any, read_alone: Any
) -> None:
    data = np.random.default_rng(0).integers(0, 9, (ROWS, 4)).astype("i4")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        found = file.create_dataset(
            "x", data=data, chunks=(2, 4), compression="gzip", shuffle=True, fletcher32=True
        )
        for first in range(0, ROWS, 8):
            found.id.write_direct_chunk((first, 0), data[first : first + 2].tobytes(), filter_mask=0b111)
        for first in range(2, ROWS, 8):
            packed = zlib.compress(data[first : first + 2].tobytes())
            found.id.write_direct_chunk((first, 0), packed, filter_mask=0b101)
    reader = reader_of(tmp_path / "x.h5")
    rows = read_natively(reader, np.arange(ROWS))
    assert rows.is_made.all()
    np.testing.assert_array_equal(rows.arrays[0], data)
    np.testing.assert_array_equal(read_alone(reader, np.arange(ROWS)), data)


def test_a_filter_without_parameters_that_was_left_out_of_all_chunks(
    tmp_path: Path, reader_of: ReaderOf, read: Any
) -> None:
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((4,))
    properties.set_shuffle()
    properties.set_shuffle()  # to which the library gives no size of an element
    with h5py.File(tmp_path / "x.h5", "w") as file:
        space = h5py.h5s.create_simple((8,))
        dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.STD_I32LE, space, properties)
        for first in (0, 4):
            rows = np.arange(first, first + 4, dtype="<i4")
            dataset.write_direct_chunk((first,), rows.tobytes(), filter_mask=0b11)
        np.testing.assert_array_equal(file["x"][...], np.arange(8))
    np.testing.assert_array_equal(read(reader_of(tmp_path / "x.h5"), range(8)), np.arange(8))


@pytest.mark.parametrize("damage", ["flipped", "cut off", "too large", "too small"])
@pytest.mark.parametrize("which", [0, 13, 29])
def test_which_one_is_damaged_is_told(
    tmp_path: Path, reader_of: ReaderOf, read: Any, read_natively: Any, damage: str, which: int
) -> None:
    path, data = tmp_path / "x.h5", np.arange(ROWS * 4).reshape(ROWS, 4).astype("i4")
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=data, chunks=(2, 4), compression="gzip", shuffle=True)
        layout = read_layout(file["x"])
    offset, size = int(layout.offsets[which]), int(layout.sizes[which])
    if damage == "cut off":
        layout.sizes[which] = 7
    elif damage == "flipped":
        with open(path, "r+b") as raw:
            raw.seek(offset + size // 2)
            raw.write(b"\xff\xff\xff")
    else:
        packed = zlib.compress(bytes(1000 if damage == "too large" else 8))
        with open(path, "r+b") as raw:
            raw.seek(0, 2)
            layout.offsets[which], layout.sizes[which] = raw.tell(), len(packed)
            raw.write(packed)
    others = [row for row in range(ROWS) if row // 2 != which]
    reader = reader_of(path, layout=layout)
    rows = read_natively(reader, np.arange(ROWS))
    assert np.flatnonzero(rows.is_made).tolist() == others
    np.testing.assert_array_equal(rows.arrays[0][others], data[others])
    with pytest.raises(DamagedError, match=rf"chunk {which} at \[{2 * which}:{2 * which + 2}, 0:4\]: gzip: "):
        read(reader, np.arange(ROWS))
    chunks = ChunkReader(layout, FileState.of(os.stat(path)))
    out = np.zeros((ROWS // 2, chunks.nbytes), np.uint8)
    with pytest.raises(ChunkError, match=rf"x\.h5, dataset /x, chunk {which} at .*: gzip: "):
        chunks.decode(np.arange(ROWS // 2), out)
    np.testing.assert_array_equal(out[:which].view("i4").reshape(-1, 4), data[: 2 * which])


def test_another_file_at_the_path_is_not_read(tmp_path: Path) -> None:
    """Its bytes at the old offsets may well be numbers, but not those of the dataset."""
    path = tmp_path / "x.h5"
    for name, value, more in (("x.h5", 1, 0), ("new.h5", 2, 5000)):
        with h5py.File(tmp_path / name, "w") as file:
            file["before"] = np.full(more, 200, "u1")
            file.create_dataset("x", data=np.full((6, 4), value, "u1"), chunks=(3, 4))
    chunks = chunks_of(path)
    assert chunks.decode_alone(0).tolist() == [1] * 12
    os.replace(tmp_path / "new.h5", path)
    with pytest.raises(HDF5Error, match=r"x\.h5 has changed since it was opened"):
        chunks.decode_alone(0)


def test_what_is_stored_larger_than_ever(tmp_path: Path, reader_of: ReaderOf, read: Any) -> None:
    """A chunk is not read into memory that is too small for it."""
    path, data = tmp_path / "x.h5", np.arange(40, dtype="i4").reshape(10, 4)
    with h5py.File(path, "w") as file:
        found = file.create_dataset("x", data=data, chunks=(2, 4), compression="gzip")
        # Blocks of deflate that hold nothing, before the one with the data.
        packed = zlib.compressobj(0)
        parts = [packed.flush(zlib.Z_FULL_FLUSH) for _ in range(3)]
        parts = [*parts, packed.compress(data[2:4].tobytes()), packed.flush()]
        head, tail = b"".join(parts)[:2], b"".join(parts)[2:]
        empty = b"\x00\x00\x00\xff\xff" * 2000
        found.id.write_direct_chunk((2, 0), head + empty + tail)
    np.testing.assert_array_equal(read(reader_of(path), np.arange(10)), data)


@pytest.mark.parametrize("size", [0, 1 << 31, (1 << 32) - 1])
@pytest.mark.parametrize("code", [2, 32008])
def test_elements_of_sizes_that_there_are_not(tmp_path: Path, code: int, size: int) -> None:
    """A file may say so: then the library reads it, or an error says what is wrong with the chunk."""
    step = FilterStep(code, (size,) if code == 2 else (0, 4, size, 0, 2), "a filter")
    if code == 2:
        assert why_not([step], has_blosc2=True) == "its filter shuffle does not have the size of an element"
        return
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=np.zeros(600, "<i4"), chunks=(600,), **hdf5plugin.Bitshuffle())
        layout = read_layout(file["x"])
    assert not why_not([step], has_blosc2=True)
    chunks = ChunkReader(layout._replace(filters=(step,)), FileState.of(os.stat(tmp_path / "x.h5")))
    with pytest.raises(ChunkError, match="bitshuffle: its blocks have an impossible size"):
        chunks.decode(np.array([0]), np.zeros((1, chunks.nbytes), np.uint8))
