"""What ``generate`` shows: an estimate before it works for hours, and progress while it does."""

from __future__ import annotations

import io
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from generated import made
from rich.console import Console

from fastpipe.errors import OptionError, WorkerError
from fastpipe.generation import ProbeReport, generate, probe, run, schedule
from fastpipe.generation.estimate import TopFunction
from fastpipe.generation.schedule import Report


def _slow() -> Callable:
    def get_pose(time: float) -> float:
        total = 0.0
        for step in range(400):
            total += (time * step) % 7
        return total

    def sample(index: int, rng: np.random.Generator) -> dict:
        return {"motion": np.array([get_pose(frame * 0.04) for frame in range(40)], "f4")}

    return sample


def _report(**changes: Any) -> ProbeReport:
    values = {
        "rows": 100_000, "row_nbytes": 75_000, "alone": 0.2, "cores": 7.4, "single": 0.15, "workers": 8,
        "together": 1.1, "free_nbytes": 1 << 40, "top": (TopFunction("get_pose (actor.py:12)", 0.93, 250.0),),
    }  # fmt: skip
    return ProbeReport(**{**values, **changes})


def test_an_estimate_names_the_slow_function_with_its_calls(tmp_path: Path) -> None:
    found = probe(_slow(), 1000, tmp_path / "x.h5", workers=2)
    assert found.rows == 1000 and found.row_nbytes == 160 and found.workers == 2
    assert found.seconds == pytest.approx(1000 / found.rate) and found.nbytes == 160_000
    [pose] = [one for one in found.top if one.where.startswith("get_pose (test_estimate.py:")]
    assert pose.calls == 40 and pose.share > 0.5
    assert re.search(r"\d% into get_pose \(test_estimate\.py:\d+\), called 40 times", str(found))
    assert not list(tmp_path.iterdir())
    with pytest.raises(OptionError, match="n must be a whole number"):
        probe(_slow(), 0, tmp_path / "x.h5")


@pytest.mark.parametrize(
    ("changes", "best_workers", "words"),
    [
        ({}, 8, ["100,000 rows will take 25.3 h and 6.98 GiB: a row takes 6.67 s, 73.2 KiB",
                 "alone it keeps 7.4 cores busy, 0.2 rows/s; with one thread for each library, as in workers, 0.15",
                 "8 workers: 1.1 rows/s, 5.50 × a loop", "WARNING: this takes 25.3 h",
                 "93% into get_pose (actor.py:12), called 250 times"]),
        ({"together": 0.16}, 0, ["not worth starting"]),
        ({"free_nbytes": 1 << 30}, 8, ["WARNING: 6.98 GiB do not fit the disk, where 1 GiB are free"]),
    ],
)  # fmt: skip
def test_an_estimate_in_words(changes: dict[str, Any], best_workers: int, words: list[str]) -> None:
    report = _report(**changes)
    assert report.best_workers == best_workers and not [part for part in words if part not in str(report)]
    assert ("do not fit" in str(report)) == ("free_nbytes" in changes)


@pytest.mark.slow
def test_a_function_with_batch_and_few_rows_has_an_estimate(tmp_path: Path) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict:
        return {"x": rng.normal(size=2)}

    sample.batch = lambda indices, rng: {"x": rng.normal(size=2)}  # type: ignore[attr-defined]
    found = probe(sample, 3, tmp_path / "x.h5", workers=1, executor="threads")
    assert found.rate > 0 and found.rows == 3


@pytest.mark.slow
def test_long_work_begins_with_an_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(run, "_PROBED_S", 0.0)
    options: dict[str, Any] = {"seed": 0, "workers": 2, "executor": "threads"}
    found = generate(_slow(), 30, tmp_path / "x.h5", **options)
    shown = capfd.readouterr().err
    assert found.rows == 30 and "30 rows will take" in shown and "into get_pose" in shown
    generate(_slow(), 30, tmp_path / "y.h5", probe=False, **options)
    assert "will take" not in capfd.readouterr().err
    assert (tmp_path / "x.h5").read_bytes() == (tmp_path / "y.h5").read_bytes()


@pytest.mark.parametrize(("later_s", "is_probed"), [(0.001, False), (100.0, True)])
def test_a_first_row_that_loads_things_is_not_taken_for_the_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later_s: float, is_probed: bool
) -> None:
    clock = [0.0]

    def sample(index: int, rng: np.random.Generator) -> dict:
        clock[0] += 1000.0 if clock[0] == 0 else later_s
        return {"x": np.float32(index)}

    look = mock.Mock(side_effect=WorkerError("no look", pid=0))
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: clock[0], monotonic=time.monotonic))
    monkeypatch.setattr(run, "look", look)
    made(sample, tmp_path / "x.h5", 50, workers=1, executor="threads")
    assert look.called == is_probed


@pytest.mark.parametrize("where", ["terminal", "file", "not shown"])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fastpipe.generate")
    clock = [0.0]
    monkeypatch.setattr(schedule.time, "monotonic", lambda: clock[0])
    output = io.StringIO()
    console = Console(file=output, force_terminal=where != "file" or None, width=200)
    with Report("motion.h5", 1000, is_shown=where != "not shown", console=console) as report:
        report.begin(0)
        for clock[0] in (10.0, 20.0, 31.0, 45.0, 62.0):
            report.advance(100, 1 << 20, 0)
        report.step("reading what is there")
        if where != "file":
            report.advance(100, 1 << 20, 2)
            report.say("12 rows have NaN")
    lines = output.getvalue().splitlines()
    told = [
        "motion.h5: 300 of 1,000 rows, 9.68 rows/s, 3 MiB, 72 s left",
        "motion.h5: 500 of 1,000 rows, 8.06 rows/s, 5 MiB, 62 s left",
    ]
    if where == "terminal":
        for words in ("motion.h5", "12 rows have NaN", "600 of 1,000 rows.*left, 2 failed"):
            assert any(re.search(words, line) for line in lines)
    elif where == "file":
        assert lines == told == caplog.messages
    else:
        assert not lines and caplog.messages == [*told, "12 rows have NaN"], "it is logged"
