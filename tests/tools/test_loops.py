"""The steps of a loop, by a clock and a GPU that stand still unless a test moves them on."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastpipe.tools import loops, thread_times
from fastpipe.tools.loops import Enough, Loop, Phase, Steps, WatchedIterator
from fastpipe.tools.thread_times import DeviceClock, DeviceTimes, threads_delay_ns


class Clock:  # of Python, in milliseconds; and a GPU's stream, in which work is done one after another
    def __init__(self) -> None:
        self.now = self.free_at = 0.0
        self.may_record = self.is_initialized = True
        self.living: weakref.WeakSet[Any] = weakref.WeakSet()
        self.made = 0

    def launch(self, milliseconds: float) -> None:
        self.free_at = max(self.free_at, self.now) + milliseconds

    def synchronize(self) -> None:
        self.now = max(self.now, self.free_at)

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        self.made += 1
        self.living.add(event := Event(self))
        return event


class Event:  # as ``torch.cuda.Event``: it has no way of waiting
    def __init__(self, clock: Clock) -> None:
        self.clock, self.at = clock, -1.0

    def record(self) -> None:
        if not self.clock.may_record:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.at = max(self.clock.free_at, self.clock.now)

    def query(self) -> bool:
        return self.at <= self.clock.now

    def elapsed_time(self, end: Event) -> float:
        if not self.query() or not end.query():
            raise RuntimeError("device not ready")
        return end.at - self.at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(loops, "perf_counter_ns", lambda: round(clock.now * 1e6))
    return clock


@pytest.fixture
def gpu(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    cuda: Any = SimpleNamespace(Event=clock.event, synchronize=clock.synchronize)
    cuda.is_initialized = lambda: clock.is_initialized
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    return clock


def batches(clock: Clock, count: int, wait: float) -> Iterator[int]:
    for number in range(count):
        clock.now += wait
        yield number


def train(clock: Clock, loop: Loop, steps: int, *, wait: float = 3, busy: float = 7, see: Any = id) -> None:
    for batch in WatchedIterator(batches(clock, steps, wait), loop):
        see(batch)
        clock.now += busy


def train_on_gpu(clock: Clock, loop: Loop, computes: float, steps: int = 60) -> None:
    """A step asks for the batch in 30 ms of Python's time, and for work of the GPU in 1 ms."""
    train(clock, loop, steps, wait=30, busy=1, see=lambda _: clock.launch(computes))


def watched_loop() -> Loop:
    return Loop(float("inf"), is_replayed=False)


def test_waiting_and_working_are_measured_without_the_first_step_of_an_epoch(clock: Clock) -> None:
    loop = watched_loop()
    for _ in range(2):
        train(clock, loop, 10, see=lambda _: loop.is_in_step or pytest.fail())
        assert not loop.is_in_step
        clock.now += 1000  # between epochs
    steps = loop.steps[Phase.AS_IT_IS]
    assert loop.phase is Phase.AS_IT_IS and len(steps) + len(loop.steps[Phase.WARMING]) == 18
    assert (steps.wait_s, steps.busy_s, steps.seconds) == pytest.approx((0.003, 0.007, 0.010))
    assert loop.epoch_starts == pytest.approx([0.003, 0.003])
    loop._enter(Phase.SETTLING)
    for _ in WatchedIterator(batches(clock, 10, 3), loop):
        break
    assert not loop.is_in_step and len(loop.epoch_starts) == 2, "a repeated batch is no start"
    assert (Steps().seconds, Steps().wait_s, Steps().busy_s, len(Steps())) == (0, 0, 0, 0)


def test_first_steps_of_later_epochs_count_where_workers_stay(clock: Clock) -> None:
    loop = watched_loop()
    loop.counts_starts = True
    for started in (500, 40, 50):  # milliseconds in which the iterator is made
        clock.now += started
        for _ in WatchedIterator(batches(clock, 6, 1), loop, int(started * 1e6)):
            clock.now += 7
    steps = loop.steps[Phase.AS_IT_IS]
    assert len(loop.steps[Phase.WARMING]) == 2 and len(steps) == 15
    assert loop.epoch_starts == pytest.approx([0.501, 0.041, 0.051])
    assert steps.wait_s == pytest.approx((0.041 + 0.051 + 13 * 0.001) / 15)


