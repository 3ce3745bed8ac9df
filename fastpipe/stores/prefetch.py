"""Prefetch objects in the order in which they will be needed.

Rows of a listing represent objects.  The loader announces which rows an epoch will need (``follow``) and
which ones a batch needs now (``need``); decoding threads ``take`` them.  Meanwhile the prefetcher's threads
wait for the store, many at a time.

Objects that are fetched but not yet needed take at most ``read_ahead`` bytes.  An object that was dropped, or
never announced, is fetched when it is taken: the order is a hint, and a wrong one only costs time.
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
# Increase the requests if the rate then rises by this fraction of their increase; decrease them if this
# fraction of the rate remains.
_WORTH, _STAYS = 0.3, 0.96
_REST = 6  # windows between trials; a window has as many answers as requests are allowed


class Pace:
    """A limit for the number of requests in flight: a number, or ``"auto"`` to adapt to measurements.
    Thread-safe.

    ``limit`` is the present limit, ``most`` the highest one possible.

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
        self._trial: tuple[int, float] | None = None  # the limit before the trial, and the rate
        self._rest, self._goes_up = 0, True
        self._is_first = False  # True for the first answers after a change, to earlier requests

    def note(self, seconds: float, busy: int) -> None:
        """Adapt to the duration of an answer and the number of requests in flight."""
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
                elif is_full and mean > 0:  # otherwise more requests are not needed
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
# How far the order is read ahead, in multiples of ``read_ahead``, even if objects are already near: objects
# beyond it may be evicted again.
_WINDOWS = 4
_MOST_COMING = 4096
_FEWEST = 4  # requests when nearly all allowed bytes are prefetched
_AT_FIRST = 64  # objects, or two for each allowed request: prefetched before any was needed
_ALL = 1 << 62
_PART = 1024


def in_parts(rows: Int64Array) -> Iterator[Int64Array]:
    """Yield rows in parts that are small enough to check quickly."""
    return (rows[at : at + _PART] for at in range(0, len(rows), _PART))


