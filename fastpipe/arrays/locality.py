"""What a dataset says of itself for ``Shuffle(unit="group")``."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

__all__ = ["GroupedSamples", "TouredSamples"]


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
        """What decides the tour, beside seed and epoch."""

    @abstractmethod
    def _tour_amplification(self, window: int) -> float:
        """About how many bytes are decoded for each that is used."""
