"""``prepare``: a ``FastLoader`` under Accelerate.

Accelerate makes a plain ``DataLoader`` of what ``accelerator.prepare`` is given, without the
threads, the seed and the shard of a ``FastLoader``.  Lightning and timm use a loader as it is.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from fastpipe.core.order import BlockShard
from fastpipe.errors import OptionError
from fastpipe.options import Shard
from fastpipe.torch.accelerating import accelerate
from fastpipe.torch.delivery import DueError
from fastpipe.torch.grouping import GroupSampler
from fastpipe.torch.loader import FastLoader
from fastpipe.torch.order import ShardSampler, batching_of, is_default

__all__ = ["prepare"]

_T_co = TypeVar("_T_co", covariant=True)

_END = object()
_SAMPLING = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
_REMEDY = "or use accelerator.prepare(loader), which makes a plain DataLoader of it"


class _Prepared(FastLoader[_T_co]):
    """A loader that tells Accelerate what it asks of its own loaders.

    Attributes:
        gradient_state: Accelerate's, which asks the loader that is iterated over now.
        end_of_dataloader: whether the batch given last is the last one.
        remainder: samples of all ranks in the last step if that is not whole, else 0;
            ``gather_for_metrics`` keeps so many.  -1 where such a step is dropped.
        use_stateful_dataloader: makes ``save_state`` and ``load_state`` ask for the state.
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
            # Accelerate's function of that name would make a plain loader of the samplers that it sees.
            self.__dict__["batch_sampler"] = _ShownBatches(batches)
        if self.shard is not None and self.batch_sampler is not None:
            self.batch_sampler.even_batches = True  # type: ignore[attr-defined]  # join_uneven_inputs() asks

    @property
    def total_batch_size(self) -> int:
        """Samples that all ranks take in one step."""
        size = self.batch_size or getattr(self.batch_sampler, "batch_size", None) or 1
        return int(size) * (1 if self.shard is None else self.shard.world)

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset."""
        return len(self.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[_T_co]:  # type: ignore[override]
        """The batches, each when it is known whether another one follows."""
        self.end_of_dataloader, self.remainder = False, -1
        self.gradient_state._add_dataloader(self)
        try:
            batches = super().__iter__()
            batch = _next(batches)
            while batch is not _END:
                if isinstance(batch, DueError):
                    raise batch.take()
                progress = self._order.progress
                assert progress is not None, "a batch was asked for"
                self.remainder = self._remainder(progress.point.position)
                progress.hold()  # until the next batch is the user's, the state is that at this one
                following = _next(batches)
                self.end_of_dataloader = following is _END
                yield batch
                batch = following
        finally:  # also when the user's loop is left early
            self.gradient_state._remove_dataloader(self)

    @property
    def _index_sampler(self) -> Any:
        batches = super()._index_sampler
        return batches._batches if isinstance(batches, _ShownBatches) else batches

    def _skip(self, batches: int) -> None:
        source = self._source()
        self._order.look_at(self)
        self._order.skip(batches, is_refilled=source is not None and source.skips)

    def _remainder(self, start: int) -> int:
        if self.drop_last:
            return -1
        ours = self._order.ours()
        return 0 if ours is None else (ours.count - start) % self.total_batch_size


class _ShownBatches(BatchSampler):
    """The batch sampler that a prepared loader shows: to look at, as its batches are more than indices."""

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
        if name == "_batches":  # as it is unpickled
            raise AttributeError(name)
        return getattr(self._batches, name)


class _Rest:
    """A prepared loader without the first batches of its next epoch, or of the one that it resumes."""

    def __init__(self, loader: _Prepared[Any], skipped: int) -> None:
        self._loader, self._skipped = loader, skipped

    def __iter__(self) -> Iterator[Any]:
        self._loader._skip(self._skipped)
        return iter(self._loader)

    def __len__(self) -> int:
        return max(len(self._loader) - self._skipped, 0)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


class _SkipFirstBatches:
    """The accelerator's ``skip_first_batches``, which knows prepared loaders as well."""

    def __init__(self, stock: Callable[..., Any]) -> None:
        self._stock = stock

    def __call__(self, dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, _Prepared):
            return _Rest(dataloader, operator.index(num_batches))
        return self._stock(dataloader, num_batches=num_batches)


def _next(batches: Iterator[Any]) -> Any:
    try:
        return next(batches, _END)
    except Exception as error:
        return DueError(error)


def prepare(accelerator: Any, loader: DataLoader[Any], *, seed: int | None = None) -> FastLoader[Any]:
    """Make a :class:`fastpipe.FastLoader` work with an ``accelerate.Accelerator``.

    Call it instead of ``accelerator.prepare(loader)``.  Each process gets its part of each step, on
    ``accelerator.device``, and ``accumulate``, ``gather_for_metrics``, ``save_state`` and
    ``load_state`` work as with Accelerate's own loaders.  The saved state is exact, for any number of
    processes: after ``load_state`` the loader goes on behind the batches that were received, with
    ``accelerator.skip_first_batches(loader, number)``, which counts from the epoch's begin, or without.
    (For that, this accelerator's ``skip_first_batches`` is replaced by one that knows prepared loaders.)

    Args:
        accelerator: the script's.
        loader: a ``FastLoader``, or a ``DataLoader``, of which
            :func:`fastpipe.torch.accelerate` makes one.  It is not changed.
        seed: as in ``FastLoader``.  Default: the loader's, or the dataset's.

    Raises:
        OptionError: the loader is shuffled without a seed, or has a sampler of its own, and there
            are several processes; or the accelerator deals out batches in another way.

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
            fast = accelerate(loader, seed=seed)  # the dataset's, which then shuffles as well
        loader = _Prepared(accelerator, **_arguments(fast, accelerator, seed))
    stock = getattr(accelerator, "skip_first_batches", None)
    if stock is not None and not isinstance(stock, _SkipFirstBatches):
        accelerator.skip_first_batches = _SkipFirstBatches(stock)
    # Of a loader that is prepared, Accelerate takes notice only.
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


def _arguments(loader: FastLoader[Any], accelerator: Any, seed: int | None) -> dict[str, Any]:
    """The arguments of the prepared loader."""
    names = inspect.signature(FastLoader).parameters.keys() - _SAMPLING
    arguments = {name: getattr(loader, name) for name in names if hasattr(loader, name)} | {"seed": seed}
    if accelerator.device_placement and accelerator.device.type != "cpu":
        arguments["device"] = accelerator.device
    sampling = _sampling(loader)
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


def _sampling(loader: FastLoader[Any]) -> dict[str, Any]:
    """Those of them that say which samples make which batch."""
    batching = batching_of(loader)
    sampler = batching.get("sampler")
    if isinstance(sampler, ShardSampler):
        batching["shuffle"] = sampler.arrangement.option if sampler.arrangement else sampler.shuffle
    elif isinstance(sampler, GroupSampler):
        batching["shuffle"] = sampler.arrangement.option
    elif is_default(sampler):
        batching["shuffle"] = isinstance(sampler, RandomSampler)
    if "shuffle" in batching:
        del batching["sampler"]
    return batching


def _check_sampling(sampling: dict[str, Any], seed: int | None) -> None:
    """Raise an error if processes could not share an epoch."""
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
