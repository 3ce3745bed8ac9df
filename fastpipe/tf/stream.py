"""Epochs of batches that threads of this process prefetch, and the part of each worker (its shard)."""

from __future__ import annotations

import logging
import operator
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from fastpipe.core.clock import StageClock
from fastpipe.core.order import ShardedBatches
from fastpipe.errors import OptionError
from fastpipe.options import BadSamples, Shard, Shuffle

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]

AHEAD = 2  # the number of batches begun before the first of them is waited for
IN_FLIGHT = 6  # batches that tf.data and the training step hold; memory is reused after them
_SINGLES = 32  # the number of samples made together if the script requests single samples

_log = logging.getLogger("fastpipe.tf")


class Batching(NamedTuple):
    """The options that determine how samples become batches."""

    batch_size: int
    drop_remainder: bool
    shuffle: bool | Shuffle
    seed: int
    shard: Shard | None
    bad_samples: BadSamples


class Batch(NamedTuple):
    """A finished batch."""

    arrays: list[Array]  # one array (n, …) for each value of a sample
    samples: Int64Array  # (n,), indices of the samples
    draws: Int64Array  # (n,), the samples' positions in the epoch's order
    epoch: int

    def select(self, part: Any) -> Batch:
        """Return some samples of the batch, given by a slice or by indices."""
        return Batch([array[part] for array in self.arrays], self.samples[part], self.draws[part], self.epoch)


class PendingBatch(NamedTuple):
    """A batch that threads are making. ``finish`` waits for the batch, and ``cancel`` abandons it."""

    finish: Callable[[], Batch]
    cancel: Callable[[], None]


class Stream(ABC):
    """The batches of all epochs of a dataset, which threads of this process make."""

    def __init__(self, batching: Batching) -> None:
        self.batching = batching
        self._next_epoch = 0
        self._lock = threading.Lock()

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of samples in an epoch, over all shards."""

    @property
    @abstractmethod
    def clock(self) -> StageClock:
        """The time spent in this process, by stage, summed over the threads."""

    @property
    def has_code(self) -> bool:
        """True if the thread that takes a batch calls the user's functions.

        The effects of these calls must depend only on which batches the script has received. So no batch is
        taken before the script requests it.
        """
        return False

    @abstractmethod
    def element(self, batch: Batch) -> Any:
        """Return a batch in the structure of the elements: arrays, or tuples and dicts of arrays."""

    @abstractmethod
    def signature(self, batch_size: int | None) -> Any:
        """Return the type of the dataset's elements."""

    @abstractmethod
    def describe(self) -> list[str]:
        """Return lines that describe how the batches are made."""

    @abstractmethod
    def _order(self, epoch: int) -> Int64Array:
        """Return the samples of an epoch in their order."""

    @abstractmethod
    def _begin(self, samples: Int64Array, draws: Int64Array, epoch: int) -> PendingBatch:
        """Start to make a batch of these samples, whose positions in the epoch's order are ``draws``."""

    def _expect(self, batches: Callable[[], Iterator[Int64Array]], epoch: int) -> None:  # noqa: B027
        """Called before an epoch begins. ``batches`` returns the samples of each batch of this epoch."""

    def __len__(self) -> int:
        return len(self._steps())

    @property
    def samples(self) -> int:
        """The number of samples of this shard in an epoch."""
        return sum(step.size for step in self._steps())

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch."""
        self._next_epoch = epoch

    def next_epoch(self) -> Generator[Batch, None, None]:
        """Yield the batches of the next epoch."""
        with self._lock:
            epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        batches = self._batches(epoch)
        return self._refilled(batches) if self.batching.bad_samples.policy == "skip" else batches

    def _steps(self) -> ShardedBatches:
        how = self.batching
        return ShardedBatches(
            self.count, how.batch_size, how.shard or Shard(0, 1), drop_last=how.drop_remainder
        )

    def _batches(self, epoch: int) -> Generator[Batch, None, None]:
        order, pending = self._order(epoch), deque[PendingBatch]()
        self._expect(lambda: (samples for samples, _ in self._parts(order)), epoch)
        try:
            for samples, draws in self._parts(order):
                pending.append(self._begin(samples, draws, epoch))
                if len(pending) > AHEAD:
                    yield pending.popleft().finish()
            while pending:
                yield pending.popleft().finish()
        finally:
            for batch in pending:
                batch.cancel()

    def _parts(self, order: Int64Array) -> Iterator[tuple[Int64Array, Int64Array]]:
        """Yield the samples of each batch, and their positions in ``order``."""
        for step in self._steps():
            draws = np.array(step.positions, np.int64)
            yield order[draws % len(order)], draws

    def _refilled(self, batches: Iterator[Batch]) -> Generator[Batch, None, None]:
        """Fill batches that have too few samples with the samples of the following batches."""
        size = self.batching.batch_size
        rest: Batch | None = None
        for batch in batches:
            if rest is not None:
                batch = Batch(
                    [np.concatenate(pair) for pair in zip(rest.arrays, batch.arrays, strict=True)],
                    np.concatenate([rest.samples, batch.samples]),
                    np.concatenate([rest.draws, batch.draws]),
                    batch.epoch,
                )
            elif len(batch.samples) == size:
                yield batch
                continue
            while len(batch.samples) >= size:
                yield batch.select(slice(size))
                batch = batch.select(slice(size, None))
            rest = batch if len(batch.samples) else None
        if rest is not None and not self.batching.drop_remainder:
            yield rest


def batching_of(
    batch_size: int | None, drop_remainder: bool, shuffle: bool | Shuffle, seed: int | None,
    shard: Shard | Literal["auto"] | tf.distribute.InputContext | None,
    bad_samples: BadSamples | Literal["raise", "replace", "skip"], *, draws: bool = False,
) -> Batching:  # fmt: skip
    """Check the user's arguments. ``draws`` says whether anything other than the order is random."""
    if batch_size is not None and operator.index(batch_size) < 1:
        raise OptionError(f"batch_size must be a number from 1, or None for single samples, got {batch_size}")
    if not isinstance(shuffle, (bool, Shuffle)):
        raise OptionError(f"shuffle must be True, False or a fastpipe.Shuffle, got {shuffle!r}")
    # NumPy's global generator belongs to the script. If nothing is random, draw no number from the generator.
    is_random = bool(shuffle) or draws
    drawn = operator.index(seed) if seed is not None else np.random.randint(1_000_000) if is_random else 0
    part = shard_of(shard, is_shuffled=bool(shuffle), seed=seed)
    return Batching(
        batch_size or _SINGLES, drop_remainder and batch_size is not None, shuffle, int(drawn), part,
        BadSamples.of(bad_samples),
    )  # fmt: skip


