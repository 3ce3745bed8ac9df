"""Index batches as a function of the epoch, and the samplers that a loader with such an order shows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DistributedSampler, RandomSampler

from fastpipe.core.order import Arrangement, RankBatch, ShardedBatches, order_of
from fastpipe.options import Shard

if TYPE_CHECKING:
    from fastpipe.torch.order import EpochOrder

__all__ = ["EpochBatches", "OrderRef", "ShardSampler", "ShuffleSampler"]


class EpochBatches:
    """Index batches as a function of the epoch alone; as a ``batch_sampler`` it counts epochs itself.

    Args:
        count: number of samples.
        batch_size: samples in a batch.
        drop_last: leave out an incomplete last batch.
        seed: shuffles each epoch in another order; None goes through the samples in theirs.
        shard: the rank's part.
        arrangement: the samples' groups, where these are shuffled.
    """

    def __init__(
        self, count: int, batch_size: int, drop_last: bool, seed: int | None, shard: Shard,
        arrangement: Arrangement | None = None,
    ) -> None:  # fmt: skip
        self.count, self.batch_size, self.drop_last = count, batch_size, drop_last
        self.seed, self.shard, self.arrangement = seed, shard, arrangement
        self.epoch = 0
        # Of indices and an epoch, such that say of which epoch they are; where a dataset asks for these.
        self.keyed: Callable[[list[int], int], Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch."""
        self.epoch = epoch

    def steps(self, start: int = 0) -> ShardedBatches:
        """Where the batches from a position on are."""
        return ShardedBatches(self.count, self.batch_size, self.shard, drop_last=self.drop_last, start=start)

    def indices(self, epoch: int, start: int = 0) -> Iterator[tuple[list[int], RankBatch]]:
        """Each batch's indices, and where they are in the epoch's order."""
        order: Any = order_of(self.count, self.seed, epoch, self.arrangement)
        for batch in self.steps(start):
            positions = batch.positions
            if batch.end <= self.count:
                indices = order[positions.start : positions.stop : positions.step]
            else:  # filled up from the epoch's start
                indices = np.array([order[position % self.count] for position in positions])
            # Python's integers, as samplers give them, and never all of an epoch's at once.
            yield indices.tolist() if isinstance(indices, np.ndarray) else list(indices), batch

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """All of an epoch's indices, those of all ranks: int64 (N,)."""
        return np.asarray(order_of(self.count, self.seed, epoch, self.arrangement), np.int64)

    def __iter__(self) -> Iterator[list[int]]:
        # An epoch begins with its first batch: a stock loader with workers takes two iterators for one.
        epoch, self.epoch = self.epoch, self.epoch + 1
        for indices, _ in self.indices(epoch):
            yield indices

    def __len__(self) -> int:
        return len(self.steps())


class ShardSampler(DistributedSampler[int]):
    """The ``sampler`` that a loader with ``shard=`` shows.

    It is a ``DistributedSampler``, so that a trainer knows that the loader is sharded already,
    and sets its epoch.

    Args:
        dataset: whose samples they are.
        shard: the rank's part.
        shuffle: whether each epoch has another order.
        arrangement: the samples' groups, where these are shuffled.
    """

    def __init__(
        self, dataset: Any, shard: Shard, shuffle: bool, arrangement: Arrangement | None = None
    ) -> None:
        super().__init__(dataset, num_replicas=shard.world, rank=shard.rank, shuffle=shuffle)
        self.arrangement = arrangement
        self.order = OrderRef(None)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the loader's next epoch."""
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
        """Samples of this rank that are not there only to fill up the last step; timm asks."""
        batches = self._batches()
        return sum(position < batches.count for batch in batches.steps() for position in batch.positions)

    def _batches(self) -> EpochBatches:
        order = self.order.get()
        assert order is not None, "a loader sets it, and lives"
        batches = order.ours()
        assert batches is not None
        return batches


class ShuffleSampler(RandomSampler):
    """The ``sampler`` that a loader with ``shuffle=True`` and a seed shows.

    The loader does not iterate over it.  Others do, such as Accelerate to skip the first batches: they get
    the order of the loader's next epoch, which then counts as begun.

    Args:
        data_source: the dataset.
        generator: the loader's own, or None.
        seed: gives the seed of the order, or None.
    """

    def __init__(
        self, data_source: Any, generator: torch.Generator | None, seed: Callable[[], int | None]
    ) -> None:
        super().__init__(data_source, generator=generator)
        self._seed = seed
        self.epoch = 0
        self.order = OrderRef(None)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, the loader's too."""
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
        keyed = getattr(self.data_source, "_keyed_indices", None)  # whose samples are others in each epoch
        yield from indices if keyed is None else keyed(indices, seed, epoch)


class OrderRef:
    """Refers to a loader's order without keeping it, or anything it refers to, alive."""

    def __init__(self, order: EpochOrder | None) -> None:
        self._ref = None if order is None else weakref.ref(order)

    def get(self) -> EpochOrder | None:
        return None if self._ref is None else self._ref()

    def set_epoch(self, epoch: int) -> None:
        order = self.get()
        if order is not None:
            order.set_epoch(epoch)

    def __reduce__(self) -> tuple[object, ...]:
        return (OrderRef, (None,))  # the order sets it again where it arrives
