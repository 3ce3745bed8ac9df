"""Reading files safely: a fifo does not hang, a directory does not confuse, a short read is continued."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastpipe._files import open_regular, require_regular, retrying_open
from fastpipe._nvtx import ranged

__all__ = [
    "FLAGS", "hdf5_signature", "is_hdf5", "lent", "open_file", "read_at", "read_file", "regular_status",
]  # fmt: skip

# A fifo named x.jpg would block open() until somebody writes; O_NONBLOCK returns at once.
FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

_SIGNATURE = b"\x89HDF\r\n\x1a\n"  # of HDF5 files


def open_file(path: str, flags: int = 0) -> int:
    """Open a regular file for reading; also the ``opener=`` of ``open``.

    Args:
        path: the file's path.
        flags: ignored.

    Returns:
        Its descriptor.

    Raises:
        OSError: as ``open`` raises it, and also for a directory, a fifo, a device.
    """
    return retrying_open(open_regular, path, follows=True)


@contextmanager
def lent(file: Any, path: str) -> Iterator[int]:
    """Give a ``with`` block the descriptor of a ``native.DataFile``, which may stay open for others.

    Args:
        file: the file.
        path: its path, for errors.

    Raises:
        OSError: as ``open`` raises it; with ``errno.ESTALE`` where the file is not as it was described.
    """
    try:
        held = retrying_open(file.lend)
    except OSError as error:
        error.filename = path
        raise
    try:
        yield held.descriptor
    finally:
        held.give_back()


def regular_status(path: str) -> os.stat_result:
    """Return the status of a regular file that a library is to open by its path.

    Raises:
        OSError: as of ``open_file``.
    """
    status = os.stat(path)
    require_regular(path, status)
    return status


@ranged("read")
def read_file(path: str) -> bytes:
    """Read a regular file.

    Args:
        path: the file's path.

    Returns:
        The whole content.

    Raises:
        OSError: as ``open`` raises it, and also for a directory, a fifo, a device.
    """
    descriptor = open_file(path)
    try:
        return _read_all(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def _read_all(descriptor: int, size: int) -> bytes:
    """Read to the end.  The first read nearly always returns everything."""
    block = os.read(descriptor, size + 1)
    if len(block) == size:
        return block
    blocks = [block]
    while block:
        block = os.read(descriptor, 1 << 20)
        blocks.append(block)
    return b"".join(blocks)


def read_at(descriptor: int, memory: Any, offset: int) -> int:
    """Fill memory with bytes of a file, with as many reads as that takes.

    Args:
        descriptor: the file's.
        memory: an array or a view of uint8, C-contiguous.
        offset: of the first of these bytes in the file.

    Returns:
        How many bytes were read: fewer than there is memory for only where the file ends.

    Raises:
        OSError: the file cannot be read.
    """
    view, done = memoryview(memory), 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def is_hdf5(path: str) -> bool:
    """Whether there is a file with HDF5's signature, which stands at its begin or behind a user block.

    Raises:
        OSError: it cannot be read.
    """
    return hdf5_signature(path) is not None


def hdf5_signature(path: str) -> int | None:
    """Return where HDF5's signature stands in a file; None if it has none, or is no regular file.

    Raises:
        OSError: it cannot be read.
    """
    if not os.path.isfile(path):
        return None
    with open(path, "rb", opener=open_file) as file:
        end, at = os.fstat(file.fileno()).st_size, 0
        while at < end:
            file.seek(at)
            if file.read(len(_SIGNATURE)) == _SIGNATURE:
                return at
            at = 2 * at or 512
    return None
