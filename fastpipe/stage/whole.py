"""Copies large objects whole to a stage, in parts that are fetched side by side."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from fastpipe.core.types import ListedObjects, Store
from fastpipe.errors import StoreError
from fastpipe.stage.files import new_file
from fastpipe.stage.table import StageTable

__all__ = ["PART", "copy_whole"]

PART = 8 << 20  # bytes of a request: with the next ones on their way, its latency does not count
_AT_A_TIME = 16
_FOREVER_S = 1e8  # whoever copies a file is waited for while it lives


def copy_whole(
    store: Store, listing: ListedObjects, staged: StageTable, row: int, connections: int | str = "auto"
) -> tuple[str, bool]:
    """An object's file in the stage: it is downloaded where it is not there, by one process at a time.

    Args:
        store: where the object is.
        listing: which it is.
        staged: where it goes.
        row: of the object.
        connections: requests under way at a time, or ``"auto"``.

    Returns:
        Its path, and whether it was downloaded here.

    Raises:
        StageError: there is no room for it, or the stage cannot be written to.
        ObjectChangedError: it is not of the version that was listed.
        StoreError, FileNotFoundError: the store does not give it.
    """
    found = staged.path(row)
    if found is not None:
        return found, False
    with staged.claim(row, _FOREVER_S):
        found = staged.path(row)
        if found is not None:
            return found, False
        key, version, size = listing.key(row), listing.version(row), int(listing.sizes[row])
        at_a_time = _AT_A_TIME if connections == "auto" else int(connections)

        def write(path: str) -> None:
            descriptor = new_file(path)
            try:
                if size:
                    os.posix_fallocate(descriptor, 0, size)  # a disk without room for it is found now
                _copy(store, key, version, size, descriptor, at_a_time)
            finally:
                os.close(descriptor)

        return staged.put(row, write), True


def _copy(store: Store, key: str, version: str, size: int, descriptor: int, at_a_time: int) -> None:
    def copy_part(start: int) -> None:
        stop = min(start + PART, size)
        data = memoryview(store.get_range(key, start, stop, version))
        if len(data) != stop - start:
            raise StoreError(
                f"{key} of {store.name} has {len(data):,} bytes at {start:,}, not {stop - start:,}: "
                "it was listed with another size"
            )
        while data:
            written = os.pwrite(descriptor, data, start)
            start, data = start + written, data[written:]

    starts = range(0, size, PART)
    with ThreadPoolExecutor(max(1, min(at_a_time, len(starts))), "fastpipe-copy") as pool:
        try:
            for _ in pool.map(copy_part, starts):
                pass
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
