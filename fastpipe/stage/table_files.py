"""Files of tables: which objects of a listing are staged, mapped to memory by all who use it."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import numpy.typing as npt

from fastpipe.stage.locks import LockFile

__all__ = ["HEAD", "NAME", "names_in_use", "open_table_file"]

NAME = np.dtype([("first", "<u8"), ("second", "<u8")])
HEAD = 16  # bytes before the names: which order those follow who may make room
_USERS = 1 << 60  # a byte that is locked, far behind those that there are: by who uses the table


def open_table_file(path: str, nbytes: int) -> LockFile:
    """A table's file, of at least a length, in use."""
    while True:
        locks = LockFile(path)
        try:
            is_alone = locks.take(_USERS)
            if is_alone and os.fstat(locks.descriptor).st_size != nbytes:  # new; or of no use
                os.ftruncate(locks.descriptor, 0)
            locks.stay(_USERS)
            if os.fstat(locks.descriptor).st_size < nbytes:
                # With its blocks: where a full disk has none, writing to the memory would end the process.
                os.posix_fallocate(locks.descriptor, 0, nbytes)
            if locks.is_at_its_path():  # nobody has removed it between opening and locking
                return locks
        except BaseException:
            locks.close()
            raise
        locks.close()


def names_in_use(path: str) -> npt.NDArray[np.uint64]:
    """Beginnings of the names of the staged objects in a table that processes use; else it is removed."""
    none = np.zeros(0, np.uint64)
    try:
        locks = LockFile(path, makes=False)
    except FileNotFoundError:
        return none
    try:
        if locks.take(_USERS):
            with contextlib.suppress(FileNotFoundError):
                if locks.is_at_its_path():
                    os.unlink(path)
            return none
        data = os.pread(locks.descriptor, os.fstat(locks.descriptor).st_size, HEAD)
        firsts = np.frombuffer(data, NAME, count=len(data) // NAME.itemsize)["first"]
        staged: npt.NDArray[np.uint64] = firsts[firsts != 0]
        return staged
    finally:
        locks.close()
