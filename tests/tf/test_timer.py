"""``fastpipe.tf.EpochTimer``, with clocks that the tests move."""

from __future__ import annotations

import gc
import logging
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


def fit(timer: EpochTimer, clock: ManualClock, batches: Any, waits: list[float], step_s: float) -> None:
    """Call what an epoch of ``model.fit`` calls; each batch, and the end, is waited for so long."""
    timer.on_epoch_begin(len(timer.epochs))
    iterator = iter(batches)
    for step, wait in enumerate(waits):
        timer.on_train_batch_begin(step)
        clock.now += wait
        try:
            next(iterator)
        except StopIteration:
            break
        clock.now += step_s
        timer.on_train_batch_end(step)
    clock.now += 50  # validation
    timer.on_epoch_end(len(timer.epochs))


def _range(count: int) -> Any:
    """Batches of four that TensorFlow does not ask for ahead, as the clock of a test stands meanwhile."""
    at_once = tf.data.Options()
    at_once.experimental_optimization.inject_prefetch = False
    return tf.data.Dataset.range(count).batch(4).with_options(at_once)


def test_waiting_is_told_from_working(clock: ManualClock) -> None:
    timer = EpochTimer()
    batches = timer.watch(_range(10))
    assert len(list(batches)) == 3  # before the training: they belong to no step
    timer.on_train_begin()
    for _ in range(2):
        fit(timer, clock, batches, [0.3] * 4, step_s=0.1)
    assert [one.epoch for one in timer.epochs] == [0, 1]
    for one in timer.epochs:
        assert isinstance(one, EpochTimes) and isinstance(one, tools.EpochTimes)
        assert one.steps == 3 and one.seconds == pytest.approx(1.2)
        assert one.step_seconds == pytest.approx(0.4) and one.waiting == pytest.approx(0.75)
        assert one.images_per_second == pytest.approx(10 / 1.2)
    assert str(timer.epochs[0]) == "epoch 0: 1.20 s, 3 steps of 400.0 ms, 75% waiting for data, 8 images/s"


def test_late_batches_and_much_waiting_are_warned_of(clock: ManualClock, caplog: Any, capsys: Any) -> None:
    timer = EpochTimer(warn_after=0.2, warn_waiting=0.5)
    batches = timer.watch(_range(12))
    timer.on_train_begin()
    fit(timer, clock, batches, [0.3, 0.1, 0.25], step_s=0.1)
    [times] = timer.epochs
    assert times.late_batches == 1  # the first is none of them
    assert times.first_batch_seconds == pytest.approx(0.3) and times.wait_seconds == pytest.approx(0.25)
    assert times.step_seconds_p95 == pytest.approx(0.395)
    assert not caplog.records and not capsys.readouterr().err, "Keras's progress bar is not complete"
    timer.on_train_end()
    assert capsys.readouterr().err.startswith("epoch 0: 0.95 s, 3 steps of ")
    [record] = caplog.records
    assert record.name == "fastpipe.tf" and record.levelno == logging.WARNING
    assert "1 of 3 batches took longer than 0.2 s" in record.getMessage()
    assert "68% of the time was waiting for data" in record.getMessage()
    with pytest.raises(OptionError, match="warn_after"):
        EpochTimer(warn_after=0)


def test_batches_of_before_are_not_waited_for_and_all_steps_are_counted(clock: ManualClock) -> None:
    timer = EpochTimer()
    timer.on_train_begin()
    batches = list(timer.watch(_range(12)))  # as if a buffer of the framework had asked for them
    fit(timer, clock, batches, [0.0] * 4, step_s=0.1)
    assert timer.epochs[0].waiting == 0.0
    assert timer.epochs[0].images_per_second == pytest.approx(40)
    timer.on_train_begin()
    timer.on_epoch_begin(0)
    timer.on_train_batch_begin(0)
    for _ in timer.watch(tf.data.Dataset.range(8).batch(2)):
        clock.now += 0.25
    timer.on_train_batch_end(3)
    timer.on_epoch_end(0)
    [times] = timer.epochs
    assert (times.steps, times.step_seconds, times.waiting) == (4, 0.25, 0.0)


@pytest.mark.parametrize("is_watching", [True, False])
def test_a_fit_is_timed_and_written_for_tensorboard(is_watching: bool, tmp_path: Path, caplog: Any) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((np.zeros((20, 4), np.float32), np.zeros(20))).batch(4)
    timer = EpochTimer(log_dir=tmp_path)
    caplog.set_level(logging.INFO, "fastpipe.tf")
    train = timer.watch(data) if is_watching else data
    for _ in range(2):  # the second call begins anew
        model.fit(train, validation_data=data, epochs=3, verbose=0, shuffle=False, callbacks=[timer])
    assert [(one.epoch, one.steps) for one in timer.epochs] == [(0, 5), (1, 5), (2, 5)]
    for one in timer.epochs[1:]:
        assert (one.waiting is None) == (one.images_per_second is None) == (not is_watching)
        if one.waiting is not None:
            assert 0 <= one.waiting <= 1
            assert one.images_per_second == pytest.approx(20 / one.seconds)
    lines = [record.getMessage() for record in caplog.records if record.name == "fastpipe.tf"]
    assert lines[0].startswith("epoch 0: ") and ("waiting" in lines[0]) == is_watching
    assert any("timer.watch(dataset)" in line for line in lines) == (not is_watching)
    records = tf.data.TFRecordDataset([str(path) for path in tmp_path.iterdir()])
    events = [tf.compat.v1.Event.FromString(record.numpy()) for record in records]
    points = {(value.tag, event.step) for event in events for value in event.summary.value}
    names = ["epoch_seconds", "step_seconds"] + ["waiting", "images_per_second"] * is_watching
    assert points == {(f"fastpipe/{name}", epoch) for name in names for epoch in range(3)}


def test_watching_changes_nothing_and_a_timer_is_freed_first(photo_table: Any, same: Any) -> None:
    train = fastpipe.tf.image_dataset(photo_table.table, "label", boxes="box", image_size=16, shuffle=False)
    watched = EpochTimer().watch(train)
    assert watched.class_names == train.class_names
    assert int(watched.cardinality()) == len(train)
    same(watched, train)
    inputs = tf.data.Dataset.from_tensor_slices({"a": [1, 2], "b": [3, 4]}).batch(2)
    timer = EpochTimer()
    batches, reference = timer.watch(inputs), weakref.ref(timer)
    same(batches, inputs)
    assert [count for _, count in timer._arrivals] == [2]
    del timer
    gc.collect()
    assert reference() is None and len(list(batches)) == 1
