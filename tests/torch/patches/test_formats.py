"""Every kind of volume: recognised, read as NumPy has it, and ``print`` says how."""

from __future__ import annotations

import glob
import gzip
import os
from pathlib import Path
from typing import Any

import h5py
import nibabel
import numpy as np
import pytest
import tifffile
from torch.utils.data import DataLoader

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


def test_every_kind_has_a_line_here(kinds: list[str]) -> None:
    assert sorted(HOW) == sorted(kinds)


@pytest.mark.parametrize("kind", HOW)
def test_patches_of_every_kind_of_volume(
    tmp_path: Path, array: Any, write_volume: Any, cut: Any, equal: Any, kind: str
) -> None:
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


def test_chunks_that_are_tiny_are_read_some_at_a_time(
    tmp_path: Path, array: Any, write_volume: Any, cut: Any
) -> None:
    for kind in ("hdf5 gzip", "zarr3 blosc", "n5 gzip"):
        path = write_volume(kind, tmp_path / kind[:4], array[:, :, :30], (4, 5, 6))
        dataset = FastPatchDataset(path, (9, 20, 23), sampling=Uniform(6), seed=3, threads=2)
        assert dataset._roles[0].volumes[0].unit_nbytes >= 1 << 16  # all of it
        for start, patch in zip(dataset.places()[1].tolist(), _all(dataset), strict=True):
            assert np.array_equal(patch, cut(array, start, (9, 20, 23)))


def _all(dataset: FastPatchDataset) -> Any:
    """All patches of epoch 0 of the dataset's seed."""
    batches = dataset.batch_sampler(max(1, len(dataset)), shuffle=False)
    return next(iter(DataLoader(dataset, batch_sampler=batches))).numpy()


# ---- TIFF ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"compression": "zlib", "tile": (16, 32)}, {"compression": "zlib"}])
@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_colours_of_tiff_pages(tmp_path: Path, options: Any, planar: Any) -> None:
    shape, patch = (
        ((6, 40, 50, 3), (2, 16, 20, 3)) if planar == "contig" else ((6, 3, 40, 50), (2, 3, 16, 20))
    )
    colours = np.random.default_rng(1).integers(0, 255, shape).astype(np.uint8)
    tifffile.imwrite(tmp_path / "x.tif", colours, photometric="rgb", planarconfig=planar, **options)
    dataset = FastPatchDataset(tmp_path / "x.tif", patch, sampling=Grid())
    for start, found in zip(dataset.places()[1].tolist(), _all(dataset), strict=True):
        box = tuple(slice(at, at + side) for at, side in zip(start, patch, strict=True))
        assert np.array_equal(found, colours[box])


@pytest.mark.parametrize("compression", ["lzw", "zstd", "packbits"])
def test_other_compressions_of_tiff(tmp_path: Path, array: Any, compression: str) -> None:
    pytest.importorskip("imagecodecs", reason="needs imagecodecs: pip install imagecodecs")
    tifffile.imwrite(tmp_path / "x.tif", array, photometric="minisblack", compression=compression)
    dataset = FastPatchDataset(tmp_path / "x.tif", SHAPE, sampling=Grid())
    assert np.array_equal(dataset[0], array)


def test_slices_in_a_folder_come_in_the_order_of_their_names(tmp_path: Path, array: Any) -> None:
    for number in (10, 2, 1):
        tifffile.imwrite(tmp_path / f"z{number:02}.tif", array[number], photometric="minisblack")
    (tmp_path / "notes.txt").write_text("no slice")
    dataset = FastPatchDataset(tmp_path, (3, 50, 70), sampling=Grid())
    assert np.array_equal(dataset[0], array[[1, 2, 10]])


@pytest.mark.usefixtures("small_units")
def test_a_slice_of_another_size_is_an_error_that_names_it(tmp_path: Path, array: Any) -> None:
    for number in range(4):
        page = array[number] if number != 2 else array[number, :40]
        tifffile.imwrite(tmp_path / f"{number}.tif", page, photometric="minisblack", compression="zlib")
    dataset = FastPatchDataset(tmp_path, (1, 50, 70), sampling=Grid())
    assert np.array_equal(dataset[1], array[1:2])
    with pytest.raises(VolumeError, match=r"2\.tif is not like .*0\.tif"):
        dataset[2]


# ---- NIfTI --------------------------------------------------------------------------------------


