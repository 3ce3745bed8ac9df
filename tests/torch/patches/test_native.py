"""Patches that the native core reads: those of NumPy, whatever the volume's bytes went through; and what it leaves."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numcodecs.blosc
import numpy as np
import pytest
import zarr
from volume_kinds import cut, equal, random_array, write_volume

from fastpipe import FastPatchDataset
from fastpipe.core.native import native
from fastpipe.core.reads import MADE
from fastpipe.sampling import Grid


def read_natively(dataset: FastPatchDataset, indices: Any) -> tuple[Any, int]:
    """A batch as the core leaves it, and how many patches it has declined."""
    runtime = dataset._running()
    places = dataset._places.places(0, 0, np.asarray(indices))
    arrays = [np.full((len(indices), *shape), 77, dtype) for dtype, shape in dataset.kinds]
    started = runtime.start(places, np.arange(len(indices)), arrays)
    if started.batch is None:
        return arrays, len(indices)
    native.run_here(started.batch)
    assert started.batch.is_complete
    declined = started.statuses[:, 0] != MADE
    for task in started.tasks:
        declined[task.rows] = True
    return arrays, int(declined.sum())


def test_only_blocks_that_are_needed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged block of a chunk is in the way of patches that need it, and of no others."""
    array = np.random.default_rng(0).integers(0, 9, (64, 64, 64)).astype(np.uint16)
    zarr.create_array(str(tmp_path / "x.zarr"), data=array, chunks=array.shape, compressors=None)
    slab = 16 * 64 * 64 * 2
    stored = bytearray(numcodecs.blosc.compress(array.tobytes(), b"zstd", 3, 1, slab, typesize=2))
    begins = struct.unpack_from("<4I", stored, 16)
    stored[begins[2] + 8 : begins[2] + 40] = bytes(32)
    (tmp_path / "x.zarr/c/0/0/0").write_bytes(stored)
    meta = (tmp_path / "x.zarr/zarr.json").read_text()
    blosc = '{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "blosc", "configuration": {}}'
    start, end = meta.index('"codecs": ['), meta.index("]", meta.index('"codecs": ['))
    (tmp_path / "x.zarr/zarr.json").write_text(f'{meta[:start]}"codecs": [{blosc}{meta[end:]}')
    dataset = FastPatchDataset(str(tmp_path / "x.zarr"), (16, 64, 64), sampling=Grid(), threads=1)
    (made,), declined = read_natively(dataset, [0, 1, 3])
    assert not declined
    assert np.array_equal(made, array.reshape(4, 16, 64, 64)[[0, 1, 3]])
    assert read_natively(dataset, [1, 2])[1] == 1


@pytest.mark.parametrize(
    ("kind", "is_native"),
    [
        ("tiff raw", True), ("tiff big-endian", True), ("tiff strips", True), ("tiff big-endian tiles", True), ("bigtiff", True),
        ("nii", True), ("nii.gz", True), ("tiff tiles", False), ("tiff folder zlib", False), ("n5 raw", False),
    ],
)  # fmt: skip
def test_the_core_reads_the_formats_that_it_can(kind: str, is_native: bool, tmp_path: Path) -> None:
    """With a last strip, and tiles, that reach beyond the pages' ends; a predictor is tifffile's."""
    array = random_array((5, 37, 41), "i2", 3)
    path = write_volume(kind, str(tmp_path / "x"), array, (2, 16, 16))
    dataset = FastPatchDataset(path, (2, 30, 20), sampling=Grid(), padding="edge", threads=1)
    _, starts = dataset.places()
    (made,), declined = read_natively(dataset, range(len(dataset)))
    assert declined == (0 if is_native else len(dataset))
    if not is_native:
        made = dataset.__getitems__(range(len(dataset)))
    for index, sample in enumerate(made):
        assert equal(sample, cut(array, starts[index].tolist(), (2, 30, 20), "edge"))
