"""Prefetch objects in the order in which they will be needed.

An object is identified by its number in a listing, its *row*.  The loader announces which rows an epoch will
need (``follow``) and which rows a batch needs now (``need``).  Decoding threads get the objects with
``take``.  At the same time, the prefetcher's threads wait for many answers of the store.

Objects that are fetched but not yet needed take at most ``read_ahead`` bytes.  ``take`` itself fetches an
object that was dropped or was never announced.  So the announced order is a hint, and a wrong order only
costs time.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fastpipe.core.locks import renew_in_children
from fastpipe.errors import ClosedError

Int64Array = npt.NDArray[np.int64]

_log = logging.getLogger("fastpipe.stage")


_FIRST, _LEAST, _MOST = 32, 8, 128
_UP, _DOWN = 2.0, 0.75
# More requests are kept if the rate rises by at least the first fraction of the increase of requests.  Fewer
# requests are kept if at least the second fraction of the rate remains.
_WORTH, _STAYS = 0.3, 0.96
_REST = 6  # number of windows between trials; a window has as many answers as the limit of requests


class Pace:
    """Limits how many requests may be in flight at a time.  Thread-safe.

    ``connections`` is the limit.  If it is ``"auto"``, the limit is adapted to the measured durations of
    requests.  ``limit`` is the current limit, and ``most`` is the highest possible limit.

    >>> pace = Pace("auto")
    >>> for _ in range(100):
    ...     pace.note(0.03, busy=pace.limit)
    >>> pace.limit > 32
    True
    """

    def __init__(self, connections: int | str) -> None:
        self._follows = connections == "auto"
        self.limit = _FIRST if connections == "auto" else int(connections)
        self.most = _MOST if connections == "auto" else self.limit
        self._lock = threading.Lock()
        self._sum, self._count, self._full = 0.0, 0, 0
        self._trial: tuple[int, float] | None = None  # the limit and the rate before the trial
        self._rest, self._goes_up = 0, True
        self._is_first = False  # True in the first window, whose requests began before the last change

    def note(self, seconds: float, busy: int) -> None:
        """Adapt the limit to the duration of a request.  ``busy`` is the number of requests in flight."""
        if not self._follows:
            return
        with self._lock:
            self._sum += seconds
            self._count += 1
            self._full += busy >= self.limit * 0.9
            if self._count >= self.limit:
                mean, is_full = self._sum / self._count, self._full * 2 > self._count
                self._sum, self._count, self._full = 0.0, 0, 0
                if self._is_first:
                    self._is_first = False
                elif is_full and mean > 0:  # if requests do not reach the limit, the limit does not matter
                    self._adapt(self.limit / mean)

    def _adapt(self, rate: float) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            before, rate_before = trial
            more = self.limit / before - 1
            needed = 1 + _WORTH * more if more > 0 else _STAYS
            if rate < rate_before * needed:
                self._set(before)
                self._goes_up = more < 0
                self._rest = _REST
                return
            self._rest = 0 if more > 0 else 1
        if self._rest:
            self._rest -= 1
            return
        limit = int(self.limit * (_UP if self._goes_up else _DOWN))
        limit = max(_LEAST, min(self.most, limit))
        if limit == self.limit:
            self._goes_up = not self._goes_up
            self._rest = _REST
            return
        self._trial = self.limit, rate
        self._set(limit)

    def _set(self, limit: int) -> None:
        self.limit = limit
        self._is_first = True


_LOOK_AGAIN_S = 30.0
# How far ahead the order is read, in multiples of ``read_ahead``, even if the objects are staged already.
# Staged objects further ahead may be evicted again.
_WINDOWS = 4
_MOST_COMING = 4096
_FEWEST = 4  # number of requests when nearly all allowed bytes are prefetched
_AT_FIRST = 64  # this many objects, or two for each allowed request, are prefetched before any is needed
_ALL = 1 << 62
_PART = 1024


def in_parts(rows: Int64Array) -> Iterator[Int64Array]:
    """Yield ``rows`` in parts that are small enough to check quickly."""
    return (rows[at : at + _PART] for at in range(0, len(rows), _PART))


class Fetches(Protocol):
    """The functions with which a prefetcher fetches objects.  Many threads call them at the same time."""

    def nbytes(self, rows: Int64Array) -> Int64Array: ...

    def are_staged(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which objects are in the stage, so that they need not be fetched: bool (N,)."""

    def fetch(self, row: int, give: Callable[[bytes], None] | None = None) -> bytes:
        """Return an object's content from the fastest source.

        If further work follows, such as staging, ``give`` is called with the content before this work.
        """


