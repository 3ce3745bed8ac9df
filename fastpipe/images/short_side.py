"""Making an image smaller before anything else is done to it, as if its file were a smaller one."""

from __future__ import annotations

import numpy as np

from fastpipe._extras import require
from fastpipe.images import kernels
from fastpipe.images.geometry import fold
from fastpipe.images.pillow import pillow_resize
from fastpipe.images.pixels import Conversion, draw
from fastpipe.images.steps import resized_size
from fastpipe.protocols import EncodedImage
from fastpipe.types import Size, UInt8Array

__all__ = ["ShortSide"]

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
        self._resize = require("torchvision.transforms", extra="torch").Resize(side)

    def size(self, image: Size) -> Size:
        """The size that an image will have."""
        return image if min(image) <= self.side else resized_size(self._resize, image)

    def pixels(self, image: EncodedImage) -> UInt8Array:
        """A whole image, shrunk: uint8 (H, W, 3)."""
        to = self.size(image.size)
        operation = pillow_resize(kernels.BILINEAR, image.size, to)
        region = None if operation is None else fold([operation], image.size)
        if region is None:
            return np.asarray(self._resize(image.pil()))
        made = np.empty(to.height * to.width * 3, np.uint8)
        draw(image, region, _BYTES, made)
        return made.reshape(*to, 3)
