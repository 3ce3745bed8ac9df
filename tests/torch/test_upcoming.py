"""What a loader will ask for is known before it does, and knowing it changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MethodType, SimpleNamespace
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
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from fastpipe import FastImageFolder, FastLoader, Shard
from fastpipe.torch.folder_source import FolderSource
from fastpipe.torch.staging import UpcomingRows
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


Options = Callable[[Any], dict[str, Any]]
KNOWN: dict[str, Options] = {
    "in order": lambda data: {"batch_size": 5},
    "shuffled": lambda data: {"batch_size": 5, "shuffle": True, "drop_last": True},
    "generator": lambda data: {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "weights": lambda data: {"batch_size": 5, "sampler": WeightedRandomSampler(range(1, 1 + len(data)), 30)},
    "some": lambda data: {"batch_size": 5, "sampler": SubsetRandomSampler(range(0, len(data), 2))},
    "distributed": lambda data: {"batch_size": 5, "sampler": DistributedSampler(data, 2, 1)},
    "batches": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 5, False)},
}
UNKNOWN: dict[str, Options] = {
    "own": lambda data: {"batch_size": 5, "sampler": _Shuffled(len(data))},
    "replacement": lambda data: {"batch_size": 5, "sampler": RandomSampler(data, replacement=True)},
    "more than there are": lambda data: {"batch_size": 5, "sampler": RandomSampler(data, num_samples=50)},
}
CASES = [*((name, workers) for name in KNOWN for workers in (0, 2)), *((name, 0) for name in UNKNOWN)]


def _labels(loader: Any, epochs: int = 1) -> list[list[list[int]]]:
    return [[labels.tolist() for _, labels in loader] for _ in range(epochs)]


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "workers"), CASES)
def test_the_rest_of_an_epoch_is_known_and_its_order_is_torchs(
    name: str, workers: int, photo_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler that may draw each time is not asked ahead."""
    dataset = FastImageFolder(photo_tree, SMALL)
    make = (KNOWN | UNKNOWN)[name]

    def run(kind: Any, data: Any) -> tuple[list[list[list[int]]], torch.Tensor]:
        torch.manual_seed(1)
        labels = _labels(kind(data, **make(data), num_workers=workers), 2)
        return labels, torch.get_rng_state()

    theirs, unseen = run(DataLoader, ImageFolder(dataset.root, SMALL)), run(FastLoader, dataset)
    spy = _Spy()
    monkeypatch.setattr(FolderSource, "prefetchers", lambda self, *, is_here: [spy])
    ours, state = run(FastLoader, dataset)
    assert ours == unseen[0] == theirs[0]
    assert torch.equal(state, unseen[1])
    for ahead, asked, epoch in zip(spy.ahead, spy.asked_for, ours, strict=True):
        assert ahead[: len(asked)] == (asked if name in KNOWN else [])
        assert [dataset.targets[index] for index in asked] == sum(epoch, [])


@pytest.mark.parametrize("shard", [None, Shard(1, 2)])
def test_with_a_seed_the_next_epoch_is_known_as_well(
    shard: Shard | None, photo_tree: Path, spy: _Spy
) -> None:
    dataset = FastImageFolder(photo_tree, SMALL)
    _labels(FastLoader(dataset, 5, shuffle=True, seed=3, shard=shard), 3)
    for epoch in range(2):
        assert spy.ahead[epoch] == spy.asked_for[epoch] + spy.asked_for[epoch + 1]
    first, second, third = spy.epochs
    whole = [first.whole(later).tolist() for later in (0, 1)]
    assert all(sorted(order) == list(range(len(dataset))) for order in whole)
    assert whole[1] == second.whole(0).tolist()
    assert second.epoch * second.count == first.count == third.now == len(dataset)
    assert spy.asked_for[0] == (whole[0] if shard is None else whole[0][1::2])


def test_an_image_is_needed_next_in_this_epoch_or_in_the_next(photo_tree: Path, spy: _Spy) -> None:
    dataset = FastImageFolder(photo_tree, SMALL)
    next(iter(FastLoader(dataset, 5, shuffle=True, seed=3, prefetch_batches=0)))
    (ahead,) = spy.epochs
    here, later = (np.argsort(ahead.whole(epoch)) for epoch in (0, 1))
    rows = MethodType(lambda dataset, indices: indices, dataset)
    uses = UpcomingRows(ahead, dataset, rows).next_uses(np.arange(len(dataset) + 1))
    assert uses[:-1].tolist() == np.where(here < ahead.now, later + len(dataset), here).tolist()
    assert 0 < ahead.now < len(dataset) and uses[-1] == 2**62, "a row that the epochs do not have"
    # An order with replacement need not have all images, and may have none of this dataset.
    for orders, expected in ([[0, 1, 1], [2, 0, 2]], [4, 1, 3, 2**62]), ([[], [1]], [2**62, 3, 2**62, 2**62]):
        stub: Any = SimpleNamespace(
            now=1, count=3, epoch=0, whole=lambda later, it=orders: np.array(it[later], int)
        )
        assert UpcomingRows(stub, dataset, rows).next_uses(np.arange(4)).tolist() == expected


def test_ranks_have_one_order_and_other_seeds_have_others(photo_tree: Path, spy: _Spy) -> None:
    dataset = FastImageFolder(photo_tree, SMALL)
    for seed, shard in ((3, Shard(0, 2)), (3, Shard(1, 2)), (4, Shard(0, 2))):
        _labels(FastLoader(dataset, 5, shuffle=True, seed=seed, shard=shard))
    first, second, other = (ahead.tag() for ahead in spy.epochs)
    assert first == second != other
    assert np.array_equal(spy.epochs[0].whole(0), spy.epochs[1].whole(0))


@pytest.mark.parametrize("seed", [None, 3])
def test_a_resumed_epoch_is_known_from_there(seed: int | None, photo_tree: Path, spy: _Spy) -> None:
    dataset = FastImageFolder(photo_tree, SMALL)
    torch.manual_seed(1)
    loader = FastLoader(dataset, 5, shuffle=True, seed=seed)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    rest = [labels.tolist() for _, labels in iterator]
    torch.manual_seed(7)
    other = FastLoader(dataset, 5, shuffle=True, seed=seed)
    other.load_state_dict(state)
    assert _labels(other) == [rest]
    assert spy.asked_for[1] == spy.asked_for[0][10:]
    assert spy.ahead[1][: len(spy.asked_for[1])] == spy.asked_for[1]


@given(st.integers(0, 20), st.lists(st.integers(0, 2), max_size=60))
def test_peeked_indices_are_the_same_for_all_readers(count: int, steps: list[int]) -> None:
    """And a sampler's error is raised when its indices are taken, not when they are read."""

    def failing() -> Iterator[list[int]]:
        yield from ([number] for number in range(count))
        raise KeyError("sampler")

    peeked = PeekedIndices(failing())
    readers = [peeked.upcoming(), peeked.upcoming()]
    taken, last = 0, [-1, -1]
    for step in steps:
        if step == 2 and taken < count:
            assert next(peeked) == [taken]
            taken += 1
        elif step < 2 and (seen := next(readers[step], None)) is not None:
            assert seen.tolist() == [max(last[step] + 1, taken)]
            last[step] = seen.item()
    for number in range(taken, count):
        assert next(peeked) == [number]
    with pytest.raises(KeyError, match="sampler"):
        next(peeked)
    with pytest.raises(StopIteration):
        next(peeked)
