"""Memory that a worker process writes and its parent reads, used again and never named.

A *lane* belongs to one worker.  It has some segments for batches, and a page on which the worker
notes what it is doing.  Each is a ``memfd``: it has no name, so nothing is left however a process
ends, and the size of ``/dev/shm`` does not matter.

Life cycle of a segment, which a byte on the page tells both sides:

* ``FREE``: the worker may take it.  Only the worker changes that, to ``SENT``.
* ``SENT``: the parent has it, or a message on the way to it.  The parent sets it ``FREE`` when
  the last array over the segment is gone.

While the worker fills a segment it is ``FREE`` as well, but taken in the worker's own books.
"""

from __future__ import annotations

import itertools
import mmap
import multiprocessing.reduction
import os
import signal
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Lane", "LaneWriter", "lanes_are_possible", "stack_signal"]

UInt8Array = npt.NDArray[np.uint8]

_FREE, _SENT = 0, 1
_NOTES, _NOTE_SIZE = 16, 512  # notes at once, one for each thread; bytes of each
_NOTES_AT = mmap.PAGESIZE
_PAGE_SIZE = mmap.PAGESIZE + _NOTES * _NOTE_SIZE
_numbers = itertools.count()


def lanes_are_possible() -> bool:
    """Whether this system has what lanes are made of: Linux has."""
    return hasattr(os, "memfd_create") and hasattr(os, "posix_fallocate")


class _Owner:
    """Base of all arrays over one segment while they live."""

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: UInt8Array) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__


class Lane:
    """The parent's side of a lane.  Pickles only towards a process that is being started.

    Args:
        segments: batches that may be under way or in the user's hands at once; what is more
            has to travel in another way.
    """

    def __init__(self, segments: int) -> None:
        self.number = next(_numbers)
        self.pid = os.getpid()
        self._fds: list[int] = []
        self._close = weakref.finalize(self, _close_all, self._fds)
        for _ in range(segments + 2):  # the page, the stack
            self._fds.append(os.memfd_create("fastpipe", os.MFD_CLOEXEC))
        os.ftruncate(self._fds[0], _PAGE_SIZE)
        self._page = _map(self._fds[0], _PAGE_SIZE)
        self._segments: list[UInt8Array | None] = [None] * segments
        self._owners: dict[int, weakref.ref[_Owner]] = {}

    def writer(self) -> LaneWriter:
        """The worker's side.  To be called in the worker."""
        return LaneWriter(self, self._fds)

    def close(self) -> None:
        """Let go of the descriptors; arrays that were received stay."""
        self._close()

    def receive(self, segment: int, size: int) -> UInt8Array:
        """What the worker sent; the segment is its again when no array over it is left.

        Args:
            segment, size: as ``LaneWriter.send`` gave them.
        """
        owner = self._owners[segment]() if segment in self._owners else None
        if owner is None:
            memory = self._segments[segment]
            if memory is None or memory.size < size:
                memory = self._segments[segment] = _map(self._fds[segment + 2], size)
            owner = _Owner(memory)
            self._owners[segment] = weakref.ref(owner)
            release = weakref.finalize(owner, _release, self._page, segment, self.pid)
            release.atexit = False
        return np.asarray(owner)[:size]

    def notes(self) -> list[str]:
        """What the worker's threads noted last."""
        lines = self._page[_NOTES_AT:].reshape(_NOTES, _NOTE_SIZE)
        texts = (bytes(line).split(b"\0", 1)[0].decode(errors="replace") for line in lines)
        return [text for text in texts if text]

    def stack_so_far(self) -> int:
        """Where the stacks that are written from now on will begin."""
        return os.fstat(self._fds[1]).st_size

    def stack(self, start: int = 0) -> str:
        """Stacks that the worker has written, after a signal or as it crashed."""
        return os.pread(self._fds[1], 1 << 16, start).decode(errors="replace")

    def __getstate__(self) -> dict[str, Any]:
        # Raises where no process is being started: descriptors travel in no other way.
        return {"number": self.number, "fds": [multiprocessing.reduction.DupFd(fd) for fd in self._fds]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.number, self.pid = state["number"], 0
        self._fds = [fd.detach() for fd in state["fds"]]
        self._close = weakref.finalize(self, _close_all, self._fds)


class LaneWriter:
    """The worker's side of a lane.  Used by the threads of one process.

    Args:
        lane: as it came here from the parent.
        fds: its descriptors.
    """

    def __init__(self, lane: Lane, fds: list[int]) -> None:
        self.number = lane.number
        self._lane = lane  # which closes the descriptors when it goes
        self._page = _map(fds[0], _PAGE_SIZE)
        self.stack_fd = fds[1]
        self._fds = fds[2:]
        self._segments: list[UInt8Array | None] = [None] * len(self._fds)
        self._taken: set[int] = set()
        self._threads: dict[int, int] = {}

    def take(self, size: int) -> UInt8Array | None:
        """Memory for a batch, of a free segment; None where there is none.

        Raises:
            MemoryError: the machine has no more memory for it.
        """
        for segment in range(len(self._fds)):
            if segment in self._taken or self._page[segment] != _FREE:
                continue
            memory = self._segments[segment]
            if memory is None or memory.size < size:
                memory = self._segments[segment] = self._grown(segment, size)
            self._taken.add(segment)
            owner = _Owner(memory)
            weakref.finalize(owner, self._taken.discard, segment).atexit = False
            return np.asarray(owner)[:size]
        return None

    def send(self, address: int) -> int | None:
        """The segment that begins at an address, from now on the parent's; None if there is no
        such segment."""
        for segment, memory in enumerate(self._segments):
            if memory is not None and segment in self._taken and memory.ctypes.data == address:
                self._page[segment] = _SENT
                return segment
        return None

    def note(self, thread: int, text: str) -> None:
        """Note what a thread is about to do, for the parent to read should it never end.

        Args:
            thread: any number that tells the threads apart.
        """
        line = self._threads.setdefault(thread, len(self._threads))
        if line < _NOTES:
            encoded = text.encode(errors="replace")[: _NOTE_SIZE - 1] + b"\0"
            start = _NOTES_AT + line * _NOTE_SIZE
            self._page[start : start + len(encoded)] = np.frombuffer(encoded, np.uint8)

    def _grown(self, segment: int, size: int) -> UInt8Array:
        try:
            os.posix_fallocate(self._fds[segment], 0, size)
        except OSError as error:
            raise MemoryError(
                f"no {size >> 20} MiB of memory for a batch on its way to the parent process ({error}): use "
                "smaller batches, fewer worker processes, or num_workers=0"
            ) from error
        return _map(self._fds[segment], size)


def stack_signal() -> int:
    """The signal at which a worker writes its stacks."""
    return signal.SIGRTMIN + 9


def _map(fd: int, size: int) -> UInt8Array:
    return np.frombuffer(mmap.mmap(fd, size), np.uint8)


def _release(page: UInt8Array, segment: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has a copy of the array, but not the say
        page[segment] = _FREE


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
