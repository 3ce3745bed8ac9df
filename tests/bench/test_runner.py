"""Interleaving and statistics, with contenders that only move a clock of ours."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpipe.bench.runner import (
    ContenderError,
    Plan,
    Sample,
    calibrate,
    interleave,
    ratios,
    round_order,
    summarise,
)


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class Steady:
    """Handles ``rate`` images a second after ``start_up`` seconds the first time."""

    workers = 0

    def __init__(
        self,
        key: str,
        clock: Clock,
        rate: float,
        *,
        chunk: int = 10,
        start_up: float = 0.0,
        fails_at: int = -1,
    ) -> None:
        self.key, self.clock, self.rate, self.chunk = key, clock, rate, chunk
        self.start_up, self.fails_at = start_up, fails_at
        self.asked: list[int] = []

    def measure(self, images: int) -> float:
        if len(self.asked) == self.fails_at:
            raise ContenderError(f"{self.key} broke")
        self.asked.append(images)
        seconds, self.start_up = images / self.rate + self.start_up, 0.0
        self.clock.time += seconds
        return seconds

    def close(self) -> None:
        pass


def run(contenders: list[Steady], clock: Clock, plan: Plan, **more: object) -> tuple[list[str], object]:
    order: list[str] = []
    note: Callable[[object, object], None] = lambda contender, sample: order.append(contender.key)  # type: ignore[attr-defined] # noqa: E731
    images = {contender.key: 10 * contender.chunk for contender in contenders}
    session = interleave(contenders, images, plan, on_sample=note, now=clock, pause=lambda seconds: None)
    return order, session


@given(st.integers(1, 12), st.integers(0, 50))
def test_a_round_has_everybody_once(count: int, number: int) -> None:
    assert sorted(round_order(count, number)) == list(range(count))


@given(st.integers(2, 12))
def test_everybody_is_first_and_last(count: int) -> None:
    orders = [round_order(count, number) for number in range(2 * count)]
    assert {order[0] for order in orders} == set(range(count))
    assert {order[-1] for order in orders} == set(range(count))


@given(st.integers(3, 12), st.integers(0, 20))
def test_nobody_follows_the_same_one_twice(count: int, number: int) -> None:
    first, second = round_order(count, number), round_order(count, number + 1)
    assert not set(pairwise(first)) & set(pairwise(second))


def test_rounds_are_interleaved() -> None:
    clock = Clock()
    order, session = run([Steady(key, clock, 100) for key in "abc"], clock, Plan(rounds=2))
    assert "".join(order) == "abcbac"
    assert {key: [sample.round for sample in s] for key, s in session.samples.items()} == {  # type: ignore[attr-defined]
        key: [0, 1] for key in "abc"
    }


def test_a_budget_stops_in_time_but_not_before_three_rounds() -> None:
    clock = Clock()
    _, session = run([Steady("a", clock, 100)], clock, Plan(rounds=None, budget_s=5.5))
    assert session.rounds == 5  # type: ignore[attr-defined]
    clock = Clock()
    _, session = run([Steady("a", clock, 100)], clock, Plan(rounds=None, budget_s=0.1))
    assert session.rounds == Plan.least  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rounds", "budget_s", "least", "made"), [(4, 99.0, 1, 4), (9, 5.5, 1, 5), (9, 0.1, 1, 1)]
)
def test_with_both_the_rounds_are_the_most(rounds: int, budget_s: float, least: int, made: int) -> None:
    clock = Clock()
    plan = Plan(rounds=rounds, budget_s=budget_s, least=least)
    _, session = run([Steady("a", clock, 100)], clock, plan)
    assert session.rounds == made  # type: ignore[attr-defined]


def test_who_breaks_leaves_and_the_others_stay() -> None:
    clock = Clock()
    contenders = [Steady("a", clock, 100), Steady("b", clock, 100, fails_at=1), Steady("c", clock, 100)]
    order, session = run(contenders, clock, Plan(rounds=3))
    assert session.failures == {"b": "b broke"}  # type: ignore[attr-defined]
    assert set(session.samples) == {"a", "c"}  # type: ignore[attr-defined]
    assert order.count("a") == order.count("c") == 3


def test_calibration_finds_the_length_despite_start_up() -> None:
    clock = Clock()
    contender = Steady("a", clock, 1000, chunk=64, start_up=3.0)
    images = calibrate(contender, 2.0)
    assert images % 64 == 0
    assert contender.measure(images) >= 2.0
    assert clock.time < 30


@pytest.mark.parametrize("rate", [0.5, 30.0, 1e5])
def test_calibration_of_slow_and_fast(rate: float) -> None:
    contender = Steady("a", Clock(), rate, chunk=4)
    images = calibrate(contender, 1.0)
    assert images % 4 == 0
    assert contender.measure(images) >= 1.0


def test_summary_is_median_and_range() -> None:
    assert summarise([5.0, 1.0, 2.0, 4.0]) == (3.0, 1.0, 5.0)


def test_a_ratio_is_taken_within_its_round_to_the_best_of_it() -> None:
    samples = {
        "one": [Sample(0, 10, 1.0), Sample(1, 10, 1.0)],  # 10, 10
        "two": [Sample(0, 10, 2.0), Sample(1, 10, 0.5)],  # 5, 20
        "us": [Sample(0, 10, 0.5), Sample(1, 10, 0.25)],  # 20, 40
    }
    assert ratios(samples, "us", ["one", "two"]) == [2.0, 2.0]
    assert ratios(samples, "one", ["one", "two"]) == [1.0, 0.5]
