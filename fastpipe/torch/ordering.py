"""What a loader's arguments say about the order of its samples."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset, SequentialSampler

from fastpipe.core.order import Arrangement
from fastpipe.errors import OptionError
from fastpipe.options import Shard, Shuffle
from fastpipe.torch.grouping import arrangement_of
from fastpipe.torch.order import ShardSampler
from fastpipe.torch.source import Source
from fastpipe.torch.views import ends_of, is_folder, is_rows

__all__ = ["SeedOf", "arranged", "shard_sampler"]


def shard_sampler(
    dataset: Any, shard: Shard, shuffle: bool | None, sampler: Any, batch_sampler: Any,
    batch_size: int | None, arrangement: Arrangement | None,
    seed: int | None, source: Source | None,
) -> ShardSampler:  # fmt: skip
    """The sampler that a loader with ``shard=`` shows.

    Args:
        dataset … batch_size: the loader's arguments.
        arrangement: the samples' groups, where these are shuffled.
        seed: the loader's or the dataset's.
        source: what makes its batches; None for the dataset's own code.

    Raises:
        OptionError: they do not go together.
    """
    if not isinstance(shard, Shard):
        raise OptionError(f"shard= must be a fastpipe.Shard or None, got {shard!r}")
    if isinstance(dataset, IterableDataset):
        raise OptionError("shard= deals out the indices of a dataset, which an IterableDataset has not")
    # A trainer that makes the loader anew hands over the sampler that it found.
    is_ours = isinstance(sampler, ShardSampler)
    is_plain = type(sampler) is SequentialSampler and sampler.data_source is dataset
    if (sampler is not None and not is_ours and not is_plain) or batch_sampler is not None:
        raise OptionError(
            "shard= and a sampler both say which samples this rank takes: give one of them "
            "(shuffle=True and seed= work with shard=)"
        )
    if batch_size is None and shard.mode == "eval":
        raise OptionError("Shard(mode='eval') makes batches of equal number: give a batch_size")
    shuffles = sampler.shuffle if is_ours else bool(shuffle)
    if shuffles and seed is None:
        raise OptionError(
            "shard= with shuffle=True needs a seed=, the same on every rank: else ranks would take "
            "parts of different orders"
        )
    if source is not None and source.skips:
        raise OptionError(
            "bad_samples='skip' makes epochs shorter, on each rank by another number, and ranks would "
            "wait for each other for ever: use bad_samples='replace' with shard="
        )
    return ShardSampler(dataset, shard, shuffles, sampler.arrangement if is_ours else arrangement)


def arranged(dataset: Any, shuffle: Shuffle, sampler: Any, batch_sampler: Any) -> Arrangement | None:
    """The groups that a loader's ``Shuffle`` is about; None where it is about samples.

    Raises:
        OptionError: the dataset has none, or there is a sampler as well.
    """
    if isinstance(dataset, IterableDataset):
        raise OptionError(f"{shuffle!r} is an order of indices, which an IterableDataset has not")
    if sampler is not None or batch_sampler is not None:
        raise OptionError(f"{shuffle!r} and a sampler both say in which order samples come: give one")
    return arrangement_of(dataset, shuffle)


class SeedOf:
    """The seed that counts: the loader's own, else the dataset's.  Does not refer to the loader."""

    def __init__(self, seed: int | None, dataset: Any) -> None:
        self._seed, self._dataset = seed, dataset

    def __call__(self) -> int | None:
        if self._seed is not None:
            return self._seed
        first = ends_of(self._dataset)[0]
        if not is_folder(first):
            return first.seed if is_rows(first) else None
        from fastpipe.torch.image_folder import FastImageFolder

        return first.seed if isinstance(first, FastImageFolder) else None
