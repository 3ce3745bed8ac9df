"""A batch with more samples, or fewer, made of one that there is."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from fastpipe.errors import OptionError

__all__ = ["leaves", "resized", "size_of"]


def size_of(batch: Any) -> int:
    """Samples of a batch: the first dimension of its first array or tensor.

    Raises:
        OptionError: it has none.

    >>> size_of({"image": np.zeros((4, 3, 8, 8)), "label": np.zeros(4)})
    4
    """
    for leaf in leaves(batch):
        shape = getattr(leaf, "shape", None)
        if shape:
            return int(shape[0])
    raise OptionError(f"how many samples a batch has is unknown: no array is in this {type(batch).__name__}")


def resized(batch: Any, size: int) -> Any:
    """The batch with so many samples: its own, again and again.

    Arrays, tensors and lists with as many entries as the batch has samples are resized; all else stays.

    Args:
        batch: arrays and tensors (N, …), in tuples, lists and dictionaries.
        size: samples that it gets.

    >>> resized([np.array([1, 2]), ["a", "b"], "train"], 3)
    [array([1, 2, 1]), ['a', 'b', 'a'], 'train']
    """
    count = size_of(batch)
    return _resized(batch, count, [at % count for at in range(size)])


def _resized(value: Any, count: int, indices: list[int]) -> Any:
    shape = getattr(value, "shape", None)
    if shape is not None:
        if not len(shape) or shape[0] != count:
            return value
        if type(value).__module__.partition(".")[0] == "tensorflow":  # which takes no arrays of indices
            return sys.modules["tensorflow"].gather(value, indices)
        return value[np.asarray(indices)]
    if isinstance(value, Mapping):
        made = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
        for key, one in value.items():
            made[key] = _resized(one, count, indices)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_resized(one, count, indices) for one in value))
    if isinstance(value, (list, tuple)):
        if len(value) == count and not any(_has_array(one) for one in value):
            return type(value)(value[at] for at in indices)
        return type(value)(_resized(one, count, indices) for one in value)
    return value


def _has_array(value: Any) -> bool:
    return any(getattr(leaf, "shape", None) is not None for leaf in leaves(value))


def leaves(value: Any) -> list[Any]:
    """The parts of a batch, in tuples, lists and dictionaries, that are none of these.

    >>> leaves({"image": 1, "boxes": [2, (3,)]})
    [1, 2, 3]
    """
    if isinstance(value, Mapping):
        return [leaf for one in value.values() for leaf in leaves(one)]
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in leaves(one)]
    return [value]
