"""The place that, with ``_torch_workers``, touches private parts of torch's ``DataLoader``.

torch builds an iterator from a loader.  It is given a *view* of the loader instead, in which
only the dataset, the index sampler, the collate function and the worker's init function are
replaced; everything else, and every attribute that the user sees, stays the loader's own.

Used: ``DataLoader._get_iterator``, ``_index_sampler``, ``_auto_collation``, ``_dataset_kind``,
``_iterator``; ``_SingleProcessDataLoaderIter`` and of its
base ``_next_data``, ``_next_index``, ``_reset``, ``_sampler_iter``, ``_index_sampler``,
``_num_yielded``, ``_base_seed``, ``_pin_memory``, ``_profile_name``.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, _utils
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _SingleProcessDataLoaderIter,
)

from fastpipe.core.clock import ranged
from fastpipe.core.keys import sample_seed
from fastpipe.core.pool import stopped_at_exit
from fastpipe.torch._torch_workers import WatchedWorkers, forget_iterator, refuse_copy
from fastpipe.torch.advice import Advice
from fastpipe.torch.delivery import Delivery, DueError
from fastpipe.torch.fetching import IndexBatches, KeyedCollate, KeyedIndices, set_base_seed
from fastpipe.torch.progress import Progress
from fastpipe.torch.samples import collate_unfinished, collated
from fastpipe.torch.source import Source
from fastpipe.torch.workers import WorkerInit, lanes_for

__all__ = ["LoaderView", "ThreadedIterator", "forget_iterator", "is_map_style", "stock_iterator"]

_ERROR = object()  # among batches: one that could not be begun


class _View:
    """A loader as its iterator sees it: itself, but for the attributes that are set here.

    Args:
        loader: the user's loader.
        worker_init_fn: runs first in each worker.
    """

    def __init__(self, loader: DataLoader[Any], worker_init_fn: WorkerInit) -> None:
        self._loader, self.worker_init_fn = loader, worker_init_fn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class LoaderView(_View):
    """A loader of a map-style dataset as its iterator sees it.

    Args:
        loader: the user's loader.
        dataset: what torch asks for batches.
        batches: what it asks for indices.
        seed: seed of the keys, or None for the loader's base seed.
        worker_init_fn: runs first in each worker.
        delivery: what is done to a batch on its way to the user; None for nothing.
        advice: watches how long batches are waited for.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        dataset: Any,
        batches: IndexBatches,
        seed: int | None,
        worker_init_fn: WorkerInit,
        delivery: Delivery | None,
        advice: Advice,
    ) -> None:
        super().__init__(loader, worker_init_fn)
        self.dataset, self._index_sampler = dataset, batches
        self.delivery, self.advice = delivery, advice
        if seed is not None and loader.collate_fn is not _utils.collate.default_collate:
            self.collate_fn: Callable[[list[Any]], Any] = KeyedCollate(loader.collate_fn)
        if delivery is not None and delivery.finishes:
            self.collate_fn = collate_unfinished
        point = batches.order.pending
        goes_on = batches.base_seed is not None or (point is not None and point.is_within)
        if seed is not None and batches.base_seed is None:
            # The base seed, from which torch seeds its workers, comes from the seed as well.
            batches.base_seed = sample_seed(seed, batches.order.next_epoch, -1) >> 1
        if goes_on or (seed is not None and batches.order.ours() is not None):
            # Where torch would draw the base seed, the script's generators stay as they are; but not
            # before a sampler that draws from them as well: its order is to be torch's.
            self.generator = torch.Generator()


def is_map_style(loader: DataLoader[Any]) -> bool:
    """Whether the dataset is indexed, as opposed to iterated."""
    return bool(loader._dataset_kind == _DatasetKind.Map)


def stock_iterator(view: LoaderView) -> _BaseDataLoaderIter:
    """torch's own iterator on a view."""
    if view.num_workers == 0:
        return _SerialIterator(view)
    DataLoader.check_worker_number_rationality(view)  # type: ignore[arg-type]
    return _WorkerIterator(view)


def stream_iterator(loader: DataLoader[Any], advice: Advice) -> _BaseDataLoaderIter:
    """torch's own iterator over an ``IterableDataset``."""
    if loader.num_workers == 0:
        return _StreamIterator(loader, advice)
    DataLoader.check_worker_number_rationality(loader)
    init = WorkerInit(loader.worker_init_fn, lanes_for(loader.num_workers, 0))
    return WatchedWorkers(_View(loader, init))


