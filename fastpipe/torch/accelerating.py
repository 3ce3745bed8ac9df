"""``accelerate``: a script's own ``DataLoader`` becomes a ``FastLoader``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from fastpipe.errors import OptionError
from fastpipe.options import Cache, Shard
from fastpipe.torch.grouping import GroupSampler
from fastpipe.torch.loader import FastLoader
from fastpipe.torch.order import ShuffleSampler, batching_of

__all__ = ["accelerate"]

_WORKER_OPTIONS = (
    "num_workers", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
    "persistent_workers",
)  # fmt: skip
_OWN = ("seed", "shard", "device", "dtype", "augment", "cache", "workers")
_SHARED_OPTIONS = ("dataset", "collate_fn", "pin_memory", "pin_memory_device", "generator", "in_order")


def accelerate(
    loader: DataLoader[Any],
    *,
    seed: int | None = None,
    shard: Shard | None = None,
    device: Any = None,
    dtype: Any = None,
    augment: Callable[..., Any] | None = None,
    cache: Cache | Literal["auto", "ram", "disk", "off"] | None = None,
    num_workers: int | None = None,
    workers: Literal["auto", "threads", "processes"] | None = None,
    prefetch_factor: int | None = None,
    prefetch_batches: int | Literal["auto"] | None = None,
) -> FastLoader[Any]:
    """Make a :class:`fastpipe.FastLoader` of a ``DataLoader``, with the same batches.

    Dataset, sampler, ``collate_fn``, generator and everything else are the loader's own objects.
    Where fastpipe makes the batches and no code of the script's runs on the way, threads in this process do
    the work of its worker processes, as ``FastLoader`` says.  ``print(result.plan)`` says what
    was done, ``result.reference()`` undoes it.

    Args:
        loader: a ``DataLoader``.  It is not changed, and may be used on.
        seed, shard, device, dtype, augment, cache: as in ``FastLoader``.  With one of the first two, a plain
            ``shuffle=True`` shuffles by the seed; any other sampler stays.
        num_workers, workers: as in ``FastLoader``; default: as the loader has them.
        prefetch_factor, prefetch_batches: batches made ahead, by each of them or without any; as in
            ``FastLoader``.

    Raises:
        OptionError: it is no ``DataLoader``, one of a subclass that works in its own way, or an option cannot
            work.

    >>> from torch.utils.data import DataLoader
    >>> loader = accelerate(DataLoader(range(6), batch_size=3))
    >>> list(loader)
    [tensor([0, 1, 2]), tensor([3, 4, 5])]
    """
    _check(loader)
    options = {name: getattr(loader, name) for name in _SHARED_OPTIONS if hasattr(loader, name)}
    options |= {name: getattr(loader, name) for name in ("prefetch_batches", *_OWN) if hasattr(loader, name)}
    given = {
        "seed": seed, "shard": shard, "device": device, "dtype": dtype, "augment": augment,
        "cache": cache, "workers": workers, "prefetch_batches": prefetch_batches,
    }  # fmt: skip
    options |= {name: value for name, value in given.items() if value is not None}
    options |= _batching(loader, options)
    about_workers = {name: getattr(loader, name) for name in _WORKER_OPTIONS}
    if num_workers is not None:
        about_workers = _workers(about_workers, num_workers)
    if prefetch_factor is not None:
        about_workers["prefetch_factor"] = prefetch_factor
    return FastLoader(**options, **about_workers)


def _workers(given: dict[str, Any], number: int) -> dict[str, Any]:
    """The same options of another number of workers."""
    if number:
        return {**given, "num_workers": number}
    return {"num_workers": 0, "worker_init_fn": given["worker_init_fn"]}


def _check(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise OptionError(
            f"accelerate() takes a torch.utils.data.DataLoader, got a {type(loader).__name__}: for a "
            "dataset, use FastLoader(dataset, …)"
        )
    known = FastLoader if isinstance(loader, FastLoader) else DataLoader
    kinds = type(loader).__mro__[: type(loader).__mro__.index(known)]
    own = sorted({name for kind in kinds for name in vars(kind)} - _HARMLESS)
    if own:
        raise OptionError(
            f"{type(loader).__name__} has its own {', '.join(own)}, which a FastLoader in its place would "
            "not have: derive it from fastpipe.FastLoader, and make one of those instead"
        )


# What a class has anyway; its constructor has done its work.
_HARMLESS = {
    "__init__", "__module__", "__doc__", "__qualname__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__parameters__", "__orig_bases__",
    "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl",
}  # fmt: skip


def _batching(loader: DataLoader[Any], options: dict[str, Any]) -> dict[str, Any]:
    """The arguments that say which samples make which batch."""
    batching = batching_of(loader)
    if "sampler" not in batching:
        return batching
    is_keyed = options.get("seed") is not None or options.get("shard") is not None
    sampler = batching["sampler"]
    if _is_plain(loader, SequentialSampler):
        del batching["sampler"]
    elif type(sampler) is GroupSampler and sampler.data_source is loader.dataset:
        del batching["sampler"]
        batching["shuffle"] = sampler.arrangement.option
    elif is_keyed and _is_plain(loader, RandomSampler):
        del batching["sampler"]
        batching["shuffle"] = True
    return batching


def _is_plain(loader: DataLoader[Any], kind: type[Any]) -> bool:
    """Whether the sampler is the one that ``DataLoader`` itself makes."""
    sampler: Any = loader.sampler
    is_torchs = type(sampler) is kind or (kind is RandomSampler and type(sampler) is ShuffleSampler)
    if not is_torchs or sampler.data_source is not loader.dataset:
        return False
    if kind is SequentialSampler:
        return True
    return (
        not sampler.replacement
        and sampler.num_samples == len(loader.dataset)
        and sampler.generator is loader.generator
    )
