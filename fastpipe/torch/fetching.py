"""What torch's iterators are given instead of the user's dataset and samplers.

torch hands what an index sampler gives to the dataset, in this process or in a worker.  Here
an index batch carries its key along, the wrapped dataset sets it out of band (``Subset`` and
its kind rebuild plain indices), and errors gain the sample's index and path.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, Subset, get_worker_info

from fastpipe.core.keys import sample_seed
from fastpipe.core.types import Key
from fastpipe.torch.ahead import Ahead, Lookout, PeekedIndices, RandomBatches, draws_at_once
from fastpipe.torch.generators import preserved_generators, seed_generators
from fastpipe.torch.grouping import GroupSampler
from fastpipe.torch.keys import key_for, keyed
from fastpipe.torch.order import EpochOrder
from fastpipe.torch.progress import AskedSampler, Progress, ResumePoint
from fastpipe.torch.source import Source, StartedBatch
from fastpipe.torch.state import sampler_state
from fastpipe.torch.threads import note
from fastpipe.torch.views import integers, located
from fastpipe.torch.worker_queues import waiting

__all__ = [
    "IndexBatches",
    "KeyedCollate",
    "KeyedDataset",
    "KeyedIndices",
    "SourceDataset",
    "UsersDataset",
]

_COLLATE = 1 << 40  # where the draws of collate functions are, behind those of any epoch's samples


class KeyedIndices:
    """What a sampler gave for one batch, or for one sample, and where it stands in the epoch.

    Attributes:
        indices: what the sampler gave, as it is.
        seed: the key's seed; None for the loader's base seed, which is known where the
            batch is made.
        epoch: number of the epoch.
        first: position of the first index in the epoch's order.
        count: number of samples.
        step: ranks that take turns in that order; 1 without ranks.
        begun: the batch, in a worker that has begun to make it.
    """

    begun: Any = None

    def __init__(
        self, indices: Any, seed: int | None, epoch: int, first: int, count: int, step: int = 1
    ) -> None:
        self.indices, self.seed, self.epoch = indices, seed, epoch
        self.first, self.count, self.step = first, count, step

    def key(self, base_seed: int) -> Key:
        """The key of these samples."""
        seed = base_seed if self.seed is None else self.seed
        return key_for(seed, self.epoch, self.first, self.count, self.step)


class IndexBatches:
    """An index sampler that gives the loader's index batches, with their keys where they have some.

    Attributes:
        base_seed: the iterator's, once it is known.
        begun: epochs begun under that.
        lookout: who wants to know what will be asked for, or None.

    Args:
        order: the loader's order.
        seed: seed of the keys; None for the base seed.
        is_keyed: whether the dataset takes ``KeyedIndices``.
    """

    def __init__(self, order: EpochOrder, seed: int | None, is_keyed: bool) -> None:
        self.order, self.seed, self.is_keyed = order, seed, is_keyed
        point = order.pending
        self.base_seed = None if point is None else point.base_seed
        self.begun = 0
        self.lookout: Lookout | None = None

    def __iter__(self) -> _Epoch:
        # As without fastpipe: the sampler's ``__iter__`` runs now, its first ``__next__`` later.
        return _Epoch(self)

    def __len__(self) -> int:
        return len(self.order)


class _Epoch:
    """One epoch of ``IndexBatches``.  After an error of the sampler it asks it again.

    Attributes:
        progress: how far the user is; None before the first index has been asked for.
        is_free: whether indices may be asked for at any time, and nothing of the script's can tell when.
        requests: how many requests a ``DataLoader`` would have made; counted here unless who asks early
            counts them by ``reach``.
    """

    def __init__(self, batches: IndexBatches) -> None:
        order = batches.order
        self._batches, self._order = batches, order
        self._state = sampler_state(order.sampler, order.index_sampler)
        self._ours = order.ours()
        self._random: RandomBatches | None = None
        self._asked_sampler = None if self._ours is not None else self._iterator()
        self._sampler: Iterator[Any] = iter(()) if self._asked_sampler is None else self._asked_sampler
        self.is_free = self._ours is not None or draws_at_once(order.index_sampler)
        self._replays = 0  # requests that were made before the epoch was resumed
        self._requests: int | None = 0
        self._rank, self._step = order.shard()
        self._key_epoch = 0
        self._position = 0
        self._replayed: list[Any] = []
        self._drawn: int | None = None
        self.progress: Progress | None = None
        self._ahead: Ahead | None = None
        order.waiting = weakref.ref(batches)

    def __iter__(self) -> _Epoch:
        return self

    def _iterator(self) -> AskedSampler | RandomBatches:
        index_sampler = self._order.index_sampler
        sampler = index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler
        if type(sampler) is RandomSampler and draws_at_once(index_sampler):
            self._random = RandomBatches(index_sampler)
            return self._random
        draws = None if draws_at_once(index_sampler) else self._order.generator
        is_own = draws is not torch.default_generator  # of which torch's samplers take but a seed
        return AskedSampler(iter(index_sampler), draws if is_own else None)

    def reach(self, requests: int) -> None:
        """Do to the sampler what so many requests of a ``DataLoader`` would have done by now.

        For an iterator that asks for indices early: those requests are not counted then.
        """
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
        if self._ahead is not None and self._batches.lookout is not None:
            indices = asked.indices if isinstance(asked, KeyedIndices) else asked
            self._batches.lookout.asked(indices if hasattr(indices, "__len__") else [indices])
        return asked

    def _next(self) -> Any:
        if self._ours is not None:
            indices, batch = next(self._sampler)
            if self._ahead is not None:
                self._ahead.now = batch.end
            is_keyed = self._batches.is_keyed
            return self._keyed(indices, batch.first, batch.size, batch.step) if is_keyed else indices
        indices = self._replayed.pop() if self._replayed else self._asked()
        if not self._batches.is_keyed:
            return indices
        if self._order.is_batched and not hasattr(indices, "__len__"):
            indices = list(indices)
        several = self._order.is_batched or isinstance(indices, list)
        count = len(indices) if several else 1
        # The place in the order of all ranks: two ranks must not augment alike.
        first = self._rank + self._step * self._position
        self._position += count
        return self._keyed(indices, first, count, self._step)

    def _keyed(self, indices: Any, first: int, count: int, step: int) -> KeyedIndices:
        seed, epoch = self._batches.seed, self._key_epoch
        if seed is None and self._drawn is not None:  # the samples are those that the sampler put in order
            seed, epoch = self._drawn, 0
        return KeyedIndices(indices, seed, epoch, first, count, step)

    def _asked(self, *default: Any) -> Any:
        """What the sampler gives next, as ``next``."""
        indices = next(self._sampler, *default)
        # It draws an epoch's seed when it is first asked, and shows that until another epoch begins.
        if self._drawn is None and isinstance(self._order.sampler, GroupSampler):
            self._drawn = self._order.sampler.drawn
        return indices

    def _begin(self) -> None:
        batches = self._batches
        progress = self.progress = self._order.begin(batches.begun, self._state, self._asked_sampler)
        progress.base_seed = batches.base_seed
        point = progress.point
        batches.begun = point.begun + 1
        # Without a seed the base seed is another for each iterator, and only persistent workers
        # have several epochs under the same.
        self._key_epoch = point.begun if batches.seed is None else point.epoch
        if self._ours is not None:
            self._sampler = self._ours.indices(point.epoch, point.position)
            if not self._order.is_batched:
                self._sampler = ((index, batch) for (index,), batch in self._sampler)
        elif point.taken or point.offset or point.generator is not None:
            self._replay()
        if batches.lookout is not None:
            self._look_ahead(batches.lookout, point)

    def _look_ahead(self, lookout: Lookout, point: ResumePoint) -> None:
        peeked = None
        if self._ours is None and draws_at_once(self._order.index_sampler):
            if not self._replayed:  # the first is asked for now, in this thread: samplers draw then
                first = self._asked(None)
                self._replayed = [] if first is None else [first]
            peeked = PeekedIndices(chain(reversed(self._replayed), self._sampler))
            self._replayed, self._sampler = [], peeked
        batches = self._batches
        seed, epoch = batches.seed, self._key_epoch
        if seed is None:
            seed, epoch = (batches.base_seed, epoch) if self._drawn is None else (self._drawn, 0)
        self._ahead = Ahead(
            self._ours, point.epoch, point.position, peeked, None if seed is None else (seed, epoch),
            goes_on=batches.seed is not None,
        )  # fmt: skip
        lookout.follow(self._ahead)

    def _replay(self) -> None:
        """Go to where the epoch goes on, with the draws of the sampler that it began with."""
        assert self.progress is not None
        point = self.progress.point
        generator = self._order.generator
        with preserved_generators() if generator is torch.default_generator else nullcontext():
            if generator is not None and point.generator is not None:
                generator.set_state(point.generator)
            # At least the next one: samplers draw when the first is asked for.
            asked = point.taken + 1 if self._random is not None or point.asked is None else point.asked
            self._replays = point.taken
            ahead = []
            for number in range(asked):
                given = self._asked(None)
                if given is not None and number < point.taken:
                    self._position += len(given) if self._order.is_batched else 1
                elif given is not None:
                    ahead.append(given)
            if point.asked is not None:
                self._reach(point.asked - point.taken)
            if generator is not None and point.now is not None:
                generator.set_state(point.now)
        if ahead and point.offset:
            ahead[0] = ahead[0][point.offset :]
            self._position += point.offset
        self._replayed = ahead[::-1]


class UsersDataset:
    """The user's dataset; an error of it says which sample it was about."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        inner = dataset
        while type(inner) is Subset:  # which has a ``__getitems__``, but no code of its own in it
            inner = inner.dataset
        self._answers_for_batches = bool(getattr(inner, "__getitems__", None))

    def __getitems__(self, indices: Any) -> Any:
        dataset = self.dataset
        if self._answers_for_batches:
            return dataset.__getitems__(indices)
        samples: list[Any] = []
        index = None
        try:
            for index in indices:
                note(index)
                samples.append(dataset[index])
        except Exception as error:
            _say_which(error, dataset, index)
            raise
        return samples

    def __getitem__(self, index: Any) -> Any:
        note(index)
        try:
            return self.dataset[index]
        except Exception as error:
            _say_which(error, self.dataset, index)
            raise

    def __len__(self) -> int:
        return len(self.dataset)


