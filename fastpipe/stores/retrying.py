"""Ask a store again where it had no answer, and give up where it has none for too long."""

from __future__ import annotations

import atexit
import logging
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from fastpipe.core.types import FetchedObject, Store, StoredObject
from fastpipe.errors import ClosedError, StoreBusyError, StoreError
from fastpipe.stores.clients import PerProcess

T = TypeVar("T")

_log = logging.getLogger("fastpipe.stage")


@dataclass(frozen=True)
class Retries:
    """How often and how long a store is asked.

    Attributes:
        tries: for one request, at most.
        seconds: from a request's first try to its last, at most.
        base, cap: the longest wait after the first failure, which doubles with each, and the longest of all,
            in seconds.  The wait is drawn from 0 to that, so that many clients do not come back at once.
        window, least: of the last so many requests, and not before there were so many, …
        share: … no larger share may fail for good.
        silent: for so many seconds a store may answer nothing at all.
        probe: seconds from one try to the next when either of them was exceeded.
        well: so many answers without a failure between them tell that a store is well again.
        quiet: seconds between two warnings, at least.
    """

    tries: int = 8
    seconds: float = 60.0
    base: float = 0.1
    cap: float = 5.0
    window: int = 50
    least: int = 20
    share: float = 0.5
    silent: float = 120.0
    probe: float = 5.0
    well: int = 50
    quiet: float = 60.0


_DRAWS = random.Random()  # the global generator is the script's


class RetryingStore:
    """A ``core.types.Store`` that repeats requests that failed with ``StoreBusyError``.

    When the store fails too often, or says nothing for too long, every request fails at once, and one of them
    from time to time asks once whether it is there again.

    Args:
        store, policy: which, and how often and how long it is asked.
        clock, draw: seconds, monotonic; a number from 0 to 1.
        wait: waits for so many seconds and returns whether the store has been closed meanwhile; None waits
            for either.
    """

    def __init__(
        self,
        store: Store,
        policy: Retries = Retries(),
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
        draw: Callable[[], float] = _DRAWS.random,
    ) -> None:
        self._store, self._policy = store, policy
        self._clock, self._wait, self._draw = clock, wait, draw
        self._shared = PerProcess(lambda: _Health(store.name, policy, clock))

        _stores.add(self)

    def __repr__(self) -> str:
        return f"RetryingStore({self._store!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._store, self._policy)

    @property
    def name(self) -> str:
        return self._store.name

    def folders(self, prefix: str) -> list[str]:
        return self._ask(lambda: self._store.folders(prefix))

    def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        return self._pages(prefix, "")

    @property
    def objects_after(self) -> Callable[[str, str], Iterator[Sequence[StoredObject]]] | None:
        """List from behind a key on; None where the store cannot begin there."""
        return None if self._store.objects_after is None else self._pages

    def _pages(self, prefix: str, after: str) -> Iterator[Sequence[StoredObject]]:
        resume = self._store.objects_after
        pages: Iterator[Sequence[StoredObject]] | None = None

        def begin() -> Iterator[Sequence[StoredObject]]:
            return iter(resume(prefix, after) if after and resume else self._store.objects(prefix))

        def turn() -> Sequence[StoredObject] | None:
            nonlocal pages
            pages = pages or begin()
            try:
                return next(pages, None)
            except StoreBusyError as error:
                if after and resume is None:  # what follows cannot be told from what was there
                    raise StoreError(f"{error}, in the middle of a list") from None
                pages = None
                raise

        while (page := self._ask(turn)) is not None:
            if page:
                yield page
                after = page[-1].key

    def find(self, key: str) -> StoredObject:
        return self._ask(lambda: self._store.find(key))

    def get(self, key: str, version: str = "") -> FetchedObject:
        return self._ask(lambda: self._store.get(key, version))

    def get_range(self, key: str, start: int, stop: int, version: str = "") -> bytes:
        return self._ask(lambda: self._store.get_range(key, start, stop, version))

    def describe(self) -> str:
        return self._store.describe()

    def close(self) -> None:
        self._shared.get().closed.set()
        self._store.close()

    def _ask(self, request: Callable[[], T]) -> T:
        health = self._shared.get()
        if health.closed.is_set():
            self._refuse()
        may_repeat = health.begin()
        began, tried = self._clock(), 0
        while True:
            tried += 1
            try:
                answer = request()
            except StoreBusyError as error:
                health.failed(str(error))
                delay = self._draw() * min(self._policy.cap, self._policy.base * 2.0 ** (tried - 1))
                took = self._clock() - began
                last = not may_repeat or tried >= self._policy.tries or took + delay > self._policy.seconds
                if last or health.is_spent():
                    health.gave_up()
                    raise StoreBusyError(f"{error}; tried {tried}× in {took:.1f} s") from None
            except Exception:
                health.answered()  # also a refusal is an answer
                raise
            else:
                health.answered()
                return answer
            if self._wait(delay) if self._wait else health.closed.wait(delay):
                self._refuse()

    def _refuse(self) -> NoReturn:
        raise ClosedError(f"the store {self._store.name} has been closed")


