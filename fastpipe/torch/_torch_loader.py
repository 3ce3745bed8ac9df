"""The one place that touches private parts of torch's ``DataLoader``.

torch builds an iterator from a loader.  It is given a *view* of the loader instead, in which
only the dataset, the index sampler and the worker's init function are replaced; everything
else, and every attribute that the user sees, stays the loader's own.

Used: ``DataLoader._get_iterator``, ``_index_sampler``, ``_auto_collation``, ``_dataset_kind``;
``_SingleProcessDataLoaderIter``, ``_MultiProcessingDataLoaderIter`` and of their base
``_next_data``, ``_next_index``, ``_sampler_iter``, ``_base_seed``, ``_pin_memory``.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, _utils, get_worker_info
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from fastpipe.engine.pool import stopped_at_exit
from fastpipe.torch.keys import key_for, keyed
from fastpipe.torch.stock import preserved_generators, seed_generators
from fastpipe.transform.keys import sample_seed
from fastpipe.types import Key

__all__ = [
    "BatchSource",
    "EpochOrder",
    "KeyedIndices",
    "LoaderView",
    "ThreadedIterator",
    "is_map_style",
    "stock_iterator",
]


class BatchSource(Protocol):
    """A dataset that makes batches ahead of their use."""

    def start(self, indices: Sequence[int], key: Key) -> Any:
        """Begin a batch."""

    def finish(self, batch: Any) -> list[Any]:
        """Wait for a batch and return its samples."""

    def why_empty(self, batch: Any) -> Exception | None:
        """The error that says why a finished batch has no sample; None where none was asked for."""

    def cancel(self, batch: Any) -> None:
        """Give a batch up."""

    def waited(self, nanoseconds: int) -> None:
        """Hear how long the consumer waited for a batch."""


class EpochOrder(Protocol):
    """The index batches of a loader, epoch by epoch.

    Does not refer to the loader: a loader with persistent workers refers to its iterator, which
    refers to this, and must end them when it is dropped, without the garbage collector.
    """

    next_epoch: int
    is_batched: bool

    def begin(self) -> int:
        """The number of the epoch that begins; the next one follows it."""

    def batches(self, seed: int | None) -> Iterator[Any]:
        """The index batches of the epoch that begins next."""

    def shard(self) -> tuple[int, int]:
        """The rank whose part of the order this is, and the number of ranks."""

    def __len__(self) -> int:
        """Number of batches."""


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
    """

    def __init__(
        self, indices: Any, seed: int | None, epoch: int, first: int, count: int, step: int = 1
    ) -> None:
        self.indices, self.seed, self.epoch = indices, seed, epoch
        self.first, self.count, self.step = first, count, step

    def key(self, base_seed: int) -> Key:
        """The key of these samples."""
        seed = base_seed if self.seed is None else self.seed
        return key_for(seed, self.epoch, self.first, self.count, self.step)


class _KeyedSampler:
    """Gives the loader's index batches, each with its key."""

    def __init__(self, order: EpochOrder, seed: int | None) -> None:
        self._order, self._seed = order, seed
        self._begun = 0

    def begin(self) -> int:
        """The epoch of the keys: the loader's under a seed.  Without one the base seed is another
        for each iterator, and only persistent workers have several epochs under the same."""
        epoch, self._begun = self._order.begin(), self._begun + 1
        return self._begun - 1 if self._seed is None else epoch

    def __iter__(self) -> _KeyedBatches:
        # As without fastpipe: the sampler's ``__iter__`` runs now, its first ``__next__`` later.
        return _KeyedBatches(self._order, self._seed, self.begin)

    def __len__(self) -> int:
        return len(self._order)


class _KeyedBatches:
    """One epoch of a ``_KeyedSampler``.  After an error of the sampler it asks it again."""

    def __init__(self, order: EpochOrder, seed: int | None, begin: Callable[[], int]) -> None:
        self._batches, self._is_batched = order.batches(seed), order.is_batched
        self._rank, self._ranks = order.shard()
        self._seed, self._begin = seed, begin
        self._epoch: int | None = None
        self._position = 0

    def __iter__(self) -> _KeyedBatches:
        return self

    def __next__(self) -> KeyedIndices:
        if self._epoch is None:
            self._epoch = self._begin()
        indices = next(self._batches)
        if self._is_batched and not hasattr(indices, "__len__"):
            indices = list(indices)
        several = self._is_batched or isinstance(indices, list)
        count = len(indices) if several else 1
        # The place in the order of all ranks: two ranks must not augment alike.
        first = self._rank + self._ranks * self._position
        self._position += count
        return KeyedIndices(indices, self._seed, self._epoch, first, count, self._ranks)


class _KeyedDataset:
    """Sets the key of what is asked for, then asks the user's dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, asked: KeyedIndices) -> Any:
        with _randomness_of(asked):
            if getattr(self.dataset, "__getitems__", None):
                return self.dataset.__getitems__(asked.indices)
            return [self.dataset[index] for index in asked.indices]

    def __getitem__(self, asked: KeyedIndices) -> Any:
        with _randomness_of(asked):
            return self.dataset[asked.indices]

    def __len__(self) -> int:
        return len(self.dataset)


@contextmanager
def _randomness_of(asked: KeyedIndices) -> Iterator[None]:
    """Where a seed is given, whatever the dataset draws comes from it, in any process."""
    key = asked.key(_worker_base_seed())
    with keyed(key):
        if asked.seed is None:
            yield
            return
        with preserved_generators():
            seed_generators(sample_seed(key.seed, key.epoch, asked.first))
            yield


def _worker_base_seed() -> int:
    worker = get_worker_info()
    return worker.seed - worker.id if worker else _main_base_seed


_main_base_seed = 0  # only for torch's own iterator without workers, which sets it


class _ShowUsersDataset:
    """Worker init: ``WorkerInfo.dataset`` is the user's dataset before their function runs."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker_id: int) -> None:
        worker = get_worker_info()
        if worker is not None and isinstance(worker.dataset, _KeyedDataset):
            object.__setattr__(worker, "dataset", worker.dataset.dataset)
        if self._function is not None:
            self._function(worker_id)


