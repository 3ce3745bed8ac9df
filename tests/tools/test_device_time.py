"""Times of a GPU by events that imitate torch's: none of this has seen a GPU."""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from fastpipe.tools import loops
from fastpipe.tools.loops import Enough, Loop, Phase, WatchedIterator
from fastpipe.tools.report import LoaderNote, Report
from fastpipe.tools.thread_times import DeviceClock, DeviceTimes


class Device:
    """A stream in which work is done one after another, in milliseconds; Python's clock is another one.

    Attributes:
        now: of Python.
        free_at: when all that was asked of the device is done.
    """

    def __init__(self) -> None:
        self.now = self.free_at = 0.0
        self.is_initialized = True
        self.may_record = True
        self.living: weakref.WeakSet[Any] = weakref.WeakSet()
        self.made = 0

    def launch(self, milliseconds: float) -> None:
        """Ask for work, and go on."""
        self.free_at = max(self.free_at, self.now) + milliseconds

    def synchronize(self) -> None:
        self.now = max(self.now, self.free_at)

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        self.made += 1
        event = Event(self)
        self.living.add(event)
        return event


class Event:
    """As ``torch.cuda.Event``: it has no way of waiting, so nobody can have waited."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, -1.0

    def record(self) -> None:
        if not self.device.may_record:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.at = max(self.device.free_at, self.device.now)

    def query(self) -> bool:
        return self.at <= self.device.now

    def elapsed_time(self, end: Event) -> float:
        if not self.query() or not end.query():
            raise RuntimeError("device not ready")
        return end.at - self.at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    cuda = SimpleNamespace(
        is_initialized=lambda: device.is_initialized, Event=device.event, synchronize=device.synchronize
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    monkeypatch.setattr(loops, "perf_counter_ns", lambda: int(device.now * 1e6))
    return device


def train(device: Device, loop: Loop, *, load: float, compute: float, steps: int = 60) -> None:
    """A loop whose batches take ``load`` of Python's time, and whose steps ``compute`` of the device's."""

    def batches() -> Any:
        for number in range(steps):
            device.now += load
            yield number

    for _ in WatchedIterator(batches(), loop):
        device.launch(compute)
        device.now += 1.0  # Python's own part


def test_a_device_that_waits_for_batches(device: Device) -> None:
    loop = Loop(float("inf"), is_replayed=False)
    train(device, loop, load=30.0, compute=10.0)
    times = loop.device.times()
    assert times is not None
    # It is free 9 ms after Python asks for the next batch, which is there after 30.
    assert times.wait_s == pytest.approx(0.021) and times.busy_s == pytest.approx(0.010)
    assert loop.steps[Phase.AS_IT_IS].wait_s == pytest.approx(0.030)


def test_a_device_that_is_busy_although_python_waits(device: Device) -> None:
    loop = Loop(float("inf"), is_replayed=False)
    train(device, loop, load=30.0, compute=100.0)
    device.now = device.free_at
    times = loop.device.times()
    assert times is not None
    assert times.wait_s == pytest.approx(0.0) and times.busy_s == pytest.approx(0.100)
    assert loop.steps[Phase.AS_IT_IS].wait_s == pytest.approx(0.030)


def test_what_the_device_has_still_to_do_counts_for_the_steps_that_asked_for_it(device: Device) -> None:
    loop = Loop(1.0, is_replayed=True, next_phase=lambda: None)
    with pytest.raises(Enough):
        train(device, loop, load=30.0, compute=100.0, steps=1000)  # Python is ahead of the device
    assert loop.steps[Phase.INSTANT].seconds == pytest.approx(0.100, rel=0.01)


def test_what_is_measured_between_two_phases_counts_for_none_of_them(device: Device) -> None:
    def other() -> Any:
        device.launch(5_000.0)  # another loader's augmentation
        return None if loop.steps[Phase.TRIED] else iter([0] * 1000)

    loop = Loop(1.0, is_replayed=True, next_phase=other)
    with pytest.raises(Enough):
        train(device, loop, load=30.0, compute=100.0, steps=1000)
    for phase in (Phase.INSTANT, Phase.TRIED):
        assert loop.steps[phase].seconds == pytest.approx(0.100, rel=0.02)


def test_every_fourth_step_is_measured_by_three_events_that_are_let_go_of(device: Device) -> None:
    loop = Loop(float("inf"), is_replayed=False)
    train(device, loop, load=30.0, compute=10.0, steps=403)
    assert 3 * 99 <= device.made <= 3 * 101
    assert len(device.living) <= 3
    loop.close()
    assert not device.living


def test_a_device_that_falls_far_behind_is_asked_no_more(device: Device) -> None:
    clock = DeviceClock()
    for _ in range(2000):
        clock.asked()
        clock.got()
        device.launch(1000.0)
        device.now += 1.0
    assert device.made <= 3 * 66


def test_before_the_device_is_used_and_without_one_there_is_nothing(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.is_initialized = False
    loop = Loop(float("inf"), is_replayed=False)
    train(device, loop, load=30.0, compute=10.0)
    assert loop.device.times() is None and not device.made
    monkeypatch.setitem(sys.modules, "torch", None)
    loop = Loop(float("inf"), is_replayed=False)
    train(device, loop, load=30.0, compute=10.0)
    assert loop.device.times() is None


def test_where_events_may_not_be_recorded_the_step_goes_on(device: Device) -> None:
    loop = Loop(float("inf"), is_replayed=False)
    train(device, loop, load=30.0, compute=10.0)
    before = loop.device.times()
    device.may_record = False
    train(device, loop, load=30.0, compute=10.0)
    assert loop.device.times() == before and not device.living


def test_what_goes_on_between_epochs_is_no_step(device: Device) -> None:
    loop = Loop(float("inf"), is_replayed=False)
    for _ in range(4):
        train(device, loop, load=30.0, compute=10.0, steps=20)
        device.launch(10_000.0)  # validation
        device.now = device.free_at
    times = loop.device.times()
    assert times == DeviceTimes(pytest.approx(0.021), pytest.approx(0.010))


def test_a_report_says_it() -> None:
    note = LoaderNote("DataLoader over Photos")
    report = Report(
        note, steps=9, step_s=0.04, wait_s=0.03, busy_s=0.01, device_wait_s=0.021, device_busy_s=0.01
    )
    assert "the GPU takes 10 ms for a step, and has nothing to do for 21 ms before it" in str(report)
    assert report.as_json()["device_wait_s"] == 0.021
    assert "GPU" not in str(Report(note, steps=9, step_s=0.04, wait_s=0.03, busy_s=0.01))
