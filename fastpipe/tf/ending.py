"""No thread of TensorFlow's is in Python when the interpreter ends."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["at_work"]

_SETTLED_S = 0.05  # after which who has left will not come back: its buffers are full, or its epoch is over
_LEAVE_S = 10.0

_changed = threading.Condition()
_inside = 0
_left_s = 0.0
_is_ending = False
_is_registered = False


@contextmanager
def at_work() -> Iterator[bool]:
    """A block that threads of TensorFlow's are in while they make something in Python.

    Python ends a thread that asks for the GIL once the interpreter is taken down, and TensorFlow waits for it
    for ever when its iterator is freed a little later.  So the end of the interpreter waits for the block.

    Returns:
        A context of whether to go on: at the end the epoch is over.
    """
    global _inside, _left_s, _is_registered
    with _changed:
        _inside += 1
        if not _is_registered:  # late: what is registered last is called first, before threads are ended
            _is_registered = True
            atexit.register(_end)
    try:
        yield not _is_ending
    finally:
        with _changed:
            _inside -= 1
            _left_s = time.monotonic()
            _changed.notify_all()


def _end() -> None:
    global _is_ending
    _is_ending = True
    deadline = time.monotonic() + _LEAVE_S
    with _changed:
        while (now := time.monotonic()) < deadline:
            settled = _left_s + _SETTLED_S
            if not _inside and now >= settled:
                return
            _changed.wait(deadline - now if _inside else settled - now)
