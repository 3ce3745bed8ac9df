"""What the threads of a prefetcher share: which objects are wanted, in which order, and which are there."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fastpipe.errors import ClosedError
from fastpipe.stage.pace import Pace

__all__ = ["Fetches", "Int64Array", "Transfers", "in_parts"]

Int64Array = npt.NDArray[np.int64]

_log = logging.getLogger("fastpipe.stage")

_LOOK_AGAIN_S = 30.0
# How far ahead of what is needed the order is looked at, in sizes of what may be held, also where objects are
# near already: beyond it these may be evicted again.
_WINDOWS = 4
_MOST_COMING = 4096
_LEAST = 4  # requests, where nearly all is ahead that may be
_AT_FIRST = 64  # objects, or two for each request that there may be: ahead before any was needed
_ALL = 1 << 62
_PART = 1024


def in_parts(rows: Int64Array) -> Iterator[Int64Array]:
    """Rows in parts of which each is soon looked at."""
    return (rows[at : at + _PART] for at in range(0, len(rows), _PART))


class Fetches(Protocol):
    """What a prefetcher fetches with, from many threads at a time."""

    def nbytes(self, rows: Int64Array) -> Int64Array:
        """Bytes of objects."""

    def are_near(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether objects need not be fetched."""

    def fetch(self, row: int, give: Callable[[bytes], None] | None = None) -> bytes:
        """An object's content, from wherever it is nearest.

        Args:
            row: which one.
            give: called with it as soon as it is there, where something is done with it afterwards.
        """


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


class Transfers:
    """What the threads share.  It does not refer to the prefetcher, so that one can be collected.

    Args:
        fetches, read_ahead, pace, spills: the prefetcher's.

    Attributes:
        holds: as of ``follow``.
        active: objects that are being fetched.
        staging: objects that were given and are still being staged.
    """

    def __init__(self, fetches: Fetches, read_ahead: int, pace: Pace, spills: bool) -> None:
        self.fetches, self.read_ahead, self.pace = fetches, read_ahead, pace
        self.holds, self.spills = True, spills
        # The condition is entered by its lock, which is C's: Ctrl-C in a condition's own ``__enter__``,
        # which is Python, would leave it taken for ever.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.closed = False
        self.slots: dict[int, _Slot] = {}
        self.urgent: deque[int] = deque()
        # Rows that are not begun yet: their bytes, and how often the order has them.
        self.coming: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self.order: Iterator[Int64Array] | None = None
        self.generation = 0
        self.is_walking = False
        self.walked = self.begun = 0  # bytes of the order that were looked at; that were needed since
        self.ahead = 0  # bytes of slots that are not needed yet
        self.active = self.staging = 0

    # ---- the threads' side ---------------------------------------------------------------------

    def work(self, grow: Callable[[], None]) -> None:
        """Fetch until the end.

        Args:
            grow: called now and then; starts further threads where the pace allows more than there are.
        """
        while (row := self._next_row()) is not None:
            grow()
            self._fetch(row, grow)

    def _fetch(self, row: int, grow: Callable[[], None]) -> None:
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
            grow()

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
        """Whether a row may be fetched now."""
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
        return has_room and self.active < max(_LEAST, 2 * (1 - self.ahead / most) * limit)

    def _begin_next(self) -> int:
        """The row to be fetched next."""
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
        """Look at the next rows of the order, for whoever has set ``is_walking``."""
        rows = None
        try:
            rows = None if order is None else next(order, None)
            if rows is not None:
                near, sizes = self.fetches.are_near(rows), self.fetches.nbytes(rows)
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
        if slot is None or slot.is_done:  # nobody wants it any more
            return
        slot.data, slot.error, slot.is_done = data, error, True
        if not ((self.holds and (slot.is_held or slot.wants)) or slot.waiting):
            self._drop(row)
        for lock in slot.waiting:
            lock.release()
        slot.waiting.clear()

    # ---- the other side ------------------------------------------------------------------------

    def _window(self) -> int:
        """Bytes of the order, from what was needed last, that are looked at."""
        return _ALL if self.spills else self.read_ahead * (_WINDOWS if self.holds else 1)

    def follow(self, order: Iterator[Int64Array], holds: bool) -> None:
        """Take another order."""
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
        """Whether nobody here will take a slot: of a batch that was given up, or of an order that was."""
        if not self.holds and slot.is_done:
            return not slot.waiting
        since = self.generation - slot.generation
        return since > 0 and not slot.coming and not slot.waiting and (since > 1 or not slot.wants)

    def need(self, rows: list[int], near: list[bool], sizes: list[int]) -> None:
        """Let rows come before all others."""
        with self.lock:
            if self.closed:
                return
            for row, is_near, nbytes in zip(rows, near, sizes, strict=True):
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

    def forgo(self, rows: list[int], *, were_needed: bool) -> None:
        """Let go of rows that nobody will take: which ``need`` was told of, or else only the order."""
        with self.lock:
            for row in rows:
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
        """A row is wanted once less: drop it where nobody is left who wants it."""
        if slot.wants or slot.waiting or (slot.coming and not slot.is_needed):
            return
        if slot.is_done:
            self._let_go(row, slot)
            return
        if not slot.is_needed:
            self.ahead -= slot.nbytes * slot.is_held
        slot.is_held = False  # so that it is dropped when it is there

    def take(self, row: int) -> bytes | None:
        """A row's content; None if it is not fetched ahead."""
        lock = None
        with self.lock:
            slot = self.slots.get(row)
            if slot is None:
                return None
            if not slot.is_done:
                lock = threading.Lock()
                lock.acquire()
                slot.waiting.append(lock)
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
        """A row was taken for the last time that it was needed: keep it if it comes again, and fits."""
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
