"""Slow work is shown on standard error: a changing line in a terminal, and lines elsewhere."""

from __future__ import annotations

import io
import sys
import threading

import pytest
from clock import ManualClock
from rich.console import Console

from fastpipe import console
from fastpipe.core import progress
from fastpipe.core.progress import SlowWork


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_after_two_seconds_and_each_ten(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    with SlowWork("Scanning /data/[odd]\n", clock=clock) as say:
        for second in range(1, 25):
            clock.now = 100.0 + second
            say(f"{second} files")
    assert capsys.readouterr().err.splitlines() == [
        r"Scanning /data/[odd]\n: 2 files, 2 s",
        r"Scanning /data/[odd]\n: 12 files, 12 s",
        r"Scanning /data/[odd]\n: 22 files, 22 s",
        r"Scanning /data/[odd]\n: done in 24 s",
    ]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_a_terminal_has_one_line_that_is_erased_at_the_end(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None
) -> None:
    clock, terminal = ManualClock(), Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    try:
        with SlowWork("Scanning", clock=clock) as say:
            clock.now += 1.99
            say("1 file")
            assert terminal.getvalue() == "", "short work shows nothing"
            clock.now += 3
            say("23,456 files")
            if error is not None:
                raise error
    except (KeyboardInterrupt, ValueError):
        pass
    shown = terminal.getvalue()
    assert "Scanning: 23,456 files" in shown and "\n" not in shown and shown.endswith(progress._ERASE)


def test_a_process_without_standard_error_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    clock = ManualClock()
    with SlowWork("Scanning", clock=clock) as say:
        clock.now += 60
        say("1 file")


class Lines(io.StringIO):
    """An output that is no terminal; ``has_all`` is set when it has a number of lines."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count, self.has_all = count, threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("\n") >= self._count:
            self.has_all.set()
        return written


def test_a_long_step_of_a_command_is_a_line_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "SILENT_S", 0.01)
    monkeypatch.setattr(console, "LINE_EVERY_S", 0.01)
    lines = Lines(3)
    with console.Progress(Console(file=lines)) as display:
        display.now("loading torch")
        assert lines.has_all.wait(60)
        assert set(lines.getvalue().splitlines()) == {"loading torch"}
        display.stop()
        timers = [one for one in threading.enumerate() if isinstance(one, threading.Timer)]
        assert all(one.finished.is_set() for one in timers)
    monkeypatch.setattr(console, "SILENT_S", 3600.0)
    quiet = io.StringIO()
    with console.Progress(Console(file=quiet)) as display:
        display.now("listing")
    assert not quiet.getvalue()
