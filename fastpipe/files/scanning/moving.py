"""Moves a file so that at every moment it is whole under one of its names, and nothing is overwritten."""

from __future__ import annotations

import contextlib
import errno
import filecmp
import os
import re
import secrets
import shutil
import stat

__all__ = ["check_free", "move", "remove_unfinished", "sync_folder"]

_UNFINISHED = ".unfinished"
_LEFT = re.compile(r"\.\d+\.[0-9a-f]{8}\.unfinished$")
# What file systems without hard links say, those that let only owners make them, and at too many.
_NO_LINK = {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK}


def move(source: str, target: str) -> None:
    """Move a file, or a link itself, also to another file system.

    The target is complete, and on the disk, before the source goes.  Ended in between, both are there, and
    the same call goes on.

    Args:
        source: a regular file or a symbolic link.
        target: where to; folders on the way are made.

    Raises:
        FileExistsError: something else is there.
        OSError: it cannot be moved; then it is where it was.
    """
    os.makedirs(os.path.dirname(target), exist_ok=True)
    check_free(source, target)
    if not os.path.lexists(target):
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as error:
            if error.errno == errno.EXDEV:
                _copy(source, target)
            elif error.errno in _NO_LINK:
                _rename(source, target)
                sync_folder(os.path.dirname(target))
                return
            else:
                raise
    sync_folder(os.path.dirname(target))
    os.unlink(source)


def check_free(source: str, target: str) -> None:
    """Raise an error if there is something at the target that is not the source, of a move that was ended.

    Raises:
        FileExistsError: there is.
    """
    if os.path.lexists(target) and not _are_same(source, target):
        raise FileExistsError(errno.EEXIST, f"{target} is there already", target)


def _rename(source: str, target: str) -> None:
    """Where there are no hard links; whoever puts a file there within these lines loses it."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy(source, target)
        sync_folder(os.path.dirname(target))
        os.unlink(source)


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
        _take_name(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def _take_name(beside: str, target: str) -> None:
    try:
        os.link(beside, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        os.rename(beside, target)
        return
    os.unlink(beside)


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
