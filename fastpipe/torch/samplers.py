"""Samplers whose order depends only on seed and epoch, also for groups of samples and several ranks."""

from __future__ import annotations

import base64
import itertools
import json
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fastpipe.core import order as orders
from fastpipe.core.order import Arrangement, RankBatch, ShardedBatches, order_of
from fastpipe.errors import OptionError
from fastpipe.options import Shard, Shuffle
from fastpipe.torch.wrappers import ends_of, is_fast_folder, is_rows, numbers_of


class EpochBatches:
    """The batches of indices of each epoch.  They depend only on the epoch's number.

    If this object is used as a ``batch_sampler``, each iteration over it is the next epoch.
    """

    def __init__(
        self, count: int, batch_size: int, drop_last: bool, seed: int | None, shard: Shard,
        arrangement: Arrangement | None = None,
    ) -> None:  # fmt: skip
        self.count, self.batch_size, self.drop_last = count, batch_size, drop_last
        self.seed, self.shard, self.arrangement = seed, shard, arrangement
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def steps(self, start: int = 0) -> ShardedBatches:
        return ShardedBatches(self.count, self.batch_size, self.shard, drop_last=self.drop_last, start=start)

    def indices(self, epoch: int, start: int = 0) -> Iterator[tuple[list[int], RankBatch]]:
        """For each batch, yield a pair: its indices, and a ``RankBatch`` with their positions in the epoch's
        order.  ``start`` is the position at which the first batch begins."""
        order: Any = order_of(self.count, self.seed, epoch, self.arrangement)
        for batch in self.steps(start):
            positions = batch.positions
            if batch.end <= self.count:
                indices = order[positions.start : positions.stop : positions.step]
            else:  # the batch is filled up with samples from the start of the epoch
                indices = np.array([order[position % self.count] for position in positions])
            # Python integers, as samplers yield them.  They are made for one batch at a time, not for a whole
            # epoch.
            yield indices.tolist() if isinstance(indices, np.ndarray) else list(indices), batch

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the indices of all ranks in the order of an epoch, int64 (N,)."""
        order = order_of(self.count, self.seed, epoch, self.arrangement)
        return np.arange(self.count) if isinstance(order, range) else np.asarray(order, np.int64)

    def __iter__(self) -> Iterator[list[int]]:
        # The epoch is counted at the first batch: a DataLoader with workers makes two iterators for an epoch.
        epoch, self.epoch = self.epoch, self.epoch + 1
        for indices, _ in self.indices(epoch):
            yield indices

    def __len__(self) -> int:
        return len(self.steps())


class ShardSampler(DistributedSampler[int]):
    """The ``sampler`` of a loader with ``shard=``.  It is a ``DistributedSampler``, so that trainers see that
    the loader is sharded, and call ``set_epoch``."""

    def __init__(
        self, dataset: Any, shard: Shard, shuffle: bool, arrangement: Arrangement | None = None
    ) -> None:
        super().__init__(dataset, num_replicas=shard.world, rank=shard.rank, shuffle=shuffle)
        self.arrangement = arrangement
        self.order = OrderRef(None)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.order.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        order = self.order.get()
        epoch = self.epoch if order is None else order.next_epoch
        return (index for indices, _ in self._batches().indices(epoch) for index in indices)

    def __len__(self) -> int:
        return sum(batch.size for batch in self._batches().steps())

    @property
    def num_valid_samples(self) -> int:
        """Number of this rank's samples, without samples that only fill up the last step.  The library timm
        reads this property."""
        batches = self._batches()
        return sum(position < batches.count for batch in batches.steps() for position in batch.positions)

    def _batches(self) -> EpochBatches:
        order = self.order.get()
        assert order is not None, "a loader sets it, and lives"
        batches: EpochBatches = order.ours()
        return batches


class ShuffleSampler(RandomSampler):
    """The ``sampler`` of a loader with ``shuffle=True`` and a seed.

    The loader itself does not iterate over this sampler.  Other code may iterate over it, for example
    Accelerate, to skip batches.  Such code gets the order of the loader's next epoch, and this epoch then
    counts as begun.
    """

    def __init__(
        self, data_source: Any, generator: torch.Generator | None, seed: Callable[[], int | None]
    ) -> None:
        super().__init__(data_source, generator=generator)
        self._seed = seed
        self.epoch = 0
        self.order = OrderRef(None)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.order.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        seed, order = self._seed(), self.order.get()
        if seed is None:
            yield from super().__iter__()
            return
        epoch = self.epoch if order is None else order.pass_epoch()
        self.epoch = epoch + 1
        indices = np.asarray(order_of(len(self), seed, epoch, None)).tolist()
        keyed = getattr(self.data_source, "_keyed_indices", None)  # a dataset with new samples in each epoch
        yield from indices if keyed is None else keyed(indices, seed, epoch)


class OrderRef:
    """A weak reference to a loader's ``EpochOrder``."""

    def __init__(self, order: Any) -> None:
        self._ref = None if order is None else weakref.ref(order)

    def get(self) -> Any:
        return None if self._ref is None else self._ref()

    def set_epoch(self, epoch: int) -> None:
        order = self.get()
        if order is not None:
            order.set_epoch(epoch)

    def __reduce__(self) -> tuple[object, ...]:
        return (OrderRef, (None,))  # the unpickled ``EpochOrder`` sets the reference again


