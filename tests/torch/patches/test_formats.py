"""Every kind of volume: recognised, read as NumPy has it, and ``print`` says how."""

from __future__ import annotations

import glob
import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from torch.utils.data import DataLoader
from volume_kinds import VOLUME_KINDS, cut, equal, random_array, write_volume

from fastpipe import Cache, FastPatchDataset
from fastpipe.errors import OptionError, VolumeError
from fastpipe.sampling import Grid, Uniform

pytestmark = pytest.mark.usefixtures("same_generators")

SHAPE, CHUNK, PATCH = (24, 50, 70), (10, 16, 32), (9, 20, 33)
# For each kind what ``print(dataset)`` says.
HOW = {
    "zarr3 blosc": "chunks of 10×16×32 (10 KiB; blosc)",
    "zarr3 bitshuffle": "chunks of 10×16×32 (10 KiB; blosc)",
    "zarr3 zstd": "chunks of 10×16×32 (10 KiB; zstd)",
    "zarr3 gzip": "chunks of 10×16×32 (10 KiB; gzip)",
    "zarr3 none": "chunks of 10×16×32 (10 KiB; not compressed)",
    "zarr3 big-endian": "chunks of 10×16×32 (10 KiB; zstd)",
    "zarr3 sharded": "zarr3 by tensorstore, chunks of 10×16×32 (10 KiB), as its codecs begin with sharding_indexed",
    "zarr2 blosc": "chunks of 10×16×32 (10 KiB; blosc)",
    "zarr2 zstd": "chunks of 10×16×32 (10 KiB; zstd)",
    "zarr2 zlib": "chunks of 10×16×32 (10 KiB; zlib)",
    "zarr2 none": "chunks of 10×16×32 (10 KiB; not compressed)",
    "zarr2 fortran": "zarr by tensorstore, chunks of 10×16×32 (10 KiB), as its chunks are in Fortran's order",
    "n5 gzip": "n5 by tensorstore, chunks of 10×16×32 (10 KiB)",
    "n5 raw": "n5 by tensorstore, chunks of 10×16×32 (10 KiB)",
    "hdf5 gzip": "HDF5, chunks of 10×16×32 (10 KiB; shuffle and deflate)",
    "hdf5 lzf": "HDF5, chunks of 10×16×32 (10 KiB; lzf and fletcher32)",
    "hdf5 chunks": "HDF5, chunks of 10×16×32 (10 KiB; not compressed)",
    "hdf5 contiguous": "HDF5, contiguous and not compressed",
    "hdf5 scale-offset": "HDF5, through h5py one thread at a time, as its filter scale-offset is",
    "tiff tiles": "TIFF, parts of 16×32 (1 KiB; adobe_deflate)",
    "tiff strips": "TIFF, parts of 16×70 (2.19 KiB; adobe_deflate)",
    "tiff raw": "TIFF, not compressed",
    "tiff big-endian": "TIFF, not compressed",
    "tiff big-endian tiles": "TIFF, parts of 16×32 (1 KiB; adobe_deflate)",
    "tiff raw tiles": "TIFF, parts of 16×32 (1 KiB; none)",
    "bigtiff": "TIFF, parts of 50×70 (6.84 KiB; adobe_deflate)",
    "tiff folder": "TIFF, 24 files in natural order (0000.tif … 0023.tif), not compressed",
    "tiff folder zlib": "24 files in natural order (0000.TIF … 0023.TIF), parts of 16×32 (1 KiB; adobe_deflate)",
    "nii": "NIfTI, not compressed",
    "nii.gz": "NIfTI, from a copy that is not compressed",
    "b2nd": "Blosc2, chunks of 10×16×32 (10 KiB; zstd) in blocks of 5×8×16",
    "npy": "an array in NumPy's file format",
    "npy fortran": "an array in NumPy's file format",
    "array": "an array in memory",
}


@pytest.fixture(scope="module")
def array() -> Any:
    random = np.random.default_rng(0)
    return (random.integers(0, 300, SHAPE) + np.arange(70)).astype(np.int16)


@pytest.mark.parametrize("kind", HOW)
def test_patches_of_every_kind_of_volume(tmp_path: Path, array: Any, kind: str) -> None:
    assert sorted(HOW) == sorted(VOLUME_KINDS)
    path = write_volume(kind, tmp_path / "x", array, CHUNK)
    for cache in (Cache("ram", 300_000), Cache("ram", 1 << 26)):
        dataset = FastPatchDataset(path, PATCH, sampling=Uniform(12), seed=3, cache=cache, threads=2)
        assert HOW[kind] in repr(dataset)
        assert HOW[kind] in repr(dataset.plan)
        _, starts = dataset.places()
        batches = dataset.batch_sampler(4, shuffle=False)
        patches = [patch for batch in DataLoader(dataset, batch_sampler=batches) for patch in batch.numpy()]
        assert len(patches) == 12
        for start, patch in zip(starts.tolist(), patches, strict=True):
            assert equal(patch, cut(array, start, PATCH))


