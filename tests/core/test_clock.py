from __future__ import annotations

import copy
import pickle
import threading

import pytest

from fastpipe.core.clock import StageClock


def test_durations_of_a_stage_add_up() -> None:
    clock = StageClock()
    clock.add("read", 1_000_000_000)
    clock.add("read", 500_000_000)
    clock.add("decode", 250_000_000)
    assert clock.totals() == {"read": 1.5, "decode": 0.25}


def test_a_new_clock_is_empty() -> None:
    clock = StageClock()
    clock.add("x", 0)
    assert StageClock().totals() == {}


def test_reset_starts_from_zero_in_every_thread() -> None:
    clock = StageClock()
    clock.add("read", 5)
    thread = threading.Thread(target=clock.add, args=("read", 7))
    thread.start()
    thread.join()
    clock.reset()
    assert clock.totals() == {}
    clock.add("read", 1_000_000_000)
    assert clock.totals() == {"read": 1.0}


def test_threads_add_up_and_are_remembered_after_their_end() -> None:
    clock, start = StageClock(), threading.Barrier(8)

    def work() -> None:
        start.wait()
        for _ in range(1000):
            clock.add("decode", 1_000)
            clock.add("read", 2_000)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.totals() == pytest.approx({"decode": 0.008, "read": 0.016})


def test_totals_may_be_asked_for_while_threads_add() -> None:
    clock, stop = StageClock(), threading.Event()

    def work() -> None:
        number = 0
        while not stop.is_set():
            clock.add(f"stage {number % 500}", 1)
            number += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        seen = [sum(clock.totals().values()) for _ in range(200)]
    finally:
        stop.set()
        thread.join()
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda clock: pickle.loads(pickle.dumps(clock))]
)
def test_a_copy_starts_from_zero(duplicate: object) -> None:
    clock = StageClock()
    clock.add("read", 3)
    assert duplicate(clock).totals() == {}  # type: ignore[operator]
    assert clock.totals() == {"read": 3e-9}
