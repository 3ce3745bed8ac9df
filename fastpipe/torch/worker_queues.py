"""What a worker and its parent exchange messages by: a worker can see what it will be asked for next."""

from __future__ import annotations

import multiprocessing
import multiprocessing.queues
import os
import queue
import select
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.multiprocessing
from torch.utils.data import get_worker_info

__all__ = ["UnfinishedMessageError", "WorkerContext", "waiting"]

_FIRST_S, _LONGEST_S = 0.0001, 0.002
_LOOK_S = 0.5  # how often to look for the writer while the rest of a message is awaited


class UnfinishedMessageError(EOFError):
    """The rest of a message will not come: its writer was killed, or does not go on."""


class IndexQueue(multiprocessing.queues.Queue):  # type: ignore[type-arg]  # which older versions cannot take
    """A queue whose reader may look at what is there before it takes it, and need not wait for a writer that
    has ended in the middle of a message."""

    def __init__(self, context: Any) -> None:
        super().__init__(ctx=context)
        self._seen: deque[Any] = deque()
        self._before_error: Callable[[], None] = _nothing

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._seen, self._before_error = deque(), _nothing

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        global _current
        if get_worker_info() is not None:  # the parent reads answers from one
            _current = self
        if self._seen:
            return self._seen.popleft()
        try:
            return super().get(block, timeout)
        except (OSError, EOFError):
            self._before_error()
            raise

    def watch_writers(self, is_hopeless: Callable[[float], bool], before_error: Callable[[], None]) -> None:
        """In the parent, let `get` raise an error where the rest of a message will not come.

        Args:
            is_hopeless: asked now and then, with the seconds for which nothing has come.
            before_error: called before `get` raises an error of reading.
        """
        self._before_error = before_error
        reader: Any = self._reader  # type: ignore[attr-defined]
        if hasattr(select, "poll"):
            # By a weak reference: a reader that refers to itself would stay open until the next collection.
            reader._recv = partial(_receive, weakref.ref(reader), partial(_read_unless, is_hopeless))

    def release_of_killed(self) -> None:
        """In the parent, when all writers have been killed, release the lock that one may have had."""
        lock: Any = self._wlock  # type: ignore[attr-defined]
        if lock is not None:
            lock.acquire(block=False)
            lock.release()

    def waiting(self) -> list[Any]:
        """What is there, which stays."""
        try:
            while not self.empty():
                self._seen.append(super().get(False))
        except queue.Empty:
            pass
        return list(self._seen)

    def comes_within(self, seconds: float) -> bool:
        """Wait until something is there, at most so long; return whether it is."""
        return bool(self._seen) or bool(self._reader.poll(seconds))  # type: ignore[attr-defined]


def _nothing() -> None:
    pass


def _receive(reader: weakref.ref[Any], read: Callable[[int, int], bytes], size: int) -> Any:
    connection = reader()
    assert connection is not None
    return type(connection)._recv(connection, size, read=read)


def _read_unless(is_hopeless: Callable[[float], bool], descriptor: int, size: int) -> bytes:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    seconds = 0.0
    while not poll.poll(1000 * _LOOK_S):
        seconds += _LOOK_S
        if is_hopeless(seconds):
            raise UnfinishedMessageError("the rest of a worker's message did not come")
    return os.read(descriptor, size)


_current: IndexQueue | None = None  # the one that this process reads


def waiting(until: Callable[[], bool]) -> list[Any]:
    """In a worker, wait for what it will be asked for after what it is busy with.

    Args:
        until: whether to wait no longer; asked again and again, at least every 2 ms.

    Returns:
        Pairs of a number and what torch hands to the dataset, perhaps others; they stay in the queue.  Empty
        where none came in time, and anywhere else than in a worker.
    """
    if _current is None:
        return []
    seconds = _FIRST_S
    while not _current.comes_within(seconds):
        if until():
            return []
        seconds = min(2 * seconds, _LONGEST_S)  # small batches are not held up
    return _current.waiting()


class _Flag:
    """An event that is set once.  Unlike those of ``multiprocessing`` it has no lock, which a worker that is
    killed may have at that moment and its parent would wait for."""

    def __init__(self, context: Any) -> None:
        self._semaphore = context.Semaphore(0)

    def set(self) -> None:
        self._semaphore.release()

    def is_set(self) -> bool:
        return not self._semaphore._semlock._is_zero()


class WorkerContext:
    """A multiprocessing context with the queues and events of this module.

    Args:
        context: a context of ``multiprocessing``; None for torch's own.
    """

    def __init__(self, context: Any) -> None:
        self._context = torch.multiprocessing if context is None else context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Queue(self) -> Any:  # noqa: N802 - the name that a context has
        return IndexQueue(self._context.get_context())

    def Event(self) -> Any:  # noqa: N802
        return _Flag(self._context)
