"""Reusable, unnamed memory that a worker process writes and its parent reads.

A *lane* belongs to one worker process.  A lane has several segments for batches, and a page on which the
worker notes what it is doing.  Each segment and the page are ``memfd`` files.  Because these files have no
name, nothing is left when a process ends, and the size of ``/dev/shm`` does not matter.

Two numbers on the page show who owns a segment.  The worker counts how often it has sent the segment.  When
no array over the segment is left, the parent adds the messages that it has received to its own count.  If
the numbers are equal, the segment belongs to the worker.  The worker keeps its own list of the segments that
it is filling.  (A flag would not suffice: user code may send the same tensor again, with the next batch,
while the parent releases the tensor.)

A process that the parent forks sees the segments that the parent holds at that time.  These segments are
returned to the worker only after the forked process has ended.
"""

from __future__ import annotations

import itertools
import mmap
import multiprocessing.context
import multiprocessing.reduction
import os
import select
import signal
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.slots import Lease

UInt8Array = npt.NDArray[np.uint8]

_MOST_SEGMENTS = mmap.PAGESIZE // 8  # each segment has two numbers of four bytes
# Each thread has one note: the number of notes for Python threads, the number for native threads, and the
# number of bytes of a note.
_NOTES, _NATIVE_NOTES, _NOTE_SIZE = 16, 112, 512
_NOTES_AT = mmap.PAGESIZE
_INTERRUPTED_AT = _NOTES_AT + (_NOTES + _NATIVE_NOTES) * _NOTE_SIZE
_PAGE_SIZE = _INTERRUPTED_AT + 1
_numbers = itertools.count()


def lanes_are_possible() -> bool:
    """Return whether this system supports lanes.  Linux supports them."""
    return hasattr(os, "memfd_create") and hasattr(os, "posix_fallocate")


class _Fork:
    def __init__(self) -> None:
        self._pid = 0  # for ``__del__`` if Ctrl-C comes before the pipe exists
        self._ours, self.childs = os.pipe()
        self._pid = os.getpid()

    def is_over(self) -> bool:
        """Return whether the child and all processes forked by the child have ended."""
        poll = select.poll()
        poll.register(self._ours)
        return bool(poll.poll(0))

    def __del__(self) -> None:
        if os.getpid() == self._pid:
            os.close(self._ours)


class _Received:
    """A segment that the parent holds.  ``owner`` is the base of the arrays over the segment.  ``times`` is
    the number of messages that delivered it.  ``forks`` are the forked children that see the segment."""

    def __init__(self, owner: Lease, lane: Lane, segment: int) -> None:
        self.owner = weakref.ref(owner)
        self.times = 0
        self.forks: list[_Fork] = []
        self._returned, self._segment = lane.returned, segment
        release = weakref.finalize(owner, _Received._release, self, lane.unreturned, lane.pid)
        release.atexit = False
        _in_hand.add(self)

    def give_back(self) -> bool:
        """Give the segment back to the worker, unless a forked child still sees the segment.  Return True
        if the segment was given back."""
        if any(not fork.is_over() for fork in self.forks):
            return False
        self.forks.clear()
        self._returned[self._segment] = (int(self._returned[self._segment]) + self.times) & 0xFFFFFFFF
        return True

    def _release(self, unreturned: list[_Received], pid: int) -> None:
        # A forked child has a copy of the array, but must not return the segment.
        if os.getpid() == pid and not self.give_back():
            unreturned.append(self)


_in_hand: weakref.WeakSet[_Received] = weakref.WeakSet()
_forking = threading.local()


def _before_fork() -> None:
    seen = [received for received in list(_in_hand) if received.owner() is not None]
    _forking.fork = _Fork() if seen else None
    for received in seen:
        received.forks = [fork for fork in received.forks if not fork.is_over()]
        received.forks.append(_forking.fork)


def _after_fork_in_parent() -> None:
    if _forking.fork is not None:
        os.close(_forking.fork.childs)  # only the child keeps this end of the pipe
        _forking.fork = None


