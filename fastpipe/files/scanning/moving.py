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

from fastpipe.core.files import UNFINISHED, open_regular, rename_anew, sync_folder

__all__ = ["check_free", "move", "remove_unfinished"]

_LEFT = re.compile(r"\.\d+\.[0-9a-f]{8}\.unfinished$")


def move(source: str, target: str) -> None:
    """Move a file, or a link itself, also to another file system.

    At every moment it is whole under one of its names.  To another file system it is copied: the copy is
    complete, and on the disk, before the source goes.  Ended in between both are there, and the same call
    goes on.

    Args:
        source: a regular file or a symbolic link.
        target: where to; its folder is there.

    Raises:
        FileExistsError: something else is there.
        OSError: it cannot be moved; then it is where it was.
    """
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
        raise FileExistsError(errno.EEXIST, "a file of this name is there already", target)


def _copy(source: str, target: str) -> None:
    """Copy to a name of its own beside the target, which it then takes."""
    beside = f"{target}.{os.getpid()}.{secrets.token_hex(4)}{UNFINISHED}"
    try:
        if stat.S_ISLNK(os.lstat(source).st_mode):
            os.symlink(os.readlink(source), beside)
        else:
            with open(source, "rb", opener=open_regular) as old, open(beside, "xb") as new:
                shutil.copyfileobj(old, new, 1 << 20)
                new.flush()
                shutil.copystat(source, beside, follow_symlinks=False)
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


def remove_unfinished(folder: str) -> None:
    """Remove what copies of this user left in a folder whose process was killed."""
    with contextlib.suppress(OSError):
        for name in filter(_LEFT.search, os.listdir(folder)):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                if not hasattr(os, "geteuid") or os.lstat(path).st_uid == os.geteuid():
                    os.unlink(path)
