"""Folders for caches and stages (local copies of datasets) that only their owner can access.

fastpipe trusts the content of a cache when it reads the cache again.  So no other user may be able to
write to the cache.  A folder of another user is not used.  Links are not followed.  An opened folder stays
the same if a folder above it is renamed.  An interrupted write leaves no incomplete file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from fastpipe.core.files import DESCRIPTORS, UNFINISHED, open_regular, write_whole
from fastpipe.errors import CacheError, FastpipeError

_ABANDONED_S = 3600.0  # an unfinished file of this age is taken as left over by a process that was killed


def user_cache_folder() -> Path:
    """Return fastpipe's folder in the user's cache folder: ``~/.cache/fastpipe``, unless ``XDG_CACHE_HOME``
    names another cache folder.  The returned folder may not exist yet."""
    import platformdirs  # imported here, because most programs never need it

    return platformdirs.user_cache_path("fastpipe", appauthor=False)


def made_folder(path: str | os.PathLike[str], mode: int = 0o700) -> Path:
    """Create a folder and its parents if they are missing, and return the folder.

    Other users cannot write to the created folders.  Raise an OSError if the folder cannot be created, or if
    ``path`` is not a folder.
    """
    path = Path(path)
    if not path.is_dir():
        for folder in (*reversed(path.parents), path):
            if not folder.is_dir():  # a link to a folder counts as a folder
                with contextlib.suppress(FileExistsError):  # another process was first
                    folder.mkdir(mode if folder == path else 0o755)
    return path


class PrivateFolder:
    """An open folder that only this user can access.  All access goes through the folder's descriptor.

    A missing folder is created with mode 0700, and missing parents are created too.  ``error`` is raised for
    a folder that is a link, belongs to another user, or is accessible to other users.  The error's message
    calls the folder ``called``.  If ``IS_PINNED`` (on Linux), paths from ``here`` stay valid when the folder
    is moved.

    >>> with PrivateFolder(getfixture("tmp_path") / "cache") as folder:
    ...     folder.write("x", lambda file: file.write(b"1"))
    ...     folder.read("x")
    b'1'
    """

    IS_PINNED = bool(DESCRIPTORS)
    _descriptor = -1

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        called: str = "cache folder",
        error: type[FastpipeError] = CacheError,
    ) -> None:
        self.path = Path(path)
        self._called, self._error = called, error
        try:
            made_folder(self.path)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags)
        except OSError as raised:
            why = "it is a link" if self.path.is_symlink() else raised.strerror or raised
            raise error(
                f"the {called} {str(self.path)!r} cannot be used: {why}. "
                "Name another one, or make it a folder of your own"
            ) from raised
        try:
            self._check()
        except BaseException:
            self.close()
            raise
        self._remove_abandoned()

    def here(self, name: str = "") -> str:
        """Return the path of a file in this folder.  The path is valid in this process and its forks while
        this object is open."""
        folder = f"{DESCRIPTORS}/{self._descriptor}" if self.IS_PINNED else str(self.path)
        return f"{folder}/{name}" if name else folder

    def read(self, name: str) -> bytes | None:
        """Return the content of a file in the folder; None if the file does not exist."""
        try:
            descriptor = self.open(name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            return file.read()

    def open(self, name: str, flags: int) -> int:
        """Open a file in the folder, and return its descriptor.  ``O_CREAT`` creates a file of mode 0600.
        Raise the errors of ``os.open``, and an OSError for a link or a file that is not regular."""
        return open_regular(name, flags, 0o600, dir_fd=self._descriptor)

    def stat(self, name: str) -> os.stat_result:
        """Return the status of a file in the folder.  A link is not followed."""
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def rename(self, name: str, to: str) -> None:
        os.replace(name, to, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def write(self, name: str, fill: Callable[[BinaryIO], object], *, sync: bool = True) -> None:
        """Create or replace a file atomically, so a reader finds the complete old or the complete new file.

        Without ``sync``, a crash of the machine may leave an empty file.  If the content cannot be written,
        the method raises an OSError and changes nothing.
        """
        temporary = Path(f"{name}.{os.getpid()}.{secrets.token_hex(4)}{UNFINISHED}")
        write_whole(name, fill, sync=sync, mode=0o600, unfinished=temporary, dir_fd=self._descriptor)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    def names(self) -> list[str]:
        return [name for name in os.listdir(self._descriptor) if not name.endswith(UNFINISHED)]

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        status = os.fstat(self._descriptor)
        if status.st_uid != os.geteuid():
            raise self._error(
                f"the {self._called} {str(self.path)!r} belongs to user {status.st_uid}, not to user "
                f"{os.geteuid()}, who runs this: files that other users can write are not read. Choose a "
                "folder of your own"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise self._error(
                f"the {self._called} {str(self.path)!r} is open to other users (mode "
                f"{stat.S_IMODE(status.st_mode):04o}). Close it with:  chmod 700 {str(self.path)!r}"
            )

    def _remove_abandoned(self) -> None:
        """Remove unfinished files of processes that were killed during writing."""
        for name in os.listdir(self._descriptor):
            if not name.endswith(UNFINISHED):
                continue
            with contextlib.suppress(OSError):
                if time.time() - self.stat(name).st_mtime > _ABANDONED_S:
                    self.remove(name)
