"""An image whose rows are there, or are made once and all together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe.types import Box, Size, UInt8Array

__all__ = ["WholeImage"]


class WholeImage:
    """An opened image whose pixels come as rows, not as regions of a file.

    Args:
        size: of the image.
        rows: from the first row and their number to uint8 (count, width, 3), C-contiguous; not
            written to, and not kept longer than the image.
        info: what ``info`` returns.
    """

    def __init__(
        self, size: Size, rows: Callable[[int, int], UInt8Array], info: Callable[[], dict[Any, Any]]
    ) -> None:
        self.size = size
        self.rows = rows
        self.info = info

    def region(self, box: Box) -> UInt8Array:
        """A rectangle of the image."""
        rows = self.rows(box.top, box.height)
        return np.ascontiguousarray(rows[:, box.left : box.left + box.width])

    def reduced(self, factor: int) -> None:
        """Not smaller than it is: there is nothing left to save."""

    def encoded(self) -> None:
        """There is nothing left to decode, or all of it is to be kept."""

    def give(self, box: Box, pixels: UInt8Array) -> None:
        """Not asked for anything, it is given nothing."""
        raise AssertionError("the pixels of a whole image come as rows")

    def pil(self) -> Any:
        """The image for user code, as Pillow would give it."""
        image = require("PIL.Image", extra="image").fromarray(self.rows(0, self.size.height))
        image.info = self.info()
        return image