class Fetches(Protocol):
    """The functions with which a prefetcher fetches, from many threads at a time."""

    def nbytes(self, rows: Int64Array) -> Int64Array: ...

    def are_staged(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which objects need not be fetched: bool (N,)."""

    def fetch(self, row: int, give: Callable[[bytes], None] | None = None) -> bytes:
        """Return an object's content from the nearest place.  ``give`` is called with it as soon as it has
        arrived, if work on it follows."""


class _Slot:
    """An object that is being fetched, or has been and is still to be taken."""

    __slots__ = (
        "coming", "data", "error", "generation", "is_done", "is_held", "is_needed", "nbytes", "waiting",
        "wants",
    )  # fmt: skip

    def __init__(self, nbytes: int, generation: int) -> None:
        self.nbytes, self.generation = nbytes, generation
        self.coming = 0  # number of later uses in the order
        self.wants = 0  # number of announced needs that have not taken it
        self.is_needed = self.is_done = False
        self.is_held = True  # True while its bytes count as prefetched: until it is needed
        self.data: bytes | None = None
        self.error: BaseException | None = None
        self.waiting: list[threading.Lock] = []


_MOST_STAGING = 16  # threads in addition to those for requests
_NICER = 5  # a third of the weight


class Prefetcher:
    """A prefetcher with threads in this process, which start when there is something to fetch.

    They end with ``close``, when ``owner`` (if given) is collected, and with the interpreter.  In a forked
    child there are none at first; it starts its own.

    Args:
        read_ahead: most bytes that are fetched and not needed yet.
        pace: limit for the number of requests.
        spills: True to continue beyond ``read_ahead`` without holding more: the objects are then near.
        owner: must not be reachable from the threads.
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
        # Code enters the condition through its lock, which is implemented in C.  Ctrl-C in the condition's
        # own ``__enter__``, which is Python, would leave it locked forever.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.holds = True  # see ``follow``
        self.slots: dict[int, _Slot] = {}
        self.urgent: deque[int] = deque()
        # Rows that have not been started: their bytes, and the number of their uses in the order.
        self.coming: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self.order: Iterator[Int64Array] | None = None
        self.generation = 0
        self.is_walking = False
        self.walked = self.begun = 0  # bytes of the order that were read; bytes needed since
        self.ahead = 0  # bytes of slots not needed yet: fetched or in flight
        self.active = self.staging = 0
        self.threads: list[threading.Thread] = []  # as many as the pace has allowed so far, and for staging
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
        """Start threads up to the present pace."""
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
                except RuntimeError:  # no more threads available: fewer suffice, but not none
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
            with self.lock:  # the request is over: the next one may start
                self.active -= 1
                self.staging += 1
                self._give(row, data, None)
                if self._is_due():
                    self.changed.notify()
            self._grow()

        data, error = None, None
        try:
            data = self.fetches.fetch(row, give)
        except BaseException as raised:  # any error, which is raised when the row is taken
            error = raised
        with self.lock:
            if is_given:  # another fetch may be running already
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
                        # Threads wake each other one by one: all at once would compete for the interpreter
                        # with the caller, which wants to continue.
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
        # Prefetch as much as was needed so far; with more ahead, use fewer requests: the next objects must
        # not wait, for processors or the network, because of later ones.
        most = min(self.read_ahead, max(self.begun, max(_AT_FIRST, 2 * limit) * nbytes))
        has_room = self.ahead + nbytes <= most
        return has_room and self.active < max(_FEWEST, 2 * (1 - self.ahead / most) * limit)

    def _begin_next(self) -> int:
        """Return the row to fetch next."""
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
        """Read the next rows of the order, in the thread that has set ``is_walking``."""
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
                return  # another thread reads a newer order
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
        """Return how many bytes of the order are read ahead of the last needed ones."""
        return _ALL if self.spills else self.read_ahead * (_WINDOWS if self.holds else 1)

    def follow(self, order: Iterator[Int64Array], *, holds: bool = True) -> None:
        """Prefetch an order of rows.

        Args:
            order: yields rows, int64 (N,), in the order in which they will be needed; iterated in any thread,
                one at a time, and only as far as there is room.
            holds: True to keep fetched objects until they are taken.  False only fetches, so that another
                process finds them near.
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
        is_first = True  # the first part shows at once which existing slots are used again
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
        """Return True if no batch will take a slot: its batch, or its order, was abandoned."""
        if not self.holds and slot.is_done:
            return not slot.waiting
        since = self.generation - slot.generation
        return since > 0 and not slot.coming and not slot.waiting and (since > 1 or not slot.wants)

    def need(self, rows: Int64Array) -> None:
        """Announce that a batch will take these rows: they precede all others."""
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
        """Return which rows can be taken: they have been prefetched, or are in flight."""
        return np.array([row in self.slots for row in rows.tolist()], np.bool_)

    def forgo(self, rows: Int64Array, *, were_needed: bool) -> None:
        """Announce that rows will not be taken, of an announced batch or else of the order."""
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
        """Count a row as needed once less; drop it if it is no longer needed."""
        if slot.wants or slot.waiting or (slot.coming and not slot.is_needed):
            return
        if slot.is_done:
            self._let_go(row, slot)
            return
        if not slot.is_needed:
            self.ahead -= slot.nbytes * slot.is_held
        slot.is_held = False  # so that it is dropped when it arrives

    def take(self, row: int) -> bytes:
        """Return a row's content, after waiting for it if it is in flight; raise the error of its fetch."""
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
        """Release a row after its last use; keep it if it is used again later and fits."""
        self._drop(row)
        if slot.error is not None or not slot.coming:  # the next use tries again
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
        """Wait for the end of the threads; later calls of ``take`` fetch in the calling thread."""
        self._end()
        with self._starting:  # a thread that holds it starts its last threads
            threads = list(self.threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        self.slots.clear()
        if self._finalizer is not None:
            self._finalizer.detach()

    def _end(self) -> None:
        """End the threads; waits for a row raise an error.

        The garbage collector may call this in the middle of any method here, in the same thread, so nothing
        is removed.
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
    """Let decoding threads run before this one if there are too few processors for all.

    Dozens of these threads wake for a moment after each answer, and each would get as much time as a thread
    that decodes for a waiting batch.
    """
    if sys.platform == "linux":  # on other systems it would affect the whole process
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
