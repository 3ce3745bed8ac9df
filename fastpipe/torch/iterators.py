"""The iterators of a loader: the only module that uses private parts of torch's ``DataLoader``.

torch makes an iterator from a loader.  This module gives torch a *view* instead of the loader.  The view has
the loader's attributes, but replaces the dataset, the index sampler, the collate function and the worker's
init function.

The module uses these private parts:

- of ``DataLoader``: ``_get_iterator``, ``_index_sampler``, ``_auto_collation``, ``_dataset_kind`` and
  ``_iterator``;
- ``_SingleProcessDataLoaderIter`` and its base's ``_next_data``, ``_next_index``, ``_reset``,
  ``_sampler_iter``, ``_index_sampler``, ``_num_yielded``, ``_base_seed``, ``_pin_memory``, ``_profile_name``;
- ``_MultiProcessingDataLoaderIter`` and its ``_get_data``, ``_process_data``, ``_shutdown_workers``,
  ``_shutdown``, ``_workers``, ``_workers_status``, ``_worker_pids_set``, ``_task_info``, ``_timeout``;
- the handler of SIGCHLD that torch installs.
"""

from __future__ import annotations

import atexit
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.data import DataLoader, _utils
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from fastpipe.core.clock import ranged
from fastpipe.core.keys import sample_seed
from fastpipe.core.pool import stopped_at_exit
from fastpipe.core.processes import deferred_interrupts
from fastpipe.errors import WorkerError
from fastpipe.torch.delivery import DeferredError, Delivery
from fastpipe.torch.describe import Advice
from fastpipe.torch.fetching import KeyedCollate, fetched
from fastpipe.torch.indices import IndexBatches, KeyedIndices
from fastpipe.torch.order import Progress
from fastpipe.torch.samples import collate_unfinished, collated
from fastpipe.torch.source import Source
from fastpipe.torch.transport import UnfinishedMessageError, WorkerContext, remove_names_of
from fastpipe.torch.workers import (
    WorkerCollate,
    WorkerInit,
    lanes_for,
    named_in,
    opens_lazily,
    segments_for,
    worker_error,
)

_EXITED = "DataLoader worker exited unexpectedly"
_END_S = 2.0  # longest time to wait for a worker's exit after its connection was closed


def forget_iterator(loader: DataLoader[Any]) -> None:
    """Release a loader's persistent workers.  The next epoch starts new workers."""
    loader._iterator = None


def refuse_copy(iterator: object) -> NoReturn:
    raise NotImplementedError(
        "an iterator of a FastLoader cannot be copied or pickled, because its batches are in progress: "
        "copy the loader, whose state_dict() holds the position"
    )


