"""Filters of hdf5plugin, undone without it, give what the library makes with it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.core.reads import ChunkError
from fastpipe.hdf5 import layout as layout_module
from fastpipe.hdf5.filters import BLOSC2, FilterStep, decode_chunk
from fastpipe.hdf5.layout import read_layout
from fastpipe.hdf5.library import has_blosc2
from fastpipe.hdf5.opening import DamagedError

FILTERS: dict[str, Callable[[], Any]] = {
    "blosc lz4": lambda: hdf5plugin.Blosc(cname="lz4", shuffle=1),
    "blosc zstd, bits": lambda: hdf5plugin.Blosc(cname="zstd", shuffle=2),
    "blosc zlib, as is": lambda: hdf5plugin.Blosc(cname="zlib", shuffle=0),
    "lz4": hdf5plugin.LZ4,
    "lz4, small blocks": lambda: hdf5plugin.LZ4(nbytes=100),
    "zstd": hdf5plugin.Zstd,
    "bitshuffle": lambda: hdf5plugin.Bitshuffle(cname="none"),
    "bitshuffle lz4": hdf5plugin.Bitshuffle,
    "bitshuffle lz4, small blocks": lambda: hdf5plugin.Bitshuffle(nelems=8),
    "blosc2": hdf5plugin.Blosc2,
    "blosc2 zstd, bits": lambda: hdf5plugin.Blosc2(cname="zstd", filters=hdf5plugin.Blosc2.BITSHUFFLE),
    "bitshuffle zstd": lambda: hdf5plugin.Bitshuffle(cname="zstd"),
}


def _content(count: int, size: int, kind: str, seed: int) -> Any:
    rng, nbytes = np.random.default_rng(seed), count * size
    raw = {
        "noise": lambda: rng.integers(0, 256, nbytes, np.uint8),
        "zeros": lambda: np.zeros(nbytes, np.uint8),
        "few": lambda: rng.choice(np.array([0, 1, 200], np.uint8), nbytes),
        "repeated": lambda: np.resize(rng.integers(0, 256, 1 + seed % 40, np.uint8), nbytes),
    }[kind]()
    return raw.view(f"V{size}") if size not in (1, 2, 4, 8) else raw.view(f"u{size}")


@pytest.mark.slow
@settings(max_examples=150)
@given(
    name=st.sampled_from(list(FILTERS)), shape=st.tuples(st.integers(1, 40), st.integers(1, 90)),
    rows=st.integers(1, 40), size=st.sampled_from([1, 2, 3, 4, 8, 16]),
    kind=st.sampled_from(["noise", "zeros", "few", "repeated"]), seed=st.integers(0, 99), fletcher=st.booleans(),
)  # fmt: skip
def test_samples_are_those_of_h5py(
    name: str,
    shape: tuple[int, int],
    rows: int,
    size: int,
    kind: str,
    seed: int,
    fletcher: bool,
    reader_of: Any,
    read_natively: Any,
    read_alone: Any,
) -> None:
    data = _content(math.prod(shape), size, kind, seed).reshape(shape)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset(
                "x", data=data, chunks=(min(rows, shape[0]), shape[1]), fletcher32=fletcher, **FILTERS[name]()
            )
        with h5py.File(path, "r") as file:
            assert file["x"][...].tobytes() == data.tobytes()
        reader = reader_of(path)
        made = read_natively(reader, range(len(data)))
        assert made.is_made.all()
        assert made.arrays[0].tobytes() == data.tobytes()
        assert read_alone(reader, range(len(data))).tobytes() == data.tobytes()


@pytest.mark.parametrize("name", list(FILTERS))
def test_large_chunks_of_many_blocks(
    name: str, tmp_path: Path, reader_of: Any, read_natively: Any, read_alone: Any
) -> None:
    data = _content(100_003, 4, "few", 1)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=data, chunks=(60_001,), **FILTERS[name]())
    reader = reader_of(tmp_path / "x.h5")
    rows = read_natively(reader, range(len(data)))
    assert rows.is_made.all()
    assert rows.arrays[0].tobytes() == data.tobytes()
    some = [0, 59_999, 60_000, 60_001, 100_002]
    assert read_alone(reader, some).tobytes() == data[some].tobytes()


@settings(max_examples=150)
@given(
    name=st.sampled_from(list(FILTERS)), places=st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
    cut=st.integers(0, 400), seed=st.integers(0, 9), first=st.sampled_from([0, 500]),
)  # fmt: skip
def test_damage_is_an_error_or_other_values(
    name: str,
    places: list[int],
    cut: int,
    seed: int,
    first: int,
    reader_of: Any,
    read_natively: Any,
    read_alone: Any,
) -> None:
    """Never a crash, memory that was not written, or an error of another kind: neither of a chunk that is
    decoded alone, nor of one among many."""
    data = _content(1000, 4, "few", seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.h5"
        with h5py.File(path, "w") as file:
            dataset = file.create_dataset("x", data=data, chunks=(500,), **FILTERS[name]())
            mask, raw = dataset.id.read_direct_chunk((500,))
            damaged = bytearray(raw)
            for place in places:
                damaged[place % len(raw)] ^= 1 + place % 255
            dataset.id.write_direct_chunk((500,), bytes(damaged[: max(1, len(damaged) - cut)]), mask)
        reader = reader_of(path)
        rows = read_natively(reader, range(first, 1000))
        again = read_natively(reader, range(first, 1000), 0x54)
        assert rows.is_made[:-500].all()
        assert np.array_equal(rows.is_made, again.is_made)
        assert np.array_equal(rows.arrays[0][rows.is_made], again.arrays[0][rows.is_made])
        assert np.array_equal(rows.arrays[0][:-500], data[first:500])
        try:
            found = read_alone(reader, [500])
        except DamagedError as error:
            assert "dataset /x, chunk 1 at [500:1000]" in str(error)
        else:
            assert rows.is_made.all()
            assert found[0] == rows.arrays[0][-500]


def test_without_its_library_a_filter_is_left_to_h5py(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=np.arange(100), chunks=(50,), **FILTERS["blosc2"]())
    monkeypatch.setattr(layout_module, "has_blosc2", lambda: False)
    with h5py.File(tmp_path / "x.h5", "r") as file:
        layout = read_layout(file["x"])
    assert (layout.kind, "blosc2" in layout.why) == ("h5py", True)


def test_a_codec_that_is_not_known_here_is_left_to_h5py(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=np.arange(9999), chunks=(9999,), **hdf5plugin.Blosc(cname="snappy"))
        assert read_layout(file["x"]).why == "its filter blosc is known to the library only"


@pytest.mark.parametrize("shape", [(50,), (10, 5)])
def test_a_frame_of_another_size_is_an_error(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("x", data=np.zeros(shape), chunks=shape, **hdf5plugin.Blosc2())
        _, raw = dataset.id.read_direct_chunk((0,) * len(shape))
    assert has_blosc2()
    step = FilterStep(BLOSC2, (), "blosc2")
    assert not decode_chunk(raw, [step], 0, 400).any()
    for more in (-8, 8):
        with pytest.raises(ChunkError, match="blosc2: "):
            decode_chunk(raw, [step], 0, 400 + more)
