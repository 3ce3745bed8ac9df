"""What will have to be decoded, by what is remembered and will be."""

from __future__ import annotations

import numpy as np

from fastpipe.core.shared_chunks import UnitFile
from fastpipe.volumes.units import Foreseen


def _memory() -> UnitFile:
    """Room for 4 of 10 units, of which the last is remembered."""
    memory = UnitFile(10, 4, 64)
    memory.opened().claim(9).publish()
    return memory


def _missed(foreseen: Foreseen, array: int, *numbers: int) -> list[int]:
    return foreseen.missed(array, np.array(numbers, np.int64)).tolist()


def test_where_there_is_room_for_all_each_is_missed_once() -> None:
    memory = _memory()
    slots = memory.opened()
    foreseen = Foreseen([(slots, 0), (slots, 6)], [64, 64], {64: (10, 10)})
    assert _missed(foreseen, 0, 5, 2, 5) == [5, 2]
    assert _missed(foreseen, 0, 2, 3) == [3]
    assert _missed(foreseen, 1, 3, 0, 1) == [0, 1]  # the fourth of this one is the last of all
    assert _missed(foreseen, 1, 0, 1, 3) == []


def test_what_was_not_used_for_longest_is_missed_again() -> None:
    memory = _memory()
    slots = memory.opened()
    foreseen = Foreseen([(slots, 0)], [64], {64: (10, 2)})
    assert _missed(foreseen, 0, 9, 1, 9, 2) == [1, 2]
    assert _missed(foreseen, 0, 9, 1, 1) == [1]
    assert _missed(foreseen, 0, 2) == [2]


def test_what_is_not_remembered_is_always_missed() -> None:
    assert _missed(Foreseen([(None, 0)], [64], {}), 0, 3, 3) == [3, 3]
