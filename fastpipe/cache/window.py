"""Decoded chunks in memory that the worker processes of a loader share for as long as they need them.

Each worker makes other batches of the same window of chunks.  Without such memory each would decode
all of them, and hold them.

A slot of the memory is written by who has its lock, which ends with the process that has it, however that
ends.  Who copies from a slot takes no lock but looks, before and behind, at the slot's version, which
is odd while somebody writes: a sequence lock.  So nobody who is killed or stopped spoils anything.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.cache.locks import locks_are_possible, try_to_lock, unlock, wait_for_lock
from fastpipe.cache.shared_memory import anonymous_file, descriptor_of, mapped

__all__ = ["SharedWindow", "WindowSlots"]

UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

_FIELDS = 5
_TRIES = 4  # slots that are tried before a chunk is not shared


class SharedWindow:
    """Memory for decoded chunks, made by the parent of the processes that will share it.

    Picklable: a copy in another process is of the same memory, or None where that is gone.  The memory
    is the machine's once something is written there, until nobody refers to it in any process.

    Args:
        slots: how many chunks it holds.
        slot_nbytes: of the largest.

    Raises:
        OSError: there can be none.
    """

    def __init__(self, slots: int, slot_nbytes: int) -> None:
        if not locks_are_possible():
            raise OSError("this system has no locks that end with their process")
        self._take(anonymous_file(), slots, slot_nbytes)
        os.truncate(self.descriptor, self.table_nbytes + slots * slot_nbytes)

    def _take(self, descriptor: int, slots: int, slot_nbytes: int) -> None:
        self.descriptor, self.slots, self.slot_nbytes = descriptor, slots, slot_nbytes
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False

    def close(self) -> None:
        """Give it up in this process; who has slots of it must not use them any more."""
        self._close()

    @property
    def table_nbytes(self) -> int:
        """Bytes in front of the first slot."""
        return -(-_FIELDS * 8 * self.slots // mmap.PAGESIZE) * mmap.PAGESIZE

    def __reduce__(self) -> tuple[Any, ...]:
        inode = os.fstat(self.descriptor).st_ino
        return _joined, (os.getpid(), self.descriptor, inode, self.slots, self.slot_nbytes)


def _joined(pid: int, number: int, inode: int, slots: int, slot_nbytes: int) -> SharedWindow | None:
    window = SharedWindow.__new__(SharedWindow)
    try:
        window._take(descriptor_of(pid, number, inode), slots, slot_nbytes)
    except OSError:
        return None
    return window


class WindowSlots:
    """The slots in one process.  For threads at once.

    Args:
        window: the memory.
        turn: where this process begins among the chunks of a batch, from 0 to 1: processes that begin at
            different ones seldom want the same at the same time.

    Attributes:
        turn: as given.
        memory: uint8: where slots lie at their offsets.

    Raises:
        OSError: there is no room for it among the process's addresses.
    """

    def __init__(self, window: SharedWindow, turn: float = 0.0) -> None:
        self._window, self.turn = window, turn
        size = window.table_nbytes + window.slots * window.slot_nbytes
        memory = mapped(window.descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE)
        if memory is None:
            raise OSError("its memory cannot be mapped")
        self.memory = memory
        table = self.memory[: _FIELDS * 8 * window.slots].view(np.int64).reshape(_FIELDS, window.slots)
        # Numbers of chunks are those plus 1, as what was never written is 0.  Left: samples to be taken yet.
        self._chunks, self._coming, self._versions, self._left, self._used = table
        self._lock = threading.Lock()
        self._mine: set[int] = set()  # slots that threads of this process write

    def find(self, chunk: int, *, waits: bool) -> tuple[int, int]:
        """Where a chunk begins in the memory, and its version; (-1, 0) where it is not there.

        Args:
            chunk: its number.
            waits: wait for another process that is decoding it.
        """
        slot, version = self._found(chunk)
        if slot < 0 and waits:
            coming = np.flatnonzero(self._coming == chunk + 1).tolist()
            if coming and self._is_waited_for(coming[0]):
                slot, version = self._found(chunk)
        return (self._offset(slot) if slot >= 0 else -1), version

    def _found(self, chunk: int) -> tuple[int, int]:
        for slot in np.flatnonzero(self._chunks == chunk + 1).tolist():
            version = int(self._versions[slot])
            if version % 2 == 0 and self._chunks[slot] == chunk + 1:
                return slot, version
        return -1, 0

    def _is_waited_for(self, slot: int) -> bool:
        """Wait until nobody writes a slot; False where one cannot, as it is a thread of this process."""
        with self._lock:
            if slot in self._mine:
                return False
        if not wait_for_lock(self._window.descriptor, slot):
            return False
        with self._lock:
            if slot not in self._mine:  # by now: the process has one lock for all of its threads
                unlock(self._window.descriptor, slot)
        return True

    def _offset(self, slot: int) -> int:
        return self._window.table_nbytes + slot * self._window.slot_nbytes

    def took(self, place: int, version: int, samples: int) -> bool:
        """Say that samples were copied from there; whether it was of that version all the time."""
        slot = (place - self._offset(0)) // self._window.slot_nbytes
        with self._lock:  # also keeps the processor from looking before it has copied
            if int(self._versions[slot]) != version:
                return False
            # Another process may do so at the same time, and one of both be lost: then the slot is
            # taken a little later, as the one that was not used for the longest time.
            self._left[slot] -= samples
            self._used[slot] = time.monotonic_ns()
            return True

    def claim(self, chunk: int, nbytes: int) -> WindowSlot | None:
        """A slot to decode a chunk into; None where there is none, or somebody is decoding it.

        Args:
            chunk: its number.
            nbytes: of it, decoded.
        """
        if nbytes > self._window.slot_nbytes:
            return None
        with self._lock:
            # One in which somebody had begun to decode this chunk can be had if that process is gone.
            coming = np.flatnonzero(self._coming == chunk + 1)
            for slot in (coming if len(coming) else self._free()).tolist():
                seen = int(self._versions[slot])
                if slot in self._mine or not try_to_lock(self._window.descriptor, slot):
                    continue
                if int(self._versions[slot]) != seen:  # another process has just written it
                    unlock(self._window.descriptor, slot)
                    continue
                self._mine.add(slot)
                version = (seen | 1) + 2  # odd, and never that of another who writes
                self._versions[slot] = version
                self._chunks[slot], self._coming[slot], self._left[slot] = 0, chunk + 1, 0
                start = self._offset(slot)
                return WindowSlot(self, slot, version, chunk, self.memory[start : start + nbytes])
        return None

    def _free(self) -> Int64Array:
        """Slots to write next: those of which all was taken, else those not used for the longest time."""
        idle = self._coming == 0
        free = np.flatnonzero(idle & (self._left <= 0))
        if len(free) >= _TRIES:  # other processes look for one at the same time
            return np.roll(free, -int(self.turn * len(free)))[:_TRIES]
        wanted = np.flatnonzero(idle & (self._left > 0))
        order = np.argsort(self._used[wanted], kind="stable")[: _TRIES - len(free)]
        return np.concatenate([free, wanted[order]])

    def _end(self, slot: int, version: int, chunk: int, left: int) -> bool:
        with self._lock:
            is_mine = int(self._versions[slot]) == version
            if is_mine:
                self._left[slot], self._used[slot] = left, time.monotonic_ns()
                self._chunks[slot], self._coming[slot] = chunk, 0
                self._versions[slot] = version + 1
            self._mine.discard(slot)
            unlock(self._window.descriptor, slot)
            return is_mine


class WindowSlot:
    """A slot that is being written.  A context manager: on the way out it is empty unless it was published.

    Attributes:
        memory: uint8, as many bytes as were asked for.
    """

    def __init__(self, slots: WindowSlots, slot: int, version: int, chunk: int, memory: UInt8Array) -> None:
        self._slots, self._slot, self._version, self._chunk = slots, slot, version, chunk
        self.memory = memory
        self._is_over = False

    def publish(self, left: int) -> bool:
        """Let others see the chunk; False where its memory was not this process's alone.

        Args:
            left: how many of its samples are to be taken yet.
        """
        self._is_over = True
        return self._slots._end(self._slot, self._version, self._chunk + 1, left)

    def __enter__(self) -> WindowSlot:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_over:
            self._slots._end(self._slot, self._version, 0, 0)
