"""The steps of a loop: what they get, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastpipe.tools import loops
from fastpipe.tools.loops import Enough, Loop, Phase, Steps, WatchedIterator


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that stands until it is set on."""

    class Clock:
        now = 0

        def __call__(self) -> int:
            return self.now

        def forward(self, milliseconds: float) -> None:
            self.now += int(milliseconds * 1e6)

    found = Clock()
    monkeypatch.setattr(loops, "perf_counter_ns", found)
    return found


def batches(clock: Any, count: int, wait_ms: float) -> Iterator[int]:
    for number in range(count):
        clock.forward(wait_ms)
        yield number


def test_waiting_and_being_busy_are_told_apart_and_the_first_step_of_an_epoch_is_not_counted(
    clock: Any,
) -> None:
    loop = Loop(float("inf"), is_replayed=False)
    for _ in range(2):
        for _ in WatchedIterator(batches(clock, 10, 3), loop):
            assert loop.is_in_step
            clock.forward(7)
        assert not loop.is_in_step
        clock.forward(1000)  # between epochs
    assert loop.phase is Phase.AS_IT_IS
    steps = loop.steps[Phase.AS_IT_IS]
    assert len(steps) + len(loop.steps[Phase.WARMING]) == 18
    assert steps.wait_s == pytest.approx(0.003) and steps.busy_s == pytest.approx(0.007)
    assert steps.seconds == pytest.approx(0.010)
    assert loop.epoch_starts == pytest.approx([0.003, 0.003])
    loop._enter(Phase.SETTLING)
    assert list(zip(WatchedIterator(batches(clock, 10, 3), loop), range(2), strict=False))
    assert len(loop.epoch_starts) == 2, "the same batch once more is no start"


def test_a_step_costs_the_same_however_many_there_were(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Steps] = []
    monkeypatch.setattr(Steps, "seconds", property(asked.append))
    assert len(list(WatchedIterator(batches(clock, 100, 3), Loop(float("inf"), True)))) == 100
    assert not asked


def test_first_steps_of_later_epochs_count_where_workers_stay(clock: Any) -> None:
    loop = Loop(float("inf"), is_replayed=False)
    loop.counts_starts = True
    for first in (500, 40, 50):
        for _ in WatchedIterator((clock.forward(first if not at else 1) for at in range(6)), loop):
            clock.forward(7)
    steps = loop.steps[Phase.AS_IT_IS]
    assert len(loop.steps[Phase.WARMING]) == 2 and len(steps) == 15
    assert steps.wait_s == pytest.approx((0.040 + 0.050 + 13 * 0.001) / 15)


def test_how_long_an_iterator_took_to_make_belongs_to_its_first_batch(clock: Any) -> None:
    loop = Loop(float("inf"), is_replayed=False)
    loop.counts_starts = True
    for took in (500, 40):
        clock.forward(took)
        for _ in WatchedIterator(batches(clock, 4, 3), loop, int(took * 1e6)):
            clock.forward(7)
    assert loop.epoch_starts == pytest.approx([0.503, 0.043])
    assert loop.steps[Phase.AS_IT_IS].wait_s == pytest.approx((0.043 + 4 * 0.003) / 5)


@pytest.mark.parametrize("trains", [False, True])
def test_a_loop_that_does_not_train_is_looked_at_for_longer(clock: Any, trains: bool) -> None:
    loop = Loop(2.0, is_replayed=True, may_judge=True)
    with torch.set_grad_enabled(trains):
        for _ in WatchedIterator(batches(clock, 400, 3), loop):
            clock.forward(97)
            if loop.phase is Phase.SETTLING:
                break
    wanted = 20 if trains else 20 + 120
    assert len(loop.steps[Phase.AS_IT_IS]) == wanted


def test_all_loops_end_a_script_that_was_ended(clock: Any) -> None:
    first, other = Loop(0.02, False, lambda: None), Loop(0.02, False, lambda: None)
    first.others = other.others = [first, other]
    watched = WatchedIterator(batches(clock, 50, 3), first)
    with pytest.raises(Enough):
        for _ in watched:
            clock.forward(7)
    for one in (watched, WatchedIterator(batches(clock, 50, 3), other)):
        with pytest.raises(Enough):
            next(one)
    first.close()
    assert next(watched) == 8  # after the profile


def test_what_a_loop_gets_when_it_is_replayed_and_tried(clock: Any) -> None:
    trials = [iter(["a"] * 1000), None]
    loop = Loop(0.1, is_replayed=True, next_phase=lambda: trials.pop(0))
    got: list[Any] = []
    with pytest.raises(Enough):
        for batch in WatchedIterator(batches(clock, 1000, 3), loop):
            got.append((loop.phase, batch))
            clock.forward(7)
    assert loop.is_over and not trials
    kept = [batch for phase, batch in got if phase in (Phase.WARMING, Phase.AS_IT_IS)]
    assert kept == list(range(len(kept)))  # as it is: each of its batches, in order
    assert {batch for phase, batch in got if phase is Phase.INSTANT} == {kept[-1]}
    assert {batch for phase, batch in got if phase is Phase.TRIED} == {"a"}
    assert loop.steps[Phase.INSTANT].seconds == pytest.approx(0.007)
    order = list(dict.fromkeys(phase for phase, _ in got))
    assert order == [
        Phase.WARMING, Phase.AS_IT_IS, Phase.SETTLING, Phase.INSTANT, Phase.ADAPTING, Phase.TRIED
    ]  # fmt: skip


