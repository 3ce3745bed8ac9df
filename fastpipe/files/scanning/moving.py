"""Moves a file so that at every moment it is whole under one of its names, and nothing is overwritten."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import filecmp
import os
import re
import secrets
import shutil
import stat
import sys
from typing import Any

__all__ = ["check_free", "move", "remove_unfinished", "rename_anew", "sync_folder"]

_UNFINISHED = ".unfinished"
_LEFT = re.compile(r"\.\d+\.[0-9a-f]{8}\.unfinished$")
# What file systems without hard links say, those that let only owners make them, and at too many.
_NO_LINK = {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK}

_HERE, _NOREPLACE = -100, 1


def _linux_call() -> Any:
    """Linux's call that renames only where nothing is, for which Python has no name; None elsewhere."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


_renameat2 = _linux_call()


def move(source: str, target: str) -> None:
    """Move a file, or a link itself, also to another file system.

    At every moment it is whole under one of its names.  To another file system it is copied: the copy is
    complete, and on the disk, before the source goes.  Ended in between both are there, and the same call
    goes on.

    Args:
        source: a regular file or a symbolic link.
        target: where to; folders on the way are made.

    Raises:
        FileExistsError: something else is there.
        OSError: it cannot be moved; then it is where it was.
    """
    os.makedirs(os.path.dirname(target), exist_ok=True)
    check_free(source, target)
    is_moved = False
    if not os.path.lexists(target):
        try:
            is_moved = rename_anew(source, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _copy(source, target)
    sync_folder(os.path.dirname(target))
    if not is_moved:
        os.unlink(source)
    sync_folder(os.path.dirname(source))


def check_free(source: str, target: str) -> None:
    """Raise an error if there is something at the target that is not the source, of a move that was ended.

    Raises:
        FileExistsError: there is.
    """
    if os.path.lexists(target) and not _are_same(source, target):
        raise FileExistsError(errno.EEXIST, f"{target} is there already", target)


def rename_anew(source: str, target: str) -> bool:
    """Rename a file without taking another one's place.

    Returns:
        True; False where it has both names now, and the first one is still to be removed.

    Raises:
        FileExistsError: there is something at the target.
        OSError: it cannot be renamed: with EXDEV to another file system.
    """
    if _renameat2 is not None:
        if _renameat2(_HERE, os.fsencode(source), _HERE, os.fsencode(target), _NOREPLACE) == 0:
            return True
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS):  # of a file system, or kernel, without this flag
            raise OSError(number, os.strerror(number), source, None, target)
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        # Whoever puts a file there between these lines loses it.
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        os.rename(source, target)
        return True
    return False


def _copy(source: str, target: str) -> None:
    """Copy to a name of its own beside the target, which it then takes."""
    beside = f"{target}.{os.getpid()}.{secrets.token_hex(4)}{_UNFINISHED}"
    try:
        if stat.S_ISLNK(os.lstat(source).st_mode):
            os.symlink(os.readlink(source), beside)
        else:
            with open(source, "rb") as old, open(beside, "xb") as new:
                shutil.copyfileobj(old, new, 1 << 20)
                new.flush()
                shutil.copystat(source, beside)
                os.fsync(new.fileno())
        if not rename_anew(beside, target):
            os.unlink(beside)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def _are_same(source: str, target: str) -> bool:
    """Whether a move was ended between its two steps."""
    old, new = os.lstat(source), os.lstat(target)
    if os.path.samestat(old, new):
        return True
    if stat.S_ISLNK(old.st_mode) or stat.S_ISLNK(new.st_mode):
        both_links = stat.S_IFMT(old.st_mode) == stat.S_IFMT(new.st_mode)
        return both_links and os.readlink(source) == os.readlink(target)
    return stat.S_ISREG(new.st_mode) and filecmp.cmp(source, target, shallow=False)


def sync_folder(folder: str) -> None:
    """Have the names in a folder on the disk, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_unfinished(folder: str) -> None:
    """Remove what copies left in a folder whose process was killed."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if _LEFT.search(name):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, name))
