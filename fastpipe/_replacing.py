"""Which sample takes the place of one that cannot be read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.keys import uniforms

__all__ = ["another_of_its_class"]

# Files tried in a bad one's place: enough for any damaged class, few enough for a lost disk.
_MOST_REPLACEMENTS = 100


def another_of_its_class(
    targets: npt.NDArray[Any], target: Any, position: int, seed: int, attempt: int
) -> int | None:
    """Another sample of the same class: the ``attempt``-th of them in an order that a seed draws.

    Args:
        targets: (N,): the class of each sample.
        target: the class.
        position: of the one that is replaced.
        seed: of that sample, in this epoch.
        attempt: from 1.

    Returns:
        A position; None where there is none left.
    """
    same = np.flatnonzero(targets == target)
    others = same[same != position]
    if attempt > min(len(others), _MOST_REPLACEMENTS):
        return None
    order = np.argsort(uniforms(seed, 0, np.array([0]), len(others))[0], kind="stable")
    return int(others[order[attempt - 1]])
