"""What is wrong with a file, or with a chunk of it."""

from __future__ import annotations

from fastpipe.errors import HDF5Error

__all__ = ["ChunkError", "DamagedError"]


class ChunkError(ValueError):
    """A chunk's bytes are not what its filters make, or are not all there."""


class DamagedError(HDF5Error):
    """A file does not hold some samples as it should; others may be whole."""
