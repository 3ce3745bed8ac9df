"""Folders for caches: only their owner may enter, links are not followed, files appear whole.

What lies in a cache is trusted when it is read again.  So nobody else may be able to put
anything there: not in a folder that another user made first, not through a link, and not
by a write that was cut off in the middle.
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

from fastpipe.errors import CacheError

__all__ = ["PrivateFolder", "user_cache_folder"]

_UNFINISHED = ".unfinished"
_ABANDONED_S = 3600.0  # age of an unfinished file at which whoever wrote it is taken for dead


def user_cache_folder() -> Path:
    """fastpipe's folder in the user's cache folder (``~/.cache/fastpipe``, or as ``XDG_CACHE_HOME`` says).

    It need not exist.
    """
    import platformdirs  # most programs never need it

    return platformdirs.user_cache_path("fastpipe", appauthor=False)


class PrivateFolder:
    """A folder that is nobody else's, opened; all access goes through its descriptor.

    Args:
        path: the folder.  It is made if it is missing, with mode 0700, and so are its parents.

    Raises:
        CacheError: it is a link or no folder, belongs to somebody else, lets others in, or cannot
            be made.

    >>> with PrivateFolder(getfixture("tmp_path") / "cache") as folder:
    ...     folder.write("x", lambda file: file.write(b"1"))
    ...     folder.read("x")
    b'1'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor = -1
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags)
        except OSError as error:
            raise CacheError(
                f"the cache folder {str(self.path)!r} cannot be used: {error.strerror or error}. "
                "Name another one, or make it a folder of your own"
            ) from error
        try:
            self._check()
        except BaseException:
            self.close()
            raise
        self._remove_abandoned()

    def read(self, name: str) -> bytes | None:
        """A file's content; None if there is none."""
        try:
            descriptor = self.open(name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            return file.read()

    def open(self, name: str, flags: int) -> int:
        """A descriptor of a file in the folder, which is made with mode 0600 under ``O_CREAT``.

        Raises:
            OSError: as ``os.open`` does; also for a link.
        """
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._descriptor)

    def write(self, name: str, fill: Callable[[BinaryIO], object], *, sync: bool = True) -> None:
        """Make or replace a file: whoever reads it finds all of the old or all of the new one.

        Args:
            name: the file's name.
            fill: writes the content to the file that it is given.
            sync: wait for the disk; else a crash of the machine may leave the name without content.

        Raises:
            OSError: the content cannot be written; nothing has changed then.
        """
        temporary = f"{name}.{os.getpid()}.{secrets.token_hex(4)}{_UNFINISHED}"
        try:
            with os.fdopen(self.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                fill(file)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            os.replace(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            self.remove(temporary)
            raise

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    def names(self) -> list[str]:
        """The names of the files."""
        return [name for name in os.listdir(self._descriptor) if not name.endswith(_UNFINISHED)]

    def close(self) -> None:
        """Close the descriptor."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        status = os.fstat(self._descriptor)
        if status.st_uid != os.geteuid():
            raise CacheError(
                f"the cache folder {str(self.path)!r} belongs to user {status.st_uid}, not to user "
                f"{os.geteuid()}, who runs this: what others can write is not read. Name a folder of your own"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise CacheError(
                f"the cache folder {str(self.path)!r} lets other users in (mode "
                f"{stat.S_IMODE(status.st_mode):04o}). Close it with:  chmod 700 {str(self.path)!r}"
            )

    def _remove_abandoned(self) -> None:
        """Remove what processes left that were killed while they wrote."""
        for name in os.listdir(self._descriptor):
            if not name.endswith(_UNFINISHED):
                continue
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
                if time.time() - status.st_mtime > _ABANDONED_S:
                    self.remove(name)
