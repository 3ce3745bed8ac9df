"""Orders that visit groups of samples which are cheap to read together, such as the chunks of a file."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from fastpipe.errors import OptionError
from fastpipe.index.order import epoch_order, grouped_order
from fastpipe.index.tours import interleaved
from fastpipe.options import Shuffle
from fastpipe.torch.locality import GroupedSamples, TouredSamples
from fastpipe.torch.views import ends_of, numbers_of

__all__ = ["Arrangement", "GroupSampler", "Groups", "Tour", "arrangement_of", "draw_seed", "order_of"]

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
        dataset: of patches, also behind torch's wrappers.
        window: places.
    """

    gives_seed = True

    def __init__(self, dataset: Any, window: int) -> None:
        self._dataset, self.window = dataset, window

    def __len__(self) -> int:
        return len(self._dataset)

    def order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """The order of an epoch."""
        ranks = numbers_of(self._dataset, lambda base: base._tour_ranks(self.window, seed, epoch))
        return interleaved(ranks, self.window, seed=seed, epoch=epoch)

    @property
    def about(self) -> str:
        """What decides the order, beside seed and epoch."""
        some = (base._tour_about(self.window) for base in dict.fromkeys(ends_of(self._dataset)))
        return f"{self.option!r} of {', '.join(some)}"

    def describe(self) -> str:
        """How an epoch is shuffled, in words."""
        times = max(base._tour_amplification(self.window) for base in ends_of(self._dataset))
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


class GroupSampler(Sampler[int]):
    """The sampler that a loader with ``Shuffle(unit="group")`` shows.

    Without a seed of the loader's or the dataset's, each epoch's is drawn from the generator, as
    ``RandomSampler`` does it.

    Args:
        data_source: the dataset.
        arrangement: its order.
        generator: torch's; None is its global one.

    Attributes:
        drawn: the seed of the epoch that began last, where samples are to be drawn by it.
    """

    drawn: int | None = None

    def __init__(
        self, data_source: Any, arrangement: Arrangement, generator: torch.Generator | None = None
    ) -> None:
        self.data_source, self.arrangement, self.generator = data_source, arrangement, generator

    def __iter__(self) -> Iterator[int]:
        # A generator, as ``RandomSampler``'s: it draws when the first index is asked for.
        seed = draw_seed(self.generator)
        if self.arrangement.gives_seed:
            self.drawn = seed
        order = self.arrangement.order(seed, 0)
        yield from order.tolist()

    def __len__(self) -> int:
        return len(self.arrangement)


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed of 64 bits from torch's generator."""
    drawn = torch.empty((), dtype=torch.int64).random_(-(2**63), 2**63 - 1, generator=generator)
    return int(drawn.item())


def arrangement_of(dataset: Any, shuffle: Shuffle) -> Arrangement | None:
    """The groups of a dataset's samples for an option; None where that shuffles samples.

    The datasets with the groups hear how many will be wanted at a time.

    Raises:
        OptionError: the samples have no groups.
    """
    if shuffle.unit == "sample":
        return None
    bases = list(dict.fromkeys(ends_of(dataset)))
    window = shuffle.window
    is_tour = [isinstance(base, TouredSamples) for base in bases]
    if any(is_tour) and not all(is_tour):
        raise OptionError("Shuffle(unit='group') makes no common order of patches and other samples")
    if all(is_tour):
        if window is None:
            window = min((base._tour_window() for base in bases), default=1)
        return Tour(dataset, window)
    groups = numbers_of(dataset, _groups_of)
    if window is None:
        window = min((max(2, _WINDOW_NBYTES // max(1, base.group_nbytes)) for base in bases), default=2)
    for base in bases:
        base._expect_window(window)
    return Groups(groups, window)


def _groups_of(base: Any) -> npt.NDArray[np.int64]:
    if not isinstance(base, GroupedSamples):
        raise OptionError(
            f"Shuffle(unit='group') is for datasets whose samples are read in groups, such as "
            f"FastHDF5Dataset; those of a {type(base).__name__} are not: use shuffle=True"
        )
    return base.locality_groups()
