"""torch's iterator with worker processes, which says more about those that die or do not answer.

With ``_torch_loader``, the place that touches private parts of torch's ``DataLoader``.

Used: ``_MultiProcessingDataLoaderIter`` and its ``_next_data``, ``_get_data``, ``_process_data``,
``_shutdown_workers``, ``_shutdown``, ``_workers``, ``_workers_status``, ``_worker_pids_set``, ``_task_info``,
``_timeout``; ``DataLoader._iterator``; the handler of SIGCHLD that torch installs.
"""

from __future__ import annotations

import atexit
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

from torch.utils.data import DataLoader, _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fastpipe.errors import WorkerError
from fastpipe.torch.lane_memory import remove_names_of
from fastpipe.torch.worker_queues import UnfinishedMessageError, WorkerContext
from fastpipe.torch.workers import WorkerCollate, named_in, worker_error

__all__ = ["WatchedWorkers", "forget_iterator", "refuse_copy"]

_EXITED = "DataLoader worker exited unexpectedly"
_END_S = 2.0  # for a worker whose connection has ended to be gone itself


def forget_iterator(loader: DataLoader[Any]) -> None:
    """Let go of persistent workers: the next epoch starts new ones."""
    loader._iterator = None


def refuse_copy(iterator: object) -> NoReturn:
    """The ``__getstate__`` of an iterator, which has the same type of error as torch's."""
    raise NotImplementedError(
        "an iterator of a FastLoader cannot be copied or pickled, as its batches are being made: copy the "
        "loader, whose state_dict() says how far this is"
    )


