"""Orders that visit groups of samples which are cheap to read together, such as the chunks of a file."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from fastpipe.errors import OptionError
from fastpipe.index.order import epoch_order, grouped_order
from fastpipe.torch.views import ends_of, numbers_of
from fastpipe.types import Shuffle

__all__ = ["Arrangement", "GroupSampler", "arrangement_of", "draw_seed", "order_of"]

_WINDOW_NBYTES = 1 << 25


class Arrangement:
    """The groups of a dataset's samples, and how many are mixed at a time.

    Args:
        groups: int64 (N,): the group of each sample.
        window: groups that are mixed.

    Attributes:
        groups: the same, counted from 0 without gaps.
        window: as given.
        count: number of groups.
    """

    def __init__(self, groups: npt.NDArray[np.int64], window: int) -> None:
        steps = np.diff(groups)
        if (steps >= 0).all():  # as a rule, and faster
            self.groups = np.concatenate([np.zeros(min(1, len(groups)), np.int64), np.cumsum(steps > 0)])
        else:
            self.groups = np.unique(groups, return_inverse=True)[1].reshape(-1)
        self.window, self.count = window, int(self.groups.max(initial=-1)) + 1

    @property
    def option(self) -> Shuffle:
        """The option that asks for it."""
        return Shuffle(self.window, "group")

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


def order_of(
    count: int, seed: int | None, epoch: int, arrangement: Arrangement | None
) -> npt.NDArray[np.int64] | range:
    """The order of an epoch's samples.

    Args:
        count: samples.
        seed: None for the samples' own order.
        epoch: its number.
        arrangement: the samples' groups; None to shuffle samples.
    """
    if seed is None:
        return range(count)
    if arrangement is None:
        return epoch_order(count, seed=seed, epoch=epoch)
    return grouped_order(arrangement.groups, arrangement.window, seed=seed, epoch=epoch)


class GroupSampler(Sampler[int]):
    """The sampler that a loader with ``Shuffle(unit="group")`` shows.

    Without a seed of the loader's or the dataset's, each epoch's is drawn from the generator, as
    ``RandomSampler`` does it.

    Args:
        data_source: the dataset.
        arrangement: its groups.
        generator: torch's; None is its global one.
    """

    def __init__(
        self, data_source: Any, arrangement: Arrangement, generator: torch.Generator | None = None
    ) -> None:
        self.data_source, self.arrangement, self.generator = data_source, arrangement, generator

    def __iter__(self) -> Iterator[int]:
        # A generator, as ``RandomSampler``'s: it draws when the first index is asked for.
        order = order_of(len(self), draw_seed(self.generator), 0, self.arrangement)
        yield from order.tolist() if isinstance(order, np.ndarray) else order

    def __len__(self) -> int:
        return len(self.arrangement.groups)


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
    groups, bases = numbers_of(dataset, _groups_of), dict.fromkeys(ends_of(dataset))
    window = shuffle.window
    if window is None:
        window = min((max(2, _WINDOW_NBYTES // max(1, base.group_nbytes)) for base in bases), default=2)
    for base in bases:
        base._expect_window(window)
    return Arrangement(groups, window)


def _groups_of(base: Any) -> npt.NDArray[np.int64]:
    groups_of = getattr(base, "locality_groups", None)
    if groups_of is None:
        raise OptionError(
            f"Shuffle(unit='group') is for datasets whose samples are read in groups, such as "
            f"FastHDF5Dataset; a {type(base).__name__} has no locality_groups(): use shuffle=True"
        )
    groups: npt.NDArray[np.int64] = groups_of()
    return groups
