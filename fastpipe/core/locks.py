"""One lock for a file that threads, stores and processes use at once."""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "FileLock",
    "FileLockedError",
    "lock_of",
    "locks_are_possible",
    "try_to_lock",
    "unlock",
    "wait_for_lock",
]


try:
    import fcntl
except ImportError:  # on Windows, where nothing is kept
    fcntl = None  # type: ignore[assignment]


_TRIES, _WAIT_S = 50, 0.001


class FileLockedError(OSError):
    """Another process has held the lock for far longer than it takes."""


def locks_are_possible() -> bool:
    """Whether this system has locks that end with their process."""
    return fcntl is not None


class FileLock:
    """Alone with a file, among the threads and processes that use it.

    The lock of the file itself belongs to the process and ends with it, however it ends.  But it
    does not keep apart what is in one process, and it ends early when the process closes any
    descriptor of the file.  So a process has one of these objects for a file, see ``lock_of``,
    and closes descriptors by it.

    Attributes:
        threads: the half of it that keeps threads of this process apart.
    """

    def __init__(self) -> None:
        self.threads = threading.Lock()
        self._to_close: list[int] = []

    @contextmanager
    def alone(self, descriptor: int) -> Iterator[None]:
        """Hold the lock.

        Args:
            descriptor: of the file, open for writing.

        Raises:
            FileLockedError: another process does not let go of it.
            OSError: the file system has no locks.
        """
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
        """Close descriptors of the file, or others; at the latest when the lock is free.

        It never waits: a finalizer may run in the very thread that has the lock.
        """
        self._to_close += descriptors
        self._close_waiting()

    def _close_waiting(self) -> None:
        if self._to_close and self.threads.acquire(blocking=False):
            try:
                while self._to_close:
                    os.close(self._to_close.pop())
            finally:
                self.threads.release()


def try_to_lock(descriptor: int, place: int | None = None) -> bool:
    """Lock a file, or one of many places in it, for this process, unless another one has it locked.

    Unlike a lock of ``flock``, it is not passed on to children.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, *_range(place))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def wait_for_lock(descriptor: int, place: int) -> bool:
    """Lock a place as soon as no other process has it locked; False where they would wait for each other."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX, *_range(place))
    except OSError as error:
        if error.errno != errno.EDEADLK:
            raise
        return False
    return True


def unlock(descriptor: int, place: int | None = None) -> None:
    """Let go of a file, or of a place in it."""
    fcntl.lockf(descriptor, fcntl.LOCK_UN, *_range(place))


def _range(place: int | None) -> tuple[int, int]:
    """Length and start; a length of 0 is all that follows."""
    return (0, 0) if place is None else (1, place)


def lock_of(descriptor: int) -> FileLock:
    """This process's lock of an open file: the same one for all its descriptors."""
    status = os.fstat(descriptor)
    key = (status.st_dev, status.st_ino)
    with _making:
        lock = _locks.get(key)
        if lock is None:
            lock = _locks[key] = FileLock()
        return lock


_locks: weakref.WeakValueDictionary[tuple[int, int], FileLock] = weakref.WeakValueDictionary()
_making = threading.Lock()


def _renew() -> None:
    """In the child of a fork: other threads may have held these just then."""
    global _making
    _making = threading.Lock()
    for lock in list(_locks.values()):
        lock.threads = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