class LoaderView:
    """A loader as its iterator sees it.

    Args:
        loader: the user's loader.
        order: the index batches of each epoch.
        seed: seed of the keys, or None for the loader's base seed.
    """

    def __init__(self, loader: DataLoader[Any], order: EpochOrder, seed: int | None) -> None:
        self._loader = loader
        self.dataset = _KeyedDataset(loader.dataset)
        self.worker_init_fn = _ShowUsersDataset(loader.worker_init_fn)
        self._index_sampler = _KeyedSampler(order, seed)
        if seed is not None:
            # The base seed, from which torch seeds its workers, comes from the seed as well, and
            # the script's generators stay as they are.
            self.generator = torch.Generator().manual_seed(sample_seed(seed, order.next_epoch, -1))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def is_map_style(loader: DataLoader[Any]) -> bool:
    """Whether the dataset is indexed, as opposed to iterated."""
    return bool(loader._dataset_kind == _DatasetKind.Map)


def stock_iterator(view: LoaderView) -> _BaseDataLoaderIter:
    """torch's own iterator on a view."""
    if view.num_workers == 0:
        return _SeedingIterator(view)
    view.check_worker_number_rationality()
    return _MultiProcessingDataLoaderIter(view)


class _SeedingIterator(_SingleProcessDataLoaderIter):
    """torch's iterator without workers; tells the keys' base seed, which workers know."""

    def _next_data(self) -> Any:
        global _main_base_seed
        _main_base_seed = int(self._base_seed)
        return super()._next_data()  # type: ignore[no-untyped-call]


class _Failed:
    """An error of the sampler or of its indices, kept until its batch is due."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error

    def take(self) -> BaseException:
        """The error, which is not kept any longer: its traceback refers to much."""
        assert self.error is not None
        error, self.error = self.error, None
        return error


class ThreadedIterator(_BaseDataLoaderIter):
    """Takes batches from a source's threads; the next ones are made while one is used.

    Life cycle: batches begin when the first is asked for and are begun in order, up to
    ``depth`` ahead.  Dropping the iterator, or an error in it, cancels what is not finished.
    An error of a batch is raised when that batch is due; the next call goes on behind it.

    Args:
        view: the loader's view.
        source: makes the batches.
        depth: batches begun ahead of the one that is due.
        refill: batch size to fill up to when samples were left out, or None.
    """

    def __init__(self, view: LoaderView, source: BatchSource, depth: int, refill: int | None) -> None:
        super().__init__(view)  # type: ignore[arg-type]
        if self._timeout != 0:  # as torch's iterator without workers has it
            raise AssertionError(f"timeout={self._timeout} needs num_workers > 0")
        self._source, self._depth, self._refill = source, depth, refill
        self._pending: deque[Any] = deque()
        self._left: list[Any] = []
        self._nothing: Exception | None = None  # why a batch had no sample
        self._exhausted = False
        self._close = weakref.finalize(self, _cancel_all, source, self._pending)
        self._close.atexit = False

    def __next__(self) -> Any:
        with stopped_at_exit():
            return super().__next__()

    def _next_data(self) -> Any:
        samples = self._next_samples() if self._refill is None else self._next_filled(self._refill)
        data = self._collate_fn(samples)
        if self._pin_memory:
            data = _utils.pin_memory.pin_memory(data, self._pin_memory_device)  # type: ignore[no-untyped-call]
        return data

    def _next_samples(self) -> list[Any]:
        self._begin_batches()
        if not self._pending:
            raise StopIteration
        batch = self._pending.popleft()
        if isinstance(batch, _Failed):
            self._exhausted = False  # the sampler may have more to give
            raise batch.take()
        start = perf_counter_ns()
        try:
            samples = self._source.finish(batch)
        finally:
            self._source.waited(perf_counter_ns() - start)
        if not samples:
            error = self._source.why_empty(batch)
            if error is not None and self._refill is None:
                raise error
            self._nothing = error
        return samples

    def _next_filled(self, size: int) -> list[Any]:
        """A full batch, with samples of the batches that follow in the place of bad ones."""
        samples, self._left = self._left, []
        while len(samples) < size:
            try:
                more = self._next_samples()
            except StopIteration:
                if self._nothing is not None and not samples and self._num_yielded == 0:
                    nothing, self._nothing = self._nothing, None
                    raise nothing from None
                if not samples or (self._drop_last and len(samples) < size):
                    raise
                return samples
            except BaseException:
                self._left = samples  # they belong to the batch that the next call gives
                raise
            # A complete batch passes through as it is, so that it need not be copied.
            samples = samples + more if samples else more
        self._left = samples[size:]
        return samples[:size] if self._left else samples

    def _begin_batches(self) -> None:
        while not self._exhausted and len(self._pending) <= self._depth:
            try:
                indices = self._next_index()  # type: ignore[no-untyped-call]
            except StopIteration:
                self._exhausted = True
                return
            except Exception as error:
                self._pending.append(_Failed(error))
                self._exhausted = True  # until the error has been raised
                return
            try:
                self._pending.append(self._source.start(indices.indices, indices.key(self._base_seed)))
            except Exception as error:
                self._pending.append(_Failed(error))


def _cancel_all(source: BatchSource, pending: deque[Any]) -> None:
    while pending:
        batch = pending.popleft()
        if not isinstance(batch, _Failed):
            source.cancel(batch)
