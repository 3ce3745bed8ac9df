"""What is said of a function before it is called for hours."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastpipe.errors import GenerationError, OptionError, WorkerError
from fastpipe.generation import ProbeReport, generate, probe, run
from fastpipe.generation.estimate import TopFunction


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


def test_the_slow_function_is_named_with_its_calls(tmp_path: Path) -> None:
    found = probe(_slow(), 1000, tmp_path / "x.h5", workers=2)
    assert found.rows == 1000 and found.row_nbytes == 160 and found.workers == 2
    assert found.seconds == pytest.approx(1000 / found.rate) and found.nbytes == 160_000
    [pose] = [one for one in found.top if one.where.startswith("get_pose (test_estimate.py:")]
    assert pose.calls == 40 and pose.share > 0.5
    assert re.search(r"\d% into get_pose \(test_estimate\.py:\d+\), called 40 times", str(found))
    assert not list(tmp_path.iterdir())


def test_case_3_is_told_in_hours_with_numbers() -> None:
    text = str(_report())
    assert "100,000 rows will take 25.3 h and 6.98 GiB: a row takes 6.67 s, 73.2 KiB" in text
    assert (
        "alone it keeps 7.4 cores busy, 0.2 rows/s; with one thread for each library, as in workers, 0.15"
        in text
    )
    assert "8 workers: 1.1 rows/s, 5.50 × a loop" in text
    assert (
        "WARNING: this takes 25.3 h" in text and "93% into get_pose (actor.py:12), called 250 times" in text
    )


def test_workers_that_bring_nothing_are_not_started() -> None:
    report = _report(together=0.16)
    assert report.best_workers == 0 and report.rate == 0.15 and "not worth starting" in str(report)
    assert _report().best_workers == 8


def test_a_file_that_does_not_fit_the_disk() -> None:
    assert "WARNING: 6.98 GiB do not fit the disk, where 1 GiB are free" in str(_report(free_nbytes=1 << 30))
    assert "do not fit" not in str(_report())


def test_a_function_with_batch_and_few_rows(tmp_path: Path) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict:
        return {"x": rng.normal(size=2)}

    sample.batch = lambda indices, rng: {"x": rng.normal(size=2)}  # type: ignore[attr-defined]
    found = probe(sample, 3, tmp_path / "x.h5", workers=1, executor="threads")
    assert found.rate > 0 and found.rows == 3


def test_long_work_begins_with_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(run, "_PROBED_S", 0.0)
    made = generate(_slow(), 30, tmp_path / "x.h5", seed=0, workers=2)
    told = capfd.readouterr().err
    assert made.rows == 30 and "30 rows will take" in told and "into get_pose" in told
    generate(_slow(), 30, tmp_path / "y.h5", seed=0, workers=2, probe=False)
    assert "will take" not in capfd.readouterr().err
    assert (tmp_path / "x.h5").read_bytes() == (tmp_path / "y.h5").read_bytes()


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="n= is a whole number"):
        probe(_slow(), 0, tmp_path / "x.h5")


@pytest.mark.parametrize(("later_s", "is_probed"), [(0.001, False), (100.0, True)])
def test_a_first_row_that_loads_things_is_not_taken_for_the_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later_s: float, is_probed: bool
) -> None:
    clock, probed = [0.0], []

    def sample(index: int, rng: np.random.Generator) -> dict:
        clock[0] += 1000.0 if clock[0] == 0 else later_s
        return {"x": np.float32(index)}

    def probe_of(*args: Any) -> Any:
        probed.append(args)
        raise WorkerError("no look", pid=0)

    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: clock[0], monotonic=time.monotonic))
    monkeypatch.setattr(run, "look", probe_of)
    generate(sample, 50, tmp_path / "x.h5", seed=0, workers=1, executor="threads", progress=False)
    assert bool(probed) == is_probed


def test_a_row_that_fails_behind_the_first_is_told_when_it_is_made(tmp_path: Path) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict:
        if index == 2:
            raise KeyError("scene")
        return {"x": np.float32(index)}

    with pytest.raises(GenerationError, match="row 2 failed: KeyError: 'scene'"):
        generate(sample, 50, tmp_path / "x.h5", seed=0, workers=0, progress=False)
