"""``EpochTimer``: how long Lightning's epochs and steps take, and how much of it they wait for data."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

from fastpipe.core.epoch_times import EpochTimes, WaitLimits, epoch_times, samples_of
from fastpipe.errors import MissingDependencyError

__all__ = ["EpochTimer"]

_log = logging.getLogger("fastpipe.torch")
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_FETCH = ".train_dataloader_next"  # what Lightning's fit loop tells its profiler before and after it asks
_SHOWN = ("fastpipe/waiting", "fastpipe/images_per_second")


class EpochTimer:
    """Time each epoch of ``trainer.fit``, and say how much of it was waiting for data.

    Each epoch is a line of the log ``fastpipe.torch`` (INFO), an entry of ``epochs``, and a point of the
    trainer's loggers: ``fastpipe/epoch_seconds``, ``fastpipe/step_seconds``, ``fastpipe/waiting`` and
    ``fastpipe/images_per_second``; the progress bar of a training in one process shows the last two.

    It is a callback of Lightning's: of ``lightning`` or ``pytorch_lightning``, whichever the script uses.
    Waiting is the time in which Lightning's loop asks the loader for a batch, and nothing else of what goes
    on between two steps: callbacks, checkpoints, validation, moving the batch.  Where the device computes
    while Python goes on, as GPUs do, the wait includes what is left of the step before.  Of several ranks
    each times itself; the log and the loggers get the first one's.

    Args:
        warn_after: seconds; once an epoch a warning says how many batches took longer, the first excepted.
        warn_waiting: a part of an epoch, 0 to 1; a warning says where more of it was waiting for data.

    Attributes:
        epochs: :class:`~fastpipe.profiling.EpochTimes` of each epoch, oldest first; ``fit`` begins them anew.

    Raises:
        OptionError: a limit that cannot work.
        MissingDependencyError: Lightning is not installed.

    >>> timer = EpochTimer(warn_waiting=0.5)
    >>> isinstance(timer, sys.modules["lightning.pytorch"].Callback)
    True

    ``Trainer(callbacks=[timer])`` takes it.
    """

    epochs: list[EpochTimes]

    def __new__(cls, *_: Any, **__: Any) -> EpochTimer:
        """Of a class that is a callback of the script's Lightning, too."""
        own: Any = cls
        kind = own if hasattr(own, "on_train_start") else _with_callbacks(own, _loaded())
        made: EpochTimer = object.__new__(kind)
        return made

    def __init__(self, *, warn_after: float | None = None, warn_waiting: float | None = None) -> None:
        self._limits = WaitLimits(warn_after, warn_waiting)
        self.epochs = []
        self._detach: Callable[[], None] | None = None
        self._reset()

    def __reduce__(self) -> tuple[Any, ...]:
        kept = {name: value for name, value in vars(self).items() if name != "_detach"}
        return _again, (getattr(type(self), "_plain", type(self)), kept)

    def _reset(self) -> None:
        self._began: float | None = None  # of the epoch
        self._ended = self._paused = self._pausing = 0.0
        self._asked: float | None = None
        self._first_batch: float | None = None
        self._step_began: float | None = None
        self._validation_began: float | None = None
        self._steps: list[float] = []
        self._waits: list[float] = []
        self._samples = 0.0

    # ---- Lightning calls these -------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin to hear of what the loop asks the loader for."""
        self._stop_hearing()
        if stage == "fit":
            self.epochs.clear()
            self._reset()
            self._detach = _hear(trainer.profiler, self._on_ask, self._on_got)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End it."""
        self._stop_hearing()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End it, as ``teardown`` is not called then."""
        self._stop_hearing()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an epoch."""
        self._begin(perf_counter())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step, if asking for its batch has not."""
        if self._step_began is None:
            self._step_began = perf_counter()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a step."""
        self._ended = perf_counter()
        if self._step_began is not None:
            self._steps.append(self._ended - self._step_began)
        self._step_began = None
        self._samples += samples_of(batch)
        self._paused, self._pausing = self._paused + self._pausing, 0.0

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop the clock, where validation comes between steps."""
        self._validation_began = perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Let it go on."""
        if self._validation_began is not None:
            self._pausing += perf_counter() - self._validation_began
        self._validation_began = None

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Say what the epoch took."""
        if self._began is None:  # one of which no step was left to do
            return
        times = epoch_times(
            trainer.current_epoch, max(0.0, self._ended - self._began - self._paused), self._steps,
            self._waits or None, self._samples,
            first_batch_seconds=self._first_batch, warn_after=self._limits.warn_after,
        )  # fmt: skip
        self._reset()
        self.epochs.append(times)
        rank = "" if trainer.world_size == 1 else f"rank {trainer.global_rank}, "
        if trainer.is_global_zero:
            _log.info("%s%s", rank, times)
            if times.waiting is None and len(self.epochs) == 1:
                _log.info("what it waited for data is not known: this Lightning does not say when it asks")
        warning = self._limits.warning(times)
        if warning is not None:
            _log.warning("%s%s", rank, warning)
        if not trainer.barebones:  # which logs nothing
            _log_scalars(trainer, pl_module, times)

    # ---- what the loop asks the loader for -------------------------------------------------------

    def _begin(self, now: float) -> None:
        self._reset()
        self._began = self._ended = now

    def _on_ask(self) -> None:
        now = perf_counter()
        if self._began is None:  # an epoch that is gone on with after a restart has no start
            self._begin(now)
        self._asked = now
        if self._step_began is None:
            self._step_began = now

    def _on_got(self) -> None:
        now = perf_counter()
        if self._asked is None or self._began is None:
            return
        self._waits.append(now - self._asked)
        self._asked = None
        if self._first_batch is None:
            self._first_batch = now - self._began

    def _stop_hearing(self) -> None:
        if self._detach is not None:
            self._detach()
            self._detach = None


