"""torch's iterator with worker processes, which says more about those that die or do not answer.

With ``_torch_loader``, the place that touches private parts of torch's ``DataLoader``.

Used: ``_MultiProcessingDataLoaderIter`` and its ``_next_data``, ``_get_data``, ``_process_data``,
``_shutdown_workers``, ``_workers``, ``_worker_pids_set``, ``_task_info``,
``_timeout``; ``DataLoader._iterator``; the handler of SIGCHLD that torch installs.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import signal
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader, _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fastpipe.errors import WorkerError
from fastpipe.torch.lane_memory import remove_names_of
from fastpipe.torch.worker_queues import context_with_index_queues
from fastpipe.torch.workers import WorkerCollate, explained

__all__ = ["WatchedWorkers", "forget_iterator"]


def forget_iterator(loader: DataLoader[Any]) -> None:
    """Let go of persistent workers: the next epoch starts new ones."""
    loader._iterator = None


class WatchedWorkers(_MultiProcessingDataLoaderIter):
    """torch's iterator with workers; says more about those that die or do not answer."""

    def __init__(self, view: Any) -> None:
        self._lanes = view.worker_init_fn.lanes
        self._workers: list[Any] = []  # should an error come before torch sets it
        self._worker_pids_set = False
        self._has_failed = False
        self._death: tuple[str, int | None, int | None] | None = None
        self._pid = os.getpid()
        self._loader = weakref.ref(view._loader)
        view.collate_fn = WorkerCollate(view.collate_fn)
        view.multiprocessing_context = context_with_index_queues(view.multiprocessing_context)
        _running.add(self)
        _clean_up_at_the_end()
        super().__init__(view)
        _explain_deaths()

    def explain(self, error: RuntimeError, stuck: Sequence[int] = ()) -> RuntimeError:
        """An error about this iterator's workers that says which, where and why."""
        told = explained(error, self._workers, self._lanes, stuck)
        if isinstance(told, WorkerError):
            self._has_failed = True
            if not stuck:  # who is late may come yet
                self._death = str(told), told.worker, told.pid
            loader = self._loader()
            if loader is not None and loader._iterator is self:
                forget_iterator(loader)
        return told

    def _next_data(self) -> Any:
        if self._death is not None:  # torch would go on without that worker's batches
            text, worker, pid = self._death
            raise WorkerError(text, worker=worker, pid=pid)
        return super()._next_data()  # type: ignore[no-untyped-call]

    def _get_data(self) -> Any:
        try:
            return super()._get_data()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            told = self.explain(error, self._stuck(error))
        try:
            raise told  # out here, so that it does not refer to torch's, and that to the script's frames
        finally:
            del told

    def _stuck(self, error: RuntimeError) -> list[int]:
        """Numbers of the workers that are late, as an error says: first the one whose batch is due.

        One that is stuck may have the lock of the queue in which all answer; and between two epochs
        nobody knows who has not answered.
        """
        if self._timeout <= 0 or "timed out" not in str(error):
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
        if os.getpid() != self._pid:  # a forked child's copy, whose parent goes on
            return
        if self._has_failed:  # who is stuck does not hear a polite request
            self._kill_workers()
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
            told = error
        iterator = None
        for iterator in list(_running):
            told = iterator.explain(told)
        try:
            raise told
        finally:
            del told, iterator  # which the traceback would keep, and the traceback the script's loader

    signal.signal(signal.SIGCHLD, handler)
