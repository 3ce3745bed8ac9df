"""Where a cache's files are: in memory, found by all processes of a user, or in a private folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from fastpipe._private_folder import PrivateFolder, user_cache_folder
from fastpipe.cache.budget import free_disk, free_memory
from fastpipe.cache.identity import is_stale
from fastpipe.cache.store import EntryStore
from fastpipe.errors import CacheError
from fastpipe.types import Cache

__all__ = ["open_store"]

_log = logging.getLogger("fastpipe.cache")

_SHARE = 4  # "auto" takes one part in so many of what is free
_LEFT = 1 << 28  # bytes of memory or disk below which nothing more is kept
_MARKS = 1 << 20
_FULL, _MOST_STALE = 0.9, 0.5  # a cache that is so full and so stale is begun anew
_LOOKED_AT = 1000  # entries, to know how stale it is
_LOCK, _PATIENCE_S = "lock", 1.0
_MEMORY_NAME = "fastpipe-cache"


def open_store(option: Cache) -> EntryStore | None:
    """The store of an option: the same one for equal options, in this process and, as far as the
    option says, in others.

    It lives as long as somebody refers to it or to the option object.

    Args:
        option: not ``"off"``.

    Returns:
        The store; None, after a warning, where it cannot be made in a place that nobody named.

    Raises:
        CacheError: the folder that the option names cannot be used.
    """
    where = "disk" if option.where == "disk" else "ram"
    key = (where, option.max_bytes, str(option.dir))
    with _opening:
        store = _open.get(key)
        if store is None:
            try:
                store = _disk(option) if where == "disk" else _ram(option)
            except (CacheError, OSError) as error:
                if option.dir is not None:
                    if isinstance(error, CacheError):
                        raise
                    raise CacheError(f"the cache in {option.dir!r} cannot be used: {error}") from error
                if key not in _failed:
                    _failed.add(key)
                    _log.warning("decoded images are not kept: %s", error)
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


# ---- in memory ------------------------------------------------------------------------------


def _ram(option: Cache) -> EntryStore:
    """The store in memory that processes of this user share, or a new one."""
    try:
        folder = PrivateFolder(user_cache_folder() / "shared-memory")
    except (CacheError, OSError) as error:
        _log.info("the cache in memory is not shared with other processes: %s", error)
        return _new_ram(option)
    with folder:
        name = _meeting_point(option)
        with _alone(folder):
            store = _join(folder, name) or _new_ram(option)
            try:
                _announce(folder, name, store)
            except OSError as error:
                _log.info("the cache in memory is not shared with other processes: %s", error)
        return store


def _new_ram(option: Cache) -> EntryStore:
    limit = option.max_bytes
    if limit == "auto":
        free = free_memory()
        if free is None:
            raise CacheError("nobody says how much memory is free; give Cache(max_bytes=…)")
        limit = free // _SHARE
    data = _anonymous_file()
    os.truncate(data, limit)  # takes no memory before something is written there
    return _ram_store(data, _anonymous_file(), limit)


def _ram_store(data: int, log: int, limit: int) -> EntryStore:
    return EntryStore(data, log, limit, marks=_MARKS, is_in_memory=True, is_short=_memory_is_short)


def _memory_is_short() -> bool:
    free = free_memory()
    return free is not None and free < _LEFT


def _anonymous_file() -> int:
    """A file in memory without a name: it goes with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(_MEMORY_NAME, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _meeting_point(option: Cache) -> str:
    """A name on which processes agree that can share memory: of one machine that was started once,
    that see each other's numbers, and that ask for the same."""
    facts = [str(option.max_bytes)]
    with contextlib.suppress(OSError):
        facts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _announce(folder: PrivateFolder, name: str, store: EntryStore) -> None:
    """Tell other processes that a store is at two descriptors of this one."""
    data, log = store.descriptors
    told = {
        "pid": os.getpid(), "descriptors": [data, log], "max_bytes": store.max_bytes,
        "inodes": [os.fstat(data).st_ino, os.fstat(log).st_ino],
    }  # fmt: skip
    file = f"{name}.{os.getpid()}.{data}.json"
    folder.write(file, lambda out: out.write(json.dumps(told).encode()), sync=False)
    weakref.finalize(store, _withdraw, folder.path / file, os.getpid())


def _withdraw(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a child of a fork
        with contextlib.suppress(OSError):
            path.unlink()


def _join(folder: PrivateFolder, name: str) -> EntryStore | None:
    """A store that a living process holds; what dead ones announced is cleared away."""
    for file in folder.names():
        if not file.startswith(name):
            continue
        opened: list[int] = []
        try:
            told = json.loads(folder.read(file) or b"")
            for number, inode in zip(told["descriptors"], told["inodes"], strict=True):
                opened.append(_descriptor_of(int(told["pid"]), int(number), int(inode)))
            data, log = opened
            limit = int(told["max_bytes"])
        except (OSError, ValueError, KeyError, TypeError):
            for descriptor in opened:
                os.close(descriptor)
            folder.remove(file)
            continue
        return _ram_store(data, log, limit)
    return None


def _descriptor_of(pid: int, number: int, inode: int) -> int:
    """Open the file in memory that another process has at a descriptor.

    Raises:
        OSError: there is none, or it is another one.
    """
    path = f"/proc/{pid}/fd/{number}"
    if not os.readlink(path).startswith(f"/memfd:{_MEMORY_NAME}"):
        raise FileNotFoundError(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(descriptor).st_ino != inode:
        os.close(descriptor)
        raise FileNotFoundError(path)
    return descriptor


# ---- on disk --------------------------------------------------------------------------------


def _disk(option: Cache) -> EntryStore:
    """The store in a folder: its newest generation of files, or a new one."""
    parent = user_cache_folder() if option.dir is None else Path(option.dir)
    with PrivateFolder(parent / "fastpipe-decoded") as folder, _alone(folder):
        generation = max(_generations(folder), default=0)
        store = _disk_store(folder, generation, option)
        if store.allocated > _FULL * store.max_bytes and _is_mostly_stale(store):
            # Who uses the old files goes on with them: they lose their names only.
            generation += 1
            store = _disk_store(folder, generation, option)
        for name in folder.names():
            if name != _LOCK and not name.startswith(f"{generation:06d}."):
                folder.remove(name)
        return store


def _generations(folder: PrivateFolder) -> list[int]:
    """The numbers of the pairs of files; what is no such file is left to be removed."""
    names = [name.removesuffix(".log") for name in folder.names() if name.endswith(".log")]
    return [int(name) for name in names if len(name) == 6 and name.isdigit()]


def _disk_store(folder: PrivateFolder, generation: int, option: Cache) -> EntryStore:
    data = folder.open(f"{generation:06d}.data", os.O_RDWR | os.O_CREAT)
    try:
        log = folder.open(f"{generation:06d}.log", os.O_RDWR | os.O_CREAT)
    except BaseException:
        os.close(data)
        raise
    limit = option.max_bytes
    if limit == "auto":
        limit = (free_disk(data) + os.fstat(data).st_blocks * 512) // _SHARE
    return EntryStore(data, log, limit, verify=True, is_short=partial(_disk_is_short, data))


def _disk_is_short(descriptor: int) -> bool:
    total = os.fstatvfs(descriptor).f_blocks * os.fstatvfs(descriptor).f_frsize
    return free_disk(descriptor) < min(_LEFT, total // 20)


def _is_mostly_stale(store: EntryStore) -> bool:
    """Whether most entries are of files that are not there any more or have changed."""
    entries = store.entries()
    looked_at = entries[:: max(1, len(entries) // _LOOKED_AT)]
    return sum(is_stale(store.note(entry)) for entry in looked_at) > _MOST_STALE * len(looked_at)


@contextmanager
def _alone(folder: PrivateFolder) -> Iterator[None]:
    """Alone among the processes that open a cache in this folder; without it after a second, in
    which nobody needs it: two caches instead of one are no error."""
    descriptor = folder.open(_LOCK, os.O_RDWR | os.O_CREAT)
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.005)
        yield
    finally:
        os.close(descriptor)