@pytest.mark.parametrize(("delays", "found"), [((3000, 200), 2800), (None, None)], ids=["known", "unknown"])
def test_more_waiting_of_threads_for_cores_than_with_data_at_once_is_measured(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, delays: Any, found: int | None
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(loops, "threads_delay_ns", lambda: sum(waits) if delays else None)
    loop = Loop(0.1, is_replayed=True, next_phase=lambda: None)
    with pytest.raises(Enough):
        train(
            clock, loop, 1000, see=lambda _: delays and waits.append(delays[loop.phase is not Phase.AS_IT_IS])
        )
    assert loop.step_delay_ns == found


def test_work_between_epochs_does_not_count_as_work_of_steps(clock: Clock, monkeypatch: Any) -> None:
    ran = 0
    monkeypatch.setattr(loops, "processes_cpu_ns", lambda: ran)
    loop = Loop(2.0, is_replayed=True, next_phase=lambda: None)
    with pytest.raises(Enough):
        for _ in range(1000):
            for _ in zip(WatchedIterator(batches(clock, 50, 3), loop), range(20), strict=False):
                clock.now += 7
                ran += 9_000_000
            clock.now += 3000  # an evaluation
            ran += 6_000_000_000
    assert loop.step_cpu_ns == 9_000_000


def test_a_measurement_may_take_batches_of_the_loop(clock: Clock) -> None:
    loop = Loop(0.02, is_replayed=False, next_phase=lambda: found.extend(next(iterator) for _ in range(3)))
    found: list[int] = []
    iterator = WatchedIterator(batches(clock, 100, 3), loop)
    with pytest.raises(Enough):
        for _ in iterator:
            clock.now += 7
    assert len(found) == 3 and found == list(range(found[0], found[0] + 3))


@pytest.mark.parametrize(("computes", "wait_s"), [(10.0, 0.021), (100.0, 0.0)], ids=["waits", "is busy"])
def test_a_gpu_waits_for_batches_or_is_busy_although_python_waits(
    gpu: Clock, computes: float, wait_s: float
) -> None:
    loop = watched_loop()
    for _ in range(4):
        train_on_gpu(gpu, loop, computes, 20)
        gpu.launch(10_000.0)  # a validation, which is no step
        gpu.synchronize()
    # It is free 9 ms after Python asks for the next batch, which is there after 30.
    assert loop.device.times() == DeviceTimes(pytest.approx(wait_s), pytest.approx(computes / 1000))
    assert loop.steps[Phase.AS_IT_IS].wait_s == pytest.approx(0.030)


def test_work_that_a_gpu_has_still_to_do_counts_for_the_steps_that_asked_for_it(gpu: Clock) -> None:
    def other() -> Any:
        gpu.launch(5_000.0)  # another loader's augmentation, which belongs to no step
        return None if loop.steps[Phase.TRIED] else iter([0] * 1000)

    loop = Loop(1.0, is_replayed=True, next_phase=other)
    with pytest.raises(Enough):
        train_on_gpu(gpu, loop, 100.0, steps=1000)  # Python is ahead of the GPU
    for phase in (Phase.INSTANT, Phase.TRIED):
        assert loop.steps[phase].seconds == pytest.approx(0.100, rel=0.02)


def test_every_fourth_step_is_measured_by_three_events_that_are_freed_and_few(gpu: Clock) -> None:
    loop = watched_loop()
    train_on_gpu(gpu, loop, 10.0, steps=403)
    assert 3 * 99 <= gpu.made <= 3 * 101 and len(gpu.living) <= 3
    loop.close()
    assert not gpu.living
    device, gpu.made = DeviceClock(), 0
    for _ in range(2000):  # the GPU falls far behind
        device.asked()
        device.got()
        gpu.launch(1000.0)
        gpu.now += 1.0
    assert gpu.made <= 3 * 66


def test_without_a_gpu_or_where_events_may_not_be_recorded_steps_go_on(gpu: Clock, monkeypatch: Any) -> None:
    loop = watched_loop()
    train_on_gpu(gpu, loop, 10.0)
    before = loop.device.times()
    gpu.may_record = False
    train_on_gpu(gpu, loop, 10.0)
    assert loop.device.times() == before and not gpu.living
    gpu.is_initialized = False
    for _ in range(2):
        loop = watched_loop()
        train_on_gpu(gpu, loop, 10.0)
        assert loop.device.times() is None and not gpu.living
        monkeypatch.setitem(sys.modules, "torch", None)


def test_delays_are_unknown_where_the_kernel_has_none(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(thread_times, "_TASKS", tmp_path)
    assert threads_delay_ns() is None
    (tmp_path / "1").mkdir()
    for text, delay in (("", None), ("5 7 1\n", 7)):
        (tmp_path / "1" / "schedstat").write_text(text)
        assert threads_delay_ns() == delay


def test_an_epoch_never_gets_more_batches_than_its_loader_has(clock: Clock) -> None:
    trials: list[Any] = [iter([0] * 1000), None]
    loop, epochs = Loop(0.1, is_replayed=True, next_phase=lambda: trials.pop(0)), [0]
    with pytest.raises(Enough):
        for _ in range(1000):
            for _ in WatchedIterator(batches(clock, 12, 3), loop, length=lambda: 12):
                epochs[-1] += 1
                clock.now += 7
            epochs.append(0)
    assert set(epochs[:-1]) == {12} and epochs[-1] <= 12 and len(epochs) > 2
    assert loop.steps[Phase.INSTANT].seconds == loop.steps[Phase.TRIED].seconds == pytest.approx(0.007)


def test_a_loader_of_unknown_length_gets_as_many_batches_as_its_last_whole_epoch(clock: Clock) -> None:
    loop, epochs = Loop(0.1, is_replayed=True, next_phase=lambda: None), [0]
    with pytest.raises(Enough):
        for _ in range(1000):
            for _ in WatchedIterator(batches(clock, 8, 3), loop):
                epochs[-1] += 1
                clock.now += 7
            epochs.append(0)
    assert set(epochs[:-1]) == {8} and epochs[-1] <= 8 and len(epochs) > 2


def test_a_validation_within_a_step_is_no_step(clock: Clock) -> None:
    loop, inner = watched_loop(), watched_loop()
    loop.others = inner.others = [loop, inner]

    def validate(number: int) -> None:
        if number in (20, 40):
            train(clock, inner, 5, busy=100)

    train(clock, loop, 60, see=validate)
    assert loop.steps[Phase.AS_IT_IS].busy_s == pytest.approx(0.007)
    count, spent = loop.aside[inner]
    assert (count, spent / 1e9) == (2, pytest.approx(2 * (5 * 0.103 + 0.007)))
    assert len(inner.steps[Phase.AS_IT_IS]) == 6 and not inner.aside


def test_a_loader_that_is_iterated_beside_another_is_no_validation(clock: Clock) -> None:
    loop, other = watched_loop(), watched_loop()
    loop.others = other.others = [loop, other]
    for _ in zip(*(WatchedIterator(batches(clock, 40, 3), one) for one in (loop, other)), strict=False):
        clock.now += 7
    assert not loop.aside and not other.aside


@pytest.mark.parametrize(("every", "is_aside"), [(30, True), (5, False)])
def test_a_rare_step_that_takes_far_longer_is_other_work(clock: Clock, every: int, is_aside: bool) -> None:
    loop = watched_loop()

    def save(number: int) -> None:
        clock.now += 0 if (number + 1) % every else 400

    train(clock, loop, 100, see=save)
    steps = loop.steps[Phase.AS_IT_IS]
    if is_aside:
        assert steps.unlike == (3, pytest.approx(3 * 407e6)) and steps.busy_s == pytest.approx(0.007)
    else:
        assert steps.unlike == (0, 0) and steps.busy_s > 0.07
    assert steps.wait_s == pytest.approx(0.003)


def test_a_step_that_waits_for_a_gpu_is_a_step(gpu: Clock) -> None:
    loop = watched_loop()

    def log(number: int) -> None:
        gpu.launch(30)
        if not (number + 1) % 30:
            gpu.synchronize()  # for the work of thirty steps

    train(gpu, loop, 100, see=log)
    steps = loop.steps[Phase.AS_IT_IS]
    assert steps.unlike == (0, 0) and steps.busy_s > 0.02
