"""File locks, which end with the process that holds them, however it ends.

``FileLock`` belongs to a process (``fcntl.lockf``): one for each file that its threads, stores and other
processes use at once.  ``LockFile`` belongs to an open file ("open file description locks", fcntl(2)): two in
one process exclude each other like those of two processes, and closing another descriptor does not end them.
Neither uses a clock or leaves a file behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastpipe.core.files import open_regular

try:
    import fcntl
except ImportError:  # on Windows, which has no caches
    fcntl = None  # type: ignore[assignment]


_TRIES, _WAIT_S = 50, 0.001


class FileLockedError(OSError):
    """Another process has held the lock for far longer than it needs."""


def locks_are_possible() -> bool:
    """Return whether this system has locks that end with their process."""
    return fcntl is not None


class FileLock:
    """A lock of a file among the threads and processes that use it.

    The lock of the file itself belongs to the process and ends with it, however it ends.  But it
    does not exclude threads of the same process, and it ends early when the process closes any
    descriptor of the file.  So a process has one of these objects for a file, see ``lock_of``,
    and closes descriptors through it.  ``threads`` is the part that excludes this process's threads.
    """

    def __init__(self) -> None:
        self._after_fork()
        self._to_close: list[int] = []
        renew_in_children(self)

    @contextmanager
    def alone(self, descriptor: int) -> Iterator[None]:
        """Hold the lock of a file that is open for writing."""
        try:
            with self.threads:
                for attempt in range(_TRIES):
                    if try_to_lock(descriptor):
                        break
                    if attempt == _TRIES - 1:
                        raise FileLockedError(errno.EAGAIN, "another process holds its lock")
                    time.sleep(_WAIT_S)
                try:
                    yield
                finally:
                    unlock(descriptor)
        finally:
            self._close_waiting()

    def close(self, *descriptors: int) -> None:
        """Close descriptors of the file, or others, now or when the lock becomes free.

        It never waits: a finalizer may run in the very thread that holds the lock.
        """
        self._to_close += descriptors
        self._close_waiting()

    def _after_fork(self) -> None:
        self.threads = threading.Lock()  # another thread may have held it at the fork

    def _close_waiting(self) -> None:
        if self._to_close and self.threads.acquire(blocking=False):
            try:
                while self._to_close:
                    os.close(self._to_close.pop())
            finally:
                self.threads.release()


def try_to_lock(descriptor: int) -> bool:
    """Lock a file for this process, unless another one holds the lock; children do not inherit it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def unlock(descriptor: int) -> None:
    fcntl.lockf(descriptor, fcntl.LOCK_UN)


def lock_of(descriptor: int) -> FileLock:
    """Return this process's lock of an open file: the same one for all its descriptors."""
    status = os.fstat(descriptor)
    key = (status.st_dev, status.st_ino)
    with _making:
        lock = _locks.get(key)
        if lock is None:
            lock = _locks[key] = FileLock()
        return lock


_locks: weakref.WeakValueDictionary[tuple[int, int], FileLock] = weakref.WeakValueDictionary()
_making = threading.Lock()


_FLOCK = struct.Struct("hhxxxxqqi4x")  # of 64-bit Linux: type, whence, start, length, process


def open_file_locks_are_possible() -> bool:
    """Return whether this system has locks that belong to an open file."""
    return hasattr(fcntl, "F_OFD_SETLK") and struct.calcsize("P") == 8


class LockFile:
    """A file whose bytes are locked one by one.  Thread-safe.

    A forked child would share its parent's locks: it could release them, and would hold them after the
    parent's end.  So it closes its descriptor at once, and opens the file again when needed.

    ``makes`` creates a missing file, with mode 0600.
    """

    def __init__(self, path: str, *, makes: bool = True) -> None:
        self.path = path
        self.is_closed = False
        self._descriptor = -1
        self._standing: set[int] = set()
        self._reset_locks()
        self._descriptor = open_regular(path, os.O_RDWR | (os.O_CREAT if makes else 0), 0o600)
        renew_in_children(self)

    @property
    def descriptor(self) -> int:
        """Return the descriptor of the open file in this process."""
        if self._descriptor < 0:
            with self._opening:
                if self._descriptor < 0:
                    self._open_anew()
        return self._descriptor

    def take(self, byte: int, *, shared: bool = False, waits: bool = False) -> bool:
        """Lock a byte, or change the kind of its lock; return whether that succeeded."""
        command = fcntl.F_OFD_SETLKW if waits else fcntl.F_OFD_SETLK
        try:
            _set(self.descriptor, command, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, byte)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def stay(self, byte: int) -> None:
        """Hold a shared lock on a byte until this is closed, also in forked children that use it."""
        self.take(byte, shared=True, waits=True)
        self._standing.add(byte)

    def release(self, byte: int) -> None:
        _set(self.descriptor, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)

    def is_free(self, byte: int) -> bool:
        """Return whether a byte is not locked by another file object."""
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        found = _FLOCK.unpack(fcntl.fcntl(self.descriptor, fcntl.F_OFD_GETLK, wanted))
        return bool(found[0] == fcntl.F_UNLCK)

    def is_at_its_path(self) -> bool:
        """Return whether the file was neither removed nor replaced meanwhile."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.lstat(self.path))
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def alone(self, byte: int) -> Iterator[None]:
        """Hold a byte exclusively among threads and processes; for work that takes microseconds."""
        with self._threads:
            self.take(byte, waits=True)
            try:
                yield
            finally:
                self.release(byte)

    def close(self) -> None:
        """Unlock everything, and close the file; deleting this object does so as well."""
        self.is_closed = True
        with self._threads:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                # A child that was forked without our handlers may have the open file as well.
                _set(descriptor, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, 0, 0)
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def _reset_locks(self) -> None:
        self._threads, self._opening = threading.RLock(), threading.Lock()

    def _open_anew(self) -> None:
        if self.is_closed:
            raise OSError(errno.EBADF, "it is closed", self.path)
        descriptor = open_regular(self.path, os.O_RDWR)
        for byte in self._standing:
            _set(descriptor, fcntl.F_OFD_SETLKW, fcntl.F_RDLCK, byte)
        self._descriptor = descriptor

    def _after_fork(self) -> None:
        self._reset_locks()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _set(descriptor: int, command: int, kind: int, byte: int, count: int = 1) -> None:
    fcntl.fcntl(descriptor, command, _FLOCK.pack(kind, os.SEEK_SET, byte, count, 0))


_renewed: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_in_children(one: Any) -> None:
    """Register an object's ``_after_fork`` for a call in each forked child, while the object lives.

    An exception in one does not prevent the other calls.
    """
    _renewed.add(one)


def _after_fork() -> None:
    global _making
    _making = threading.Lock()
    for one in list(_renewed):
        with contextlib.suppress(Exception):  # such as EBADF, if the program has closed its descriptor
            one._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
