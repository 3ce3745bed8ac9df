"""Retry requests that a busy store did not answer, and raise an error after some time."""

from __future__ import annotations

import atexit
import logging
import random
import threading
import time
import weakref
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
    """The limits for retries of a request.

    Attributes:
        tries, seconds: the maximum number of tries of a request, and the maximum time from the first to the
            last try, in seconds.
        base: the longest wait after the first failure, in seconds.  The longest wait doubles with each
            failure.  The actual wait is random, from 0 to the longest wait, so that clients spread out.
        cap: the limit up to which the longest wait doubles, in seconds.
        quiet: the minimum time between two warnings, in seconds.
    """

    tries: int = 8
    seconds: float = 60.0
    base: float = 0.1
    cap: float = 5.0
    quiet: float = 60.0


_DRAWS = random.Random()  # a separate generator, because the script uses the global generator


class RetryingStore:
    """A ``core.types.Store`` that repeats the requests to ``store`` that fail with ``StoreBusyError``.

    ``draw`` returns a random number from 0 to 1.  ``wait`` waits for a number of seconds, and returns whether
    the store was closed during the wait.
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
        self._closed, self._warned = PerProcess(threading.Event), float("-inf")
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
        """The function that lists the objects after a key; None if the store cannot do this."""
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
                if after and resume is None:  # a new listing would repeat objects that were yielded already
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
        self._closed.get().set()
        self._store.close()

    def _ask(self, request: Callable[[], T]) -> T:
        closed, policy = self._closed.get(), self._policy
        if closed.is_set():
            self._refuse()
        began, tried = self._clock(), 0
        while True:
            tried += 1
            try:
                return request()
            except StoreBusyError as error:
                delay = self._draw() * min(policy.cap, policy.base * 2.0 ** (tried - 1))
                now = self._clock()
                if tried >= policy.tries or now - began + delay > policy.seconds:
                    raise StoreBusyError(f"{error}; tried {tried}× in {now - began:.1f} s") from None
                if now - self._warned >= policy.quiet:
                    self._warned = now
                    _log.warning("%s has no answer just now, and is asked again: %s", self.name, str(error))
            if self._wait(delay) if self._wait else closed.wait(delay):
                self._refuse()

    def _refuse(self) -> NoReturn:
        raise ClosedError(f"the store {self._store.name} has been closed")


_stores: weakref.WeakSet[RetryingStore] = weakref.WeakSet()


def _end_waits() -> None:
    """End all waits for stores when the interpreter exits, because the interpreter waits for its threads."""
    for store in list(_stores):
        store._closed.get().set()


atexit.register(_end_waits)