# ---- groups of samples -------------------------------------------------------------------------------


class GroupSampler(Sampler[int]):
    """The sampler of a loader with ``Shuffle(unit="group")``, which shuffles groups of samples.

    If the loader has no seed, each epoch's seed is drawn from the generator, as in ``RandomSampler``.  If the
    samples also depend on this seed, ``drawn`` is the seed.  Otherwise ``drawn`` is None.
    """

    drawn: int | None = None

    def __init__(
        self, data_source: Any, arrangement: Arrangement, generator: torch.Generator | None = None
    ) -> None:
        self.data_source, self.arrangement, self.generator = data_source, arrangement, generator

    def __iter__(self) -> Iterator[int]:
        # This method is a Python generator, as in ``RandomSampler``: the seed is drawn at the first request.
        seed = draw_seed(self.generator)
        if self.arrangement.gives_seed:
            self.drawn = seed
        order = self.arrangement.order(seed, 0)
        yield from order.tolist()

    def __len__(self) -> int:
        return len(self.arrangement)


def draw_seed(generator: torch.Generator | None) -> int:
    drawn = torch.empty((), dtype=torch.int64).random_(-(2**63), 2**63 - 1, generator=generator)
    return int(drawn.item())


def arrangement_of(dataset: Any, shuffle: Shuffle) -> Arrangement | None:
    """Return how ``shuffle`` orders a dataset's groups of samples.  Return None for ``unit="sample"``.

    Except for patches, the function also tells the datasets how many groups are used at the same time (the
    window).
    """
    if shuffle.unit == "sample":
        return None
    bases = list(dict.fromkeys(ends_of(dataset)))
    window = shuffle.window
    is_tour = [isinstance(base, orders.TouredSamples) for base in bases]
    if any(is_tour) and not all(is_tour):
        raise OptionError("Shuffle(unit='group') makes no common order of patches and other samples")
    if all(is_tour):
        if window is None:
            window = min((base._tour_window() for base in bases), default=1)
        return orders.Tour(dataset, bases, window, partial(_tour_ranks, dataset, window))
    groups = numbers_of(dataset, _groups_of)
    if window is None:
        window = orders.default_window(bases)
    for base in bases:
        base._expect_window(window)
    return orders.Groups(groups, window)