def shard_of(shard: object, *, is_shuffled: bool, seed: int | None) -> Shard | None:
    """Return the shard (part of each epoch) that the argument selects. None means all samples."""
    if shard is None:
        if is_shuffled and seed is None and _rank_of_tf_config(strict=False)[1] > 1:
            _log.warning(
                "TF_CONFIG names several workers, and without seed= each has another order: pass the same to "
                "all, or samples come twice and others not at all"
            )
        return None
    if isinstance(shard, str) and shard == "auto":
        rank, world = _rank_of_tf_config()
        shard = Shard(rank, world, "eval")
    elif isinstance(shard, tf.distribute.InputContext):
        shard = Shard(shard.input_pipeline_id, shard.num_input_pipelines, "eval")
    elif not isinstance(shard, Shard):
        raise OptionError(
            f"shard must be a fastpipe.Shard, 'auto', a tf.distribute.InputContext or None, got {shard!r}"
        )
    if shard.world == 1:
        return None
    if is_shuffled and seed is None:
        raise OptionError(
            f"one of {shard.world} shards of a shuffled dataset needs seed=, the same for all: without it "
            "each has another order, and samples come twice"
        )
    return shard


def _rank_of_tf_config(*, strict: bool = True) -> tuple[int, int]:
    """Return this worker's rank and the number of workers in ``TF_CONFIG``; (0, 1) if there are fewer than
    two workers."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    spec = resolver.cluster_spec().as_dict()
    jobs = [(job, len(spec[job])) for job in ("chief", "worker") if job in spec]
    world = sum(count for _, count in jobs)
    if world < 2:
        return 0, 1
    before = 0
    for job, count in jobs:
        if resolver.task_type == job:
            return before + resolver.task_id, world
        before += count
    if not strict:
        return 0, world
    raise OptionError(
        f"shard='auto' is for the chief and workers of TF_CONFIG; its task is {resolver.task_type!r}"
    )
