"""``EpochTimer`` measures the time of epochs and steps, and the part of the time spent waiting for data."""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from fastpipe.core.epoch_times import EpochLog, EpochTimes, WaitLimits, epoch_times, print_to_stderr

_log = logging.getLogger("fastpipe.tf")


class EpochTimer(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    """A Keras callback that measures the time of each epoch of ``model.fit``, and the time spent waiting for
    data.

    Each epoch prints a line, and adds an entry to ``epochs``.  If ``log_dir`` is given, each epoch also adds
    a point to TensorBoard's scalars ``fastpipe/epoch_seconds``, ``fastpipe/step_seconds``,
    ``fastpipe/waiting`` and ``fastpipe/images_per_second``.

    A step begins with the request for its batch, and waits until the batch arrives.  The dataset must report
    the arrival of batches: ``model.fit(timer.watch(train), callbacks=[timer])``.  If a device computes while
    Python continues, as GPUs do, the wait includes the rest of the previous step.

    Args:
        log_dir: a folder for TensorBoard's files, which TensorFlow writes.
        warn_after: a time in seconds. After each epoch, a warning says how many batches took longer. The
            first batch is not counted.
        warn_waiting: a fraction, from 0 to 1. If an epoch spends a greater fraction of its time waiting for
            data, a warning says so.
        log: where the line goes, as in :func:`fastpipe.watch`; the logger of ``"auto"`` is ``fastpipe.tf``.

    Attributes:
        epochs: the :class:`EpochTimes` of each epoch, oldest first. ``fit`` clears this list.

    Raises:
        OptionError: a limit is invalid.

    >>> train = tf.data.Dataset.from_tensor_slices((tf.zeros((8, 2)), tf.zeros((8, 1)))).batch(4)
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> timer = EpochTimer(log=None)
    >>> history = model.fit(timer.watch(train), epochs=2, shuffle=False, verbose=0, callbacks=[timer])
    >>> [(times.steps, 0 <= times.waiting <= 1) for times in timer.epochs]
    [(2, True), (2, True)]
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        warn_after: float | None = None,
        warn_waiting: float | None = None,
        log: Any = "auto",
    ) -> None:
        super().__init__()
        self._limits, self._epoch_log = WaitLimits(warn_after, warn_waiting), EpochLog(log, _log)
        self.epochs: list[EpochTimes] = []
        self._log_dir = log_dir
        self._writer: Any = None
        self._arrivals: deque[tuple[float, int]] = deque()  # batches' arrival times and numbers of samples
        self._is_watching = False
        self._unsaid: list[Callable[[], object]] = []  # texts that wait for the end of Keras's progress bar

    def watch(self, dataset: Any) -> Any:
        """Return a dataset with the same batches, which reports the arrival of each batch to this timer.

        Args:
            dataset: a ``tf.data.Dataset`` of batches, in the form that ``fit`` receives.
        """
        self._is_watching = True
        living = weakref.ref(self._arrivals)  # TensorFlow never releases a function

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

    def on_train_begin(self, logs: Any = None) -> None:
        """Reset the timer. Batches that are still in the dataset's buffers belong to no step."""
        self.epochs.clear()
        self._arrivals.clear()
        if self._log_dir is not None:
            self._writer = tf.summary.create_file_writer(os.fspath(self._log_dir))

    def _say(self) -> None:
        while self._unsaid:
            self._unsaid.pop(0)()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start to measure an epoch. The last epoch's line is printed now, below its progress bar."""
        self._say()
        self._began = self._ended = time.perf_counter()
        self._steps: list[float] = []
        self._waits: list[float] = []
        self._samples = 0
        self._first_batch: float | None = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Start to measure a step, at the request for the step's batch."""
        self._asked, self._first = time.perf_counter(), batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End a step, or several steps if the model runs several steps at once."""
        self._ended = time.perf_counter()
        count = batch - self._first + 1
        self._steps += [(self._ended - self._asked) / count] * count
        arrived = [self._arrivals.popleft() for _ in range(min(count, len(self._arrivals)))]
        if arrived:
            if self._first_batch is None:
                self._first_batch = max(0.0, arrived[0][0] - self._began)
            self._waits.append(max(0.0, arrived[0][0] - self._asked))
            self._samples += sum(samples for _, samples in arrived)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report the times of the epoch."""
        times = epoch_times(
            epoch, self._ended - self._began, self._steps, self._waits or None,
            self._samples if self._waits else math.nan,
            first_batch_seconds=self._first_batch, warn_after=self._limits.warn_after,
        )  # fmt: skip
        self.epochs.append(times)
        self._epoch_log.add(times, show=lambda line: self._unsaid.append(partial(print_to_stderr, line)))
        warning = self._limits.warning(times)
        if warning is not None:
            self._unsaid.append(partial(_log.warning, "%s", warning))
        if not self._is_watching and epoch == 0:
            _log.info("the time spent waiting for data is known for model.fit(timer.watch(dataset), …) only")
        if self._writer is not None:
            self._write(times)

    def on_train_end(self, logs: Any = None) -> None:
        """Print the last epoch's line, and close TensorBoard's file."""
        self._say()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, times: EpochTimes) -> None:
        metadata = tf.compat.v1.SummaryMetadata()
        metadata.plugin_data.plugin_name = "scalars"
        with self._writer.as_default():
            for name, value in times.scalars().items():
                tf.summary.write(name, np.float32(value), times.epoch, metadata)
        self._writer.flush()
