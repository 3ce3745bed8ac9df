"""Orders of patches: each epoch has its own, whoever loads it, and tours decode little more than they use."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from failure import failure, raising
from torch.utils.data import ConcatDataset, DataLoader, Dataset
from volume_kinds import coordinates, write_volume

from fastpipe import Cache, FastHDF5Dataset, FastLoader, FastPatchDataset, Shuffle
from fastpipe.errors import OptionError, VolumeError
from fastpipe.sampling import Foreground, Grid, Positions, Uniform
from fastpipe.volumes import units

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

SIDE = 10  # of a chunk; the volume has 6×6×6 of them
SHAPE, PATCH, COUNT = (60, 60, 60), (12, 12, 12), 30
VOLUME = coordinates(SHAPE).astype(np.int32)
KINDS = {"whole": "zarr3 zstd", "parts": "zarr3 blosc", "hdf5": "hdf5 gzip"}
BY_PROCESSES = functools.partial(FastLoader, workers="processes")
GROUPS = Shuffle(unit="group")
ORDERS: dict[str, Any] = {"shuffled": True, "groups": GROUPS, "window": Shuffle(3, "group")}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("orders")
    return {name: write_volume(kind, folder / name, VOLUME, (SIDE,) * 3) for name, kind in KINDS.items()}


@pytest.fixture
def path(paths: dict[str, Any]) -> Any:
    return paths["whole"]


def dataset_of(path: Any, seed: int | None = 3, **options: Any) -> FastPatchDataset:
    options = {"sampling": Uniform(COUNT), "threads": 2, "cache": Cache("ram", 60_000), **options}
    return FastPatchDataset(path, PATCH, seed=seed, **options)


def corners(batches: Any) -> list[int]:
    """The first voxel of each patch, which says where it begins; and the rest is checked."""
    patches = np.concatenate([batch.numpy() for batch in batches])
    first = patches[:, :1, :1, :1]
    assert (patches - first == VOLUME[tuple(map(slice, PATCH))]).all()
    return first.ravel().tolist()  # type: ignore[no-any-return]


def expected(dataset: FastPatchDataset, seed: int, epoch: int, indices: Any = None) -> list[int]:
    """The same, as the dataset's places say it."""
    indices = np.arange(len(dataset)) if indices is None else np.asarray(indices)
    starts = dataset._places.places(seed, epoch, indices).starts
    return np.ravel_multi_index(tuple(starts.T), SHAPE).tolist()


# ---- without a seed, of several datasets, of wrappers ---------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("start", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["zarr3 sharded", "n5 gzip"])
@pytest.mark.usefixtures("common_cache_folder")
def test_workers_of_tensorstore_are_not_forked(tmp_path: Path, kind: str, start: str) -> None:
    dataset = dataset_of(write_volume(kind, tmp_path / "x", VOLUME, (SIDE,) * 3))
    wanted = expected(dataset, 3, 0)
    assert corners(FastLoader(dataset, 4)) == wanted
    for make in (BY_PROCESSES, DataLoader):
        error = str(failure(lambda: list(make(dataset, 4, num_workers=1)), VolumeError))
        assert "multiprocessing_context='spawn'" in error and "x." in error
    assert corners(FastLoader(dataset, 4)) == wanted
    assert corners(BY_PROCESSES(dataset, 4, num_workers=2, multiprocessing_context=start)) == wanted


def test_without_a_seed_each_call_gives_another_patch(path: Any) -> None:
    dataset = dataset_of(path, None)
    for draw in (lambda: dataset[0], lambda: dataset.__getitems__([0])[0]):

        def drawn(count: int) -> list[int]:
            torch.manual_seed(5)
            return [int(np.asarray(draw()).flat[0]) for _ in range(count)]

        assert len(set(drawn(30))) > 20
        assert drawn(5) == drawn(5)


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("order", ["groups", "window"])
def test_each_epoch_without_a_seed_has_a_tour_of_its_own(path: Any, order: str, workers: int) -> None:
    """Also where two epochs are at the same time."""
    dataset = dataset_of(path, None)
    loader = BY_PROCESSES(dataset, 4, shuffle=ORDERS[order], num_workers=workers)
    iterators, seeds, found = [], [], ([], [], [])
    for _ in range(2):
        iterators.append(iter(loader))
        found[len(seeds)].extend(corners([next(iterators[-1])]))
        seeds.append(loader.sampler.drawn)
    for batches in zip(*iterators, strict=True):
        for each, batch in zip(found, batches, strict=False):
            each.extend(corners([batch]))
    found[2].extend(corners(loader))
    seeds.append(loader.sampler.drawn)
    assert len(set(seeds)) == 3
    for seed, each in zip(seeds, found, strict=True):
        assert each == expected(dataset, seed, 0, loader.sampler.arrangement.order(seed, 0))


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("order", ["shuffled", "groups"])
def test_a_stock_loader_without_a_seed_has_each_patch_once(path: Any, order: str, workers: int) -> None:
    dataset, epochs = dataset_of(path, None), []
    drawn = dataset.batch_sampler(4, shuffle=ORDERS[order])
    for _ in range(2):
        batches = list(drawn)
        found, indices = (
            corners(DataLoader(dataset, batch_sampler=batches, num_workers=workers)),
            sum(batches, []),
        )
        assert sorted(indices) == list(range(COUNT))
        (key,) = {(index.seed, index.epoch) for index in indices}
        assert found == expected(dataset, *key, indices)
        epochs.append(found)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_datasets_have_their_patches_and_a_common_tour(path: Any, tmp_path: Path, workers: int) -> None:
    np.save(tmp_path / "y.npy", VOLUME)
    datasets = [dataset_of(path), dataset_of(tmp_path / "y.npy", sampling=Grid(stride=20))]
    loader = BY_PROCESSES(ConcatDataset(datasets), 7, seed=5, num_workers=workers)
    assert loader.plan.is_fast
    assert corners(loader) == [*expected(datasets[0], 5, 0), *expected(datasets[1], 5, 0)]
    shuffled = FastLoader(ConcatDataset(datasets), 7, shuffle=GROUPS, seed=5)
    for epoch in range(2):
        both = [*expected(datasets[0], 5, epoch), *expected(datasets[1], 5, epoch)]
        assert sorted(corners(shuffled)) == sorted(both)


