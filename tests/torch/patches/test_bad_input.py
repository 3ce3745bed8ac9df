"""Volumes that are damaged, change, or do not fit; options that cannot work.  Each error says what, and where."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from failure import failure, raising
from volume_kinds import random_array, write_volume

from fastpipe import BadSamples, Cache, FastLoader, FastPatchDataset
from fastpipe.errors import BadSampleError, HDF5Error, OptionError, VolumeError
from fastpipe.sampling import Foreground, Grid, Positions, Uniform

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

ARRAY, CHUNK = random_array((8, 12), "i2", 5) + 1, (4, 4)


def test_volumes_that_are_missing_are_named(tmp_path: Path) -> None:
    path = write_volume("hdf5 gzip", tmp_path / "x", ARRAY, CHUNK)
    for volume, labels, error, message in (
        (tmp_path / "none.zarr", None, FileNotFoundError, r"none\.zarr"),
        (f"{tmp_path}/*.tif", None, OptionError, r"volume='.*\*\.tif' matches nothing"),
        (f"{tmp_path}/x.h5/no/such", None, OptionError, r"x\.h5 has no dataset 'no/such'; it has other, raw"),
        (tmp_path / "x.h5", None, OptionError, r"name a dataset of .*x\.h5 behind a slash; it has other, raw"),
        (path, tmp_path / "labels.npy", FileNotFoundError, r"labels\.npy"),
        ([], None, OptionError, "names no volumes"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            FastPatchDataset(volume, (2, 2), labels=labels)  # type: ignore[arg-type]


NO_VOLUMES: dict[str, tuple[bytes, str]] = {
    "notes.txt": (b"no volume", "not a volume in a supported format"),
    "empty.npy": (b"", "not a volume in a supported format"),
    "x.npy": (b"\x93NUMPY" + bytes(9), r"x\.npy is not a NumPy array"),
    "x.tif": (b"II*\0" + bytes(30), r"x\.tif cannot be read as TIFF"),
    "x.h5": (b"\x89HDF\r\n\x1a\n" + bytes(90), r"x\.h5"),
    "x.nii": (bytes(400), r"x\.nii cannot be read as a NIfTI image"),
    "x.b2nd": (bytes(400), r"x\.b2nd cannot be opened by Blosc2"),
    "x.zarr/zarr.json": (b"{", r"zarr\.json is damaged"),
    "y.zarr/.zarray": (b"[]", r"\.zarray is damaged"),
    "folder/readme": (b"", "neither Zarr nor N5"),
}


@pytest.mark.parametrize("name", NO_VOLUMES)
def test_a_file_that_is_no_volume_is_named(tmp_path: Path, name: str) -> None:
    content, message = NO_VOLUMES[name]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises((VolumeError, HDF5Error), match=message):
        FastPatchDataset(tmp_path / name.split("/")[0], (1, 1))


@pytest.mark.parametrize(("place", "byte"), [(163, 255), (164, 1)])  # of the text "<f4"
def test_damaged_metadata_of_blosc2_are_an_error(tmp_path: Path, place: int, byte: int) -> None:
    path = Path(write_volume("b2nd", tmp_path / "x", np.zeros((12, 14), "f4"), (12, 14)))
    content = bytearray(path.read_bytes())
    assert content[162:165] == b"<f4"
    content[place] = byte
    path.write_bytes(content)
    with pytest.raises(VolumeError, match=r"x\.b2nd cannot be opened by Blosc2: "):
        FastPatchDataset(path, (1, 1))


def _cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("kind", "chunk"),
    [("zarr3 blosc", "c/1/2"), ("zarr3 zstd", "c/1/2"), ("zarr3 gzip", "c/1/2"), ("zarr3 none", "c/1/2"), ("zarr2 zlib", "1.2")],
)  # fmt: skip
def test_a_damaged_chunk_is_an_error_that_names_it(tmp_path: Path, kind: str, chunk: str) -> None:
    path = Path(write_volume(kind, tmp_path / "x", ARRAY, CHUNK))
    _cut_off(path / chunk)
    dataset = FastPatchDataset(path, (4, 4), sampling=Grid(), threads=2)
    assert np.array_equal(dataset[4], ARRAY[4:, 4:8])
    for ask in (lambda: dataset[5], lambda: list(FastLoader(dataset, 3))):
        error = str(failure(ask))
        for said in (chunk, "the chunk at [4:8, 8:12]", "patch of 4×4 at (4, 8)", "sample 5"):
            assert said in error
    for policy in ("skip", "replace"):
        places = Positions([[4, 8]] * 3)
        alone = FastPatchDataset(path, (4, 4), sampling=places, bad_samples=policy)  # type: ignore[arg-type]
        for ask in (lambda: alone[0], lambda: alone.__getitems__([0, 1])):
            assert "at (4, 8)" in str(failure(ask)), "there are only bad patches"


def test_a_damaged_tile_of_a_tiff_file_names_its_page(tmp_path: Path) -> None:
    array = random_array((3, 16, 16), "i2")
    path = write_volume("tiff tiles", tmp_path / "x", array, (1, 16, 16))
    with tifffile.TiffFile(path) as tiff:
        begin = tiff.pages[1].dataoffsets[0]
    with open(path, "r+b") as target:
        target.seek(begin)
        target.write(bytes(range(7, 60)))
    dataset = FastPatchDataset(path, (1, 16, 16), sampling=Grid())
    assert np.array_equal(dataset[2], array[2:])
    with pytest.raises(BadSampleError, match=r"x\.tif, patch of 1×16×16 at \(1, 0, 0\)(.|\n)*page 1"):
        dataset[1]


def test_volumes_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    volume = np.zeros((6, 8), "u1")
    channels = [np.zeros((2, 6, 8)), np.zeros((3, 6, 8))]
    for given, options, message in (
        (volume, {"labels": np.zeros((6, 9), "u1")}, r"labels= has \(6, 9\) voxels, and .*volume= has \(6, 8\)"),
        (volume, {"mask": np.zeros(8, "u1")}, r"mask= has \(8,\) voxels|mask= has 1 dimensions"),
        ([volume, volume.astype("i2")], {}, "elements of int16, and .* of uint8: a batch has one type"),
        (channels, {}, r"\(3,\) in front of the dimensions .* \(2,\): a batch has one shape"),
        ([volume, volume], {"labels": volume}, "equally many .*, got 2 for volume=, 1 for labels="),
        ([(volume,), (volume, volume)], {}, r"tuples \(volume, labels\[, mask\]\), got some of \[1, 2\] values"),
        ([(volume, volume)], {"labels": volume}, "columns of the table"),
        (np.zeros((2,) * 9), {}, "9 dimensions"), (np.zeros((0, 5)), {}, "no voxels"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=message):
            FastPatchDataset(given, (2, 2), **options)
    for text, message in [
        ("image,labels\na,b\n", "must have a column volume"), ("volume,labels\na,\n", "row 2 is not filled in"),
        ("", "must have a column volume"), ("volume\n", "must have a column volume|names no volumes"),
    ]:  # fmt: skip
        (tmp_path / "t.csv").write_text(text)
        with pytest.raises(OptionError, match=message):
            FastPatchDataset(tmp_path / "t.csv", (2, 2))


VOLUME = np.zeros((6, 8), np.uint8)
SMALL = np.zeros((6, 8), np.float16)
CANNOT: dict[str, tuple[Callable[[], Any], str]] = {
    "patch too large": (lambda: FastPatchDataset(VOLUME, (7, 2)), r"\(7, 2\) does not fit"),
    "patch of 3 dimensions": (lambda: FastPatchDataset(VOLUME, (2, 2, 2)), "has 2 dimensions, and patch_size 3"),
    "patch of 0": (lambda: FastPatchDataset(VOLUME, (0, 2)), "patch_size must be .*got"),
    "one number": (lambda: FastPatchDataset(VOLUME, 4), "patch_size must be .*got"),  # type: ignore[arg-type]
    "volume": (lambda: FastPatchDataset(5, (2, 2)), "volume= must be a path or a NumPy array, got int: 5"),
    "sampling": (lambda: patches(5), "sampling must be one of .*got 5"),
    "count": (lambda: Uniform(0), r"Uniform\(samples_per_epoch\) must be a number from 1, got 0"),
    "count of floats": (lambda: Uniform(1.5), "must be a number from 1, got 1.5"),  # type: ignore[arg-type]
    "volumes": (lambda: Uniform(1, volumes="all"), "'equal' or 'size', got 'all'"),  # type: ignore[arg-type]
    "mask fraction": (lambda: Uniform(1, mask_fraction=2), r"mask_fraction=…\) must be from 0 to 1, got 2"),
    "no mask": (lambda: patches(Uniform(1, mask_fraction=0.5)), "give mask="),
    "fraction": (lambda: Foreground(1, fraction=-0.1), r"fraction=…\) must be from 0 to 1, got -0.1"),
    "fraction of letters": (lambda: Foreground(1, fraction="a"), "must be from 0 to 1, got 'a'"),  # type: ignore[arg-type]
    "voxels": (lambda: Foreground(1, voxels=0), r"voxels=…\) must be a number from 1, got 0"),
    "no labels": (lambda: patches(Foreground(1)), "give labels="),
    "one class": (lambda: Foreground(1, classes=1), "or of tuples of labels, or None, got 1"),  # type: ignore[arg-type]
    "classes that are no number": (lambda: Foreground(1, classes=(1, np.nan)), "tuples of labels, or None, got"),
    "stride": (lambda: Grid(stride=0), r"stride=…\) must be numbers from 1, got 0"),
    "stride of floats": (lambda: Grid(2.5), "must be numbers from 1, got 2.5"),  # type: ignore[arg-type]
    "number of strides": (lambda: patches(Grid(stride=(1, 1, 1))), r"must have 2 numbers, got \(1, 1, 1\)"),
    "positions of floats": (lambda: Positions([[0.5, 1]]), r"integers \(N, D\), got float64"),
    "positions beyond int64": (lambda: Positions(np.array([[2**63, 1]], np.uint64)), "beyond the ends of any"),
    "positions of 3 dimensions": (lambda: patches(Positions([[0, 0, 0, 0]])), "got 4"),
    "position of no volume": (lambda: patches(Positions([[2, 0, 0]]), [VOLUME] * 2), "names volume 2 of 2"),
    "position of volume -1": (lambda: patches(Positions([[-1, 0, 0]]), [VOLUME] * 2), "names volume -1 of 2"),
    "nan of a small float": (
        lambda: patches(volume=SMALL, nan=1e6), "nan= is 1000000.0, which elements of float16",
    ),
    "padding of a small float": (
        lambda: patches(volume=SMALL, padding=("constant", -1e6)), "for volume is -1000000.0, which elements of float16",
    ),
    "padding of a large integer": (
        lambda: patches(volume=VOLUME.astype("i8"), padding=("constant", 2**63)),
        "for volume is 9223372036854775808, which elements of int64",
    ),
    "cache on disk": (lambda: patches(cache=Cache("disk")), "not for volumes"),
}  # fmt: skip


def patches(sampling: Any = None, volume: Any = VOLUME, **options: Any) -> FastPatchDataset:
    return FastPatchDataset(volume, (2, 2), sampling=sampling or Grid(), **options)


@pytest.mark.parametrize("what", CANNOT)
def test_a_value_that_cannot_work_is_named(what: str) -> None:
    make, message = CANNOT[what]
    with pytest.raises(OptionError, match=message):
        make()


@pytest.mark.few(7)
@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ENOENT, errno.ENOMEM])
def test_errors_of_the_system_are_no_bad_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, policy: Any
) -> None:
    """A file that must not be read, too many open files and a lack of memory say nothing about the data."""
    path = write_volume("zarr3 zstd", tmp_path / "x", np.ones((8, 8), "u1"), (4, 4))
    for chunk in Path(path).glob("c/*/*"):
        chunk.write_bytes(b"")  # which the native core leaves to Python
    dataset = FastPatchDataset(path, (4, 4), sampling=Grid(), bad_samples=policy)
    is_memory = number == errno.ENOMEM
    refuse = raising(MemoryError() if is_memory else OSError(number, os.strerror(number)))
    for name in ["decode"] if is_memory else ["open_file", "ZarrVolume._check_still_there"]:
        monkeypatch.setattr(f"fastpipe.volumes.zarr.{name}", refuse)
    error = failure(lambda: list(FastLoader(dataset, batch_size=1)), OSError)
    assert ("not enough memory" if is_memory else os.strerror(number)) in str(error)
    assert not isinstance(error, BadSampleError)


@pytest.mark.parametrize("good", [1, 2, 5])
def test_another_patch_is_found_if_there_is_one(good: int) -> None:
    array = np.full((12, 4), np.nan, np.float32)
    array[:good] = np.arange(good)[:, None]
    options: Any = {"sampling": Grid(), "nan": "error", "bad_samples": "replace", "threads": 1}
    for seed in range(5):
        loader = FastLoader(FastPatchDataset(array, (1, 4), seed=seed, **options), 4)
        found = torch.cat(list(loader))[:, 0, 0].tolist()
        assert found[:good] == list(range(good)), "those are themselves"
        assert set(found) <= set(range(good))


def test_each_bad_patch_is_logged_once_with_its_place(tmp_path: Path) -> None:
    """Random patches of one index are others in each epoch, and each bad one is named once by its own."""
    array = np.arange(24 * 4, dtype=np.float32).reshape(24, 4)
    array[12:] = np.nan
    bad = BadSamples("replace", log=str(tmp_path / "bad.jsonl"))
    options: Any = {"sampling": Uniform(8), "nan": "error", "bad_samples": bad, "seed": 0, "threads": 1}
    dataset = FastPatchDataset(array, (4, 4), **options)
    loader, expected = FastLoader(dataset, 4), set()
    for epoch in range(4):
        expected |= {one for one in enumerate(dataset.places(epoch)[1][:, 0].tolist()) if one[1] + 4 > 12}
        assert not any(batch.isnan().any() for batch in loader)
    written = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    found = {(line["index"], int(line["path"].rpartition("at (")[2].split(",")[0])) for line in written}
    assert expected <= found
    assert len(found) == len(written), "once each"
    assert all(start + 4 > 12 for _, start in found)
