"""Loaders of every kind give the same patches: processes, ranks, orders and wrappers make no difference."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Sampler
from volume_kinds import coordinates, random_array, write_volume

from fastpipe import Cache, FastHDF5Dataset, FastLoader, FastPatchDataset, Shuffle
from fastpipe.errors import BadSampleError, OptionError, VolumeError
from fastpipe.sampling import Foreground, Grid, Uniform

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

SHAPE, CHUNK, PATCH, COUNT = (13, 14, 16), (4, 4, 8), (3, 4, 5), 30
GROUPS = Shuffle(unit="group")
ORDERS: dict[str, Any] = {
    "in order": False, "shuffled": True, "groups": GROUPS, "window": Shuffle(3, "group"),
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("loaders")
    return write_volume("zarr3 zstd", folder / "x", coordinates(SHAPE), CHUNK)


def dataset_of(path: Any, seed: int | None = 3, **options: Any) -> FastPatchDataset:
    return FastPatchDataset(
        path, PATCH, **{"sampling": Uniform(COUNT), "seed": seed, "threads": 2, "cache": Cache("ram", 20_000), **options}
    )  # fmt: skip


def corners(batches: Any) -> list[int]:
    """The first voxel of each patch, which says where it begins; and the rest is checked."""
    found = []
    inside = np.arange(int(np.prod(SHAPE))).reshape(SHAPE)[: PATCH[0], : PATCH[1], : PATCH[2]]
    for batch in batches:
        patches = batch.numpy()
        first = patches[:, 0, 0, 0]
        assert np.array_equal(patches - first[:, None, None, None], np.broadcast_to(inside, patches.shape))
        found += first.tolist()
    return found


def expected(dataset: FastPatchDataset, seed: int, epoch: int, indices: Any = None) -> list[int]:
    """The same, as the dataset's places say it."""
    indices = np.arange(len(dataset)) if indices is None else np.asarray(indices)
    starts = dataset._places.places(seed, epoch, indices).starts
    return np.ravel_multi_index(tuple(starts.T), SHAPE).tolist()


# Each process that is spawned imports torch.
STARTS = ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)]


@pytest.mark.few(1)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", ["zarr3 sharded", "n5 gzip"])
@pytest.mark.usefixtures("common_cache_folder")
def test_volumes_of_tensorstore_need_workers_that_are_not_forked(
    tmp_path: Path, kind: str, start: str
) -> None:
    path = write_volume(kind, tmp_path / "x", coordinates(SHAPE), CHUNK)
    dataset = dataset_of(path)
    wanted = expected(dataset, 3, 0)
    assert corners(FastLoader(dataset, 4)) == wanted
    for loader in (
        FastLoader(dataset, 4, num_workers=1, workers="processes"),
        DataLoader(dataset, 4, num_workers=1),
    ):
        error = failure(loader)
        assert isinstance(error, VolumeError)
        assert "multiprocessing_context='spawn'" in str(error)
        assert "x." in str(error)
    assert corners(FastLoader(dataset, 4)) == wanted
    assert (
        corners(FastLoader(dataset, 4, num_workers=2, workers="processes", multiprocessing_context=start))
        == wanted
    )


def failure(loader: Any) -> Exception:
    """The error with which an epoch ends, without what its traceback refers to."""
    try:
        list(loader)
    except (VolumeError, BadSampleError) as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    raise AssertionError("there was no error")


