"""Reads and writes whole files, and gives them their names; without following links."""

from __future__ import annotations

import contextlib
import os

from fastpipe.core.files import open_regular, rename_anew

__all__ = ["move_file", "new_file", "read_file", "write_file"]


def read_file(path: str, size: int) -> bytes:
    """A file's content, if it has a size; of a longer one a byte more, and of a shorter one what there is.

    Raises:
        OSError: it is not there, or cannot be read.
    """
    descriptor = open_regular(path)
    try:
        data = os.read(descriptor, size + 1)
        while len(data) < size and (more := os.read(descriptor, size + 1 - len(data))):
            data += more
        return data
    finally:
        os.close(descriptor)


def new_file(path: str) -> int:
    """Make a file, with mode 0600; a descriptor to write to it.

    Raises:
        OSError: there is one, or none can be made.
    """
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def write_file(path: str, data: bytes) -> None:
    """Make a file with a content.

    Raises:
        OSError: there is one, or there is no room.
    """
    descriptor = new_file(path)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


def move_file(path: str, name: str) -> bool:
    """Give a file another name, unless there is one of that name; whether it was given.

    The last folder of the name is made where it is missing, and none above it.

    Raises:
        OSError: it cannot be done.
    """
    try:
        try:
            _rename(path, name)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(name), 0o700)
            _rename(path, name)
    except FileExistsError:
        return False
    return True


def _rename(path: str, name: str) -> None:
    """Rename a file, but never over another one."""
    if not rename_anew(path, name):
        os.unlink(path)