def test_an_image_may_be_packed_in_several_members_with_zeros_behind(tmp_path: Path, array: Any) -> None:
    """As bgzip, ``cat`` and tapes make them."""
    data = Path(write_volume("nii", tmp_path / "x", array, CHUNK)).read_bytes()
    (tmp_path / "y.nii.gz").write_bytes(gzip.compress(data[:5000]) + gzip.compress(data[5000:]) + bytes(700))
    assert np.array_equal(FastPatchDataset(tmp_path / "y.nii.gz", SHAPE, sampling=Grid())[0], array)


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, Any]:
    array = np.random.default_rng(0).integers(0, 1000, (10, 11, 12)).astype(np.int16)
    return Path(write_volume("nii.gz", tmp_path / "x", array, ())), array


def test_a_packed_image_that_is_cut_off_is_an_error_at_any_length(packed: Any, cache_folder: Path) -> None:
    path, _ = packed
    data = path.read_bytes()
    lengths = [*range(0, 60, 13), *np.linspace(60, len(data) - 1, 9).astype(int).tolist(), *range(-12, 0, 4)]
    for length in lengths:
        path.write_bytes(data[:length])
        with pytest.raises(VolumeError, match=r"x\.nii\.gz"):
            FastPatchDataset(path, (2, 2, 2))
    folder = cache_folder / "fastpipe" / "converted"
    assert not list(folder.glob("*.raw"))


def test_patches_of_an_array_in_memory_are_copies(array: Any) -> None:
    """What a script does to a patch does not change the volume."""
    volume = array.copy()
    dataset = FastPatchDataset(volume[:, ::-1], PATCH, sampling=Grid())
    patch = dataset[0]
    assert np.array_equal(patch, volume[:9, ::-1][:, :20, :33])
    patch[...] = -1
    assert np.array_equal(volume, array)


@pytest.fixture
def cases(tmp_path: Path) -> list[tuple[Any, Any]]:
    """Three volumes of different sizes and kinds with labels, below ``cases``."""
    found = []
    for number, (kind, shape) in enumerate(
        [("zarr3 blosc", (8, 9)), ("npy", (11, 7)), ("hdf5 contiguous", (6, 12))]
    ):
        folder = tmp_path / "cases" / str(number)
        folder.mkdir(parents=True)
        volume, labels = random_array(shape, "i2", number), random_array(shape, "u1", number + 9)
        write_volume(kind, folder / "image", volume, (4, 4))
        write_volume("npy", folder / "labels", labels, (4, 4))
        found.append((volume, labels))
    return found


def _paths(tmp_path: Path) -> list[tuple[str, str]]:
    names = ("image.zarr", "image.npy", "image.h5")
    return [
        (f"{tmp_path}/cases/{n}/{name}", f"{tmp_path}/cases/{n}/labels.npy") for n, name in enumerate(names)
    ]


def test_lists_patterns_and_tables_name_the_same_volumes(tmp_path: Path, cases: Any) -> None:
    table = _paths(tmp_path)
    (tmp_path / "table.csv").write_text(
        "volume,labels\n" + "".join(f"{os.path.relpath(a, tmp_path)},{b}\n" for a, b in table),
        encoding="utf-8",
    )
    volumes, labels = (list(column) for column in zip(*table, strict=True))
    datasets = [
        FastPatchDataset(volumes, (4, 5), labels=labels, sampling=Grid()),
        FastPatchDataset(table, (4, 5), sampling=Grid()),
        FastPatchDataset(tmp_path / "table.csv", (4, 5), sampling=Grid()),
        FastPatchDataset(
            f"{tmp_path}/cases/*/image.*", (4, 5), labels=f"{tmp_path}/cases/*/labels.npy", sampling=Grid()
        ),
    ]
    numbers, starts = datasets[0].places()
    assert set(numbers.tolist()) == {0, 1, 2}
    for dataset in datasets:
        assert len(dataset) == len(numbers)
        samples = dataset.__getitems__(range(len(dataset)))
        for number, (y, x), sample in zip(numbers.tolist(), starts.tolist(), samples, strict=True):
            for role in range(2):
                assert np.array_equal(sample[role], cases[number][role][y : y + 4, x : x + 5])


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
