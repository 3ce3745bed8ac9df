"""Natural order of names: the numbers in them count as numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["natural_sorted"]

_NUMBER = re.compile(r"(\d+)")


def natural_sorted(names: Iterable[str]) -> list[str]:
    """Sort names as ``tifffile.natural_sorted`` does; those that differ in leading zeros only, by their text.

    >>> natural_sorted(["slice_10.tif", "slice_2.tif", "slice_1.tif"])
    ['slice_1.tif', 'slice_2.tif', 'slice_10.tif']
    """
    return sorted(names, key=lambda name: (_parts(name), name))


def _parts(name: str) -> list[int | str]:
    # Texts and numbers take turns, so that only those of one kind are compared.
    return [int(part) if place % 2 else part for place, part in enumerate(_NUMBER.split(name))]