def test_without_a_seed_each_call_gives_another_patch(path: Any) -> None:
    dataset = dataset_of(path, None)
    for draw in (lambda: dataset[0], lambda: dataset.__getitems__([0])[0]):
        found = {int(np.asarray(draw()).flat[0]) for _ in range(30)}
        assert len(found) > 20
        torch.manual_seed(5)
        first = [int(np.asarray(draw()).flat[0]) for _ in range(5)]
        torch.manual_seed(5)
        assert [int(np.asarray(draw()).flat[0]) for _ in range(5)] == first


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("order", ["groups", "window"])
def test_without_a_seed_the_patches_are_those_that_the_tour_was_made_for(
    path: Any, order: str, workers: int
) -> None:
    dataset = dataset_of(path, None)
    loader = FastLoader(dataset, 4, shuffle=ORDERS[order], num_workers=workers, workers="processes")
    seeds = set()
    for _ in range(3):
        found = corners(loader)
        seed = loader.sampler.drawn
        assert seed is not None
        seeds.add(seed)
        order_of = loader.sampler.arrangement.order(seed, 0)
        assert found == expected(dataset, seed, 0, order_of)
    assert len(seeds) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_seed_epochs_at_the_same_time_have_each_its_own_patches(path: Any, workers: int) -> None:
    dataset = dataset_of(path, None)
    loader = FastLoader(dataset, 4, shuffle=ORDERS["groups"], num_workers=workers, workers="processes")
    one = iter(loader)
    found, seeds = corners([next(one)]), [loader.sampler.drawn]
    other = iter(loader)
    others = corners([next(other)])
    seeds.append(loader.sampler.drawn)
    for batch, another in zip(one, other, strict=True):
        found += corners([batch])
        others += corners([another])
    assert seeds[0] != seeds[1]
    for seed, each in zip(seeds, (found, others), strict=True):
        assert each == expected(dataset, seed, 0, loader.sampler.arrangement.order(seed, 0))


class Recording(Sampler[list[int]]):
    """Notes what a batch sampler gives."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.given = batches, []

    def __iter__(self) -> Any:
        for indices in self.batches:
            self.given.append(indices)
            yield indices

    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("order", ["shuffled", "groups"])
def test_a_stock_loader_without_a_seed_has_each_patch_of_the_drawn_epoch_once(
    path: Any, order: str, workers: int
) -> None:
    dataset = dataset_of(path, None)
    batches = Recording(dataset.batch_sampler(4, shuffle=ORDERS[order]))
    loader = DataLoader(dataset, batch_sampler=batches, num_workers=workers)
    epochs = []
    for _ in range(2):
        batches.given.clear()
        found = corners(loader)
        indices = [index for batch in batches.given for index in batch]
        assert sorted(indices) == list(range(COUNT))
        (key,) = {(index.seed, index.epoch) for index in indices}
        assert found == expected(dataset, *key, indices)
        epochs.append(found)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_several_datasets_have_their_patches_and_a_common_tour(
    path: Any, tmp_path: Path, workers: int
) -> None:
    other = write_volume("npy", tmp_path / "y", coordinates(SHAPE), CHUNK)
    datasets = [dataset_of(path), dataset_of(other, sampling=Grid(stride=(5, 6, 7)))]
    loader = FastLoader(ConcatDataset(datasets), 7, seed=5, num_workers=workers, workers="processes")
    assert loader.plan.is_fast
    assert corners(loader) == [*expected(datasets[0], 5, 0), *expected(datasets[1], 5, 0)]
    shuffled = FastLoader(ConcatDataset(datasets), 7, shuffle=GROUPS, seed=5)
    for epoch in range(2):
        both = [*expected(datasets[0], 5, epoch), *expected(datasets[1], 5, epoch)]
        assert Counter(corners(shuffled)) == Counter(both)


def test_patches_and_other_samples_have_no_common_tour(path: Any) -> None:
    rows = Path(path).parent / "rows.h5"
    with h5py.File(rows, "w") as file:
        file.create_dataset("x", data=np.zeros((5, *PATCH), "i8"), chunks=(1, *PATCH))
    both = ConcatDataset([dataset_of(path), FastHDF5Dataset(rows, "x")])
    with pytest.raises(OptionError, match="no common order of patches and other samples"):
        FastLoader(both, 4, shuffle=GROUPS)


REFERENCED = ["zarr3 blosc", "zarr3 sharded", "n5 gzip", "hdf5 gzip", "hdf5 scale-offset", "tiff tiles", "tiff raw",
              "tiff folder zlib", "nii", "nii.gz", "b2nd", "npy fortran", "array", "tiff big-endian"]  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", REFERENCED)
def test_the_reference_has_the_same_patches_under_a_seed(tmp_path: Path, kind: str) -> None:
    array = random_array(SHAPE, "i2")
    path = write_volume(kind, tmp_path / "x", array, CHUNK)
    for sampling in (Uniform(10), Foreground(10, fraction=0.5), Grid()):
        dataset = FastPatchDataset(
            path, PATCH, labels=array % 3, sampling=sampling, seed=3, padding="reflect", threads=2
        )
        loader = FastLoader(dataset, 4)
        reference = loader.reference()
        assert type(reference) is DataLoader
        for ours, theirs in zip(loader, reference, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
