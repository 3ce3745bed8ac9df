"""Whether two batches are made alike, so that a step that takes one takes the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["same_form"]


def same_form(one: Any, other: Any) -> bool:
    """Whether batches have the same parts, of the same shapes but for the number of samples, and dtypes.

    >>> import numpy as np
    >>> batch = [np.zeros((4, 3)), np.zeros(4, int)]
    >>> same_form(batch, (np.ones((2, 3)), np.ones(2, int))), same_form(batch, [np.zeros((4, 3))])
    (True, False)
    >>> same_form({"x": np.zeros((4, 3))}, {"x": np.zeros((4, 5))}), same_form("a", 1)
    (False, False)
    """
    if hasattr(one, "dtype") and hasattr(one, "shape"):
        if not (hasattr(other, "dtype") and hasattr(other, "shape")):
            return False
        return str(one.dtype) == str(other.dtype) and tuple(one.shape)[1:] == tuple(other.shape)[1:]
    if isinstance(one, Mapping):
        if not isinstance(other, Mapping) or one.keys() != other.keys():
            return False
        return all(same_form(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        if not isinstance(other, (list, tuple)) or len(one) != len(other):
            return False
        return all(same_form(*pair) for pair in zip(one, other, strict=True))
    return type(one) is type(other)
