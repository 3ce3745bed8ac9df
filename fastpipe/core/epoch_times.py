"""The times of an epoch, including the fraction of time spent waiting for data, for all frameworks."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.errors import OptionError

_DEEPEST = 8  # a list may contain itself


_SCALARS = (
    "step_seconds", "waiting", "images_per_second", "gpu_utilisation", "gpu_memory_utilisation",
    "pcie_bytes_per_second",
)  # fmt: skip


class EpochTimes(NamedTuple):
    """The times of an epoch.

    A step begins with the request of its batch, so the step's duration includes the wait for the batch.

    Attributes:
        epoch: the epoch's number, from 0.
        seconds: duration of all steps and of the time between steps, without a trainer's validation.
        steps: number of steps.
        step_seconds: median duration of a step, including its wait for data.
        waiting: fraction of ``seconds`` in which steps waited for their batches, 0 to 1; None if
            unknown.
        images_per_second: number of samples divided by ``seconds``; None if unknown.
        step_seconds_p95: 95th percentile of a step's duration.
        wait_seconds, wait_seconds_p95: median and 95th percentile of a step's wait for its batch; None if
            unknown.
        first_batch_seconds: time from the epoch's beginning to its first batch; None if unknown.
        late_batches: number of batches with a wait longer than ``warn_after``; the first batch never counts.
        is_complete: False if the loop ended before the loader was exhausted.
        gpu_utilisation: fraction of time in which the GPU ran a kernel, 0 to 1; None if not measured.
        gpu_memory_utilisation: fraction of time in which the GPU's memory was read or written, 0 to 1; None
            if not measured.
        pcie_bytes_per_second: bytes that the GPU received per second; None if not measured.

    >>> print(EpochTimes(0, 1.2, 3, 0.4, 0.75, 8.3))
    epoch 0: 1.20 s, 3 steps of 400.0 ms, 75% waiting for data, 8 images/s
    """

    epoch: int
    seconds: float
    steps: int
    step_seconds: float
    waiting: float | None
    images_per_second: float | None
    step_seconds_p95: float = 0.0
    wait_seconds: float | None = None
    wait_seconds_p95: float | None = None
    first_batch_seconds: float | None = None
    late_batches: int = 0
    is_complete: bool = True
    gpu_utilisation: float | None = None
    gpu_memory_utilisation: float | None = None
    pcie_bytes_per_second: float | None = None

    def __str__(self) -> str:
        milliseconds = self.step_seconds * 1e3
        said = f"epoch {self.epoch}: {self.seconds:.2f} s, {self.steps} steps of {milliseconds:.1f} ms"
        if self.waiting is not None:
            said += f", {self.waiting:.0%} waiting for data"
        if self.images_per_second is not None:
            said += f", {self.images_per_second:.0f} images/s"
        if self.gpu_utilisation is not None:
            said += f", GPU {self.gpu_utilisation:.0%} busy"
        return said if self.is_complete else f"{said}, left early"

    def scalars(self) -> dict[str, float]:
        """Return the known values by the names that loggers and TensorBoard show.

        >>> EpochTimes(0, 1.5, 3, 0.5, None, None).scalars()
        {'fastpipe/epoch_seconds': 1.5, 'fastpipe/step_seconds': 0.5}
        """
        known = self._asdict()
        values = {"epoch_seconds": self.seconds} | {name: known[name] for name in _SCALARS}
        return {f"fastpipe/{name}": value for name, value in values.items() if value is not None}


def epoch_times(
    epoch: int,
    seconds: float,
    steps: Sequence[float] | npt.NDArray[np.float64],
    waits: Sequence[float] | npt.NDArray[np.float64] | None,
    samples: float,
    *,
    first_batch_seconds: float | None = None,
    warn_after: float | None = None,
    is_complete: bool = True,
) -> EpochTimes:
    """Compute the times of an epoch from measurements.

    ``seconds`` is the duration of the epoch.  ``steps`` are the durations of the steps in seconds, and
    ``waits`` are the seconds that the steps waited for their batches; None if unknown.  ``samples`` is the
    number of samples; NaN if unknown.

    >>> epoch_times(0, 2.0, [0.5, 1.5], [0.25, 0.75], 8)[:6]
    (0, 2.0, 2, 1.0, 0.5, 4.0)
    """
    late = 0 if waits is None or warn_after is None else int(np.sum(np.asarray(waits)[1:] > warn_after))
    return EpochTimes(
        epoch,
        seconds,
        len(steps),
        _quantile(steps, 0.5),
        None if waits is None or not seconds > 0 else min(float(np.sum(waits)) / seconds, 1.0),
        samples / seconds if seconds > 0 and not math.isnan(samples) else None,
        _quantile(steps, 0.95),
        None if waits is None else _quantile(waits, 0.5),
        None if waits is None else _quantile(waits, 0.95),
        first_batch_seconds,
        late,
        is_complete,
    )


def _quantile(values: Sequence[float] | npt.NDArray[np.float64], part: float) -> float:
    return float(np.quantile(np.asarray(values), part)) if len(values) else 0.0


@dataclass(frozen=True)
class WaitLimits:
    """Limits for the time that training waits for data.  A longer time causes a warning.

    Args:
        warn_after: the longest wait for one batch, in seconds; None for no limit.
        warn_waiting: the largest fraction of an epoch that is spent waiting, 0 to 1; None for no limit.

    Raises:
        OptionError: a limit has a value that cannot work.

    >>> times = epoch_times(3, 10.0, [0.1, 9.9], [0.1, 9.8], 8, warn_after=1.0)
    >>> print(WaitLimits(warn_after=1.0).warning(times))
    epoch 3: 1 of 2 batches took longer than 1 s (median 4.95 s, 95 % within 9.31 s).
    `fastpipe profile your_script.py` says why, and what would help
    """

    warn_after: float | None = None
    warn_waiting: float | None = None

    def __post_init__(self) -> None:
        if self.warn_after is not None and not self.warn_after > 0:
            raise OptionError(f"warn_after must be a number of seconds above 0, got {self.warn_after!r}")
        if self.warn_waiting is not None and not 0 < self.warn_waiting <= 1:
            raise OptionError(
                "warn_waiting must be a fraction of an epoch, above 0 and at most 1, got "
                f"{self.warn_waiting!r}"
            )

    def warning(self, times: EpochTimes, stages: Mapping[str, float] | None = None) -> str | None:
        """Return the warning about an epoch; None if no limit was exceeded.

        ``stages`` contains the seconds that the loader spent in each stage.  The warning mentions them.
        """
        said = []
        if times.late_batches and self.warn_after is not None:
            said.append(
                f"{times.late_batches} of {times.steps} batches took longer than {self.warn_after:g} s"
                f" (median {times.wait_seconds or 0:.3g} s, 95 % within {times.wait_seconds_p95 or 0:.3g} s)"
            )
        if self.warn_waiting is not None and (times.waiting or 0) > self.warn_waiting:
            said.append(f"{times.waiting:.0%} of the time was waiting for data")
        if not said:
            return None
        text = f"epoch {times.epoch}: {', and '.join(said)}. "
        total = sum((stages or {}).values())
        if stages and total > 0:
            parts = sorted(stages.items(), key=lambda item: -item[1])
            shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts)
            text += f"The loader's threads were at {shares}. "
        return text + "`fastpipe profile your_script.py` says why, and what would help"


def print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class EpochLog:
    """The place where a line or the numbers of each epoch go.

    Args:
        log: ``"auto"`` prints a line to standard error, unless ``logger`` already shows its INFO messages or
            this process is not the first of a distributed training.  None prints nothing.  A
            ``logging.Logger`` gets the line.  A TensorBoard ``SummaryWriter`` (``add_scalar``) and a run of
            W&B (``log``) get the numbers of :meth:`EpochTimes.scalars`.  A function gets the
            :class:`EpochTimes`.
        logger: always gets the line, at level INFO.

    Raises:
        OptionError: ``log`` is none of these.

    >>> EpochLog(print, logging.getLogger("fastpipe")).add(EpochTimes(0, 1.2, 3, 0.4, 0.75, 8.3))
    epoch 0: 1.20 s, 3 steps of 400.0 ms, 75% waiting for data, 8 images/s
    """

    def __init__(self, log: Any, logger: logging.Logger) -> None:
        is_place = callable(log) or any(callable(getattr(log, name, None)) for name in ("add_scalar", "log"))
        if not is_place and log is not None and not (isinstance(log, str) and log == "auto"):
            raise OptionError(
                'log must be "auto", None, a logging.Logger, a SummaryWriter, a W&B run or a function of '
                f"EpochTimes, got {log!r}"
            )
        self._log, self._logger = log, logger

    def add(
        self, times: EpochTimes, prefix: str = "", show: Callable[[str], object] = print_to_stderr
    ) -> None:  # fmt: skip
        """Report an epoch.

        Args:
            times: the epoch's times.
            prefix: text before the line, such as the loader's name and a space.
            show: function that prints the line of ``"auto"``.
        """
        log, line = self._log, f"{prefix}{times}"
        self._logger.info("%s", line)
        if isinstance(log, str):
            is_shown = self._logger.isEnabledFor(logging.INFO) and self._logger.hasHandlers()
            if not is_shown and os.environ.get("RANK", "0") in ("", "0"):
                show(line)
        elif isinstance(log, logging.Logger):
            if log is not self._logger:
                log.info("%s", line)
        elif hasattr(log, "add_scalar"):
            for name, value in _named(times.scalars(), prefix.strip()).items():
                log.add_scalar(name, value, times.epoch)
        elif callable(log):
            log(times)
        elif log is not None:
            log.log(_named(times.scalars(), prefix.strip()))


def _named(values: Mapping[str, float], name: str) -> dict[str, float]:
    return {key.replace("/", f"/{name}/", 1) if name else key: value for key, value in values.items()}


def samples_of(batch: Any) -> float:
    """Return the number of samples in a batch; NaN if the number is unknown.

    The number is the first dimension of the batch's first array, or the length of a list of strings or
    numbers.

    >>> samples_of((np.zeros((8, 3)), np.zeros(8))), samples_of({"text": ["a", "b"]}), samples_of(None)
    (8, 2, nan)
    """
    for _ in range(_DEEPEST):
        # Test exact types first, because tests of abstract classes and of ``shape`` take much longer.
        kind = type(batch)
        if kind is list or kind is tuple:
            inner = batch[0] if batch else None
        elif kind is dict:
            inner = next(iter(batch.values()), None)
        elif (shape := getattr(batch, "shape", None)) is not None:
            try:
                return int(shape[0]) if len(shape) else 1
            except (TypeError, ValueError):  # an unknown dimension
                return math.nan
        elif isinstance(batch, Mapping):
            inner = next(iter(batch.values()), None)
        elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
            inner = batch[0] if len(batch) else None
        else:
            break
        if isinstance(inner, (str, bytes, int, float)) and not hasattr(batch, "values"):
            return len(batch)
        batch = inner
    return math.nan
