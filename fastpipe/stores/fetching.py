"""Read the objects of a listing from the nearest place: memory, the stage, or their store."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from time import perf_counter

import numpy as np
import numpy.typing as npt

from fastpipe.core.clock import ranged
from fastpipe.core.machine import available_cpus, free_memory
from fastpipe.core.types import FetchedObject, NextUses, Store
from fastpipe.errors import ObjectChangedError, StageError, StoreError
from fastpipe.options import Stage
from fastpipe.stores.listing import Listing
from fastpipe.stores.prefetch import Int64Array, Pace, Prefetcher, in_parts
from fastpipe.stores.retrying import RetryingStore
from fastpipe.stores.stage import StageFolder
from fastpipe.stores.table import StageTable

_log = logging.getLogger("fastpipe.stage")

# Wait at most so long for another process's download, then download here as well.
_CLAIM_WAIT_S = 60.0
_MOST_UNWRITTEN = 16  # objects waiting to be staged; with more, threads that bring further ones wait, too


class Fetcher:
    """A thread-safe way to get objects from the stage or the store, with counts of downloaded
    objects."""

    def __init__(self, store: Store, listing: Listing, staged: StageTable | None, pace: Pace) -> None:
        self.store, self.pace = store, pace
        self._listing, self._staged = listing, staged
        self._lock = threading.Lock()
        self._busy = self.objects = self.bytes = 0
        # Writing takes processor time: at most so many threads, so that the others continue to fetch.
        self._writing = threading.BoundedSemaphore(max(1, available_cpus() // 2))
        self._unwritten: deque[tuple[int, bytes, contextlib.ExitStack]] = deque()  # row, data, and its claim
        self._changed: dict[int, str] = {}  # objects with another version than listed: which

    def nbytes(self, rows: Int64Array) -> Int64Array:
        return self._listing.sizes[rows]

    def are_staged(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        if self._staged is None:
            return np.zeros(len(rows), np.bool_)
        return self._staged.have(rows)

    def fetch(self, row: int, give: Callable[[bytes], None] | None = None) -> bytes:
        """Return an object's content: staged, or downloaded and then staged, by one process at a time.

        ``give`` is called with the content right after a download; this thread or another then stages it.
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
                data = staged.read(row)  # another process, or an earlier run, may have staged it
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
            self._write(staged)  # also objects of other threads

    def _write(self, staged: StageTable) -> None:
        """Stage the waiting objects, unless the most threads are already staging.

        A staging thread also takes objects that others bring meanwhile: cheaper than waking each of them.
        """
        unwritten = self._unwritten
        # A thread that cannot stage leaves its object to those that do: they check again at their end.
        while unwritten and self._writing.acquire(blocking=len(unwritten) > _MOST_UNWRITTEN):
            try:
                while unwritten:
                    try:
                        row, data, claim = unwritten.popleft()
                    except IndexError:  # another thread has taken the last one
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
                "%s has changed since it was listed: the new object is used, but not staged. A new "
                "dataset lists it again (an image folder with refresh=True). Further such objects are not "
                "logged",
                listing.path(row),
            )
        self._changed[row] = found.version
        return found.data

    def is_changed(self, row: int) -> bool:
        return row in self._changed

    def timed(self, key: str, version: str) -> FetchedObject:
        """Return an object from the store, and record the duration."""
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


_TELL_EVERY_S = 0.25
_ALL = 1 << 62  # bytes: more than exist
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


