"""Pixels in the role of an encoded image, for tests of transforms without files."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.core.types import Box, Size


class ArrayImage:
    """An :class:`fastpipe.core.types.EncodedImage` over uint8 (H, W, 3), which remembers what it was asked for:
    ``regions`` are the boxes that were decoded, in order, and ``wholes`` is how often the whole image was.

    >>> image = ArrayImage(np.zeros((4, 5, 3), np.uint8))
    >>> image.region(Box(1, 2, 3, 2)).shape, image.regions
    ((3, 2, 3), [Box(top=1, left=2, height=3, width=2)])
    """

    def __init__(self, pixels: npt.NDArray[np.uint8]) -> None:
        self.pixels = pixels
        self.size = Size(*pixels.shape[:2])
        self.regions: list[Box] = []
        self.wholes = 0

    def region(self, box: Box) -> npt.NDArray[np.uint8]:
        """Decode a rectangle, which must lie inside the image."""
        bottom, right = box.top + box.height, box.left + box.width
        assert 0 <= box.top < bottom <= self.size.height and 0 <= box.left < right <= self.size.width, box
        self.regions.append(box)
        return np.ascontiguousarray(self.pixels[box.top : bottom, box.left : right])

    def rows(self, top: int, count: int) -> None:
        """Nothing is decoded beforehand."""

    def reduced(self, factor: int) -> None:
        """No smaller image."""

    def encoded(self) -> None:
        """There is no file."""

    def give(self, box: Box, pixels: npt.NDArray[np.uint8]) -> None:
        raise AssertionError("an image without a file is decoded by nobody")

    def info(self) -> dict[Any, Any]:
        return {"comment": b"from the file"}

    def pil(self) -> Any:
        self.wholes += 1
        image = require("PIL.Image", extra="image").fromarray(self.pixels)
        image.info.update(self.info())
        return image