class WatchedWorkers(_MultiProcessingDataLoaderIter):
    """torch's iterator with workers; says more about those that die or do not answer."""

    def __init__(self, view: Any) -> None:
        self._lanes = view.worker_init_fn.lanes
        # Should an error come before torch sets these.
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
            super().__init__(view)
            _explain_deaths()
            answers: Any = self._worker_result_queue
            own = weakref.ref(self)
            answers.watch_writers(partial(_is_hopeless, own), partial(_await_end, own))
            return
        except Exception as error:
            found = self._explained_start(error)
        try:
            raise found  # out here, as in `_get_data`
        finally:
            del found

    __getstate__ = refuse_copy

    def explain(self, error: Exception) -> Exception:
        """Return an error that says which worker has ended, where and why; the given one, if it names none of
        this iterator's."""
        found = [] if isinstance(error, WorkerError) else named_in(error, self._workers)
        return self._failed(str(error), found) if found else error

    def _explained_start(self, error: Exception) -> Exception:
        """Return what an error says that came while workers were being started."""
        is_starting = len(self._workers) < self._num_workers
        if is_starting and isinstance(error, (ConnectionError, EOFError)):  # of the pipe to the next one
            number = len(self._workers)
            return WorkerError(
                f"Worker {number} ended while it was being started, before it had read what it needs "
                f"({type(error).__name__}: {error}). What it printed says why. A script whose workers are "
                'started by spawn or forkserver needs `if __name__ == "__main__":` around what it does',
                worker=number,
            )
        return self.explain(error)

    def _explained_wait(self, error: Exception) -> Exception:
        """Return what an error says that came while a batch was waited for."""
        if isinstance(error, WorkerError):
            return error
        if self._timeout > 0 and (late := self._late_by(error)):
            head = f"DataLoader timed out after {self._timeout} seconds"
            may_answer = not isinstance(error, UnfinishedMessageError)
            return self._failed(head, late, are_stuck=True, may_answer=may_answer)
        return self._failed(_EXITED, found) if (found := self._ended(error)) else error

    def is_hopeless(self, seconds: float) -> bool:
        """Return whether the rest of a message will not come, of which nothing has come for so long."""
        return 0 < self._timeout < seconds or bool(_ending(self._working().values(), 0))

    def _working(self) -> dict[int, Any]:
        """Return the workers that have not been asked to end, by their numbers."""
        return {number: self._workers[number] for number, is_due in enumerate(self._workers_status) if is_due}

    def _ended(self, error: Exception) -> list[int]:
        """Return the numbers of the workers that have ended before their time."""
        found = named_in(error, self._workers)
        if found:
            return found
        if not isinstance(error, UnfinishedMessageError):
            self.await_end()
        return [number for number, worker in self._working().items() if not worker.is_alive()]

    @property
    def has_reading_thread(self) -> bool:
        """Whether a thread of torch's reads what workers send, to pin it."""
        return hasattr(self, "_pin_memory_thread")

    def await_end(self) -> None:
        """Wait for the end of a worker, a short time: that of a connection to it is noticed earlier."""
        for worker in _ending(self._working().values(), _END_S):
            worker.join(_END_S)

    def _failed(
        self, head: str, found: Sequence[int], *, are_stuck: bool = False, may_answer: bool = False
    ) -> WorkerError:
        failed = worker_error(head, found, self._workers, self._lanes, are_stuck=are_stuck)
        self._has_failed = True
        if not may_answer:
            self._death = str(failed), failed.worker, failed.pid
        loader = self._loader()
        if loader is not None and loader._iterator is self:
            forget_iterator(loader)
        return failed

    def _next_data(self) -> Any:
        if self._death is not None:  # torch would go on without that worker's batches
            text, worker, pid = self._death
            raise WorkerError(text, worker=worker, pid=pid)
        return super()._next_data()  # type: ignore[no-untyped-call]

    def _get_data(self) -> Any:
        try:
            return super()._get_data()  # type: ignore[no-untyped-call]
        except Exception as error:
            found = self._explained_wait(error)
        try:
            raise found  # out here, so that it does not refer to torch's, and that to the script's frames
        finally:
            del found

    def _late_by(self, error: Exception) -> list[int]:
        """Return the numbers of the workers that are late, if an error says so; that of the due batch first.

        One that is stuck may have the lock of the queue in which all answer; and between two epochs it is
        not known which has not answered.
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
            # torch's frame refers to the error, whose traceback refers to the frame, and through
            # it to this: workers would live until the garbage collector comes, and then for five
            # seconds more, as it takes their queues away first.
            _clear_innermost_frame(error)
            raise

    def _shutdown_workers(self) -> None:
        # The last things are freed when modules are gone, as torch sees it here: all has been done by then.
        if _utils is None or _utils.python_exit_status is not False:
            return
        if not self._workers or os.getpid() != self._pid:  # a forked child's copy, whose parent goes on
            return
        if self._has_failed:  # one that is stuck does not answer a polite request
            self._kill_workers()
            answers: Any = self._worker_result_queue
            answers.release_of_killed()
        super()._shutdown_workers()
        self._kill_workers()
        self.remove_what_killed_workers_left()

    def _kill_workers(self) -> None:
        alive = [worker for worker in self._workers if worker.is_alive()]
        if alive and self._worker_pids_set:  # else torch raises an error about their end
            _utils.signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]
            self._worker_pids_set = False
        for worker in alive:
            worker.kill()
        for worker in alive:
            worker.join(_utils.MP_STATUS_CHECK_INTERVAL)

    def remove_what_killed_workers_left(self) -> None:
        """Their names in ``/dev/shm``; of others there are none, whose exit code may be the same."""
        if os.getpid() == self._pid:
            remove_names_of([worker.pid for worker in self._workers if worker.exitcode is not None])

    def let_workers_end(self) -> None:
        """At the end of the interpreter, where ``multiprocessing`` waits for them without a limit."""
        if self._has_failed:
            self._shutdown_workers()
        elif os.getpid() == self._pid:
            for worker in self._workers:
                if worker.is_alive():
                    os.kill(worker.pid, signal.SIGCONT)  # should somebody have stopped it


def _ending(workers: Iterable[Any], seconds: float) -> list[Any]:
    """Wait for the end of a worker, at most so long; return those that are ending."""
    by_sentinel = {worker.sentinel: worker for worker in workers}
    return [by_sentinel[one] for one in multiprocessing.connection.wait(by_sentinel, seconds)]


def _is_hopeless(reference: weakref.ref[WatchedWorkers], seconds: float) -> bool:
    iterator = reference()
    return iterator is None or iterator.is_hopeless(seconds)


def _await_end(reference: weakref.ref[WatchedWorkers]) -> None:
    iterator = reference()
    # Elsewhere torch's thread reads, and must not ask for what the main one may be asking just then.
    if iterator is not None and not iterator.has_reading_thread:
        iterator.await_end()


def _clear_innermost_frame(error: BaseException) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None and trace.tb_frame.f_code.co_name == "reraise":  # and none of the script's
        trace.tb_frame.clear()


_running: weakref.WeakSet[WatchedWorkers] = weakref.WeakSet()
_explains_deaths = False


@atexit.register
def _let_workers_end() -> None:
    for iterator in list(_running):
        iterator.let_workers_end()


_cleans_up_in = -1  # the process, as a forked child does nothing at its end of what its parent is to do


def _clean_up_at_the_end() -> None:
    """Look after what workers leave once ``multiprocessing`` has killed those that were left."""
    global _cleans_up_in
    if _cleans_up_in != os.getpid():
        _cleans_up_in = os.getpid()
        multiprocessing.util.Finalize(None, _remove_what_killed_workers_left, exitpriority=-100)


def _remove_what_killed_workers_left() -> None:
    for iterator in list(_running):
        iterator.remove_what_killed_workers_left()


def _explain_deaths() -> None:
    """Let the error that torch raises in a signal handler, wherever the script is, say more."""
    global _explains_deaths
    if _explains_deaths or not hasattr(signal, "SIGCHLD"):
        return
    if threading.current_thread() is not threading.main_thread():
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
            found: Exception = error
        iterator = None
        for iterator in list(_running):
            found = iterator.explain(found)
        try:
            raise found
        finally:
            del found, iterator  # which the traceback would keep, and the traceback the script's loader

    signal.signal(signal.SIGCHLD, handler)