class _StreamIterator(_SingleProcessDataLoaderIter):
    """torch's iterator without workers, whose batches are watched."""

    def __init__(self, loader: DataLoader[Any], advice: Advice) -> None:
        self._advice = advice
        super().__init__(loader)

    __getstate__ = refuse_copy

    def _next_data(self) -> Any:
        with self._advice.watched():
            return super()._next_data()  # type: ignore[no-untyped-call]


class _Counting(_BaseDataLoaderIter):
    """Counts what the user has asked for and received, and hands batches to the view's delivery."""

    def __init__(self, view: LoaderView) -> None:
        self._delivery, self._advice = view.delivery, view.advice
        self._asked_for = 0  # batches, in this epoch
        # Index batches taken by the batch given last, and samples of the next, if not one each.
        self.how_far: tuple[int, int] | None = None
        view._index_sampler.order.draw_again()
        super().__init__(view)  # type: ignore[arg-type]

    __getstate__ = refuse_copy

    @property
    def _base_seed(self) -> int:
        """torch's seed of workers, or the one that an epoch to be resumed had."""
        seed = self._index_sampler.base_seed
        assert seed is not None
        return int(seed)

    @_base_seed.setter
    def _base_seed(self, seed: int) -> None:
        if self._index_sampler.base_seed is None:
            self._index_sampler.base_seed = seed

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if self._delivery is not None:
            self._delivery.reset()
        self._asked_for = 0
        if not first_iter:
            self._index_sampler.order.draw_again()
        super()._reset(loader, first_iter)

    def __next__(self) -> Any:
        if threading.current_thread().daemon:
            with stopped_at_exit():
                return self._counted()
        return self._counted()

    def _counted(self) -> Any:
        if not self._num_yielded:
            self._restart_if_stale()
        self._asked_for += 1
        try:
            # torch's entry in a profile costs as much as all the rest, also when nobody profiles.
            if torch._C._autograd._profiler_enabled():
                with torch.autograd.profiler.record_function(self._profile_name):
                    data = self._delivered()
            else:
                data = self._delivered()
        except StopIteration:
            begun = self._progress()
            if begun is not None:
                begun.is_over = True
            raise
        self._num_yielded += 1
        progress: Progress = self._sampler_iter.progress
        progress.received += 1
        if self.how_far is not None:
            progress.taken, progress.offset = self.how_far
        return data

    def is_ready(self) -> bool:
        """Whether the next batch is there already."""
        return False

    def took_back(self) -> bool:
        """Take back the batch that was given last, if what it was made by has changed since."""
        return False

    def _restart_if_stale(self) -> None:
        """Begin again if ``set_epoch`` came between ``iter`` and the first batch, as trainers do it."""
        progress = self._progress()
        if progress is not None and progress.is_stale:
            self._reset(_NO_LENGTH)

    def _delivered(self) -> Any:
        if self._advice.is_silent:
            return self._next_data() if self._delivery is None else self._delivery.next(self)
        with self._advice.watched():
            return self._next_data() if self._delivery is None else self._delivery.next(self)

    def _progress(self) -> Progress | None:
        progress: Progress | None = self._sampler_iter.progress
        return progress


class _NoLength:
    _IterableDataset_len_called = None


_NO_LENGTH = _NoLength()  # all that torch's ``_reset`` wants of a loader over indices


class _SerialIterator(_Counting, _SingleProcessDataLoaderIter):
    """torch's iterator without workers; tells the keys' base seed, which workers know."""

    def _next_data(self) -> Any:
        set_base_seed(self._base_seed)
        return super()._next_data()  # type: ignore[no-untyped-call]


class _WorkerIterator(_Counting, WatchedWorkers):
    """torch's iterator with workers."""

    _requests = _owed = 0

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._requests = self._owed = 0
        super()._reset(loader, first_iter)

    def _try_put_index(self) -> None:
        # torch asks the sampler whenever it takes a batch from a worker.  The delivery may take one early, as
        # soon as it is there; the sampler is then asked when the script asks for that batch.
        if self._requests < self._num_workers * self._prefetch_factor + self._asked_for:
            self._requests += 1
            super()._try_put_index()
        else:
            self._owed += 1

    def _delivered(self) -> Any:
        owed, self._owed = self._owed, 0
        for _ in range(owed):
            self._try_put_index()
        return super()._delivered()

    def is_ready(self) -> bool:
        """Whether the next batch is there already."""
        info = self._task_info.get(self._rcvd_idx, ())
        return len(info) == 2 or (self._num_workers == 1 and not self._data_queue.empty())