def _tour_ranks(dataset: Any, window: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return numbers_of(dataset, lambda base: base._tour_ranks(window, seed, epoch))


def _groups_of(base: Any) -> npt.NDArray[np.int64]:
    if not isinstance(base, orders.GroupedSamples):
        raise OptionError(
            f"Shuffle(unit='group') is for datasets whose samples are read in groups, such as "
            f"FastHDF5Dataset; those of a {type(base).__name__} are not: use shuffle=True"
        )
    return base.locality_groups()


# ---- from a loader's arguments -----------------------------------------------------------------------


def shard_sampler(
    dataset: Any, shard: Shard, shuffle: bool | None, sampler: Any, batch_sampler: Any,
    batch_size: int | None, arrangement: Arrangement | None, seed: int | None, skips: bool,
) -> ShardSampler:  # fmt: skip
    if not isinstance(shard, Shard):
        raise OptionError(f"shard= must be a fastpipe.Shard or None, got {shard!r}")
    if isinstance(dataset, IterableDataset):
        raise OptionError("shard= distributes the indices of a dataset, and an IterableDataset has none")
    # A trainer that makes the loader again passes the sampler of the first loader.
    is_ours = isinstance(sampler, ShardSampler)
    is_plain = type(sampler) is SequentialSampler and sampler.data_source is dataset
    if (sampler is not None and not is_ours and not is_plain) or batch_sampler is not None:
        raise OptionError(
            "shard= and a sampler both define which samples this rank reads: pass one of them "
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
    if skips:
        raise OptionError(
            "bad_samples='skip' shortens epochs by a different number on each rank, and ranks would wait "
            "for each other forever: use bad_samples='replace' with shard="
        )
    return ShardSampler(dataset, shard, shuffles, sampler.arrangement if is_ours else arrangement)


def arrangement_for(dataset: Any, shuffle: Shuffle, sampler: Any, batch_sampler: Any) -> Arrangement | None:
    if isinstance(dataset, IterableDataset):
        raise OptionError(f"{shuffle!r} is an order of indices, and an IterableDataset has none")
    if sampler is not None or batch_sampler is not None:
        raise OptionError(f"{shuffle!r} and a sampler both define the order of samples: pass one of them")
    return arrangement_of(dataset, shuffle)


def effective_seed(seed: int | None, dataset: Any) -> int | None:
    """Return the loader's seed or, if it is None, the dataset's seed."""
    if seed is not None:
        return seed
    first = ends_of(dataset)[0]
    return first.seed if is_rows(first) or is_fast_folder(first) else None


# ---- for stock loaders -------------------------------------------------------------------------------


class DatasetBatches(Sampler[list[int]]):
    """The result of a dataset's ``batch_sampler`` method: batches of indices, in a new order for each epoch.

    Attributes:
        batch_size, drop_last: as given.
        epoch: number of the next epoch.
        generator: the generator from which each epoch's seed is drawn.  None if the dataset has a seed, or if
            samples are not shuffled.
        arrangement: the order of the groups of samples if groups are shuffled, else None.
    """

    def __init__(
        self, dataset: Any, batch_size: int, shuffle: bool | Shuffle, drop_last: bool, shard: Shard | None
    ) -> None:
        self.batch_size, self.drop_last = operator.index(batch_size), bool(drop_last)
        if self.batch_size < 1:
            raise OptionError(f"batch_size must be a number from 1, got {batch_size}")
        if not isinstance(shuffle, (bool, Shuffle)):
            raise OptionError(f"shuffle must be True, False or a fastpipe.Shuffle, got {shuffle!r}")
        if shard is not None and shuffle and dataset.seed is None:
            raise OptionError(
                "shard= with shuffle needs a dataset with a seed=, the same on every rank: else ranks would "
                "take parts of different orders"
            )
        self._dataset, self._shuffles = dataset, bool(shuffle)
        self._shard = shard or Shard(0, 1)
        self.arrangement = arrangement_of(dataset, shuffle) if isinstance(shuffle, Shuffle) else None
        self.epoch = 0
        is_drawn = self._shuffles and dataset.seed is None
        self.generator: torch.Generator | None = torch.default_generator if is_drawn else None

    def __getstate__(self) -> dict[str, Any]:
        # A copy uses the global generator of its own process.  Pickling would copy the generator's state.
        is_global = self.generator is torch.default_generator
        return {**self.__dict__, "generator": "global" if is_global else self.generator}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["generator"] == "global":
            self.generator = torch.default_generator

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch.  If you never call this method, epochs are counted from 0."""
        self.epoch = operator.index(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next epoch.  If the order is drawn from a generator, also return its
        state."""
        if self.generator is None:
            return {"epoch": self.epoch}
        return {"epoch": self.epoch, "generator": text_of(self.generator.get_state())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the saved epoch.  If the order is drawn from torch's global generator, restore the
        generator's state."""
        self.epoch = state["epoch"]
        drawn = tensor_of(state.get("generator"))
        if self.generator is not None and drawn is not None:
            self.generator.set_state(drawn)

    def __iter__(self) -> Iterator[list[int]]:
        # An epoch begins when its first batch is requested.  A DataLoader with workers makes two iterators
        # for one epoch, and a script that resumes sets the generator before the first batch.
        epoch, self.epoch = self.epoch, self.epoch + 1
        seed = self._dataset.seed if self._shuffles else None
        if self._shuffles and seed is None:
            seed, epoch = draw_seed(self.generator), 0
        # Even if the order is sequential, the samples may be different in each epoch.
        key = self._dataset.seed if seed is None else seed
        keyed = getattr(self._dataset, "_keyed_indices", None)
        for indices, _ in self._batches(seed).indices(epoch):
            yield indices if keyed is None or key is None else keyed(indices, key, epoch)

    def __len__(self) -> int:
        return len(self._batches(None))

    def _batches(self, seed: int | None) -> EpochBatches:
        return EpochBatches(
            len(self._dataset), self.batch_size, self.drop_last, seed, self._shard, self.arrangement
        )


# ---- ranks -------------------------------------------------------------------------------------------

_numbers = itertools.count()


class RankCheck:
    """Checks whether values are the same on all ranks, through the store of ``torch.distributed``.

    Each rank writes its own values and reads the values of all ranks that have already written.  The last
    rank therefore compares the values of all ranks.  No call is collective, so ranks do not wait for each
    other.  Therefore the check cannot hang if only some ranks iterate over the loader.
    """

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._has_warned = False

    def warn_if_ranks_disagree(self, shard: Shard, values: dict[str, Any]) -> None:
        if self._has_warned or shard.world == 1 or not dist.is_available() or not dist.is_initialized():
            return
        if dist.get_world_size() != shard.world:
            return
        store: Any = dist.distributed_c10d._get_default_store()
        prefix = f"fastpipe/loader/{self._number}/{shard.mode}/"
        store.set(f"{prefix}{shard.rank}", json.dumps(values))
        for rank in range(shard.world):
            if rank == shard.rank or not store.check([f"{prefix}{rank}"]):
                continue
            theirs = json.loads(store.get(f"{prefix}{rank}"))
            differing = [key for key in values if values[key] != theirs.get(key)]
            if differing:
                self._has_warned = True
                said = ", ".join(
                    f"{key} is {values[key]!r} here and {theirs.get(key)!r} there" for key in differing
                )
                warnings.warn(
                    f"rank {shard.rank} and rank {rank} do not share one epoch: {said}. Each takes a part "
                    "of another order, so that samples are missed or come twice: give all ranks the same "
                    "dataset and seed",
                    stacklevel=4,
                )
                return


# ---- known samplers, and their states ---------------------------------------------------------------

# Samplers that draw the order of a whole epoch at their first request.  Other samplers might draw random
# numbers, or read a state, at each request.  They are read only when a DataLoader would request indices.
AT_ONCE = (
    SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler, ShardSampler,
    ShuffleSampler, GroupSampler,
)  # fmt: skip
# Samplers whose order can be drawn again, because it depends on nothing, or only on a generator.
REPLAYED = (*AT_ONCE, RandomSampler, list, tuple, range, np.ndarray, torch.Tensor)
DRAWN = (RandomSampler, ShuffleSampler, SubsetRandomSampler, WeightedRandomSampler, GroupSampler)


def text_of(state: torch.Tensor | None) -> str | None:
    return None if state is None else base64.b64encode(state.numpy().tobytes()).decode("ascii")


def tensor_of(text: str | None) -> torch.Tensor | None:
    if text is None:
        return None
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), np.uint8).copy())


def innermost(sampler: Any) -> Any:
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return sampler


def sampler_state(index_sampler: Any) -> Any:
    """Return a sampler's state before an epoch; None if the sampler has no state."""
    inner = innermost(index_sampler)
    if hasattr(inner, "state_dict"):
        return inner.state_dict()
    return {"epoch": inner.epoch} if type(inner) in (DistributedSampler, ShuffleSampler) else None


def set_sampler_state(index_sampler: Any, state: Any) -> None:
    inner = innermost(index_sampler)
    if state is not None and type(inner) in (DistributedSampler, ShuffleSampler):
        inner.set_epoch(state["epoch"])
    elif state is not None and hasattr(inner, "load_state_dict"):
        inner.load_state_dict(state)
