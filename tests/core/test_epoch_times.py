"""The times of an epoch, in any framework."""

from __future__ import annotations

import io
import logging
import math
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fastpipe.core.epoch_times import EpochLog, EpochTimes, WaitLimits, epoch_times, samples_of
from fastpipe.errors import OptionError

Pair = namedtuple("Pair", "image label")
OWN_LIST: list[Any] = []
OWN_LIST.append(OWN_LIST)
BATCHES: list[tuple[Any, float]] = [
    (torch.zeros(5, 3), 5), ([torch.zeros(5, 3), torch.zeros(5)], 5), ((np.zeros((7, 2)), 1), 7),
    (Pair(torch.zeros(4, 3), torch.zeros(4)), 4), ({"image": np.zeros((6, 1)), "label": np.zeros(6)}, 6),
    ({"a": {"b": [np.zeros(3)]}}, 3), ((["a", "b", "c"], torch.zeros(3)), 3), ([1, 2, 3, 4], 4),
    ({"text": ("a", "b")}, 2), (torch.tensor(3.0), 1), (range(9), 9),
    (None, math.nan), ("text", math.nan), (3, math.nan), ([], math.nan), ({}, math.nan), ((), math.nan),
    (OWN_LIST, math.nan), (SimpleNamespace(shape=(None, 3)), math.nan),
]  # fmt: skip


@pytest.mark.parametrize(("batch", "samples"), BATCHES, ids=lambda one: type(one).__name__)
def test_samples_are_the_first_dimension_of_the_first_array(batch: Any, samples: float) -> None:
    assert samples_of(batch) == pytest.approx(samples, nan_ok=True)


def test_a_batch_that_can_be_iterated_once_is_not_iterated() -> None:
    batch = iter([1, 2])
    assert math.isnan(samples_of(batch))
    assert list(batch) == [1, 2]


def test_times_are_medians_and_what_95_of_100_do_not_exceed() -> None:
    steps = [0.1] * 94 + [1.0] * 7
    waits = [0.5, *([0.01] * 93), *([0.8] * 7)]
    times = epoch_times(2, 20.0, steps, waits, 202, first_batch_seconds=0.7, warn_after=0.4)
    assert (times.epoch, times.seconds, times.steps) == (2, 20.0, 101)
    assert (times.step_seconds, times.step_seconds_p95) == (0.1, 1.0)
    assert (times.wait_seconds, times.wait_seconds_p95) == (0.01, 0.8)
    assert times.waiting == pytest.approx(sum(waits) / 20)
    assert times.images_per_second == pytest.approx(10.1)
    assert times.late_batches == 7  # the first, for which workers start, is none of them
    assert times.first_batch_seconds == 0.7 and times.is_complete


def test_unknown_values_are_none_and_not_printed() -> None:
    times = epoch_times(0, 1.5, [0.5, 1.0], None, math.nan, warn_after=0.1)
    assert times.waiting is times.images_per_second is times.wait_seconds is times.wait_seconds_p95 is None
    assert str(times) == "epoch 0: 1.50 s, 2 steps of 750.0 ms"
    assert times.scalars() == {"fastpipe/epoch_seconds": 1.5, "fastpipe/step_seconds": 0.75}
    assert WaitLimits(0.1, 0.1).warning(times) is None
    empty = epoch_times(0, 0.0, [], [], 0.0)
    assert (empty.steps, empty.step_seconds, empty.waiting, empty.images_per_second) == (0, 0.0, None, None)
    left = EpochTimes(1, 2.0, 4, 0.5, 0.25, 8.0, is_complete=False, gpu_utilisation=0.4)
    assert str(left) == (
        "epoch 1: 2.00 s, 4 steps of 500.0 ms, 25% waiting for data, 8 images/s, GPU 40% busy, left early"
    )
    assert left.scalars()["fastpipe/gpu_utilisation"] == 0.4
    assert "fastpipe/gpu_memory_utilisation" not in left.scalars()


def test_a_warning_names_the_count_the_share_the_stages_and_the_remedy() -> None:
    times = epoch_times(3, 10.0, [1.0] * 5, [0.5, 0.5, 2.0, 2.0, 0.0], 5, warn_after=1.0)
    remedy = "`fastpipe profile your_script.py` says why, and what would help"
    assert WaitLimits(1.0, 0.2).warning(times, {"decode": 3.0, "read": 1.0}) == (
        "epoch 3: 2 of 5 batches took longer than 1 s (median 0.5 s, 95 % within 2 s), and 50% of the time was "
        f"waiting for data. The loader's threads were at decode 75%, read 25%. {remedy}"
    )
    waiting = f"epoch 3: 50% of the time was waiting for data. {remedy}"
    assert WaitLimits(warn_waiting=0.2).warning(times, {}) == waiting
    assert WaitLimits(warn_waiting=0.5).warning(times) is WaitLimits().warning(times) is None


@pytest.mark.parametrize(
    "options", [{"warn_after": 0}, {"warn_after": -1.0}, {"warn_waiting": 0}, {"warn_waiting": 20}], ids=str
)
def test_impossible_limits_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="got"):
        WaitLimits(**options)


TIMES = EpochTimes(2, 1.2, 3, 0.4, 0.75, 8.3)
LINE = "epoch 2: 1.20 s, 3 steps of 400.0 ms, 75% waiting for data, 8 images/s"


@pytest.fixture
def logger() -> logging.Logger:
    """A logger whose messages nothing shows, as in a script that has not set up logging."""
    made = logging.Logger("fastpipe.epochs")
    made.propagate = False
    return made


def test_a_line_is_printed_unless_the_log_shows_it(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    EpochLog("auto", logger).add(TIMES, "validation ")
    assert capsys.readouterr().err == f"validation {LINE}\n"
    monkeypatch.setenv("RANK", "1")
    EpochLog("auto", logger).add(TIMES)
    monkeypatch.delenv("RANK")
    EpochLog(None, logger).add(TIMES)
    assert capsys.readouterr().err == ""
    logger.addHandler(logging.StreamHandler(shown := io.StringIO()))
    EpochLog("auto", logger).add(TIMES)
    assert shown.getvalue() == f"{LINE}\n" and capsys.readouterr().err == ""


def test_other_places_get_the_line_or_the_numbers(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    other, shown, found = logging.Logger("train"), io.StringIO(), []
    other.addHandler(logging.StreamHandler(shown))
    EpochLog(other, logger).add(TIMES)
    EpochLog(found.append, logger).add(TIMES)
    EpochLog(SimpleNamespace(log=found.append), logger).add(TIMES)
    EpochLog(SimpleNamespace(add_scalar=lambda *some: found.append(some)), logger).add(TIMES, "validation ")
    assert shown.getvalue() == f"{LINE}\n" and capsys.readouterr().err == ""
    assert found[:2] == [TIMES, TIMES.scalars()]
    assert ("fastpipe/validation/waiting", 0.75, 2) in found[2:] and len(found) == 2 + len(TIMES.scalars())
    for wrong in ("yes", 3):
        with pytest.raises(OptionError, match="log must be"):
            EpochLog(wrong, logger)
