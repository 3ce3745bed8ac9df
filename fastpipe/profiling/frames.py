"""The frames of all threads, without the lock-up that asking for them may end in."""

from __future__ import annotations

import gc
import itertools
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, TypeVar

__all__ = ["current_stacks", "native_ids", "stack_of"]

T = TypeVar("T")

# Before 3.12 garbage is collected wherever an object is made, and Python 3.11 makes a frame object for each
# thread while it holds the lock of the list of threads, and for each caller of a frame that is asked for.  A
# finalizer or a weak reference's callback lets another thread run then; if that begins or ends a thread, or
# asks for frames as well, both wait for ever.
_COLLECTS_ANYWHERE = sys.version_info < (3, 12)
_one_at_a_time = threading.Lock()
if _COLLECTS_ANYWHERE and hasattr(os, "register_at_fork"):
    os.register_at_fork(  # a child must not begin with collecting turned off
        before=_one_at_a_time.acquire,
        after_in_parent=_one_at_a_time.release,
        after_in_child=_one_at_a_time.release,
    )


def current_stacks(threads: Iterable[int] | None = None) -> dict[int, list[FrameType]]:
    """The frames of threads, and of those that have called them, the innermost first.

    Args:
        threads: their identifiers; None for all but the one that calls.

    Returns:
        By identifier; without those that have ended.

    >>> import threading
    >>> [frame.f_code.co_name for frame in current_stacks([threading.get_ident()])[threading.get_ident()]][:2]
    ['stacks', '_without_collecting']
    """

    def stacks() -> dict[int, list[FrameType]]:
        frames = sys._current_frames()
        wanted = frames.keys() - {threading.get_ident()} if threads is None else threads
        try:
            return {ident: stack_of(frames[ident]) for ident in wanted if ident in frames}
        finally:
            frames.clear()  # this frame is one of them, and would keep all of them, with what these refer to

    return _without_collecting(stacks)


def stack_of(frame: FrameType | None) -> list[FrameType]:
    """A frame and those that have called it, the innermost first.

    Of another thread by `current_stacks` only: ``f_back`` makes an object, at which Python 3.11 may collect
    garbage and let that thread go on, and then leads to memory that is used for something else.
    """
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def native_ids() -> dict[int, int]:
    """The kernel's numbers of all threads that have a frame, also of those that Python did not start.

    It is in the number of a thread's clock (``CPUCLOCK_PID`` in the kernel's ``posix-timers.h``).

    >>> import threading
    >>> native_ids()[threading.get_ident()] in (threading.get_native_id(), -1)
    True
    """
    if sys.platform != "linux":
        return dict.fromkeys(_without_collecting(sys._current_frames), -1)
    return {ident: ~(clock >> 3) for ident, clock in _without_collecting(_clocks).items()}


def _clocks() -> dict[int, int]:
    """Asking for the clock of a thread that has ended would read memory that is not there any more.

    So this is one call of functions in C, in which no other thread gets the interpreter's lock, without which
    none can end.
    """
    idents, same = itertools.tee(itertools.chain.from_iterable(map(_CALL, (sys._current_frames,))))
    return dict(zip(idents, map(time.pthread_getcpuclockid, same), strict=True))


_CALL: Any = operator.methodcaller("__call__")


def _without_collecting(ask: Callable[[], T]) -> T:
    if not _COLLECTS_ANYWHERE:
        return ask()
    with _one_at_a_time:  # or the second to come would take collecting to be off, and the first turn it on
        collects = gc.isenabled()
        gc.disable()
        try:
            return ask()
        finally:
            if collects:
                gc.enable()
