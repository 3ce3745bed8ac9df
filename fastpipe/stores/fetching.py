"""Read the objects of a listing from the fastest source that has the object: memory, the stage, or the store.

An object is identified by its row in the listing.
"""

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

# Wait at most this time while another process downloads an object; then download the object here as well.
_CLAIM_WAIT_S = 60.0
_MOST_UNWRITTEN = 16  # if more objects wait to be staged, threads that add objects wait, too


class Fetcher:
    """Gets objects from the stage or the store, and counts downloads.  Thread-safe."""

    def __init__(self, store: Store, listing: Listing, staged: StageTable | None, pace: Pace) -> None:
        self.store, self.pace = store, pace
        self._listing, self._staged = listing, staged
        self._lock = threading.Lock()
        self._busy = self.objects = self.bytes = 0
        # Writing takes processor time, so only some threads write and all others continue to fetch.
        self._writing = threading.BoundedSemaphore(max(1, available_cpus() // 2))
        self._unwritten: deque[tuple[int, bytes, contextlib.ExitStack]] = deque()  # row, data, claim of row
        self._changed: dict[int, str] = {}  # the new versions of objects that changed since the listing

    def nbytes(self, rows: Int64Array) -> Int64Array:
        return self._listing.sizes[rows]

    def are_staged(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        if self._staged is None:
            return np.zeros(len(rows), np.bool_)
        return self._staged.have(rows)

    def fetch(self, row: int, give: Callable[[bytes], None] | None = None) -> bytes:
        """Return an object's content from the stage.  If the object is not staged, download and stage it.

        Only one process downloads an object at a time.  ``give`` is called with the content right after a
        download.  Afterwards, this thread or another thread stages the object.
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
                data = staged.read(row)  # another process, or a previous run, may have staged the object
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
            self._write(staged)  # also writes objects of other threads

    def _write(self, staged: StageTable) -> None:
        """Stage the waiting objects, unless the maximum number of threads is already staging.  A staging
        thread also stages objects that other threads add, because waking threads would cost more."""
        unwritten = self._unwritten
        # A thread that may not stage leaves its object to the staging threads, which check the queue again
        # when they end.
        while unwritten and self._writing.acquire(blocking=len(unwritten) > _MOST_UNWRITTEN):
            try:
                while unwritten:
                    try:
                        row, data, claim = unwritten.popleft()
                    except IndexError:  # another thread has taken the last object
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
        """Return an object from the store, and count the download and the duration of the request."""
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
_ALL = 1 << 62  # a number of bytes that is never reached
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


class _Staging:
    """Fetches objects for ``ObjectReader.stage_all``.  Stops after an error that concerns all objects."""

    def __init__(self, fetcher: Fetcher, staged: StageTable, count: int) -> None:
        self._fetcher, self._staged = fetcher, staged
        self.failed: dict[int, Exception] = {}
        self._left = count
        self._first: Exception | None = None
        self._changed = threading.Condition()

    def nbytes(self, rows: Int64Array) -> Int64Array:
        return self._fetcher.nbytes(rows)

    def are_staged(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        return np.zeros(len(rows), np.bool_)  # no row is staged, and each row must be counted

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
    """Reads the objects of a listing in one process.  Thread-safe.

    Args:
        staged: the table of the objects on a local disk (the stage); None without a stage.
        key_of: returns the key of a path, also of a path that is not in the listing.
        connections: the maximum number of requests in flight, or ``"auto"``.
        read_ahead: the maximum number of bytes to prefetch.
        everything: whether to stage all objects as soon as possible, and not only the objects needed next.
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
        """Return the content of ``path``.  ``row`` is the path's row in the listing, or -1 if not listed."""
        if row < 0:  # the user has added this path
            return self._fetcher.timed(self._key_of(path), "").data
        return self.prefetcher.take(row)

    def files(self, rows: Int64Array) -> list[str | None]:
        """Return the paths of the staged files of the listing's ``rows``, without checking that they exist.

        The result for a row is None if ``read`` must get the object.  This is the case if the object is not
        staged, is in memory already, or was not listed (row -1).
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
        """Announce that a batch needs the objects ``rows`` of the listing now.  Rows of -1 are ignored."""
        rows = rows[rows >= 0]
        self.prefetcher.need(rows)
        if self._staged is not None:
            self._staged.used(rows)

    def forgo(self, rows: Int64Array, *, were_needed: bool) -> None:
        """Announce that ``rows`` will not be read after all.  ``were_needed`` is True if ``need`` announced
        the rows, and False if only the order in ``follow`` contained them."""
        self.prefetcher.forgo(rows, were_needed=were_needed)

    def follow(self, order: Iterator[Int64Array], uses: NextUses | None, *, is_here: bool) -> None:
        """Prefetch the objects of rows in the order in which they will be needed.

        Args:
            order: rows in the order in which this process needs them.
            uses: says when each row is needed next on this machine.  A full stage evicts by it.
            is_here: whether this process needs the rows.  If not, the objects are only staged.
        """
        if self._staged is not None:
            self._staged.follow(uses)
        if self._everything:
            order = chain(order, in_parts(np.arange(len(self._listing), dtype=np.int64)))
        self.prefetcher.follow(order, holds=is_here)

    def stage_all(self, heard: Callable[[int, int], None]) -> list[tuple[str, Exception]]:
        """Download every object that is not staged.  Return the paths and errors of objects that failed.

        ``heard`` is called now and then, in the calling thread, with the numbers of staged objects and bytes.

        Raises:
            StageError: the stage has no room for all objects, or is not writable.
            StoreError: the store rejects the credentials, or does not answer.
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
        """Read all staged objects, download damaged objects again, and return the paths of damaged objects.

        If an object's listed version looks like an MD5 checksum, the version is compared with the MD5 of the
        content.  (In S3, the version is an MD5 for objects that were uploaded in one part and are not
        encrypted with a customer's key.)  If version and MD5 differ, the content is compared with the content
        in the store, because the version may not be a checksum.  For others, only the length is compared.

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
            for rows in in_parts(np.arange(len(listing), dtype=np.int64)):  # keeps the pool's queue short
                found = zip(rows.tolist(), pool.map(is_damaged, rows.tolist()), strict=True)
                damaged += [listing.path(row) for row, is_bad in found if is_bad]
                heard(int(rows[-1]) + 1)
        return damaged

    def counted(self) -> tuple[int, int]:
        """Return the number of objects and bytes that this process has downloaded."""
        return self._fetcher.objects, self._fetcher.bytes

    def close(self) -> None:
        """End the threads, and release the stage and the connections."""
        self._fetcher.store.close()
        self.prefetcher.close()
        if self._staged is not None:
            self._staged.close()


_READ_AHEAD = 256 << 20


def new_reader(
    store: Store, listing: Listing, stage: Stage | None, key_of: Callable[[str], str]
) -> ObjectReader:
    """Return a reader of objects for this process.  ``key_of`` returns the key of any path."""
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
