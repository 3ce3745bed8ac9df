"""Chunks as files hold them: reading one whole, and what is wrong with one, in words."""

from __future__ import annotations

import os
from typing import Any

from fastpipe.core.files import read_at

__all__ = ["UNKNOWN_CODEC", "ChunkError", "chunk_error", "read_bytes", "read_fully"]

UNKNOWN_CODEC = 7
_NO_MEMORY = 8
_PROBLEMS = {  # enum Problem of fastpipe/native/codecs.h
    1: "its header is cut off, or is none",
    2: "it is not the {nbytes} bytes that were expected",
    3: "its blocks have an impossible size",
    4: "its data end too early",
    5: "damaged data, or not the {nbytes} bytes that were expected",
    6: "the checksum is not that of the data",
    UNKNOWN_CODEC: "it is compressed by a codec that fastpipe does not have",
}


class ChunkError(ValueError):
    """A chunk's bytes are incomplete, or not what its filters or codec write."""


def chunk_error(codec: str, problem: int, nbytes: int) -> ChunkError | MemoryError:
    """Return the error that says why the core could not decode a chunk.

    Args:
        codec: the name of the codec or filter.
        problem: its number in the core.
        nbytes: that the chunk should have.
    """
    if problem == _NO_MEMORY:  # which says nothing about the chunk
        return MemoryError(f"{codec}: there is no memory for a chunk of {nbytes} bytes")
    return ChunkError(f"{codec}: {_PROBLEMS[problem].format(nbytes=nbytes)}")


def read_fully(descriptor: int, memory: Any, offset: int) -> None:
    """Fill memory with bytes of a file.

    Args:
        descriptor: the file's.
        memory: an array or a view of uint8, C-contiguous.
        offset: of the first of these bytes in the file.

    Raises:
        ChunkError: the file ends before.
        OSError: it cannot be read.
    """
    if read_at(descriptor, memory, offset) < len(memory):
        raise ChunkError("the file ends within it")


def read_bytes(descriptor: int, offset: int, size: int) -> bytes:
    """Return bytes of a file; an end of the file within them is a ChunkError, as of ``read_fully``."""
    if offset + size > os.fstat(descriptor).st_size:  # before memory is taken for it
        raise ChunkError("the file ends within it")
    stored = bytearray(size)
    read_fully(descriptor, stored, offset)
    return bytes(stored)
