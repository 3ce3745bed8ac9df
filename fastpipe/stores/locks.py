"""Locks on bytes of a file, which end with the process that holds them, however it ends.

They belong to an open file ("open file description locks", fcntl(2)): two of one process keep each other out
like those of two processes, and no other descriptor's end ends them.  No clock is asked and no file is left
behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from fastpipe.core.files import open_regular

__all__ = ["LockFile", "locks_are_possible", "renew_in_children"]


try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]


_FLOCK = struct.Struct("hhxxxxqqi4x")  # of 64-bit Linux: type, whence, start, length, process


def locks_are_possible() -> bool:
    """Return whether this system has such locks."""
    return hasattr(fcntl, "F_OFD_SETLK") and struct.calcsize("P") == 8


class LockFile:
    """A file of which bytes are locked.  From any thread.

    A forked child would have the locks of its parent: it could undo them, and would hold them after the
    parent's end.  So it closes its descriptor at once, and opens the file again when it needs it.

    Args:
        path: the file.
        makes: whether it is made where it is missing, with mode 0600.

    Raises:
        OSError: it cannot be opened.
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
        """Lock a byte, or change what kind of lock it has; return whether it was done."""
        command = fcntl.F_OFD_SETLKW if waits else fcntl.F_OFD_SETLK
        try:
            _set(self.descriptor, command, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, byte)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def stay(self, byte: int) -> None:
        """Share a byte until this is closed, in forked children that use it as well."""
        self.take(byte, shared=True, waits=True)
        self._standing.add(byte)

    def release(self, byte: int) -> None:
        """Unlock a byte."""
        _set(self.descriptor, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)

    def is_free(self, byte: int) -> bool:
        """Return whether a byte is not locked by another file object."""
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        found = _FLOCK.unpack(fcntl.fcntl(self.descriptor, fcntl.F_OFD_GETLK, wanted))
        return bool(found[0] == fcntl.F_UNLCK)

    def is_at_its_path(self) -> bool:
        """Return whether the file was not removed meanwhile, nor another one put in its place."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.lstat(self.path))
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def alone(self, byte: int) -> Iterator[None]:
        """Hold a byte among threads and processes; for what takes microseconds."""
        with self._threads:
            self.take(byte, waits=True)
            try:
                yield
            finally:
                self.release(byte)

    def close(self) -> None:
        """Unlock everything, and close the file; dropping this object does so as well."""
        self.is_closed = True
        with self._threads:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                # A child that no handler of ours has seen may have the open file as well.
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
    """Have ``_after_fork`` of an object called in each forked child, for as long as the object lives."""
    _renewed.add(one)


def _after_fork() -> None:
    for one in list(_renewed):
        one._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
