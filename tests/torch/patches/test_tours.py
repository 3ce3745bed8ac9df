"""Tours decode little more than they use; and whatever is remembered, values are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, DataLoader
from volume_kinds import coordinates, write_volume

from fastpipe import Cache, FastLoader, FastPatchDataset, Shuffle
from fastpipe.sampling import Foreground, Grid, Positions, Uniform

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

SIDE = 10  # of a chunk; the volume has 6×6×6 of them
SHAPE, PATCH = (60, 60, 60), (12, 12, 12)
GROUPS = Shuffle(unit="group")
KINDS = {"whole chunks": "zarr3 zstd", "parts": "zarr3 blosc", "hdf5": "hdf5 gzip"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tours")
    array = coordinates(SHAPE).astype(np.uint32)
    return {
        name: write_volume(kind, folder / name.split()[0], array, (SIDE, SIDE, SIDE))
        for name, kind in KINDS.items()
    }


def run(loader: Any, shape: Sequence[int] = SHAPE) -> int:
    """Go through an epoch, and compare each patch; how many there were."""
    inside = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)[tuple(map(slice, PATCH))]
    count = 0
    for batch in loader:
        patches = batch.numpy().astype(np.int64)
        assert np.array_equal(patches - patches[:, :1, :1, :1], np.broadcast_to(inside, patches.shape))
        count += len(patches)
    return count


def amplification(
    path: Any, shuffle: Any, share: float, threads: int = 2, epochs: int = 2, count: int = 400
) -> float:
    budget = max(1, int(share * 4 * np.prod(SHAPE)))
    dataset = FastPatchDataset(
        path, PATCH, sampling=Uniform(count), seed=1, cache=Cache("ram", budget), threads=threads
    )
    loader = FastLoader(dataset, 8, shuffle=shuffle)
    for _ in range(epochs):
        assert run(loader) == count
    return dataset.amplification


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_a_tour_decodes_at_most_twice_what_it_uses_with_a_tenth_of_the_volume_in_memory(
    paths: Any, name: str
) -> None:
    toured, uniform = (amplification(paths[name], shuffle, 0.1) for shuffle in (GROUPS, True))
    assert toured <= 2.0
    assert toured < 0.7 * uniform


def test_without_memory_each_patch_is_decoded_alone(paths: Any) -> None:
    dataset = FastPatchDataset(
        paths["whole chunks"], PATCH, sampling=Positions([[0, 0, 0], [0, 0, 0], [5, 5, 5]]), cache="off"
    )
    run(DataLoader(dataset, 3))
    assert dataset.amplification == pytest.approx((8 + 8 + 8) * SIDE**3 / (3 * 12**3))
    assert FastPatchDataset(np.zeros((4, 4)), (2, 2)).amplification == 0


@pytest.mark.few(3)
@pytest.mark.parametrize("share", [1e-9, 1.2 / 216, 0.03])
@pytest.mark.parametrize("name", KINDS)
def test_values_are_right_when_the_memory_is_far_too_small(paths: Any, name: str, share: float) -> None:
    for shuffle in (GROUPS, True):
        assert amplification(paths[name], shuffle, share, threads=4, epochs=1, count=150) > 1


def test_worker_processes_share_what_is_remembered(paths: Any) -> None:
    dataset = FastPatchDataset(
        paths["parts"], PATCH, sampling=Uniform(120), seed=2, cache=Cache("ram", 60_000), threads=2
    )
    for shuffle in (GROUPS, True):
        loader = FastLoader(dataset, 8, shuffle=shuffle, num_workers=2, workers="processes")
        assert run(loader) == 120


@pytest.mark.few(6)
@pytest.mark.parametrize("window", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    "sampling", [Uniform(70), Foreground(70, fraction=0.5), Grid(stride=16), Positions(np.zeros((9, 3), int))]
)
def test_a_tour_has_each_patch_once(paths: Any, sampling: Any, window: int) -> None:
    labels = np.zeros(SHAPE, np.uint8)
    labels[20:25, 30:33, 40:] = 1
    dataset = FastPatchDataset(paths["whole chunks"], PATCH, labels=labels, sampling=sampling, seed=4)
    loader = FastLoader(dataset, 8, shuffle=Shuffle(window, "group"))
    orders = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        _, starts = dataset.places(epoch)
        found = np.concatenate([batch[0][:, 0, 0, 0].numpy() for batch in loader]).tolist()
        assert sorted(found) == sorted(np.ravel_multi_index(tuple(starts.T), SHAPE).tolist())
        orders.append(found)
    if not isinstance(sampling, Positions):
        assert orders[0] != orders[1]


def test_neighbours_in_a_tour_come_from_several_places(paths: Any) -> None:
    """A batch's patches are not all of one corner of the volume."""
    dataset = FastPatchDataset(paths["whole chunks"], PATCH, sampling=Uniform(400), seed=1)
    spread = {}
    for window in (1, 8):
        starts = dataset.places()[1].astype(float)
        batches = starts[list(dataset.batch_sampler(8, shuffle=Shuffle(window, "group")))]
        spread[window] = batches.std(axis=1).mean()
    assert spread[8] > 1.5 * spread[1]
    assert spread[8] > 0.7 * starts.std()


def test_volumes_of_several_shapes_on_one_tour(paths: Any, tmp_path: Any) -> None:
    small = write_volume("npy", tmp_path / "y", coordinates((13, 60, 60)).astype(np.uint32), (SIDE,) * 3)
    both = [paths["whole chunks"], small]
    dataset = FastPatchDataset(both, PATCH, sampling=Uniform(60), seed=1, cache=Cache("ram", 50_000))
    assert run(FastLoader(dataset, 8, shuffle=GROUPS)) == 60
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
    assert run(FastLoader(apart, 8, shuffle=GROUPS, seed=3)) == 40


def test_orders_and_places_do_not_change_between_releases() -> None:
    """States and results depend on them."""
    dataset = FastPatchDataset(np.zeros((200, 300), "u1"), (60, 50), sampling=Uniform(8), seed=7)
    assert dataset.places(0)[1].tolist() == PLACES
    assert list(dataset.batch_sampler(8, shuffle=Shuffle(2, "group"))) == [[0, 6, 1, 5, 4, 2, 7, 3]]


PLACES = [[50, 227], [7, 198], [9, 132], [86, 18], [30, 11], [74, 112], [133, 81], [118, 167]]
