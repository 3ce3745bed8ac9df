"""``fastpipe.tf.EpochTimer``, with clocks that the tests move."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from clock import ManualClock

import fastpipe.tf
from fastpipe import tools
from fastpipe.errors import OptionError
from fastpipe.tf import EpochTimer, EpochTimes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock()
    monkeypatch.setattr("fastpipe.tf.timer.time.perf_counter", clock)
    return clock


class Fit:
    """Calls what ``model.fit`` calls, at times that are given."""

    def __init__(
        self, timer: EpochTimer, clock: ManualClock, batches: Any, data_s: float, step_s: float
    ) -> None:
        self.timer, self.clock, self.batches = timer, clock, batches
        self.data_s, self.step_s = data_s, step_s

    def epoch(self, number: int) -> None:
        self.timer.on_epoch_begin(number)
        for step, _ in enumerate(self._with_steps()):
            self.clock.now += self.step_s
            self.timer.on_train_batch_end(step)
        self.clock.now += 50  # validation
        self.timer.on_epoch_end(number)

    def _with_steps(self) -> Any:
        step, iterator = 0, iter(self.batches)
        while True:
            self.timer.on_train_batch_begin(step)
            self.clock.now += self.data_s
            try:
                yield next(iterator)
            except StopIteration:
                return
            step += 1


def test_what_is_waiting_and_what_is_not(clock: ManualClock) -> None:
    timer = EpochTimer()
    batches = timer.watch(tf.data.Dataset.range(10).batch(4))
    at_once = tf.data.Options()  # TensorFlow would ask ahead, and the clock of this test stands meanwhile
    at_once.experimental_optimization.inject_prefetch = False
    batches = batches.with_options(at_once)
    timer.on_train_begin()
    fit = Fit(timer, clock, batches, data_s=0.3, step_s=0.1)
    for epoch in range(2):
        fit.epoch(epoch)
    assert [one.epoch for one in timer.epochs] == [0, 1]
    for one in timer.epochs:
        assert one.steps == 3
        assert one.seconds == pytest.approx(1.2)
        assert one.step_seconds == pytest.approx(0.4)
        assert one.waiting == pytest.approx(0.75)
        assert one.images_per_second == pytest.approx(10 / 1.2)
    assert str(timer.epochs[0]) == "epoch 0: 1.20 s, 3 steps of 400.0 ms, 75% waiting for data, 8 images/s"


def test_warnings_are_those_of_every_framework(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    timer = EpochTimer(warn_after=0.2, warn_waiting=0.5)
    batches = list(timer.watch(tf.data.Dataset.range(12).batch(4)))
    timer.on_train_begin()
    timer.on_epoch_begin(0)
    for step, wait in enumerate((0.3, 0.1, 0.25)):
        timer.on_train_batch_begin(step)
        clock.now += wait
        timer._arrivals.append((clock.now, len(batches[step])))
        clock.now += 0.1
        timer.on_train_batch_end(step)
    timer.on_epoch_end(0)
    [times] = timer.epochs
    assert isinstance(times, EpochTimes) and isinstance(times, tools.EpochTimes)
    assert times.late_batches == 1  # the first is none of them
    assert times.first_batch_seconds == pytest.approx(0.3) and times.wait_seconds == pytest.approx(0.25)
    assert times.step_seconds_p95 == pytest.approx(0.395)
    [record] = caplog.records
    assert record.name == "fastpipe.tf" and record.levelno == logging.WARNING
    assert "1 of 3 batches took longer than 0.2 s" in record.getMessage()
    assert "68% of the time was waiting for data" in record.getMessage()
    with pytest.raises(OptionError, match="warn_after"):
        EpochTimer(warn_after=0)


def test_batches_that_were_there_before_are_not_waited_for(clock: ManualClock) -> None:
    timer = EpochTimer()
    batches = list(timer.watch(tf.data.Dataset.range(12).batch(4)))
    arrived = list(timer._arrivals)
    timer.on_train_begin()
    timer._arrivals.extend(arrived)  # as if a buffer of the framework had asked for them
    Fit(timer, clock, batches, data_s=0.0, step_s=0.1).epoch(0)
    assert timer.epochs[0].waiting == 0.0
    assert timer.epochs[0].images_per_second == pytest.approx(40)


def test_several_steps_in_one_execution(clock: ManualClock) -> None:
    timer = EpochTimer()
    timer.on_train_begin()
    timer.on_epoch_begin(0)
    timer.on_train_batch_begin(0)
    for _ in timer.watch(tf.data.Dataset.range(8).batch(2)):
        clock.now += 0.25
    timer.on_train_batch_end(3)
    timer.on_epoch_end(0)
    times = timer.epochs[0]
    assert (times.steps, times.step_seconds, times.waiting) == (4, 0.25, 0.0)


@pytest.mark.parametrize("is_watching", [True, False])
def test_model_fit(is_watching: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def slow(images: Any) -> Any:
        time.sleep(0.02)  # the work of a loader that is too slow
        return images

    data = tf.data.Dataset.from_tensor_slices((np.zeros((20, 4), np.float32), np.zeros(20))).batch(4)
    data = data.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(slow, [x], tf.float32), (None, 4)), y))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    timer = EpochTimer(log_dir=tmp_path / "board")
    caplog.set_level(logging.INFO, "fastpipe.tf")
    train = timer.watch(data) if is_watching else data
    for _ in range(2):  # the second call begins anew
        model.fit(train, validation_data=data, epochs=3, verbose=0, shuffle=False, callbacks=[timer])
    assert [one.epoch for one in timer.epochs] == [0, 1, 2]
    assert [one.steps for one in timer.epochs] == [5, 5, 5]
    for one in timer.epochs[1:]:
        assert (one.waiting is None) == (one.images_per_second is None) == (not is_watching)
        if one.waiting is not None and one.images_per_second is not None:
            assert 0 < one.waiting <= 1
            assert one.images_per_second == pytest.approx(20 / one.seconds)
    lines = [record.getMessage() for record in caplog.records if record.name == "fastpipe.tf"]
    assert lines[0].startswith("epoch 0: ") and ("waiting" in lines[0]) == is_watching
    assert any("timer.watch(dataset)" in line for line in lines) == (not is_watching)
    points = _points(tmp_path / "board")
    names = ["epoch_seconds", "step_seconds"] + ["waiting", "images_per_second"] * is_watching
    assert sorted(points) == sorted((f"fastpipe/{name}", epoch) for name in names for epoch in range(3))
    if is_watching:
        assert 0 < points["fastpipe/waiting", 1] <= 1


def _points(folder: Path) -> dict[tuple[str, int], float]:
    """What TensorBoard finds in a folder."""
    points = {}
    for path in folder.iterdir():
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                points[value.tag, event.step] = float(tf.make_ndarray(value.tensor))
    return points


def test_watching_changes_nothing_of_a_dataset(photo_table: Any) -> None:
    train = fastpipe.tf.image_dataset(photo_table.table, "label", boxes="box", image_size=16, shuffle=False)
    watched = EpochTimer().watch(train)
    assert watched.class_names == train.class_names
    assert watched.element_spec == train.element_spec
    assert int(watched.cardinality()) == len(train)
    for (images, labels), (same, also) in zip(train, watched, strict=True):
        np.testing.assert_array_equal(images, same)
        np.testing.assert_array_equal(labels, also)
    inputs = tf.data.Dataset.from_tensor_slices({"a": [1, 2], "b": [3, 4]}).batch(2)
    timer = EpochTimer()
    [element] = timer.watch(inputs)
    assert sorted(element) == ["a", "b"]
    assert [count for _, count in timer._arrivals] == [2]


def test_a_timer_that_is_gone_is_let_go_of() -> None:
    timer = EpochTimer()
    batches = timer.watch(tf.data.Dataset.range(4).batch(2))
    gone = weakref.ref(timer)
    del timer
    gc.collect()
    assert gone() is None
    assert len(list(batches)) == 2


def test_two_replicas(two_replicas: Any) -> None:
    data = tf.data.Dataset.from_tensor_slices((np.zeros((20, 4), np.float32), np.zeros(20))).batch(4)
    with two_replicas.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    timer = EpochTimer()
    model.fit(timer.watch(data), epochs=2, verbose=0, shuffle=False, callbacks=[timer])
    assert [one.steps for one in timer.epochs] == [5, 5]
    for one in timer.epochs:
        assert one.images_per_second == pytest.approx(20 / one.seconds)
