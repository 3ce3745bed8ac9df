"""Errors that calls end with, and functions that end with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from fastpipe.errors import BadSampleError


def failure(ask: Callable[[], object], kinds: Any = BadSampleError) -> Any:
    """Return the error with which a call ends, without what it refers to: iterators, which keep their workers."""
    try:
        ask()
    except kinds as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    raise AssertionError("there was no error")


def raising(error: BaseException) -> Callable[..., NoReturn]:
    """Return a function that raises an error, whatever it is called with."""

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise type(error)(*error.args)  # another each time: one keeps the frames through which it went

    return fail