class _Slot:
    """An object that is being fetched, or that was fetched and not taken yet."""

    __slots__ = (
        "coming", "data", "error", "generation", "is_done", "is_held", "is_needed", "nbytes", "waiting",
        "wants",
    )  # fmt: skip

    def __init__(self, nbytes: int, generation: int) -> None:
        self.nbytes, self.generation = nbytes, generation
        self.coming = 0  # number of later uses of the object in the order
        self.wants = 0  # number of announced needs for which the object has not been taken
        self.is_needed = self.is_done = False
        self.is_held = True  # whether the bytes count as prefetched, as they do until the object is needed
        self.data: bytes | None = None
        self.error: BaseException | None = None
        self.waiting: list[threading.Lock] = []


_MOST_STAGING = 16  # maximum number of threads for staging, in addition to the threads for requests
_NICER = 5  # lowers the threads' weight for processor time to a third


class Prefetcher:
    """Prefetches objects with threads of this process.  They start when there is something to fetch.

    The threads end with ``close``, when ``owner`` (if given) is garbage-collected, and when the interpreter
    ends.  A forked child has no threads at first, and starts its own threads when it needs them.

    Args:
        fetches: the functions to fetch objects.
        read_ahead: maximum number of bytes that are fetched and not needed yet.
        pace: limits the number of requests in flight.
        spills: whether to fetch more objects when ``read_ahead`` is reached.  These objects are staged, and
            not kept in memory.
        owner: the object whose end also ends the threads.  The threads must not refer to it.
    """

    def __init__(
        self, fetches: Fetches, read_ahead: int, pace: Pace, *, spills: bool = False, owner: object = None
    ) -> None:
        self.fetches, self.read_ahead, self.pace, self.spills = fetches, read_ahead, pace, spills
        self.closed = False
        self._reset()
        _prefetchers.add(self)
        renew_in_children(self)
        self._finalizer = None if owner is None else weakref.finalize(owner, self._end)
        if self._finalizer is not None:
            self._finalizer.atexit = False

    def _reset(self) -> None:
        # Code enters the condition through its lock, which is implemented in C.  The condition's own
        # ``__enter__`` is written in Python, and Ctrl-C inside it would leave the lock held forever.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.holds = True  # see ``follow``
        self.slots: dict[int, _Slot] = {}
        self.urgent: deque[int] = deque()
        # Rows that are not being fetched yet: the bytes of each row, and the number of its uses in the order.
        self.coming: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self.order: Iterator[Int64Array] | None = None
        self.generation = 0
        self.is_walking = False
        self.walked = self.begun = 0  # bytes of the part of the order that was read, and bytes needed so far
        self.ahead = 0  # bytes of slots that are not needed yet, fetched or in flight
        self.active = self.staging = 0
        self.threads: list[threading.Thread] = []
        self._starting = threading.Lock()

    def _after_fork(self) -> None:
        _running.clear()
        self._reset()

    def _work(self) -> None:
        _lower_priority()
        try:
            while (row := self._next_row()) is not None:
                self._grow()
                self._fetch(row)
        finally:
            _running.discard(threading.current_thread())

    def _grow(self) -> None:
        """Start missing threads: one for each request that the limit allows, and some for staging."""
        wanted = self.pace.limit + min(_MOST_STAGING, self.staging)
        if len(self.threads) >= wanted:
            return
        with self._starting:
            while len(self.threads) < wanted and not self.closed:
                name = f"fastpipe-fetch-{len(self.threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                _running.add(thread)
                try:
                    thread.start()
                except RuntimeError:  # the limit of threads is reached: one thread is enough
                    _running.discard(thread)
                    if not self.threads:
                        raise
                    return
                self.threads.append(thread)

    def _fetch(self, row: int) -> None:
        is_given = False

        def give(data: bytes) -> None:
            nonlocal is_given
            is_given = True
            with self.lock:  # the request is over, so the next request may start
                self.active -= 1
                self.staging += 1
                self._give(row, data, None)
                if self._is_due():
                    self.changed.notify()
            self._grow()

        data, error = None, None
        try:
            data = self.fetches.fetch(row, give)
        except BaseException as raised:  # any error; ``take`` raises it
            error = raised
        with self.lock:
            if is_given:  # the request was counted as ended in ``give``
                self.staging -= 1
            else:
                self.active -= 1
                self._give(row, data, error)
        del error  # its traceback refers to this frame

    def _next_row(self) -> int | None:
        while True:
            with self.lock:
                while not self.closed:
                    if self._is_due():
                        row = self._begin_next()
                        # Threads wake each other one by one.  If all threads woke at once, they would compete
                        # with the caller for the GIL.
                        if self._is_due() or self._may_walk():
                            self.changed.notify()
                        return row
                    if self._may_walk():
                        self.is_walking = True
                        order, generation = self.order, self.generation
                        break
                    self.changed.wait(_LOOK_AGAIN_S)
                else:
                    return None
            self._walk(order, generation)

    def _is_due(self) -> bool:
        """Return True if a row may be fetched now."""
        limit = self.pace.limit
        if self.active >= limit:
            return False
        if self.urgent or not self.coming:
            return bool(self.urgent)
        nbytes, _ = next(iter(self.coming.values()))
        if self.spills or not self.ahead:
            return True
        if not self.holds:  # only requests in flight count as prefetched
            return self.ahead + nbytes <= self.read_ahead
        # Prefetch at most as many bytes as were needed so far.  The more bytes are prefetched, the fewer
        # requests are allowed, so that later objects do not delay the next objects.
        most = min(self.read_ahead, max(self.begun, max(_AT_FIRST, 2 * limit) * nbytes))
        has_room = self.ahead + nbytes <= most
        return has_room and self.active < max(_FEWEST, 2 * (1 - self.ahead / most) * limit)

    def _begin_next(self) -> int:
        """Choose the row to fetch next, count it as in flight, and return it."""
        self.active += 1
        if self.urgent:
            return self.urgent.popleft()
        row, (nbytes, times) = self.coming.popitem(last=False)
        slot = self.slots[row] = _Slot(nbytes, self.generation)
        slot.coming, slot.is_held = times, not self.ahead or self.ahead + nbytes <= self.read_ahead
        self.ahead += nbytes * slot.is_held
        return row

    def _may_walk(self) -> bool:
        return (
            self.order is not None
            and not self.is_walking
            and len(self.coming) < _MOST_COMING
            and self.walked - self.begun < self._window()
        )

    def _walk(self, order: Iterator[Int64Array] | None, generation: int) -> None:
        """Read the next rows of the announced order.  Only the thread that set ``is_walking`` calls this."""
        rows = None
        try:
            rows = None if order is None else next(order, None)
            if rows is not None:
                near, sizes = self.fetches.are_staged(rows), self.fetches.nbytes(rows)
        except Exception as error:
            rows = None
            _log.warning("What comes next is not known any more, and not fetched ahead: %s", str(error))
        with self.lock:
            if generation != self.generation:
                return  # a newer order has replaced this order
            self.is_walking = False
            if rows is None:
                self.order = None
            else:
                self._expect(rows.tolist(), near.tolist(), sizes.tolist())
            self.changed.notify()

    def _expect(self, rows: list[int], near: list[bool], sizes: list[int]) -> None:
        for row, is_near, nbytes in zip(rows, near, sizes, strict=True):
            self.walked += nbytes
            slot = self.slots.get(row)
            if slot is not None:
                slot.coming += 1
                slot.generation = self.generation
            elif not is_near:
                self.coming[row] = nbytes, 1 + self.coming.get(row, (0, 0))[1]

    def _give(self, row: int, data: bytes | None, error: BaseException | None) -> None:
        slot = self.slots.get(row)
        if slot is None or slot.is_done:  # no longer needed
            return
        slot.data, slot.error, slot.is_done = data, error, True
        if not ((self.holds and (slot.is_held or slot.wants)) or slot.waiting):
            self._drop(row)
        for lock in slot.waiting:
            lock.release()
        slot.waiting.clear()

    def _window(self) -> int:
        """Return how many bytes the reading of the announced order may be ahead of the batches."""
        return _ALL if self.spills else self.read_ahead * (_WINDOWS if self.holds else 1)

    def follow(self, order: Iterator[Int64Array], *, holds: bool = True) -> None:
        """Prefetch the objects of rows in the order in which they will be needed.

        Args:
            order: yields rows, int64 (N,), in the order in which they will be needed.  Different threads
                iterate it, one at a time, and only as far as there is room.
            holds: whether to keep fetched objects in memory until they are taken.  If False, the objects are
                only fetched, so that another process finds them in the stage.
        """
        self._grow()
        with self.lock:
            self.holds = holds
            self.generation += 1
            generation = self.generation
            self.order, self.is_walking = order, True
            self.walked = self.begun = 0
            self.coming.clear()
            for slot in self.slots.values():
                slot.coming = 0
        is_first = True  # always read the first part, which shows which existing slots are used again
        while is_first or self._begin_walk(generation):
            is_first = False
            self._walk(order, generation)
        with self.lock:
            for row in [row for row, slot in self.slots.items() if self._is_left_over(slot)]:
                self._drop(row)
            self.changed.notify()

    def _begin_walk(self, generation: int) -> bool:
        with self.lock:
            begins = generation == self.generation and not self.closed and self._may_walk()
            self.is_walking = self.is_walking or begins
            return begins

    def _is_left_over(self, slot: _Slot) -> bool:
        """Return whether no batch will take the slot's object: its batch or the order was abandoned."""
        if not self.holds and slot.is_done:
            return not slot.waiting
        since = self.generation - slot.generation
        return since > 0 and not slot.coming and not slot.waiting and (since > 1 or not slot.wants)

    def need(self, rows: Int64Array) -> None:
        """Announce that a batch will take ``rows`` now.  They are fetched before all other rows."""
        near, sizes = self.fetches.are_staged(rows), self.fetches.nbytes(rows)
        if not self.threads and near.all():
            return
        self._grow()
        with self.lock:
            if self.closed:
                return
            for row, is_near, nbytes in zip(rows.tolist(), near.tolist(), sizes.tolist(), strict=True):
                self.begun += nbytes
                slot = self.slots.get(row)
                if slot is None:
                    _, times = self.coming.pop(row, (0, 0))
                    if is_near:
                        continue
                    slot = self.slots[row] = _Slot(nbytes, self.generation)
                    slot.coming = times
                    slot.is_needed = True
                    self.urgent.append(row)
                elif not slot.is_needed:
                    slot.is_needed = True
                    self.ahead -= slot.nbytes * slot.is_held
                slot.coming = max(0, slot.coming - 1)
                slot.wants += self.holds
                slot.generation = self.generation
            self.changed.notify()

    def have(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which objects have been prefetched or are being fetched, bool (N,)."""
        return np.array([row in self.slots for row in rows.tolist()], np.bool_)

    def forgo(self, rows: Int64Array, *, were_needed: bool) -> None:
        """Announce that ``rows`` will not be taken.

        ``were_needed`` is True if ``need`` announced the rows, and False if only the order contained them.
        """
        with self.lock:
            for row in rows.tolist():
                slot = self.slots.get(row)
                if slot is None:
                    nbytes, times = self.coming.get(row, (0, 0))
                    if times and not were_needed:
                        self.begun += nbytes
                        self.coming[row] = nbytes, times - 1
                        if times == 1:
                            del self.coming[row]
                elif were_needed and slot.wants:
                    slot.wants -= 1
                    self._without(row, slot)
                elif slot.coming and not were_needed:
                    slot.coming -= 1
                    self.begun += slot.nbytes
                    self._without(row, slot)
            self.changed.notify()

    def _without(self, row: int, slot: _Slot) -> None:
        """Drop a row's object if nothing needs the object any more."""
        if slot.wants or slot.waiting or (slot.coming and not slot.is_needed):
            return
        if slot.is_done:
            self._let_go(row, slot)
            return
        if not slot.is_needed:
            self.ahead -= slot.nbytes * slot.is_held
        slot.is_held = False  # so that the object is dropped when it arrives

    def take(self, row: int) -> bytes:
        """Return the content of a row's object.  Wait if the object is being fetched.

        Raise the error of the fetch if the fetch failed.
        """
        lock = None
        with self.lock:
            slot = self.slots.get(row)
            if slot is not None and not slot.is_done:
                lock = threading.Lock()
                lock.acquire()
                slot.waiting.append(lock)
        if slot is None:
            return self.fetches.fetch(row)
        if lock is not None:
            lock.acquire()
        with self.lock:
            slot.wants -= 1
            data, error = slot.data, slot.error
            if self.slots.get(row) is slot and (error is not None or slot.wants <= 0):
                self._let_go(row, slot)
        if error is not None:
            raise error
        assert data is not None
        return data

    def _let_go(self, row: int, slot: _Slot) -> None:
        """Release a row's object after its use.  Keep it if the order uses it again and there is room."""
        self._drop(row)
        if slot.error is not None or not slot.coming:  # after an error, the next use fetches again
            return
        if self.ahead + slot.nbytes <= self.read_ahead:
            slot.is_needed, slot.is_held, slot.wants = False, True, 0
            self.slots[row] = slot
            self.ahead += slot.nbytes
        else:
            self.coming.setdefault(row, (slot.nbytes, slot.coming))

    def _drop(self, row: int) -> None:
        slot = self.slots.pop(row)
        if not slot.is_needed:
            self.ahead -= slot.nbytes * slot.is_held

    def close(self) -> None:
        """End the threads, and wait for their end.  Later calls of ``take`` fetch in the calling thread."""
        self._end()
        with self._starting:  # wait for a thread that is just starting threads
            threads = list(self.threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        self.slots.clear()
        if self._finalizer is not None:
            self._finalizer.detach()

    def _end(self) -> None:
        """Make the threads end, and make waiting calls of ``take`` raise an error.

        The garbage collector may call this during any method of this class, in the same thread.  So this
        method removes nothing from dicts and lists that the other method may be using.
        """
        with self.lock:
            self.closed = True
            for slot in self.slots.values():
                if not slot.is_done:
                    slot.error, slot.is_done = ClosedError("closed while this object was fetched"), True
                for lock in slot.waiting:
                    lock.release()
                slot.waiting = []
            self.changed.notify_all()


def _lower_priority() -> None:
    """Lower the priority of this thread, so that decoding threads run first if processors are few.

    Dozens of fetching threads wake for a moment after each answer.  With equal priority, each of them would
    get as much processor time as a thread that decodes for a waiting batch.
    """
    if sys.platform == "linux":  # on other systems, the priority is that of the whole process
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)


_prefetchers: weakref.WeakSet[Prefetcher] = weakref.WeakSet()
_running: set[threading.Thread] = set()


def _close_all() -> None:
    for prefetcher in list(_prefetchers):
        prefetcher.close()
    for thread in list(_running):
        thread.join()


# Daemon threads must not be inside a C library during the interpreter's shutdown.
atexit.register(_close_all)
