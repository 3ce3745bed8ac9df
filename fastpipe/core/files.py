"""Reading files safely: a fifo does not hang, a directory does not confuse, a short read is continued."""

from __future__ import annotations

import errno
import os
import stat
from typing import Any

from fastpipe._nvtx import ranged

__all__ = ["FLAGS", "is_hdf5", "read_at", "read_file"]

# A fifo named x.jpg would block open() until somebody writes; O_NONBLOCK returns at once.
FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

_SIGNATURE = b"\x89HDF\r\n\x1a\n"  # of HDF5 files


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
    descriptor = os.open(path, FLAGS)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", path)
        return _read_all(descriptor, status.st_size)
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
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        end, at = os.fstat(file.fileno()).st_size, 0
        while at < end:
            file.seek(at)
            if file.read(len(_SIGNATURE)) == _SIGNATURE:
                return True
            at = 2 * at or 512
    return False
