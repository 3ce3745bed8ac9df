"""The frames of all threads, without the lock-up that asking for them may end in."""

from __future__ import annotations

import gc
import os
import sys
import threading
from types import FrameType

__all__ = ["current_frames"]

# Before 3.12 garbage is collected wherever an object is made, and Python 3.11 makes a frame object for each
# thread while it holds the lock of the list of threads.  A finalizer or a weak reference's callback lets
# another thread run then; if that begins or ends a thread, or asks for frames as well, both wait for ever.
_COLLECTS_ANYWHERE = sys.version_info < (3, 12)
_one_at_a_time = threading.Lock()
if _COLLECTS_ANYWHERE and hasattr(os, "register_at_fork"):
    os.register_at_fork(  # a child must not begin with collecting turned off
        before=_one_at_a_time.acquire,
        after_in_parent=_one_at_a_time.release,
        after_in_child=_one_at_a_time.release,
    )


def current_frames() -> dict[int, FrameType]:
    """What ``sys._current_frames`` gives: the frame in which each thread is, by the thread's identifier.

    >>> import threading
    >>> current_frames()[threading.get_ident()].f_code.co_name
    'current_frames'
    """
    if not _COLLECTS_ANYWHERE:
        return sys._current_frames()
    with _one_at_a_time:  # or the second to come would take collecting to be off, and the first turn it on
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()