def _log_scalars(trainer: Any, pl_module: Any, times: EpochTimes) -> None:
    """Tell the trainer's loggers and its progress bar."""
    if trainer.world_size == 1:
        for name, value in times.scalars().items():
            pl_module.log(
                name, value, prog_bar=name in _SHOWN, logger=bool(trainer.loggers), on_step=False,
                on_epoch=True, batch_size=1,
            )  # fmt: skip
        return
    # Lightning would have these averaged over ranks, which then wait for each other, or warns otherwise.
    step = trainer.fit_loop.epoch_loop._batches_that_stepped - 1  # as Lightning counts at an epoch's end
    for logger in trainer.loggers:  # of which those of other ranks do nothing
        logger.log_metrics({**times.scalars(), "epoch": trainer.current_epoch}, step=step)


def _hear(profiler: Any, on_ask: Callable[[], None], on_got: Callable[[], None]) -> Callable[[], None]:
    """Have two functions called around each request of the fit loop's to its loader.

    Lightning tells its profiler of them, also where the script has not asked for one.  Nothing else that it
    calls is as near: between a step's end and the next one's start there are callbacks, too.

    Returns:
        What ends it.
    """
    start, stop = profiler.start, profiler.stop
    is_heard = True

    def heard_start(action_name: str) -> None:
        start(action_name)
        if is_heard and action_name.endswith(_FETCH):
            on_ask()

    def heard_stop(action_name: str) -> None:
        if is_heard and action_name.endswith(_FETCH):
            on_got()
        stop(action_name)

    def end() -> None:
        nonlocal is_heard
        is_heard = False
        own = vars(profiler)
        if own.get("start") is heard_start:  # else another one hears through this
            del own["start"]
        if own.get("stop") is heard_stop:
            del own["stop"]

    profiler.start, profiler.stop = heard_start, heard_stop
    return end


def _loaded() -> tuple[type, ...]:
    """The classes of callbacks of the Lightning that is loaded, perhaps of both, else of one installed."""
    found = [sys.modules[name] for name in _PACKAGES if sys.modules.get(name)]
    for name in _PACKAGES:
        if not found:
            try:
                found.append(importlib.import_module(name))
            except ModuleNotFoundError as error:
                if error.name is None or not name.startswith(error.name):
                    raise
    if not found:
        raise MissingDependencyError(
            "EpochTimer is a callback of Lightning's, which is not installed. Install it with:  "
            "pip install lightning"
        )
    return tuple(module.Callback for module in found)


@functools.cache
def _with_callbacks(cls: Any, callbacks: tuple[type, ...]) -> type:
    # Lightning keeps the state of a callback under its class's name.
    return type(
        cls.__name__, (cls, *callbacks), {"__qualname__": cls.__qualname__, "__module__": cls.__module__,
                                          "__doc__": cls.__doc__, "_plain": cls},
    )  # fmt: skip


def _again(cls: type[EpochTimer], kept: dict[str, Any]) -> EpochTimer:
    made = cls.__new__(cls)
    vars(made).update(kept, _detach=None)
    return made
