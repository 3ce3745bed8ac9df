"""Ctrl-C that lets be finished what is begun."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Interrupts"]


class Interrupts:
    """Counts interrupts in place of raising them, in a ``with`` block of the main thread.

    Args:
        is_here: whether this thread makes rows: then the second one is raised, as nobody would look for it.

    Attributes:
        count: of interrupts so far.
    """

    def __init__(self, *, is_here: bool = False) -> None:
        self.count, self._is_here = 0, is_here
        self._before: Any = None
        self._is_mine = False

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        # A script that handles it, or ignores it, goes on doing so.
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before, self._is_mine = signal.signal(signal.SIGINT, self._note), True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_mine:
            signal.signal(signal.SIGINT, self._before)
            self._is_mine = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._is_here and self.count > 1:
            raise KeyboardInterrupt