def test_patches_and_other_samples_have_no_common_tour(path: Any, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((5, *PATCH), "i4"), chunks=(1, *PATCH))
    both = ConcatDataset([dataset_of(path), FastHDF5Dataset(tmp_path / "rows.h5", "x")])
    with pytest.raises(OptionError, match="no common order of patches and other samples"):
        FastLoader(both, 4, shuffle=GROUPS)


class Wrapper(Dataset[Any]):
    """A dataset of the script's around fastpipe's."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def test_a_wrapped_dataset_has_the_patches_of_its_batch_sampler(path: Any) -> None:
    dataset = dataset_of(path)
    wrapped = DataLoader(Wrapper(dataset), batch_sampler=dataset.batch_sampler(4, shuffle=GROUPS))
    assert corners(wrapped) == corners(FastLoader(dataset, 4, GROUPS))


# ---- tours ----------------------------------------------------------------------------------------


def amplification(path: Any, shuffle: Any, share: float, threads: int, epochs: int, count: int) -> float:
    """Of epochs with room for a share of the volume."""
    cache = Cache("ram", max(1, int(share * 4 * np.prod(SHAPE))))
    dataset = dataset_of(path, 1, sampling=Uniform(count), cache=cache, threads=threads)
    loader = FastLoader(dataset, 8, shuffle=shuffle)
    for _ in range(epochs):
        assert len(corners(loader)) == count
    return dataset.amplification


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_a_tour_decodes_at_most_twice_what_it_uses(paths: Any, name: str) -> None:
    """With a tenth of the volume in memory."""
    toured, uniform = (amplification(paths[name], shuffle, 0.1, 2, 2, 400) for shuffle in (GROUPS, True))
    assert toured <= 2.0
    assert toured < 0.7 * uniform


def test_without_memory_each_patch_is_decoded_alone(path: Any) -> None:
    places = Positions([[0, 0, 0], [0, 0, 0], [5, 5, 5]])
    dataset = dataset_of(path, sampling=places, cache="off")
    corners(DataLoader(dataset, 3))
    assert dataset.amplification == pytest.approx((8 + 8 + 8) * SIDE**3 / (3 * 12**3))
    assert FastPatchDataset(np.zeros((4, 4)), (2, 2)).amplification == 0


@pytest.mark.few(3)
@pytest.mark.parametrize("share", [1e-9, 1.2 / 216, 0.03])
@pytest.mark.parametrize("name", KINDS)
def test_values_are_right_when_the_memory_is_far_too_small(paths: Any, name: str, share: float) -> None:
    for shuffle in (GROUPS, True):
        assert amplification(paths[name], shuffle, share, 4, 1, 150) > 1


@pytest.mark.few(6)
@pytest.mark.parametrize("window", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    "sampling", [Uniform(70), Foreground(70, fraction=0.5), Grid(stride=16), Positions(np.zeros((9, 3), int))]
)
def test_a_tour_has_each_patch_once(path: Any, sampling: Any, window: int) -> None:
    labels = np.zeros(SHAPE, np.uint8)
    labels[20:25, 30:33, 40:] = 1
    dataset = FastPatchDataset(path, PATCH, labels=labels, sampling=sampling, seed=4)
    loader = FastLoader(dataset, 8, shuffle=Shuffle(window, "group"))
    orders = [corners(patches for patches, _ in loader) for _ in range(2)]
    for epoch, found in enumerate(orders):
        assert sorted(found) == sorted(expected(dataset, 4, epoch))
    if not isinstance(sampling, Positions):
        assert orders[0] != orders[1]


def test_neighbours_in_a_tour_come_from_several_places(path: Any) -> None:
    """A batch's patches are not all of one corner of the volume."""
    dataset = FastPatchDataset(path, PATCH, sampling=Uniform(400), seed=1)
    starts = dataset.places()[1].astype(float)
    one, eight = (
        starts[list(dataset.batch_sampler(8, shuffle=Shuffle(window, "group")))].std(axis=1).mean()
        for window in (1, 8)
    )
    assert eight > 1.5 * one and eight > 0.7 * starts.std()


