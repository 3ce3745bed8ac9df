"""A loader's orders that visit groups of samples which are cheap to read together."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from fastpipe.core.order import Arrangement, GroupedSamples, Groups, Tour, TouredSamples, default_window
from fastpipe.errors import OptionError
from fastpipe.options import Shuffle
from fastpipe.torch.views import ends_of, numbers_of

__all__ = ["GroupSampler", "arrangement_of", "draw_seed"]


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
        return Tour(dataset, bases, window, partial(_tour_ranks, dataset, window))
    groups = numbers_of(dataset, _groups_of)
    if window is None:
        window = default_window(bases)
    for base in bases:
        base._expect_window(window)
    return Groups(groups, window)


def _tour_ranks(dataset: Any, window: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return numbers_of(dataset, lambda base: base._tour_ranks(window, seed, epoch))


def _groups_of(base: Any) -> npt.NDArray[np.int64]:
    if not isinstance(base, GroupedSamples):
        raise OptionError(
            f"Shuffle(unit='group') is for datasets whose samples are read in groups, such as "
            f"FastHDF5Dataset; those of a {type(base).__name__} are not: use shuffle=True"
        )
    return base.locality_groups()
