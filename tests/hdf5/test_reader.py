"""Rows of random datasets: the native core reads what h5py reads, bit for bit, in all of its ways."""

from __future__ import annotations

import math
import tempfile
import zlib
from pathlib import Path
from typing import Any

import h5py
import hdf5_kit
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t, h5z
from hdf5_kit import COMPRESSORS, UNCERTAIN, layout_of, read, read_natively, reader_of, stored
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fastpipe.hdf5.chunks import ChunkReader, FileState
from fastpipe.hdf5.filters import BLOSC2
from fastpipe.hdf5.layout import in_blocks, read_layout

DTYPES: list[Any] = [
    "u1", "<i2", ">i4", "<u8", "<f2", ">f4", "<f8", "<c8", ">c16", "?", "S1", "S7", "V5",
    np.dtype([("a", "i1"), ("b", ">f8"), ("c", "S3")]), np.dtype([("a", "i1"), ("b", "<f8")], align=True),
    np.dtype([("v", "<f4", (3,))]), h5py.enum_dtype({"A": 1, "B": 2}, basetype="<i2"),
]  # fmt: skip


@st.composite
def datasets(draw: Any) -> dict[str, Any]:
    rank = draw(st.integers(1, 4))
    sides = st.integers(0, 40) if rank < 3 else st.one_of(st.integers(0, 6), st.integers(0, 40))
    shape = tuple(draw(sides) for _ in range(rank))
    while math.prod(max(size, 1) for size in shape) > 20_000:
        shape = tuple(size // 2 for size in shape)
    # Whole sides are as common as others, as runs join where a chunk has all of a dimension.
    most = [max(size, 1) for size in shape]
    chunk = tuple(draw(st.one_of(st.just(size), st.integers(1, size), st.integers(1, 9))) for size in most)
    order = draw(st.permutations(["shuffle", "fletcher32", "compressor"]))
    return {
        "shape": shape, "chunk": chunk, "dtype": draw(st.sampled_from(DTYPES)),
        "filters": [name for name in order if draw(st.booleans())],
        "compressor": draw(st.sampled_from(COMPRESSORS)),
        "kind": draw(st.sampled_from(["chunked"] * 5 + ["contiguous", "compact"])),
        "fill": draw(st.booleans()), "written": draw(st.sampled_from(["all", "all", "some", "none"])),
        "masked": draw(st.booleans()), "libver": draw(st.sampled_from(["earliest", "latest"])),
        "userblock": draw(st.sampled_from([0, 0, 1024])), "grows": draw(st.booleans()),
        "sample_dims": draw(st.integers(1, rank)), "values": draw(st.sampled_from(["noise", "few", "zeros"])),
        "seed": draw(st.integers(0, 1 << 20)),
    }  # fmt: skip


def random_samples(count: int, seed: int) -> Any:
    """In any order, repeated, neighbours and all of them."""
    random = np.random.default_rng(seed)
    if not count:
        return np.zeros(0, np.int64)
    return [
        random.integers(0, count, min(2 * count, 60)), random.permutation(count)[:80], np.arange(count)[:80],
        np.arange(count)[::-1][:80].copy(), np.repeat(random.integers(0, count, 4), 3),
    ][seed % 5].astype(np.int64)  # fmt: skip


def check(case: dict[str, Any]) -> str:
    """Compares, and returns how the dataset is read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.h5"
        hdf5_kit.write(path, case)
        with h5py.File(path, "r") as file:
            layout = read_layout(file["x"])
            try:
                expected = file["x"][...]
            except OSError:
                # The plugin has made a frame without the checksum that was appended before.
                assert [step.code for step in layout.filters if step.code in (3, BLOSC2)] == [3, BLOSC2]
                return "h5py cannot read what it wrote"
        if layout.kind == "h5py":  # all others are to be read without it
            assert "fletcher32" in case["filters"] or "which chunk is where" in layout.why
            assert layout.why in ("it is compressed twice", UNCERTAIN)
            return layout.why
        dims = case["sample_dims"]
        samples = random_samples(math.prod(case["shape"][:dims]), case["seed"])
        hdf5_kit.check_all_ways(path, layout, expected, dims, samples)
        hdf5_kit.check_chunks(path, layout, expected)
        return layout.kind


@settings(max_examples=110)
@given(case=datasets())
def test_rows_are_those_of_h5py(case: dict[str, Any]) -> None:
    event(check(case))


@pytest.mark.slow
@settings(max_examples=20_000, derandomize=False)
@given(case=datasets())
def test_rows_of_many_datasets_are_those_of_h5py(case: dict[str, Any]) -> None:
    check(case)


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(40))
def test_rows_are_those_of_h5py_with_all_compressors(seed: int) -> None:
    """Each in a chunk of many blocks, and beside other filters."""
    random = np.random.default_rng(seed)
    for compressor in COMPRESSORS:
        rows, side, *chunk = (int(random.integers(1, most)) for most in (200, 200, 150, 150))
        filters = [name for name in ("shuffle", "fletcher32") if random.integers(3) == 0]
        filters.insert(int(random.integers(len(filters) + 1)), "compressor")
        case = {
            "shape": (rows, side), "chunk": (min(chunk[0], rows), min(chunk[1], side)), "filters": filters,
            "dtype": DTYPES[int(random.integers(len(DTYPES)))], "compressor": compressor, "kind": "chunked",
            "fill": False, "written": "all", "masked": False, "libver": "latest", "userblock": 0, "grows": False,
            "sample_dims": 1, "seed": seed, "values": ["noise", "few", "zeros"][int(random.integers(3))],
        }  # fmt: skip
        check(case)


def test_the_last_block_of_contiguous_data_ends_in_zeros(tmp_path: Path) -> None:
    """Else what is kept of it on disk would be what was in memory before."""
    path = stored(tmp_path / "x.h5", np.full(200_003, 7, np.int64))
    reader = ChunkReader(in_blocks(layout_of(path)), FileState.of(path.stat()))
    last = np.full((1, reader.nbytes), 0xAB, np.uint8)
    reader.decode(np.array([1]), last)
    rows = reader.nbytes // 8
    assert last.view(np.int64)[0].tolist() == [7] * (200_003 - rows) + [0] * (2 * rows - 200_003)
    np.testing.assert_array_equal(reader.decode_alone(1), last[0])


def test_a_checksum_in_the_byte_order_of_old_releases_is_right(tmp_path: Path) -> None:
    """HDF5 1.6.2 and before swapped the bytes of each half; the library still takes them."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("x", data=np.arange(99, dtype="u1"), chunks=(99,), fletcher32=True)
        _, raw = dataset.id.read_direct_chunk((0,))
        swapped = raw[:-4] + bytes(raw[-4 + place] for place in (1, 0, 3, 2))
        assert swapped != raw
        dataset.id.write_direct_chunk((0,), swapped)
        np.testing.assert_array_equal(dataset[...], np.arange(99))
    np.testing.assert_array_equal(read(reader_of(tmp_path / "x.h5"), [98, 0]), [98, 0])


def test_chunks_without_some_of_the_filters_are_read(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 9, (60, 4)).astype("i4")
    options = {"compression": "gzip", "shuffle": True, "fletcher32": True}
    with h5py.File(tmp_path / "x.h5", "w") as file:
        found = file.create_dataset("x", data=data, chunks=(2, 4), **options)
        for first in range(0, 60, 8):
            found.id.write_direct_chunk((first, 0), data[first : first + 2].tobytes(), filter_mask=0b111)
        for first in range(2, 60, 8):
            packed = zlib.compress(data[first : first + 2].tobytes())
            found.id.write_direct_chunk((first, 0), packed, filter_mask=0b101)
    rows = read_natively(reader_of(tmp_path / "x.h5"), np.arange(60))
    assert rows.is_made.all()
    np.testing.assert_array_equal(rows.arrays[0], data)
    np.testing.assert_array_equal(hdf5_kit.read_alone(reader_of(tmp_path / "x.h5"), np.arange(60)), data)


@pytest.mark.parametrize("code", [None, 32002], ids=["shuffle without a size", "MAFISC, which is unknown"])
def test_a_filter_that_cannot_be_undone_but_was_left_out_of_all_chunks_is_passed_over(
    tmp_path: Path, code: int | None
) -> None:
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_chunk((4,))
    properties.set_shuffle()
    if code is None:
        properties.set_shuffle()  # to which the library gives no size of an element
    else:
        properties.set_filter(code, h5z.FLAG_OPTIONAL, (0, 1))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = h5d.create(file.id, b"x", h5t.STD_I32LE, h5s.create_simple((8,)), properties)
        for first in (0, 4):
            rows = np.arange(first, first + 4, dtype="<i4")
            dataset.write_direct_chunk((first,), rows.tobytes(), filter_mask=0b11)
        np.testing.assert_array_equal(file["x"][...], np.arange(8))
    np.testing.assert_array_equal(read(reader_of(tmp_path / "x.h5"), range(8)), np.arange(8))


def test_a_chunk_that_is_stored_larger_than_ever_is_read(tmp_path: Path) -> None:
    """It is not read into memory that is too small for it."""
    path, data = tmp_path / "x.h5", np.arange(40, dtype="i4").reshape(10, 4)
    with h5py.File(path, "w") as file:
        found = file.create_dataset("x", data=data, chunks=(2, 4), compression="gzip")
        # Blocks of deflate that hold nothing, before the one with the data.
        packed = zlib.compress(data[2:4].tobytes(), 0)
        found.id.write_direct_chunk((2, 0), packed[:2] + b"\x00\x00\x00\xff\xff" * 2000 + packed[2:])
    np.testing.assert_array_equal(read(reader_of(path), np.arange(10)), data)
