"""Pixels in the role of an encoded image, for tests of transforms without files."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.core.types import Box, Size

__all__ = ["ArrayImage"]


class ArrayImage:
    """A :class:`fastpipe.core.types.EncodedImage` over an array, which remembers what it was asked for.

    Args:
        pixels: uint8 (H, W, 3).

    Attributes:
        pixels: those pixels.
        size: their height and width.
        regions: the boxes that were decoded, in order.
        wholes: how often the whole image was.

    >>> image = ArrayImage(np.zeros((4, 5, 3), np.uint8))
    >>> image.region(Box(1, 2, 3, 2)).shape, image.regions
    ((3, 2, 3), [Box(top=1, left=2, height=3, width=2)])
    """

    def __init__(self, pixels: npt.NDArray[np.uint8]) -> None:
        self.pixels = pixels
        self.size = Size(pixels.shape[0], pixels.shape[1])
        self.regions: list[Box] = []
        self.wholes = 0

    def region(self, box: Box) -> npt.NDArray[np.uint8]:
        """Decode a rectangle, which must lie inside the image."""
        inside = box.top + box.height <= self.size.height and box.left + box.width <= self.size.width
        if min(box.top, box.left) < 0 or min(box.height, box.width) < 1 or not inside:
            raise AssertionError(f"{box} does not lie inside of {self.size}")
        self.regions.append(box)
        return np.ascontiguousarray(
            self.pixels[box.top : box.top + box.height, box.left : box.left + box.width]
        )

    def rows(self, top: int, count: int) -> None:
        """Nothing is decoded beforehand."""

    def reduced(self, factor: int) -> None:
        """No smaller image."""

    def encoded(self) -> None:
        """There is no file."""

    def give(self, box: Box, pixels: npt.NDArray[np.uint8]) -> None:
        """Take pixels in the place of its own."""
        raise AssertionError("an image without a file is decoded by nobody")

    def info(self) -> dict[Any, Any]:
        """What a file says beside its pixels."""
        return {"comment": b"from the file"}

    def pil(self) -> Any:
        """The whole image as Pillow has it."""
        self.wholes += 1
        image = require("PIL.Image", extra="image").fromarray(self.pixels)
        image.info.update(self.info())
        return image
