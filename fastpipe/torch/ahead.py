"""What a loader will ask for: known before it does, so that bytes can be near by then."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fastpipe.core.order import order_of
from fastpipe.torch.delivery import DueError
from fastpipe.torch.grouping import GroupSampler
from fastpipe.torch.order import EpochBatches, ShardSampler, ShuffleSampler
from fastpipe.torch.views import integers

__all__ = ["Ahead", "Lookout", "Lookouts", "PeekedIndices", "RandomBatches", "draws_at_once"]

Int64Array = npt.NDArray[np.int64]


class PeekedIndices:
    """What a sampler gives, which can be looked at before it is taken.  From any threads.

    Args:
        sampler: an iterator.
    """

    def __init__(self, sampler: Iterator[Any]) -> None:
        self._sampler = sampler
        self._lock = threading.Lock()
        self._seen: deque[Any] = deque()  # looked at and not taken
        self._taken = 0
        self._error: DueError | None = None

    def __iter__(self) -> PeekedIndices:
        return self

    def __next__(self) -> Any:
        with self._lock:
            if self._seen:
                self._taken += 1
                return self._seen.popleft()
            if self._error is not None:
                error, self._error = self._error, None
                raise error.take()
            found = next(self._sampler)
            self._taken += 1
            return found

    def ahead(self) -> Iterator[Int64Array]:
        """Indices as int64 (N,), from the next to be taken on."""
        at = self._taken
        while (found := self._at(at)) is not None:
            at, given = found
            yield integers(given if hasattr(given, "__len__") else [given])

    def _at(self, at: int) -> tuple[int, Any] | None:
        """Those of a place, or the next that were not taken, and the place behind; None at the end."""
        with self._lock:
            at = max(at, self._taken)
            if at - self._taken < len(self._seen):
                return at + 1, self._seen[at - self._taken]
            if self._error is not None:
                return None
            try:
                given = next(self._sampler)
            except BaseException as error:  # for who takes what comes there; a sampler's end as well
                self._error = DueError(error)
                return None
            self._seen.append(given)
            return at + 1, given


class RandomBatches:
    """The index batches of a plain ``RandomSampler``, of which any number may be taken early.

    The sampler draws the order when its first index is taken, and once more when it is exhausted, which a
    script sees where the generator is its own.  Taking batches here never exhausts it; ``reach`` does, when
    a ``DataLoader`` would.

    Args:
        index_sampler: a ``BatchSampler`` over a ``RandomSampler``, or that sampler itself.
    """

    def __init__(self, index_sampler: BatchSampler | RandomSampler) -> None:
        self._is_batched = isinstance(index_sampler, BatchSampler)
        sampler: Any = index_sampler.sampler if isinstance(index_sampler, BatchSampler) else index_sampler
        self._size = index_sampler.batch_size if isinstance(index_sampler, BatchSampler) else 1
        self._drops_last = isinstance(index_sampler, BatchSampler) and index_sampler.drop_last
        self._left = len(sampler)
        self._last = self._left // self._size + 1  # which of a DataLoader's requests exhausts the sampler
        self._indices: Iterator[int] = iter(sampler)
        self._reached = 0
        self._lock = threading.Lock()

    def __iter__(self) -> RandomBatches:
        return self

    def __next__(self) -> Any:
        with self._lock:
            if self._left < (self._size if self._drops_last else 1):
                raise StopIteration
            batch = list(islice(self._indices, min(self._size, self._left)))
            self._left -= len(batch)
            return batch if self._is_batched else batch[0]

    def reach(self, requests: int) -> None:
        """Exhaust the sampler if a ``DataLoader`` has done so after so many requests for indices."""
        with self._lock:
            self._reached = max(self._reached, requests)  # fewer workers ask for less ahead than before
            if requests >= self._last:
                self._indices = iter(list(self._indices))

    def look(self, generator: torch.Generator | None) -> tuple[int, torch.Tensor | None]:
        """Return how many requests were reached, and the state that the generator has by that."""
        with self._lock:
            return self._reached, None if generator is None else generator.get_state()


# They draw all of an epoch when they are first asked.  Others might draw, or look at something, each time:
# not before the loader asks them.
_AT_ONCE = (
    SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler, ShardSampler,
    ShuffleSampler, GroupSampler,
)  # fmt: skip


def draws_at_once(index_sampler: Any) -> bool:
    """Return whether a sampler may be asked for more than the loader wants yet, and nothing else changes.

    ``RandomBatches`` makes that so for a ``RandomSampler``.
    """
    sampler = index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) in _AT_ONCE


class Ahead:
    """The rest of an epoch, and the next one as far as it is known.

    Args:
        ours: the epochs' batches, where they are a function of the epoch.
        epoch: number of the epoch.
        start: where it begins in its order.
        peeked: else what the sampler gives; None where it must not be asked ahead.
        drawn_by: seed and epoch by which the epoch's samples are drawn; None where that is not known.
        goes_on: whether the next epoch's are drawn by the same seed, and the next number.

    Attributes:
        now: how much of the order of all ranks was asked for.
    """

    def __init__(
        self,
        ours: EpochBatches | None,
        epoch: int,
        start: int,
        peeked: PeekedIndices | None,
        drawn_by: tuple[int, int] | None = None,
        *,
        goes_on: bool = False,
    ) -> None:
        self._drawn_by, self._goes_on = drawn_by, goes_on
        self._ours, self._peeked = ours, peeked
        self._epoch = epoch
        self._start = self.now = start

    def indices(self) -> Iterator[Int64Array]:
        """This process's indices, in parts of int64 (N,)."""
        for _, indices in self.parts():
            yield indices

    def parts(self) -> Iterator[tuple[int, Int64Array]]:
        """The same, each with how many epochs after this one it is."""
        if self._ours is not None:
            for later, start in ((0, self._start), (1, 0)):
                for indices, _ in self._ours.indices(self._epoch + later, start):
                    yield later, np.array(indices, np.int64)
        elif self._peeked is not None:
            yield from ((0, indices) for indices in self._peeked.ahead())

    def drawn_by(self, later: int = 0) -> tuple[int, int] | None:
        """Seed and epoch by which samples are drawn, in this epoch or so many later; None if not known."""
        if self._drawn_by is None or (later and not self._goes_on):
            return None
        seed, epoch = self._drawn_by
        return seed, epoch + later

    @property
    def is_known(self) -> bool:
        """Whether the next epoch's order is known as well."""
        return self._ours is not None

    @property
    def count(self) -> int:
        """Samples of an epoch, on all ranks."""
        return 0 if self._ours is None else self._ours.count

    @property
    def passed(self) -> int:
        """Samples of the epochs before this one."""
        return self._epoch * self.count

    def whole(self, later: int) -> Int64Array:
        """The order of all ranks, in this epoch or so many later: indices as int64 (N,)."""
        ours = self._ours
        assert ours is not None
        order = order_of(ours.count, ours.seed, self._epoch + later, ours.arrangement)
        return (
            np.fromiter(order, np.int64, ours.count)
            if isinstance(order, range)
            else np.asarray(order, np.int64)
        )

    def tag(self) -> bytes:
        """Tells orders from each other: of this, all epochs' are the same."""
        ours = self._ours
        assert ours is not None
        option = None if ours.arrangement is None else ours.arrangement.option
        return hashlib.blake2b(repr((ours.count, ours.seed, option)).encode(), digest_size=16).digest()


class Lookouts:
    """Several that prepare for the same.

    Args:
        lookouts: which.
    """

    def __init__(self, lookouts: Sequence[Lookout]) -> None:
        self._lookouts = lookouts

    def follow(self, ahead: Ahead) -> None:
        """An epoch begins, and this is ahead."""
        for lookout in self._lookouts:
            lookout.follow(ahead)

    def asked(self, indices: Sequence[int]) -> None:
        """A batch of these indices was asked for."""
        for lookout in self._lookouts:
            lookout.asked(indices)


class Lookout(Protocol):
    """Prepares for what will be asked for."""

    def follow(self, ahead: Ahead) -> None:
        """An epoch begins, and this is ahead."""

    def asked(self, indices: Sequence[int]) -> None:
        """A batch of these indices was asked for."""
