"""Orders that visit groups of samples which are cheap to read together, such as the chunks of a file."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Sized

import numpy as np
import numpy.typing as npt

from fastpipe.index.order import epoch_order, grouped_order, interleaved
from fastpipe.options import Shuffle

__all__ = ["Arrangement", "GroupedSamples", "Groups", "Tour", "TouredSamples", "default_window", "order_of"]

_WINDOW_NBYTES = 1 << 25


class Arrangement(ABC):
    """How the samples of an epoch are put in order, by what is cheap to read together.

    Attributes:
        window: how many groups, or places, are mixed at a time.
        gives_seed: whether samples are to be drawn by the seed that the order was made by.
    """

    window: int
    gives_seed = False

    @abstractmethod
    def __len__(self) -> int:
        """How many samples there are."""

    @abstractmethod
    def order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """The order of an epoch: a permutation of all samples."""

    @property
    def option(self) -> Shuffle:
        """The option that asks for it."""
        return Shuffle(self.window, "group")

    @property
    @abstractmethod
    def about(self) -> str:
        """What decides the order, beside seed and epoch."""

    @abstractmethod
    def describe(self) -> str:
        """How an epoch is shuffled, in words."""


class Groups(Arrangement):
    """The groups of a dataset's samples, some of which are mixed at a time.

    Args:
        groups: int64 (N,): the group of each sample.
        window: groups that are mixed.

    Attributes:
        groups: the same, counted from 0 without gaps.
        count: number of groups.
    """

    def __init__(self, groups: npt.NDArray[np.int64], window: int) -> None:
        steps = np.diff(groups)
        if (steps >= 0).all():  # as a rule, and faster
            self.groups = np.concatenate([np.zeros(min(1, len(groups)), np.int64), np.cumsum(steps > 0)])
        else:
            self.groups = np.unique(groups, return_inverse=True)[1].reshape(-1)
        self.window, self.count = window, int(self.groups.max(initial=-1)) + 1

    def __len__(self) -> int:
        return len(self.groups)

    def order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """The order of an epoch."""
        return grouped_order(self.groups, self.window, seed=seed, epoch=epoch)

    @property
    def about(self) -> str:
        """What decides the order, beside seed and epoch."""
        return f"{self.option!r} of {self.count} groups, {zlib.crc32(self.groups.tobytes()):08x}"

    def describe(self) -> str:
        """How an epoch is shuffled, in words."""
        window = min(self.window, self.count)
        return (
            f"groups, {window} of {self.count} at a time (two samples of a batch share theirs with "
            f"probability up to 1/{window}, not 1/{self.count})"
        )


class Tour(Arrangement):
    """The patches of volumes on a tour through these, from several places at a time.

    Args:
        samples: of which there are orders.
        bases: the datasets of patches among them.
        window: places.
        ranks: by seed and epoch the place of each sample on the tour of its dataset, int64 (N,).
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
        """The order of an epoch."""
        return interleaved(self._ranks(seed, epoch), self.window, seed=seed, epoch=epoch)

    @property
    def about(self) -> str:
        """What decides the order, beside seed and epoch."""
        return f"{self.option!r} of {', '.join(base._tour_about(self.window) for base in self._bases)}"

    def describe(self) -> str:
        """How an epoch is shuffled, in words."""
        times = max(base._tour_amplification(self.window) for base in self._bases)
        places = "one place" if self.window == 1 else f"{self.window} places at a time"
        return f"neighbourhood, from {places} (about {times:.1f} bytes are decoded for each that is used)"


def order_of(
    count: int, seed: int | None, epoch: int, arrangement: Arrangement | None
) -> npt.NDArray[np.int64] | range:
    """The order of an epoch's samples.

    Args:
        count: samples.
        seed: None for the samples' own order.
        epoch: its number.
        arrangement: by which they are shuffled; None to shuffle samples.
    """
    if seed is None:
        return range(count)
    if arrangement is None:
        return epoch_order(count, seed=seed, epoch=epoch)
    return arrangement.order(seed, epoch)


def default_window(bases: Iterable[GroupedSamples]) -> int:
    """How many groups are mixed at a time where the script does not say."""
    return min((max(2, _WINDOW_NBYTES // max(1, base.group_nbytes)) for base in bases), default=2)


class GroupedSamples(ABC):
    """Samples of a group are cheap to read together."""

    @abstractmethod
    def locality_groups(self) -> npt.NDArray[np.int64]:
        """The group of each sample: int64 (N,)."""

    @property
    @abstractmethod
    def group_nbytes(self) -> int:
        """Decoded bytes of a group."""

    @abstractmethod
    def _expect_window(self, groups: int) -> None:
        """Hear that samples of so many groups will come mixed."""


class TouredSamples(ABC):
    """Samples have places, and neighbours are cheap to read one after another."""

    @abstractmethod
    def _tour_window(self) -> int:
        """From how many places at a time a tour is best made."""

    @abstractmethod
    def _tour_ranks(self, window: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """The place of each of an epoch's samples on the tour: int64 (N,)."""

    @abstractmethod
    def _tour_about(self, window: int) -> str:
        """Return all that the tour depends on, besides seed and epoch."""

    @abstractmethod
    def _tour_amplification(self, window: int) -> float:
        """About how many bytes are decoded for each that is used."""
