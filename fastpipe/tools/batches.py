"""Functions that list the arrays in a batch, and that copy, repeat, resize or compare batches."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from fastpipe.errors import OptionError

_MANY = 64  # longer lists, such as of samples or words, are copied without their elements, which is fast


def leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for one in value.values() for leaf in leaves(one)]
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in leaves(one)]
    return [value]


def size_of(batch: Any) -> int:
    for leaf in leaves(batch):
        shape = getattr(leaf, "shape", None)
        if shape:
            return int(shape[0])
    raise OptionError(f"how many samples a batch has is unknown: no array is in this {type(batch).__name__}")


def same_form(one: Any, other: Any) -> bool:
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


def rebuilt(value: Any, leaf: Callable[[Any], Any] = lambda one: one) -> Any:
    try:
        return _rebuilt(value, leaf)
    except Exception:  # a class of the script may raise any error
        return value


def _rebuilt(value: Any, leaf: Callable[[Any], Any]) -> Any:
    made: Any
    if isinstance(value, MutableMapping):
        made = copy.copy(value)
        for key in list(value):
            made[key] = _rebuilt(value[key], leaf)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_rebuilt(one, leaf) for one in value))
    if isinstance(value, (list, tuple)) and len(value) > _MANY:
        return copy.copy(value)
    if type(value) is tuple:
        return tuple(_rebuilt(one, leaf) for one in value)
    if isinstance(value, list):
        made = copy.copy(value)
        made[:] = [_rebuilt(one, leaf) for one in value]
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, _rebuilt(getattr(value, field.name), leaf))
        return made
    return value if isinstance(value, Mapping) else leaf(value)


class Replay(Iterator[Any]):
    """Returns one batch again and again, in new containers.  Tensors that are changed in place are copied."""

    def __init__(self, batch: Any) -> None:
        self._batch = rebuilt(batch)
        self._versions: dict[int, int] = {}  # the version of each tensor when it was first returned
        self._kept: dict[int, Any] = {}  # copies of the tensors that a step changes

    def __next__(self) -> Any:
        return rebuilt(self._batch, self._leaf)

    def _leaf(self, value: Any) -> Any:
        try:
            version = int(value._version)  # torch's counter of changes in place
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return value
        key = id(value)  # the batch keeps the tensor, so the id stays valid
        if key not in self._kept and version != self._versions.setdefault(key, version):
            self._kept[key] = value.detach().clone()
        return self._kept[key].clone() if key in self._kept else value


def resized(batch: Any, size: int) -> Any:
    count = size_of(batch)
    return _resized(batch, count, [at % count for at in range(size)])


def _resized(value: Any, count: int, indices: list[int]) -> Any:
    shape = getattr(value, "shape", None)
    if shape is not None:
        if not len(shape) or shape[0] != count:
            return value
        if type(value).__module__.partition(".")[0] == "tensorflow":  # its indices cannot be arrays
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
        has_arrays = any(getattr(leaf, "shape", None) is not None for leaf in leaves(value))
        if len(value) == count and not has_arrays:
            return type(value)(value[at] for at in indices)
        return type(value)(_resized(one, count, indices) for one in value)
    return value
