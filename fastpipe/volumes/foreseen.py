"""Which parts of volumes a coming order of patches will have to decode."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Foreseen"]

Int64Array = npt.NDArray[np.int64]


class Foreseen:
    """Goes through units in the order of their use, and forgets those that were not used for longest.

    What is really forgotten is chosen better, and by all processes: this is about what is worth fetching.

    Args:
        units: for each array the ``native.UnitMemory`` of its units, or None, and the number there of its
            first.
        sizes: for each array the size of its slots.
        rooms: by that size how many units there are, and how many of them are remembered.
    """

    def __init__(
        self,
        units: Sequence[tuple[Any, int]],
        sizes: Sequence[int],
        rooms: Mapping[int, tuple[int, int]],
    ) -> None:
        self._units, self._sizes = units, sizes
        self._kept: dict[int, _All | _Some] = {}
        for (slots, _), size in zip(units, sizes, strict=True):
            if slots is not None and size not in self._kept:
                count, room = rooms[size]
                is_there = slots.are_there(np.arange(count))
                self._kept[size] = _All(is_there) if room >= count else _Some(is_there, room)

    def missed(self, array: int, numbers: Int64Array) -> Int64Array:
        """Units that will not be remembered.

        Args:
            array: whose.
            numbers: int64 (N,): of those that are used next, one after the other.
        """
        slots, first = self._units[array]
        if slots is None:
            return numbers
        return self._kept[self._sizes[array]].missed(numbers + first) - first


class _All:
    """Where there is room for all."""

    def __init__(self, is_there: npt.NDArray[np.bool_]) -> None:
        self._is_there = is_there

    def missed(self, keys: Int64Array) -> Int64Array:
        firsts = np.sort(np.unique(keys, return_index=True)[1])
        missed = keys[firsts][~self._is_there[keys[firsts]]]
        self._is_there[keys] = True
        return missed


class _Some:
    def __init__(self, is_there: npt.NDArray[np.bool_], room: int) -> None:
        self._room = room
        self._kept: OrderedDict[int, None] = OrderedDict.fromkeys(np.flatnonzero(is_there).tolist())

    def missed(self, keys: Int64Array) -> Int64Array:
        kept, missed = self._kept, []
        for key in keys.tolist():
            if key in kept:
                kept.move_to_end(key)
                continue
            missed.append(key)
            kept[key] = None
            if len(kept) > self._room:
                kept.popitem(last=False)
        return np.array(missed, np.int64)
