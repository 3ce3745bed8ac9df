"""Samples read without the HDF5 library are those that h5py reads, bit for bit."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.hdf5.chunks import ChunkReader, FileState
from fastpipe.hdf5.layout import Layout, in_blocks, read_layout
from fastpipe.hdf5.opening import DamagedError

DTYPES: list[Any] = [
    "i1", "<i2", ">i4", "<u8", "<f2", ">f4", "<f8", "<c8", ">c16", "?", "S3", "V5",
    np.dtype([("a", "i1"), ("b", ">f8")]), np.dtype([("a", "i1"), ("b", "<f8")], align=True),
    np.dtype([("v", "<f4", (3,))]), h5py.enum_dtype({"A": 1, "B": 2}, basetype="<i2"),
]  # fmt: skip


def test_the_last_block_of_contiguous_data_ends_in_zeros(tmp_path: Path) -> None:
    """What is kept of it on disk is not what was in memory before."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.full(200_003, 7, np.int64)
    with h5py.File(tmp_path / "x.h5", "r") as file:
        layout = read_layout(file["x"])
    reader = ChunkReader(in_blocks(layout), FileState.of(os.stat(tmp_path / "x.h5")))
    last = np.full((1, reader.nbytes), 0xAB, np.uint8)
    reader.decode(np.array([1]), last)
    rows = reader.nbytes // 8
    assert last.view(np.int64)[0].tolist() == [7] * (200_003 - rows) + [0] * (2 * rows - 200_003)
    np.testing.assert_array_equal(reader.decode_alone(1), last[0])


def content(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Random bytes of few values, so that they compress; bools are 0 and 1."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).choice(
        np.array([0, 1] if dtype.kind == "b" else [0, 1, 7, 255], np.uint8), math.prod(shape) * dtype.itemsize
    )
    return raw.view(dtype).reshape(shape)


@st.composite
def files(draw: Any) -> dict[str, Any]:
    """A dataset of any kind that is read without the library, partly written perhaps."""
    rank = draw(st.integers(1, 4))
    shape = tuple(draw(st.integers(0 if axis == 0 else 1, 12 if axis == 0 else 5)) for axis in range(rank))
    chunked = draw(st.booleans()) or not math.prod(shape)
    options: dict[str, Any] = {}
    if chunked:
        options["chunks"] = tuple(draw(st.integers(1, 7)) for _ in range(rank))
        options["maxshape"] = (None,) * rank
        options["shuffle"] = draw(st.booleans())
        options["fletcher32"] = draw(st.booleans())
        options["compression"] = draw(st.sampled_from([None, "gzip", "lzf"]))
    return {
        "shape": shape, "dtype": draw(st.sampled_from(DTYPES)), "options": options,
        "userblock": draw(st.sampled_from([0, 0, 1024])), "libver": draw(st.sampled_from(["earliest", "latest"])),
        "written": draw(st.sampled_from(["all", "some", "none"])), "fill": draw(st.booleans()),
        "skips": chunked and draw(st.booleans()), "sample_dims": draw(st.integers(1, rank)),
        "seed": draw(st.integers(0, 99)), "pattern": draw(st.sampled_from(["all", "reversed", "random", "one", "none"])),
    }  # fmt: skip


