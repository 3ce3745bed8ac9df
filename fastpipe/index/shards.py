"""Which positions of an epoch's order each rank takes, batch by batch: a pure function.

The ranks take turns: of the samples of one *step* (one batch on every rank) rank ``r`` of ``w``
takes every ``w``-th, from the ``r``-th on, as torch's ``DistributedSampler`` deals them out.
So a step is the same set of samples for any number of ranks that together make the same
batch, and where a step begins says all about how far an epoch has come.  That holds as well for
a ``BlockShard``, of which each rank takes a block of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fastpipe.errors import OptionError
from fastpipe.options import Shard

__all__ = ["BlockShard", "RankBatch", "ShardedBatches"]


class BlockShard(Shard):
    """A rank's part where a step's samples are cut into blocks, one for each rank, in their order.

    What the ranks have, one after the other, is then the step as it stands in the epoch's order:
    Accelerate gathers results so, and cuts off the end of the last step.  For mode ``"train"`` only.
    """


class RankBatch(NamedTuple):
    """One rank's batch in a step.

    Attributes:
        first: position of its first sample in the epoch's order.
        step: distance from each of its samples to the next; the number of ranks, or 1 in a block.
        size: number of its samples.
        end: position where the next step begins.
    """

    first: int
    step: int
    size: int
    end: int

    @property
    def positions(self) -> range:
        """Positions of its samples; those past the epoch's end stand for its first samples."""
        return range(self.first, self.first + self.step * self.size, self.step)


class ShardedBatches:
    """The batches of one rank in an epoch, or in what is left of it.

    In ``"train"`` mode all ranks get equally many batches of equal sizes: the last step is
    filled up with samples from the epoch's start, fewer than there are ranks.  In ``"eval"``
    mode each sample comes exactly once; ranks get equally many batches, and in each step their
    sizes differ by at most one.  So where fewer samples than ranks would be left for the last
    step, the one before gives some of its own away (or, with a batch size of one, takes them in).

    Args:
        count: samples in the epoch.
        batch_size: samples in a batch of one rank.
        shard: the rank's part.
        drop_last: leave out the last step if it is not complete.
        start: position at which the first step begins.

    Raises:
        OptionError: in ``"eval"`` mode there are fewer samples than ranks.

    >>> [batch.size for batch in ShardedBatches(10, 4, Shard(0, 2, "eval"), drop_last=False)]
    [4, 1]
    >>> [list(batch.positions) for batch in ShardedBatches(10, 4, Shard(1, 2), drop_last=False)]
    [[1, 3, 5, 7], [9]]
    >>> [list(batch.positions) for batch in ShardedBatches(10, 4, BlockShard(1, 2), drop_last=False)]
    [[4, 5, 6, 7], [9]]
    """

    def __init__(self, count: int, batch_size: int, shard: Shard, *, drop_last: bool, start: int = 0) -> None:
        self._shard, self._start = shard, start
        self._whole = shard.world * batch_size
        left = max(count - start, 0)
        steps, rest = divmod(left, self._whole)
        self._last: list[int] = []  # sizes of the last steps, where they are not whole
        if rest and not drop_last:
            if shard.mode == "train":
                self._last = [-(-rest // shard.world) * shard.world]
            elif rest >= shard.world:
                self._last = [rest]
            elif not steps:
                raise OptionError(
                    f"Shard(mode='eval') gives each sample to one rank, and each rank a sample in each "
                    f"step, but {left} samples are left for {shard.world} ranks: use fewer ranks, or "
                    "mode='train', which repeats some"
                )
            else:
                steps -= 1
                spare = self._whole + rest
                self._last = [spare] if batch_size == 1 else [spare - shard.world, shard.world]
        self._steps = steps

    def __len__(self) -> int:
        return self._steps + len(self._last)

    def end(self, steps: int) -> int:
        """Position where the first so many steps end."""
        whole = min(steps, self._steps)
        return self._start + whole * self._whole + sum(self._last[: steps - whole])

    def __iter__(self) -> Iterator[RankBatch]:
        rank, world = self._shard.rank, self._shard.world
        is_block = isinstance(self._shard, BlockShard)
        at = self._start
        for number in range(len(self)):
            size = self._whole if number < self._steps else self._last[number - self._steps]
            if is_block:
                yield RankBatch(at + rank * (size // world), 1, size // world, at + size)
            else:
                yield RankBatch(at + rank, world, (size - rank + world - 1) // world, at + size)
            at += size
