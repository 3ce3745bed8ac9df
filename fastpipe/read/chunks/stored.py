"""Bytes of chunks as a file has them."""

from __future__ import annotations

import os
from typing import Any

from fastpipe.read.chunks.errors import ChunkError

__all__ = ["read_fully"]


def read_fully(descriptor: int, memory: Any, offset: int) -> None:
    """Fill memory with bytes of a file, however many calls that takes.

    Args:
        descriptor: of the file.
        memory: an array or a view of uint8, C-contiguous.
        offset: where the first of them is in the file.

    Raises:
        ChunkError: the file ends before.
        OSError: it cannot be read.
    """
    left = memoryview(memory)
    while len(left):
        count = os.preadv(descriptor, [left], offset)
        if not count:
            raise ChunkError("the file ends within it")
        left, offset = left[count:], offset + count
