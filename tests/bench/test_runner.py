"""Interleaving, statistics and what steps wait, with contenders that only move a clock of the test's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from bench_results import rated
from clock import ManualClock
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.bench import runner


class Steady:
    """Handles ``rate`` images a second after ``start_up`` seconds the first time."""

    workers = 0

    def __init__(self, key: str, clock: ManualClock, rate: float = 100, **options: Any) -> None:
        self.key, self.clock, self.rate, self.calls = key, clock, rate, 0
        self.chunk, self.start_up = options.get("chunk", 10), options.get("start_up", 0.0)
        self.fails_at = options.get("fails_at", -1)

    def measure(self, images: int) -> float:
        if self.calls == self.fails_at:
            raise runner.ContenderError(f"{self.key} broke")
        self.calls += 1
        seconds, self.start_up = images / self.rate + self.start_up, 0.0
        self.clock.now += seconds
        return seconds

    def close(self) -> None:
        pass


def run(clock: ManualClock, plan: runner.Plan, *contenders: Any) -> tuple[str, runner.Session]:
    """The order of measurements of one second, and the session."""
    order: list[str] = []

    def note(contender: Any, sample: runner.Sample) -> None:
        order.append(contender.key)

    images = {contender.key: 10 * contender.chunk for contender in contenders}
    options: Any = {"on_sample": note, "now": clock, "pause": lambda seconds: None}
    session = runner.interleave(contenders, images, plan, **options)
    return "".join(order), session


@settings(max_examples=30)
@given(st.integers(3, 12), st.integers(0, 20))
def test_rounds_have_each_once_and_first_and_last_and_after_others(count: int, number: int) -> None:
    assert sorted(runner.round_order(count, number)) == list(range(count))
    first, second = runner.round_order(count, number), runner.round_order(count, number + 1)
    assert not set(pairwise(first)) & set(pairwise(second))
    orders = [runner.round_order(count, number) for number in range(2 * count)]
    assert {order[0] for order in orders} == {order[-1] for order in orders} == set(range(count))


def test_rounds_are_interleaved_and_a_broken_contender_leaves_them() -> None:
    clock = ManualClock()
    order, session = run(clock, runner.Plan(rounds=2), *(Steady(key, clock) for key in "abc"))
    assert order == "abcbac"
    rounds = {key: [sample.round for sample in samples] for key, samples in session.samples.items()}
    assert rounds == {key: [0, 1] for key in "abc"}
    broken = Steady("b", clock, fails_at=1)
    order, session = run(clock, runner.Plan(rounds=3), Steady("a", clock), broken, Steady("c", clock))
    assert session.failures == {"b": "b broke"} and set(session.samples) == {"a", "c"}
    assert order.count("a") == order.count("c") == 3


@pytest.mark.parametrize(("plan", "made"), [
    (runner.Plan(rounds=None, budget_s=5.5), 5),
    (runner.Plan(rounds=None, budget_s=0.1), runner.Plan.least),
    (runner.Plan(rounds=4, budget_s=99.0, least=1), 4),
    (runner.Plan(rounds=9, budget_s=5.5, least=1), 5),
    (runner.Plan(rounds=9, budget_s=0.1, least=1), 1),
])  # fmt: skip
def test_a_budget_and_a_number_end_the_rounds(plan: runner.Plan, made: int) -> None:
    clock = ManualClock()
    assert run(clock, plan, Steady("a", clock))[1].rounds == made


@pytest.mark.parametrize(
    ("rate", "chunk", "start_up"), [(1000, 64, 3.0), (0.5, 4, 0), (30.0, 4, 0), (1e5, 4, 0)]
)
def test_calibration_finds_the_length(rate: float, chunk: int, start_up: float) -> None:
    contender = Steady("a", ManualClock(0.0), rate, chunk=chunk, start_up=start_up)
    images = runner.calibrate(contender, 1.0)
    assert images % chunk == 0 and contender.measure(images) >= 1.0 and contender.clock.now < 30


def test_a_ratio_is_taken_within_its_round_to_the_best_of_it() -> None:
    samples = {"one": rated(10, 10), "two": rated(5, 20), "us": rated(20, 40)}
    assert runner.ratios(samples, "us", ["one", "two"]) == [2.0, 2.0]
    assert runner.ratios(samples, "one", ["one", "two"]) == [1.0, 0.5]
    assert runner.summarise([5.0, 1.0, 2.0, 4.0]) == (3.0, 1.0, 5.0)  # median and range


def test_a_timeline_has_what_each_step_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(0.0)
    monkeypatch.setattr(runner, "time", clock)

    def batches(*waits: float, end: float = 0.0) -> Iterator[int]:
        for number, wait in enumerate(waits):
            clock.now += wait
            yield number
        clock.now += end

    found = runner.timeline_of(batches(3.0, 0.0, 1.0, end=2.0), lambda number: 1.0 + number)
    assert found == runner.Timeline((3.0, 0.0, 1.0), (1.0, 2.0, 3.0), 2.0)
    assert (found.total_s, found.share) == (12.0, 0.5)
    times = {"wait_s": [3.0, 0.0, 1.0], "busy_s": [1.0, 2.0, 3.0], "total_s": 12.0, "share": 0.5}
    assert found.as_json() == times
    clock.now = 0.0
    some = runner.timeline_of(batches(1.0, 1.0, 9.0), lambda number: 2.0, steps=2)
    assert some == runner.Timeline((1.0, 1.0), (2.0, 2.0))
    assert clock.now == 6.0  # no further batch is asked for
