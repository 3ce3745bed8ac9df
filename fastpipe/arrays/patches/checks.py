"""What a dataset of patches is asked for, checked."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastpipe.errors import OptionError
from fastpipe.index.patches import PatchSpace

__all__ = ["checked_nan", "checked_size", "filling", "fits"]


def checked_size(patch_size: Sequence[int]) -> tuple[int, ...]:
    try:
        size = tuple(operator.index(side) for side in patch_size)
    except TypeError:
        size = ()
    if not size or min(size) < 1:
        raise OptionError(f"patch_size must be numbers from 1, one for each dimension, got {patch_size!r}")
    return size


def checked_nan(nan: Any, dtype: np.dtype[Any]) -> Any:
    if nan in ("keep", "error"):
        return nan
    if not isinstance(nan, (int, float)) or isinstance(nan, bool):
        raise OptionError(f"nan must be 'keep', 'error' or a number, got {nan!r}")
    if dtype.kind in "fc" and not fits(nan, dtype):
        raise OptionError(f"nan must be a number that volume= can hold, got {nan} for elements of {dtype}")
    return nan


def fits(value: float, dtype: np.dtype[Any]) -> bool:
    """Return whether an element of real or complex numbers can be a value, but for its last digits."""
    if dtype.kind in "fc":
        is_number = abs(value) < math.inf
        return not is_number or abs(value) <= float(np.finfo(dtype).max)
    limits = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return limits[0] <= value <= limits[1] and value == int(value)


def filling(space: PatchSpace) -> int:
    """As many patches as have the size of the volumes."""
    voxels = sum(math.prod(shape) for shape in space.shapes.tolist())
    return int(max(1, voxels // math.prod(space.patch.tolist())))
