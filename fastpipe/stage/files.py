"""Reads and writes whole files, and gives them their names; without following links."""

from __future__ import annotations

import contextlib
import os

__all__ = ["link_file", "read_file", "write_file"]


def read_file(path: str, size: int) -> bytes:
    """A file's content, if it has a size; of a longer one a byte more, and of a shorter one what there is.

    Raises:
        OSError: it is not there, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        data = os.read(descriptor, size + 1)
        while len(data) < size and (more := os.read(descriptor, size + 1 - len(data))):
            data += more
        return data
    finally:
        os.close(descriptor)


def write_file(path: str, data: bytes) -> None:
    """Make a file, with mode 0600.

    Raises:
        OSError: there is one, or there is no room.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


def link_file(path: str, name: str) -> bool:
    """Give a file another name as well, unless there is one of that name; whether it was given.

    The last folder of the name is made where it is missing, and none above it.

    Raises:
        OSError: it cannot be done.
    """
    try:
        try:
            os.link(path, name)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(name), 0o700)
            os.link(path, name)
    except FileExistsError:
        return False
    return True
