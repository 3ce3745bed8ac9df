"""What is put in a loader's place: it reads the same files, and is measured on them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import nibabel
import numpy as np
import pytest
import torch
import zarr
from torch.utils.data import DataLoader, Dataset

import fastpipe
from fastpipe.tools.costs import LoaderCosts
from fastpipe.tools.loaders import Watched
from fastpipe.tools.loops import Loop
from fastpipe.tools.stacks import Line
from fastpipe.tools.swaps import of_volumes
from fastpipe.tools.witness import ArrayRead, OpenVolume, Reads, volumes_of

SECONDS = 0.8


class Rows(Dataset[Any]):
    """Rows of an HDF5 file that each process opens, one by one."""

    def __init__(self, path: Path, work: int = 0) -> None:
        self.path, self.work, self.file = str(path), work, None

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = h5py.File(self.path)
        row = torch.from_numpy(self.file["x"][index])
        for _ in range(self.work):
            row = row + np.sin(np.arange(20_000.0)).sum() * 0
        return row, int(self.file["y"][index])


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as file:
        values = np.random.default_rng(0).normal(size=(512, 32, 32)).astype("f4")
        file.create_dataset("x", data=values, chunks=(64, 32, 32), compression="gzip")
        file["y"] = np.arange(512)
    return path


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [0, 1])
def test_rows_of_an_hdf5_file_are_read_by_fastpipe(rows: Path, workers: int) -> None:
    loader = DataLoader(Rows(rows), batch_size=16, shuffle=True, num_workers=workers)
    report = fastpipe.profile(loader, lambda batch: None, seconds=SECONDS, try_advice=True)
    assert report.stall[0].name == "read"
    first = report.advice[0]
    assert "FastHDF5Dataset('rows.h5', ['x', 'y'])" in first.what
    assert "transform=" not in first.what and "augment=" not in first.what
    assert first.predicted_s is not None and first.predicted_s < report.step_s / 2
    assert first.tried_s is not None and first.tried_s < report.step_s
    assert h5py.Dataset.__getitem__.__module__ == "h5py._hl.dataset"


def test_what_else_a_dataset_does_is_counted_in_one_way_and_left_out_in_the_other(rows: Path) -> None:
    loader = DataLoader(Rows(rows, work=3), batch_size=16, shuffle=True)
    report = fastpipe.profile(loader, lambda batch: None, seconds=SECONDS)
    ways = [advice for advice in report.advice if "FastHDF5Dataset" in advice.what]
    assert ["augment=" in way.what for way in ways] == [True, False] and "transform=" in ways[1].what
    whole, as_it_is = (way.predicted_s for way in ways)
    assert whole is not None and as_it_is is not None and whole < as_it_is < report.step_s
    assert "Rows.__getitem__" in ways[0].why


def test_reads_are_seen_until_there_are_enough_and_h5py_is_as_it_was(rows: Path) -> None:
    getitem = h5py.Dataset.__getitem__
    with h5py.File(rows) as file, closing(Reads().begin()) as reads:
        for number in range(300):
            file["x"][number], file["y"][number]
        assert h5py.Dataset.__getitem__ is getitem
        file["x"][3:5, 0]
    assert reads.arrays == [
        ArrayRead(str(rows.resolve()), "/x", (512, 32, 32), (32, 32)),
        ArrayRead(str(rows.resolve()), "/y", (512,), ()),
    ]
    assert [read.sample_dims for read in reads.arrays] == [1, 1]
    assert ArrayRead("f", "/x", (8, 4), (3, 4)).sample_dims is None


class Patches(Dataset[Any]):
    """Patches of a volume at random."""

    def __init__(self, path: Path) -> None:
        self.image, self.labels = zarr.open_array(path / "image"), zarr.open_array(path / "labels")

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        start = [int(torch.randint(size - 8 + 1, ())) for size in self.image.shape]
        box = tuple(slice(at, at + 8) for at in start)
        return self.image[box], self.labels[box]


@pytest.mark.slow
def test_patches_of_a_volume_are_read_by_fastpipe(tmp_path: Path) -> None:
    for name, dtype in (("image", "f4"), ("labels", "u1")):
        array = zarr.create_array(tmp_path / name, shape=(32, 32, 32), chunks=(16, 16, 16), dtype=dtype)
        array[:] = np.random.default_rng(0).integers(0, 9, (32, 32, 32))
    loader = DataLoader(Patches(tmp_path), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    report = fastpipe.profile(loader, lambda batch: None, seconds=SECONDS, try_advice=True)
    first = report.advice[0]
    assert "FastPatchDataset('image', (8, 8, 8), labels='labels')" in first.what
    assert first.predicted_s is not None and first.predicted_s < report.step_s
    assert first.tried_s is not None


class Loaded(Dataset[Any]):
    """Patches of volumes that are loaded for each sample."""

    def __init__(self, files: list[tuple[str, str]]) -> None:
        self.files = files

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        image, labels = (nibabel.load(file).get_fdata() for file in self.files[index % len(self.files)])
        box = (slice(4, 12), slice(8, 16), slice(0, 8))
        return image[None][(slice(None), *box)], labels[box]


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [0, 1])
def test_patches_of_volumes_that_are_loaded_for_each_are_read_by_fastpipe(
    tmp_path: Path, workers: int
) -> None:
    values = np.random.default_rng(0).integers(0, 9, (64, 64, 48)).astype(np.int16)
    files = [(str(tmp_path / f"{case}.nii.gz"), str(tmp_path / f"{case}-labels.nii.gz")) for case in range(2)]
    for name in (name for pair in files for name in pair):
        nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), name)
    load = nibabel.load
    report = fastpipe.profile(
        DataLoader(Loaded(files), batch_size=4, num_workers=workers), lambda batch: None, seconds=SECONDS
    )
    assert nibabel.load is load
    first = report.advice[0]
    assert "FastPatchDataset([('0.nii.gz', '0-labels.nii.gz'), …], (8, 8, 8))" in first.what
    assert first.predicted_s is not None and first.predicted_s < report.step_s / 2


def test_samples_that_are_whole_volumes_are_no_patches() -> None:
    loop, line = Loop(1.0, True), Line("train.py", 3, "main")
    loop.batch = [torch.zeros(2, 16, 16, 16)]
    watched = Watched(DataLoader(range(4), batch_size=2), line, line, loop)
    assert not list(of_volumes(watched, LoaderCosts(), [OpenVolume("/x.npy", (16, 16, 20), True)]))


def test_what_is_no_volume_is_not_taken_for_one(tmp_path: Path) -> None:
    np.save(tmp_path / "flat.npy", np.zeros((4, 4)))
    np.save(tmp_path / "x.npy", np.zeros((4, 4, 4)))
    load = np.load
    with closing(Reads().begin()) as loads:
        np.load(tmp_path / "flat.npy"), np.load(tmp_path / "x.npy"), np.load(tmp_path / "x.npy")
        with (tmp_path / "x.npy").open("rb") as file:
            np.load(file)
        with pytest.raises(FileNotFoundError):
            np.load(tmp_path / "none.npy")
        for _ in range(600):
            np.load(tmp_path / "flat.npy")
        assert np.load is load  # enough was seen
    assert loads.volumes == [OpenVolume(str(tmp_path / "x.npy"), (4, 4, 4), True)]


def test_volumes_that_cannot_be_opened_elsewhere_are_none(tmp_path: Path) -> None:
    class Holder:
        def __init__(self) -> None:
            self.memory = zarr.create_array(zarr.storage.MemoryStore(), shape=(4,), dtype="u1")
            self.array = np.zeros((4, 4))

    assert volumes_of(Holder()) == [] and volumes_of(3) == []


def test_images_are_seen_in_all_threads_with_their_boxes_and_sizes(photo_tree: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from PIL import Image

    opened, crop, resize = Image.open, Image.Image.crop, Image.Image.resize
    paths = sorted(photo_tree.rglob("*.jpg"))[:4]

    def read(number: int) -> None:
        with Image.open(paths[number]) as image:
            image.crop((number, 0, 20 + number, 20)).resize((8, 8)).resize((4, 4))

    with closing(Reads().begin()) as reads, ThreadPoolExecutor(2) as pool:
        list(pool.map(read, range(4)))
    assert (Image.open, Image.Image.crop, Image.Image.resize) == (opened, crop, resize)
    assert reads.opened == 4
    found = {Path(one.file): (one.box, one.size) for one in reads.images}
    assert found == {path: ((at, 0, 20 + at, 20), (8, 8)) for at, path in enumerate(paths)}


def test_two_loaders_of_rows_at_once_leave_nothing_of_what_looked_at_them(rows: Path) -> None:
    before = h5py.Dataset.__getitem__
    with fastpipe.profile():
        one = DataLoader(Rows(rows), batch_size=16)
        other = DataLoader(Rows(rows), batch_size=16)
        for number, _ in enumerate(zip(one, other, strict=True), start=1):
            # Each has seen enough after 256 reads: the one that began first ends first.
            assert number > 1 or h5py.Dataset.__getitem__ is not before
    assert h5py.Dataset.__getitem__ is before