class WatchedWorkers(_MultiProcessingDataLoaderIter):
    """torch's iterator with worker processes.  Its errors say precisely which worker has ended or does not
    answer."""

    def __init__(self, view: Any) -> None:
        self._lanes = view.worker_init_fn.lanes
        # torch sets these attributes later; an error may be raised before that.
        self._workers: list[Any] = []
        self._workers_status: list[bool] = []
        self._num_workers, self._worker_pids_set = 0, False
        self._has_failed = False
        self._death: tuple[str, int | None, int | None] | None = None
        self._pid = os.getpid()
        self._loader = weakref.ref(view._loader)
        view.collate_fn = WorkerCollate(view.collate_fn)
        view.multiprocessing_context = WorkerContext(view.multiprocessing_context)
        _running.add(self)
        _clean_up_at_the_end()
        try:
            with deferred_interrupts():
                super().__init__(view)
            _explain_deaths()
            answers: Any = self._worker_result_queue
            answers.watch_writers(
                weakref.WeakMethod(self._is_hopeless), weakref.WeakMethod(self._before_error)
            )
            return
        except Exception as error:
            found = self._explained_start(error)
        try:
            raise found  # outside of the except block, as in `_get_data`
        finally:
            del found

    __getstate__ = refuse_copy

    def explain(self, error: Exception) -> BaseException:
        """Return an error that says which worker has ended, where and why.  Return ``error`` itself if no
        worker has ended."""
        found = [] if isinstance(error, WorkerError) else named_in(error, self._workers)
        return self._failed(str(error), found) if found else error

    def _explained_start(self, error: Exception) -> BaseException:
        number = len(self._workers)
        # The error comes from the pipe to the worker that is being started.
        if number < self._num_workers and isinstance(error, (ConnectionError, EOFError)):
            return WorkerError(
                f"Worker {number} ended while it was being started, before it had read what it needs "
                f"({type(error).__name__}: {error}). What it printed says why. A script whose workers are "
                'started by spawn or forkserver needs `if __name__ == "__main__":` around what it does',
                worker=number,
            )
        return self.explain(error)

    def _explained_wait(self, error: Exception) -> BaseException:
        if isinstance(error, WorkerError):
            return error
        if self._timeout > 0 and (late := self._late_by(error)):
            head = f"DataLoader timed out after {self._timeout} seconds"
            may_answer = not isinstance(error, UnfinishedMessageError)
            return self._failed(head, late, are_stuck=True, may_answer=may_answer)
        return self._failed(_EXITED, found) if (found := self._ended(error)) else error

    def _is_hopeless(self, seconds: float) -> bool:
        """Return whether the rest of a worker's message will never arrive.  ``seconds`` is the time without
        data."""
        return 0 < self._timeout < seconds or bool(_ending(self._working().values(), 0))

    def _working(self) -> dict[int, Any]:
        """Return the workers that were not told to end, as a dict with their numbers as keys."""
        return {number: self._workers[number] for number, is_due in enumerate(self._workers_status) if is_due}

    def _ended(self, error: Exception) -> list[int]:
        found = named_in(error, self._workers)
        if found:
            return found
        if not isinstance(error, UnfinishedMessageError):
            self._await_end()
        return [number for number, worker in self._working().items() if not worker.is_alive()]

    def _await_end(self) -> None:
        """Wait briefly for the exit of a worker whose connection was closed, because the worker may still be
        exiting."""
        for worker in _ending(self._working().values(), _END_S):
            worker.join(_END_S)

    def _before_error(self) -> None:
        # With pin_memory, a thread of torch reads the results.  This thread must not query the worker
        # processes, because the main thread may be doing so at the same time.
        if not hasattr(self, "_pin_memory_thread"):
            self._await_end()

    def _failed(
        self, head: str, found: Sequence[int], *, are_stuck: bool = False, may_answer: bool = False
    ) -> WorkerError | KeyboardInterrupt:
        failed = worker_error(head, found, self._workers, self._lanes, are_stuck=are_stuck)
        self._has_failed = True
        if not may_answer:
            self._death = str(failed), failed.worker, failed.pid
        loader = self._loader()
        if loader is not None and loader._iterator is self:
            forget_iterator(loader)
        if any(self._lanes[number].was_interrupted for number in found if number < len(self._lanes)):
            return (
                KeyboardInterrupt()
            )  # Ctrl-C also reaches the workers, and may have been lost in this process
        return failed

    def _next_data(self) -> Any:
        if self._death is not None:  # torch would continue without that worker's batches
            text, worker, pid = self._death
            raise WorkerError(text, worker=worker, pid=pid)
        return super()._next_data()  # type: ignore[no-untyped-call]

    def _get_data(self) -> Any:
        try:
            return super()._get_data()  # type: ignore[no-untyped-call]
        except Exception as error:
            found = self._explained_wait(error)
        try:
            # Outside of the except block, so that ``found`` does not refer to torch's error, whose traceback
            # refers to the script's frames.
            raise found
        finally:
            del found

    def _late_by(self, error: Exception) -> list[int]:
        """Return the numbers of the late workers if ``error`` is a timeout, else an empty list.

        The worker of the next batch is first.  Several workers may be late, because a stuck worker may hold
        the lock of the queue through which all workers send results.
        """
        is_unfinished = isinstance(error, UnfinishedMessageError) and not self._ended(error)
        if not is_unfinished and not (isinstance(error, RuntimeError) and "timed out" in str(error)):
            return []
        late = [info[0] for _, info in sorted(self._task_info.items()) if len(info) == 1]
        return list(dict.fromkeys(late)) or [n for n, worker in enumerate(self._workers) if worker.is_alive()]

    def _process_data(self, *args: Any) -> Any:
        try:
            return super()._process_data(*args)  # type: ignore[no-untyped-call]
        except Exception as error:
            # torch's frame refers to the error, and the error's traceback refers to the frame and to this
            # object.  With this cycle, workers would live until the next garbage collection, and then five
            # seconds more, because garbage collection would remove their queues first.
            _clear_innermost_frame(error)
            raise

    def _shutdown_workers(self) -> None:
        # torch tests in this way whether the interpreter is exiting.  Modules may be gone then, and
        # `let_workers_end` has run already.
        if _utils is None or _utils.python_exit_status is not False:
            return
        if not self._workers or os.getpid() != self._pid:  # a forked child must not end its parent's workers
            return
        if self._has_failed:  # a stuck worker does not react to a request to end
            self._kill_workers()
            answers: Any = self._worker_result_queue
            answers.release_of_killed()
        super()._shutdown_workers()
        self._kill_workers()
        self.remove_what_killed_workers_left()

    def _kill_workers(self) -> None:
        alive = [worker for worker in self._workers if worker.is_alive()]
        if alive and self._worker_pids_set:  # otherwise torch raises an error about their end
            _utils.signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]
            self._worker_pids_set = False
        for worker in alive:
            worker.kill()
        for worker in alive:
            worker.join(_utils.MP_STATUS_CHECK_INTERVAL)

    def remove_what_killed_workers_left(self) -> None:
        """Remove the names of shared memory that killed workers left in ``/dev/shm``.  Workers that end
        normally leave no names."""
        if os.getpid() == self._pid:
            remove_names_of([worker.pid for worker in self._workers if worker.exitcode is not None])

    def let_workers_end(self) -> None:
        """At the interpreter's exit, make sure that the workers end.  Otherwise ``multiprocessing`` would
        wait for them forever."""
        if self._has_failed:
            self._shutdown_workers()
        elif os.getpid() == self._pid:
            for worker in self._workers:
                if worker.is_alive():
                    os.kill(worker.pid, signal.SIGCONT)  # the worker may have been stopped by SIGSTOP