class KeyedDataset(UsersDataset):
    """Sets the key of what is asked for, then asks the user's dataset.

    Under a seed, whatever the dataset draws comes from it, in any process: for each sample
    anew, or once for a batch that the dataset answers for as a whole.
    """

    def __getitems__(self, asked: KeyedIndices) -> Any:
        _fetched.last = asked
        base = _base_seed()
        if asked.seed is None or self._answers_for_batches:
            with keyed(asked.key(base)), _seeded(asked, base):
                return super().__getitems__(asked.indices)
        samples = []
        with preserved_generators():
            for number, index in enumerate(asked.indices):
                key = key_for(asked.seed, asked.epoch, asked.first + number * asked.step, 1)
                seed_generators(sample_seed(key.seed, key.epoch, int(key.draws[0])))
                with keyed(key):
                    samples.append(super().__getitem__(index))
        return samples

    def __getitem__(self, asked: KeyedIndices) -> Any:
        _fetched.last = asked
        base = _base_seed()
        with keyed(asked.key(base)), _seeded(asked, base):
            return super().__getitem__(asked.indices)


class SourceDataset(KeyedDataset):
    """Asks a source for batches, and the user's dataset for single samples."""

    def __init__(self, dataset: Any, source: Source) -> None:
        super().__init__(dataset)
        self._source = source

    def __getitems__(self, asked: KeyedIndices) -> Any:
        _fetched.last = asked
        base = _base_seed()
        with _seeded(asked, base):
            batch, asked.begun = asked.begun or self._source.start(asked.indices, asked.key(base)), None
            self._begin_what_follows(batch, base)
            samples = self._source.finish(batch)
        error = None if len(samples) else self._source.why_empty(batch)
        if error is not None:  # nothing can be collated from no samples
            raise error
        return samples

    def _begin_what_follows(self, batch: StartedBatch, base: int) -> None:
        """In a worker with threads, begin the next batch before this one is done.  The parent asks for it
        once it has got the batch before this one."""
        if self._source.threads == 1:
            return  # perhaps this one, which would make all of it before anything else
        for message in waiting(lambda: self._source.is_done(batch)):
            asked = message[1] if isinstance(message, tuple) else None
            if isinstance(asked, KeyedIndices) and asked.begun is None:
                with suppress(Exception):  # which it meets again when its turn comes
                    asked.begun = self._source.start(asked.indices, asked.key(base))


