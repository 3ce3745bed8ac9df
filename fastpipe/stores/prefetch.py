"""Fetch objects before they are asked for, in the order in which they will be.

Rows of a listing stand for objects.  The loader announces which rows an epoch will need (``follow``) and
which ones a batch needs now (``need``); decoding threads ``take`` them.  Threads of the prefetcher wait for
the store meanwhile, many at a time.

What was fetched and not yet needed takes at most ``read_ahead`` bytes.  Whatever is dropped, or was never
announced, is fetched when it is taken: the order is a hint, and only costs time where it is wrong.
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
# More requests are worth it where the rate rises by this part of what they do; fewer where so much of it
# stays.
_WORTH, _STAYS = 0.3, 0.96
_REST = 6  # windows between trials; a window is as many answers as there may be requests


class Pace:
    """A limit for the number of requests under way, a number or ``"auto"`` to follow what is measured; from
    any thread.

    ``limit`` is how many there may be now, ``most`` how many there may ever be.

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
        self._trial: tuple[int, float] | None = None  # the limit before it, and the rate
        self._rest, self._goes_up = 0, True
        self._is_first = False  # of the answers after a change: to requests of before

    def note(self, seconds: float, busy: int) -> None:
        """Adapt to how long an answer took, and how many requests were under way."""
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
                elif is_full and mean > 0:  # else there is no demand for more
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
# How far ahead of what is needed the order is looked at, in sizes of what may be held, also where objects are
# near already: beyond it these may be evicted again.
_WINDOWS = 4
_MOST_COMING = 4096
_FEWEST = 4  # requests, where nearly all is ahead that may be
_AT_FIRST = 64  # objects, or two for each request that there may be: ahead before any was needed
_ALL = 1 << 62
_PART = 1024


def in_parts(rows: Int64Array) -> Iterator[Int64Array]:
    """Yield rows in parts of which each is soon looked at."""
    return (rows[at : at + _PART] for at in range(0, len(rows), _PART))


