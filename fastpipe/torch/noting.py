"""What a worker process is doing, noted for its parent should it never finish."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["note", "start"]

_write: Callable[[int, str], None] | None = None


def start(write: Callable[[int, str], None]) -> None:
    """In a worker: from now on note with this function, which takes a thread's number and a text."""
    global _write
    _write = write


def note(about: Any) -> None:
    """Note what this thread is about to do; nothing outside of workers."""
    if _write is not None:
        _write(threading.get_ident(), str(about))