class KeyedCollate:
    """A collate function of the user's whose draws come from the key of its batch."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function

    def __call__(self, samples: list[Any]) -> Any:
        asked = _fetched.last
        if asked is None:
            return self._function(samples)
        with preserved_generators():
            seed_generators(sample_seed(asked.key(0).seed, asked.epoch, _COLLATE + asked.first))
            return self._function(samples)

    @staticmethod
    def is_about(asked: KeyedIndices) -> None:
        """Tell which batch this thread will collate next."""
        _fetched.last = asked


class _Fetched(threading.local):
    """What a thread fetches: the batch last asked for and, outside of workers, the base seed."""

    last: KeyedIndices | None = None
    base_seed = 0


_fetched = _Fetched()


@contextmanager
def _seeded(asked: KeyedIndices, base: int) -> Iterator[None]:
    """Where a seed is given, draws from the global generators come from it."""
    if asked.seed is None:
        yield
        return
    with preserved_generators():
        seed_generators(sample_seed(asked.key(base).seed, asked.epoch, asked.first))
        yield


def _base_seed() -> int:
    worker = get_worker_info()
    return worker.seed - worker.id if worker else _fetched.base_seed


def set_base_seed(seed: int) -> None:
    """Tell the base seed under which this thread fetches next, outside of workers."""
    _fetched.base_seed = seed


def _say_which(error: BaseException, dataset: Any, index: Any) -> None:
    """Add index and, where the dataset is one of files, path (Python 3.11 and later show it)."""
    if hasattr(error, "add_note") and not any("sample " in note for note in getattr(error, "__notes__", ())):
        path = _path_of(dataset, index)
        error.add_note(f"while loading sample {index!r}" + (f" from {path!r}" if path else ""))


def _path_of(dataset: Any, index: Any) -> str | None:
    try:
        ((end, _, (local,)),) = located(dataset, integers([index]))
        path = end.samples[local][0]
    except Exception:  # whatever it is, the error at hand is the one to be seen
        return None
    return path if isinstance(path, str) else None