def _ending(workers: Iterable[Any], seconds: float) -> list[Any]:
    """Wait at most ``seconds`` until any worker ends; return the workers that have ended or are ending."""
    by_sentinel = {worker.sentinel: worker for worker in workers}
    return [by_sentinel[one] for one in multiprocessing.connection.wait(by_sentinel, seconds)]


def _clear_innermost_frame(error: BaseException) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None and trace.tb_frame.f_code.co_name == "reraise":  # torch's frame, not the script's
        trace.tb_frame.clear()


_running: weakref.WeakSet[WatchedWorkers] = weakref.WeakSet()
_explains_deaths = False


def _for_all(method: Callable[[WatchedWorkers], None]) -> None:
    for iterator in list(_running):
        method(iterator)


atexit.register(_for_all, WatchedWorkers.let_workers_end)
_cleans_up_in = -1  # id of the process that cleans up; a forked child must not clean up for its parent


def _clean_up_at_the_end() -> None:
    """At the interpreter's exit, remove what killed workers left in shared memory.  This happens after
    ``multiprocessing`` has killed the last workers."""
    global _cleans_up_in
    if _cleans_up_in != os.getpid():
        _cleans_up_in = os.getpid()
        method = WatchedWorkers.remove_what_killed_workers_left
        multiprocessing.util.Finalize(None, _for_all, (method,), exitpriority=-100)


def _explain_deaths() -> None:
    """Replace torch's signal handler by one that raises a precise error about ended workers.  The handler may
    run at any point of the script."""
    global _explains_deaths
    is_main = threading.current_thread() is threading.main_thread()
    if _explains_deaths or not hasattr(signal, "SIGCHLD") or not is_main:
        return
    torchs = signal.getsignal(signal.SIGCHLD)
    if not callable(torchs):
        return
    _explains_deaths = True

    def handler(number: int, frame: Any) -> None:
        try:
            torchs(number, frame)
            return
        except RuntimeError as error:
            found: BaseException = error
        iterator = None
        for iterator in list(_running):
            if isinstance(found, Exception):
                found = iterator.explain(found)
        try:
            raise found
        finally:
            del found, iterator  # otherwise the traceback would keep these objects, and the script's loader

    signal.signal(signal.SIGCHLD, handler)


_ERROR = object()  # replaces a batch that could not be begun


