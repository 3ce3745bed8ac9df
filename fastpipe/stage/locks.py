"""Locks on bytes of a file, which end with whoever holds them, however that ends.

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
from collections.abc import Iterator

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["LockFile", "locks_are_possible"]

_FLOCK = struct.Struct("hhxxxxqqi4x")  # of 64-bit Linux: type, whence, start, length, process


def locks_are_possible() -> bool:
    """Whether this system has such locks."""
    return hasattr(fcntl, "F_OFD_SETLK") and struct.calcsize("P") == 8


class LockFile:
    """A file of which bytes are locked.

    Args:
        path: the file; made where it is missing, with mode 0600.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._threads = threading.Lock()

    def take(self, byte: int, *, shared: bool = False, waits: bool = False) -> bool:
        """Lock a byte, or change what kind of lock it has; whether it is locked now."""
        command = fcntl.F_OFD_SETLKW if waits else fcntl.F_OFD_SETLK
        try:
            self._set(command, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, byte)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def release(self, byte: int) -> None:
        """Unlock a byte."""
        self._set(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)

    def is_free(self, byte: int) -> bool:
        """Whether nobody else has a byte locked in any way."""
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        found = _FLOCK.unpack(fcntl.fcntl(self.descriptor, fcntl.F_OFD_GETLK, wanted))
        return bool(found[0] == fcntl.F_UNLCK)

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
        """Unlock everything, and close the file; who drops this object does so as well."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def _set(self, command: int, kind: int, byte: int) -> None:
        fcntl.fcntl(self.descriptor, command, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