def write(path: Path, case: dict[str, Any]) -> None:
    data = content(case["shape"], case["dtype"], case["seed"])
    options = dict(case["options"])
    if case["fill"]:
        options["fillvalue"] = content((1,), case["dtype"], case["seed"] + 1)[0]
    with h5py.File(path, "w", userblock_size=case["userblock"], libver=case["libver"]) as file:
        dataset = file.create_dataset("x", case["shape"], case["dtype"], **options)
        if case["written"] == "all":
            dataset[...] = data
        elif case["written"] == "some" and len(data):
            dataset[len(data) // 2] = data[len(data) // 2]
        if case["skips"] and math.prod(case["shape"]) and case["written"] == "all":
            # A chunk whose optional filters were left out, as the library does where they gain nothing.
            chunk = content(case["options"]["chunks"], case["dtype"], case["seed"] + 2)
            if not case["options"]["fletcher32"]:
                dataset.id.write_direct_chunk((0,) * len(case["shape"]), chunk.tobytes(), 0xFFFFFFFF)


def indices(pattern: str, count: int, seed: int) -> Any:
    if not count or pattern == "none":
        return []
    everything = np.arange(count)
    if pattern == "random":
        return np.random.default_rng(seed).integers(0, count, 2 * count)
    return {"all": everything, "reversed": everything[::-1], "one": everything[-1:]}[pattern]


def same_bits(found: Any, expected: Any) -> bool:
    """Equality to the last bit, also of NaNs; bytes between fields are no values."""
    if expected.dtype.names:
        return all(same_bits(found[name], expected[name]) for name in expected.dtype.names)
    return bool(found.shape == expected.shape and found.tobytes() == expected.tobytes())


@settings(max_examples=250)
@given(case=files())
def test_samples_are_those_of_h5py(
    case: dict[str, Any], reader_of: Any, read_natively: Any, read_alone: Any
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.h5"
        write(path, case)
        with h5py.File(path, "r") as file:
            expected = file["x"][...]
        dims = case["sample_dims"]
        flat = expected.reshape(math.prod(case["shape"][:dims]), *case["shape"][dims:])
        samples = indices(case["pattern"], len(flat), case["seed"])
        reader = reader_of(path, dims)
        rows = read_natively(reader, samples)
        assert rows.is_made.all()
        assert same_bits(rows.arrays[0], flat[np.asarray(samples, int)])
        assert same_bits(read_alone(reader, samples[:9]), flat[np.asarray(samples[:9], int)])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("length", [0, 1, 5, 31, 32, 1000, 70_001])
def test_shuffle_of_every_size(tmp_path: Path, size: int, length: int, reader_of: Any, read: Any) -> None:
    data = np.random.default_rng(1).integers(0, 256, (max(length, 1), size), np.uint8).view(f"V{size}")[:, 0]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=data, chunks=data.shape, shuffle=True)
    reader = reader_of(tmp_path / "x.h5")
    assert read(reader, range(len(data))).tobytes() == data.tobytes()


@settings(max_examples=120)
@given(
    runs=st.lists(
        st.tuples(st.binary(min_size=1, max_size=40), st.integers(1, 400)), min_size=1, max_size=30
    ),
    fletcher=st.booleans(),
)
def test_lzf_and_fletcher32_of_any_bytes(
    runs: list[tuple[bytes, int]], fletcher: bool, reader_of: Any, read: Any
) -> None:
    """Repetitions of short pieces: back references of every distance, overlapping and not."""
    data = np.frombuffer(b"".join(piece * count for piece, count in runs), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=data, chunks=data.shape, compression="lzf", fletcher32=fletcher)
        reader = reader_of(path)
        assert read(reader, range(len(data))).tobytes() == data.tobytes()


def test_a_checksum_in_the_order_of_old_releases(tmp_path: Path, reader_of: Any, read: Any) -> None:
    """HDF5 1.6.2 and before swapped the bytes of each half; the library still takes them."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("x", data=np.arange(99, dtype="u1"), chunks=(99,), fletcher32=True)
        _, raw = dataset.id.read_direct_chunk((0,))
        swapped = raw[:-4] + bytes(raw[-4 + place] for place in (1, 0, 3, 2))
        assert swapped != raw
        dataset.id.write_direct_chunk((0,), swapped)
    with h5py.File(tmp_path / "x.h5", "r") as file:
        np.testing.assert_array_equal(file["x"][...], np.arange(99))
    reader = reader_of(tmp_path / "x.h5")
    np.testing.assert_array_equal(read(reader, [98, 0]), [98, 0])


def test_compact_data(tmp_path: Path, reader_of: Any, read: Any, read_alone: Any) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((5, 3))
        h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, properties)
        file["x"][...] = np.arange(15).reshape(5, 3)
    reader = reader_of(tmp_path / "x.h5")
    np.testing.assert_array_equal(read(reader, [4, 0]), [[12, 13, 14], [0, 1, 2]])
    np.testing.assert_array_equal(read_alone(reader, [4, 0]), [[12, 13, 14], [0, 1, 2]])


@pytest.mark.parametrize("shape", [(3, 0), (2, 0, 4), (0, 5), (0,)])
@pytest.mark.parametrize("kind", ["contiguous", "chunked", "compact"])
def test_samples_without_elements(
    tmp_path: Path, kind: str, shape: tuple[int, ...], reader_of: Any, read: Any, read_alone: Any
) -> None:
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if kind == "chunked":
        properties.set_chunk(tuple(max(side, 1) for side in shape))
    else:
        properties.set_layout(h5py.h5d.CONTIGUOUS if kind == "contiguous" else h5py.h5d.COMPACT)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple(shape), properties)
    reader = reader_of(tmp_path / "x.h5")
    assert read(reader, range(shape[0])).shape == shape
    assert read_alone(reader, range(shape[0])).shape == shape


# ---- what only the library reads ----------------------------------------------------------------


def _why(tmp_path: Path, make: Any, **options: Any) -> str:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        make(file)
    with h5py.File(tmp_path / "x.h5", "r", **options) as file:
        layout = read_layout(file["x"])
    assert layout.kind == "h5py"
    assert len(layout.offsets) == 0
    return layout.why


def test_datasets_that_only_the_library_reads_are_told(tmp_path: Path) -> None:
    def virtual(file: Any) -> None:
        layout = h5py.VirtualLayout((4,), "f4")
        layout[:] = h5py.VirtualSource("other.h5", "y", (4,))
        file.create_virtual_dataset("x", layout)

    def odd_precision(file: Any) -> None:
        kind = h5py.h5t.STD_I32LE.copy()
        kind.set_precision(20)
        h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((5,)))

    def external(file: Any) -> None:
        file.create_dataset("x", (4,), "f4", external=[("raw.bin", 0, h5py.h5f.UNLIMITED)])

    assert "virtual" in _why(tmp_path, virtual)
    assert "external files" in _why(tmp_path, external)
    assert "another form" in _why(tmp_path, odd_precision)
    assert "no fixed size" in _why(tmp_path, lambda file: file.create_dataset("x", (4,), h5py.string_dtype()))
    arrays = np.dtype(("f4", (3,)))
    assert "arrays" in _why(tmp_path, lambda file: file.create_dataset("x", (4,), arrays))
    assert "scale-offset" in _why(tmp_path, lambda file: file.create_dataset("x", (4,), "i4", scaleoffset=4))
    assert "driver 'core'" in _why(tmp_path, lambda file: file.create_dataset("x", (4,)), driver="core")


# ---- damage -------------------------------------------------------------------------------------


DATA = np.random.default_rng(0).integers(0, 4, (20, 30, 40), np.uint8).astype("<f4")


def _damaged(tmp_path: Path, change: Any, **options: Any) -> tuple[Path, Layout]:
    """A file whose second chunk is changed."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=DATA, chunks=(8, 30, 40), **options)
    with h5py.File(path, "r") as file:
        layout = read_layout(file["x"])
    offset, size = int(layout.offsets[1]), int(layout.sizes[1])
    raw = path.read_bytes()
    path.write_bytes(raw[:offset] + change(raw[offset : offset + size]) + raw[offset + size :])
    return path, layout


def _flipped(raw: bytes) -> bytes:
    middle = len(raw) // 2
    return raw[:middle] + bytes([raw[middle] ^ 0x55]) + raw[middle + 1 :]


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ({"fletcher32": True}, _flipped, "fletcher32: the checksum is not that of the data"),
        ({"compression": "lzf", "fletcher32": True}, _flipped, "fletcher32"),
        ({"compression": "gzip"}, lambda raw: b"\0" * len(raw), "gzip: Error -3"),
        ({"compression": "gzip"}, lambda raw: raw[:-200] + b"\0" * 200, "gzip: "),
        ({"compression": "lzf"}, lambda raw: b"\xff" * len(raw), "lzf: damaged data"),
        ({"compression": "lzf"}, lambda raw: b"\x00" * len(raw), "lzf: "),
    ],
)
def test_a_damaged_chunk_is_named(
    tmp_path: Path, options: Any, change: Any, reason: str, reader_of: Any, read: Any
) -> None:
    path, layout = _damaged(tmp_path, change, **options)
    reader = reader_of(path, layout=layout)
    with pytest.raises(DamagedError, match=rf"x\.h5, dataset /x, chunk 1 at \[8:16, 0:30, 0:40\]: {reason}"):
        read(reader, [9])
    np.testing.assert_array_equal(read(reader, [0, 19]), DATA[[0, 19]])


