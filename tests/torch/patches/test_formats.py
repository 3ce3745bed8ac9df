"""Every kind of volume: recognised, read as NumPy has it, and ``print`` says how."""

from __future__ import annotations

import glob
import gzip
import os
import struct
from pathlib import Path
from typing import Any

import numcodecs.blosc
import numpy as np
import pytest
import tifffile
import torch
import zarr
from torch.utils.data import DataLoader
from volume_kinds import VOLUME_KINDS, cut, equal, random_array, write_volume
from zarr.codecs import BloscCodec

from fastpipe import Cache, FastLoader, FastPatchDataset
from fastpipe.core.native import native
from fastpipe.core.reads import MADE
from fastpipe.errors import OptionError
from fastpipe.sampling import Foreground, Grid, Uniform

pytestmark = pytest.mark.usefixtures("same_generators")

SHAPE, CHUNK, PATCH = (24, 50, 70), (10, 16, 32), (9, 20, 33)
CHUNKS = "chunks of 10×16×32 (10 KiB"
# For each kind what ``print(dataset)`` says.
HOW = {
    "zarr3 blosc": f"{CHUNKS}; blosc)", "zarr3 bitshuffle": f"{CHUNKS}; blosc)", "zarr3 zstd": f"{CHUNKS}; zstd)",
    "zarr3 gzip": f"{CHUNKS}; gzip)", "zarr3 none": f"{CHUNKS}; not compressed)", "zarr3 big-endian": f"{CHUNKS}; zstd)",
    "zarr3 sharded": f"zarr3 by tensorstore, {CHUNKS}), as its codecs begin with sharding_indexed",
    "zarr2 blosc": f"{CHUNKS}; blosc)", "zarr2 zstd": f"{CHUNKS}; zstd)", "zarr2 zlib": f"{CHUNKS}; zlib)",
    "zarr2 none": f"{CHUNKS}; not compressed)",
    "zarr2 fortran": f"zarr by tensorstore, {CHUNKS}), as its chunks are in Fortran's order",
    "n5 gzip": f"n5 by tensorstore, {CHUNKS})", "n5 raw": f"n5 by tensorstore, {CHUNKS})",
    "hdf5 gzip": f"HDF5, {CHUNKS}; shuffle and deflate)", "hdf5 lzf": f"HDF5, {CHUNKS}; lzf and fletcher32)",
    "hdf5 chunks": f"HDF5, {CHUNKS}; not compressed)", "hdf5 contiguous": "HDF5, contiguous and not compressed",
    "hdf5 scale-offset": "HDF5, through h5py one thread at a time, as its filter scale-offset is",
    "tiff tiles": "TIFF, parts of 16×32 (1 KiB; adobe_deflate)",
    "tiff strips": "TIFF, parts of 16×70 (2.19 KiB; adobe_deflate)",
    "tiff raw": "TIFF, not compressed", "tiff big-endian": "TIFF, not compressed",
    "tiff big-endian tiles": "TIFF, parts of 16×32 (1 KiB; adobe_deflate)",
    "tiff raw tiles": "TIFF, parts of 16×32 (1 KiB; none)", "bigtiff": "TIFF, parts of 50×70 (6.84 KiB; adobe_deflate)",
    "tiff folder": "TIFF, 24 files in natural order (0000.tif … 0023.tif), not compressed",
    "tiff folder zlib": "24 files in natural order (0000.TIF … 0023.TIF), parts of 16×32 (1 KiB; adobe_deflate)",
    "nii": "NIfTI, not compressed", "nii.gz": "NIfTI, from a copy that is not compressed",
    "b2nd": f"Blosc2, {CHUNKS}; zstd) in blocks of 5×8×16",
    "dicom": "DICOM, 24 slices in the order of their positions, not compressed", "npy": "an array in NumPy's file format",
    "npy fortran": "an array in NumPy's file format", "array": "an array in memory",
}  # fmt: skip


@pytest.fixture(scope="module")
def array() -> Any:
    random = np.random.default_rng(0)
    return (random.integers(0, 300, SHAPE) + np.arange(70)).astype(np.int16)


@pytest.mark.parametrize("kind", HOW)
def test_patches_of_every_kind_of_volume(tmp_path: Path, array: Any, kind: str) -> None:
    assert sorted(HOW) == sorted(VOLUME_KINDS)
    path = write_volume(kind, tmp_path / "x", array, CHUNK)
    for sampling, cache in ((Uniform(12), 300_000), (Foreground(12, fraction=0.5), 1 << 26)):
        dataset = FastPatchDataset(
            path, PATCH, labels=array % 3, sampling=sampling, seed=3, cache=Cache("ram", cache), threads=2
        )
        assert HOW[kind] in repr(dataset) and HOW[kind] in repr(dataset.plan)
        loader = FastLoader(dataset, 4)
        reference, batches = loader.reference(), list(loader)
        assert type(reference) is DataLoader
        torch.testing.assert_close(list(reference), batches, rtol=0, atol=0)
        samples = [sample for batch in batches for sample in zip(*batch, strict=True)]
        for start, (patch, labels) in zip(dataset.places()[1].tolist(), samples, strict=True):
            assert equal(patch, cut(array, start, PATCH)) and equal(labels, cut(array % 3, start, PATCH))


