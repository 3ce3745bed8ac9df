"""Support for trainers: ``EpochTimer`` for Lightning, ``prepare`` for Hugging Face Accelerate, and
``accelerate_trainer`` for Hugging Face's Trainer."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import operator
import sys
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from fastpipe.core.epoch_times import (
    EpochLog,
    EpochTimes,
    WaitLimits,
    epoch_times,
    print_to_stderr,
    samples_of,
)
from fastpipe.core.order import BlockShard
from fastpipe.errors import MissingDependencyError, OptionError
from fastpipe.options import Shard
from fastpipe.torch.delivery import DeferredError
from fastpipe.torch.loader import FastLoader, accelerate, sampling_of
from fastpipe.torch.order import is_default

# ---- ``prepare``: a ``FastLoader`` under Accelerate -------------------------------------------------

_T_co = TypeVar("_T_co", covariant=True)

_END = object()
_SAMPLING = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
_REMEDY = "or use accelerator.prepare(loader), which makes a plain DataLoader of it"


class _Prepared(FastLoader[_T_co]):
    """A loader with the attributes that Accelerate expects of its own loaders.

    ``remainder`` is the number of samples of all ranks in an incomplete last step.  Accelerate's
    ``gather_for_metrics`` keeps only these samples.  ``remainder`` is 0 if the last step is complete, and -1
    if incomplete steps are dropped.  ``use_stateful_dataloader`` makes ``save_state`` call ``state_dict``.
    """

    end_of_dataloader = False
    remainder = -1
    use_stateful_dataloader = True
    _is_accelerate_prepared = True

    def __init__(self, accelerator: Any, **arguments: Any) -> None:
        self.gradient_state = accelerator.gradient_state
        super().__init__(**arguments)
        batches = self.batch_sampler
        if batches is not None:
            # Accelerate's function ``skip_first_batches`` would make a plain DataLoader from these samplers.
            self.__dict__["batch_sampler"] = _ShownBatches(batches)
        if self.shard is not None and self.batch_sampler is not None:
            self.batch_sampler.even_batches = True  # type: ignore[attr-defined]  # for join_uneven_inputs()

    @property
    def total_batch_size(self) -> int:
        """Number of samples that all ranks together take in one step."""
        size = self.batch_size or getattr(self.batch_sampler, "batch_size", None) or 1
        return int(size) * (1 if self.shard is None else self.shard.world)

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the dataset."""
        return len(self.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[_T_co]:  # type: ignore[override]
        """Yield the batches.  Request the next batch before each yield, in order to set
        ``end_of_dataloader``."""
        self.end_of_dataloader, self.remainder = False, -1
        self.gradient_state._add_dataloader(self)
        try:
            batches = super().__iter__()
            batch = _next(batches)
            while batch is not _END:
                if isinstance(batch, DeferredError):
                    raise batch.take()
                progress = self._order.progress
                assert progress is not None, "a batch was asked for"
                self.remainder = self._remainder(progress.point.position)
                progress.hold()  # until the user gets the next batch, ``state_dict`` is that after this batch
                following = _next(batches)
                self.end_of_dataloader = following is _END
                yield batch
                batch = following
        finally:  # runs also if the user's loop ends early
            self.gradient_state._remove_dataloader(self)

    @property
    def _index_sampler(self) -> Any:
        batches = super()._index_sampler
        return batches._batches if isinstance(batches, _ShownBatches) else batches

    def _remainder(self, start: int) -> int:
        if self.drop_last:
            return -1
        ours = self._order.ours()
        return 0 if ours is None else (ours.count - start) % self.total_batch_size


class _ShownBatches(BatchSampler):
    """The batch sampler that a prepared loader shows to other libraries.  Iterating over it raises an error,
    because a loader made from it would lack the device, the seed and the augmentation."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        raise OptionError(
            "only a prepared loader itself gives its batches, with its device, seed and augmentation, and "
            "accelerate.skip_first_batches() would make a plain DataLoader of its samplers: use "
            "accelerator.skip_first_batches(loader, number), or iterate over the loader after "
            "load_state(). For Hugging Face's Trainer, return the FastLoader itself from "
            "get_train_dataloader()"
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # the object is being unpickled
            raise AttributeError(name)
        return getattr(self._batches, name)


class _Rest:
    """A prepared loader that skips the first batches of its next epoch, or of the epoch that it resumes."""

    def __init__(self, loader: _Prepared[Any], skipped: int) -> None:
        self._loader, self._skipped = loader, skipped

    def __iter__(self) -> Iterator[Any]:
        source, order = self._loader._source(), self._loader._order
        order.look_at(self._loader)
        order.skip(self._skipped, is_refilled=source is not None and source.skips)
        return iter(self._loader)

    def __len__(self) -> int:
        return max(len(self._loader) - self._skipped, 0)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


def _skip_first_batches(stock: Callable[..., Any], dataloader: Any, num_batches: int = 0) -> Any:
    """Skip batches of prepared loaders.  For other loaders, call ``stock``, the accelerator's own
    function."""
    if isinstance(dataloader, _Prepared):
        return _Rest(dataloader, operator.index(num_batches))
    return stock(dataloader, num_batches=num_batches)


def _next(batches: Iterator[Any]) -> Any:
    try:
        return next(batches, _END)
    except Exception as error:
        return DeferredError(error)


def prepare(accelerator: Any, loader: DataLoader[Any], *, seed: int | None = None) -> FastLoader[Any]:
    """Make a :class:`fastpipe.FastLoader` that works with an ``accelerate.Accelerator``.

    Call this function instead of ``accelerator.prepare(loader)``.  In each step, each process gets its part
    of the samples, on ``accelerator.device``.  ``accumulate``, ``gather_for_metrics``, ``save_state`` and
    ``load_state`` work as with Accelerate's own loaders.  The saved state is exact, and works with any number
    of processes: after ``load_state`` the loader continues after the batches that were received.  You need
    not call ``accelerator.skip_first_batches(loader, number)``.  If you call it, ``number`` counts from the
    epoch's start.  (``prepare`` gives this accelerator a ``skip_first_batches`` that supports prepared
    loaders.)

    Args:
        accelerator: the script's ``Accelerator``.
        loader: a ``FastLoader``, or a ``DataLoader``, which :func:`fastpipe.torch.accelerate` converts to a
            ``FastLoader``.  The given loader is not changed.
        seed: as in ``FastLoader``.  Default: the loader's seed, or the dataset's seed.

    Raises:
        OptionError: with several processes, the loader shuffles without a seed or has the script's own
            sampler; or the accelerator distributes batches in another way.

    >>> from accelerate import Accelerator
    >>> accelerator = Accelerator(cpu=True)
    >>> loader = prepare(accelerator, FastLoader(list(range(6)), batch_size=4))
    >>> for batch in loader:
    ...     print(batch, accelerator.gradient_state.end_of_dataloader)
    tensor([0, 1, 2, 3]) False
    tensor([4, 5]) True
    """
    _check_accelerator(accelerator)
    if not isinstance(loader, _Prepared):
        _check_loader(loader)
        fast = loader if isinstance(loader, FastLoader) else accelerate(loader, seed=seed)
        seed = fast._effective_seed() if seed is None else seed
        if accelerator.num_processes > 1 and fast is not loader and fast.seed != seed:
            fast = accelerate(loader, seed=seed)  # the seed is the dataset's, and now also defines the order
        loader = _Prepared(accelerator, **_arguments(fast, accelerator, seed))
    stock = getattr(accelerator, "skip_first_batches", None)
    if stock is not None and getattr(stock, "func", None) is not _skip_first_batches:
        accelerator.skip_first_batches = functools.partial(_skip_first_batches, stock)
    # Accelerate only registers a loader that is already prepared.
    prepared: FastLoader[Any] = accelerator.prepare_data_loader(loader)
    return prepared


def _check_accelerator(accelerator: Any) -> None:
    if not hasattr(accelerator, "gradient_state"):
        raise OptionError(
            "prepare(accelerator, loader) takes an accelerate.Accelerator first, got a "
            f"{type(accelerator).__name__}"
        )
    for option, is_wanted in (("split_batches", False), ("dispatch_batches", False), ("even_batches", True)):
        value = getattr(accelerator, option)
        if bool(value) is not is_wanted:
            raise OptionError(
                f"fastpipe.torch.prepare() gives each process whole batches of its own, equally many: leave "
                f"Accelerate's {option}={value!r} out, {_REMEDY}"
            )


def _check_loader(loader: Any) -> None:
    if hasattr(loader, "_is_accelerate_prepared") or hasattr(loader, "end_of_dataloader"):
        raise OptionError("this loader comes from accelerator.prepare(): give prepare() the one from before")
    if isinstance(loader, FastLoader) and type(loader) is not FastLoader:
        raise OptionError(
            f"prepare() makes a loader of its own, without what {type(loader).__name__} adds to FastLoader: "
            f"give it a FastLoader, {_REMEDY}"
        )
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        raise OptionError(
            "prepare() deals out the indices of a dataset, which an IterableDataset has not: use "
            "accelerator.prepare(loader)"
        )


def _options(loader: FastLoader[Any]) -> dict[str, Any]:
    """Return the arguments of a loader, without those that define which samples form which batch."""
    names = inspect.signature(FastLoader).parameters.keys() - _SAMPLING
    return {name: getattr(loader, name) for name in names if hasattr(loader, name)}


def _arguments(loader: FastLoader[Any], accelerator: Any, seed: int | None) -> dict[str, Any]:
    arguments = _options(loader) | {"seed": seed}
    if accelerator.device_placement and accelerator.device.type != "cpu":
        arguments["device"] = accelerator.device
    sampling = sampling_of(loader, is_default(loader.sampler))  # a sampler of the script stays in use
    if accelerator.num_processes > 1:
        _check_sampling(sampling, seed)
        shard = BlockShard(accelerator.process_index, accelerator.num_processes)
        if loader.shard not in (None, Shard(shard.rank, shard.world)):
            raise OptionError(
                f"the loader has shard={loader.shard}, and this is process {shard.rank} of {shard.world}: "
                "leave shard= out, prepare() brings it"
            )
        arguments["shard"] = shard
    return arguments | sampling


def _check_sampling(sampling: dict[str, Any], seed: int | None) -> None:
    """Raise an error if several processes could not share the samples of an epoch."""
    sampler = sampling.get("sampler")
    if seed is None and (sampling.get("shuffle") or isinstance(sampler, RandomSampler)):
        raise OptionError(
            "a shuffled loader needs a seed, the same in all processes, so that these share one order: "
            "prepare(accelerator, loader, seed=0)"
        )
    for name in ("sampler", "batch_sampler"):
        if name in sampling:
            raise OptionError(
                f"with several processes prepare() itself says which samples each takes, and the loader has "
                f"a {name} of its own ({type(sampling[name]).__name__}): use shuffle= and seed=, {_REMEDY}"
            )
    if sampling["batch_size"] is None:
        raise OptionError(f"with several processes prepare() deals out batches: give a batch_size, {_REMEDY}")


# ---- ``accelerate_trainer``: Hugging Face's Trainer ----------------------------------------------------

_LOADER_METHODS = ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader")
_Trainer = TypeVar("_Trainer")


class _Base(FastLoader[_T_co]):
    """The loader from which a loader of Accelerate takes its batches.

    Like a plain ``DataLoader``, it has no ``state_dict``.  Otherwise Accelerate would call this method after
    each batch.  The Trainer does not need it, because it skips batches to resume.
    """

    @property
    def state_dict(self) -> Any:
        raise AttributeError("state_dict")


def accelerate_trainer(trainer: _Trainer) -> _Trainer:
    """Make the loaders of a Hugging Face ``Trainer`` faster, with the same batches.

    The Trainer makes its loaders itself, with Accelerate.  These loaders stay in use, and take their batches
    from a :class:`fastpipe.FastLoader`, as :func:`fastpipe.torch.accelerate` makes one.  The order of the
    samples, several processes and resuming from a checkpoint are still the Trainer's.

    Args:
        trainer: a ``transformers.Trainer``, also of a class of your own.  Its methods
            ``get_train_dataloader``, ``get_eval_dataloader`` and ``get_test_dataloader`` are replaced.  Call
            this function before ``trainer.train()``.

    Returns:
        The same trainer.

    Raises:
        OptionError: ``trainer`` has no such methods.  When a loader is requested: it is not a ``DataLoader``,
            or of a class that overrides methods.

    >>> import tempfile, torch
    >>> from transformers import Trainer, TrainingArguments
    >>> args = TrainingArguments(tempfile.gettempdir(), per_device_train_batch_size=4, report_to="none")
    >>> data = [{"x": x} for x in range(6)]
    >>> trainer = accelerate_trainer(Trainer(torch.nn.Linear(1, 1), args, train_dataset=data))
    >>> len(trainer.get_train_dataloader())
    2
    """
    missing = [name for name in _LOADER_METHODS if not hasattr(trainer, name)]
    if missing:
        raise OptionError(
            f"accelerate_trainer() takes a transformers.Trainer, got a {type(trainer).__name__}, which has "
            f"no {missing[0]}(): for a loader, write fastpipe.accelerate(loader)"
        )
    for name in _LOADER_METHODS:
        setattr(trainer, name, functools.partial(_accelerated, getattr(trainer, name)))
    return trainer


def _accelerated(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a method that makes a loader, and return this loader, made faster."""
    loader = make(*args, **options)
    base = getattr(loader, "base_dataloader", None)
    if base is None:  # a loader that the script's own method has made without Accelerate
        return loader if isinstance(loader, FastLoader) else accelerate(loader)
    if not isinstance(base, FastLoader):
        fast = accelerate(base)
        loader.base_dataloader = _Base(**_options(fast) | sampling_of(fast, is_keyed=False))
    return loader