def test_a_packed_image_is_converted_once(
    tmp_path: Path, array: Any, write_volume: Any, cache_folder: Path
) -> None:
    path = write_volume("nii.gz", tmp_path / "x", array, CHUNK)
    folder = cache_folder / "fastpipe" / "converted"
    for _ in range(2):
        assert np.array_equal(FastPatchDataset(path, SHAPE, sampling=Grid())[0], array)
        (copy,) = folder.glob("*.raw")
        state = copy.stat().st_ino, copy.stat().st_size
    assert state == (copy.stat().st_ino, copy.stat().st_size)
    assert state[1] >= array.nbytes
    other = array[::-1].copy()
    os.remove(path)
    write_volume("nii.gz", tmp_path / "x", other, CHUNK)
    assert np.array_equal(FastPatchDataset(path, SHAPE, sampling=Grid())[0], other)
    (newer,) = folder.glob("*.raw")  # the copy of the file's earlier state is gone
    assert newer.name != copy.name


def test_a_packed_image_in_several_datasets(tmp_path: Path, array: Any, write_volume: Any) -> None:
    """For training and for validation, say, or in the processes of several ranks."""
    path = write_volume("nii.gz", tmp_path / "x", array, CHUNK)
    first = FastPatchDataset(path, (4, 50, 70), sampling=Grid(), cache=Cache("ram", 1))
    assert np.array_equal(first[0], array[:4])
    second = FastPatchDataset(path, (4, 50, 70), sampling=Grid(), labels=path)
    assert np.array_equal(first[1], array[4:8])
    assert np.array_equal(second[2][1], array[8:12])


def test_without_a_cache_a_packed_image_has_no_place(tmp_path: Path, array: Any, write_volume: Any) -> None:
    path = write_volume("nii.gz", tmp_path / "x", array, CHUNK)
    with pytest.raises(VolumeError, match=r"x\.nii\.gz is compressed as a whole"):
        FastPatchDataset(path, PATCH, cache="off")


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("stored", [np.int16, np.uint8, np.float32])
def test_scaled_images_have_the_values_of_nibabel(
    tmp_path: Path, array: Any, suffix: str, stored: Any
) -> None:
    image = nibabel.Nifti1Image(array.astype(stored), np.eye(4))
    image.header.set_slope_inter(0.3, -7)
    path = tmp_path / f"x{suffix}"
    nibabel.save(image, path)
    expected = np.asanyarray(nibabel.load(path).dataobj)
    dataset = FastPatchDataset(path, PATCH, sampling=Uniform(8), seed=1)
    assert "scaled to" in repr(dataset)
    for start, patch in zip(dataset.places()[1].tolist(), _all(dataset), strict=True):
        box = tuple(slice(at, at + side) for at, side in zip(start, PATCH, strict=True))
        assert patch.dtype == expected.dtype
        assert np.array_equal(patch, expected[box])


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_images_of_four_dimensions(tmp_path: Path, suffix: str) -> None:
    series = np.random.default_rng(2).normal(size=(12, 10, 9, 4)).astype(np.float32)
    path = tmp_path / f"x{suffix}"
    nibabel.save(nibabel.Nifti2Image(series, np.eye(4)), path)
    dataset = FastPatchDataset(path, (5, 4, 9, 2), sampling=Grid(stride=(3, 3, 9, 2)))
    for start, patch in zip(dataset.places()[1].tolist(), _all(dataset), strict=True):
        x, y, _, t = start
        assert np.array_equal(patch, series[x : x + 5, y : y + 4, :, t : t + 2])


def test_an_image_packed_in_several_members(tmp_path: Path, array: Any, write_volume: Any) -> None:
    """As bgzip and ``cat`` make them."""
    data = Path(write_volume("nii", tmp_path / "x", array, CHUNK)).read_bytes()
    (tmp_path / "y.nii.gz").write_bytes(gzip.compress(data[:5000]) + gzip.compress(data[5000:]))
    assert np.array_equal(FastPatchDataset(tmp_path / "y.nii.gz", SHAPE, sampling=Grid())[0], array)


def test_zeros_behind_a_packed_image_are_no_damage(tmp_path: Path, array: Any, write_volume: Any) -> None:
    """As tapes and some file systems leave them; ``gzip`` reads such files."""
    packed = Path(write_volume("nii.gz", tmp_path / "x", array, CHUNK))
    packed.write_bytes(packed.read_bytes() + bytes(700))
    assert len(gzip.decompress(packed.read_bytes())) >= array.nbytes
    assert np.array_equal(FastPatchDataset(packed, SHAPE, sampling=Grid())[0], array)


