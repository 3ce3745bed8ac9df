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
from volume_kinds import random_array, write_volume

from fastpipe import BadSamples, Cache, FastLoader, FastPatchDataset
from fastpipe.errors import BadSampleError, FastpipeError, HDF5Error, OptionError, VolumeError
from fastpipe.sampling import Foreground, Grid, Positions, Uniform

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

SHAPE, CHUNK = (8, 12), (4, 4)


@pytest.fixture
def array() -> Any:
    return random_array(SHAPE, "i2", 5) + 1


def failure(ask: Callable[[], object]) -> BadSampleError:
    """The error that a call ends with, without what its traceback refers to."""
    try:
        ask()
    except BadSampleError as error:
        return error.with_traceback(None)
    raise AssertionError("there was no error")


def test_volumes_that_are_missing_are_named(tmp_path: Path, array: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.zarr"):
        FastPatchDataset(tmp_path / "none.zarr", (2, 2))
    with pytest.raises(OptionError, match=r"volume='.*\*\.tif' matches nothing"):
        FastPatchDataset(f"{tmp_path}/*.tif", (2, 2))
    path = write_volume("hdf5 gzip", tmp_path / "x", array, CHUNK)
    with pytest.raises(OptionError, match=r"x\.h5 has no dataset 'no/such'; it has other, raw"):
        FastPatchDataset(f"{tmp_path}/x.h5/no/such", (2, 2))
    with pytest.raises(OptionError, match=r"name a dataset of .*x\.h5 behind a slash; it has other, raw"):
        FastPatchDataset(tmp_path / "x.h5", (2, 2))
    with pytest.raises(FileNotFoundError, match=r"labels\.npy"):
        FastPatchDataset(path, (2, 2), labels=tmp_path / "labels.npy")
    with pytest.raises(OptionError, match="names no volumes"):
        FastPatchDataset([], (2, 2))


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


@pytest.mark.parametrize(
    "kind", ["npy", "tiff raw", "tiff tiles", "nii", "hdf5 gzip", "hdf5 contiguous", "b2nd"]
)
def test_files_that_are_cut_off_anywhere_are_errors(tmp_path: Path, kind: str) -> None:
    """At the latest when the part is read that is missing: never values, and never an error without a name."""
    array = random_array((6, 20, 24), "i2") + 1
    path = str(write_volume(kind, tmp_path / "x", array, (3, 8, 8)))
    file = path.removesuffix("/raw")
    data = Path(file).read_bytes()
    for length in [*range(0, 40, 13), *np.linspace(40, len(data) - 1, 9).astype(int).tolist()]:
        Path(file).write_bytes(data[:length])
        try:
            found = FastPatchDataset(
                path, array.shape, sampling=Grid(), threads=1, cache=Cache("ram", 1 << 20)
            )[0]
        except (FastpipeError, OSError) as error:
            assert Path(file).name in str(error), f"{length}: {error}"
        else:
            assert np.array_equal(found, array), f"cut off at {length} of {len(data)}"


@pytest.mark.parametrize(("place", "byte"), [(163, 255), (164, 1)])  # of the text "<f4"
def test_damaged_metadata_of_blosc2_are_an_error(tmp_path: Path, place: int, byte: int) -> None:
    path = Path(write_volume("b2nd", tmp_path / "x", np.zeros((12, 14), "f4"), (12, 14)))
    content = bytearray(path.read_bytes())
    assert content[162:165] == b"<f4"
    content[place] = byte
    path.write_bytes(content)
    with pytest.raises(VolumeError, match=r"x\.b2nd cannot be opened by Blosc2: "):
        FastPatchDataset(path, (1, 1))


@pytest.mark.parametrize(
    ("kind", "chunk"),
    [("zarr3 blosc", "c/1/2"), ("zarr3 zstd", "c/1/2"), ("zarr3 gzip", "c/1/2"), ("zarr3 none", "c/1/2"), ("zarr2 zlib", "1.2")],
)  # fmt: skip
def test_a_damaged_chunk_is_an_error_that_names_file_chunk_and_patch(
    tmp_path: Path, array: Any, kind: str, chunk: str
) -> None:
    path = Path(write_volume(kind, tmp_path / "x", array, CHUNK))
    _cut_off(path / chunk)
    dataset = FastPatchDataset(path, (4, 4), sampling=Grid(), threads=2)
    assert np.array_equal(dataset[4], array[4:, 4:8])
    for ask in (lambda: dataset[5], lambda: list(FastLoader(dataset, 3))):
        error = failure(ask)
        for said in (chunk, "the chunk at [4:8, 8:12]", "patch of 4×4 at (4, 8)", "sample 5"):
            assert said in str(error)


def _cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


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


@pytest.fixture
def damaged(tmp_path: Path, array: Any) -> Path:
    """Of whose six chunks the last is spoilt."""
    path = Path(write_volume("zarr3 zstd", tmp_path / "x", array, CHUNK))
    _cut_off(path / "c/1/2")
    return path


def test_a_volume_of_bad_patches_only_ends_with_an_error(damaged: Path) -> None:
    for policy in ("skip", "replace"):
        dataset = FastPatchDataset(
            damaged,
            (4, 4),
            sampling=Positions([[4, 8]] * 3),
            bad_samples=policy,  # type: ignore[arg-type]
        )
        with pytest.raises(BadSampleError, match=r"at \(4, 8\)"):
            dataset.__getitems__([0, 1])
        with pytest.raises(BadSampleError, match=r"at \(4, 8\)"):
            dataset[0]


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
    with pytest.raises(OptionError, match="has 2 dimensions, and patch_size 3"):
        FastPatchDataset(volume, (2, 2, 2))
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
    "patch of 0": (lambda: FastPatchDataset(VOLUME, (0, 2)), "patch_size must be .*got"),
    "one number": (lambda: FastPatchDataset(VOLUME, 4), "patch_size must be .*got"),  # type: ignore[arg-type]
    "volume": (lambda: FastPatchDataset(5, (2, 2)), "volume= must be a path or a NumPy array, got int: 5"),
    "sampling": (lambda: FastPatchDataset(VOLUME, (2, 2), sampling=5), "sampling must be one of .*got 5"),  # type: ignore[arg-type]
    "count": (lambda: Uniform(0), r"Uniform\(samples_per_epoch\) must be a number from 1, got 0"),
    "count of floats": (lambda: Uniform(1.5), "must be a number from 1, got 1.5"),  # type: ignore[arg-type]
    "volumes": (lambda: Uniform(1, volumes="all"), "'equal' or 'size', got 'all'"),  # type: ignore[arg-type]
    "mask fraction": (lambda: Uniform(1, mask_fraction=2), r"mask_fraction=…\) must be from 0 to 1, got 2"),
    "no mask": (
        lambda: FastPatchDataset(VOLUME, (2, 2), sampling=Uniform(1, mask_fraction=0.5)), "give mask=",
    ),
    "fraction": (lambda: Foreground(1, fraction=-0.1), r"fraction=…\) must be from 0 to 1, got -0.1"),
    "fraction of letters": (lambda: Foreground(1, fraction="a"), "must be from 0 to 1, got 'a'"),  # type: ignore[arg-type]
    "voxels": (lambda: Foreground(1, voxels=0), r"voxels=…\) must be a number from 1, got 0"),
    "no labels": (lambda: FastPatchDataset(VOLUME, (2, 2), sampling=Foreground(1)), "give labels="),
    "one class": (lambda: Foreground(1, classes=1), "must be a tuple of labels, or None, got 1"),  # type: ignore[arg-type]
    "classes that are no number": (lambda: Foreground(1, classes=(1, np.nan)), "tuple of labels, or None, got"),
    "stride": (lambda: Grid(stride=0), r"stride=…\) must be numbers from 1, got 0"),
    "stride of floats": (lambda: Grid(2.5), "must be numbers from 1, got 2.5"),  # type: ignore[arg-type]
    "number of strides": (
        lambda: FastPatchDataset(VOLUME, (2, 2), sampling=Grid(stride=(1, 1, 1))), r"must have 2 numbers, got \(1, 1, 1\)",
    ),
    "positions of floats": (lambda: Positions([[0.5, 1]]), r"integers \(N, D\), got float64"),
    "positions beyond int64": (lambda: Positions(np.array([[2**63, 1]], np.uint64)), "beyond the ends of any"),
    "positions of 3 dimensions": (
        lambda: FastPatchDataset(VOLUME, (2, 2), sampling=Positions([[0, 0, 0, 0]])), "got 4",
    ),
    "position of no volume": (
        lambda: FastPatchDataset([VOLUME] * 2, (2, 2), sampling=Positions([[2, 0, 0]])), "names volume 2 of 2",
    ),
    "position of volume -1": (
        lambda: FastPatchDataset([VOLUME] * 2, (2, 2), sampling=Positions([[-1, 0, 0]])), "names volume -1 of 2",
    ),
    "nan of a small float": (lambda: FastPatchDataset(SMALL, (2, 2), nan=1e6), "nan= is 1000000.0, which elements of float16"),
    "padding of a small float": (
        lambda: FastPatchDataset(SMALL, (9, 9), padding=("constant", -1e6)), "for volume is -1000000.0, which elements of float16",
    ),
    "padding of a large integer": (
        lambda: FastPatchDataset(VOLUME.astype("i8"), (9, 9), padding=("constant", 2**63)), "for volume is 9223372036854775808, which elements of int64",
    ),
    "cache on disk": (lambda: FastPatchDataset(VOLUME, (2, 2), cache=Cache("disk")), "not for volumes"),
}  # fmt: skip


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
    for chunk in (file for file in Path(path).rglob("*") if file.is_file() and file.name != "zarr.json"):
        chunk.write_bytes(b"")  # which the native core leaves to Python
    dataset = FastPatchDataset(path, (4, 4), sampling=Grid(), bad_samples=policy)

    def refuse(*_: Any) -> None:
        raise MemoryError if number == errno.ENOMEM else OSError(number, os.strerror(number))

    is_memory = number == errno.ENOMEM
    for name in ["decode"] if is_memory else ["open_file", "ZarrVolume._check_still_there"]:
        monkeypatch.setattr(f"fastpipe.volumes.zarr.{name}", refuse)
    said = "not enough memory" if is_memory else os.strerror(number)
    with pytest.raises(OSError, match=said) as caught:
        list(FastLoader(dataset, batch_size=1))
    assert not isinstance(caught.value, BadSampleError)


