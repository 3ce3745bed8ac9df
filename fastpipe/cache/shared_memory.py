"""Files in memory, which several processes of a machine have open."""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
import numpy.typing as npt

__all__ = ["anonymous_file", "descriptor_of", "mapped"]

_NAME = "fastpipe-cache"


def anonymous_file() -> int:
    """A file in memory without a name: it goes with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(_NAME, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def mapped(descriptor: int, nbytes: int, protection: int = mmap.PROT_READ) -> npt.NDArray[np.uint8] | None:
    """A file as an array; None where there is no room for it among the process's addresses."""
    try:
        return np.frombuffer(mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, protection), np.uint8)
    except (OSError, ValueError, OverflowError):
        return None


def descriptor_of(pid: int, number: int, inode: int) -> int:
    """Open the file in memory that another process has at a descriptor.

    Raises:
        OSError: there is none, or it is another one.
    """
    path = f"/proc/{pid}/fd/{number}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise FileNotFoundError(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(descriptor).st_ino != inode:
        os.close(descriptor)  # nobody's lock: what was announced has this inode
        raise FileNotFoundError(path)
    return descriptor
