"""Epochs of batches that threads of this process make ahead, whatever the batches are of."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fastpipe.core.clock import StageClock
from fastpipe.core.order import ShardedBatches
from fastpipe.options import BadSamples, Shard, Shuffle

__all__ = ["AHEAD", "IN_FLIGHT", "Batching", "Begun", "Made", "Stream"]

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]

AHEAD = 2  # batches begun before the one that is due is waited for
IN_FLIGHT = 6  # batches in the hands of tf.data and the training step, whose memory is kept for the next


class Batching(NamedTuple):
    """How samples become batches.

    Attributes:
        batch_size: samples in one.
        drop_remainder: leave out the last batch, if it is smaller.
        shuffle: whether each epoch has an order of its own, and which.
        seed: of those orders.
        shard: the part of each epoch that is made here; None for all.
        bad_samples: what happens to samples that cannot be read.
    """

    batch_size: int
    drop_remainder: bool
    shuffle: bool | Shuffle
    seed: int
    shard: Shard | None
    bad_samples: BadSamples


class Made(NamedTuple):
    """A batch.

    Attributes:
        arrays: (n, …) of each of a sample's values.
        samples: int64 (n,): which samples they are.
        draws: int64 (n,): their positions in the epoch's order.
        epoch: its number.
    """

    arrays: list[Array]
    samples: Int64Array
    draws: Int64Array
    epoch: int

    def some(self, part: Any) -> Made:
        """Some samples of it: a slice, or their places."""
        return Made([array[part] for array in self.arrays], self.samples[part], self.draws[part], self.epoch)


class Begun(Protocol):
    """A batch in the making."""

    def finish(self) -> Made:
        """Wait for it."""

    def cancel(self) -> None:
        """Give it up."""


class Stream(ABC):
    """Makes the batches of epochs.

    Args:
        batching: how samples become batches.

    Attributes:
        batching: the same.
    """

    def __init__(self, batching: Batching) -> None:
        self.batching = batching
        self._next_epoch = 0
        self._lock = threading.Lock()

    @property
    @abstractmethod
    def count(self) -> int:
        """Samples of all shards' epoch."""

    @property
    @abstractmethod
    def clock(self) -> StageClock:
        """Time spent in this process, by stage, summed over the threads."""

    @property
    def has_code(self) -> bool:
        """Return whether functions of the script's are called in the thread that takes a batch.

        What they see must depend on the batches that were handed out alone, so none is taken ahead.
        """
        return False

    @abstractmethod
    def element(self, made: Made) -> Any:
        """A batch in the form that the dataset's elements have: arrays, tuples and dicts of them."""

    @abstractmethod
    def signature(self, batch: int | None) -> Any:
        """The type of such elements of ``batch`` samples; None for any number."""

    @abstractmethod
    def describe(self) -> list[str]:
        """What makes the batches, in lines."""

    @abstractmethod
    def _order(self, epoch: int) -> Int64Array:
        """The samples of an epoch, in their order."""

    @abstractmethod
    def _begin(self, samples: Int64Array, draws: Int64Array, epoch: int) -> Begun:
        """Begin a batch of these samples, which are at these positions of the epoch's order."""

    def _expect(self, batches: Callable[[], Iterator[Int64Array]], epoch: int) -> None:  # noqa: B027
        """Hear which batches an epoch has: what gives the samples of each.  Nothing has to be done."""

    def __len__(self) -> int:
        return len(self._steps())

    @property
    def samples(self) -> int:
        """Samples of an epoch here."""
        return sum(step.size for step in self._steps())

    def set_epoch(self, epoch: int) -> None:
        """The number of the next epoch that is begun."""
        self._next_epoch = epoch

    def next_epoch(self) -> Generator[Made, None, None]:
        """The batches of the next epoch."""
        with self._lock:
            epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        made = self._batches(epoch)
        return self._refilled(made) if self.batching.bad_samples.policy == "skip" else made

    def _steps(self) -> ShardedBatches:
        how = self.batching
        return ShardedBatches(
            self.count, how.batch_size, how.shard or Shard(0, 1), drop_last=how.drop_remainder
        )

    def _batches(self, epoch: int) -> Generator[Made, None, None]:
        order, begun = self._order(epoch), deque[Begun]()
        self._expect(lambda: (samples for samples, _ in self._parts(order)), epoch)
        try:
            for samples, draws in self._parts(order):
                begun.append(self._begin(samples, draws, epoch))
                if len(begun) > AHEAD:
                    yield begun.popleft().finish()
            while begun:
                yield begun.popleft().finish()
        finally:
            for batch in begun:
                batch.cancel()

    def _parts(self, order: Int64Array) -> Iterator[tuple[Int64Array, Int64Array]]:
        """For each batch its samples, and their positions in the order."""
        for step in self._steps():
            draws = np.array(step.positions, np.int64)
            yield order[draws % len(order)], draws

    def _refilled(self, batches: Iterator[Made]) -> Generator[Made, None, None]:
        """Batches that are full although samples are missing: with those that follow."""
        size = self.batching.batch_size
        rest: Made | None = None
        for made in batches:
            if rest is None and len(made.samples) == size:
                yield made
                continue
            if rest is not None:
                made = Made(
                    [np.concatenate(pair) for pair in zip(rest.arrays, made.arrays, strict=True)],
                    np.concatenate([rest.samples, made.samples]),
                    np.concatenate([rest.draws, made.draws]),
                    made.epoch,
                )
            while len(made.samples) >= size:
                yield made.some(slice(size))
                made = made.some(slice(size, None))
            rest = made if len(made.samples) else None
        if rest is not None and not self.batching.drop_remainder:
            yield rest
