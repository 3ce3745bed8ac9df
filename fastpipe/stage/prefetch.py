"""Fetches objects before they are asked for, in the order in which they will be.

Rows of a listing stand for objects.  Whoever makes batches says which rows an epoch will need (``follow``)
and which ones a batch needs now (``need``); decoding threads ``take`` them.  Threads of the prefetcher wait
for the store meanwhile, many at a time.

What was fetched and not yet needed takes at most ``read_ahead`` bytes.  Whatever is dropped, or was never
said to be needed, is fetched when it is taken: the order is a hint, and only costs time where it is wrong.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fastpipe.stage.pace import Pace
from fastpipe.stage.transfers import Fetches, Int64Array, Transfers

__all__ = ["Prefetcher"]

_MOST_STAGING = 16  # threads beyond those of requests
_NICER = 5  # a third of the weight


class Prefetcher:
    """Fetches ahead, in threads of this process, which start when something is to be fetched.

    They end with ``close``, when this object is collected, and with the interpreter; in a forked child there
    are none, and it begins anew.

    Args:
        fetches: what it fetches with.
        read_ahead: the most bytes that are fetched and not needed yet.
        pace: how many requests there may be at a time.
        spills: whether to go on beyond ``read_ahead``, and hold no more: what is fetched is near then.
    """

    def __init__(self, fetches: Fetches, read_ahead: int, pace: Pace, *, spills: bool = False) -> None:
        self._fetches, self._read_ahead, self._pace = fetches, read_ahead, pace
        self._spills = spills
        self._reset()
        _prefetchers.add(self)

    def follow(self, order: Iterator[Int64Array], *, holds: bool = True) -> None:
        """Fetch what comes next.

        Args:
            order: gives rows, as int64 (N,), in the order in which they will be needed; asked from any
                thread, one at a time, and only as far as there is room.
            holds: whether what is fetched is kept until it is taken.  Else fetching is all: who needs it, in
                another process, finds it near.
        """
        self._crew.grow(self._shared)
        self._shared.follow(order, holds)

    def need(self, rows: Int64Array) -> None:
        """Say that a batch is being made, which will take these rows: they come before all others."""
        near, sizes = self._fetches.are_near(rows), self._fetches.nbytes(rows)
        if not self._crew.threads and near.all():
            return
        self._crew.grow(self._shared)
        self._shared.need(rows.tolist(), near.tolist(), sizes.tolist())

    def have(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether rows are to be taken: they were fetched ahead, or are under way."""
        slots = self._shared.slots
        return np.array([row in slots for row in rows.tolist()], np.bool_)

    def forgo(self, rows: Int64Array, *, were_needed: bool) -> None:
        """Say that nobody will take rows: which ``need`` was told of, or else only the order."""
        if self._crew.threads:
            self._shared.forgo(rows.tolist(), were_needed=were_needed)

    def take(self, row: int) -> bytes:
        """A row's content; waits for it where it is under way.

        Raises:
            Exception: what fetching it raised.
        """
        data = self._shared.take(row)
        return self._fetches.fetch(row) if data is None else data

    @property
    def held(self) -> int:
        """Bytes that were fetched, or are being fetched, and are not needed yet."""
        return self._shared.ahead

    @property
    def busy(self) -> int:
        """Threads that are fetching, or staging what they have fetched."""
        return self._shared.active + self._shared.staging

    def close(self) -> None:
        """End the threads and wait for them; what is taken then is fetched by whoever takes it."""
        self._shared.close()
        self._crew.join()
        self._shared.slots.clear()
        self._finalizer.detach()  # which would keep, for an error whose traceback has this object, that error

    def _reset(self) -> None:
        self._shared = Transfers(self._fetches, self._read_ahead, self._pace, self._spills)
        self._crew = _Crew()
        self._finalizer = weakref.finalize(self, Transfers.close, self._shared)
        self._finalizer.atexit = False

    def _after_fork(self) -> None:
        self._finalizer.detach()
        closed = self._shared.closed
        self._reset()
        self._shared.closed = closed


class _Crew:
    """Threads that fetch: as many as the pace has allowed so far, and some for those that are staging."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def grow(self, shared: Transfers) -> None:
        """Have as many as the pace allows now."""
        wanted = shared.pace.limit + min(_MOST_STAGING, shared.staging)
        if len(self.threads) >= wanted:
            return
        with self._lock:
            while len(self.threads) < wanted and not shared.closed:
                name = f"fastpipe-fetch-{len(self.threads)}"
                thread = threading.Thread(target=_work, args=(shared, self), name=name, daemon=True)
                _running.add(thread)
                try:
                    thread.start()
                except RuntimeError:  # no more threads to be had: fewer will do, but not none
                    _running.discard(thread)
                    if not self.threads:
                        raise
                    return
                self.threads.append(thread)

    def join(self) -> None:
        """Wait for the end of all, once what they share is closed."""
        with self._lock:  # whoever has it starts its last ones
            threads = list(self.threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()


def _work(shared: Transfers, crew: _Crew) -> None:
    _step_back()
    try:
        shared.work(lambda: crew.grow(shared))
    finally:
        _running.discard(threading.current_thread())


def _step_back() -> None:
    """Let threads that decode come before this one, where there are too few processors for all.

    Dozens of these are awake for a moment after each answer, and each would have as much time as one that
    decodes what a batch waits for.
    """
    if sys.platform == "linux":  # elsewhere it would be the whole process
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)


_prefetchers: weakref.WeakSet[Prefetcher] = weakref.WeakSet()
_running: set[threading.Thread] = set()  # also those of prefetchers that were collected


def _forget_threads_in_child() -> None:
    _running.clear()
    for prefetcher in list(_prefetchers):
        prefetcher._after_fork()


def _close_all() -> None:
    for prefetcher in list(_prefetchers):
        prefetcher.close()
    for thread in list(_running):
        thread.join()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads_in_child)
# Daemon threads must not be inside a C library while the interpreter is taken down.
atexit.register(_close_all)
