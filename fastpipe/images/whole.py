"""Whole images: those whose rows are there, and those made smaller before anything else is done to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe.images.geometry import fold
from fastpipe.images.pixels import Conversion, draw
from fastpipe.images.steps import described_short_side, resized_size
from fastpipe.protocols import EncodedImage
from fastpipe.types import Box, Size, UInt8Array

__all__ = ["ShortSide", "WholeImage"]


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


_BYTES = Conversion("bytes", 3, interleaved=True)


class ShortSide:
    """Shrinks images whose shorter side is longer than a limit, as ``torchvision.transforms.Resize`` does.

    Args:
        side: the limit, in pixels.

    >>> ShortSide(256).size(Size(375, 500))
    Size(height=256, width=341)
    """

    def __init__(self, side: int) -> None:
        self.side = side
        self._step = described_short_side(side)
        self._resize = require("torchvision.transforms", extra="torch").Resize(side)

    def size(self, image: Size) -> Size:
        """The size that an image will have."""
        return image if min(image) <= self.side else resized_size(self._resize, image)

    def pixels(self, image: EncodedImage) -> UInt8Array:
        """A whole image, shrunk: uint8 (H, W, 3)."""
        to = self.size(image.size)
        steps = [] if to == image.size else [self._step]
        region = None if None in steps else fold(steps, image.size)
        if region is None:
            return np.asarray(self._resize(image.pil()))
        made = np.empty(to.height * to.width * 3, np.uint8)
        draw(image, region, _BYTES, made)
        return made.reshape(*to, 3)
