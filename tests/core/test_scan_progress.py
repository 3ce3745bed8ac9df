"""What is said about a scan that takes long."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

import pytest
from clock import ManualClock

from fastpipe.core.class_folders import ScanProgress

ROOT = "/data/train"


class Terminal:
    """Standard error, as a terminal."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_lines_of_the_log_after_two_seconds_and_each_ten(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fastpipe.index")
    clock = ManualClock()
    with ScanProgress(Path(ROOT), clock=clock) as progress:
        for second in range(1, 25):
            clock.now = 100.0 + second
            progress(second, 1000 * second)
    assert caplog.messages == [
        "Scanning /data/train: 2,000 files in 2 folders so far, 2 s",
        "Scanning /data/train: 12,000 files in 12 folders so far, 12 s",
        "Scanning /data/train: 22,000 files in 22 folders so far, 22 s",
        "Scanned /data/train in 24 s",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_a_short_scan_says_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "fastpipe.index")
    terminal = Terminal()
    for stream in (None, terminal):
        monkeypatch.setattr(sys, "stderr", stream)
        clock = ManualClock()
        with ScanProgress(ROOT, clock=clock) as progress:
            clock.now += 1.99
            progress(1, 1)
    assert (caplog.messages, terminal.text) == ([], "")


def test_without_standard_error_the_log_has_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "fastpipe.index")
    monkeypatch.setattr(sys, "stderr", None)
    clock = ManualClock()
    with ScanProgress(ROOT, clock=clock) as progress:
        clock.now += 3
        progress(1, 2)
    assert caplog.messages[0] == "Scanning /data/train: 2 files in 1 folders so far, 3 s"


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_line_in_a_terminal_goes_when_the_scan_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None
) -> None:
    caplog.set_level(logging.INFO, "fastpipe.index")
    monkeypatch.setenv("TERM", "xterm")
    terminal, clock = Terminal(), ManualClock()
    monkeypatch.setattr(sys, "stderr", terminal)
    threads = set(threading.enumerate())
    try:
        with ScanProgress("/data/[odd]", clock=clock) as progress:
            clock.now += 3
            progress(10, 12345)
            progress(11, 23456)
            if error is not None:
                raise error
    except KeyboardInterrupt:
        assert error is KeyboardInterrupt
    assert "Scanning /data/[odd]: " in terminal.text
    assert "23,456 files" in terminal.text
    assert terminal.text.endswith(("\x1b[2K", "\x1b[?25h"))  # the line is erased, the cursor is back
    assert caplog.messages == []
    assert set(threading.enumerate()) == threads
