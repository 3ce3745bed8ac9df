"""Gets an object from wherever it is nearest: the stage, or its store."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter

import numpy as np
import numpy.typing as npt

from fastpipe.core.machine import available_cpus
from fastpipe.core.types import FetchedObject, ListedObjects, StagedObjects, Store
from fastpipe.errors import ObjectChangedError
from fastpipe.stage.pace import Pace
from fastpipe.stage.transfers import Int64Array

__all__ = ["Fetcher"]

_log = logging.getLogger("fastpipe.stage")

# For another process to download an object; then it is downloaded here as well.
_CLAIM_WAIT_S = 60.0
_MOST_UNWRITTEN = 16  # objects that wait to be staged; then those who bring more wait, too


class Fetcher:
    """Gets objects, for any number of threads.

    Args:
        store: where they are.
        listing: which they are.
        staged: those on a local disk, or None.
        pace: hears how long the store takes.

    Attributes:
        objects, bytes: downloaded so far.
    """

    def __init__(
        self, store: Store, listing: ListedObjects, staged: StagedObjects | None, pace: Pace
    ) -> None:
        self.store, self.pace = store, pace
        self._listing, self._staged = listing, staged
        self._lock = threading.Lock()
        self._busy = self.objects = self.bytes = 0
        # Writing takes the processor: no more threads than that, so that the others go on to fetch.
        self._writing = threading.BoundedSemaphore(max(1, available_cpus() // 2))
        self._unwritten: deque[tuple[int, bytes, contextlib.ExitStack]] = deque()  # the last is its claim
        self._changed: dict[int, str] = {}  # objects that are not of the version listed: of which they are

    def nbytes(self, rows: Int64Array) -> Int64Array:
        """Bytes of objects."""
        return self._listing.sizes[rows]

    def are_near(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether objects are staged."""
        if self._staged is None:
            return np.zeros(len(rows), np.bool_)
        return self._staged.have(rows)

    def fetch(self, row: int, give: Callable[[bytes], None] | None = None) -> bytes:
        """An object's content: staged, or downloaded and then staged, by one process at a time.

        Args:
            row: which one.
            give: called with it as soon as it was downloaded; it is staged then, by this thread or another.
        """
        staged = self._staged
        if staged is None or row in self._changed:
            return self._download(row)
        data = staged.read(row) if staged.has(row) else None
        if data is not None:
            return data
        try:
            with contextlib.ExitStack() as claim:
                claim.enter_context(staged.claim(row, _CLAIM_WAIT_S))
                data = staged.read(row)  # another process may have put it there by now, or in an earlier run
                if data is None:
                    data = self._download(row)
                    if give is not None and row not in self._changed:
                        self._unwritten.append((row, data, claim.pop_all()))
                        give(data)
                    elif row not in self._changed:
                        with self._writing:
                            staged.keep(row, data)
            return data
        finally:
            self._write(staged)  # also what others have left to this thread

    def _write(self, staged: StagedObjects) -> None:
        """Stage what waits for it, unless as many threads as may are at that.

        Whoever is at it takes what the others bring meanwhile, which is cheaper than that each of them waits
        and is woken up.
        """
        unwritten = self._unwritten
        # Who could not begin leaves it to those who are at it: they look once more after they have ended.
        while unwritten and self._writing.acquire(blocking=len(unwritten) > _MOST_UNWRITTEN):
            try:
                while unwritten:
                    try:
                        row, data, claim = unwritten.popleft()
                    except IndexError:  # somebody else has taken the last one
                        break
                    with claim:
                        staged.keep(row, data)
            finally:
                self._writing.release()

    def _download(self, row: int) -> bytes:
        listing = self._listing
        key, version = listing.key(row), self._changed.get(row) or listing.version(row)
        try:
            return self.timed(key, version).data
        except ObjectChangedError:
            found = self.timed(key, "")
        if not self._changed:
            _log.warning(
                "%s is not what was listed any more: it is used as it is now, and not staged. "
                "A dataset that is made anew lists it as it is (an image folder with refresh=True). "
                "Further such objects are not named",
                listing.path(row),
            )
        self._changed[row] = found.version
        return found.data

    def is_changed(self, row: int) -> bool:
        """Whether an object is not of the version listed."""
        return row in self._changed

    def timed(self, key: str, version: str) -> FetchedObject:
        """An object as the store gives it."""
        with self._lock:
            self._busy += 1
            busy = self._busy
        start = perf_counter()
        try:
            found = self.store.get(key, version)
        finally:
            with self._lock:
                self._busy -= 1
        self.pace.note(perf_counter() - start, busy)
        with self._lock:
            self.objects += 1
            self.bytes += len(found.data)
        return found
