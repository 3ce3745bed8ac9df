"""The batches of indices of an epoch.  They are read from samplers, and get keys for random numbers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler

from fastpipe.core.types import Key
from fastpipe.torch.order import CountingSampler, EpochOrder, Progress, ResumePoint
from fastpipe.torch.randomness import key_for, preserved_generators
from fastpipe.torch.samplers import AT_ONCE, GroupSampler, sampler_state
from fastpipe.torch.upcoming import PeekedIndices, Prefetcher, UpcomingIndices


class RandomBatches(Iterator[Any]):
    """The batches of indices of a plain ``RandomSampler``.  Any number of batches may be taken early.

    When a ``RandomSampler`` is exhausted, it draws one more random number.  A script that gave the sampler
    its own generator can notice this.  Therefore, taking batches from this object never exhausts the sampler.
    The method ``reach`` exhausts the sampler when a ``DataLoader`` would have done this.
    """

    def __init__(self, index_sampler: BatchSampler | RandomSampler) -> None:
        sampler: Any = index_sampler
        self._is_batched, self._size, self._drops_last = False, 1, False
        if isinstance(index_sampler, BatchSampler):
            sampler, self._is_batched = index_sampler.sampler, True
            self._size, self._drops_last = index_sampler.batch_size, index_sampler.drop_last
        self._left = len(sampler)
        self._last = self._left // self._size + 1  # the request of a DataLoader that exhausts the sampler
        self._indices: Iterator[int] = iter(sampler)
        self._reached = 0
        self._lock = threading.Lock()

    def __next__(self) -> Any:
        with self._lock:
            if self._left < (self._size if self._drops_last else 1):
                raise StopIteration
            batch = list(islice(self._indices, min(self._size, self._left)))
            self._left -= len(batch)
            return batch if self._is_batched else batch[0]

    def reach(self, requests: int) -> None:
        """Exhaust the sampler if a ``DataLoader`` would have exhausted it after this number of requests."""
        with self._lock:
            self._reached = max(self._reached, requests)  # after resuming, fewer workers request less ahead
            if requests >= self._last:
                self._indices = iter(list(self._indices))

    def look(self, generator: torch.Generator | None) -> tuple[int, torch.Tensor | None]:
        with self._lock:
            return self._reached, None if generator is None else generator.get_state()


def draws_at_once(index_sampler: Any) -> bool:
    """Return whether a sampler may be read further ahead than a ``DataLoader`` reads it, without an effect
    that the script can notice."""
    sampler = index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) in AT_ONCE


@dataclass(eq=False)
class KeyedIndices:
    """A sampler's indices for one batch or for one sample, with the key for the samples' random numbers.

    Attributes:
        indices: a list of indices, or one index.
        seed: the key's seed.  If it is None, the base seed of torch's iterator is used, which is known where
            the batch is made.
        epoch: the key's epoch.
        first, count, step: these define the samples' positions in the epoch's order of all ranks.  The
            ``count`` positions begin at ``first`` and are ``step`` apart, because ranks take turns.
        begun: the batch, if a worker has begun to make it, else None.
    """

    indices: Any
    seed: int | None
    epoch: int
    first: int
    count: int
    step: int = 1
    begun: Any = None

    def key(self, base_seed: int) -> Key:
        seed = base_seed if self.seed is None else self.seed
        return key_for(seed, self.epoch, self.first, self.count, self.step)


class IndexBatches:
    """The index sampler that torch's iterators get.  It yields the indices of each batch.  If ``is_keyed`` is
    true, these are ``KeyedIndices``, with a key for random numbers.

    ``base_seed`` is the base seed of torch's iterator, or None before it is known.  ``begun`` is the number
    of epochs that have begun with this base seed.
    """

    def __init__(self, order: EpochOrder, seed: int | None, is_keyed: bool) -> None:
        self.order, self.seed, self.is_keyed = order, seed, is_keyed
        point = order.pending
        self.base_seed = None if point is None else point.base_seed
        self.begun = 0
        self.prefetchers: Sequence[Prefetcher] = ()

    def __iter__(self) -> _Epoch:
        # As in a DataLoader, the sampler's ``__iter__`` runs now, and its first ``__next__`` runs later.
        return _Epoch(self)

    def __len__(self) -> int:
        return len(self.order)


class _Epoch(Iterator[Any]):
    """One epoch of ``IndexBatches``.  After an error in the sampler, the next request calls the sampler
    again.

    ``progress`` is None before the first request.  ``is_free`` is true if indices may be requested at any
    time, without an effect that the script could notice.
    """

    def __init__(self, batches: IndexBatches) -> None:
        order = batches.order
        self._batches, self._order = batches, order
        self._state = sampler_state(order.index_sampler)
        self._ours = order.ours()
        self._random: RandomBatches | None = None
        self._asked_sampler = None if self._ours is not None else self._iterator()
        self._sampler: Iterator[Any] = iter(()) if self._asked_sampler is None else self._asked_sampler
        self.is_free = self._ours is not None or draws_at_once(order.index_sampler)
        self._replays = 0  # number of index batches that were taken before the resume point
        self._requests: int | None = 0
        self._rank, self._step = order.shard()
        self._key_epoch = 0
        self._position = 0
        self._replayed: list[Any] = []
        self._drawn: int | None = None
        self.progress: Progress | None = None
        self._upcoming: UpcomingIndices | None = None
        order.waiting = weakref.ref(batches)

    def _iterator(self) -> CountingSampler | RandomBatches:
        index_sampler = self._order.index_sampler
        sampler = index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler
        if type(sampler) is RandomSampler and draws_at_once(index_sampler):
            self._random = RandomBatches(index_sampler)
            return self._random
        draws = None if draws_at_once(index_sampler) else self._order.generator
        is_own = draws is not torch.default_generator  # torch's samplers draw only a seed from this
        return CountingSampler(iter(index_sampler), draws if is_own else None)

    def reach(self, requests: int) -> None:
        """Bring the sampler to the state in which a ``DataLoader`` would leave it after this number of
        requests.  Iterators that request indices early call this method, and their own requests are then not
        counted."""
        self._requests = None
        self._reach(requests)

    def _reach(self, requests: int) -> None:
        if self._random is not None:
            self._random.reach(self._replays + requests)

    def __next__(self) -> Any:
        if self.progress is None:
            self._begin()
        try:
            asked = self._next()
        finally:
            if self._requests is not None:
                self._requests += 1
                self._reach(self._requests)
        if self._upcoming is not None:
            indices = asked.indices if isinstance(asked, KeyedIndices) else asked
            for prefetcher in self._batches.prefetchers:
                prefetcher.requested(indices if hasattr(indices, "__len__") else [indices])
        return asked

    def _next(self) -> Any:
        if self._ours is not None:
            indices, batch = next(self._sampler)
            if self._upcoming is not None:
                self._upcoming.now = batch.end
            is_keyed = self._batches.is_keyed
            return self._keyed(indices, batch.first, batch.size, batch.step) if is_keyed else indices
        indices = self._replayed.pop() if self._replayed else self._asked()
        if not self._batches.is_keyed:
            return indices
        if self._order.is_batched and not hasattr(indices, "__len__"):
            indices = list(indices)
        several = self._order.is_batched or isinstance(indices, list)
        count = len(indices) if several else 1
        # The position in the order of all ranks: two ranks must not get the same random numbers.
        first = self._rank + self._step * self._position
        self._position += count
        return self._keyed(indices, first, count, self._step)

    def _keyed(self, indices: Any, first: int, count: int, step: int) -> KeyedIndices:
        seed, epoch = self._batches.seed, self._key_epoch
        if seed is None and self._drawn is not None:  # samples depend on the seed that the sampler has drawn
            seed, epoch = self._drawn, 0
        return KeyedIndices(indices, seed, epoch, first, count, step)

    def _asked(self, *default: Any) -> Any:
        indices = next(self._sampler, *default)
        # A GroupSampler draws an epoch's seed at its first request, and keeps the seed during the epoch.
        if self._drawn is None and isinstance(self._order.sampler, GroupSampler):
            self._drawn = self._order.sampler.drawn
        return indices

    def _begin(self) -> None:
        batches = self._batches
        look = None if self._asked_sampler is None else self._asked_sampler.look
        progress = self.progress = self._order.begin(batches.begun, self._state, look)
        progress.base_seed = batches.base_seed
        point = progress.point
        batches.begun = point.begun + 1
        # Without a seed, each iterator has its own base seed.  Only persistent workers run several epochs
        # with the same base seed.
        self._key_epoch = point.begun if batches.seed is None else point.epoch
        if self._ours is not None:
            self._sampler = self._ours.indices(point.epoch, point.position)
            if not self._order.is_batched:
                self._sampler = ((index, batch) for (index,), batch in self._sampler)
        elif point.taken or point.offset or point.generator is not None:
            self._replay()
        if batches.prefetchers:
            self._prepare(point)

    def _prepare(self, point: ResumePoint) -> None:
        peeked = None
        if self._ours is None and draws_at_once(self._order.index_sampler):
            if not self._replayed:  # samplers draw at the first request, which must come from this thread
                first = self._asked(None)
                self._replayed = [] if first is None else [first]
            peeked = PeekedIndices(chain(reversed(self._replayed), self._sampler))
            self._replayed, self._sampler = [], peeked
        batches = self._batches
        seed, epoch = batches.seed, self._key_epoch
        if seed is None:
            seed, epoch = (batches.base_seed, epoch) if self._drawn is None else (self._drawn, 0)
        by = None if seed is None else (seed, epoch)
        self._upcoming = UpcomingIndices(
            self._ours, point.epoch, point.position, peeked, by, batches.seed is not None
        )
        for prefetcher in batches.prefetchers:
            prefetcher.begin_epoch(self._upcoming)

    def _replay(self) -> None:
        """Advance to the point at which the epoch resumes: request the sampler's indices again from the
        epoch's start."""
        assert self.progress is not None
        point = self.progress.point
        generator = self._order.generator
        with preserved_generators() if generator is torch.default_generator else nullcontext():
            if generator is not None and point.generator is not None:
                generator.set_state(point.generator)
            # Request at least the next item, because samplers draw at their first request.
            asked = point.taken + 1 if self._random is not None or point.asked is None else point.asked
            self._replays = point.taken
            left = []
            for number in range(asked):
                given = self._asked(None)
                if given is not None and number < point.taken:
                    self._position += len(given) if self._order.is_batched else 1
                elif given is not None:
                    left.append(given)
            if point.asked is not None:
                self._reach(point.asked - point.taken)
            if generator is not None and point.now is not None:
                generator.set_state(point.now)
        if left and point.offset:
            left[0] = left[0][point.offset :]
            self._position += point.offset
        self._replayed = left[::-1]
