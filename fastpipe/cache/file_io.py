"""Bytes of a cache's files: written and read whole."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from fastpipe.core.files import read_at

__all__ = ["read_into", "write_all"]

UInt8Array = npt.NDArray[np.uint8]

_MOST_PARTS = 1024  # that Linux writes at a time


def write_all(descriptor: int, parts: Sequence[memoryview], offset: int) -> None:
    """Write parts one after the other."""
    left = deque(part for part in parts if len(part))
    while left:
        written = os.pwritev(descriptor, list(islice(left, _MOST_PARTS)), offset)
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.popleft())
        if left:
            left[0] = left[0][written:]


def read_into(descriptor: int, array: UInt8Array, offset: int) -> None:
    """Read an array's bytes.

    Raises:
        OSError: the file is shorter than it was.
    """
    if read_at(descriptor, array.reshape(-1), offset) < array.size:
        raise OSError(errno.EIO, "a cache's data file is shorter than it was")
