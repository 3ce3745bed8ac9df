"""Batch memory that is used again once nobody can see the batch any more."""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["KEPT_SLOTS", "Lease", "SlotPool"]

# Batches in the user's hands, on their way there and, where a loader begins them ahead, begun.
KEPT_SLOTS = 3

_LINE = 64
_PATIENCE = 16  # smaller batches in a row until the larger slots are given up


class Lease:
    """Owns a slot's memory while any array or tensor over it lives.

    NumPy makes this object the base of the array made from it, and every view, tensor and
    DLPack capsule keeps that base alive.  (A finalizer on the array itself would be wrong:
    a view of a view refers to the first owner and skips the array in between.)
    """

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__


class _SlotLease(Lease):
    """One of a pool's slots, which gets it back.  (``weakref.finalize`` would take as long as all the rest
    of ``SlotPool.take``.)"""

    __slots__ = ("_pool",)

    def __init__(self, memory: npt.NDArray[np.uint8], pool: SlotPool) -> None:
        super().__init__(memory)
        self._pool = weakref.ref(pool)  # last: with it, it is whole

    def __del__(self) -> None:
        # Ctrl-C may have come while it was made.
        pool = self._pool() if hasattr(self, "_pool") else None
        if pool is not None:
            pool._put(self._memory)


class SlotPool:
    """Hands out arrays and takes their memory back when their last view is gone.

    Never waits: with no free slot it allocates.  Keeps at most ``keep`` free slots, all of the
    largest size asked for of late: a short last batch finds room in them, and once only smaller
    batches have come for a while they are dropped.

    Args:
        keep: how many free slots are kept for reuse; may be changed at any time.
    """

    def __init__(self, keep: int) -> None:
        # No lock: a finalizer may run inside any of these methods, and a fork at any time.
        # Appending to and popping from a deque are atomic, and a slot too many does no harm.
        self.keep = keep
        self._free: deque[npt.NDArray[np.uint8]] = deque()
        self._size = 0
        self._smaller, self._largest = 0, 0  # smaller batches since the last large one

    def take(self, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
        """An uninitialised C-contiguous array that is nobody else's while any view of it lives.

        Args:
            shape, dtype: of the array.
        """
        size = math.prod(shape) * np.dtype(dtype).itemsize
        memory = self._pop(max(size, 1))
        array: npt.NDArray[Any] = np.asarray(_SlotLease(memory, self))[:size].view(dtype).reshape(shape)
        return array

    def _pop(self, size: int) -> npt.NDArray[np.uint8]:
        self._adapt(size)
        while True:
            try:
                memory = self._free.pop()
            except IndexError:
                return _aligned(size)
            # Another thread may have put a slot back just as the size changed: drop it.
            if memory.size == self._size >= size:
                return memory

    def _adapt(self, size: int) -> None:
        """Choose the size of the slots that are kept."""
        if size < self._size:
            self._smaller, self._largest = self._smaller + 1, max(self._largest, size)
            if self._smaller < _PATIENCE:
                return
            size = self._largest
        self._smaller, self._largest = 0, 0
        if size != self._size:
            self._free.clear()
            self._size = size

    def clear(self) -> None:
        """Drop the free slots; those handed out are dropped when their views are gone."""
        self._free.clear()

    def _put(self, memory: npt.NDArray[np.uint8]) -> None:
        if memory.size == self._size and len(self._free) < self.keep:
            self._free.append(memory)

    def __reduce__(self) -> tuple[object, ...]:
        return (SlotPool, (self.keep,))


def _aligned(size: int) -> npt.NDArray[np.uint8]:
    """New memory that begins where a cache line does: TensorFlow copies arrays that do not."""
    memory = np.empty(size + _LINE - 1, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + size]
