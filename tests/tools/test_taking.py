"""Which of the batches that a loader gives are counted, and how long they took."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fastpipe.tools import costs as taking
from fastpipe.tools.costs import Epoch, epochs


class Loader:
    """Begins with a second, then makes a batch in each further one; the clock is what it says."""

    def __init__(self, length: int) -> None:
        self.length, self.now, self.looks, self.alive = length, 0.0, 0, 0

    def __call__(self) -> float:
        return self.now

    def begin(self) -> Iterator[int]:
        self.now += 1.0
        self.alive += 1
        try:
            for number in range(self.length):
                self.now += 1.0
                yield number
        finally:
            self.alive -= 1

    def step(self, batch: int) -> None:
        self.now += 0.5

    def look(self) -> int:
        self.looks += 1
        return self.looks


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Any:
    def take(length: int, skipped: int, seconds: float, **options: Any) -> tuple[list[Epoch], Loader]:
        loader = Loader(length)
        monkeypatch.setattr(taking, "perf_counter", loader)
        found = []
        for epoch in epochs(loader.begin, skipped, seconds, step=loader.step, look=loader.look, **options):
            assert loader.alive == (not epoch.is_over)  # for who wants to look at its workers
            found.append(epoch)
        assert not loader.alive
        return found, loader

    return take


def test_the_first_batches_are_left_out(taken: Any) -> None:
    [epoch], _ = taken(100, 2, 20.0)
    assert epoch.taken - epoch.batches == 2 and not epoch.is_over
    assert epoch.seconds == 1.5 * epoch.batches > 20 and epoch.waited == 1.0 * epoch.batches
    assert epoch.began == 2  # what was looked at before the first of them


def test_some_turns_of_all_workers_are_taken_however_short_the_time_is(taken: Any) -> None:
    [epoch], _ = taken(100, 3, 5.0, limit=100.0)
    assert epoch.taken == 12


def test_a_time_that_is_over_ends_it(taken: Any) -> None:
    [epoch], _ = taken(100, 30, 2.0)
    # Not enough to leave some out: all of it, with the start.
    assert epoch.taken == epoch.batches < 30 and epoch.seconds == 2.0 + 1.5 * epoch.batches - 1.0
    assert epoch.began == 1


@pytest.mark.parametrize(("counts_start", "batches", "seconds"), [(False, 8, 12.0), (True, 10, 16.0)])
def test_an_epoch_that_is_over_is_counted_whole_on_request(
    counts_start: bool, batches: int, seconds: float, taken: Any
) -> None:
    (first, rest), _ = taken(10, 2, 20.0, counts_start=counts_start, limit=100.0)
    assert first.is_over and (first.batches, first.taken, first.seconds) == (batches, 10, seconds)
    assert not rest.is_over and rest.seconds == 1.5 * rest.batches  # enough was seen in the midst of it


def test_an_epoch_that_is_hardly_longer_than_what_is_skipped_is_counted_whole(taken: Any) -> None:
    found, _ = taken(5, 3, 1.0, limit=100.0)
    assert [(epoch.batches, epoch.seconds) for epoch in found] == [(5, 8.5)]


def test_nothing_comes(taken: Any) -> None:
    [epoch], _ = taken(0, 2, 1.0)
    assert (epoch.batches, epoch.taken, epoch.is_over, epoch.waited) == (0, 0, True, 1.0)
