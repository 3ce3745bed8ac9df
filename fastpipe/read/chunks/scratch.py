"""Memory that a thread uses again for each chunk: new memory costs more than some filters."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK", "STEPS", "STORED", "scratch"]

# The buffers: a chunk as the file has it, what filters make on the way, and a block of one of these.
STORED, STEPS, BLOCK = 0, (1, 2), 3

# Beyond this a buffer is not kept: the chunk takes long anyway, and each thread would have some.
_MOST_NBYTES = 1 << 23


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[int, npt.NDArray[np.uint8]] = {}


_buffers = _Buffers()


def scratch(number: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Uninitialised memory: uint8 (nbytes,), until this thread asks for the same number again.

    Args:
        number: which of the thread's buffers: one of the constants above.
        nbytes: how much.
    """
    if nbytes > _MOST_NBYTES:
        return np.empty(nbytes, np.uint8)
    kept = _buffers.buffers.get(number)
    if kept is None or len(kept) < nbytes:
        kept = _buffers.buffers[number] = np.empty(nbytes, np.uint8)
    return kept[:nbytes]