class _Staging:
    """The fetches of ``ObjectReader.stage_all``: counts, and a stop at an error that concerns all objects."""

    def __init__(self, fetcher: Fetcher, staged: StageTable, count: int) -> None:
        self._fetcher, self._staged = fetcher, staged
        self.failed: dict[int, Exception] = {}
        self._left = count
        self._first: Exception | None = None
        self._changed = threading.Condition()

    def nbytes(self, rows: Int64Array) -> Int64Array:
        return self._fetcher.nbytes(rows)

    def are_staged(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        return np.zeros(len(rows), np.bool_)  # staged ones were removed before; count each row

    def fetch(self, row: int, give: Callable[[bytes], None] | None = None) -> bytes:
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
        with self._changed:
            return self._changed.wait_for(lambda: self._left <= 0 or self._first is not None, seconds)

    def raise_first(self) -> None:
        error, self._first = self._first, None
        if error is not None:
            raise error


class ObjectReader:
    """A thread-safe reader of objects in one process.

    Args:
        staged: the stage's table on a local disk, or None.
        key_of: returns the key of a path, listed or not.
        connections: number of requests in flight, or ``"auto"``.
        read_ahead: bytes to prefetch.
        everything: True to stage all objects as soon as possible, not only those needed next.
    """

    def __init__(
        self,
        store: Store,
        listing: Listing,
        staged: StageTable | None,
        key_of: Callable[[str], str],
        *,
        connections: int | str,
        read_ahead: int,
        everything: bool = False,
    ) -> None:
        self._fetcher = Fetcher(store, listing, staged, Pace(connections))
        self._listing, self._staged, self._key_of = listing, staged, key_of
        self._everything = everything and staged is not None
        self.prefetcher = Prefetcher(
            self._fetcher, read_ahead, self._fetcher.pace, spills=self._everything, owner=self
        )

    @ranged("read")
    def read(self, path: str, row: int) -> bytes:
        """Return the content of a path, given with its row; the row is -1 if it was not listed."""
        if row < 0:  # the user has added the path
            return self._fetcher.timed(self._key_of(path), "").data
        return self.prefetcher.take(row)

    def files(self, rows: Int64Array) -> list[str | None]:
        """Return the staged files of rows, as far as known without checking.

        None for those that ``read`` must get: they are elsewhere, in memory already, or were not listed (-1).
        """
        if self._staged is None:
            return [None] * len(rows)
        near = (rows >= 0) & self._staged.have(rows)
        near &= ~self.prefetcher.have(rows)
        return [
            self._staged.file(row) if is_near else None
            for row, is_near in zip(rows.tolist(), near, strict=True)
        ]

    def need(self, rows: Int64Array) -> None:
        """Announce that a batch of these rows is being made; -1 means an object that was not listed."""
        rows = rows[rows >= 0]
        self.prefetcher.need(rows)
        if self._staged is not None:
            self._staged.used(rows)

    def forgo(self, rows: Int64Array, *, were_needed: bool) -> None:
        """Announce that rows are needed once less: they were announced by ``need``, or else by the order."""
        self.prefetcher.forgo(rows, were_needed=were_needed)

    def follow(self, order: Iterator[Int64Array], uses: NextUses | None, *, is_here: bool) -> None:
        """Prefetch an order of rows.

        Args:
            order: rows in the order in which this process needs them.
            uses: when the machine needs them next, which determines evictions from a full stage.
            is_here: True if they are needed in this process; otherwise they are only staged.
        """
        if self._staged is not None:
            self._staged.follow(uses)
        if self._everything:
            order = chain(order, in_parts(np.arange(len(self._listing), dtype=np.int64)))
        self.prefetcher.follow(order, holds=is_here)

    def stage_all(self, heard: Callable[[int, int], None]) -> list[tuple[str, Exception]]:
        """Download every object that is not staged; return the paths of those that failed, with their errors.

        ``heard`` is called now and then, in the calling thread, with the numbers of staged objects and bytes.

        Raises:
            StageError: there is no room for all of them, or the stage is not writable.
            StoreError: the store rejects these credentials, or does not answer.
        """
        fetcher, listing, staged = self._fetcher, self._listing, self._staged
        assert staged is not None
        rows = np.arange(len(listing), dtype=np.int64)
        missing = rows[~staged.have(rows)]
        run = _Staging(fetcher, staged, len(missing))
        prefetcher = Prefetcher(run, _ALL, fetcher.pace)
        try:
            prefetcher.follow(in_parts(missing), holds=False)
            while not run.wait(_TELL_EVERY_S):
                there = rows[staged.have(rows)]
                heard(len(there), int(listing.sizes[there].sum()))
        finally:
            prefetcher.close()
        run.raise_first()
        return [(listing.path(row), error) for row, error in sorted(run.failed.items())]

    def verify(self, heard: Callable[[int], None]) -> list[str]:
        """Read all staged objects, download damaged ones again, and return the paths of those.

        If an object's listed version is an MD5, as in S3 for objects that were put whole and are not
        encrypted with keys of their own, it is compared with the content's.  If they differ, the content is
        compared with the store's, as such a version need not be a checksum.  Otherwise the length is
        compared.

        ``heard`` is called now and then with the number of objects read.
        """
        fetcher, listing, staged = self._fetcher, self._listing, self._staged
        assert staged is not None

        def is_damaged(row: int) -> bool:
            was_there = staged.has(row)
            data = staged.read(row)
            if data is None:
                if was_there:
                    fetcher.fetch(row)
                return was_there
            expected = _MD5.fullmatch(listing.version(row))
            if not expected or hashlib.md5(data, usedforsecurity=False).hexdigest() == expected[1]:
                return False
            found = fetcher.timed(listing.key(row), listing.version(row)).data
            if found == data:
                return False
            staged.forget(row)
            staged.keep(row, found)
            return True

        damaged = []
        with ThreadPoolExecutor(thread_name_prefix="fastpipe-verify") as pool:
            for rows in in_parts(np.arange(len(listing), dtype=np.int64)):  # never queues a million objects
                found = zip(rows.tolist(), pool.map(is_damaged, rows.tolist()), strict=True)
                damaged += [listing.path(row) for row, is_bad in found if is_bad]
                heard(int(rows[-1]) + 1)
        return damaged

    def counted(self) -> tuple[int, int]:
        """Return the number of objects and bytes that this process has downloaded."""
        return self._fetcher.objects, self._fetcher.bytes

    def close(self) -> None:
        """End the threads, and release the stage and connections."""
        self._fetcher.store.close()
        self.prefetcher.close()
        if self._staged is not None:
            self._staged.close()


_READ_AHEAD = 256 << 20


def new_reader(
    store: Store, listing: Listing, stage: Stage | None, key_of: Callable[[str], str]
) -> ObjectReader:
    """Return a reader of objects for this process; ``key_of`` returns the key of any path."""
    read_ahead: int | str = "auto" if stage is None else stage.read_ahead
    if read_ahead == "auto":
        read_ahead = min(_READ_AHEAD, (free_memory() or _READ_AHEAD * 8) // 8)
    staged = None if stage is None else _opened_stage(stage, listing, store.name)
    connections = "auto" if stage is None else stage.connections
    # The reader owns this store and closes it.
    return ObjectReader(
        RetryingStore(store), listing, staged, key_of, connections=connections,
        read_ahead=int(read_ahead), everything=stage is not None and stage.mode == "mirror",
    )  # fmt: skip


def _opened_stage(stage: Stage, listing: Listing, store: str) -> StageTable | None:
    try:
        return StageFolder(stage).open_table(
            listing.digest, listing.sizes, lambda row: listing.name(row, store)
        )
    except StageError as error:
        _log.warning("Objects are fetched each time they are needed: %s", str(error))
        return None
