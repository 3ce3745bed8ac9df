"""Rows of random datasets: the native core reads what h5py reads, bit for bit, in all of its ways; and so does
the slow way, which reads one sample at a time."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t, h5z
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fastpipe.core.shared_chunks import UnitFile, private_units
from fastpipe.hdf5.cache import chunk_nbytes
from fastpipe.hdf5.chunks import ChunkReader, FileState
from fastpipe.hdf5.filters import BLOSC2
from fastpipe.hdf5.layout import Layout, read_layout

DTYPES: list[Any] = [
    "u1", "<i2", ">i4", "<u8", "<f2", ">f4", "<f8", "<c8", ">c16", "?", "S1", "S7", "V5",
    np.dtype([("a", "i1"), ("b", ">f8"), ("c", "S3")]), np.dtype([("a", "i1"), ("b", "<f8")], align=True),
    np.dtype([("v", "<f4", (3,))]), h5py.enum_dtype({"A": 1, "B": 2}, basetype="<i2"),
]  # fmt: skip

COMPRESSORS: list[tuple[int, tuple[int, ...]] | None] = [
    None,
    (h5z.FILTER_DEFLATE, (1,)),
    (h5z.FILTER_LZF, ()),
    *(
        (int(one.filter_id), tuple(map(int, one.filter_options)))
        for one in (
            hdf5plugin.LZ4(), hdf5plugin.LZ4(nbytes=24), hdf5plugin.Zstd(),
            *(
                hdf5plugin.Blosc(cname=name, shuffle=shuffle)
                for name in ("blosclz", "lz4", "lz4hc", "zlib", "zstd")
                for shuffle in (0, 1, 2)
            ),
            hdf5plugin.Bitshuffle(cname="none"), hdf5plugin.Bitshuffle(cname="none", nelems=8),
            hdf5plugin.Bitshuffle(cname="lz4"), hdf5plugin.Bitshuffle(cname="lz4", nelems=16),
            hdf5plugin.Bitshuffle(cname="zstd"),
            hdf5plugin.Blosc2(cname="zstd"), hdf5plugin.Blosc2(cname="lz4", filters=hdf5plugin.Blosc2.BITSHUFFLE),
        )
    ),
]  # fmt: skip
MOST_ELEMENTS = 20_000


@st.composite
def datasets(draw: Any) -> dict[str, Any]:
    rank = draw(st.integers(1, 4))
    sides = st.integers(0, 40) if rank < 3 else st.one_of(st.integers(0, 6), st.integers(0, 40))
    shape = tuple(draw(sides) for _ in range(rank))
    while math.prod(max(size, 1) for size in shape) > MOST_ELEMENTS:
        shape = tuple(size // 2 for size in shape)
    # Whole sides are as common as others, as runs join where a chunk has all of a dimension.
    chunk = tuple(
        draw(st.one_of(st.just(max(size, 1)), st.integers(1, max(size, 1)), st.integers(1, 9)))
        for size in shape
    )
    order = draw(st.permutations(["shuffle", "fletcher32", "compressor"]))
    return {
        "shape": shape,
        "chunk": chunk,
        "dtype": draw(st.sampled_from(DTYPES)),
        "filters": [name for name in order if draw(st.booleans())],
        "compressor": draw(st.sampled_from(COMPRESSORS)),
        "kind": draw(st.sampled_from(["chunked"] * 5 + ["contiguous", "compact"])),
        "fill": draw(st.booleans()),
        "written": draw(st.sampled_from(["all", "all", "some", "none"])),
        "masked": draw(st.booleans()),
        "libver": draw(st.sampled_from(["earliest", "latest"])),
        "sample_dims": draw(st.integers(1, rank)),
        "values": draw(st.sampled_from(["noise", "few", "zeros"])),
        "seed": draw(st.integers(0, 1 << 20)),
    }


def content(shape: tuple[int, ...], dtype: Any, values: str, random: Any) -> Any:
    dtype, nbytes = np.dtype(dtype), math.prod(shape) * np.dtype(dtype).itemsize
    if dtype.kind == "b":
        raw = random.integers(0, 2, nbytes, np.uint8)
    elif values == "noise":
        raw = random.integers(0, 256, nbytes, np.uint8)
    else:
        raw = random.choice(np.array([0, 1, 7, 255] if values == "few" else [0], np.uint8), nbytes)
    return raw.view(dtype).reshape(shape)


def create(file: Any, case: dict[str, Any], random: Any, properties: Any = None) -> Any:
    """The dataset, in which nothing is written."""
    dtype = np.dtype(case["dtype"])
    is_new = properties is None
    properties = properties or h5p.create(h5p.DATASET_CREATE)
    if case["kind"] == "chunked":
        if is_new:
            properties.set_chunk(case["chunk"])
        for name in case["filters"]:
            if name == "shuffle":
                properties.set_shuffle()
            elif name == "fletcher32":
                properties.set_fletcher32()
            elif case["compressor"] is not None:
                code, options = case["compressor"]
                properties.set_filter(code, h5z.FLAG_OPTIONAL, options)
    elif case["kind"] == "compact" and math.prod(case["shape"]) * dtype.itemsize < 1 << 16:
        properties.set_layout(h5d.COMPACT)
    if case["fill"]:
        properties.set_fill_value(content((), dtype, "few", random))
    most = case["shape"]
    if case["kind"] == "chunked":
        most = tuple(map(max, case["shape"], case["chunk"]))
    space = h5s.create_simple(case["shape"], most)
    h5d.create(file.id, b"x", h5t.py_create(dtype, logical=True), space, properties)
    return file["x"]


def write(path: Path, case: dict[str, Any]) -> None:
    random = np.random.default_rng(case["seed"])
    with h5py.File(path, "w", libver=case["libver"]) as file:
        dataset = create(file, case, random)
        if not dataset.size or case["written"] == "none":
            return
        data = content(case["shape"], case["dtype"], case["values"], random)
        if case["written"] == "all":
            dataset[...] = data
        else:
            box = tuple(slice(int(random.integers(size)), None) for size in case["shape"])
            dataset[box] = data[box]
        count = dataset.id.get_create_plist().get_nfilters()
        if case["masked"] and case["kind"] == "chunked" and count:
            leave_out(dataset, case, count, random)


def leave_out(dataset: Any, case: dict[str, Any], count: int, random: Any) -> None:
    """Write some chunks without all of the filters, and one with the others as they are."""
    grid = tuple(-(-size // side) for size, side in zip(case["shape"], case["chunk"], strict=True))
    for _ in range(3):
        place = tuple(
            int(random.integers(size)) * side for size, side in zip(grid, case["chunk"], strict=True)
        )
        raw = content(case["chunk"], case["dtype"], case["values"], random).tobytes()
        dataset.id.write_direct_chunk(place, raw, filter_mask=(1 << count) - 1)


def same_bits(found: Any, expected: Any) -> bool:
    """Equality to the last bit, also of NaNs; bytes between fields are no values."""
    if expected.dtype.names:
        return all(same_bits(found[name], expected[name]) for name in expected.dtype.names)
    return bool(found.shape == expected.shape and found.tobytes() == expected.tobytes())


def check_all_ways(
    path: Path, layout: Layout, expected: Any, sample_dims: int, samples: Any, made: dict[str, Any]
) -> None:
    """Compare what each way to read makes of samples.

    Args:
        path: the file.
        layout: of the dataset.
        expected: what h5py reads.
        sample_dims: dimensions that count samples.
        samples: int64 (N,).
        made: the fixtures ``reader_of``, ``read_natively`` and ``read_alone``.
    """
    shape = layout.shape
    flat = expected.reshape(math.prod(shape[:sample_dims]), *shape[sample_dims:])
    chunks, nbytes = len(layout.offsets), chunk_nbytes(layout)
    file = UnitFile(chunks, 3, nbytes) if chunks else None
    memories = {
        "none": None,
        "much": private_units(chunks, chunks, nbytes) if chunks else None,
        "little": private_units(chunks, 1, nbytes) if chunks else None,
        "shared": file.opened() if file is not None else None,
    }
    for name, memory in memories.items():
        reader = made["reader_of"](
            path, sample_dims, layout, memory=lambda *_, memory=memory: (memory, 0), threads=2, turn=0.4
        )
        for threads in (0, 2):
            parts = [samples] if name == "none" else np.array_split(samples, 3)  # some of a chunk's at a time
            for part in parts:
                rows = made["read_natively"](reader, part, 0x5A + threads, threads)
                assert rows.is_made.all(), (name, threads, rows.statuses[~rows.is_made][:1])
                assert same_bits(rows.arrays[0], flat[part]), (name, threads)
    few = samples[:6]
    assert same_bits(made["read_alone"](made["reader_of"](path, sample_dims, layout), few), flat[few])
    if file is not None:
        del reader, memory, memories
        file.close()


def check_chunks(path: Path, layout: Layout, expected: Any) -> None:
    """Compare whole chunks, by all at once and by one after the other, as far as they are in the dataset."""
    reader = ChunkReader(layout, FileState.of(path.stat()))
    numbers = np.flatnonzero(layout.offsets >= 0)
    if layout.kind != "chunked" or not len(numbers):
        return
    out = np.full((len(numbers), reader.nbytes), 0x77, np.uint8)
    reader.decode(numbers, out)
    grid = tuple(-(-size // side) for size, side in zip(layout.shape, layout.chunk, strict=True))
    for number, decoded in zip(numbers.tolist(), out, strict=True):
        assert reader.decode_alone(number).tobytes() == decoded.tobytes()
        corner = [
            int(at) * side for at, side in zip(np.unravel_index(number, grid), layout.chunk, strict=True)
        ]
        part = expected[tuple(slice(at, at + side) for at, side in zip(corner, layout.chunk, strict=True))]
        inside = decoded.view(layout.dtype).reshape(layout.chunk)[tuple(map(slice, part.shape))]
        assert same_bits(inside, part)


def random_samples(count: int, seed: int) -> Any:
    """In any order, repeated, neighbours and all of them."""
    random = np.random.default_rng(seed)
    if not count:
        return np.zeros(0, np.int64)
    return [
        random.integers(0, count, min(2 * count, 60)),
        random.permutation(count)[:80],
        np.arange(count)[:80],
        np.arange(count)[::-1][:80].copy(),
        np.repeat(random.integers(0, count, 4), 3),
    ][seed % 5].astype(np.int64)


def reasons(case: dict[str, Any]) -> tuple[str, ...]:
    """Why the library may read a dataset: all others are to be read without it."""
    found = ["it is compressed twice"] if "fletcher32" in case["filters"] else []
    return (*found, "the library does not say for certain which chunk is where")


def check(case: dict[str, Any], made: dict[str, Any]) -> str:
    """Compare, and say how the dataset is read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.h5"
        write(path, case)
        with h5py.File(path, "r") as file:
            layout = read_layout(file["x"])
            try:
                expected = file["x"][...]
            except OSError:
                # The plugin has made a frame without the checksum that was appended before.
                assert [step.code for step in layout.filters if step.code in (3, BLOSC2)] == [3, BLOSC2]
                return "h5py cannot read what it wrote"
        if layout.kind == "h5py":
            assert layout.why in reasons(case), layout.why
            return layout.why
        dims = case["sample_dims"]
        samples = random_samples(math.prod(case["shape"][:dims]), case["seed"])
        check_all_ways(path, layout, expected, dims, samples, made)
        check_chunks(path, layout, expected)
        return layout.kind


