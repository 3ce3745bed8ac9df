"""Reads the objects of a listing from wherever they are nearest: fetched ahead, staged, or in their store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from time import perf_counter

import numpy as np
import numpy.typing as npt

from fastpipe.errors import ObjectChangedError, StageError, StoreError
from fastpipe.protocols import ListedObjects, NextUses, StagedObjects, Store
from fastpipe.stage.pace import Pace
from fastpipe.stage.prefetch import Prefetcher
from fastpipe.stage.transfers import Int64Array
from fastpipe.types import FetchedObject

__all__ = ["ObjectReader"]

_log = logging.getLogger("fastpipe.stage")

# For another process to download an object; then it is downloaded here as well.
_CLAIM_WAIT_S = 60.0
_PART, _TELL_EVERY_S = 1024, 0.25
_ALL = 1 << 62  # bytes: more than there are


class ObjectReader:
    """Reads objects, in one process; from any thread.

    Args:
        store: where they are.
        listing: which they are.
        staged: those on a local disk, or None.
        key_of: the key that a path stands for, listed or not.
        connections: requests under way at a time, or ``"auto"``.
        read_ahead: bytes that are fetched before they are needed.
        holds: whether who needs them is in this process; else they are only staged.
        everything: whether all objects are to be staged as soon as may be, not only those that are needed
            next.
    """

    def __init__(
        self,
        store: Store,
        listing: ListedObjects,
        staged: StagedObjects | None,
        key_of: Callable[[str], str],
        *,
        connections: int | str,
        read_ahead: int,
        holds: bool = True,
        everything: bool = False,
    ) -> None:
        self._fetcher = _Fetcher(store, listing, staged, Pace(connections))
        self._listing, self._staged, self._key_of = listing, staged, key_of
        self._everything = everything and staged is not None
        self.prefetcher = Prefetcher(
            self._fetcher, read_ahead, self._fetcher.pace, holds=holds, spills=self._everything
        )

    def read(self, path: str) -> bytes:
        """An object's content.

        Raises:
            FileNotFoundError: it is not in the store any more.
            StoreError: the store does not give it.
        """
        row = self._listing.find(path)
        if row < 0:  # somebody put the path there
            return self._fetcher.timed(self._key_of(path), "").data
        return self.prefetcher.take(row)

    def need(self, rows: Int64Array) -> None:
        """Say that a batch of these rows is being made; -1 stands for one that was not listed."""
        rows = rows[rows >= 0]
        self.prefetcher.need(rows)
        if self._staged is not None:
            self._staged.used(rows)

    def follow(self, order: Iterator[Int64Array], uses: NextUses | None) -> None:
        """Fetch ahead of an order of rows.

        Args:
            order: rows in the order in which this process needs them.
            uses: when the machine needs them next, by which a full stage makes room.
        """
        if self._staged is not None:
            self._staged.follow(uses)
        if self._everything:
            rest = np.arange(len(self._listing), dtype=np.int64)
            order = chain(order, np.split(rest, range(_PART, len(rest), _PART)))
        self.prefetcher.follow(order)

    def stage_all(self, heard: Callable[[int, int], None]) -> list[tuple[str, Exception]]:
        """Download every object that is not staged yet; returns when that is done.

        Args:
            heard: called now and then with the objects and bytes that are staged, from the calling thread.

        Returns:
            The paths of those that could not be downloaded, and why.

        Raises:
            StageError: there is no room for all of them, or the stage cannot be written to.
            StoreError: the store does not let these credentials in, or does not answer.
        """
        assert self._staged is not None
        rows = np.arange(len(self._listing), dtype=np.int64)
        missing = rows[~self._staged.have(rows)]
        run = _StageRun(self._fetcher, self._staged, len(missing))
        prefetcher = Prefetcher(run, _ALL, self._fetcher.pace, holds=False)
        try:
            prefetcher.follow(iter(np.split(missing, range(_PART, len(missing), _PART))))
            while not run.wait(_TELL_EVERY_S):
                there = rows[self._staged.have(rows)]
                heard(len(there), int(self._listing.sizes[there].sum()))
        finally:
            prefetcher.close()
        run.raise_first()
        return [(self._listing.path(row), error) for row, error in sorted(run.failed.items())]

    def counted(self) -> tuple[int, int]:
        """Objects and bytes that this process has downloaded."""
        return self._fetcher.objects, self._fetcher.bytes

    def close(self) -> None:
        """End the threads, and let go of the stage and of connections."""
        self._fetcher.store.close()
        self.prefetcher.close()
        if self._staged is not None:
            self._staged.close()


class _StageRun:
    """What fetches for ``stage_all``: keeps count, and ends at an error that is about all objects."""

    def __init__(self, fetcher: _Fetcher, staged: StagedObjects, count: int) -> None:
        self._fetcher, self._staged = fetcher, staged
        self.failed: dict[int, Exception] = {}
        self._left = count
        self._first: Exception | None = None
        self._changed = threading.Condition()

    def nbytes(self, rows: Int64Array) -> Int64Array:
        return self._fetcher.nbytes(rows)

    def are_near(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        return np.zeros(len(rows), np.bool_)  # those that are were left out; each row is to be counted

    def fetch(self, row: int) -> bytes:
        error: Exception | None = None
        try:
            if self._first is None:
                self._fetcher.fetch(row)
                if not (self._staged.has(row) or self._fetcher.is_changed(row)):
                    error = StageError(
                        "the stage has no room for all of it, or cannot be written to: give it a larger "
                        "max_bytes, free the disk, or take fewer classes"
                    )
        except Exception as raised:
            error = raised
        with self._changed:
            if isinstance(error, (StageError, StoreError)):
                self._first = self._first or error
            elif error is not None:
                self.failed[row] = error
            self._left -= 1
            self._changed.notify_all()
        return b""

    def wait(self, seconds: float) -> bool:
        """Wait for the end; whether it has come."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left <= 0 or self._first is not None, seconds)

    def raise_first(self) -> None:
        """Raise the error that is about all objects, if there was one."""
        error, self._first = self._first, None
        if error is not None:
            raise error


class _Fetcher:
    """What the prefetcher fetches with."""

    def __init__(
        self, store: Store, listing: ListedObjects, staged: StagedObjects | None, pace: Pace
    ) -> None:
        self.store, self.pace = store, pace
        self._listing, self._staged = listing, staged
        self._lock = threading.Lock()
        self._busy = self.objects = self.bytes = 0
        self._changed: dict[int, str] = {}  # objects that are not of the version listed: of which they are

    def nbytes(self, rows: Int64Array) -> Int64Array:
        """Bytes of objects."""
        return self._listing.sizes[rows]

    def are_near(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether objects are staged."""
        if self._staged is None:
            return np.zeros(len(rows), np.bool_)
        return self._staged.have(rows)

    def fetch(self, row: int) -> bytes:
        """An object's content: staged, or downloaded and then staged, by one process at a time."""
        staged = self._staged
        if staged is None or row in self._changed:
            return self._download(row)
        data = staged.read(row) if staged.has(row) else None
        if data is not None:
            return data
        with staged.claim(row, _CLAIM_WAIT_S):
            data = staged.read(row)  # another process may have put it there just now, or in an earlier run
            if data is None:
                data = self._download(row)
                if row not in self._changed:
                    staged.keep(row, data)
        return data

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
                "refresh=True lists anew. Further such objects are not named",
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
