"""What a worker process is doing, noted for its parent should it never finish."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["native_lines", "note", "start"]

_write: Callable[[int, str], None] | None = None
_native_lines: npt.NDArray[np.uint8] | None = None


def start(write: Callable[[int, str], None], lines: npt.NDArray[np.uint8]) -> None:
    """In a worker: from now on note with this function, which takes a thread's number and a text.

    Args:
        write: the function.
        lines: uint8 (lines, bytes), for threads that are not Python's.
    """
    global _write, _native_lines
    _write, _native_lines = write, lines


def native_lines() -> npt.NDArray[np.uint8] | None:
    """Where the threads of the native core note what they are at; None outside of workers."""
    return _native_lines


def note(about: Any) -> None:
    """Note what this thread is about to do; nothing outside of workers."""
    if _write is not None:
        _write(threading.get_ident(), str(about))
