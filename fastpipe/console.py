"""Progress and tables of commands: one line that changes in a terminal, a line for each step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from fastpipe._sizes import in_bytes

__all__ = ["Pace", "Progress", "in_time", "table"]


class Progress:
    """Says what goes on.

    Args:
        console: where to; normally standard error.

    In a terminal one line shows the present step; otherwise each finished step is a line.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = Status("", console=console) if console.is_terminal else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the moving line away, for output that is to stay; the next step shows it again."""
        if self._status is not None:
            self._status.stop()

    def now(self, text: str) -> None:
        """Show what is being done, in a terminal only."""
        if self._status is not None:
            self._status.update(Text(text))
            self._status.start()

    def done(self, text: str) -> None:
        """What is finished; one line that stays."""
        self._console.print(Text(text), soft_wrap=True)

    def step(self, text: str) -> None:
        """A small step: replaces the moving line, or is a line where there is none."""
        if self._status is not None:
            self.now(text)
        else:
            self.done(text)


class Pace:
    """The moving line of some work that is measured in bytes.

    Args:
        progress: to show it.
        what: is done.
        nbytes: that are to be done.
    """

    def __init__(self, progress: Progress, what: str, nbytes: int) -> None:
        self._progress, self._what, self._nbytes = progress, what, nbytes
        self._begun, self._done = time.monotonic(), 0

    def skip(self, nbytes: int) -> None:
        """So much less is to be done."""
        self._nbytes -= nbytes

    def add(self, nbytes: int, where: str) -> None:
        """So much more is done.

        Args:
            nbytes: of it.
            where: the work is, in words.
        """
        self._done += nbytes
        rate = self._done / max(time.monotonic() - self._begun, 1e-9)
        left = (self._nbytes - self._done) / max(rate, 1e-9)
        share = self._done / max(self._nbytes, 1)
        self._progress.now(
            f"{self._what} {where}: {share:.0%}, {in_bytes(rate)}/s, {in_time(max(left, 0.0))} left"
        )


def in_time(seconds: float) -> str:
    """A time for people.

    >>> in_time(7.4), in_time(200), in_time(9000)
    ('7 s', '3 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """An empty table.

    Args:
        title: above it.
        left: heads of the first columns, of words.
        right: heads of the others, of numbers.
    """
    made = Table(title=Text(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for name in left:
        made.add_column(name, overflow="fold")
    for name in right:
        made.add_column(name, justify="right", overflow="fold")
    return made