_stores: weakref.WeakSet[RetryingStore] = weakref.WeakSet()


def _end_waits() -> None:
    """End all waits for stores when the interpreter ends, as it waits for its threads."""
    for store in list(_stores):
        store._shared.get().closed.set()


atexit.register(_end_waits)


class _Health:
    """How a store has answered this process."""

    def __init__(self, name: str, policy: Retries, clock: Callable[[], float]) -> None:
        self.closed = threading.Event()
        self._name, self._policy, self._clock = name, policy, clock
        self._lock = threading.Lock()
        self._lost: deque[bool] = deque(maxlen=policy.window)  # of the last requests, which were
        self._last = ""
        self._silent_since: float | None = None
        self._is_busy = False
        self._well = 0
        self._warned = self._probed = float("-inf")

    def begin(self) -> bool:
        """Return whether a request may be repeated; raise a ``StoreError`` if it may not even be made."""
        if self._silent_since is None and not self._is_busy:  # mostly, and then without the lock
            return True
        with self._lock:
            why = self._why_spent()
            if not why:
                return True
            if self._clock() - self._probed < self._policy.probe:
                raise StoreError(f"{self._name} {why}; the last time it was: {self._last}")
            self._probed = self._clock()
            return False

    def is_spent(self) -> bool:
        with self._lock:
            return bool(self._why_spent())

    def failed(self, reason: str) -> None:
        with self._lock:
            now = self._clock()
            self._last, self._well = reason, 0
            if self._silent_since is None:
                self._silent_since = now
            begins, self._is_busy = not self._is_busy, True
            if begins and now - self._warned >= self._policy.quiet:
                self._warned = now
                _log.warning("%s has no answer just now, and is asked again: %s", self._name, reason)

    def gave_up(self) -> None:
        with self._lock:
            self._lost.append(True)

    def answered(self) -> None:
        if self._silent_since is None and not self._is_busy and not self._lost:
            return
        with self._lock:
            self._silent_since = None
            self._lost.append(False)
            self._well += 1
            if self._well >= self._policy.well:
                self._lost.clear()
                if self._is_busy:
                    self._is_busy = False
                    _log.info("%s answers every request again", self._name)

    def _why_spent(self) -> str:
        """Return why nothing is to be asked again, in words; empty if it may be."""
        count, lost = len(self._lost), sum(self._lost)
        if count >= self._policy.least and lost > self._policy.share * count:
            return f"has failed {lost} of the last {count} requests, each after several tries"
        silent = 0.0 if self._silent_since is None else self._clock() - self._silent_since
        if silent > self._policy.silent:
            return f"has not answered anything for {silent:.0f} s, and {lost} requests were given up"
        return ""
