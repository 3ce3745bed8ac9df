"""A loader goes on where another was: the same patches, in the same order, with and without a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from volume_kinds import coordinates, write_volume

from fastpipe import Cache, FastLoader, FastPatchDataset, Shard, Shuffle
from fastpipe.errors import OptionError
from fastpipe.sampling import Uniform

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

SHAPE, CHUNK, PATCH, COUNT = (13, 14, 16), (4, 4, 8), (3, 4, 5), 30
ORDERS: dict[str, Any] = {
    "in order": False, "shuffled": True, "groups": Shuffle(unit="group"), "window": Shuffle(3, "group"),
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("resume")
    return write_volume("zarr3 zstd", folder / "x", coordinates(SHAPE), CHUNK)


def dataset_of(path: Any, seed: int | None, sampling: Any = None, **options: Any) -> FastPatchDataset:
    return FastPatchDataset(
        path, PATCH, sampling=sampling or Uniform(COUNT), seed=seed, threads=2, cache=Cache("ram", 20_000),
        **options,
    )  # fmt: skip


def batches_of(loader: Any) -> list[list[int]]:
    return [batch[:, 0, 0, 0].tolist() for batch in loader]


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("order", ["in order", "groups", "window"])
def test_every_order_goes_on_within_an_epoch(path: Any, order: str, seed: int | None, workers: int) -> None:
    def make(dataset: Any = None) -> FastLoader[Any]:
        return FastLoader(
            dataset_of(path, seed) if dataset is None else dataset,
            4,
            shuffle=ORDERS[order],
            num_workers=workers,
            workers="processes",
        )

    torch.manual_seed(7)
    first = make()
    batches_of(first)  # an epoch before
    states, batches = [], []
    for batch in first:
        batches.append(batch[:, 0, 0, 0].tolist())
        states.append(json.loads(json.dumps(first.state_dict())))
    # With a seed the epochs after it are the same too; without, as many numbers were drawn as without a break.
    following = batches_of(first) if seed is not None else None
    for cut in (0, 4, 6) if workers else range(0, 8, 2):
        torch.manual_seed(99)
        again = make()
        again.load_state_dict(states[cut])
        assert batches_of(again) == batches[cut + 1 :], cut
        if following is not None:
            assert batches_of(again) == following


def test_a_state_goes_on_with_other_workers_and_ranks(path: Any) -> None:
    """Three ranks go on where two were."""

    def loaders(world: int, workers: int) -> list[FastLoader[Any]]:
        return [
            FastLoader(
                dataset_of(path, 3), 12 // world, shuffle=Shuffle(3, "group"), shard=Shard(rank, world, "eval"),
                num_workers=workers, workers="processes",
            )
            for rank in range(world)
        ]  # fmt: skip

    whole = batches_of(loaders(1, 0)[0])
    before = loaders(2, 0)
    for loader in before:
        iterator = iter(loader)
        next(iterator)
        del iterator
    after = loaders(3, 1)
    for loader in after:
        loader.load_state_dict(before[0].state_dict())
    parts = [sum(batches_of(loader), []) for loader in after]
    assert sorted(sum(parts, [])) == sorted(sum(whole[1:], []))


def test_a_state_of_another_order_is_refused(path: Any, tmp_path: Path) -> None:
    states = {}
    for name, shuffle in ORDERS.items():
        loader = FastLoader(dataset_of(path, 3), 4, shuffle=shuffle)
        iterator = iter(loader)
        next(iterator)
        del iterator
        states[name] = loader.state_dict()
    for name, state in states.items():
        for other, shuffle in ORDERS.items():
            again = FastLoader(dataset_of(path, 3), 4, shuffle=shuffle)
            if name == other:
                again.load_state_dict(state)
            elif {name, other} != {"in order", "shuffled"}:  # of which a loader only knows that it has a seed
                with pytest.raises(OptionError, match="this state was saved with the order"):
                    again.load_state_dict(state)
    fewer = FastLoader(dataset_of(path, 3, Uniform(20)), 4, shuffle=ORDERS["window"])
    with pytest.raises(OptionError, match="this state is of a dataset of 30 samples"):
        fewer.load_state_dict(states["window"])
    larger = write_volume("npy", tmp_path / "x", coordinates((20, 20, 20)), CHUNK)
    with pytest.raises(OptionError, match="this state was saved with"):
        FastLoader(dataset_of(larger, 3), 4, shuffle=ORDERS["window"]).load_state_dict(states["window"])


def test_orders_and_places_do_not_change_between_releases() -> None:
    """They must not change between releases: states and results depend on them."""
    dataset = FastPatchDataset(np.zeros((200, 300), "u1"), (60, 50), sampling=Uniform(8), seed=7)
    assert dataset.places(0)[1].tolist() == PLACES
    assert list(dataset.batch_sampler(8, shuffle=Shuffle(2, "group"))) == [TOUR]


PLACES = [[50, 227], [7, 198], [9, 132], [86, 18], [30, 11], [74, 112], [133, 81], [118, 167]]
TOUR = [0, 6, 1, 5, 4, 2, 7, 3]
