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
from streams import OwnSampler
from torch.utils import data
from torch.utils.data import DataLoader, RandomSampler
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


Options = Callable[[Any], dict[str, Any]]
KNOWN: dict[str, Options] = {
    "in order": lambda d: {},
    "shuffled": lambda d: {"shuffle": True, "drop_last": True},
    "generator": lambda d: {"batch_size": 1, "shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "weights": lambda d: {"sampler": data.WeightedRandomSampler(range(1, 1 + len(d)), 30)},
    "some": lambda d: {"sampler": data.SubsetRandomSampler(range(0, len(d), 2))},
    "distributed": lambda d: {"sampler": data.DistributedSampler(d, 2, 1)},
    "batches": lambda d: {"batch_size": 1, "batch_sampler": data.BatchSampler(RandomSampler(d), 5, False)},
}
UNKNOWN: dict[str, Options] = {
    # A script's own, which may look at anything each time.
    "own": lambda d: {"sampler": OwnSampler(lambda: random.Random(3).sample(range(len(d)), len(d)), len(d))},
    "replacement": lambda d: {"sampler": RandomSampler(d, replacement=True)},
    "more than there are": lambda d: {"sampler": RandomSampler(d, num_samples=50)},
}
CASES = [*((name, workers) for name in KNOWN for workers in (0, 2)), *((name, 0) for name in UNKNOWN)]


def _labels(loader: Any, epochs: int = 1) -> list[list[list[int]]]:
    return [[labels.tolist() for _, labels in loader] for _ in range(epochs)]


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "workers"), CASES)
def test_the_rest_of_an_epoch_is_known_and_its_order_is_torchs(
    name: str, workers: int, photo_tree: Path, request: pytest.FixtureRequest
) -> None:
    """A sampler that may draw each time is not asked ahead."""
    dataset, make = FastImageFolder(photo_tree, SMALL), (KNOWN | UNKNOWN)[name]

    def run(kind: Any, d: Any) -> tuple[list[list[list[int]]], torch.Tensor]:
        torch.manual_seed(1)
        labels = _labels(kind(d, num_workers=workers, **{"batch_size": 5, **make(d)}), 2)
        return labels, torch.get_rng_state()

    theirs, unseen = run(DataLoader, ImageFolder(dataset.root, SMALL)), run(FastLoader, dataset)
    spy: _Spy = request.getfixturevalue("spy")
    ours, state = run(FastLoader, dataset)
    assert ours == unseen[0] == theirs[0] and torch.equal(state, unseen[1])
    for ahead, asked, epoch in zip(spy.ahead, spy.asked_for, ours, strict=True):
        assert ahead[: len(asked)] == (asked if name in KNOWN else [])
        assert [dataset.targets[index] for index in asked] == sum(epoch, [])


@pytest.mark.parametrize("shard", [None, Shard(1, 2)])
def test_with_a_seed_the_next_epoch_is_known_as_well(shard: Any, photo_tree: Path, spy: _Spy) -> None:
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
        whole = lambda later: np.array(orders[later], int)  # noqa: E731
        stub: Any = SimpleNamespace(now=1, count=3, epoch=0, whole=whole)
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
    loader, other = (FastLoader(dataset, 5, shuffle=True, seed=seed) for _ in range(2))
    torch.manual_seed(1)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    rest = [labels.tolist() for _, labels in iterator]
    torch.manual_seed(7)
    other.load_state_dict(state)
    assert _labels(other) == [rest] and spy.asked_for[1] == spy.asked_for[0][10:]
    assert spy.ahead[1][: len(spy.asked_for[1])] == spy.asked_for[1]


def test_a_samplers_error_is_raised_when_its_indices_are_taken_not_when_they_are_read() -> None:
    """And readers at different places see the same indices."""

    def failing() -> Iterator[list[int]]:
        yield from ([number] for number in range(4))
        raise KeyError("sampler")

    peeked = PeekedIndices(failing())
    first, second = peeked.upcoming(), peeked.upcoming()
    assert next(second).tolist() == [0]
    assert [next(peeked), next(peeked)] == [[0], [1]]
    assert [part.tolist() for part in first] == [part.tolist() for part in second] == [[2], [3]]
    assert [next(peeked), next(peeked)] == [[2], [3]]
    with pytest.raises(KeyError, match="sampler"):
        next(peeked)
    with pytest.raises(StopIteration):
        next(peeked)