@pytest.fixture
def packed(tmp_path: Path, write_volume: Any) -> tuple[Path, Any]:
    array = np.random.default_rng(0).integers(0, 1000, (10, 11, 12)).astype(np.int16)
    return Path(write_volume("nii.gz", tmp_path / "x", array, ())), array


def test_a_packed_image_that_is_cut_off_is_an_error_at_any_length(packed: Any, cache_folder: Path) -> None:
    path, _ = packed
    data = path.read_bytes()
    lengths = [*range(0, 60, 5), *np.linspace(60, len(data) - 1, 40).astype(int).tolist(), *range(-12, 0)]
    for length in lengths:
        path.write_bytes(data[:length])
        with pytest.raises(VolumeError, match=r"x\.nii\.gz"):
            FastPatchDataset(path, (2, 2, 2))
    folder = cache_folder / "fastpipe" / "converted"
    assert not list(folder.glob("*.raw"))


def test_a_packed_image_that_is_damaged_is_an_error(packed: Any, cache_folder: Path) -> None:
    path, array = packed
    data = bytearray(path.read_bytes())
    for place in np.linspace(12, len(data) - 1, 30).astype(int).tolist():
        damaged = bytearray(data)
        damaged[place] ^= 0x55
        path.write_bytes(damaged)
        with pytest.raises(VolumeError, match=r"x\.nii\.gz"):
            FastPatchDataset(path, (2, 2, 2))
    assert not list((cache_folder / "fastpipe").rglob("*.raw"))
    path.write_bytes(data)
    assert np.array_equal(FastPatchDataset(path, array.shape, sampling=Grid())[0], array)


def test_a_packed_image_that_is_shorter_than_its_header_says(packed: Any) -> None:
    path, _ = packed
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-2]))
    with pytest.raises(VolumeError, match=r"x\.nii\.gz is cut off: it has 2\.92 KiB of 2\.92 KiB"):
        FastPatchDataset(path, (2, 2, 2))


# ---- HDF5, NumPy --------------------------------------------------------------------------------


def test_an_array_in_a_group_and_in_a_folder(tmp_path: Path, array: Any, write_volume: Any) -> None:
    import zarr

    group = zarr.create_group(tmp_path / "scan.zarr")
    group.create_array("a/0", data=array, chunks=CHUNK)
    dataset = FastPatchDataset(f"{tmp_path}/scan.zarr/a/0", SHAPE, sampling=Grid())
    assert np.array_equal(dataset[0], array)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("a/b", data=array, chunks=CHUNK)
        file["c"] = 3
    assert np.array_equal(FastPatchDataset(f"{tmp_path}/x.h5/a/b", SHAPE, sampling=Grid())[0], array)


def test_parts_of_a_dataset_that_were_never_written(tmp_path: Path, array: Any) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = file.create_dataset("x", SHAPE, "i2", chunks=CHUNK, fillvalue=-5, compression="gzip")
        data[:10, 16:32, :32] = array[:10, 16:32, :32]
    expected = np.full(SHAPE, -5, "i2")
    expected[:10, 16:32, :32] = array[:10, 16:32, :32]
    assert np.array_equal(FastPatchDataset(tmp_path / "x.h5", SHAPE, sampling=Grid())[0], expected)


@pytest.mark.parametrize("dtype", ["bool", "f2", "c8", "u8", ">i4"])
def test_less_usual_elements(tmp_path: Path, array: Any, dtype: str) -> None:
    data = (array % 2 if dtype == "bool" else array).astype(dtype)
    np.save(tmp_path / "x.npy", data)
    dataset = FastPatchDataset(tmp_path / "x.npy", PATCH, sampling=Grid())
    batch = next(iter(DataLoader(dataset, len(dataset)))).numpy()
    for start, patch in zip(dataset.places()[1].tolist(), batch, strict=True):
        box = tuple(slice(at, at + side) for at, side in zip(start, PATCH, strict=True))
        assert patch.dtype == data.dtype.newbyteorder("=")
        assert np.array_equal(patch, data[box])


def test_arrays_in_memory_are_views_of_nothing(array: Any) -> None:
    """What a script does to a patch does not change the volume."""
    volume = array.copy()
    dataset = FastPatchDataset(volume[:, ::-1], PATCH, sampling=Grid())
    patch = dataset[0]
    assert np.array_equal(patch, volume[:9, ::-1][:, :20, :33])
    patch[...] = -1
    assert np.array_equal(volume, array)


# ---- lists, patterns and tables -----------------------------------------------------------------


@pytest.fixture
def cases(tmp_path: Path, write_volume: Any, random_array: Any) -> list[tuple[Any, Any]]:
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
