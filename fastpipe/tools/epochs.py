"""``watch``: measure how long each epoch of a training takes and how long the epoch waits for data."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import IO, Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fastpipe.console import print_line
from fastpipe.core.epoch_times import EpochLog, EpochTimes, WaitLimits, epoch_times, samples_of
from fastpipe.core.text import printable
from fastpipe.errors import OptionError
from fastpipe.tools.loaders import check_no_path, length_of
from fastpipe.tools.recorder import GPUSampler

_log = logging.getLogger("fastpipe")
_T_co = TypeVar("_T_co", covariant=True)
_OWN = ("epochs", "loader", "_options")
_REFRESH_S = 0.2
_LINE_S = 10.0


class _Options(NamedTuple):
    name: str
    limits: WaitLimits
    log_every: int
    progress: bool
    samples: Callable[[Any], float]
    gpu: bool
    log: EpochLog


def watch(
    loader: Iterable[_T_co], *, name: str = "", warn_after: float | None = None,
    warn_waiting: float | None = None, log_every: int | None = None, progress: bool = False,
    samples: Callable[[Any], int] | None = None, gpu: bool = True, log: Any = "auto",
) -> WatchedLoader[_T_co]:  # fmt: skip
    """Return a loader with the same batches, and print how long each epoch took and waited for data.

    ``watch`` is cheap enough to stay in a script.  Each epoch prints a line, and adds an entry to ``epochs``
    of the returned loader.  Each step takes one to two microseconds longer, and needs 16 bytes until the
    epoch ends.

    >>> import fastpipe
    >>> from torch.utils.data import DataLoader
    >>> loader = fastpipe.watch(DataLoader(range(64), batch_size=4), warn_waiting=0.5, log=None)
    >>> for epoch in range(2):
    ...     for batch in loader:
    ...         _ = batch.float().sum()
    >>> [(times.steps, 0 < times.waiting < 1) for times in loader.epochs]
    [(16, True), (16, True)]

    Args:
        loader: any iterable of batches: a ``DataLoader``, a ``FastLoader``, a ``tf.data.Dataset``, a list.
        name: name of the loader, such as ``"validation"``.  The name precedes the word "epoch" in the line.
        warn_after: number of seconds.  If steps waited longer for a batch, a warning after the epoch says how
            often.  The first batch does not count, because its time includes the start of workers.
        warn_waiting: fraction of an epoch, from 0 to 1.  A warning is logged if the epoch waits for data for
            a larger fraction.  For a ``FastLoader`` with threads, the warnings of ``warn_after`` and
            ``warn_waiting`` also say what the threads did during the epoch.
        log_every: number of steps after which a log line shows the progress of the epoch.
        progress: show a progress bar with images/s, the fraction of waiting and the remaining time.  If
            standard error is not a terminal, a line is printed every ten seconds instead.
        samples: function that returns the number of samples in a batch.  By default, this is the size of the
            first dimension of the first array in the batch.
        gpu: sample the GPU's utilisation twice a second, in a thread.  Without an NVIDIA GPU or the package
            ``nvidia-ml-py``, ``gpu`` has no effect.
        log: where each epoch is reported.  ``"auto"`` prints a line to standard error; if the script has set
            up ``logging`` to show INFO messages, the logger ``fastpipe`` shows the line instead.  None prints
            nothing.  A ``logging.Logger`` gets the line.  A TensorBoard ``SummaryWriter`` or a W&B run gets
            the numbers, by names such as ``fastpipe/waiting``.  A function gets the
            :class:`~fastpipe.tools.EpochTimes`.

    Returns:
        A loader with the batches, the length and the attributes of ``loader``.  The result is not a
        ``DataLoader``, but the trainers of Lightning and Accelerate require a ``DataLoader``.  For Lightning,
        pass ``loader`` itself to the trainer, and :class:`fastpipe.torch.EpochTimer` as a callback.  For
        Accelerate, watch the result of ``accelerator.prepare``.  For Keras, use
        :class:`fastpipe.tf.EpochTimer`.

    Raises:
        OptionError: an option is invalid, or the loader cannot be iterated.
    """
    check_no_path(loader, "watch")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise OptionError(f"watch(loader) needs an iterable of batches, got a {type(loader).__name__}")
    if log_every is not None and (not isinstance(log_every, int) or log_every < 1):
        raise OptionError(f"log_every must be a number of steps from 1, got {log_every!r}")
    if samples is not None and not callable(samples):
        raise OptionError(f"samples must be a function of a batch, such as len, got {samples!r}")
    limits = WaitLimits(warn_after, warn_waiting)
    count = samples_of if samples is None else samples
    prefix = f"{name} " if name else ""
    options = _Options(prefix, limits, log_every or 0, progress, count, gpu, EpochLog(log, _log))
    return WatchedLoader(loader, options)


class WatchedLoader(Generic[_T_co]):
    """A loader whose epochs are measured, as returned by :func:`watch`.

    If a loop is left early, the entry in ``epochs`` covers the finished steps.  If a script takes only one
    batch from an iterator and then leaves the loop, this iterator does not count as an epoch.

    Attributes:
        loader: the script's own loader.
        epochs: an :class:`~fastpipe.tools.EpochTimes` for each epoch, the oldest first.

    >>> loader = watch([[1, 2], [3, 4]], log=None)
    >>> list(loader), len(loader), loader.epochs[0].steps
    ([[1, 2], [3, 4]], 2, 2)
    """

    def __init__(self, loader: Iterable[_T_co], options: _Options) -> None:
        self.loader, self._options = loader, options
        self.epochs: list[EpochTimes] = []

    def __iter__(self) -> Iterator[_T_co]:
        return _Epoch(self, self._options)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.loader)

    def __repr__(self) -> str:
        return f"watch({self.loader!r})"

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # this object is being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.loader, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.loader)})

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.loader, self._options, self.epochs)


def _again(loader: Any, options: _Options, epochs: list[EpochTimes]) -> WatchedLoader[Any]:
    made = WatchedLoader(loader, options)
    made.epochs = list(epochs)
    return made


class _Epoch(Iterator[_T_co]):
    def __init__(self, watched: WatchedLoader[_T_co], options: _Options) -> None:
        self._is_over = True  # until the epoch has begun
        self._watched, self._options = watched, options
        self._process = os.getpid()
        self._moments = array("d")  # two for each batch: the times of its request and of its arrival
        self._note = self._moments.extend
        self._samples, self._last = 0.0, 0.0
        self._count = options.samples
        self._every = options.log_every
        self._waited, self._summed = 0.0, 0  # ``_waited`` sums up the first ``_summed`` moments
        self._bar: Bar | None = None
        self._stages = _stages_of(watched.loader)
        self._next_show = 0.0 if options.progress else math.inf  # the first batch shows the progress
        self._began = perf_counter()
        self._inner = iter(watched.loader)
        self._take = self._inner.__next__
        # ``iter`` has forked the worker processes, so a thread can start now.
        self._gpu = GPUSampler.begin() if options.gpu else None
        if self._gpu is not None:
            weakref.finalize(self, self._gpu.stop)  # also runs at the exit of the interpreter
        self._is_over = False

    def __iter__(self) -> _Epoch[_T_co]:
        return self

    def __next__(self) -> _T_co:
        asked = perf_counter()
        try:
            batch = self._take()
        except StopIteration:
            self._end(perf_counter())
            raise
        except BaseException:
            self._hide()
            raise
        got = perf_counter()
        self._note((asked, got))  # a single call, so that no signal handler runs between the two values
        self._last = count = self._count(batch)
        self._samples += count
        if got >= self._next_show:
            self._show(got)
        if self._every and not len(self._moments) // 2 % self._every:
            _log.info("%s, %s", self._title, self._so_far(got))
        return batch

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the interpreter's exit, the globals of this module no longer exist.
        if not self._is_over and not is_finalizing():
            self._end(None)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_inner") or name == "_is_over":  # __init__ has failed
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def _title(self) -> str:
        return f"{self._options.name}epoch {len(self._watched.epochs)}"

    def _show(self, now: float) -> None:
        if self._bar is None:
            self._bar = _BARS.begin(self._title, length_of(self._watched.loader))
            self._next_show = now + self._bar.interval_s
            if self._bar.interval_s > 1:  # the first line is printed after ten seconds
                return
        self._next_show = now + self._bar.interval_s
        _BARS.show(self._bar, len(self._moments) // 2, self._so_far(now, with_steps=False))

    def _hide(self) -> None:
        if self._bar is not None:
            _BARS.end(self._bar)
            self._bar, self._next_show = None, 0.0

    def _so_far(self, now: float, *, with_steps: bool = True) -> str:
        steps, seconds = len(self._moments) // 2, max(now - self._began, 1e-9)
        new = np.array(self._moments[self._summed :])
        self._waited, self._summed = self._waited + float(np.sum(new[1::2] - new[::2])), len(self._moments)
        said = []
        total = length_of(self._watched.loader)
        if with_steps:
            said.append(f"step {steps}" + ("" if total is None else f" of {total}"))
        if not math.isnan(self._samples):
            said.append(f"{self._samples / seconds:.0f} images/s")
        said.append(f"{self._waited / seconds:.0%} waiting for data")
        if total is not None and steps > 1:
            # The time of the first batch is excluded, as it may include the start of workers.
            left = (total - steps) * (now - self._moments[1]) / (steps - 1)
            said.append(f"{int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02} left")
        return ", ".join(said)

    def _end(self, ended: float | None) -> None:
        if self._is_over or self._process != os.getpid():
            return
        self._is_over, self._next_show = True, math.inf
        use = None if self._gpu is None else self._gpu.stop()
        samples, is_complete = self._samples, ended is not None
        moments = np.array(self._moments).reshape(-1, 2)
        if ended is None:
            if len(moments) < 2:  # the script took at most one batch
                self._hide()
                return
            ended, samples, moments = float(moments[-1, 0]), samples - self._last, moments[:-1]
        limits = self._options.limits
        times = epoch_times(
            len(self._watched.epochs), ended - self._began,
            np.diff(moments[:, 0], append=ended), moments[:, 1] - moments[:, 0], samples,
            first_batch_seconds=float(moments[0, 1]) - self._began if len(moments) else None,
            warn_after=limits.warn_after, is_complete=is_complete,
        )  # fmt: skip
        if use is not None:
            times = times._replace(**use._asdict())
        self._watched.epochs.append(times)
        if self._bar is not None:
            _BARS.end(self._bar)
        self._options.log.add(times, self._options.name, _BARS.print)
        stages = _stages_of(self._watched.loader)
        spent = {name: stages[name] - self._stages.get(name, 0.0) for name in stages if name != "wait"}
        warning = limits.warning(times, spent)
        if warning is not None:
            _log.warning("%s%s", self._options.name, warning)


def _stages_of(loader: Any) -> dict[str, float]:
    with contextlib.suppress(AttributeError):
        return dict(loader.clock.totals())
    return {}


class LastingFile:
    """A file that writes to standard error.

    Errors are ignored, because the terminal may be closed during a training.
    """

    def write(self, text: str) -> int:
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def isatty(self) -> bool:
        return bool(self._try("isatty"))

    @property
    def encoding(self) -> str:
        return getattr(self._target, "encoding", None) or "utf-8"

    @property
    def _target(self) -> Any:
        # While bars are shown, rich replaces standard error by a file that writes above the bars.
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)

    def _try(self, name: str, *arguments: str) -> Any:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return getattr(self._target, name)(*arguments)
        return None


@dataclass(eq=False)
class Bar:
    name: str
    total: int | None
    task: TaskID | None
    interval_s: float


class Bars:
    """The progress bars of all running epochs, on one console.  Only ``show`` draws them, not a thread."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = Console(file=cast(IO[str], LastingFile())) if console is None else console
        self._lock = threading.RLock()
        self._open: set[Bar] = set()
        self._progress: Progress | None = None

    def begin(self, name: str, total: int | None) -> Bar:
        with self._lock:
            if self._progress is None and self._console.is_terminal:
                columns = (
                    TextColumn("{task.description}", markup=False), BarColumn(24),
                    TextColumn("{task.fields[said]}", markup=False),
                )  # fmt: skip
                self._progress = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
                # At the interpreter's exit, ``close`` restores the terminal's cursor.
                atexit.register(self.close)
                self._progress.start()
            bar = Bar(name, total, None, _LINE_S)
            if self._progress is not None:
                bar.interval_s = _REFRESH_S
                bar.task = self._progress.add_task(printable(name), total=total, said="")
            self._open.add(bar)
            return bar

    def show(self, bar: Bar, steps: int, said: str) -> None:
        said = f"{steps}{'' if bar.total is None else f'/{bar.total}'}, {said}"
        progress = self._progress  # another thread may set it to None
        if progress is None or bar.task is None:
            print_line(self._console, f"{bar.name}: {said}")
        elif bar.task in progress.task_ids:
            fields: dict[str, Any] = {"said": printable(said)}
            progress.update(bar.task, completed=steps, refresh=True, **fields)

    def print(self, text: str) -> None:
        """Print a line, above the bars if there are any."""
        with self._lock:
            print_line(self._console, text)

    def end(self, bar: Bar) -> None:
        with self._lock:
            if bar not in self._open:
                return
            self._open.discard(bar)
            if not self._open:
                self.close()
            elif self._progress is not None and bar.task is not None:
                self._progress.remove_task(bar.task)
                self._progress.refresh()

    def close(self) -> None:
        with self._lock:
            self._open.clear()
            progress, self._progress = self._progress, None
            if progress is not None:
                atexit.unregister(self.close)
                progress.stop()


_BARS = Bars()