@pytest.mark.parametrize("more", [1, 1 << 20])
def test_a_chunk_that_inflates_beyond_its_size(tmp_path: Path, more: int, reader_of: Any, read: Any) -> None:
    import zlib

    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("x", (64,), "u1", chunks=(64,), compression="gzip")
        dataset.id.write_direct_chunk((0,), zlib.compress(bytes(64 + more)))
    with pytest.raises(DamagedError, match="more than the 64 bytes"):
        read(reader_of(tmp_path / "x.h5"), [0])


def test_a_chunk_that_is_too_short(tmp_path: Path, reader_of: Any, read: Any) -> None:
    import zlib

    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("x", (64,), "u1", chunks=(64,), compression="gzip")
        dataset.id.write_direct_chunk((0,), zlib.compress(bytes(63)))
    with pytest.raises(DamagedError, match="63 bytes"):
        read(reader_of(tmp_path / "x.h5"), [0])


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"chunks": None}])
def test_a_file_that_is_cut_off(tmp_path: Path, options: Any, reader_of: Any, read: Any) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=DATA, **{"chunks": (8, 30, 40), **options})
    with h5py.File(path, "r") as file:
        layout = read_layout(file["x"])
    path.write_bytes(path.read_bytes()[: int(layout.offsets[-1]) + 100])
    reader = reader_of(path, layout=layout)
    with pytest.raises(DamagedError, match=r"x\.h5, dataset /x.*: the file ends within it"):
        read(reader, [0, 19])
