"""What is wrong with a file."""

from __future__ import annotations

from fastpipe.errors import HDF5Error

__all__ = ["DamagedError"]


class DamagedError(HDF5Error):
    """A file does not hold some samples as it should; others may be whole."""