def test_an_image_may_be_packed_in_several_members_with_zeros_behind(tmp_path: Path, array: Any) -> None:
    """As bgzip, ``cat`` and tapes make them."""
    data = Path(write_volume("nii", tmp_path / "x", array, CHUNK)).read_bytes()
    (tmp_path / "y.nii.gz").write_bytes(gzip.compress(data[:5000]) + gzip.compress(data[5000:]) + bytes(700))
    assert np.array_equal(FastPatchDataset(tmp_path / "y.nii.gz", SHAPE, sampling=Grid())[0], array)


def test_patches_of_an_array_in_memory_are_copies(array: Any) -> None:
    """What a script does to a patch does not change the volume."""
    volume = array.copy()
    patch = FastPatchDataset(volume[:, ::-1], PATCH, sampling=Grid())[0]
    assert np.array_equal(patch, volume[:9, ::-1][:, :20, :33])
    patch[...] = -1
    assert np.array_equal(volume, array)


def test_lists_patterns_and_tables_name_the_same_volumes(tmp_path: Path) -> None:
    """Of volumes of different sizes and kinds, with labels."""
    arrays: list[Any] = []
    table: list[tuple[str, str]] = []
    for kind, shape in (("zarr3 blosc", (8, 9)), ("npy", (11, 7)), ("hdf5 contiguous", (6, 12))):
        number = len(arrays)
        folder = tmp_path / "cases" / str(number)
        folder.mkdir(parents=True)
        arrays.append((random_array(shape, "i2", number), random_array(shape, "u1", number + 9)))
        image = write_volume(kind, folder / "image", arrays[-1][0], (4, 4))
        table.append((image, write_volume("npy", folder / "labels", arrays[-1][1], (4, 4))))
    lines = [f"{os.path.relpath(image, tmp_path)},{labels}\n" for image, labels in table]
    (tmp_path / "table.csv").write_text("".join(["volume,labels\n", *lines]), encoding="utf-8")
    volumes, labels = (list(column) for column in zip(*table, strict=True))
    pattern = f"{tmp_path}/cases/*/labels.npy"
    for volume, option in (
        (volumes, labels), (table, None), (tmp_path / "table.csv", None), (f"{tmp_path}/cases/*/image.*", pattern),
    ):  # fmt: skip
        dataset = FastPatchDataset(volume, (4, 5), labels=option, sampling=Grid())
        numbers, starts = dataset.places()
        assert set(numbers.tolist()) == {0, 1, 2} and len(dataset) == len(numbers)
        samples = dataset.__getitems__(range(len(dataset)))
        for number, start, sample in zip(numbers.tolist(), starts.tolist(), samples, strict=True):
            for value, array in zip(sample, arrays[number], strict=True):
                assert np.array_equal(value, cut(array, start, (4, 5)))


def test_slices_and_patterns_are_in_natural_order_and_lists_in_their_own(tmp_path: Path) -> None:
    """And ``repr`` says which it is."""
    names = [f"{tmp_path}/scan/slice_{number}.tif" for number in range(1, 13)]
    (tmp_path / "scan").mkdir()
    for number, name in enumerate(names, 1):
        tifffile.imwrite(name, np.full((6, 6), number, "u2"), photometric="minisblack")
        np.save(tmp_path / f"case_{number}.npy", np.full((6, 6), number, "u2"))
    whole, cases = (12, 6, 6), f"{tmp_path}/case_*.npy"
    for volume, size, order, said in [
        (f"{tmp_path}/scan", whole, range(1, 13), "12 files in natural order (slice_1.tif … slice_12.tif)"),
        ([names[::-1]], whole, range(12, 0, -1), "12 files in the given order (slice_12.tif … slice_1.tif)"),
        (cases, (6, 6), range(1, 13), "12 volumes in natural order, from "),
        (sorted(glob.glob(cases)), (6, 6), [1, 10, 11, 12, *range(2, 10)], "12 volumes in the given order, from "),
    ]:  # fmt: skip
        dataset = FastPatchDataset(volume, size, labels=volume, sampling=Grid())
        found = np.concatenate([patch.reshape(-1, 36)[:, 0] for patch, _ in dataset])
        assert found.tolist() == list(order)
        assert repr(dataset).count(said) == 2
    with pytest.raises(OptionError, match="is a pattern, whose matches are in natural order"):
        FastPatchDataset(cases, (6, 6), labels=sorted(glob.glob(cases)))


# ---- what the native core reads -------------------------------------------------------------------


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


def test_only_blocks_that_are_needed_are_read(tmp_path: Path) -> None:
    """A damaged block of a chunk is in the way of patches that need it, and of no others."""
    array = np.random.default_rng(0).integers(0, 9, (64, 64, 64)).astype(np.uint16)
    path = tmp_path / "x.zarr"
    zarr.create_array(path, data=array, chunks=array.shape, compressors=BloscCodec(cname="zstd"))
    slab = 16 * 64 * 64 * 2
    stored = bytearray(numcodecs.blosc.compress(array.tobytes(), b"zstd", 3, 1, slab, typesize=2))
    begins = struct.unpack_from("<4I", stored, 16)
    stored[begins[2] + 8 : begins[2] + 40] = bytes(32)
    (path / "c/0/0/0").write_bytes(stored)
    dataset = FastPatchDataset(path, (16, 64, 64), sampling=Grid(), threads=1)
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
    (made,), declined = read_natively(dataset, range(len(dataset)))
    assert declined == (0 if is_native else len(dataset))
    for start, sample in zip(dataset.places()[1].tolist(), made if is_native else dataset, strict=True):
        assert equal(sample, cut(array, start, (2, 30, 20), "edge"))
