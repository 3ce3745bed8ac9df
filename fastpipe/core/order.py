"""Pure functions for the order of an epoch's samples, and for each rank's shard of the epoch."""

from __future__ import annotations

import operator
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.errors import OptionError
from fastpipe.options import Shard, Shuffle

# A *step* consists of one batch on every rank.  Rank ``r`` of ``w`` ranks takes every ``w``-th sample of a
# step, beginning with sample ``r``, as torch's ``DistributedSampler`` does.  So a step contains the same
# samples for any number of ranks with the same total batch size, and the start of a step is all that defines
# the progress of an epoch.  The same is true for a ``BlockShard``, which gives each rank a block of the step.

# Last word of Philox's 256-bit counter.  All other random numbers from Philox with the same (seed, epoch)
# start at another counter.  So the order of the samples and the random parameters of transforms never use
# the same random bits.
_DOMAIN = int.from_bytes(b"fp-order", "little")
_WORD = 2**64
_GROUP_DOMAIN = int.from_bytes(b"fp-group", "little")
_TOUR_DOMAINS = int.from_bytes(b"fp-tour0", "little"), int.from_bytes(b"fp-tour1", "little")
_LOW_BITS = 40  # bits of a sample's random word that decide the sample's position in a window


def epoch_order(count: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the shuffled order of an epoch's samples, an int64 permutation of ``range(count)``.

    Sample ``i`` gets the ``i``-th 64-bit word that NumPy's ``Philox`` generates for the key
    ``(seed mod 2**64, epoch)`` and the counter ``(0, 0, 0, _DOMAIN)``.  The samples are sorted by their
    words, and samples with equal words by ``i``.  NumPy guarantees that ``Philox`` generates the same words
    in all versions, but does not guarantee that ``Generator.permutation`` returns the same order.

    Raises:
        OptionError: ``epoch`` is not in 0 to 2**64 - 1, or the order does not fit into memory.

    >>> epoch_order(6, seed=0, epoch=0)
    array([3, 4, 2, 5, 1, 0])
    """
    return _sorted(_words(count, seed, epoch, _DOMAIN))


def grouped_order(
    groups: npt.NDArray[np.integer[Any]], window: int, *, seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """Return an order of an epoch that mixes the samples of ``window`` groups at a time.

    The order is an int64 permutation of ``range(N)``.  Samples that are cheap to read together are a group.
    The groups are shuffled as ``epoch_order`` shuffles samples, but with the counter
    ``(0, 0, 0, _GROUP_DOMAIN)``.  The shuffled groups are cut into windows of ``window`` groups.  Within a
    window, the samples are sorted by the upper bits of the words that ``epoch_order`` uses.  So all orders of
    a window's samples are equally likely, and the samples of different windows are not mixed.

    ``groups``, integers (N,), has the number of each sample's group, from 0.  Groups without samples also
    count as groups of a window.  ``seed``, ``epoch`` and the errors are described at ``epoch_order``.

    >>> grouped_order(np.array([0, 0, 1, 1, 2, 2]), 1, seed=0, epoch=0)
    array([4, 5, 3, 2, 1, 0])
    """
    shuffled = _sorted(_words(int(groups.max(initial=-1)) + 1, seed, epoch, _GROUP_DOMAIN))
    windows = np.empty(len(shuffled), np.uint64)
    windows[shuffled] = np.arange(len(shuffled)) // window
    words = _words(len(groups), seed, epoch, _DOMAIN)
    places = windows[groups] << np.uint64(_LOW_BITS) | words >> np.uint64(64 - _LOW_BITS)
    return _sorted(places)


def tour_words(count: int, seed: int, epoch: int, *, other: bool = False) -> npt.NDArray[np.uint64]:
    """Return random 64-bit words for an epoch's tour (see ``Tour``), uint64 (count,).  ``other`` selects a
    second, independent sequence of words."""
    return _words(count, seed, epoch, _TOUR_DOMAINS[other])


def interleaved(ranks: npt.NDArray[np.int64], fronts: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Cut a tour of patches into ``fronts`` parts, and return an order with a patch of each part in turn.

    In a tour, neighbouring patches of a volume follow each other.  ``ranks``, int64 (N,), are the positions
    of the patches in the tour, all different.  The result is a permutation of ``range(N)``, int64 (N,).
    """
    count = len(ranks)
    if not count:
        return np.zeros(0, np.int64)
    fronts = min(fronts, count)
    words = tour_words(count + 1, seed, epoch, other=True)
    tour = np.roll(np.argsort(ranks, kind="stable"), int(words[-1] % np.uint64(count)))
    ends = np.arange(fronts + 1) * count // fronts
    lengths = np.diff(ends)
    rounds = np.arange(count) - np.repeat(ends[:-1], lengths)
    # A round takes a patch from each part.  Sort a round by the words, so that the parts' order varies.
    order = np.lexsort((words[:count], rounds))
    found: npt.NDArray[np.int64] = tour[order]
    return found


def _words(count: int, seed: int, epoch: int, domain: int) -> npt.NDArray[np.uint64]:
    try:  # the script may have set both; a float that is cut off would give the same order twice
        seed, epoch = operator.index(seed), operator.index(epoch)
    except TypeError:
        raise TypeError(f"an order needs integers, got seed={seed!r} and epoch={epoch!r}") from None
    if not 0 <= epoch < _WORD:
        raise OptionError(f"epoch_order(epoch=…) must be from 0 to 2**64 - 1, got {epoch}")
    key = np.array([seed % _WORD, epoch], dtype=np.uint64)
    counter = np.array([0, 0, 0, domain], dtype=np.uint64)
    try:
        return np.random.Philox(key=key, counter=counter).random_raw(count)
    except (MemoryError, ValueError) as error:  # ValueError means larger than any possible array
        raise OptionError(
            f"a shuffled order of {count:,} samples does not fit into memory: pass a sampler= that draws as "
            "many as an epoch is to have"
        ) from error


def _sorted(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


class BlockShard(Shard):
    """The part of an epoch that a rank gets if each step's samples are cut into one block for each rank.

    The concatenated blocks of all ranks are the step's samples in the epoch's order.  Accelerate gathers
    results in this order, and cuts off the end of the last step.  Only for the mode ``"train"``.
    """


class RankBatch(NamedTuple):
    """One rank's batch in a step.

    Attributes:
        first: position of the batch's first sample in the epoch's order.
        step: distance between the positions of two consecutive samples of the batch.  This is the number of
            ranks, or 1 for a ``BlockShard``.
        size: number of samples in the batch.
        end: position in the epoch's order where the next step begins.
    """

    first: int
    step: int
    size: int
    end: int

    @property
    def positions(self) -> range:
        """The positions of the batch's samples in the epoch's order.  Positions behind the last sample
        continue with the epoch's first samples."""
        return range(self.first, self.first + self.step * self.size, self.step)


class ShardedBatches:
    """The batches of one rank in an epoch, from the position ``start`` on.

    In ``"train"`` mode, all ranks get equally many batches of equal sizes.  If the last step's samples cannot
    be divided equally, the step gets samples from the epoch's start, fewer than ranks.  In ``"eval"`` mode,
    each sample comes exactly once.  The ranks get equally many batches, and the ranks' batch sizes in a step
    differ by at most one.  If the last step would have fewer samples than ranks, the step gets one sample for
    each rank, and some of these samples come from the step before.  But with a batch size of one, the samples
    of such a last step go to the step before.  ``drop_last`` leaves out an incomplete last step.

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
        self._last: list[int] = []  # sizes of the last one or two steps, if they are not whole
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
        """Return the position at which the first ``steps`` steps end."""
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


# Orders that visit groups of samples which are cheap to read together, such as the chunks of a file.

_WINDOW_NBYTES = 1 << 25


class Groups:
    """A way to order epochs that mixes the samples of ``window`` groups at a time.  ``groups``, int64 (N,),
    has the number of each sample's group.  The groups are renumbered from 0, without gaps."""

    gives_seed = False  # whether the samples are drawn with the order's seed

    def __init__(self, groups: npt.NDArray[np.int64], window: int) -> None:
        steps = np.diff(groups)
        if (steps >= 0).all():  # the usual case, which needs no sorting
            self.groups = np.concatenate([np.zeros(min(1, len(groups)), np.int64), np.cumsum(steps > 0)])
        else:
            self.groups = np.unique(groups, return_inverse=True)[1].reshape(-1)
        self.window, self.count = window, int(self.groups.max(initial=-1)) + 1

    def __len__(self) -> int:
        return len(self.groups)

    def order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """Return the order of an epoch, a permutation of all samples."""
        return grouped_order(self.groups, self.window, seed=seed, epoch=epoch)

    @property
    def option(self) -> Shuffle:
        """Return the ``Shuffle`` option with which the user gets this order."""
        return Shuffle(self.window, "group")

    @property
    def about(self) -> str:
        """Return a text that differs for different orders of the same seed and epoch."""
        return f"{self.option!r} of {self.count} groups, {zlib.crc32(self.groups.tobytes()):08x}"

    def describe(self) -> str:
        window = min(self.window, self.count)
        if window == self.count:
            return f"groups, all {self.count} at a time (every order of samples is equally likely)"
        return (
            f"groups, {window} of {self.count} at a time (two samples of a batch share theirs with "
            f"probability up to 1/{window}, not 1/{self.count})"
        )


class Tour:
    """A way to order epochs that visits patches of volumes from ``window`` parts of a tour in turn.

    A tour is an order in which neighbouring patches of a volume follow each other.  ``ranks`` is a function
    of seed and epoch.  It returns the position of each sample in its dataset's tour, int64 (N,).
    """

    gives_seed = True

    def __init__(
        self,
        samples: Sized,
        bases: Sequence[TouredSamples],
        window: int,
        ranks: Callable[[int, int], npt.NDArray[np.int64]],
    ) -> None:
        self._samples, self._bases, self.window, self._ranks = samples, bases, window, ranks

    def __len__(self) -> int:
        return len(self._samples)

    def order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        return interleaved(self._ranks(seed, epoch), self.window, seed=seed, epoch=epoch)

    @property
    def option(self) -> Shuffle:
        return Shuffle(self.window, "group")

    @property
    def about(self) -> str:
        return f"{self.option!r} of {', '.join(base._tour_about(self.window) for base in self._bases)}"

    def describe(self) -> str:
        times = max(base._tour_amplification(self.window) for base in self._bases)
        places = "one place" if self.window == 1 else f"{self.window} places at a time"
        return f"neighbourhood, from {places} (about {times:.1f} bytes are decoded for each that is used)"


# An arrangement is an order of an epoch in which samples that are cheap to read together follow each other.
Arrangement = Groups | Tour


def order_of(
    count: int, seed: int | None, epoch: int, arrangement: Arrangement | None
) -> npt.NDArray[np.int64] | range:
    """Return the order of an epoch's samples.  If ``seed`` is None, the order is sequential.  If
    ``arrangement`` is None, all samples are shuffled.  Otherwise ``arrangement`` decides the order."""
    if seed is None:
        return range(count)
    if arrangement is None:
        return epoch_order(count, seed=seed, epoch=epoch)
    return arrangement.order(seed, epoch)


def default_window(bases: Iterable[GroupedSamples]) -> int:
    """Return the default number of groups whose samples are mixed at a time."""
    return min((max(2, _WINDOW_NBYTES // max(1, base.group_nbytes)) for base in bases), default=2)


class GroupedSamples(ABC):
    """Base class of datasets in which the samples of a group are cheap to read together."""

    @abstractmethod
    def locality_groups(self) -> npt.NDArray[np.int64]:
        """Return the number of each sample's group, int64 (N,)."""

    @property
    @abstractmethod
    def group_nbytes(self) -> int: ...

    @abstractmethod
    def _expect_window(self, groups: int) -> None:
        """Prepare for an order that mixes the samples of ``groups`` groups at a time."""


class TouredSamples(ABC):
    """Base class of datasets in which neighbouring samples are cheap to read one after another."""

    @abstractmethod
    def _tour_window(self) -> int:
        """Return the number of parts of a tour from which samples should be taken in turn."""

    @abstractmethod
    def _tour_ranks(self, window: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """Return each sample's position in an epoch's tour (see ``Tour``), int64 (N,)."""

    @abstractmethod
    def _tour_about(self, window: int) -> str:
        """Return a text that differs for different tours of the same seed and epoch."""

    @abstractmethod
    def _tour_amplification(self, window: int) -> float:
        """Return about how many bytes are decoded for each byte that is used."""
