"""Processes that are killed at one of the calls that they make."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["CallCount", "dying_at"]


class CallCount:
    """Attributes:
    calls: that were made.
    """

    calls = 0


@contextmanager
def dying_at(
    number: int,
    functions: Iterable[tuple[Any, str]],
    half: Callable[[str, Callable[..., Any], tuple[Any, ...]], object] = lambda name, real, arguments: None,
) -> Iterator[CallCount]:
    """Count calls of functions in this block, and kill this process, as ``kill -9`` does, at one of them.

    Args:
        number: of the call, from 1, which is not made any more; 0 for none.
        functions: that are counted: where they stand, such as ``os``, and their names.
        half: called right before it dies, with the function's name, itself and its arguments, for what a
            write that is cut off leaves.

    >>> with dying_at(0, [(os, "getpid")]) as count:
    ...     _ = os.getpid(), os.getpid()
    >>> count.calls
    2
    """
    count = CallCount()
    real = [(place, name, getattr(place, name)) for place, name in functions]

    def instead(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            count.calls += 1
            if count.calls == number:
                half(name, function, arguments)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    try:
        for place, name, function in real:
            setattr(place, name, instead(name, function))
        yield count
    finally:
        for place, name, function in real:
            setattr(place, name, function)