@pytest.fixture(scope="session")
def made(reader_of: Any, read_natively: Any, read_alone: Any) -> dict[str, Any]:
    return {"reader_of": reader_of, "read_natively": read_natively, "read_alone": read_alone}


@settings(max_examples=150)
@given(case=datasets())
def test_rows_are_those_of_h5py(case: dict[str, Any], made: dict[str, Any]) -> None:
    event(check(case, made))


@pytest.mark.slow
@settings(max_examples=20_000, derandomize=False)
@given(case=datasets())
def test_rows_of_many_datasets_are_those_of_h5py(case: dict[str, Any], made: dict[str, Any]) -> None:
    check(case, made)


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(40))
def test_rows_are_those_of_h5py_with_all_compressors(seed: int, made: dict[str, Any]) -> None:
    """Each in a chunk of many blocks, and beside other filters."""
    random = np.random.default_rng(seed)
    for compressor in COMPRESSORS:
        rows, side = int(random.integers(3, 200)), int(random.integers(1, 200))
        filters = [name for name in ("shuffle", "fletcher32") if random.integers(3) == 0]
        filters.insert(int(random.integers(len(filters) + 1)), "compressor")
        check(
            {
                "shape": (rows, side), "chunk": (int(random.integers(1, rows + 1)), int(random.integers(1, side + 1))),
                "dtype": DTYPES[int(random.integers(len(DTYPES)))], "filters": filters, "compressor": compressor,
                "kind": "chunked", "fill": False, "written": "all", "masked": False, "libver": "latest",
                "sample_dims": 1, "values": ["noise", "few", "zeros"][int(random.integers(3))], "seed": seed,
            },
            made,
        )  # fmt: skip


