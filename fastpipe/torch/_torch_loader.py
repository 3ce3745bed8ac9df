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
from time import perf_counter_ns
from typing import Any, Protocol

from torch.utils.data import DataLoader, _utils, get_worker_info
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from fastpipe.torch.keys import key_for, keyed
from fastpipe.types import Key

__all__ = ["BatchSource", "KeyedIndices", "LoaderView", "ThreadedIterator", "is_map_style", "stock_iterator"]


class BatchSource(Protocol):
    """A dataset that makes batches ahead of their use."""

    def start(self, indices: Sequence[int], key: Key) -> Any:
        """Begin a batch."""

    def finish(self, batch: Any) -> list[Any]:
        """Wait for a batch and return its samples."""

    def cancel(self, batch: Any) -> None:
        """Give a batch up."""

    def waited(self, nanoseconds: int) -> None:
        """Hear how long the consumer waited for a batch."""


class KeyedIndices(list[int]):
    """The indices of one batch, and where they stand in the epoch's order.

    Attributes:
        seed: the key's seed; None for the loader's base seed, which is known where the
            batch is made.
        epoch: number of the epoch.
        first: position of the first index in the epoch's order.
    """

    def __init__(self, indices: Sequence[int], seed: int | None, epoch: int, first: int) -> None:
        super().__init__(indices)
        self.seed, self.epoch, self.first = seed, epoch, first

    def __reduce__(self) -> tuple[object, ...]:
        return (KeyedIndices, (list(self), self.seed, self.epoch, self.first))

    def key(self, base_seed: int) -> Key:
        return key_for(base_seed if self.seed is None else self.seed, self.epoch, self.first, self)


class KeyedIndex(int):
    """One index without batching, with its position; otherwise as ``KeyedIndices``."""

    keys: KeyedIndices

    def __reduce__(self) -> tuple[object, ...]:
        return (_keyed_index, (self.keys,))


def _keyed_index(keys: KeyedIndices) -> KeyedIndex:
    index = KeyedIndex(keys[0])
    index.keys = keys
    return index


class _KeyedSampler:
    """Gives the loader's index batches, each with its key."""

    def __init__(self, batches: Callable[[], Iterator[Any]], seed: int | None, begin: Callable[[], int]) -> None:
        self._batches, self._seed, self._begin = batches, seed, begin

    def __iter__(self) -> Iterator[Any]:
        epoch, first = self._begin(), 0
        for indices in self._batches():
            if isinstance(indices, (list, tuple)):
                yield KeyedIndices(indices, self._seed, epoch, first)
                first += len(indices)
            elif isinstance(indices, int):
                yield _keyed_index(KeyedIndices([indices], self._seed, epoch, first))
                first += 1
            else:  # a sampler's own kind of index, for its own kind of dataset
                yield indices


class _KeyedDataset:
    """Sets the key of what is asked for, then asks the user's dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: Any) -> Any:
        if not isinstance(indices, KeyedIndices):
            return self._several(indices)
        with keyed(indices.key(_worker_base_seed())):
            return self._several(list(indices))

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, KeyedIndex):
            return self.dataset[index]
        with keyed(index.keys.key(_worker_base_seed())):
            return self.dataset[int(index)]

    def __len__(self) -> int:
        return len(self.dataset)

    def _several(self, indices: Sequence[Any]) -> Any:
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]


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
        batches: makes an iterator over index batches, anew for each epoch.
        seed: seed of the keys, or None for the loader's base seed.
        begin: called when an epoch begins; returns its number.
    """

    def __init__(
        self, loader: DataLoader[Any], batches: Callable[[], Iterator[Any]], seed: int | None, begin: Callable[[], int]
    ) -> None:
        self._loader = loader
        self.dataset = _KeyedDataset(loader.dataset)
        self.worker_init_fn = _ShowUsersDataset(loader.worker_init_fn)
        self._index_sampler = _KeyedSampler(batches, seed, begin)

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
    """A sampler's error, kept until its batch is due."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


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
        self._source, self._depth, self._refill = source, depth, refill
        self._pending: deque[Any] = deque()
        self._left: list[Any] = []
        self._exhausted = False
        self._close = weakref.finalize(self, _cancel_all, source, self._pending)
        self._close.atexit = False

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
            raise batch.error
        start = perf_counter_ns()
        try:
            return self._source.finish(batch)
        finally:
            self._source.waited(perf_counter_ns() - start)

    def _next_filled(self, size: int) -> list[Any]:
        """A full batch, with samples of the batches that follow in the place of bad ones."""
        samples, self._left = self._left, []
        while len(samples) < size:
            try:
                more = self._next_samples()
            except StopIteration:
                if not samples or (self._drop_last and len(samples) < size):
                    raise
                return samples
            # A complete batch passes through as it is, so that it need not be copied.
            samples = samples + more if samples else more
        self._left = samples[size:]
        return samples[:size] if self._left else samples

    def _begin_batches(self) -> None:
        while not self._exhausted and len(self._pending) <= self._depth:
            try:
                indices = self._next_index()  # type: ignore[no-untyped-call]
                batch = self._source.start(indices, indices.key(self._base_seed))
            except StopIteration:
                self._exhausted = True
            except Exception as error:
                self._pending.append(_Failed(error))
                if not isinstance(error, IndexError):  # the sampler itself is broken
                    self._exhausted = True
            else:
                self._pending.append(batch)


def _cancel_all(source: BatchSource, pending: deque[Any]) -> None:
    while pending:
        batch = pending.popleft()
        if not isinstance(batch, _Failed):
            source.cancel(batch)

