"""Memory of batches, which is reused once nothing refers to its batch any more."""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# One slot for the batch that the user holds, one for the batch that is being delivered, and one for the batch
# that a loader begins in advance.
KEPT_SLOTS = 3

_LINE = 64
_PATIENCE = 16  # after this many smaller batches in a row, the larger slots are freed


class Lease:
    """Owns the memory of a slot as long as any array or tensor uses this memory.

    ``np.asarray(lease)`` makes the lease the base of the new array, and every view, tensor and DLPack
    capsule keeps that base alive.  (A finalizer on the array itself would be wrong: a view of a view
    refers to the base, and not to the array in between.)
    """

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: Any, interface: dict[str, Any] | None = None) -> None:
        self._memory = memory  # the memory, or the memory's owner if ``interface`` defines the view
        self.__array_interface__ = memory.__array_interface__ if interface is None else interface


class _Slot(NamedTuple):
    """A piece of a pool's memory, uint8 (N,).  It is aligned to a cache line, because TensorFlow copies
    unaligned memory."""

    memory: npt.NDArray[np.uint8]
    address: int


class _SlotLease(Lease):
    """Owns a slot of a pool.  When this object is deleted, the slot returns to the pool.

    (``weakref.finalize`` would do the same, but would double the time of ``SlotPool.take``.)
    """

    __slots__ = ("_pool",)

    def __init__(self, slot: _Slot, interface: dict[str, Any], pool: weakref.ref[SlotPool]) -> None:
        super().__init__(slot, interface)
        self._pool = pool  # set last: ``__del__`` takes an object with a pool as complete

    def __del__(self) -> None:
        # Ctrl-C may have interrupted ``__init__``.
        pool = self._pool() if hasattr(self, "_pool") else None
        if pool is not None:
            pool._put(self._memory)


class SlotPool:
    """A pool of arrays.  The memory of an array is reused when the array's last view is gone.

    The pool never waits: if no slot (a piece of memory) is free, the pool allocates one.  The pool keeps at
    most ``keep`` free slots, all of the largest size recently requested.  The short last batch of an epoch
    fits into a slot of this size.  After a series of smaller batches, the larger slots are freed.
    """

    def __init__(self, keep: int) -> None:
        # There is no lock, because a finalizer may run inside any of these methods, and the process may fork
        # at any time.  Appending to and popping from a deque are atomic, and a slot too many does no harm.
        self.keep = keep
        self._free: deque[_Slot] = deque()
        self._self = weakref.ref(self)
        self._size = 0
        self._smaller, self._largest = 0, 0  # smaller batches since the last large one

    def take(self, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
        """Return an uninitialised C-contiguous array.  Its memory is not reused while a view of it exists."""
        dtype = np.dtype(dtype)
        slot = self._pop(max(math.prod(shape) * dtype.itemsize, 1))
        # Make an array of the final shape directly: views of views would take as long as all the rest.
        interface = {"version": 3, "typestr": dtype.str, "shape": shape, "data": (slot.address, False)}
        array: npt.NDArray[Any] = np.asarray(_SlotLease(slot, interface, self._self))
        return array.view(dtype) if dtype.kind == "V" else array  # ``interface`` does not describe fields

    def _pop(self, size: int) -> _Slot:
        self._adapt(size)
        while True:
            try:
                slot = self._free.pop()
            except IndexError:
                return _new_slot(size)
            # Another thread may have put a slot of the former size back: drop that slot.
            if slot.memory.size == self._size >= size:
                return slot

    def _adapt(self, size: int) -> None:
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
        """Free the unused slots.  Slots in use are freed when their views are gone."""
        self._free.clear()

    def _put(self, slot: _Slot) -> None:
        if slot.memory.size == self._size and len(self._free) < self.keep:
            self._free.append(slot)

    def __reduce__(self) -> tuple[object, ...]:
        return (SlotPool, (self.keep,))


def _new_slot(size: int) -> _Slot:
    memory = np.empty(size + _LINE - 1, np.uint8)
    address = memory.ctypes.data
    start = -address % _LINE
    return _Slot(memory[start : start + size], address + start)
