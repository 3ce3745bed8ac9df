"""Folders for what a profile writes, that are removed also where it was killed: by the next one."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
import time

from fastpipe.core.files import folder_below, open_regular

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
        # As an object, which is closed with the last reference to it where ``close`` was interrupted.
        self._lock = os.fdopen(open_regular(os.path.join(self.path, _LOCK), os.O_RDWR | os.O_CREAT), "r+b")
        _is_locked(self._lock.fileno())

    def close(self) -> None:
        """Remove the folder; it may be called again, also after an exception of a signal's handler."""
        for _ in range(2):  # as the first ignores what such a handler raises, like an error of its own
            if os.path.isdir(self.path):
                shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _is_locked(descriptor: int) -> bool:
    """Whether a file is locked from now on, which nobody else had locked."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody has, or the file system has no locks
        return False
    return True


def _remove_left() -> None:
    """Remove folders of this user's processes that were killed; nothing of others is opened."""
    temporary = tempfile.gettempdir()
    for name in os.listdir(temporary):
        if not name.startswith(_PREFIX):
            continue
        with contextlib.suppress(OSError):  # one that is removed just now, or none of these
            status = os.lstat(os.path.join(temporary, name))
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != _user():
                continue
            with folder_below(temporary, name) as folder:
                if time.time() - os.lstat(os.path.join(folder, _LOCK)).st_mtime < _YOUNG_S:
                    continue
                lock = open_regular(os.path.join(folder, _LOCK), os.O_RDWR)
                try:
                    if _is_locked(lock):
                        shutil.rmtree(os.path.join(temporary, name), ignore_errors=True)
                finally:
                    os.close(lock)


def _user() -> int:
    """The number that this user's files have; 0 on Windows, as of all files there."""
    return os.geteuid() if hasattr(os, "geteuid") else 0