class _View:
    """The object that torch's iterator gets instead of the loader.  It has the loader's attributes, except
    for those that are set here."""

    def __init__(self, loader: DataLoader[Any], worker_init_fn: WorkerInit) -> None:
        self._loader, self.worker_init_fn = loader, worker_init_fn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class LoaderView(_View):
    """The object that torch's iterator gets instead of the loader, if the dataset is map-style."""

    def __init__(
        self, loader: DataLoader[Any], dataset: Any, batches: IndexBatches, seed: int | None,
        worker_init_fn: WorkerInit, delivery: Delivery | None, advice: Advice,
    ) -> None:  # fmt: skip
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
            # torch seeds its workers from the base seed.  Derive the base seed from the loader's seed.
            batches.base_seed = sample_seed(seed, batches.order.next_epoch, -1) >> 1
        if goes_on or (seed is not None and batches.order.ours() is not None):
            # torch now draws a base seed, which is not used: draw it from another generator, to leave the
            # script's generators unchanged.  If a sampler uses the script's generator, torch must draw from
            # it, so that the sampler's order is the same as in a DataLoader.
            self.generator = torch.Generator()


def is_map_style(loader: DataLoader[Any]) -> bool:
    return bool(loader._dataset_kind == _DatasetKind.Map)


def stock_iterator(view: LoaderView) -> _BaseDataLoaderIter:
    if view.num_workers == 0:
        return _SerialIterator(view)
    DataLoader.check_worker_number_rationality(view)  # type: ignore[arg-type]
    return _WorkerIterator(view)


def stream_iterator(loader: DataLoader[Any], advice: Advice) -> _BaseDataLoaderIter:
    if loader.num_workers == 0:
        return _StreamIterator(loader, advice)
    DataLoader.check_worker_number_rationality(loader)
    workers = loader.num_workers
    lanes = lanes_for(workers, segments_for(None, loader.batch_size, loader.prefetch_factor, workers))
    init = WorkerInit(loader.worker_init_fn, lanes, opens_lazily(None, workers))
    return WatchedWorkers(_View(loader, init))


class _StreamIterator(_SingleProcessDataLoaderIter):
    def __init__(self, loader: DataLoader[Any], advice: Advice) -> None:
        self._advice = advice
        super().__init__(loader)

    __getstate__ = refuse_copy

    def _next_data(self) -> Any:
        with self._advice.watched():
            return super()._next_data()  # type: ignore[no-untyped-call]


class _Counting(_BaseDataLoaderIter):
    """An iterator that counts the batches that the user has requested and received.  If the view has a
    ``Delivery``, it delivers the batches."""

    def __init__(self, view: LoaderView) -> None:
        self._delivery, self._advice = view.delivery, view.advice
        self._asked_for = 0  # number of batches requested in this epoch
        # Number of whole index batches used up to the last batch, and number of samples used from the next
        # index batch; None if each batch contains exactly one index batch.
        self.how_far: tuple[int, int] | None = None
        view._index_sampler.order.draw_again()
        super().__init__(view)  # type: ignore[arg-type]

    __getstate__ = refuse_copy

    @property
    def _base_seed(self) -> int:
        """The base seed of torch's workers, or the base seed of the resumed epoch."""
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
        progress = self._progress
        # Trainers may call ``set_epoch`` between ``iter`` and the first batch: begin the new epoch then.
        if not self._num_yielded and progress is not None and progress.is_stale:
            self._reset(_NO_LENGTH)
        self._asked_for += 1
        try:
            # torch's entry for its profiler takes as long as all other work here, even without a profiler.
            if torch._C._autograd._profiler_enabled():
                with torch.autograd.profiler.record_function(self._profile_name):
                    data = self._delivered()
            else:
                data = self._delivered()
        except StopIteration:
            if self._progress is not None:
                self._progress.is_over = True
            raise
        self._num_yielded += 1
        progress = self._progress
        assert progress is not None
        progress.received += 1
        if self.how_far is not None:
            progress.taken, progress.offset = self.how_far
        return data

    def is_ready(self) -> bool:
        """Return whether the next batch is ready."""
        return False

    def took_back(self) -> bool:
        """Put the last batch back if its settings have changed.  It is then made again, as the next batch.

        Return whether the batch was put back.
        """
        return False

    def _delivered(self) -> Any:
        with nullcontext() if self._advice.is_silent else self._advice.watched():
            return self._next_data() if self._delivery is None else self._delivery.next(self)

    @property
    def _progress(self) -> Progress | None:
        progress: Progress | None = self._sampler_iter.progress
        return progress


