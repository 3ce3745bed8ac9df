"""The places of a cache's files: in memory, shared by all processes of a user, or in a private folder."""

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

AUTO_SHARE = 4  # "auto" takes 1 / AUTO_SHARE of the free bytes
_LEFT = 1 << 28  # free bytes of memory or disk below which nothing more is kept
_MARKS = 1 << 20
_FULL, _MOST_STALE = 0.9, 0.5  # a cache that is this full and this stale is replaced
_LOOKED_AT = 1000  # entries that are checked for staleness


def open_cache_store(option: Cache) -> EntryStore | None:
    """Return the store of an option: the same one for equal options, in this process and, as far as the
    option says, in others.  It lives as long as references to it or to the option object exist.

    Return None, after a warning, if it cannot be created in a default place.

    Raises:
        CacheError: the folder that the option names cannot be used.
    """
    where = "disk" if option.where == "disk" else "ram"
    # The environment may change the user's cache folder, so it is looked up now.
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
                    # A cache that was not requested needs no warning.
                    level = logging.INFO if option.where == "auto" else logging.WARNING
                    _log.log(level, "decoded images are not kept: %s", str(error))
                return None
            _open[key] = store
    weakref.finalize(option, lambda kept: None, store).atexit = False
    return store


# Stores of this process; children of a fork have copies of the same descriptors.
_open: weakref.WeakValueDictionary[tuple[object, ...], EntryStore] = weakref.WeakValueDictionary()
_opening = threading.Lock()
_failed: set[tuple[object, ...]] = set()


def _forget_lock() -> None:
    global _opening
    _opening = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


def _ram(option: Cache) -> EntryStore:
    """Return the store in memory that processes of this user share, or a new one."""
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
        os.truncate(data, _marks(limit) + limit)  # takes no memory before something is written there
        log = anonymous_file()
    except BaseException:
        os.close(data)
        raise
    return _ram_store(data, log, limit)


def _ram_store(data: int, log: int, limit: int) -> EntryStore:
    return EntryStore(data, log, limit, marks=_marks(limit), is_in_memory=True, is_short=_memory_is_short)


def _marks(limit: int) -> int:
    """Return the number of bytes for marks; a multiple of the entries' alignment."""
    return min(_MARKS, max(64, limit // 1024 * 64))  # all processes that share it have the same limit


def _memory_is_short() -> bool:
    free = free_memory()
    return free is not None and free < _LEFT


def _join(folder: PrivateFolder, name: str) -> EntryStore | None:
    """Return a store that a living process holds; None if there is none."""
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
        except OSError as error:  # the lock's owner may be stopped
            _log.info("a cache in memory cannot be shared: %s", error)
    return None


def _disk(option: Cache) -> EntryStore:
    """Return the store in a folder: its newest generation of files, or a new one."""
    parent = user_cache_folder() if option.dir is None else Path(option.dir)
    with PrivateFolder(parent / "fastpipe-decoded") as folder, alone(folder):
        # Processes that use older files continue with them: only the names are removed.
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
    """Return the numbers of the file pairs; other files are left for removal."""
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
        # Last: closing it explicitly would end the lock of another store of this process.
        log = folder.open(f"{generation:06d}.log", os.O_RDWR | os.O_CREAT)
    except BaseException:
        os.close(data)
        raise
    return EntryStore(data, log, limit, verify=True, is_short=partial(_disk_is_short, data))


def _disk_is_short(descriptor: int) -> bool:
    total = os.fstatvfs(descriptor).f_blocks * os.fstatvfs(descriptor).f_frsize
    return free_disk(descriptor) < min(_LEFT, total // 20)


def _is_mostly_stale(store: EntryStore) -> bool:
    """Return whether the files of most entries are gone or have changed."""
    entries = store.entries()
    looked_at = entries[:: max(1, len(entries) // _LOOKED_AT)]
    return sum(_is_stale(store, entry) for entry in looked_at) > _MOST_STALE * len(looked_at)


def _is_stale(store: EntryStore, entry: Entry) -> bool:
    try:
        return is_stale(store.note(entry))
    except OSError:  # the data file is shorter than it was
        return True
