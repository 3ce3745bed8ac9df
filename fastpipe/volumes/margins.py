"""Patches that are cut with what is around them, for augmentation that turns them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.errors import OptionError
from fastpipe.volumes.places import PatchPlaces, Places

__all__ = ["WithMargin", "checked_margin"]


def checked_margin(margin: Any, patch_size: Sequence[int]) -> tuple[int, ...]:
    """Voxels on each side, of each dimension.

    Args:
        margin: a number for all, one for each, or something that says what it needs: ``margin(patch_size)``.
        patch_size: of the patches.

    Raises:
        OptionError: it is nothing of these.
    """
    asks = getattr(margin, "margin", None)
    given = asks(tuple(patch_size)) if callable(asks) else margin
    try:
        found = tuple(operator.index(one) for one in np.atleast_1d(np.asarray(given, object)).tolist())
    except TypeError:
        found = (-1,)
    found = found * len(patch_size) if len(found) == 1 else found
    if len(found) != len(patch_size) or min(found) < 0:
        raise OptionError(
            "margin must be a number of voxels from 0, one for each dimension, or an augmentation of "
            f"fastpipe.augment, got {margin!r}"
        )
    return found


class WithMargin:
    """Where patches begin with what is around them.

    Args:
        places: where they begin themselves.
        margin: voxels on each side, of each dimension.
    """

    def __init__(self, places: PatchPlaces, margin: Sequence[int]) -> None:
        self._places, self._margin = places, np.array(margin, np.int64)
        self.count, self.is_random = places.count, places.is_random

    def places(self, seed: int, epoch: int, indices: npt.NDArray[np.int64]) -> Places:
        """As of ``PatchPlaces``; perhaps before the volume's beginning."""
        found = self._places.places(seed, epoch, indices)
        return Places(found.volumes, found.starts - self._margin)
