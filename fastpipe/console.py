"""Print the progress, tables and reports of commands, and parse numbers in the commands' arguments."""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from types import TracebackType
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.status import Status
from rich.table import Table
from rich.text import Text

from fastpipe.core.progress import LINE_EVERY_S, SILENT_S
from fastpipe.core.text import in_bytes, printable

Number = TypeVar("Number", int, float)

_REPORT_WIDTH = 110
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def plain(text: str, style: str = "") -> Text:
    """Convert a string to a rich ``Text``: escape control characters, and show markup as it is written.

    The string may contain file names, and these may contain control characters and markup.
    """
    return Text(printable(text), style)


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print text on one line that is never wrapped, so that a path in the text can be copied."""
    console.print(plain(text, style), soft_wrap=True)


class PlainTable(Table):
    """A table whose title and cells are plain text, without markup."""

    def __init__(self, title: str | None = None, **options: Any) -> None:
        made = None if title is None else plain(title)
        super().__init__(title=made, title_justify="left", box=SIMPLE_HEAD, **options)

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row of cells."""
        super().add_row(*(plain(cell) if isinstance(cell, str) else cell for cell in cells), **options)


class Progress:
    """The progress display of a command.

    Args:
        console: the console to print on, normally standard error.

    In a terminal, a single line shows the current step and is updated.  In other outputs, a line is printed
    for each finished step, and for a step that takes longer than two seconds, then every ten seconds.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = Status("", console=console) if console.is_terminal else None
        self._step = ""  # without a terminal: the current step
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the line of the current step before other output.  The next step shows this line again."""
        if self._status is not None:
            self._status.stop()
        with self._lock:  # wait for a line that is being printed
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def now(self, text: str) -> None:
        """Show the current step; without a terminal, only if it takes long."""
        if self._status is not None:
            self._status.update(plain(text))
            self._status.start()
            return
        self._step = text
        if self._timer is None:
            self._tell_in(SILENT_S)

    def _tell_in(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._tell)
        self._timer.daemon = True
        self._timer.start()

    def _tell(self) -> None:
        with self._lock:
            if self._timer is threading.current_thread():  # otherwise it was cancelled meanwhile
                print_line(self._console, self._step)
                self._tell_in(LINE_EVERY_S)

    def done(self, text: str) -> None:
        """Print a permanent line about a finished step."""
        print_line(self._console, text)

    def step(self, text: str) -> None:
        """Show a small step as the current step of a terminal, or print it as a line in other outputs."""
        if self._status is not None:
            self.now(text)
        else:
            self.done(text)


@contextmanager
def in_any_encoding() -> Iterator[None]:
    """Escape characters that the encoding of standard output lacks, so that ``print`` raises no error."""
    stream, errors = sys.stdout, getattr(sys.stdout, "errors", None)
    if errors != "strict" or not hasattr(stream, "reconfigure"):
        yield
        return
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        stream.reconfigure(errors=errors)


class Pace:
    """Progress of work that is measured in bytes.

    Args:
        progress: the display to update.
        what: name of the work.
        nbytes: total number of bytes.
    """

    def __init__(self, progress: Progress, what: str, nbytes: int) -> None:
        self._progress, self._what, self._nbytes = progress, what, nbytes
        self._begun, self._done = time.monotonic(), 0

    def add(self, nbytes: int, where: str) -> None:
        """Count more bytes as done, and show the fraction done, the rate and the remaining time.

        Args:
            nbytes: number of bytes to add.
            where: text that says which part of the work is being done.
        """
        self._done += nbytes
        rate = self._done / max(time.monotonic() - self._begun, 1e-9)
        left = (self._nbytes - self._done) / max(rate, 1e-9)
        share = self._done / max(self._nbytes, 1)
        self._progress.now(
            f"{self._what} {where}: {share:.0%}, {in_bytes(rate)}/s, {in_time(max(left, 0.0))} left"
        )


def in_time(seconds: float) -> str:
    """Format a duration in seconds as text, in seconds, minutes or hours.

    >>> in_time(7.4), in_time(200), in_time(9000)
    ('7 s', '3 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def table(title: str, left: Sequence[str], right: Sequence[str]) -> PlainTable:
    """Make an empty table.

    Args:
        title: text above the table.
        left: headings of the first columns, which contain words.
        right: headings of the remaining columns, which contain numbers.
    """
    made = PlainTable(title, title_style="bold")
    for name in left:
        made.add_column(name, overflow="fold")
    for name in right:
        made.add_column(name, justify="right", overflow="fold")
    return made


def positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """Return an argparse type that accepts only numbers above 0.

    Args:
        kind: ``int`` or ``float``.

    >>> positive(int)("12"), positive(float)("0.5")
    (12, 0.5)
    """
    what = "whole number from 1" if kind is int else "number above 0"

    def parse(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = kind("0")
        if value <= 0:
            raise argparse.ArgumentTypeError(f"must be a {what}, got {text!r}")
        return value

    return parse


class TextReport(ABC):
    """A report that prints itself on a console.  ``str`` and ``repr`` return its text without colours."""

    @abstractmethod
    def show(self, console: Console) -> None:
        """Print the report on a console, in the width and colours of the console."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Return the whole report as dicts, lists, strings and numbers that JSON can represent."""

    def json(self) -> str:
        """Return the whole report as the text of a JSON object."""
        return json.dumps(self.as_json(), indent=1)

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=_REPORT_WIDTH, force_terminal=False, color_system=None)
        self.show(console)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.rstrip().splitlines())

    def __repr__(self) -> str:
        return str(self)


def sides(text: str) -> tuple[int, ...]:
    """Parse an argument that contains a whole number for each dimension; each must be at least 1.

    >>> sides("72,136,136")
    (72, 136, 136)
    """
    try:
        found = tuple(int(side) for side in re.split(r"[,x×]", text))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"must be whole numbers from 1, such as 64,128,128; got {text!r}")
    return found


def size(text: str) -> int:
    """Parse an argument that is a number of bytes, with or without a unit.

    >>> size("8GiB"), size("1.5M"), size("2 GB")
    (8589934592, 1572864, 2000000000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper().replace("IB", "") if match else "?"
    factor = _DECIMAL.get(unit) or _UNITS.get(unit)
    nbytes = int(float(match[1]) * factor) if match and factor else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"must be a number of bytes, such as 8GiB; got {text!r}")
    return nbytes
