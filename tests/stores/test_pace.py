"""As many requests as latency and bandwidth need: told by a simulated store."""

from __future__ import annotations

import random
import statistics

import pytest

from fastpipe.stores.prefetch import Pace

_ANSWERS = 6000


def _run(pace: Pace, latency: float, rate: float, *, used: int | None = None) -> float:
    """The usual limit for a store of this latency that gives at most so many objects a second; of which
    ``used`` requests are made at a time, if they are not as many as there may be."""
    generator, limits = random.Random(0), []
    for _ in range(_ANSWERS):
        busy = min(pace.limit, used or pace.limit)
        pace.note(max(latency * generator.uniform(0.7, 1.3), busy / rate), busy)
        limits.append(pace.limit)
    return statistics.median(limits[_ANSWERS // 2 :])


def test_it_rises_to_what_the_bandwidth_needs() -> None:
    # 1,500 a second of 30 ms each are 45 under way; more only wait.
    assert 40 <= _run(Pace("auto"), 0.03, 1500) <= 96


def test_latency_alone_is_met_by_as_many_as_there_may_be() -> None:
    pace = Pace("auto")
    assert _run(pace, 0.1, 1e6) == pace.most == 128


def test_where_nothing_is_gained_it_stays_low() -> None:
    assert _run(Pace("auto"), 0.001, 2000) <= 16


def test_nobody_asks_for_more_than_is_used() -> None:
    assert _run(Pace("auto"), 0.03, 1e6, used=4) == 32


def test_it_falls_where_a_network_becomes_slower_and_rises_again() -> None:
    pace = Pace("auto")
    assert _run(pace, 0.03, 1e6) == 128
    assert _run(pace, 0.03, 200) <= 32
    assert _run(pace, 0.03, 1e6) == 128


@pytest.mark.parametrize("latency", [0.001, 1.0])
def test_a_number_stays_what_it_is(latency: float) -> None:
    pace = Pace(7)
    assert _run(pace, latency, 100) == pace.most == 7