class Fetches(Protocol):
    """What a prefetcher fetches with, from many threads at a time."""

    def nbytes(self, rows: Int64Array) -> Int64Array: ...

    def are_staged(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which objects need not be fetched."""

    def fetch(self, row: int, give: Callable[[bytes], None] | None = None) -> bytes:
        """Return an object's content from wherever it is nearest; ``give`` is called with it as soon as it is
        there, if something is done with it afterwards."""


class _Slot:
    """An object that is being fetched, or was and is still to be taken."""

    __slots__ = (
        "coming", "data", "error", "generation", "is_done", "is_held", "is_needed", "nbytes", "waiting",
        "wants",
    )  # fmt: skip

    def __init__(self, nbytes: int, generation: int) -> None:
        self.nbytes, self.generation = nbytes, generation
        self.coming = 0  # times that the order has it ahead
        self.wants = 0  # times that it was needed and not taken yet
        self.is_needed = self.is_done = False
        self.is_held = True  # its bytes are among those that are ahead, until it is needed
        self.data: bytes | None = None
        self.error: BaseException | None = None
        self.waiting: list[threading.Lock] = []


_MOST_STAGING = 16  # threads beyond those of requests
_NICER = 5  # a third of the weight


class Prefetcher:
    """Fetches ahead, in threads of this process, which start when something is to be fetched.

    They end with ``close``, when the owner is collected, if there is one, and with the interpreter; in a
    forked child there are none, and it starts again.

    Args:
        read_ahead: the most bytes that are fetched and not needed yet.
        pace: how many requests there may be at a time.
        spills: whether to go on beyond ``read_ahead``, and hold no more: what is fetched is near then.
        owner: nothing of it may be reached from the threads.
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
        # The condition is entered by its lock, which is C's: Ctrl-C in a condition's own ``__enter__``,
        # which is Python, would leave it taken for ever.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.holds = True  # as of ``follow``
        self.slots: dict[int, _Slot] = {}
        self.urgent: deque[int] = deque()
        # Rows that are not begun yet: their bytes, and how often the order has them.
        self.coming: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self.order: Iterator[Int64Array] | None = None
        self.generation = 0
        self.is_walking = False
        self.walked = self.begun = 0  # bytes of the order that were looked at; that were needed since
        self.ahead = 0  # bytes of slots that are not needed yet: fetched, or being fetched
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
        """Have as many threads as the pace allows now."""
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
                except RuntimeError:  # no more threads to be had: fewer will do, but not none
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
            with self.lock:  # what is done with it now is no request: the next one may be made
                self.active -= 1
                self.staging += 1
                self._give(row, data, None)
                if self._is_due():
                    self.changed.notify()
            self._grow()

        data, error = None, None
        try:
            data = self.fetches.fetch(row, give)
        except BaseException as raised:  # of any kind: who takes the row raises it
            error = raised
        with self.lock:
            if is_given:  # and another one may be under way already
                self.staging -= 1
            else:
                self.active -= 1
                self._give(row, data, error)
        del error  # whose traceback has this frame

    def _next_row(self) -> int | None:
        while True:
            with self.lock:
                while not self.closed:
                    if self._is_due():
                        row = self._begin_next()
                        # Threads wake each other, one at a time: all of them at once would want the
                        # interpreter just when who has called wants to go on.
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
        """Return whether a row may be fetched now."""
        limit = self.pace.limit
        if self.active >= limit:
            return False
        if self.urgent or not self.coming:
            return bool(self.urgent)
        nbytes, _ = next(iter(self.coming.values()))
        if self.spills or not self.ahead:
            return True
        if not self.holds:  # what is ahead is only what is under way
            return self.ahead + nbytes <= self.read_ahead
        # As much ahead as was needed so far, and the more there is, the fewer requests: what comes next is
        # not to wait, for processors or for the network, for all that comes later.
        most = min(self.read_ahead, max(self.begun, max(_AT_FIRST, 2 * limit) * nbytes))
        has_room = self.ahead + nbytes <= most
        return has_room and self.active < max(_FEWEST, 2 * (1 - self.ahead / most) * limit)

    def _begin_next(self) -> int:
        """Return the row to be fetched next."""
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
        """Look at the next rows of the order, for the thread that has set ``is_walking``."""
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
                return  # another order, and somebody else at it
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
        if slot is None or slot.is_done:  # it is not wanted any more
            return
        slot.data, slot.error, slot.is_done = data, error, True
        if not ((self.holds and (slot.is_held or slot.wants)) or slot.waiting):
            self._drop(row)
        for lock in slot.waiting:
            lock.release()
        slot.waiting.clear()

    def _window(self) -> int:
        """Return how many bytes of the order, from what was needed last, are looked at."""
        return _ALL if self.spills else self.read_ahead * (_WINDOWS if self.holds else 1)

    def follow(self, order: Iterator[Int64Array], *, holds: bool = True) -> None:
        """Fetch what comes next.

        Args:
            order: gives rows, as int64 (N,), in the order in which they will be needed; asked from any
                thread, one at a time, and only as far as there is room.
            holds: whether what is fetched is kept until it is taken.  Else fetching is all: who needs it, in
                another process, finds it near.
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
        is_first = True  # of the order it is known at once which of those that are there come again
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
        """Return whether no batch will take a slot: its batch, or its order, was given up."""
        if not self.holds and slot.is_done:
            return not slot.waiting
        since = self.generation - slot.generation
        return since > 0 and not slot.coming and not slot.waiting and (since > 1 or not slot.wants)

    def need(self, rows: Int64Array) -> None:
        """Announce that a batch is being made which will take these rows: they come before all others."""
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
        """Return which rows are to be taken: they were fetched ahead, or are under way."""
        return np.array([row in self.slots for row in rows.tolist()], np.bool_)

    def forgo(self, rows: Int64Array, *, were_needed: bool) -> None:
        """Announce that rows will not be taken, of a batch that was announced, or else of the order."""
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
        """Count a row as wanted once less; drop it if it is not wanted any more."""
        if slot.wants or slot.waiting or (slot.coming and not slot.is_needed):
            return
        if slot.is_done:
            self._let_go(row, slot)
            return
        if not slot.is_needed:
            self.ahead -= slot.nbytes * slot.is_held
        slot.is_held = False  # so that it is dropped when it is there

    def take(self, row: int) -> bytes:
        """Return a row's content, waiting where it is under way; raise what fetching it raised."""
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
        """Release a row that was taken for the last time; keep it if it comes again, and fits."""
        self._drop(row)
        if slot.error is not None or not slot.coming:  # who takes it the next time tries again
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
        """Wait for the end of the threads; later calls of ``take`` fetch by themselves."""
        self._end()
        with self._starting:  # whoever has it starts its last ones
            threads = list(self.threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        self.slots.clear()
        if self._finalizer is not None:
            self._finalizer.detach()

    def _end(self) -> None:
        """End the threads; who waits for a row gets an error.

        The garbage collector may call this in the middle of any method here, in the same thread: nothing is
        removed.
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
    """Let threads that decode come before this one, where there are too few processors for all.

    Dozens of these are awake for a moment after each answer, and each would have as much time as one that
    decodes what a batch waits for.
    """
    if sys.platform == "linux":  # elsewhere it would be the whole process
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


# Daemon threads must not be inside a C library while the interpreter is taken down.
atexit.register(_close_all)