_NO_LENGTH = SimpleNamespace(
    _IterableDataset_len_called=None
)  # all attributes that torch's ``_reset`` reads from a loader


class _SerialIterator(_Counting, _SingleProcessDataLoaderIter):
    """torch's iterator without workers.  It also sets the base seed of the keys from which random numbers are
    made, as torch does in workers."""

    def _next_data(self) -> Any:
        fetched.base_seed = self._base_seed
        return super()._next_data()  # type: ignore[no-untyped-call]


class _WorkerIterator(_Counting, WatchedWorkers):
    _requests = _owed = 0

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._requests = self._owed = 0
        super()._reset(loader, first_iter)

    def _try_put_index(self) -> None:
        # torch calls the sampler whenever it takes a batch from a worker.  The delivery may take a batch
        # before the script requests it.  The sampler is then called when the script requests this batch.
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
        info = self._task_info.get(self._rcvd_idx, ())
        return len(info) == 2 or (self._num_workers == 1 and not self._data_queue.empty())


class ThreadedIterator(_Counting):
    """An iterator whose batches are made by a source's threads, while the user works with earlier batches.

    Batches are begun in order, up to ``depth`` batches ahead of the next batch to deliver.  Deleting the
    iterator cancels unfinished batches.  The error of a batch is raised when the script requests this batch.
    The next request then continues with the next batch.

    The number of calls of the script's own sampler depends only on the number of delivered batches, not on
    the speed of the threads.  There are ``early`` calls before the first batch, and then one call for each
    batch.  A sampler whose calls the script cannot notice is called whenever the threads need indices.

    Args:
        spare: a function that returns a number of bytes, and is called at most once.  While one slow sample
            delays the next batch, this many bytes of batches may be begun beyond ``depth``.
        refill: the batch size, if batches from which bad samples were left out are filled up.  None if not.
        early: the number of calls of the script's own sampler before the first batch.
        stands_for_workers: whether the threads replace worker processes.  The sampler is then called for the
            first batches at once, as with worker processes.
    """

    def __init__(
        self, view: LoaderView, source: Source, depth: int, spare: Callable[[], int], refill: int | None,
        early: int, stands_for_workers: bool,
    ) -> None:  # fmt: skip
        super().__init__(view)
        if self._timeout != 0 and not stands_for_workers:  # torch's iterator without workers does the same
            raise AssertionError(f"timeout={self._timeout} needs num_workers > 0")
        self._source, self._depth, self._refill = source, depth, refill
        if self._pin_memory or (self._delivery is not None and self._delivery.pins):
            source.ask(is_pinned=True)
        self._spare = cache(spare)  # called only after threads have work
        self._early, self._stands_for_workers = early, stands_for_workers
        self._pending: deque[_Begun] = deque()
        self._asked: KeyedIndices | None = None
        self._state: object = None  # settings with which the last batch was made
        self._left_numbers: list[int] = []  # numbers of the samples that the last index batch kept
        # Indices from the sampler whose batch was not begun yet.  They are not in `_pending`, because the
        # finalizer keeps `_pending`, and the tracebacks of errors refer to this iterator.
        self._indices: deque[KeyedIndices | DeferredError] = deque()
        self._errors: deque[DeferredError] = deque()
        self._close = weakref.finalize(self, _cancel_all, self._pending)
        self._close.atexit = False
        if stands_for_workers:
            self._sampler_iter = iter(self._index_sampler)  # as torch's iterator with workers does
        self._begin_epoch()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        _cancel_all(self._pending)  # batches of an epoch that was not finished
        self._errors.clear()
        self._indices.clear()
        self._left: Sequence[Any] = []
        self._taken = 0
        self._nothing: Exception | None = None  # the reason why a batch had no samples
        self._requests, self._exhausted = 0, False
        if self._stands_for_workers:
            self._ask_sampler()

    def _delivered(self) -> Any:
        self._ask_sampler()
        return super()._delivered()

    def _ask_sampler(self) -> None:
        """Request as many batches of indices from the sampler as a ``DataLoader`` would have requested by
        now."""
        epoch, due = self._sampler_iter, self._early + self._asked_for
        if epoch.is_free:
            if not self._requests:
                self._request()  # the sampler draws the epoch's order now
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
            self._indices.append(DeferredError(error))

    def _next_data(self) -> Any:
        samples: Any = self._next_samples() if self._refill is None else self._next_filled(self._refill)
        if isinstance(self._collate_fn, KeyedCollate) and self._asked is not None:
            fetched.last = self._asked
        return self._collated(samples)

    @ranged("collate")
    def _collated(self, samples: Any) -> Any:
        with self._on_stream():
            data = collated(samples, self._collate_fn)
        # Batches for a GPU are pinned during the transfer, or are already on the GPU.
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
        if self._state != self._source.made_by() or not batch.is_current():
            batch.cancel()  # the settings have changed: make the batch again
            _, batch, self._state = self._begun(self._asked)
        start = perf_counter_ns()
        try:
            self._keep_threads_busy(batch)
            with self._on_stream():
                samples: Sequence[Any] = batch.finish()
        finally:
            self._source.waited(perf_counter_ns() - start)
        if self._refill is not None:
            self._taken, self._left_numbers = self._taken + 1, list(batch.kept)
        if not samples:
            error = batch.why_empty()
            if error is not None and self._refill is None:
                raise error
            self._nothing = error
        return samples

    def _next_filled(self, size: int) -> Sequence[Any]:
        """Return a full batch.  Samples of the sampler's later batches replace bad samples."""
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
                self._left = samples  # the next call uses these samples
                raise
            # A complete batch is returned unchanged, to avoid a copy.
            samples = [*samples, *more] if samples else more
        self._left = samples[size:]
        left = len(self._left)  # number of samples of the last index batch that are left for the next batch
        self.how_far = self._taken - bool(left), self._left_numbers[-left] if left else 0
        return samples[:size] if left else samples

    def is_ready(self) -> bool:
        is_ours = self._collate_fn in (_utils.collate.default_collate, collate_unfinished)
        if not self._pending or self._refill is not None or not is_ours or self._source.runs_user_code:
            return False
        batch = self._pending[0].batch
        return batch is not _ERROR and self._source.is_done(batch)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._delivery is None else self._delivery.on_stream()

    def _begin_batches(self) -> None:
        while len(self._pending) <= self._depth and self._begin_batch():
            pass

    def _begin_batch(self) -> bool:
        """Begin the next batch if its indices are known or may be requested now.  Return whether there was a
        next batch."""
        if not self._indices and not self._exhausted and (self._sampler_iter.is_free or not self._pending):
            self._request()
        if not self._indices:
            return False
        asked = self._indices.popleft()
        try:
            if isinstance(asked, DeferredError):
                raise asked.take()
            self._pending.append(self._begun(asked))
        except Exception as error:
            self._errors.append(DeferredError(error))
            self._pending.append(_Begun(None, _ERROR, None))
        return True

    def _begun(self, asked: KeyedIndices) -> _Begun:
        state = self._source.made_by()
        # The script may use the batch outside of its current inference mode.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            return _Begun(asked, self._source.start(asked.indices, asked.key(self._base_seed)), state)

    def took_back(self) -> bool:
        if self._asked is None or self._state == self._source.made_by():
            return False
        self._pending.appendleft(self._begun(self._asked))
        return True

    def _keep_threads_busy(self, due: Any) -> None:
        """Begin more batches while threads are idle because one slow sample delays ``due``, the next
        batch."""
        nbytes = due.nbytes
        while nbytes and self._pending:
            last = self._pending[-1].batch
            if (len(self._pending) - self._depth) * nbytes >= self._spare() or last is _ERROR:
                return
            if self._source.wait_for_either(due, last) or not self._begin_batch():
                return


class _Begun(NamedTuple):
    """A batch that was begun.  ``asked`` contains its indices, or is None after an error.  ``batch`` is the
    batch or `_ERROR`.  ``state`` contains the settings with which the batch is made."""

    asked: KeyedIndices | None
    batch: Any
    state: object


def _cancel_all(pending: deque[_Begun]) -> None:
    while pending:
        batch = pending.popleft().batch
        if batch is not _ERROR:
            batch.cancel()
