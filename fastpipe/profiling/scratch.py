"""Folders for what a profile writes, that are removed also where it was killed: by the next one."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

if sys.platform != "win32":
    import fcntl

__all__ = ["Scratch"]

_PREFIX = "fastpipe-profile-"
_YOUNG_S = 60.0  # in which whoever makes a folder has locked it


class Scratch:
    """An empty folder in the one for temporary files; all of it goes with ``close``.

    It is locked for as long as this process, or one that it has forked, lives: so others see which are left.

    Attributes:
        path: of the folder.

    >>> scratch = Scratch()
    >>> os.listdir(scratch.path)
    []
    >>> scratch.close()
    >>> os.path.exists(scratch.path)
    False
    """

    def __init__(self) -> None:
        _remove_left()
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        self._lock = _locked(self.path)

    def close(self) -> None:
        """Remove the folder."""
        for _ in range(2):  # as the first ignores what a signal's handler raises, like an error of its own
            if os.path.isdir(self.path):
                shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked(path: str | os.PathLike[str]) -> int | None:
    """A descriptor of a folder that nobody else has locked; None if somebody has, or that cannot be told."""
    if sys.platform == "win32":
        return None
    descriptor = None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def _remove_left() -> None:
    """Remove folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or one that is removed just now
            if time.time() - folder.stat().st_mtime < _YOUNG_S:
                continue
            lock = _locked(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