@pytest.mark.parametrize("filters", [["shuffle"], ["compressor"], ["shuffle", "compressor", "fletcher32"]])
@pytest.mark.parametrize("form", [("1", (4,), (30,)), ("2", (3, 2), (10, 7)), ("3", (2, 3, 2), (5, 7, 5))])
def test_edges_that_are_stored_without_filters(
    tmp_path: Path,
    properties_of: Any,
    form: tuple[str, tuple[int, ...], tuple[int, ...]],
    filters: list[str],
    made: dict[str, Any],
) -> None:
    rank, chunk, shape = form
    for size in (1, 2, 4, 8):
        path, random = tmp_path / f"{size}.h5", np.random.default_rng(size)
        case = {
            "shape": shape, "chunk": chunk, "dtype": f"<u{size}", "filters": filters, "fill": True,
            "compressor": COMPRESSORS[1], "kind": "chunked",
        }  # fmt: skip
        with h5py.File(path, "w", libver="latest") as file:
            dataset = create(file, case, random, properties_of(f"edges {rank} {size}"))
            dataset[shape[0] // 2 :] = content(shape, f"<u{size}", "few", random)[shape[0] // 2 :]
        with h5py.File(path, "r") as file:
            layout, expected = read_layout(file["x"]), file["x"][...]
        assert (layout.masks == 0xFFFFFFFF).any()
        check_all_ways(path, layout, expected, 1, random_samples(shape[0], size), made)
        check_chunks(path, layout, expected)
