"""What steps wait for their batches, by a clock of the test's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clock import ManualClock

from fastpipe.bench import runner as stall
from fastpipe.bench.runner import Timeline, timeline_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    made = ManualClock(0.0)
    monkeypatch.setattr(stall, "time", made)
    return made


def batches(clock: ManualClock, *waits: float, end: float = 0.0) -> Iterator[int]:
    for number, wait in enumerate(waits):
        clock.now += wait
        yield number
    clock.now += end


def test_all_of_an_epoch(clock: ManualClock) -> None:
    found = timeline_of(batches(clock, 3.0, 0.0, 1.0, end=2.0), lambda number: 1.0 + number)
    assert found == Timeline((3.0, 0.0, 1.0), (1.0, 2.0, 3.0), 2.0)
    assert (found.total_s, found.share) == (12.0, 0.5)
    assert found.as_json() == {
        "wait_s": [3.0, 0.0, 1.0], "busy_s": [1.0, 2.0, 3.0], "total_s": 12.0, "share": 0.5,
    }  # fmt: skip


def test_after_some_steps_no_further_batch_is_asked_for(clock: ManualClock) -> None:
    source = batches(clock, 1.0, 1.0, 9.0)
    assert timeline_of(source, lambda number: 2.0, steps=2) == Timeline((1.0, 1.0), (2.0, 2.0))
    assert clock.now == 6.0
