"""What is shown while rows are made."""

from __future__ import annotations

import io
import itertools
import logging

import pytest
from rich.console import Console

from fastpipe.generation import schedule
from fastpipe.generation.schedule import Report


@pytest.fixture
def a_second_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a second after the one before."""
    ticks = itertools.count()
    monkeypatch.setattr(schedule.time, "monotonic", lambda: float(next(ticks)))


def test_a_bar_with_rate_size_failures_and_what_is_left(a_second_each: None) -> None:
    output = io.StringIO()
    with Report("motion.h5", 1000, console=Console(file=output, force_terminal=True, width=200)) as report:
        report.begin(100)
        report.advance(50, 1 << 20, 0)
        report.advance(50, 1 << 20, 2)
        report.step("reading what is there")
        report.say("12 rows have NaN")
    text = output.getvalue()
    assert "motion.h5" in text and "12 rows have NaN" in text
    # 100 rows in the time since it began; 800 are left.
    told = report._told(report._begun + 50.0)
    assert told == "200 of 1,000 rows, 2 rows/s, 2 MiB, 7 min left, 2 failed"


def test_lines_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fastpipe.generate")
    clock = [0.0]
    monkeypatch.setattr(schedule.time, "monotonic", lambda: clock[0])
    output = io.StringIO()
    with Report("motion.h5", 1000, console=Console(file=output, width=200)) as report:
        report.begin(0)
        for clock[0] in (10.0, 20.0, 31.0, 45.0, 62.0):
            report.advance(100, 1 << 20, 0)
        report.step("not shown")
    assert output.getvalue().splitlines() == [
        "motion.h5: 300 of 1,000 rows, 9.68 rows/s, 3 MiB, 72 s left",
        "motion.h5: 500 of 1,000 rows, 8.06 rows/s, 5 MiB, 62 s left",
    ]
    assert len(caplog.records) == 2


def test_nothing_is_shown_and_all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fastpipe.generate")
    output = io.StringIO()
    console = Console(file=output, force_terminal=True)
    with Report("motion.h5", 10, is_shown=False, console=console) as report:
        report.begin(0)
        report.advance(10, 80, 0)
        report.say("done")
    assert not output.getvalue() and caplog.messages == ["done"]
