"""Small chunks that are decoded many at a time are those that are decoded one by one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from fastpipe.read.hdf5.chunks import ChunkReader
from fastpipe.read.hdf5.layout import read_layout
from fastpipe.read.hdf5.reader import SampleReader

from fastpipe.read.chunks.errors import ChunkError
from fastpipe.read.hdf5 import many, plugins

ReaderOf = Callable[..., AbstractContextManager[SampleReader]]
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


@pytest.fixture
def count_many(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many chunks each call has decoded."""
    counts: list[int] = []
    call = many.ManyDecoder.__call__

    def counted(self: Any, *arguments: Any) -> tuple[int, int]:
        count, reading = call(self, *arguments)
        counts.append(count)
        return count, reading

    monkeypatch.setattr(many.ManyDecoder, "__call__", counted)
    return counts


@pytest.mark.parametrize("dtype", ["u1", "<i2", ">f4", "<f8", "S3", "V5"])
@pytest.mark.parametrize("options", OPTIONS)
def test_they_are_the_same(
    tmp_path: Path, reader_of: ReaderOf, read: Any, count_many: list[int], options: str, dtype: str
) -> None:
    raw = np.random.default_rng(0).choice(
        np.array([0, 1, 7, 255], np.uint8), ROWS * 7 * np.dtype(dtype).itemsize
    )
    data = raw.view(dtype).reshape(ROWS, 7)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=data, chunks=(3, 5), **OPTIONS[options])
        # The filter, where it would have made more of a chunk.
        is_left_out = read_layout(file["x"]).masks.all()
    with reader_of(tmp_path / "x.h5") as reader:
        np.testing.assert_array_equal(read(reader, dtype, np.arange(ROWS)), data)
        np.testing.assert_array_equal(read(reader, dtype, np.arange(ROWS)[::-3]), data[::-3])
    is_plain = np.dtype(dtype).itemsize == 1 and options == "another order"  # in which no order is another
    assert bool(sum(count_many)) is not (is_plain or is_left_out)


def test_chunks_without_some_of_the_filters(
    tmp_path: Path, reader_of: ReaderOf, read: Any, count_many: list[int]
) -> None:
    data = np.random.default_rng(0).integers(0, 9, (ROWS, 4)).astype("i4")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        found = file.create_dataset("x", data=data, chunks=(2, 4), compression="gzip", shuffle=True)
        for first in range(0, ROWS, 8):
            found.id.write_direct_chunk((first, 0), data[first : first + 2].tobytes(), filter_mask=3)
    with reader_of(tmp_path / "x.h5") as reader:
        np.testing.assert_array_equal(read(reader, "i4", np.arange(ROWS)), data)
    assert sum(count_many) == ROWS // 2 - len(range(0, ROWS, 8))


def test_large_ones(tmp_path: Path, reader_of: ReaderOf, read: Any, count_many: list[int]) -> None:
    """As many in a task as leave each thread some tasks."""
    data = np.random.default_rng(0).integers(0, 9, (ROWS, 20_000)).astype("i4")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=data, chunks=(1, 20_000), compression="lzf", shuffle=True)
    with reader_of(tmp_path / "x.h5") as reader:
        np.testing.assert_array_equal(read(reader, "i4", np.arange(ROWS)[::-1]), data[::-1])
        assert max(count_many) > 1
        assert len(count_many) >= 4


def test_nothing_to_undo(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((4, 4)), chunks=(1, 4))
        assert many.many_decoder(read_layout(file["x"]).filters, 32) is None


@pytest.mark.parametrize("damage", ["flipped", "cut off", "too large", "too small"])
@pytest.mark.parametrize("which", [0, 13, 29])
def test_which_one_is_damaged_is_told(
    tmp_path: Path, reader_of: ReaderOf, read: Any, damage: str, which: int
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
        import zlib

        packed = zlib.compress(bytes(1000 if damage == "too large" else 8))
        with open(path, "r+b") as raw:
            raw.seek(0, 2)
            layout.offsets[which], layout.sizes[which] = raw.tell(), len(packed)
            raw.write(packed)
    others = [row for row in range(ROWS) if row // 2 != which]
    with reader_of(path, 1, layout) as reader:
        with pytest.raises(ChunkError, match=rf"chunk {which} at \[{2 * which}:{2 * which + 2}, 0:4\]"):
            read(reader, "i4", np.arange(ROWS))
        np.testing.assert_array_equal(read(reader, "i4", others), data[others])


def test_what_is_stored_larger_than_ever(tmp_path: Path, reader_of: ReaderOf, read: Any) -> None:
    """A chunk is not read into memory that is too small for it."""
    import zlib

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
    with reader_of(path) as reader:
        np.testing.assert_array_equal(read(reader, "i4", np.arange(10)), data)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("zlib_decompress", {"compression": "gzip"}),
        ("zstd_decompress", dict(hdf5plugin.Zstd())),
        ("blosc_decompress", dict(hdf5plugin.Blosc())),
    ],
)
def test_without_a_library_they_are_decoded_one_by_one(
    tmp_path: Path, reader_of: ReaderOf, read: Any, monkeypatch: pytest.MonkeyPatch, function: str,
    options: dict[str, Any],
) -> None:  # fmt: skip
    for module in (many, plugins):  # as where a package does not show its library's functions
        monkeypatch.setattr(module, function, lambda: 0, raising=False)
    data = np.arange(ROWS)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=data, chunks=(2,), **options)
    alone: list[int] = []
    one = ChunkReader._decode_alone

    def counted(self: ChunkReader, made: Any, number: int) -> None:
        alone.append(number)
        one(self, made, number)

    monkeypatch.setattr(ChunkReader, "_decode_alone", counted)
    with reader_of(tmp_path / "x.h5") as reader:
        np.testing.assert_array_equal(read(reader, data.dtype, np.arange(ROWS)), data)
    assert sorted(alone) == list(range(ROWS // 2))
