"""Processes that are killed at one of the calls that they make."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class CallCount:
    calls = 0


@contextmanager
def dying_at(
    number: int,
    functions: Iterable[tuple[Any, str]],
    half: Callable[[str, Callable[..., Any], tuple[Any, ...]], object] = lambda name, real, arguments: None,
) -> Iterator[CallCount]:
    """Count calls of functions in this block, and kill this process, as ``kill -9`` does, at one of them.

    The call of this number, from 1, is not made any more; 0 is none.  Functions are told by where they stand, such
    as ``os``, and by name.  ``half`` is called right before the process dies, with the function's name, itself and
    its arguments, for what a write that is cut off leaves.

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


def half_of_it(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Write the first half of what a call was to write."""
    if name in ("write", "pwrite", "pwritev"):
        descriptor, data, *offset = arguments
        data = b"".join(data) if name == "pwritev" else bytes(data)
        first = data[: len(data) // 2]
        real(descriptor, [first] if name == "pwritev" else first, *offset)
