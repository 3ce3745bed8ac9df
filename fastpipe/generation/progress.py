"""Progress: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fastpipe.console import in_time, print_line
from fastpipe.core.text import in_bytes, printable

__all__ = ["Report"]

_log = logging.getLogger("fastpipe.generate")
_LINE_S = 30.0  # between lines, where there is no terminal
_RATE_S = 0.2  # at least, before a rate is shown


class Report:
    """Shows how far it is, in a ``with`` block.

    Args:
        name: of the file.
        rows: of all.
        is_shown: whether anything is; the log has what matters in any case.
        console: where to; standard error.
    """

    def __init__(
        self, name: str, rows: int, *, is_shown: bool = True, console: Console | None = None
    ) -> None:
        self._name, self._rows, self._is_shown = name, rows, is_shown
        self._console = console or Console(stderr=True)
        self._done = self._made = self._nbytes = self._failed = 0
        self._begun = self._said = time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Report:
        if self._is_shown and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False), BarColumn(),
                TextColumn("{task.fields[told]}", markup=False), console=self._console, transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task(printable(self._name), total=self._rows, told="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, done: int) -> None:
        """Start the clock, with so many rows that are there already."""
        self._done, self._begun = done, time.monotonic()
        self._said = self._begun
        self._show()

    def advance(self, rows: int, nbytes: int, failed: int) -> None:
        """Add rows that were made, the bytes of their values, and how many of them are left out."""
        self._done += rows
        self._made += rows
        self._nbytes += nbytes
        self._failed += failed
        self._show()

    def step(self, text: str) -> None:
        """Show what is done beside rows; in a terminal only."""
        if self._bar is not None:
            self._bar.update(self._task, told=printable(text))

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Print a line that stays, and log it."""
        _log.log(level, "%s", text)
        if self._is_shown:
            print_line(self._console, text)

    def _show(self) -> None:
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, told=self._told(now))
        elif now - self._said > _LINE_S:
            self._said = now
            self.say(f"{self._name}: {self._told(now)}")

    def _told(self, now: float) -> str:
        words = [f"{self._done:,} of {self._rows:,} rows"]
        seconds = now - self._begun
        if seconds > _RATE_S and self._made:
            rate = self._made / seconds
            words.append(f"{rate:,.3g} rows/s" if rate < 100 else f"{rate:,.0f} rows/s")
            words += [in_bytes(self._nbytes), f"{in_time((self._rows - self._done) / rate)} left"]
        if self._failed:
            words.append(f"{self._failed:,} failed")
        return ", ".join(words)