def test_a_replayed_loop_goes_on_over_epochs_that_are_short(clock: Any) -> None:
    loop = Loop(0.2, is_replayed=True, next_phase=lambda: None)
    epochs = 0
    with pytest.raises(Enough):
        while True:
            epochs += 1
            for _ in WatchedIterator(batches(clock, 4, 10), loop):
                clock.forward(10)
    assert epochs > 2 and len(loop.steps[Phase.AS_IT_IS]) >= 5


def test_without_a_replay_nothing_is_kept(clock: Any) -> None:
    loop = Loop(0.1, is_replayed=False, next_phase=lambda: None)
    with pytest.raises(Enough):
        for _ in WatchedIterator(batches(clock, 1000, 10), loop):
            clock.forward(1)
    assert loop.batch is None and not len(loop.steps[Phase.INSTANT])


def test_a_loop_that_is_left_is_in_no_step_any_more(clock: Any) -> None:
    loop = Loop(float("inf"), is_replayed=False)
    for _ in WatchedIterator(batches(clock, 5, 1), loop):
        break
    assert not loop.is_in_step


def test_an_error_of_the_loader_is_the_scripts_to_see(clock: Any) -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise OSError("the disk")

    loop = Loop(float("inf"), is_replayed=True)
    with pytest.raises(OSError, match="the disk"):
        list(WatchedIterator(failing(), loop))
    assert not loop.is_in_step


def test_an_iterators_own_attributes_are_there() -> None:
    class Inner:
        length = 7

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            return 1

        def __len__(self) -> int:
            return 9

    watched = WatchedIterator(Inner(), Loop(1, is_replayed=False))
    assert len(watched) == 9 and watched.length == 7 and iter(watched) is watched and next(watched) == 1


def test_no_steps_take_no_time() -> None:
    steps = Steps()
    assert (steps.seconds, steps.wait_s, steps.busy_s, len(steps)) == (0, 0, 0, 0)


def test_how_much_longer_threads_wait_for_cores_than_with_data_at_once(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = 0
    monkeypatch.setattr(loops, "threads_delay_ns", lambda: waited)
    loop = Loop(0.1, is_replayed=True, next_phase=lambda: None)
    with pytest.raises(Enough):
        for _ in WatchedIterator(batches(clock, 1000, 3), loop):
            clock.forward(7)
            waited += 3000 if loop.phase is Phase.AS_IT_IS else 200
    assert loop.step_delay_ns == 2800


def test_a_kernel_that_tells_nothing_of_waiting_for_cores(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "threads_delay_ns", lambda: None)
    loop = Loop(0.1, is_replayed=True, next_phase=lambda: None)
    with pytest.raises(Enough):
        for _ in WatchedIterator(batches(clock, 1000, 3), loop):
            clock.forward(7)
    assert loop.step_delay_ns is None


def test_what_runs_between_epochs_is_no_work_of_steps(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = 0
    monkeypatch.setattr(loops, "processes_cpu_ns", lambda: ran)
    loop = Loop(2.0, is_replayed=True, next_phase=lambda: None)
    with pytest.raises(Enough):
        for _ in range(1000):
            for _ in zip(WatchedIterator(batches(clock, 50, 3), loop), range(20), strict=False):
                clock.forward(7)
                ran += 9_000_000
            clock.forward(3000)  # it is judged
            ran += 6_000_000_000
    assert loop.step_cpu_ns == 9_000_000


def test_what_is_measured_may_take_the_loops_own_batches(clock: Any) -> None:
    def measure() -> None:
        found.extend(next(iterator) for _ in range(3))

    found: list[int] = []
    loop = Loop(0.02, is_replayed=False, next_phase=measure)
    iterator = WatchedIterator(batches(clock, 100, 3), loop)
    with pytest.raises(Enough):
        for _ in iterator:
            clock.forward(7)
    assert len(found) == 3 and found == list(range(found[0], found[0] + 3))


@pytest.mark.parametrize("is_replayed", [False, True])
def test_a_few_steps_are_enough_where_the_batches_end_soon(clock: Any, is_replayed: bool) -> None:
    loop = Loop(60.0, is_replayed)
    seen = []
    for end in (4, 8):  # before which step it is told; of the first epoch too few have been measured then
        for number, _ in zip(range(10), WatchedIterator(batches(clock, 11, 3), loop), strict=False):
            if number == end:
                loop.ends_soon()
            clock.forward(7)
            seen.append((loop.phase, len(loop.steps[Phase.AS_IT_IS])))
            if number == end + 1:
                break
    assert seen[5] == (Phase.AS_IT_IS, 2)
    assert seen[-1] == ((Phase.SETTLING, 10) if is_replayed else (Phase.AS_IT_IS, 10))
