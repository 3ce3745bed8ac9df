"""Copies of files that can only be read from their beginning on, in a form of which parts can be read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from fastpipe.core.file_identity import identify
from fastpipe.core.machine import free_disk
from fastpipe.core.private_folder import PrivateFolder, user_cache_folder
from fastpipe.core.text import in_bytes
from fastpipe.errors import CacheError

try:
    import fcntl
except ImportError:  # on Windows, where nothing is kept
    fcntl = None  # type: ignore[assignment]


_UNUSED_S = 30 * 86400.0
_LEFT = 1 << 28  # bytes of disk that are left to others
_SUFFIX = ".raw"


class ConvertedFiles:
    """Keeps copies in a private folder.

    A copy belongs to one state of one file: one that changes gets another.  Copies that nobody has used
    for thirty days are removed when another is made.

    Args:
        folder: for the copies; None is ``converted`` in fastpipe's folder in the user's cache folder.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = folder

    def __call__(
        self, path: str, nbytes: int, fill: Callable[[BinaryIO], None]
    ) -> tuple[str, os.stat_result]:
        """The copy of a file, which is made if it is not there.

        Args:
            path: of the file.
            nbytes: that the copy will have.
            fill: writes it.

        Returns:
            Its path, and its state: what is at the path later, and is of another state, is not the copy.
        """
        file = identify(path, b"converted 1")
        place = hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:16]
        name = f"{place}-{file.digest.hex()}{_SUFFIX}"
        with PrivateFolder(self._path()) as folder:
            status = self._found(folder, name, nbytes)
            if status is None:
                # One makes it: a second would put another in its place, which is not what others have opened.
                with _alone(folder, f"{name}.lock"):
                    status = self._found(folder, name, nbytes)
                    if status is None:
                        _check_room(folder, path, nbytes)
                        _remove_old(folder, place)
                        folder.write(name, fill)
                        status = folder.stat(name)
            return str(folder.path / name), status

    def _path(self) -> Path:
        return user_cache_folder() / "converted" if self._folder is None else Path(self._folder)

    @staticmethod
    def _found(folder: PrivateFolder, name: str, nbytes: int) -> os.stat_result | None:
        """The copy's state; None where there is none."""
        try:
            descriptor = folder.open(name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            with contextlib.suppress(OSError):  # in use: not to be removed; but not changed
                os.utime(file.fileno(), ns=(time.time_ns(), status.st_mtime_ns))
            return status if status.st_size >= nbytes else None


def _check_room(folder: PrivateFolder, path: str, nbytes: int) -> None:
    descriptor = os.open(folder.here(), os.O_RDONLY)
    try:
        room = free_disk(descriptor)
    finally:
        os.close(descriptor)
    if room < nbytes + _LEFT:
        raise CacheError(
            f"{path} is read from a copy of {in_bytes(nbytes)} that is not compressed, and "
            f"{str(folder.path)!r} has room for {in_bytes(max(0, room - _LEFT))}: make some, or "
            "set XDG_CACHE_HOME to a folder elsewhere"
        )


@contextlib.contextmanager
def _alone(folder: PrivateFolder, name: str) -> Iterator[None]:
    """Hold the lock that a file is, which keeps threads apart as well; it is removed behind.

    Where the file system has no locks, nobody waits.
    """
    while True:
        descriptor = folder.open(name, os.O_RDWR | os.O_CREAT)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Who had it before may have removed the file, and another may have made it anew.
            is_that = os.path.samestat(os.fstat(descriptor), folder.stat(name))
        except FileNotFoundError:
            is_that = False
        except BaseException:
            os.close(descriptor)
            raise
        if is_that:
            break
        os.close(descriptor)
    try:
        yield
    finally:
        folder.remove(name)
        # A child that was forked meanwhile has the descriptor too: closing it would not do.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _remove_old(folder: PrivateFolder, place: str) -> None:
    """Remove copies of earlier states of a file, and those that nobody has used for long."""
    for name in folder.names():
        if not name.endswith(_SUFFIX):
            continue
        with contextlib.suppress(OSError):
            with os.fdopen(folder.open(name, os.O_RDONLY), "rb") as file:
                unused = time.time() - os.fstat(file.fileno()).st_atime
            if name.startswith(f"{place}-") or unused > _UNUSED_S:
                folder.remove(name)
