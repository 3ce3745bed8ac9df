"""Units of a ``UnitFile`` as readers put, find and wait for them."""

from __future__ import annotations

from typing import Any

import numpy as np

NBYTES = 1024
CONTENTS = [np.random.default_rng(key).integers(0, 256, NBYTES, np.uint8) for key in range(40)]


def put(slots: Any, key: int) -> bool:
    """Make a unit, in two steps; False where somebody else does, or there is no room."""
    slot = slots.claim(key)
    if slot is None:
        return False
    slot.memory[: NBYTES // 2] = CONTENTS[key][: NBYTES // 2]
    slot.memory[NBYTES // 2 :] = CONTENTS[key][NBYTES // 2 :]
    slot.publish()
    return True


def take(slots: Any, key: int) -> bool:
    """Read a unit, which must be right; False where it is not there."""
    found = slots.find(key)
    if found is None:
        return False
    made = found.memory.tobytes()
    if not found.release():
        return False
    assert made == CONTENTS[key].tobytes()
    return True


def obtained(slots: Any, key: int) -> bool:
    """Have a unit as a reader does; return whether it had to be made."""
    while not take(slots, key):
        if put(slots, key):
            return True
        if slots.is_coming(key):
            slots.wait(key)
    return False
