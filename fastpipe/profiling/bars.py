"""Progress of epochs: lines that move in a terminal, plain ones now and then elsewhere."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fastpipe.console import print_line
from fastpipe.core.text import printable

__all__ = ["Bar", "Bars", "LastingFile"]

_REFRESH_S = 0.2
_LINE_S = 10.0


class LastingFile:
    """What is written to standard error as it is then; where that is gone, or is not there, nothing is.

    A training goes on when its terminal is closed; rich would end it.

    >>> LastingFile().write("\\n")
    1
    """

    def write(self, text: str) -> int:
        """Write, if that is possible."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._target.write(text)
        return len(text)

    def flush(self) -> None:
        """The same."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._target.flush()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return bool(self._target.isatty())
        return False

    @property
    def encoding(self) -> str:
        """In which texts are written."""
        return getattr(self._target, "encoding", None) or "utf-8"

    @property
    def _target(self) -> Any:
        # While bars move, rich has standard error written by itself.
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)


class Bars:
    """The bars of all epochs that run now, of loops within loops too, on one console.

    No thread draws them: they are drawn by whoever tells of a step, five times a second at most.

    Args:
        console: where to; by default standard error.

    >>> bars = Bars(Console(width=60))
    >>> bar = bars.begin("epoch 0", 10)
    >>> bar.show(5, "32 images/s")
    epoch 0: 5/10, 32 images/s
    >>> bar.end("epoch 0: 10 steps")
    epoch 0: 10 steps
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = Console(file=cast(IO[str], LastingFile())) if console is None else console
        self._lock = threading.RLock()
        self._open: set[Bar] = set()
        self._progress: Progress | None = None

    def begin(self, name: str, total: int | None) -> Bar:
        """The bar of an epoch.

        Args:
            name: of the epoch.
            total: its steps; None where they are not known.
        """
        with self._lock:
            if self._progress is None and self._console.is_terminal:
                columns = (
                    TextColumn("{task.description}", markup=False), BarColumn(24),
                    TextColumn("{task.fields[said]}", markup=False),
                )  # fmt: skip
                self._progress = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
                # Whatever ends the script, the terminal gets its cursor back.
                atexit.register(self.close)
                self._progress.start()
            bar = Bar(self, name, total, self._progress, _LINE_S if self._progress is None else _REFRESH_S)
            self._open.add(bar)
            return bar

    def end(self, bar: Bar, text: str) -> None:
        """Take a bar away, and leave a line in its place."""
        with self._lock:
            if bar not in self._open:
                return
            self._open.discard(bar)
            if not self._open:
                self.close()
            elif self._progress is not None and bar.task is not None:
                self._progress.remove_task(bar.task)
                self._progress.refresh()
            if text:
                self.say(text)

    def say(self, text: str) -> None:
        """A line that stays."""
        print_line(self._console, text)

    def close(self) -> None:
        """Take all bars away."""
        with self._lock:
            self._open.clear()
            progress, self._progress = self._progress, None
            if progress is not None:
                atexit.unregister(self.close)
                progress.stop()


class Bar:
    """The bar of one epoch; ``Bars.begin`` makes it.

    Attributes:
        task: of rich's; None where lines are printed.
        interval_s: seconds between two calls of ``show`` that make sense.
    """

    def __init__(
        self, bars: Bars, name: str, total: int | None, progress: Progress | None, interval_s: float
    ) -> None:
        self._bars, self._name, self._total = bars, name, total
        self._progress = progress
        self.interval_s = interval_s
        self.task: TaskID | None = None
        if progress is not None:
            self.task = progress.add_task(printable(name), total=total, said="")

    def show(self, steps: int, said: str) -> None:
        """Show how far it is.

        Args:
            steps: done so far.
            said: what else there is to say.
        """
        total = "" if self._total is None else f"/{self._total}"
        said = f"{steps}{total}, {said}"
        if self._progress is None or self.task is None:
            self._bars.say(f"{self._name}: {said}")
        elif self.task in self._progress.task_ids:
            fields: dict[str, Any] = {"said": printable(said)}
            self._progress.update(self.task, completed=steps, refresh=True, **fields)

    def end(self, text: str = "") -> None:
        """Take it away, and leave a line, if there is something to say."""
        self._bars.end(self, text)
