"""Fills a stage with all objects of a listing, and checks what it holds."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from fastpipe.core.types import ListedObjects, StagedObjects
from fastpipe.errors import StageError, StoreError
from fastpipe.stage.fetching import Fetcher
from fastpipe.stage.prefetch import Prefetcher
from fastpipe.stage.transfers import Int64Array, in_parts

__all__ = ["fill", "verify"]

_TELL_EVERY_S = 0.25
_ALL = 1 << 62  # bytes: more than there are
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


def fill(
    fetcher: Fetcher, listing: ListedObjects, staged: StagedObjects, heard: Callable[[int, int], None]
) -> list[tuple[str, Exception]]:
    """Download every object that is not staged yet.

    Args:
        fetcher: gets them.
        listing: which they are.
        staged: where they go.
        heard: called now and then with the objects and bytes that are staged, from the calling thread.

    Returns:
        The paths of those that could not be downloaded, and why.

    Raises:
        StageError: there is no room for all of them, or the stage cannot be written to.
        StoreError: the store does not let these credentials in, or does not answer.
    """
    rows = np.arange(len(listing), dtype=np.int64)
    missing = rows[~staged.have(rows)]
    run = _StageRun(fetcher, staged, len(missing))
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


def verify(
    fetcher: Fetcher, listing: ListedObjects, staged: StagedObjects, heard: Callable[[int], None]
) -> list[str]:
    """Read all that is staged, and download anew what is damaged.

    Where an object was listed with an MD5 as its version, as S3 gives it for objects that were put whole and
    are not encrypted with keys of their own, its content is compared with that; where it differs, with the
    store's, as such a version need not be a checksum.  Of others the length is compared.

    Args:
        fetcher, listing, staged: as of ``fill``.
        heard: called now and then with the number of objects that were read.

    Returns:
        The paths of those that were damaged.
    """

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
        for rows in in_parts(np.arange(len(listing), dtype=np.int64)):  # a million wait in no queue
            found = zip(rows.tolist(), pool.map(is_damaged, rows.tolist()), strict=True)
            damaged += [listing.path(row) for row, is_bad in found if is_bad]
            heard(int(rows[-1]) + 1)
    return damaged


class _StageRun:
    """What fetches for ``stage_all``: keeps count, and ends at an error that is about all objects."""

    def __init__(self, fetcher: Fetcher, staged: StagedObjects, count: int) -> None:
        self._fetcher, self._staged = fetcher, staged
        self.failed: dict[int, Exception] = {}
        self._left = count
        self._first: Exception | None = None
        self._changed = threading.Condition()

    def nbytes(self, rows: Int64Array) -> Int64Array:
        return self._fetcher.nbytes(rows)

    def are_near(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        return np.zeros(len(rows), np.bool_)  # those that are were left out; each row is to be counted

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
        """Wait for the end; whether it has come."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left <= 0 or self._first is not None, seconds)

    def raise_first(self) -> None:
        """Raise the error that is about all objects, if there was one."""
        error, self._first = self._first, None
        if error is not None:
            raise error
