"""One batch in the place of many, also for a step that changes what it gets."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

__all__ = ["Replay", "rebuilt"]

_MANY = 64  # of samples or words, which nobody takes apart in place; and it is to cost microseconds


def rebuilt(value: Any, leaf: Callable[[Any], Any] = lambda one: one) -> Any:
    """A batch in containers of its own, of which something may be taken out.

    Args:
        value: the batch.
        leaf: makes what is handed out of what is no container.

    Returns:
        The same in new dictionaries, lists, tuples and dataclasses; what is of none of these kinds, or cannot
        be copied, is the same object.

    >>> batch = {"x": [1, 2], "labels": (3,)}
    >>> again = rebuilt(batch)
    >>> again == batch, again.pop("labels"), again["x"].pop(), batch
    (True, (3,), 2, {'x': [1, 2], 'labels': (3,)})
    """
    try:
        return _rebuilt(value, leaf)
    except Exception:  # of a class of the script's: it is given what it has been given before
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
    if type(value) in (list, tuple):
        return type(value)(_rebuilt(one, leaf) for one in value)
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
    """The same batch again and again.

    Containers are new each time.  A tensor that a step has changed in place is from then on copied for each
    step, so that what is done to it is not done again and again to the same numbers.

    >>> batches = Replay({"labels": [1]})
    >>> [next(batches).pop("labels") for _ in range(3)]
    [[1], [1], [1]]
    """

    def __init__(self, batch: Any) -> None:
        self._batch = rebuilt(batch)
        self._seen: dict[int, int] = {}  # of tensors as they were handed out: how often changed
        self._kept: dict[int, Any] = {}  # copies of those that are changed

    def __next__(self) -> Any:
        return rebuilt(self._batch, self._leaf)

    def _leaf(self, value: Any) -> Any:
        version = _version(value)
        if version is None:
            return value
        key = id(value)  # of one that the batch keeps
        if key not in self._kept and version != self._seen.setdefault(key, version):
            self._kept[key] = value.detach().clone()
        return self._kept[key].clone() if key in self._kept else value


def _version(value: Any) -> int | None:
    """How often a tensor of torch's was changed in place; None where nobody counts."""
    try:
        return int(value._version)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
