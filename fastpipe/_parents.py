"""Processes that end with the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None) -> bool:
    """Let the kernel end this process together with its parent, also while it is stuck.

    Args:
        parent: the process that should be it.

    Returns:
        Whether that is arranged: not off Linux, nor where another process is between the two.
    """
    if sys.platform != "linux" or os.getppid() != parent:
        return False
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # which has ended meanwhile
        os.kill(os.getpid(), signal.SIGKILL)
    return True
