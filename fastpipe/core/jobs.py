"""Jobs of the native engine: begun here, watched by one thread, waited for like those of a ``ThreadPool``.

The engine's threads know nothing of Python.  One thread of this module's, the *watcher*, hears from the
engine when a job is done, and when its items are all begun if somebody waits for that.  It does what follows,
so that no batch waits for the script's thread to come by.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from fastpipe.core.native import native
from fastpipe.engine.pool import Job, say_ending
from fastpipe.errors import ClosedError

__all__ = ["NativeJob"]

_log = logging.getLogger("fastpipe")

_BEGUN, _DONE, _STOPPED = 1, 2, 3  # kinds of events
_LISTEN_MS = 10_000
# The training's thread comes first: where it wants a core that a thread of the engine is at, it gets it.
# Beside as many equal threads as cores a step of 5 ms took half as long again (16 cores).
_NICENESS = 10
_LEAVE_MS = 10_000  # at the interpreter's end, for images that are being made


class NativeJob(Job):
    """A batch that the native engine makes.

    Args:
        batch: a ``native.ImageBatch``.
        channel: bounds how many threads are busy with it.
        threads: that the process is to have.
        last: called by the watcher when nothing of the batch runs any more, unless it was given up.

    Raises:
        ClosedError: no thread can be had, or the interpreter ends.
    """

    def __init__(self, batch: Any, channel: Any, threads: int, last: Callable[[], None]) -> None:
        super().__init__(_no_task, 1, last)
        self._batch = batch
        # With the watcher kept out: it must not hear of a job that is not in the table yet.
        with _table_lock:
            _watch()
            self._number: int = native.submit(batch, channel, threads)
            if self._number:
                _jobs[self._number] = self
        if not self._number:
            raise ClosedError("no thread can be started to decode images, or the interpreter ends")

    def run_next(self) -> bool:
        """As of ``Job``: the engine runs what there is."""
        return False

    def cancel(self, error: BaseException | None = None) -> None:
        """As of ``Job``; what the engine writes to stays until it has stopped doing so."""
        if not self._finished and os.getpid() == self._pid:
            native.cancel(self._number)
        super().cancel(error)

    def _watch_begun(self, news: Callable[[], None]) -> bool:
        """As of ``Job``: the watcher is woken only for those who wait."""
        return super()._watch_begun(news) or bool(native.watch_begun(self._number))

    def begun(self) -> None:
        """Hear that all items are begun."""
        with self._lock:
            self._next = self._count
            if self._when_begun is not None:
                self._when_begun()

    def ended(self) -> None:
        """Hear that nothing of it runs any more."""
        with self._lock:
            last = None if self._finished else self._last
        try:
            if last is not None:
                last()
        except BaseException as error:  # ``wait`` raises it
            super().cancel(error)
        with self._lock:
            if not self._finished:
                self._finish(None)
        self._batch = None


def _no_task(number: int) -> None:
    raise AssertionError("the native engine runs its own tasks")


_table_lock = threading.Lock()
_jobs: dict[int, NativeJob] = {}  # that the engine has: their memory must not go
_watcher: threading.Thread | None = None


def _watch() -> None:
    """Start the watcher, if there is none; with ``_table_lock`` held."""
    global _watcher
    if _watcher is None or not _watcher.is_alive():  # Ctrl-C may have come before it was started
        _watcher = threading.Thread(target=_listen, name="fastpipe-watcher", daemon=True)
        _watcher.start()


def _listen() -> None:
    """Hear of jobs until the engine stops."""
    while True:
        number, kind = native.next_event(_LISTEN_MS)
        if kind == _STOPPED:
            return
        if kind == _BEGUN:
            with _table_lock:
                job = _jobs.get(number)
            if job is not None:
                job.begun()
        elif kind == _DONE:
            with _table_lock:
                job = _jobs.pop(number, None)
            if job is not None:
                job.ended()
        job = None  # nothing of a batch is kept alive while waiting


def _forget_in_child() -> None:
    """In a forked child there is neither engine nor watcher; what jobs refer to was the parent's."""
    global _table_lock, _watcher
    _table_lock, _watcher = threading.Lock(), None
    _abandoned.extend(_jobs.values())  # their memory may have been written to just then: never used again
    _jobs.clear()


_abandoned: list[NativeJob] = []


def _stop() -> None:
    """Let the engine's threads end: they must not write to memory that the interpreter takes down."""
    if _watcher is None or not _watcher.is_alive():
        return
    say_ending()
    if native.stop(_LEAVE_MS):
        _watcher.join(_LEAVE_MS / 1000)
    else:
        _log.warning("a thread that reads an image has not ended within %d s", _LEAVE_MS // 1000)


native.set_niceness(_NICENESS)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_stop)
