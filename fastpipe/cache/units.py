"""Decoded parts of arrays in memory of a fixed size, which threads and processes share.

What nobody will want any more makes room, where that is known, and then what was not used for the longest
time.  Of those who want the same at once one decodes it, and the others wait.

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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.cache.locks import locks_are_possible, try_to_lock, unlock
from fastpipe.cache.shared_memory import anonymous_file, descriptor_of, mapped

__all__ = ["Found", "UnitMemory", "UnitSlot", "UnitSlots"]

UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

_FIELDS = 3  # of a slot: the key of what is in it, its version, when it was used
_HEAD = 64  # bytes: which uses are expected, bytes decoded and bytes used, uses that are left, of how many
_OVER = 64  # an epoch is over when one use of so many is left: processes may lose some that they count
_LOOKED_AT = 256  # slots among which the one to be used again is chosen
_STEP_S = 0.0005  # between two looks at whether a process that writes a slot is done
_PATIENCE_S = 0.05  # the most to wait at a time


class Found(NamedTuple):
    """Where units are, and what they were when this was asked.

    Attributes:
        slots: int64 (N,); -1 for those that are not there.
        versions: int64 (N,).
    """

    slots: Int64Array
    versions: Int64Array


class UnitMemory:
    """Memory for decoded units of one size, made by the parent of the processes that will share it.

    Picklable: a copy in another process is of the same memory, or None where that is gone; in this one it
    is this object.  The memory is the machine's once something is written there, until nobody refers to it in
    any process.

    Args:
        keys: how many units there are.
        slots: how many of them it holds.
        slot_nbytes: of each; a multiple of 16.

    Raises:
        OSError: there can be none.
    """

    def __init__(self, keys: int, slots: int, slot_nbytes: int) -> None:
        if not locks_are_possible():
            raise OSError("this system has no locks that end with their process")
        self._take(anonymous_file(), keys, slots, slot_nbytes)
        os.truncate(self.descriptor, self.nbytes)

    def _take(self, descriptor: int, keys: int, slots: int, slot_nbytes: int) -> None:
        self.descriptor, self.keys, self.slots, self.slot_nbytes = descriptor, keys, slots, slot_nbytes
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False
        self._here: tuple[int, weakref.ref[UnitSlots]] | None = None
        _memories[os.fstat(descriptor).st_ino] = self

    def close(self) -> None:
        """Give it up in this process; who has slots of it must not use them any more."""
        if self._close.alive:
            _memories.pop(os.fstat(self.descriptor).st_ino, None)
        self._close()

    def opened(self) -> UnitSlots:
        """The memory in this process: the same object for all, as locks keep only processes apart.

        Raises:
            OSError: there is no room for it among the process's addresses.
        """
        with _opening:
            pid, slots = os.getpid(), None
            if self._here is not None:
                slots = self._here[1]()
                if slots is not None and self._here[0] != pid:
                    # A parent's, with a descriptor of its own: to close that would end this one's locks.
                    _inherited.append(slots)
                    slots = None
            if slots is None:
                slots = UnitSlots(self)
                self._here = pid, weakref.ref(slots)
            return slots

    @property
    def table_nbytes(self) -> int:
        """Bytes in front of the first slot: about the slots, and of each unit where it is, and how often it
        will be used."""
        nbytes = _HEAD + _FIELDS * 8 * self.slots + 2 * 4 * self.keys
        return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.table_nbytes + self.slots * self.slot_nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        inode = os.fstat(self.descriptor).st_ino
        arguments = os.getpid(), self.descriptor, inode, self.keys, self.slots, self.slot_nbytes
        return UnitMemory.joined, arguments

    @staticmethod
    def joined(
        pid: int, number: int, inode: int, keys: int, slots: int, slot_nbytes: int
    ) -> UnitMemory | None:
        """The memory that a process has at a descriptor, in this one; None where it has not.

        Args:
            pid: of the process.
            number: of the descriptor there.
            inode: of the memory.
            keys, slots, slot_nbytes: of the memory.
        """
        # Once only in a process: to close a second descriptor would end the locks of the first.
        known = _memories.get(inode)
        if known is not None:
            is_it = (known.keys, known.slots, known.slot_nbytes) == (keys, slots, slot_nbytes)
            return known if is_it else None
        memory = UnitMemory.__new__(UnitMemory)
        try:
            descriptor = descriptor_of(pid, number, inode)
        except OSError:
            return None
        memory._take(descriptor, keys, slots, slot_nbytes)
        return memory if os.fstat(descriptor).st_size == memory.nbytes else None


_memories: weakref.WeakValueDictionary[int, UnitMemory] = weakref.WeakValueDictionary()
_inherited: list[UnitSlots] = []
_opening = threading.Lock()


def _forget_lock() -> None:
    global _opening
    _opening = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


class UnitSlots:
    """The memory in one process.  For threads at once; made by ``UnitMemory.opened``.

    Args:
        memory: as above; it is kept.

    Attributes:
        address: of the first slot in this process.
        slot_nbytes: of each.

    Raises:
        OSError: there is no room for it among the process's addresses.
    """

    def __init__(self, memory: UnitMemory) -> None:
        self._memory, self.slot_nbytes = memory, memory.slot_nbytes
        data = mapped(memory.descriptor, memory.nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        if data is None:
            raise OSError("its memory cannot be mapped")
        self._data = data
        self.address: int = data.__array_interface__["data"][0] + memory.table_nbytes
        end = _HEAD + _FIELDS * 8 * memory.slots
        self._head = data[:_HEAD].view(np.int64)
        # Keys and slots are counted from 1 here, as what was never written is 0.
        fields = data[_HEAD:end].view(np.int64).reshape(_FIELDS, memory.slots)
        self._keys, self._versions, self._used = fields
        self._slots, self._left = data[end : end + 8 * memory.keys].view(np.int32).reshape(2, memory.keys)
        self._lock = threading.Lock()
        self._mine: dict[int, threading.Event] = {}  # slots that threads of this process write
        self._expected: set[int] = set()
        self._hand = 0

    def find(self, keys: Int64Array) -> Found:
        """Where units are that are there.

        Args:
            keys: int64 (N,): their numbers, from 0.
        """
        slots = self._slots[keys].astype(np.int64) - 1
        places = np.maximum(slots, 0)
        versions = self._versions[places]
        is_there = (slots >= 0) & (versions & 1 == 0) & (self._keys[places] == keys + 1)
        self._used[places[is_there]] = time.monotonic_ns()
        return Found(np.where(is_there, slots, -1), versions)

    def addresses(self, found: Found) -> npt.NDArray[np.uint64]:
        """Where they begin in memory: uint64 (N,); 0 for those that are not there."""
        places = self.address + found.slots * self.slot_nbytes
        return np.where(found.slots < 0, 0, places).astype(np.uint64)

    def are_still(self, found: Found) -> npt.NDArray[np.bool_]:
        """Whether each is there, and was all the time: bool (N,)."""
        with self._lock:  # also keeps the processor from looking before it has copied
            is_same: npt.NDArray[np.bool_] = self._versions[np.maximum(found.slots, 0)] == found.versions
            return is_same & (found.slots >= 0)

    def expect(self, what: int, uses: Callable[[], npt.NDArray[np.int32]]) -> None:
        """Hear how often each unit will be used, unless a process has said it already and they are going on.

        Args:
            what: a number from 1 for these uses, such as an epoch's.
            uses: gives int32 (keys,).
        """
        with self._lock:
            is_same = int(self._head[0]) == what
            is_over = int(self._head[3]) * _OVER <= int(self._head[4])
            # While others go on once only: who takes turns with them would say it again and again.
            if (is_same or what in self._expected) and not is_over:
                return
            self._expected.add(what)
        left = uses()  # may take a while, in which others are to go on
        total = int(left.sum(dtype=np.int64))
        with self._lock:
            # The same ones again: the last of those before are still to come.
            self._left[:] = np.maximum(self._left, 0) + left if is_same else left
            self._head[3] = total + (max(0, int(self._head[3])) if is_same else 0)
            self._head[4] = total
            self._head[0] = what

    def count(self, decoded: int, used: int) -> None:
        """Count bytes that were decoded, and bytes of them that were used, for all processes."""
        with self._lock:  # of two processes that do so at the same time one may be lost
            self._head[1] += decoded
            self._head[2] += used

    @property
    def counted(self) -> tuple[int, int]:
        """Bytes that were decoded and used in all processes."""
        return int(self._head[1]), int(self._head[2])

    def used(self, keys: Int64Array) -> None:
        """Hear that units were used: those that will not be used again make room first.

        Of those that are used more often than was expected nothing is known.

        Args:
            keys: int64 (N,), each once.
        """
        if not int(self._head[0]):
            return
        with self._lock:  # other processes may do so at the same time, and one of both be lost
            self._left[keys] -= 1
            self._head[3] -= len(keys)
            over = keys[self._left[keys] == 0]
            slots = self._slots[over].astype(np.int64) - 1
            is_there = (slots >= 0) & (self._keys[np.maximum(slots, 0)] == over + 1)
            self._used[slots[is_there]] = 0

    def claim(self, keys: Sequence[int]) -> list[UnitSlot | None]:
        """Slots to decode units into.

        Args:
            keys: of those that were not found; each once.

        Returns:
            For each a slot; None where somebody is decoding it, or has just done so, or there is no room.
        """
        with self._lock:
            return [self._claimed(key) for key in keys]

    def _claimed(self, key: int) -> UnitSlot | None:
        there = int(self._slots[key]) - 1
        if there >= 0 and int(self._keys[there]) == key + 1:
            # One in which somebody had begun to decode it can be had if that process is gone.
            if int(self._versions[there]) % 2 == 0 or there in self._mine:
                return None
            return self._taken(there, key)
        for slot in self._oldest():
            if slot not in self._mine and (made := self._taken(slot, key)) is not None:
                return made
        return None

    def _oldest(self) -> list[int]:
        """Slots to write next, the least recently used first."""
        count = self._memory.slots
        if count <= _LOOKED_AT:
            some = np.arange(count)
        else:  # of so many the oldest is old enough
            some = np.arange(self._hand, self._hand + _LOOKED_AT) % count
            self._hand = (self._hand + 61) % count
        return [int(slot) for slot in some[np.argsort(self._used[some], kind="stable")[:8]]]

    def _taken(self, slot: int, key: int) -> UnitSlot | None:
        seen = int(self._versions[slot])
        if not try_to_lock(self._memory.descriptor, slot):
            return None
        if int(self._versions[slot]) != seen:  # another process has just written it
            unlock(self._memory.descriptor, slot)
            return None
        version = (seen | 1) + 2  # odd, and never that of another who writes
        self._mine[slot] = threading.Event()
        self._versions[slot] = version
        self._forget(slot)
        self._keys[slot], self._slots[key] = key + 1, slot + 1
        self._used[slot] = time.monotonic_ns()
        begin = self._memory.table_nbytes + slot * self.slot_nbytes
        return UnitSlot(self, slot, version, self._data[begin : begin + self.slot_nbytes])

    def _forget(self, slot: int) -> None:
        """Let nobody look here for what was in a slot."""
        before = int(self._keys[slot]) - 1
        if before >= 0 and int(self._slots[before]) == slot + 1:
            self._slots[before] = 0

    def is_coming(self, key: int) -> bool:
        """Whether somebody is decoding a unit, or was when the process ended that did so."""
        slot = int(self._slots[key]) - 1
        return slot >= 0 and int(self._keys[slot]) == key + 1 and int(self._versions[slot]) % 2 == 1

    def wait(self, key: int) -> None:
        """Wait while somebody is decoding a unit, but not for long: a process may be stopped."""
        slot = int(self._slots[key]) - 1
        if slot < 0 or not self.is_coming(key):
            return
        with self._lock:
            event = self._mine.get(slot)
        if event is not None:
            event.wait(_PATIENCE_S)
            return
        # Not by waiting for the lock, which takes no limit.
        deadline = time.monotonic() + _PATIENCE_S
        while self.is_coming(key) and time.monotonic() < deadline:
            with self._lock:
                if slot not in self._mine and try_to_lock(self._memory.descriptor, slot):
                    unlock(self._memory.descriptor, slot)  # who was decoding it is gone
                    return
            time.sleep(_STEP_S)

    def _end(self, slot: int, version: int, *, is_made: bool) -> None:
        with self._lock:
            if int(self._versions[slot]) == version:
                if not is_made:
                    self._forget(slot)
                    self._keys[slot] = 0
                self._versions[slot] = version + 1
            unlock(self._memory.descriptor, slot)
            self._mine.pop(slot).set()


class UnitSlot:
    """A slot that is being written.  A context manager: on the way out it is empty unless it was published.

    Attributes:
        memory: uint8 (M,): all of the slot.
    """

    def __init__(self, slots: UnitSlots, slot: int, version: int, memory: UInt8Array) -> None:
        self._slots, self._slot, self._version = slots, slot, version
        self.memory = memory
        self._is_over = False

    @property
    def address(self) -> int:
        """Of its memory."""
        return self._slots.address + self._slot * self._slots.slot_nbytes

    def publish(self) -> None:
        """Let others see it."""
        self._is_over = True
        self._slots._end(self._slot, self._version, is_made=True)

    def __enter__(self) -> UnitSlot:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_over:
            self._is_over = True
            self._slots._end(self._slot, self._version, is_made=False)
