"""Undoes what TensorFlow's generator datasets do to the memory of the whole process."""

from __future__ import annotations

import ctypes
import os

__all__ = ["reuse_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_LARGEST = 32 << 20  # to which glibc raises the threshold by itself, as memory of such sizes is freed

_SETTINGS = ("mmap_threshold", "trim_threshold")

_is_done = False


def reuse_freed_memory() -> None:
    """Have glibc use freed memory again, as it does where nobody has told it otherwise.

    The first generator dataset of a process makes TensorFlow set ``M_TRIM_THRESHOLD`` to 128 KiB, upon which
    glibc leaves ``M_MMAP_THRESHOLD`` at 128 KiB as well: every larger piece of memory is mapped anew then,
    page by page, by whoever needs it, such as image decoders, for which that is a tenth of their time.
    Called once it has done so.  Does nothing where the script's environment sets a threshold, nor without
    glibc.
    """
    global _is_done
    if _is_done:
        return
    _is_done = True
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(f"MALLOC_{name.upper()}_" in os.environ or name in tunables for name in _SETTINGS):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST)  # twice the other one, as glibc has it
