"""What a loader will ask for is known before it does, and knowing it changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from fastpipe import FastImageFolder, FastLoader, Shard
from fastpipe.torch.folder_source import FolderSource
from fastpipe.torch.upcoming import PeekedIndices, UpcomingIndices

pytestmark = pytest.mark.usefixtures("same_generators")

SMALL = v1.Compose([v1.Resize(8), v1.CenterCrop(8), v1.ToTensor()])


class _Spy:
    """Looks at all that is ahead as soon as an epoch begins."""

    def __init__(self) -> None:
        self.ahead: list[list[int]] = []
        self.asked_for: list[list[int]] = []
        self.epochs: list[UpcomingIndices] = []

    def begin_epoch(self, ahead: UpcomingIndices) -> None:
        self.epochs.append(ahead)
        self.ahead.append([index for part in ahead.indices() for index in part.tolist()])
        self.asked_for.append([])

    def requested(self, indices: Sequence[int]) -> None:
        self.asked_for[-1] += list(indices)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> _Spy:
    made = _Spy()
    monkeypatch.setattr(FolderSource, "prefetchers", lambda self, *, is_here: [made])
    return made


class _Shuffled(Sampler[int]):
    """A script's own, which may look at anything each time."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(3).sample(range(self.count), self.count))

    def __len__(self) -> int:
        return self.count


def _weights(count: int) -> list[float]:
    return [1.0 + number for number in range(count)]


_KNOWN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "in order": lambda data: {},
    "shuffled": lambda data: {"shuffle": True},
    "generator": lambda data: {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "drop_last": lambda data: {"shuffle": True, "drop_last": True},
    "weights": lambda data: {"sampler": WeightedRandomSampler(_weights(len(data)), 30)},
    "subset": lambda data: {"sampler": SubsetRandomSampler(range(0, len(data), 2))},
    "distributed": lambda data: {"sampler": DistributedSampler(data, 2, 1)},
    "batches": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 5, False)},
}


def _options(make: Callable[[Any], dict[str, Any]], data: Any) -> dict[str, Any]:
    options = make(data)
    return options if "batch_sampler" in options else {"batch_size": 5, **options}


def _labels(loader: Any, epochs: int) -> list[list[list[int]]]:
    return [[labels.tolist() for _, labels in loader] for _ in range(epochs)]