def _after_fork_in_child() -> None:
    # The child must not return segments.  Its end of the pipe stays open until it ends.
    _in_hand.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    )


class Lane:
    """The parent's side of the memory in which one worker process sends batches to its parent.

    At most ``segments`` batches can be in transit or held by the user at a time.  Further batches must be
    sent without the lane.  A lane can be pickled only for a process that is being started.
    """

    def __init__(self, segments: int) -> None:
        segments = min(segments, _MOST_SEGMENTS)
        self.number = next(_numbers)
        self.pid = os.getpid()
        self._fds: list[int] = []
        self._close = weakref.finalize(self, _close_all, self._fds)
        for _ in range(segments + 2):  # two more for the page and the stack
            self._fds.append(os.memfd_create("fastpipe", os.MFD_CLOEXEC))
        os.ftruncate(self._fds[0], _PAGE_SIZE)
        self._page = _map(self._fds[0], _PAGE_SIZE)
        self.returned = _counts(self._page)[1]
        self.unreturned: list[_Received] = []  # released segments that a forked child still sees
        self._segments: list[UInt8Array | None] = [None] * segments
        self._received: dict[int, _Received] = {}

    def writer(self) -> LaneWriter:
        """Return the worker's side.  Call this in the worker."""
        return LaneWriter(self, self._fds)

    def close(self) -> None:
        """Close the descriptors.  Received arrays stay valid."""
        self._close()

    def receive(self, segment: int, size: int) -> UInt8Array:
        """Return the first ``size`` bytes of a segment that the worker sent.  The segment goes back to the
        worker when no array over the segment is left."""
        for _ in range(len(self.unreturned)):  # a finalizer may append at the same time
            self.unreturned.pop(0)._release(self.unreturned, self.pid)
        received = self._received.get(segment)
        owner = None if received is None else received.owner()
        if received is None or owner is None:
            memory = self._segments[segment]
            if memory is None or memory.size < size:
                memory = self._segments[segment] = _map(self._fds[segment + 2], size)
            owner = Lease(memory)
            received = self._received[segment] = _Received(owner, self, segment)
        received.times += 1
        return np.asarray(owner)[:size]

    def notes(self) -> list[str]:
        """Return the last notes of the worker's threads."""
        texts = (
            bytes(line).split(b"\0", 1)[0].decode(errors="surrogateescape") for line in _lines(self._page)
        )
        return [text for text in texts if text]

    @property
    def was_interrupted(self) -> bool:
        """True if the worker has received SIGINT, such as from Ctrl-C in a terminal."""
        return bool(self._page[_INTERRUPTED_AT])

    def stack_so_far(self) -> int:
        """Return the offset at which the worker will write its next stack traces."""
        return os.fstat(self._fds[1]).st_size

    def stack(self, start: int = 0) -> str:
        """Return the stack traces from offset ``start`` on.  The worker writes them after a signal or a
        crash."""
        return os.pread(self._fds[1], 1 << 16, start).decode(errors="replace")

    def __getstate__(self) -> dict[str, Any]:
        # Raise an error if no process is being started: a thread would be needed to send the descriptors.
        multiprocessing.context.assert_spawning(self)
        return {"number": self.number, "fds": [multiprocessing.reduction.DupFd(fd) for fd in self._fds]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.number, self.pid = state["number"], 0
        self._fds = [fd.detach() for fd in state["fds"]]
        self._close = weakref.finalize(self, _close_all, self._fds)


class LaneWriter:
    """The worker's side of the memory in which one worker process sends batches to its parent.  The threads
    of the worker process share this object."""

    def __init__(self, lane: Lane, fds: list[int]) -> None:
        self.number = lane.number
        self._lane = lane  # closes the descriptors when it is deleted
        self._page = _map(fds[0], _PAGE_SIZE)
        self._sent, self._returned = _counts(self._page)
        self.stack_fd = fds[1]
        self._fds = fds[2:]
        self._segments: list[UInt8Array | None] = [None] * len(self._fds)
        self._taken: set[int] = set()
        self._lock = threading.Lock()
        self._threads: dict[int, int] = {}

    def take(self, size: int) -> UInt8Array | None:
        """Return ``size`` bytes of a free segment, as memory for a tensor; None if no segment is free.

        Raises:
            MemoryError: the machine has no more memory for the segment.
        """
        with self._lock:
            segment = self._free_segment(size)
            if segment is None:
                return None
            memory = self._segments[segment]
            if memory is None or memory.size < size:
                memory = self._segments[segment] = self._grown(segment, size)
            self._taken.add(segment)
        owner = Lease(memory)
        weakref.finalize(owner, self._taken.discard, segment).atexit = False
        return np.asarray(owner)[:size]

    def _free_segment(self, size: int) -> int | None:
        """Return the smallest free segment that is large enough, else one without memory, else the largest:
        tensors of several sizes then need little more memory than their own."""
        sizes = {
            segment: 0 if memory is None else memory.size
            for segment, memory in enumerate(self._segments)
            # The order of the tests matters: a sent segment leaves `_taken` after it has been counted.
            if segment not in self._taken and self._sent[segment] == self._returned[segment]
        }
        enough = [segment for segment, found in sizes.items() if found >= size]
        if enough:
            return min(enough, key=sizes.__getitem__)
        empty = [segment for segment, found in sizes.items() if not found]
        return empty[0] if empty else max(sizes, key=sizes.__getitem__, default=None)

    def send(self, address: int) -> int | None:
        """Pass the segment whose memory begins at ``address`` to the parent, and return its number.  Return
        None if no segment begins at ``address``."""
        segment = self._segment_at(address)
        if segment is not None:
            self._sent[segment] = (int(self._sent[segment]) + 1) & 0xFFFFFFFF
        return segment

    def has(self, address: int) -> bool:
        return self._segment_at(address) is not None

    def _segment_at(self, address: int) -> int | None:
        for segment, memory in enumerate(self._segments):
            if memory is not None and segment in self._taken and memory.ctypes.data == address:
                return segment
        return None

    def note(self, thread: int, text: str) -> None:
        """Write down what a thread is about to do.  If the thread then hangs, the parent can read this note.
        ``thread`` is any number that identifies the thread."""
        line = self._threads.setdefault(thread, len(self._threads))
        if line < _NOTES:
            encoded = text.encode(errors="replace")[: _NOTE_SIZE - 1] + b"\0"
            start = _NOTES_AT + line * _NOTE_SIZE
            self._page[start : start + len(encoded)] = np.frombuffer(encoded, np.uint8)

    def interrupt(self) -> None:
        """Tell the parent that this worker has received SIGINT."""
        self._page[_INTERRUPTED_AT] = 1

    def native_lines(self) -> UInt8Array:
        """Return the memory for the notes of the native threads, uint8 (lines, bytes)."""
        return _lines(self._page)[_NOTES:]

    def _grown(self, segment: int, size: int) -> UInt8Array:
        try:
            os.posix_fallocate(self._fds[segment], 0, size)
        except OSError as error:
            raise MemoryError(
                f"no {size >> 20} MiB of shared memory for a batch that goes to the parent process "
                f"({error}): use "
                "smaller batches, fewer worker processes, or num_workers=0"
            ) from error
        return _map(self._fds[segment], size)


def stack_signal() -> int:
    """Return the signal that makes a worker write its stack traces."""
    return signal.SIGRTMIN + 9


def _map(fd: int, size: int) -> UInt8Array:
    return np.frombuffer(mmap.mmap(fd, size), np.uint8)


def _counts(page: UInt8Array) -> npt.NDArray[np.uint32]:
    """Return for each segment how often the worker sent it, and how many messages the parent released."""
    return page[: 8 * _MOST_SEGMENTS].view(np.uint32).reshape(2, _MOST_SEGMENTS)


def _lines(page: UInt8Array) -> UInt8Array:
    return page[_NOTES_AT:_INTERRUPTED_AT].reshape(-1, _NOTE_SIZE)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
