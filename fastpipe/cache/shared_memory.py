"""Files in memory, which several processes of a machine have open."""

from __future__ import annotations

import os
import tempfile

__all__ = ["anonymous_file", "descriptor_of"]

_NAME = "fastpipe-cache"


def anonymous_file() -> int:
    """A file in memory without a name: it goes with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(_NAME, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


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