@pytest.fixture
def half_nan() -> Any:
    array = np.arange(24 * 4, dtype=np.float32).reshape(24, 4)
    array[12:] = np.nan
    return array


@pytest.mark.parametrize("good", [1, 2, 5])
def test_another_patch_is_found_if_there_is_one(good: int) -> None:
    array = np.full((12, 4), np.nan, np.float32)
    array[:good] = np.arange(good)[:, None]
    for seed in range(5):
        dataset = FastPatchDataset(
            array, (1, 4), sampling=Grid(), nan="error", bad_samples="replace", seed=seed, threads=1
        )
        patches = torch.cat(list(FastLoader(dataset, 4))).numpy()
        assert patches[:good, 0, 0].tolist() == list(range(good)), "those are themselves"
        assert set(patches[:, 0, 0].tolist()) <= set(range(good))


def test_each_bad_patch_is_logged_once_with_its_place(half_nan: Any, tmp_path: Path) -> None:
    """Random patches of one index are others in each epoch, and each bad one is named once by its own."""
    log = tmp_path / "bad.jsonl"
    bad = BadSamples("replace", log=str(log))
    dataset = FastPatchDataset(
        half_nan, (4, 4), sampling=Uniform(8), nan="error", bad_samples=bad, seed=0, threads=1
    )
    loader = FastLoader(dataset, 4)
    expected = set()
    for epoch in range(4):
        for index, start in enumerate(dataset.places(epoch)[1][:, 0].tolist()):
            if start + 4 > 12:
                expected.add((index, start))
        for batch in loader:
            assert not np.isnan(batch.numpy()).any()
    written = [json.loads(line) for line in log.read_text().splitlines()]
    found = {(line["index"], int(line["path"].rpartition("at (")[2].split(",")[0])) for line in written}
    assert expected <= found
    assert len(found) == len(written), "once each"
    assert all(start + 4 > 12 for _, start in found)
