"""Show that work goes on, if it takes longer than two seconds."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable

from fastpipe.core.text import printable

SILENT_S = 2.0
LINE_EVERY_S = 10.0
_ERASE = "\x1b[2K"  # erases a terminal's line


class SlowWork:
    """Shows the state of slow work on standard error: one changing line in a terminal, else lines.

    Nothing is shown during the first two seconds.  Without a terminal, as in Jupyter or in a pipe, a line
    follows at most every ten seconds, and a last line says how long the work took.

    Args:
        what: the work, such as "Scanning /data/train".
        clock: function that returns seconds.

    >>> with SlowWork("Scanning /data/train") as progress:
    ...     progress("17 files so far")
    """

    def __init__(self, what: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock, self._start = what, clock, clock()
        self._next_line = SILENT_S
        self._has_printed = self._has_line = False

    def __call__(self, state: str) -> None:
        passed = self._clock() - self._start
        if passed < SILENT_S or sys.stderr is None:
            return
        text = printable(f"{self._what}: {state}")
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            self._has_line = True
            shown = text[: shutil.get_terminal_size().columns - 1]
            print(f"\r{_ERASE}{shown}", end="", file=sys.stderr, flush=True)
        elif passed >= self._next_line:
            self._next_line = passed + LINE_EVERY_S
            self._has_printed = True
            print(f"{text}, {passed:.0f} s", file=sys.stderr, flush=True)

    def __enter__(self) -> SlowWork:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._has_line:
            print(f"\r{_ERASE}", end="", file=sys.stderr, flush=True)
        if self._has_printed and kind is None:
            passed = self._clock() - self._start
            print(printable(f"{self._what}: done in {passed:.0f} s"), file=sys.stderr, flush=True)
