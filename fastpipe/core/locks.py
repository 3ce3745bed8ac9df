"""File locks that the system releases when the process that holds them ends for any reason.

A ``FileLock`` belongs to a process (``fcntl.lockf``).  A process has one ``FileLock`` for each file that its
threads and other processes use at the same time.  A ``LockFile`` belongs to an open file ("open file
description locks", fcntl(2)).  Two ``LockFile`` objects exclude each other even in one process, and closing
another descriptor of the file does not release their locks.  ``FileLock`` and ``LockFile`` depend on no
clock, and leave no file behind.
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
    """Another process has held the lock for much longer than the work under the lock takes."""


def locks_are_possible() -> bool:
    """Return whether this system has locks that are released when their process ends."""
    return fcntl is not None


class FileLock:
    """Locks a file against all other threads and processes that use the file.

    The system's lock belongs to the process and is released when the process ends.  But the system's lock
    does not exclude threads of the same process, and it is released early when the process closes any
    descriptor of the file.  So a process has one ``FileLock`` object for a file, see ``lock_of``, and
    closes the file's descriptors through this object.  ``threads`` is the lock among the process's threads.
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
        """Close descriptors of the file, or any other descriptors, now or when the lock becomes free.

        This method never waits, because a finalizer may call it in the thread that holds the lock.
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
    """Lock a file for this process.  Return True on success, and False if another process holds the lock.

    Child processes do not inherit the lock.
    """
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
    """Return this process's lock of an open file.  For all descriptors of the file, the lock is the same."""
    status = os.fstat(descriptor)
    key = (status.st_dev, status.st_ino)
    with _making:
        lock = _locks.get(key)
        if lock is None:
            lock = _locks[key] = FileLock()
        return lock


_locks: weakref.WeakValueDictionary[tuple[int, int], FileLock] = weakref.WeakValueDictionary()
_making = threading.Lock()


_FLOCK = struct.Struct("hhxxxxqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, process


def open_file_locks_are_possible() -> bool:
    """Return whether this system has locks that belong to an open file."""
    return hasattr(fcntl, "F_OFD_SETLK") and struct.calcsize("P") == 8


class LockFile:
    """A file whose bytes are locked one by one.  Thread-safe.

    A forked child would share its parent's locks.  The child could release the locks, and would hold them
    after the parent's end.  So the child closes its descriptor at once, and opens the file again when needed.

    If ``makes`` is True, a missing file is created, with mode 0600.
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
        """Lock a byte, exclusively or ``shared``.  Return False if another ``LockFile`` prevents this, unless
        ``waits``."""
        command = fcntl.F_OFD_SETLKW if waits else fcntl.F_OFD_SETLK
        try:
            _set(self.descriptor, command, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, byte)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def stay(self, byte: int) -> None:
        """Hold a shared lock on a byte until ``close``, also in forked children that use this object."""
        self.take(byte, shared=True, waits=True)
        self._standing.add(byte)

    def release(self, byte: int) -> None:
        _set(self.descriptor, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)

    def is_free(self, byte: int) -> bool:
        """Return whether no other ``LockFile`` has locked a byte."""
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        found = _FLOCK.unpack(fcntl.fcntl(self.descriptor, fcntl.F_OFD_GETLK, wanted))
        return bool(found[0] == fcntl.F_UNLCK)

    def is_at_its_path(self) -> bool:
        """Return whether the open file is still the file at ``path``."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.lstat(self.path))
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def alone(self, byte: int) -> Iterator[None]:
        """Lock a byte against all other threads and processes during work that takes microseconds."""
        with self._threads:
            self.take(byte, waits=True)
            try:
                yield
            finally:
                self.release(byte)

    def close(self) -> None:
        """Unlock all bytes, and close the file.  Deleting this object also closes the file."""
        self.is_closed = True
        with self._threads:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                # Unlock explicitly: a child that was forked without our handlers may keep the file open.
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
    """Call an object's ``_after_fork`` in each child that is forked while the object lives.

    An exception in one object's ``_after_fork`` does not prevent the calls for the other objects.
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
