"""Memory for decoded units, private to this process or shared by several processes.

A *unit* is the smallest part of a volume that is decoded on its own.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.locks import locks_are_possible
from fastpipe.core.native import native
from fastpipe.core.shared_memory import (
    Announced,
    announce,
    announced,
    anonymous_file,
    descriptor_of,
    mapped,
    meeting_folder,
    meeting_name,
)

_LINE = 64


def private_units(keys: int, slots: int, nbytes: int) -> Any:
    """Return memory for decoded units (``native.UnitMemory``) that only this process uses.

    ``keys`` is the number of all units, and ``nbytes`` is the size of a decoded unit.  The memory holds at
    most ``slots`` units at a time."""
    each = slot_nbytes(nbytes)
    memory = mmap.mmap(-1, native.UnitMemory.nbytes(keys, slots, each), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return native.UnitMemory(np.frombuffer(memory, np.uint8), -1, keys, slots, each)


def slot_nbytes(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _LINE) * _LINE


class UnitFile:
    """Memory for decoded units that several processes share.  The arguments are those of ``private_units``.

    Unpickling in another process gives an object with access to the same memory, or None if the memory no
    longer exists.  Unpickling in this process gives this object.  The system allocates the memory when data
    are written, and frees the memory when no process refers to it any more.  The constructor raises an
    OSError if the memory cannot be created.
    """

    def __init__(self, keys: int, slots: int, nbytes: int) -> None:
        if not locks_are_possible():
            raise OSError("this system has no locks that end with their process")
        shape = keys, slots, slot_nbytes(nbytes)
        try:
            size = native.UnitMemory.nbytes(*shape)
        except (TypeError, ValueError) as error:  # the numbers are too large
            raise OSError(f"{slots:,} slots of {nbytes:,} bytes: {error}") from None
        self._take(anonymous_file(), *shape)
        os.truncate(self.descriptor, size)

    def _take(self, descriptor: int, keys: int, slots: int, nbytes: int) -> None:
        self.descriptor, self._shape = descriptor, (keys, slots, nbytes)
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False
        self._here: tuple[int, weakref.ref[Any]] | None = None
        _files[os.fstat(descriptor).st_ino] = self

    @property
    def slots(self) -> int:
        return self._shape[1]

    @property
    def nbytes(self) -> int:
        return int(native.UnitMemory.nbytes(*self._shape))

    def close(self) -> None:
        """Release the memory in this process, which must not use the memory any more."""
        if self._close.alive:
            _files.pop(os.fstat(self.descriptor).st_ino, None)
        self._close()

    def opened(self) -> Any:
        """Return this process's ``native.UnitMemory``.  All threads of the process must use this one object,
        because the memory's locks exclude only other processes."""
        with _opening:
            pid, units = os.getpid(), None
            if self._here is not None:
                units = self._here[1]()
                if units is not None and self._here[0] != pid:
                    # The object is a copy of the parent's object.  Keep it, because closing its descriptor
                    # would release the locks of this process.
                    _inherited.append(units)
                    units = None
            if units is None:
                data = mapped(self.descriptor, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
                if data is None:
                    raise OSError("its memory cannot be mapped")
                units = native.UnitMemory(np.asarray(_Mapping(self, data)), self.descriptor, *self._shape)
                self._here = pid, weakref.ref(units)
            return units

    def __reduce__(self) -> tuple[Any, ...]:
        inode = os.fstat(self.descriptor).st_ino
        return UnitFile.joined, (os.getpid(), self.descriptor, inode, self._shape)

    @staticmethod
    def joined(pid: int, number: int, inode: int, shape: tuple[int, int, int]) -> UnitFile | None:
        """Return the memory that the process ``pid`` has open at the descriptor ``number``.  Return None if
        there is none.  ``shape`` is the number of keys, the number of slots and the bytes of a slot."""
        # Open the memory only once in a process: closing a second descriptor would release the locks.
        known = _files.get(inode)
        if known is not None:
            return known if known._shape == shape else None
        file = UnitFile.__new__(UnitFile)
        try:
            descriptor = descriptor_of(pid, number, inode)
        except OSError:
            return None
        file._take(descriptor, *shape)
        return file if os.fstat(descriptor).st_size == file.nbytes else None


class _Mapping:
    """An object that keeps a file open while the file's memory is in use."""

    def __init__(self, file: UnitFile, data: npt.NDArray[np.uint8]) -> None:
        self._kept = file, data
        self.__array_interface__ = data.__array_interface__


_files: weakref.WeakValueDictionary[int, UnitFile] = weakref.WeakValueDictionary()
_inherited: list[Any] = []
_opening = threading.Lock()


def _forget_lock() -> None:
    global _opening
    _opening = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


# Memory for decoded units that independent processes share.


def joined_memory(what: str, keys: int, slots: int, nbytes: int) -> UnitFile:
    """Return memory for decoded units that all processes of this user on this machine share.

    ``what`` identifies the data of the units.  Processes with equal ``what``, ``keys`` and ``nbytes`` share
    memory.  If this memory exists already, ``slots`` is ignored: the memory keeps its number of slots.
    """
    digest = hashlib.sha256(os.fsencode(f"units 2 {what} {keys} {slot_nbytes(nbytes)}")).hexdigest()[:32]
    with meeting_folder() as folder:
        name = meeting_name(digest)
        for found in announced(folder, name):
            memory = _announced_memory(found, keys, slot_nbytes(nbytes))
            if memory is not None:
                break
            folder.remove(found.note)
        else:
            memory = UnitFile(keys, slots, nbytes)
        announce(folder, name, [memory.descriptor], {"slots": memory.slots}, memory)
        return memory


def _announced_memory(found: Announced, keys: int, nbytes: int) -> UnitFile | None:
    """Return the memory that another process has announced.  Return None if it differs from its
    announcement."""
    try:
        (number,), (inode,) = found.numbers, found.inodes
        return UnitFile.joined(found.pid, number, inode, (keys, int(found.about["slots"]), nbytes))
    except (ValueError, KeyError, TypeError):
        return None
