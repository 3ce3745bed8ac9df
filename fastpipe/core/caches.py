"""Open the files of a cache, in memory that the processes of a user share, or in a private folder on disk."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from functools import partial
from pathlib import Path

from fastpipe.core.cache_store import DamagedStoreError, Entry, EntryStore
from fastpipe.core.file_identity import is_stale
from fastpipe.core.locks import locks_are_possible
from fastpipe.core.machine import free_disk, free_memory
from fastpipe.core.private_folder import PrivateFolder, user_cache_folder
from fastpipe.core.shared_memory import (
    LOCK,
    alone,
    announce,
    announced,
    anonymous_file,
    meeting_folder,
    meeting_name,
)
from fastpipe.errors import CacheError
from fastpipe.options import Cache

_log = logging.getLogger("fastpipe.cache")

AUTO_SHARE = 4  # ``max_bytes="auto"`` means 1 / AUTO_SHARE of the free bytes
_LEFT = 1 << 28  # a cache accepts no more entries if fewer bytes of memory or disk are free
_MARKS = 1 << 20
_FOLDER = "fastpipe-decoded"
_FULL, _MOST_STALE = 0.9, 0.5  # a cache is replaced if it is this full and this fraction of it is stale
_LOOKED_AT = 1000  # entries that are checked for staleness


def holds_cache(folder: str) -> bool:
    """Return whether there is a cache in a folder that ``Cache(dir=…)`` may name."""
    return os.path.isdir(os.path.join(folder, _FOLDER))


def open_cache_store(option: Cache) -> EntryStore | None:
    """Return the store of cached data for a ``Cache`` option.

    In this process, equal options have the same store.  Other processes share the content of the store.  The
    store lives as long as a reference to the store or to the option object exists.  If the store cannot be
    created in memory or in the default folder, log the reason and return None.

    Raises:
        CacheError: the folder that the option names cannot be used.
    """
    where = "disk" if option.where == "disk" else "ram"
    # The user's cache folder depends on the environment, which may change, so the key contains the folder.
    key = (where, option.max_bytes, str(option.dir or user_cache_folder()) if where == "disk" else "")
    failure = (option.where, *key)
    with _opening:
        store = _open.get(key)
        if store is None:
            try:
                if not locks_are_possible():
                    raise CacheError("on this operating system the cache is off")
                store = _disk(option) if where == "disk" else _ram(option)
            except (CacheError, OSError) as error:
                if option.dir is not None:
                    if isinstance(error, CacheError):
                        raise
                    raise CacheError(f"the cache in {option.dir!r} cannot be used: {error}") from error
                if failure not in _failed:
                    _failed.add(failure)
                    # No warning for where="auto", because the user has not requested this cache.
                    level = logging.INFO if option.where == "auto" else logging.WARNING
                    _log.log(level, "decoded images are not kept: %s", str(error))
                return None
            _open[key] = store
    weakref.finalize(option, lambda kept: None, store).atexit = False
    return store


# The stores of this process.  Forked children inherit the descriptors.
_open: weakref.WeakValueDictionary[tuple[object, ...], EntryStore] = weakref.WeakValueDictionary()
_opening = threading.Lock()
_failed: set[tuple[object, ...]] = set()


def _forget_lock() -> None:
    global _opening
    _opening = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


def _ram(option: Cache) -> EntryStore:
    """Return the store in memory that processes of this user already share, or create one."""
    store = None
    try:
        with meeting_folder() as folder:
            name = meeting_name(str(option.max_bytes))
            store = _join(folder, name)
            if store is None:
                store = _new_ram(option)
            announce(folder, name, store.descriptors, {"max_bytes": store.max_bytes}, store)
    except (CacheError, OSError) as error:
        _log.info("the cache in memory is not shared with other processes: %s", error)
    return _new_ram(option) if store is None else store


def _new_ram(option: Cache) -> EntryStore:
    limit = option.max_bytes
    if limit == "auto":
        free = free_memory()
        if free is None:
            raise CacheError("the amount of free memory is unknown; pass Cache(max_bytes=…)")
        limit = free // AUTO_SHARE
    data = anonymous_file()
    try:
        os.truncate(data, _marks(limit) + limit)  # memory is allocated only when it is written to
        log = anonymous_file()
    except BaseException:
        os.close(data)
        raise
    return _ram_store(data, log, limit)


def _ram_store(data: int, log: int, limit: int) -> EntryStore:
    return EntryStore(data, log, limit, marks=_marks(limit), is_in_memory=True, is_short=_memory_is_short)


def _marks(limit: int) -> int:
    """Return how many bytes ``EntryStore.mark`` uses: a multiple of the entries' alignment."""
    return min(_MARKS, max(64, limit // 1024 * 64))  # processes that share a cache have the same limit


def _memory_is_short() -> bool:
    free = free_memory()
    return free is not None and free < _LEFT


def _join(folder: PrivateFolder, name: str) -> EntryStore | None:
    """Return a store that another process has announced; None if there is no such store."""
    for found in announced(folder, name):
        opened: list[int] = []
        try:
            limit = int(found.about["max_bytes"])
            opened = found.opened()
            data, log = opened
        except (OSError, ValueError, KeyError, TypeError):
            for descriptor in opened:
                os.close(descriptor)
            folder.remove(found.note)
            continue
        try:
            return _ram_store(data, log, limit)
        except OSError as error:  # for example if the process that holds the lock is stopped
            _log.info("a cache in memory cannot be shared: %s", error)
    return None


def _disk(option: Cache) -> EntryStore:
    """Return the store in a folder, from the newest generation of files or from new files."""
    parent = user_cache_folder() if option.dir is None else Path(option.dir)
    with PrivateFolder(parent / _FOLDER) as folder, alone(folder):
        # Only the names of older files are removed, so processes that use these files can continue.
        for generation in itertools.count(max(_generations(folder), default=0)):
            try:
                store = _disk_store(folder, generation, option)
            except DamagedStoreError as error:
                _log.info("the cache on disk is rebuilt: %s", error)
                continue
            if store.allocated <= _FULL * store.max_bytes or not _is_mostly_stale(store):
                break
        for name in folder.names():
            if name != LOCK and not name.startswith(f"{generation:06d}."):
                folder.remove(name)
        return store


def _generations(folder: PrivateFolder) -> list[int]:
    """Return the numbers of the generations (pairs of files) in the folder.  Other files are ignored."""
    names = [os.path.splitext(name) for name in folder.names()]
    return [
        int(name) for name, end in names if end in (".data", ".log") and len(name) == 6 and name.isdigit()
    ]


def _disk_store(folder: PrivateFolder, generation: int, option: Cache) -> EntryStore:
    data = folder.open(f"{generation:06d}.data", os.O_RDWR | os.O_CREAT)
    try:
        limit = option.max_bytes
        if limit == "auto":
            limit = (free_disk(data) + os.fstat(data).st_blocks * 512) // AUTO_SHARE
        # Open the log last, so that no error makes it necessary to close the log: closing it would release
        # the lock of another store of this process.
        log = folder.open(f"{generation:06d}.log", os.O_RDWR | os.O_CREAT)
    except BaseException:
        os.close(data)
        raise
    return EntryStore(data, log, limit, verify=True, is_short=partial(_disk_is_short, data))


def _disk_is_short(descriptor: int) -> bool:
    total = os.fstatvfs(descriptor).f_blocks * os.fstatvfs(descriptor).f_frsize
    return free_disk(descriptor) < min(_LEFT, total // 20)


def _is_mostly_stale(store: EntryStore) -> bool:
    """Return whether the source files of most entries are gone or have changed."""
    entries = store.entries()
    looked_at = entries[:: max(1, len(entries) // _LOOKED_AT)]
    return sum(_is_stale(store, entry) for entry in looked_at) > _MOST_STALE * len(looked_at)


def _is_stale(store: EntryStore, entry: Entry) -> bool:
    try:
        return is_stale(store.note(entry))
    except OSError:  # the data file is shorter than it was
        return True
