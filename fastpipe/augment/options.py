"""Arguments of augmentations, checked: torchvision's in all their forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastpipe.errors import AugmentError

__all__ = [
    "Fill", "fill_numbers", "filling_of", "increasing", "interpolation_of", "plain", "probability",
    "range_about_zero", "two_numbers",
]  # fmt: skip

# What is outside of an image: one number, or one for each channel; None is 0.
Fill = float | tuple[float, ...] | None


def probability(value: float, name: str = "p") -> float:
    """A probability.

    Raises:
        AugmentError: it is none.
    """
    if not 0.0 <= value <= 1.0:  # NaN neither
        raise AugmentError(f"{name}= is a probability, from 0 to 1, got {value!r}")
    return float(value)


def increasing(value: Any, name: str, most: float = np.inf) -> tuple[float, float]:
    """Two numbers above 0, of which the second is not less.

    Raises:
        AugmentError: they are not.
    """
    low, high = two_numbers(value)
    if not 0 < low <= high <= most:  # NaN neither
        raise AugmentError(f"{name}= is two numbers above 0 that increase, at most {most}, got {value!r}")
    return low, high


def range_about_zero(value: float | Sequence[float], name: str) -> tuple[float, float]:
    """Two numbers that increase, or from one that is not negative those from it to its negative.

    Raises:
        AugmentError: it is neither.
    """
    low, high = two_numbers(value) if isinstance(value, Sequence) else (-value, value)
    if not -np.inf < low <= high < np.inf:
        raise AugmentError(f"{name}= is a number of at least 0, or two that increase, got {value!r}")
    return float(low), float(high)


def plain(value: Any) -> Any:
    """An argument that may be an array, as a list or a number."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def two_numbers(value: Any) -> tuple[float, float]:
    """Two numbers; NaN where they are not."""
    try:
        first, second = map(float, value)
    except (TypeError, ValueError):
        return np.nan, np.nan
    return first, second


def interpolation_of(value: Any, allowed: Sequence[str]) -> str:
    """The name of an interpolation: itself, or of torchvision's or Pillow's enumerations.

    Raises:
        AugmentError: it is none of those allowed.
    """
    name = getattr(value, "value", value)
    if isinstance(name, int):  # Pillow's numbers, which torchvision takes, too
        name = {0: "nearest", 2: "bilinear", 3: "bicubic"}.get(name, name)
    if name not in allowed:
        raise AugmentError(f"interpolation= is one of {', '.join(map(repr, allowed))}, got {value!r}")
    return str(name)


def filling_of(fill: Any, name: str = "fill") -> Fill:
    """A fill.

    Raises:
        AugmentError: it is none.
    """
    if fill is None:
        return None
    try:
        return tuple(map(float, fill)) if isinstance(fill, (list, tuple)) else float(fill)
    except (TypeError, ValueError):
        raise AugmentError(f"{name}= is a number, or one for each channel, got {fill!r}") from None


def fill_numbers(fill: Fill) -> tuple[float, ...]:
    """A number, or one for each channel; none of them for None."""
    if fill is None:
        return ()
    return fill if isinstance(fill, tuple) else (fill,)
