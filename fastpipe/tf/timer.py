"""``EpochTimer``: how long epochs and steps take, and how much of it they wait for data."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from statistics import median
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

__all__ = ["EpochTimer", "EpochTimes"]

_log = logging.getLogger("fastpipe.tf")


class EpochTimes(NamedTuple):
    """What an epoch took.

    Attributes:
        epoch: its number, from 0.
        seconds: of its training steps and what is between them, validation excepted.
        steps: how many.
        step_seconds: of a step, with its wait for data: their median.
        waiting: the part of ``seconds`` in which a step waited for its batch, 0 to 1; None if the dataset is
            not watched.
        images_per_second: samples in ``seconds``; None as well.
    """

    epoch: int
    seconds: float
    steps: int
    step_seconds: float
    waiting: float | None
    images_per_second: float | None

    def __str__(self) -> str:
        milliseconds = self.step_seconds * 1e3
        said = f"epoch {self.epoch}: {self.seconds:.2f} s, {self.steps} steps of {milliseconds:.1f} ms"
        if self.waiting is not None:
            said += f", {self.waiting:.0%} waiting for data"
        if self.images_per_second is not None:
            said += f", {self.images_per_second:.0f} images/s"
        return said


class EpochTimer(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    """Time each epoch of ``model.fit``, and say how much of it was waiting for data.

    Each epoch is a line of the log ``fastpipe.tf`` (INFO), an entry of ``epochs``, and, with a folder, a
    point of TensorBoard's scalars ``fastpipe/epoch_seconds``, ``fastpipe/step_seconds``, ``fastpipe/waiting``
    and ``fastpipe/images_per_second``.

    A step begins with the request for its batch.  That it waited is known by when the batch was there, which
    the dataset has to tell: ``model.fit(timer.watch(train), callbacks=[timer])``.  Where the device computes
    while Python goes on, as GPUs do, the wait includes what is left of the step before.

    Args:
        log_dir: a folder for TensorBoard; it is written with TensorFlow's own means.

    Attributes:
        epochs: :class:`EpochTimes` of each epoch, oldest first; ``fit`` begins them anew.

    >>> train = tf.data.Dataset.from_tensor_slices((tf.zeros((8, 2)), tf.zeros((8, 1)))).batch(4)
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> timer = EpochTimer()
    >>> history = model.fit(timer.watch(train), epochs=2, shuffle=False, verbose=0, callbacks=[timer])
    >>> [(times.steps, 0 <= times.waiting <= 1) for times in timer.epochs]
    [(2, True), (2, True)]
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.epochs: list[EpochTimes] = []
        self._log_dir = log_dir
        self._writer: Any = None
        self._arrivals = _Arrivals()
        self._is_watching = False

    def watch(self, dataset: Any) -> Any:
        """The same dataset, whose batches tell when they are there.

        Args:
            dataset: a ``tf.data.Dataset`` of batches, as it goes to ``fit``.
        """
        self._is_watching = True
        living = weakref.ref(self._arrivals)  # TensorFlow never lets go of a function

        def note(count: Any) -> Any:
            arrivals = living()
            if arrivals is not None:
                arrivals.append((time.perf_counter(), int(count)))
            return np.int32(0)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def noted(*element: Any) -> Any:
            flat = tf.nest.flatten(element)
            shape = tf.shape(flat[0])
            count = shape[0] if flat[0].shape.rank else tf.constant(1)
            with tf.control_dependencies([*flat, tf.numpy_function(note, [count], tf.int32)]):
                flat = [tf.identity(flat[0]), *flat[1:]]
            made = tf.nest.pack_sequence_as(element, flat)
            return made if len(made) > 1 else made[0]

        return dataset.map(noted)

    # ---- Keras calls these ----------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin anew: what was in the dataset's buffers belongs to no step."""
        self.epochs.clear()
        self._arrivals.clear()
        if self._log_dir is not None:
            self._writer = tf.summary.create_file_writer(os.fspath(self._log_dir))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin an epoch."""
        self._began = self._ended = time.perf_counter()
        self._steps: list[float] = []
        self._batches = self._samples = 0
        self._waited = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin a step: its batch is asked for."""
        self._asked, self._first = time.perf_counter(), batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End a step, or several if the model runs several at once."""
        self._ended = time.perf_counter()
        count = batch - self._first + 1
        self._steps += [(self._ended - self._asked) / count] * count
        arrived = [self._arrivals.popleft() for _ in range(min(count, len(self._arrivals)))]
        if arrived:
            self._waited += max(0.0, arrived[0][0] - self._asked)
            self._batches += len(arrived)
            self._samples += sum(samples for _, samples in arrived)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Say what the epoch took."""
        seconds = self._ended - self._began
        is_known = self._batches > 0 and seconds > 0
        times = EpochTimes(
            epoch, seconds, len(self._steps), median(self._steps or [0.0]),
            min(self._waited / seconds, 1.0) if is_known else None,
            self._samples / seconds if is_known else None,
        )  # fmt: skip
        self.epochs.append(times)
        _log.info("%s", times)
        if not self._is_watching and epoch == 0:
            _log.info("what it waited for data is known of model.fit(timer.watch(dataset), …)")
        if self._writer is not None:
            self._write(times)

    def on_train_end(self, logs: Any = None) -> None:
        """Close TensorBoard's file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, times: EpochTimes) -> None:
        metadata = tf.compat.v1.SummaryMetadata()
        metadata.plugin_data.plugin_name = "scalars"
        with self._writer.as_default():
            for name in ("epoch_seconds", "step_seconds", "waiting", "images_per_second"):
                value = times.seconds if name == "epoch_seconds" else getattr(times, name)
                if value is not None:
                    tf.summary.write(f"fastpipe/{name}", np.float32(value), times.epoch, metadata)
        self._writer.flush()


class _Arrivals(deque[tuple[float, int]]):
    """When batches were there, and how many samples they had; oldest first."""
