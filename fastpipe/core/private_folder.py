"""Folders for caches and stages: only their owner may enter, links are not followed, files appear whole.

The content of a cache is trusted when it is read again.  So no other user may be able to put
anything there: not in a folder that another user made first, not through a link, not by renaming
a folder above it and making another, and not by an interrupted write.
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

_ABANDONED_S = 3600.0  # age of an unfinished file at which its writer counts as dead


def user_cache_folder() -> Path:
    """Return fastpipe's folder in the user's cache folder (``~/.cache/fastpipe``, or as ``XDG_CACHE_HOME``
    says), which need not exist."""
    import platformdirs  # most programs never need it

    return platformdirs.user_cache_path("fastpipe", appauthor=False)


def made_folder(path: str | os.PathLike[str], mode: int = 0o700) -> Path:
    """Create a folder and its parents if they are missing, not writable by others, and return it.

    Raise an OSError if it cannot be created, or if its path is not a folder.
    """
    path = Path(path)
    if not path.is_dir():
        for folder in (*reversed(path.parents), path):
            if not folder.is_dir():  # a link to a folder counts as one
                with contextlib.suppress(FileExistsError):  # another process was first
                    folder.mkdir(mode if folder == path else 0o755)
    return path


class PrivateFolder:
    """An open folder of this user alone; all access goes through its descriptor.

    It is created with mode 0700 if it is missing, and so are its parents.  It is an error (of type ``error``,
    which names it ``called``) if it is a link, belongs to another user, or is accessible to others.
    ``IS_PINNED`` says whether ``here`` stays valid whatever happens to the folder's path, as on Linux.

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
        """Return a path of a file in this folder, valid while this is open, in this process and its forks."""
        folder = f"{DESCRIPTORS}/{self._descriptor}" if self.IS_PINNED else str(self.path)
        return f"{folder}/{name}" if name else folder

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None if there is none."""
        try:
            descriptor = self.open(name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            return file.read()

    def open(self, name: str, flags: int) -> int:
        """Return a descriptor of a file in the folder; ``O_CREAT`` creates it with mode 0600.

        It raises the errors of ``os.open``, and an OSError for a link or a file that is not regular.
        """
        return open_regular(name, flags, 0o600, dir_fd=self._descriptor)

    def stat(self, name: str) -> os.stat_result:
        """Return the state of a file in the folder, or of a link itself."""
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def rename(self, name: str, to: str) -> None:
        os.replace(name, to, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def write(self, name: str, fill: Callable[[BinaryIO], object], *, sync: bool = True) -> None:
        """Create or replace a file atomically: a reader finds all of the old or all of the new file.

        Without ``sync`` a crash of the machine may leave the name without content.  If the content cannot
        be written, an OSError is raised, and nothing has changed.
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
        """Remove unfinished files of processes that were killed while writing."""
        for name in os.listdir(self._descriptor):
            if not name.endswith(UNFINISHED):
                continue
            with contextlib.suppress(OSError):
                if time.time() - self.stat(name).st_mtime > _ABANDONED_S:
                    self.remove(name)
