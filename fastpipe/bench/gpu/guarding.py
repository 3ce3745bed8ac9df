"""Rows that leave when they fail."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from fastpipe.bench.runner import Contender, ContenderError

__all__ = ["Guarded", "apart", "guarded"]

_T = TypeVar("_T")


def guarded(make: Callable[[], _T]) -> Callable[[], _T]:
    """A function whose errors are those of a `Contender` that cannot go on.

    Drivers, memory and decoders of a machine that nobody knows fail in ways that nobody knows: whatever it
    is, the figures of the other rows are to stay.

    Args:
        make: the function.
    """

    def call() -> _T:
        try:
            return make()
        except ContenderError:
            raise
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), "no message")
            raise ContenderError(f"{type(error).__name__}: {first}") from error

    return call


def apart(function: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function in a process of its own, which may crash without taking this one along.

    Args:
        function: of a module.
        arguments: that can be pickled, as what it returns can.

    Raises:
        ContenderError: the process has ended before it returned.
        Exception: what the function raised.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise ContenderError("the process in which it was tried has crashed") from None


class Guarded:
    """A `Contender` that leaves the run when it fails, whatever with.

    Args:
        row: which.
    """

    def __init__(self, row: Contender) -> None:
        self.row = row
        self.key, self.chunk, self.workers = row.key, row.chunk, row.workers

    def measure(self, count: int) -> float:
        """Handle so many samples; return the seconds it took."""
        return guarded(lambda: self.row.measure(count))()

    def close(self) -> None:
        """End every thread and process."""
        self.row.close()
