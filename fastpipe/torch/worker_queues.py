"""The queue by which a worker is told what to make next, and can see what comes after that."""

from __future__ import annotations

import multiprocessing
import multiprocessing.queues
import queue
from collections import deque
from collections.abc import Callable
from typing import Any

import torch.multiprocessing
from torch.utils.data import get_worker_info

__all__ = ["context_with_index_queues", "waiting"]

_FIRST_S, _LONGEST_S = 0.0001, 0.002


class IndexQueue(multiprocessing.queues.Queue):  # type: ignore[type-arg]  # which older versions cannot take
    """A queue whose reader may look at what is there before it takes it."""

    def __init__(self, context: Any) -> None:
        super().__init__(ctx=context)
        self._seen: deque[Any] = deque()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._seen = deque()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        global _current
        if get_worker_info() is not None:  # the parent reads answers from one
            _current = self
        return self._seen.popleft() if self._seen else super().get(block, timeout)

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


def context_with_index_queues(context: Any) -> Any:
    """A multiprocessing context, or None for torch's own, whose queues are of this kind."""
    return _Context(torch.multiprocessing if context is None else context)


class _Context:
    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Queue(self) -> Any:  # noqa: N802 - the name that a context has
        return IndexQueue(self._context.get_context())