def test_volumes_of_several_shapes_on_one_tour(path: Any, tmp_path: Any) -> None:
    np.save(tmp_path / "y.npy", VOLUME[:13])
    both = [path, tmp_path / "y.npy"]
    dataset = dataset_of(both, sampling=Uniform(60))
    assert len(corners(FastLoader(dataset, 8, shuffle=GROUPS))) == 60
    groups = dataset.locality_groups()
    volumes, starts = dataset.places()
    for volume in (0, 1):
        rows = np.flatnonzero(volumes == volume)
        assert len(rows)
        unit = np.array(dataset._roles[0].volumes[volume].grid.unit)
        cells = {tuple(cell) for cell in (starts[rows] // unit).tolist()}
        assert len(set(groups[rows].tolist())) == len(cells)
    assert not set(groups[volumes == 0].tolist()) & set(groups[volumes == 1].tolist())
    apart = ConcatDataset([FastPatchDataset(one, PATCH, sampling=Uniform(20)) for one in both])
    assert len(corners(FastLoader(apart, 8, shuffle=GROUPS, seed=3))) == 40


# ---- the budget -----------------------------------------------------------------------------------


def amplification_of(dataset: FastPatchDataset, loader: Any) -> float:
    before = dataset._running().counts.nbytes
    list(loader)
    decoded, used = np.subtract(dataset._running().counts.nbytes, before)
    return float(decoded / used)


@pytest.mark.parametrize("again", ["the same loader", "a new loader"])
def test_an_epoch_that_comes_again_decodes_no_more_than_before(path: Any, again: str) -> None:
    dataset = dataset_of(path, sampling=Uniform(400), cache=Cache("ram", max_bytes=160_000), threads=1)
    loader = FastLoader(dataset, 4, GROUPS)
    first = amplification_of(dataset, loader)
    for _ in range(2):
        loader = loader if again == "the same loader" else FastLoader(dataset, 4, GROUPS)
        loader.set_epoch(0)
        assert amplification_of(dataset, loader) <= 1.1 * first


def test_volumes_of_many_shapes_share_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volumes = [f"{tmp_path}/{side}.zarr" for side in range(16, 28)]
    for side, volume in enumerate(volumes, 16):
        zarr.create_array(volume, data=np.full((48, 48, 48), side, "u1"), chunks=(8, 8, side))
    found, cache = [], Cache("ram", max_bytes=300_000)
    for most_sizes in (units._MOST_SIZES, 100):  # then each shape has a part of its own
        monkeypatch.setattr(units, "_MOST_SIZES", most_sizes)
        dataset = dataset_of(volumes, sampling=Uniform(300), cache=cache, threads=1)
        found.append(amplification_of(dataset, FastLoader(dataset, 4, GROUPS)))
    assert found[0] < 0.9 * found[1]


def test_ranks_do_not_share_what_files_had_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    datasets = []
    for value in (1, 2):
        array = np.full((16, 16), value, np.uint8)
        zarr.create_array(tmp_path / "x.zarr", data=array, chunks=(8, 8), fill_value=9, overwrite=True)
        cache = Cache("ram", max_bytes=1 << 20)
        datasets.append(FastPatchDataset(tmp_path / "x.zarr", (16, 16), sampling=Grid(), cache=cache))
        assert np.array_equal(datasets[-1][0], array)


def test_ranks_that_cannot_meet_have_one_budget_together(
    path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def slots_of() -> int:
        dataset = FastPatchDataset(path, PATCH, cache=Cache("ram", max_bytes=160_000))
        assert dataset[0].shape == PATCH
        return sum(memory.slots for memory in dataset._remembered._memories.values() if memory is not None)

    whole = slots_of()
    monkeypatch.setattr(units, "joined_memory", raising(OSError("no space left for a note")))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with caplog.at_level("WARNING", "fastpipe"):
        assert 0 < slots_of() <= whole // 8
    assert "8 ranks" in caplog.text and "no space left for a note" in caplog.text


def test_orders_and_places_do_not_change_between_releases() -> None:
    """States and results depend on them."""
    dataset = FastPatchDataset(np.zeros((200, 300), "u1"), (60, 50), sampling=Uniform(8), seed=7)
    places = [[50, 227], [7, 198], [9, 132], [86, 18], [30, 11], [74, 112], [133, 81], [118, 167]]
    assert dataset.places(0)[1].tolist() == places
    assert list(dataset.batch_sampler(8, shuffle=Shuffle(2, "group"))) == [[0, 6, 1, 5, 4, 2, 7, 3]]