# ``EpochTimer``: durations of Lightning's epochs and steps, and the time that they wait for data.

_log = logging.getLogger("fastpipe.torch")
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_FETCH = ".train_dataloader_next"  # Lightning's fit loop reports each request to its profiler by this name
_SHOWN = ("fastpipe/waiting", "fastpipe/images_per_second")


class EpochTimer:
    """A Lightning callback that measures the time of each epoch of ``trainer.fit``, and the wait for data.

    Each epoch prints a line, and adds an entry to ``epochs`` and a point to the trainer's loggers.  The
    loggers' metrics are ``fastpipe/epoch_seconds``, ``fastpipe/step_seconds``, ``fastpipe/waiting`` and
    ``fastpipe/images_per_second``.  If the training has one process, the progress bar shows the last two
    metrics.

    The callback works with ``lightning`` and with ``pytorch_lightning``.  The waiting time is the time that
    Lightning's loop spends requesting batches from the loader.  It excludes everything else between two
    steps: callbacks, checkpoints, validation, and moving the batch.  If the device computes asynchronously,
    as GPUs do, the waiting time includes the rest of the previous step.  Each rank measures its own times.
    The line and the loggers get the times of the first rank.

    Args:
        warn_after: a number of seconds.  A warning at the end of an epoch reports for how many batches the
            loop waited longer.  The first batch is not counted.  By default, there is no such warning.
        warn_waiting: a fraction from 0 to 1.  A warning reports each epoch that spends a larger fraction of
            its time waiting for data.  By default, there is no such warning.
        log: where the line goes, as in :func:`fastpipe.watch`; the logger of ``"auto"`` is
            ``fastpipe.torch``.

    Attributes:
        epochs: :class:`~fastpipe.tools.EpochTimes` of each epoch, oldest first.  Each ``fit`` clears the
            list.

    Raises:
        OptionError: a limit has a value that cannot work.
        MissingDependencyError: Lightning is not installed.

    >>> timer = EpochTimer(warn_waiting=0.5)
    >>> isinstance(timer, sys.modules["lightning.pytorch"].Callback)
    True

    Pass the timer to the trainer: ``Trainer(callbacks=[timer])``.
    """

    epochs: list[EpochTimes]

    def __new__(cls, *_: Any, **__: Any) -> EpochTimer:
        """Return an object of a class that is also a subclass of ``Callback`` of the script's Lightning."""
        own: Any = cls
        kind = own if hasattr(own, "on_train_start") else _with_callbacks(own, _loaded())
        made: EpochTimer = object.__new__(kind)
        return made

    def __init__(
        self, *, warn_after: float | None = None, warn_waiting: float | None = None, log: Any = "auto"
    ) -> None:
        self._limits, self._epoch_log = WaitLimits(warn_after, warn_waiting), EpochLog(log, _log)
        self.epochs = []
        self._detach: Callable[[], None] | None = None
        self._reset()

    def __reduce__(self) -> tuple[Any, ...]:
        kept = {name: value for name, value in vars(self).items() if name != "_detach"}
        return _again, (getattr(type(self), "_plain", type(self)), kept)

    def _reset(self) -> None:
        self._began: float | None = None  # when the epoch began
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
        self._stop_hearing()
        if stage == "fit":
            self.epochs.clear()
            self._reset()
            self._detach = _hear(trainer.profiler, self._on_ask, self._on_got)

    def teardown(self, *_: Any, **__: Any) -> None:
        self._stop_hearing()

    on_exception = teardown  # after an exception Lightning does not call ``teardown``

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin(perf_counter())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step, unless the request of the step's batch has already begun it."""
        if self._step_began is None:
            self._step_began = perf_counter()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._ended = perf_counter()
        if self._step_began is not None:
            self._steps.append(self._ended - self._step_began)
        self._step_began = None
        self._samples += samples_of(batch)
        self._paused, self._pausing = self._paused + self._pausing, 0.0

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Pause the measurement while validation runs between steps."""
        self._validation_began = perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._validation_began is not None:
            self._pausing += perf_counter() - self._validation_began
        self._validation_began = None

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._began is None:  # a resumed epoch had no steps left
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
            bar = getattr(trainer, "progress_bar_callback", None)  # which keeps lines apart from its bar
            self._epoch_log.add(times, show=print_to_stderr if bar is None else bar.print)
            if times.waiting is None and len(self.epochs) == 1:
                _log.info("what it waited for data is not known: this Lightning does not say when it asks")
        warning = self._limits.warning(times)
        if warning is not None:
            _log.warning("%s%s", rank, warning)
        if not trainer.barebones:  # a trainer with ``barebones=True`` logs nothing
            _log_scalars(trainer, pl_module, times)

    # ---- requests of the loop to the loader -----------------------------------------------------

    def _begin(self, now: float) -> None:
        self._reset()
        self._began = self._ended = now

    def _on_ask(self) -> None:
        now = perf_counter()
        if self._began is None:  # Lightning reports no start of an epoch that is resumed after a restart
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
    if trainer.world_size == 1:
        for name, value in times.scalars().items():
            pl_module.log(
                name, value, prog_bar=name in _SHOWN, logger=bool(trainer.loggers), on_step=False,
                on_epoch=True, batch_size=1,
            )  # fmt: skip
        return
    # ``pl_module.log`` would either average the values over all ranks, which makes ranks wait for each other,
    # or print a warning.
    step = trainer.fit_loop.epoch_loop._batches_that_stepped - 1  # as Lightning counts at an epoch's end
    for logger in trainer.loggers:  # the loggers of other ranks do nothing
        logger.log_metrics({**times.scalars(), "epoch": trainer.current_epoch}, step=step)


def _hear(profiler: Any, on_ask: Callable[[], None], on_got: Callable[[], None]) -> Callable[[], None]:
    """Call ``on_ask`` before and ``on_got`` after each request of the fit loop to its loader.

    Return a function that ends these calls.  Lightning always reports requests to its profiler.  No callback
    of Lightning is called as directly before and after a request.
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
        if own.get("start") is heard_start:  # otherwise another timer has replaced this function
            del own["start"]
        if own.get("stop") is heard_stop:
            del own["stop"]

    profiler.start, profiler.stop = heard_start, heard_stop
    return end


def _loaded() -> tuple[type, ...]:
    """Return the ``Callback`` classes of the imported Lightning packages; import one if none is imported."""
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
    # Lightning stores a callback's state under the name of its class.
    return type(
        cls.__name__, (cls, *callbacks), {"__qualname__": cls.__qualname__, "__module__": cls.__module__,
                                          "__doc__": cls.__doc__, "_plain": cls},
    )  # fmt: skip


def _again(cls: type[EpochTimer], kept: dict[str, Any]) -> EpochTimer:
    made = cls.__new__(cls)
    vars(made).update(kept, _detach=None)
    return made
