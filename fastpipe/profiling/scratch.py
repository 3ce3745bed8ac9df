"""Folders for what a profile writes, that are removed also where it was killed: by the next one."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

if sys.platform != "win32":
    import fcntl

__all__ = ["Scratch"]

_PREFIX, _LOCK = "fastpipe-profile-", ".lock"
_YOUNG_S = 60.0  # in which whoever makes a folder has locked it


class Scratch:
    """A folder of its own in the one for temporary files; all of it goes with ``close``.

    A file in it is locked for as long as this process, or one that it has forked, lives: so others see which
    folders are left.

    Attributes:
        path: of the folder.

    >>> scratch = Scratch()
    >>> os.listdir(scratch.path)
    ['.lock']
    >>> scratch.close()
    >>> os.path.exists(scratch.path)
    False
    """

    def __init__(self) -> None:
        _remove_left()
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        self._lock = open(os.path.join(self.path, _LOCK), "wb")  # noqa: SIM115  # as long as this lives
        _is_locked(self._lock)

    def close(self) -> None:
        """Remove the folder; it may be called again, also after an exception of a signal's handler."""
        for _ in range(2):  # as the first ignores what such a handler raises, like an error of its own
            if os.path.isdir(self.path):
                shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _is_locked(file: BinaryIO) -> bool:
    """Whether a file is locked from now on, which nobody else had locked."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody has, or the file system has no locks
        return False
    return True


def _remove_left() -> None:
    """Remove folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, one that is removed just now, or none of these
            lock = folder / _LOCK
            if folder.is_symlink() or time.time() - lock.stat().st_mtime < _YOUNG_S:
                continue
            with lock.open("rb") as file:
                if _is_locked(file):
                    shutil.rmtree(folder, ignore_errors=True)