class ThreadedIterator(_Counting):
    """Takes batches from a source's threads; the next ones are made while one is used.

    Life cycle: batches are begun in order, up to ``depth`` ahead.  Dropping the iterator, or an error in
    it, cancels what is not finished.  An error of a batch is raised when that batch is due; the next call
    goes on behind it.

    The script's sampler is asked as often as the batches handed out say, never as threads happen to be
    fast: ``early`` requests before the first batch, then one for each.  Only an order that nothing of the
    script's can watch is taken as the threads need it.

    Args:
        view: the loader's view.
        source: makes the batches.
        depth: batches begun ahead of the one that is due.
        spare: gives the bytes of batches that may be begun beyond that, rather than that threads have
            nothing to do while one slow sample holds up the batch that is due; asked once.
        refill: batch size to fill up to when samples were left out, or None.
        early: requests to the sampler beyond the batches asked for.
        stands_for_workers: whether the first are made at once, as by worker processes, and not with the
            first batch.
    """

    def __init__(
        self, view: LoaderView, source: Source, depth: int, spare: Callable[[], int], refill: int | None,
        early: int, stands_for_workers: bool,
    ) -> None:  # fmt: skip
        super().__init__(view)
        if self._timeout != 0 and not stands_for_workers:  # as torch's iterator without workers has it
            raise AssertionError(f"timeout={self._timeout} needs num_workers > 0")
        self._source, self._depth, self._refill = source, depth, refill
        if self._pin_memory or (self._delivery is not None and self._delivery.pins):
            source.pin()
        self._spare = cache(spare)  # not before threads have something to do
        self._early, self._stands_for_workers = early, stands_for_workers
        self._pending: deque[_Begun] = deque()
        self._asked: KeyedIndices | None = None
        self._state: object = None  # by which the batch given last was made
        self._left: Sequence[Any] = []
        self._left_numbers: list[int] = []  # their numbers in the index batch that was taken last
        self._taken = 0
        self._nothing: Exception | None = None  # why a batch had no sample
        # Indices that the sampler gave and that are not begun; apart from `_pending`, which the finalizer
        # keeps: the tracebacks of errors refer to this object.
        self._indices: deque[KeyedIndices | DueError] = deque()
        self._requests = 0
        self._exhausted = False
        self._errors: deque[DueError] = deque()
        self._close = weakref.finalize(self, _cancel_all, source, self._pending)
        self._close.atexit = False
        if stands_for_workers:
            self._ask_sampler()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        _cancel_all(self._source, self._pending)  # of the epoch that is not wanted any more
        self._errors.clear()
        self._indices.clear()
        self._left, self._taken, self._nothing = [], 0, None
        self._requests, self._exhausted = 0, False
        if self._stands_for_workers:
            self._ask_sampler()

    def _delivered(self) -> Any:
        self._ask_sampler()
        return super()._delivered()

    def _ask_sampler(self) -> None:
        """Ask the sampler for as many index batches as a ``DataLoader`` would have asked for by now."""
        epoch, due = self._sampler_iter, self._early + self._asked_for
        if epoch.is_free:
            if not self._requests:
                self._request()  # an order is drawn now
            epoch.reach(due if self._stands_for_workers else self._asked_for)
        else:
            while self._requests < due and not self._exhausted:
                self._request()

    def _request(self) -> None:
        self._requests += 1
        try:
            self._indices.append(self._next_index())  # type: ignore[no-untyped-call]
        except StopIteration:
            self._exhausted = True
        except Exception as error:
            self._indices.append(DueError(error))

    def _next_data(self) -> Any:
        # A list, or what can take the place of one.
        samples: Any = self._next_samples() if self._refill is None else self._next_filled(self._refill)
        if isinstance(self._collate_fn, KeyedCollate) and self._asked is not None:
            self._collate_fn.is_about(self._asked)
        return self._collated(samples)

    @ranged("collate")
    def _collated(self, samples: Any) -> Any:
        with self._on_stream():
            data = collated(samples, self._collate_fn)
        # What goes to a GPU next is pinned on that way, or may be there already.
        if self._pin_memory and not (self._delivery and self._delivery.pins):
            data = _utils.pin_memory.pin_memory(data, self._pin_memory_device)  # type: ignore[no-untyped-call]
        return data

    @ranged("wait")
    def _next_samples(self) -> Sequence[Any]:
        self._begin_batches()
        if not self._pending:
            raise StopIteration
        self._asked, batch, self._state = self._pending.popleft()
        if batch is _ERROR:
            raise self._errors.popleft().take()
        assert self._asked is not None
        if self._state != self._source.made_by() or not self._source.is_current(batch):
            self._source.cancel(batch)  # changed since: as if it were made now
            _, batch, self._state = self._begun(self._asked)
        start = perf_counter_ns()
        try:
            self._keep_threads_busy(batch)
            with self._on_stream():
                samples = self._source.finish(batch)
        finally:
            self._source.waited(perf_counter_ns() - start)
        if self._refill is not None:
            self._taken, self._left_numbers = self._taken + 1, list(self._source.kept(batch))
        if not samples:
            error = self._source.why_empty(batch)
            if error is not None and self._refill is None:
                raise error
            self._nothing = error
        return samples

    def _next_filled(self, size: int) -> Sequence[Any]:
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
                break
            except BaseException:
                self._left = samples  # they belong to the batch that the next call gives
                raise
            # A complete batch passes through as it is, so that it need not be copied.
            samples = [*samples, *more] if samples else more
        self._left = samples[size:]
        self._say_how_far()
        return samples[:size] if self._left else samples

    def _say_how_far(self) -> None:
        """Where a batch ends that is not simply the next index batch."""
        left = len(self._left)
        taken = self._taken - 1 if left else self._taken
        self.how_far = taken, self._left_numbers[-left] if left else 0

    def is_ready(self) -> bool:
        """Return whether the next batch is there already, and may be taken before the script asks for it."""
        if not self._pending or self._refill is not None or self._runs_user_code():
            return False
        batch = self._pending[0].batch
        return batch is not _ERROR and self._source.is_done(batch)

    def _runs_user_code(self) -> bool:
        is_ours = self._collate_fn in (_utils.collate.default_collate, collate_unfinished)
        return not is_ours or self._source.runs_user_code

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._delivery is None else self._delivery.on_stream()

    def _begin_batches(self) -> None:
        while len(self._pending) <= self._depth and self._begin_batch():
            pass

    def _begin_batch(self) -> bool:
        """Begin the next batch, if the sampler may be asked for it or has given it; whether it was begun."""
        if not self._indices and not self._exhausted and (self._sampler_iter.is_free or not self._pending):
            self._request()
        if not self._indices:
            return False
        asked = self._indices.popleft()
        try:
            if isinstance(asked, DueError):
                raise asked.take()
            self._pending.append(self._begun(asked))
        except Exception as error:
            self._errors.append(DueError(error))
            self._pending.append(_Begun(None, _ERROR, None))
        return True

    def _begun(self, asked: KeyedIndices) -> _Begun:
        state = self._source.made_by()
        # The script may use the batch elsewhere than it is now.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            return _Begun(asked, self._source.start(asked.indices, asked.key(self._base_seed)), state)

    def took_back(self) -> bool:
        """Take back the batch that was given last, if what it was made by has changed since."""
        if self._asked is None or self._state == self._source.made_by():
            return False
        self._pending.appendleft(self._begun(self._asked))
        return True

    def _keep_threads_busy(self, due: Any) -> None:
        """Begin further batches while a slow sample of the batch that is due is made by one thread and
        the others have nothing left to begin."""
        nbytes = self._source.nbytes(due)
        while nbytes and self._pending:
            last = self._pending[-1].batch
            if (len(self._pending) - self._depth) * nbytes >= self._spare() or last is _ERROR:
                return
            if self._source.wait_for_either(due, last) or not self._begin_batch():
                return


class _Begun(NamedTuple):
    """A batch that was begun.

    Attributes:
        asked: its indices; None where there was an error.
        batch: what the source makes of them, or `_ERROR`.
        state: the state of the transform that it is made by.
    """

    asked: KeyedIndices | None
    batch: Any
    state: object


def _cancel_all(source: Source, pending: deque[_Begun]) -> None:
    while pending:
        batch = pending.popleft().batch
        if batch is not _ERROR:
            source.cancel(batch)