@pytest.mark.few(6)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", _KNOWN.values(), ids=_KNOWN)
def test_the_rest_of_an_epoch_is_known_and_its_order_is_torchs(
    make: Callable[[Any], dict[str, Any]],
    workers: int,
    photo_tree: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = FastImageFolder(photo_tree, SMALL)

    def run(kind: Any, data: Any) -> tuple[list[list[list[int]]], torch.Tensor]:
        torch.manual_seed(1)
        labels = _labels(kind(data, **_options(make, data), num_workers=workers), 2)
        return labels, torch.get_rng_state()

    theirs, unseen = run(DataLoader, ImageFolder(dataset.root, SMALL)), run(FastLoader, dataset)
    spy = _Spy()
    monkeypatch.setattr(FolderSource, "prefetchers", lambda self, *, is_here: [spy])
    ours, state = run(FastLoader, dataset)
    assert ours == unseen[0] == theirs[0]
    assert torch.equal(state, unseen[1])
    for ahead, asked, epoch in zip(spy.ahead, spy.asked_for, ours, strict=True):
        assert ahead[: len(asked)] == asked
        assert [dataset.targets[index] for index in asked] == sum(epoch, [])


@pytest.mark.parametrize("shard", [None, Shard(1, 2)])
def test_with_a_seed_the_next_epoch_is_known_as_well(
    shard: Shard | None, photo_tree: Path, spy: _Spy
) -> None:
    dataset = FastImageFolder(photo_tree, SMALL)
    loader = FastLoader(dataset, 5, shuffle=True, seed=3, shard=shard)
    _labels(loader, 3)
    for epoch in range(2):
        assert spy.ahead[epoch] == spy.asked_for[epoch] + spy.asked_for[epoch + 1]
    whole = [spy.epochs[0].whole(later).tolist() for later in (0, 1)]
    assert all(sorted(order) == list(range(len(dataset))) for order in whole)
    assert whole[1] == spy.epochs[1].whole(0).tolist()
    assert spy.epochs[1].epoch * spy.epochs[1].count == spy.epochs[0].count == len(dataset)
    if shard is None:
        assert whole[0] == spy.asked_for[0]
    else:
        assert whole[0][1::2] == spy.asked_for[0]
    assert spy.epochs[2].now == len(dataset)


def test_ranks_know_each_others_order_and_seeds_theirs_alone(photo_tree: Path, spy: _Spy) -> None:
    dataset = FastImageFolder(photo_tree, SMALL)
    for seed, shard in ((3, Shard(0, 2)), (3, Shard(1, 2)), (4, Shard(0, 2))):
        _labels(FastLoader(dataset, 5, shuffle=True, seed=seed, shard=shard), 1)
    first, second, other = (ahead.tag() for ahead in spy.epochs)
    assert first == second != other
    assert np.array_equal(spy.epochs[0].whole(0), spy.epochs[1].whole(0))


@pytest.mark.parametrize(
    "make",
    [
        lambda data: {"sampler": _Shuffled(len(data))},
        lambda data: {"sampler": RandomSampler(data, replacement=True)},
        lambda data: {"sampler": RandomSampler(data, num_samples=50)},
    ],
    ids=["own", "replacement", "more than there are"],
)
def test_a_sampler_that_may_draw_each_time_is_not_asked_ahead(
    make: Callable[[Any], dict[str, Any]], photo_tree: Path, spy: _Spy
) -> None:
    dataset = FastImageFolder(photo_tree, SMALL)
    torch.manual_seed(1)
    ours = _labels(FastLoader(dataset, 5, **make(dataset)), 1)
    torch.manual_seed(1)
    assert ours == _labels(DataLoader(ImageFolder(dataset.root, SMALL), 5, **make(dataset)), 1)
    assert spy.ahead == [[]]


@pytest.mark.parametrize("seed", [None, 3])
def test_an_epoch_that_is_gone_on_with_is_known_from_there(
    seed: int | None, photo_tree: Path, spy: _Spy
) -> None:
    dataset = FastImageFolder(photo_tree, SMALL)
    torch.manual_seed(1)
    loader = FastLoader(dataset, 5, shuffle=True, seed=seed)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state = loader.state_dict()
    rest = [labels.tolist() for _, labels in iterator]
    torch.manual_seed(7)
    other = FastLoader(dataset, 5, shuffle=True, seed=seed)
    other.load_state_dict(state)
    assert [labels.tolist() for _, labels in other] == rest
    assert spy.asked_for[1] == spy.asked_for[0][10:]
    assert spy.ahead[1][: len(spy.asked_for[1])] == spy.asked_for[1]


def test_behind_a_subset_indices_are_the_subsets(photo_tree: Path, spy: _Spy) -> None:
    dataset = FastImageFolder(photo_tree, SMALL)
    _labels(FastLoader(Subset(dataset, [5, 6, 7, 8]), 2, shuffle=True, seed=1), 1)
    assert sorted(spy.asked_for[0]) == [0, 1, 2, 3]


@given(st.integers(0, 20), st.lists(st.integers(0, 2), max_size=60))
def test_who_takes_and_who_looks_see_the_same(count: int, steps: list[int]) -> None:
    peeked = PeekedIndices(iter([[number] for number in range(count)]))
    lookers = [peeked.upcoming(), peeked.upcoming()]
    taken, last = 0, [-1, -1]
    for step in steps:
        if step == 2:
            found = next(peeked, None)
            assert found == ([taken] if taken < count else None)
            taken += found is not None
            continue
        seen = next(lookers[step], None)
        if seen is not None:
            assert seen.tolist() == [max(last[step] + 1, taken)]
            last[step] = seen.item()
    assert [found for (found,) in peeked] == list(range(taken, count))


def test_a_samplers_error_comes_where_it_is_due() -> None:
    def failing() -> Iterator[list[int]]:
        yield [0]
        raise KeyError("sampler")

    peeked = PeekedIndices(failing())
    assert [part.tolist() for part in peeked.upcoming()] == [[0]]
    assert next(peeked) == [0]
    with pytest.raises(KeyError, match="sampler"):
        next(peeked)
    with pytest.raises(StopIteration):
        next(peeked)
