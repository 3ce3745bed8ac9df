"""Says how far a scan is, once it takes long enough for somebody to wonder."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from fastpipe._extras import load_rich
from fastpipe._printable import printable

if TYPE_CHECKING:
    from rich.live import Live

__all__ = ["ScanProgress"]

_log = logging.getLogger("fastpipe.index")

_SILENT_S = 2.0
_LINE_EVERY_S = 10.0


class ScanProgress:
    """A moving line in a terminal, lines of the log elsewhere; nothing in the first two seconds.

    Args:
        root: the folder that is scanned.
        clock: the time that passes, in seconds.
    """

    def __init__(self, root: str | os.PathLike[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock, self._start = os.fspath(root), clock, clock()
        self._next_line = _SILENT_S
        self._has_logged = False
        self._line: Live | None = None

    def __call__(self, folders: int, files: int) -> None:
        """Called now and then with what has been found so far."""
        passed = self._clock() - self._start
        if passed < _SILENT_S:
            return
        text = f"Scanning {self._root}: {files:,} files in {folders:,} folders so far"
        if sys.stderr is not None and sys.stderr.isatty():
            self._show(text)
        elif passed >= self._next_line:
            self._next_line = passed + _LINE_EVERY_S
            self._has_logged = True
            _log.info("%s, %.0f s", text, passed)

    def _show(self, text: str) -> None:
        load_rich()  # only long scans need it
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        if self._line is None:
            # Without a thread of its own, and with the script's streams left as they are.
            self._line = Live(
                console=Console(stderr=True), auto_refresh=False, transient=True,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._line.start()
        self._line.update(Text(printable(text), no_wrap=True, overflow="ellipsis"), refresh=True)

    def __enter__(self) -> ScanProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line is not None:
            self._line.stop()
            self._line = None
        if self._has_logged and kind is None:
            _log.info("Scanned %s in %.0f s", self._root, self._clock() - self._start)
