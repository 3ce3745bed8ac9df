"""Fetches objects before they are asked for, in the order in which they will be.

Rows of a listing stand for objects.  Whoever makes batches says which rows an epoch will need (``follow``)
and which ones a batch needs now (``need``); decoding threads ``take`` them.  Threads of the prefetcher wait
for the store meanwhile, many at a time.

What was fetched and not yet needed takes at most ``read_ahead`` bytes.  Whatever is dropped, or was never
said to be needed, is fetched when it is taken: the order is a hint, and only costs time where it is wrong.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Iterator

from fastpipe.stage.pace import Pace
from fastpipe.stage.transfers import Fetches, Int64Array, Transfers

__all__ = ["Prefetcher"]


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
        self._start(self._pace.limit)
        self._shared.follow(order, holds)

    def need(self, rows: Int64Array) -> None:
        """Say that a batch is being made, which will take these rows: they come before all others."""
        near, sizes = self._fetches.are_near(rows), self._fetches.nbytes(rows)
        if not self._threads and near.all():
            return
        self._start(self._pace.limit)
        self._shared.need(rows.tolist(), near.tolist(), sizes.tolist())

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
        """Threads that are fetching."""
        return self._shared.active

    def close(self) -> None:
        """End the threads and wait for them; what is taken then is fetched by whoever takes it."""
        self._shared.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._shared.slots.clear()
        self._finalizer.detach()  # which would keep, for an error whose traceback has this object, that error

    def _reset(self) -> None:
        self._shared = Transfers(self._fetches, self._read_ahead, self._pace, self._spills)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, Transfers.close, self._shared)
        self._finalizer.atexit = False

    def _start(self, count: int) -> None:
        """Have so many threads."""
        if len(self._threads) >= count or self._shared.closed:
            return
        with self._lock:
            while len(self._threads) < count:
                thread = threading.Thread(
                    target=_work,
                    args=(self._shared,),
                    name=f"fastpipe-fetch-{len(self._threads)}",
                    daemon=True,
                )
                _running.add(thread)
                try:
                    thread.start()
                except RuntimeError:  # no more threads to be had: fewer will do, but not none
                    _running.discard(thread)
                    if not self._threads:
                        raise
                    return
                self._threads.append(thread)

    def _after_fork(self) -> None:
        self._finalizer.detach()
        closed = self._shared.closed
        self._reset()
        self._shared.closed = closed


def _work(shared: Transfers) -> None:
    try:
        shared.work()
    finally:
        _running.discard(threading.current_thread())


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
