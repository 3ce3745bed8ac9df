"""Copy whole files of stores to a stage (a folder on a local disk), for datasets that read parts of files."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from fastpipe.core.files import is_url
from fastpipe.core.sample_tables import FrozenSamples, offsets_of, pack_paths
from fastpipe.core.text import in_bytes
from fastpipe.core.types import Store, StoredObject
from fastpipe.errors import ObjectChangedError, OptionError, StoreError
from fastpipe.options import Stage
from fastpipe.stores.listing import Listing
from fastpipe.stores.locations import Location
from fastpipe.stores.opening import open_store
from fastpipe.stores.retrying import RetryingStore
from fastpipe.stores.stage import StageFolder
from fastpipe.stores.table import StageTable, new_file

_log = logging.getLogger("fastpipe.stage")


PART = 8 << 20  # bytes of a request; the latency does not matter, because several requests are in flight
_AT_A_TIME = 16
_FOREVER_S = 1e8  # how long to wait while another process copies the file


def copy_whole(
    store: Store, listing: Listing, staged: StageTable, row: int, connections: int | str = "auto"
) -> tuple[str, bool]:
    """Download an object to the stage, unless it is there.  Return the file's path, and whether this call
    downloaded the file.  Only one process downloads an object at a time."""
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
                    os.posix_fallocate(descriptor, 0, size)  # fails at once if the disk has no room
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


class StagedFiles:
    """The files of one dataset, copied to a stage.

    The files stay in the stage while this object lives, or a copy of this object that is in use.  ``far``
    says for each path whether to stage the file.  ``shown`` contains the URLs and paths that the user gave,
    and ``local`` contains the local paths in this process.
    """

    def __init__(
        self,
        paths: Sequence[Any],
        far: Sequence[bool],
        storage_options: Mapping[str, Any] | None,
        stage: Stage,
    ) -> None:
        self.shown = [os.fsdecode(path) for path in paths]
        self.local = list(self.shown)
        StageFolder(stage).close()  # check that the stage is usable, before any request
        stores: dict[tuple[str, str], _Files] = {}
        for number, path in enumerate(self.shown):
            if far[number]:
                location = Location.of(path)
                key = location.scheme, location.bucket if location.scheme else "/"
                if key not in stores:
                    bare, inside = open_store(
                        path if location.scheme else "/", storage_options if location.scheme else None
                    )
                    stores[key] = _Files(bare, inside, stage)
                stores[key].add(number, path, location)
        self._stores = list(stores.values())
        for files in self._stores:
            files.stage(self.local, lists=True)
        self._states = self._seen()
        self._pid = os.getpid()

    def reopen(self) -> bool:
        """Stage the files for this process.  Return whether the files or their local paths have changed."""
        if all(files.table is not None for files in self._stores) and (
            self._pid == os.getpid() or self._seen() == self._states
        ):
            return False
        before = self._states, list(self.local)
        for files in self._stores:
            files.stage(self.local, lists=False)
        self._pid, self._states = os.getpid(), self._seen()
        return before != (self._states, self.local)

    def close(self) -> None:
        """Release the stage.  ``reopen`` opens the stage again."""
        for files in self._stores:
            files.close()

    def _seen(self) -> list[tuple[int, int, int, int] | None]:
        return [_state(path) for path in self.local]

    def __deepcopy__(self, memo: dict[int, Any]) -> StagedFiles:
        return self


class _Files:
    def __init__(self, bare: Store, location: Location, stage: Stage) -> None:
        self._bare, self._location, self._stage = bare, location, stage
        self._keys: dict[str, list[int]] = {}  # for each key, the indices of the paths with this key
        self._listing: Listing | None = None
        self.table: StageTable | None = None

    def add(self, number: int, path: str, location: Location) -> None:
        key = location.prefix[:-1] if location.scheme else location.bucket.lstrip("/")
        if not key:
            raise OptionError(f"{path!r} names a bucket: write the URL of a file in it")
        self._keys.setdefault(key, []).append(number)

    def stage(self, local: list[str], *, lists: bool) -> None:
        """Copy the files to the stage, and write their paths to ``local``.  If ``lists`` is True, ask the
        store for the current versions of the files first."""
        store = RetryingStore(self._bare)
        try:
            try:
                self._stage_all(store, local, lists)
            except ObjectChangedError:
                if not lists:
                    raise
                self._stage_all(store, local, lists)  # a file was replaced after the listing: list again
        except BaseException:
            self.close()
            raise
        finally:
            store.close()

    def _stage_all(self, store: RetryingStore, local: list[str], lists: bool) -> None:
        self.close()
        if lists or self._listing is None:
            self._listing = self._listed(store)
        listing = self._listing
        self.table = table = StageFolder(self._stage).open_table(
            listing.digest, listing.sizes, lambda row: listing.name(row, store.name)
        )
        for row, numbers in enumerate(self._keys.values()):
            if table.path(row) is None:
                _log.info("%s (%s) is being staged", listing.path(row), in_bytes(listing.size(row)))
            path, _ = copy_whole(store, listing, table, row, self._stage.connections)
            for number in numbers:
                local[number] = path

    def _listed(self, store: RetryingStore) -> Listing:
        found: list[StoredObject] = []
        for key in self._keys:
            try:
                found.append(store.find(key))
            except FileNotFoundError:
                path = self._location.path(key)
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        keys = pack_paths("", list(self._keys))
        paths = FrozenSamples(
            bytes(keys.block), offsets_of(keys.lengths), np.zeros(len(found), np.int64), self._location.store
        )
        sizes = np.array([one.size for one in found], np.int64)
        return Listing(paths, "", sizes, pack_paths("", [one.version for one in found]))

    def close(self) -> None:
        table, self.table = self.table, None
        if table is not None:
            table.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "table": None}


def staged_files(
    paths: Sequence[Any],
    storage_options: Mapping[str, Any] | None,
    stage: Stage | None,
) -> StagedFiles | None:
    """Return the staged files for URLs and paths.  If ``stage`` is None, return None, and raise an
    OptionError if ``paths`` contains a URL, because URLs must be staged."""
    urls = [isinstance(path, str) and is_url(path) for path in paths]
    first = next(
        (path for path, is_far in zip(paths, urls, strict=True) if is_far), paths[0] if paths else ""
    )
    if storage_options is not None and not any(urls):
        raise OptionError(
            f"storage_options= is for a path that is a URL, such as 's3://bucket/mels.h5'; got {first!r}"
        )
    if stage is None:
        if any(urls):
            raise OptionError(
                f"{first!r} is read at many places and must be staged first: pass stage= with a folder on "
                "a local disk"
            )
        return None
    # If some paths are URLs, all other paths are local files.  If there are no URLs, the paths are files on a
    # network or a mount, and all of them are staged.
    return StagedFiles(paths, urls if any(urls) else [True] * len(paths), storage_options, stage)


def _state(path: str) -> tuple[int, int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
