"""What is wrong with a chunk."""

from __future__ import annotations

__all__ = ["ChunkError"]


class ChunkError(ValueError):
    """A chunk's bytes are not what its codecs make, or are not all there."""
