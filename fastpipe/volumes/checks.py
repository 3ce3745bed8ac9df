"""What a dataset of patches is asked for, checked."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastpipe._casting import unheld
from fastpipe.errors import OptionError
from fastpipe.volumes.places import PatchSpace

__all__ = ["check_held", "checked_nan", "checked_size", "filling"]


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
    if dtype.kind in "fc":
        check_held(nan, dtype, "nan=")
    return nan


def check_held(value: float, dtype: np.dtype[Any], what: str) -> None:
    """Refuse a number that elements of a type would hold as another; floats round.

    Raises:
        OptionError: they would.
    """
    if dtype.kind in "fc":
        is_lost = float(np.finfo(dtype).max) < abs(value) != np.inf
    else:
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        is_lost = bool(unheld(np.asarray(whole), dtype).any())
    if is_lost:
        raise OptionError(f"{what} is {value}, which elements of {dtype} cannot hold: give one that they can")


def filling(space: PatchSpace) -> int:
    """As many patches as have the size of the volumes."""
    voxels = sum(math.prod(shape) for shape in space.shapes.tolist())
    return int(max(1, voxels // math.prod(space.patch.tolist())))
