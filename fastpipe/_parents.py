"""Processes that end with the one that started them."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

if sys.platform != "win32":
    import fcntl

__all__ = ["end_with_parent", "end_with_pipe", "outliving_parent"]

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None) -> bool:
    """Let the kernel end this process together with its parent, also while it is stuck or stopped.

    Args:
        parent: the process that should be it.

    Returns:
        Whether that is arranged: not off Linux, nor where another process is between the two.
    """
    global _end
    if sys.platform != "linux" or os.getppid() != parent:
        return False

    def arrange(is_wanted: bool) -> None:
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if is_wanted else 0, 0, 0, 0)

    _end = _End(arrange, lambda: os.getppid() != parent)
    return True


def end_with_pipe() -> None:
    """The same for a process of ``multiprocessing``, by the pipe whose other end its parent holds.

    The kernel sends the signal when that is closed, which other children of the parent may delay.
    """
    global _end
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None:
        return
    pipe = parent.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(pipe, select.POLLIN)

    def arrange(is_wanted: bool) -> None:
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid() if is_wanted else 0)

    _end = _End(arrange, lambda: bool(poll.poll(0)))


@contextmanager
def outliving_parent() -> Iterator[None]:
    """Put off the end that comes with the parent's, for what must not be left half done.

    It is for the thread that has arranged this end, and nothing that may take long belongs in it.
    """
    end = _end
    if end is None or end.process != os.getpid():  # a child that this process has forked has another parent
        yield
        return
    end.arrange(False)
    try:
        yield
    finally:
        end.begin()


class _End:
    """This process's end, together with its parent's."""

    def __init__(self, arrange: Callable[[bool], None], has_parent_ended: Callable[[], bool]) -> None:
        self.process = os.getpid()
        self.arrange = arrange
        self._has_parent_ended = has_parent_ended
        self.begin()

    def begin(self) -> None:
        self.arrange(True)
        if self._has_parent_ended():  # before the kernel was asked to tell
            os.kill(os.getpid(), signal.SIGKILL)


_end: _End | None = None


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
