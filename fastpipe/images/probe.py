"""Small images with which other libraries are asked what they do."""

from __future__ import annotations

import numpy as np

from fastpipe.core.native import native
from fastpipe.images import kernels
from fastpipe.types import UInt8Array

__all__ = ["noise", "resized"]


def noise(size: tuple[int, int]) -> UInt8Array:
    """An image of a height and width in which every difference shows: uint8 (H, W, 3)."""
    return np.random.Generator(np.random.PCG64(1)).integers(0, 256, (*size, 3), np.uint8)


def resized(image: UInt8Array, to: tuple[int, int], mode: int) -> UInt8Array:
    """What the kernels make of a whole image, rows first.

    Args:
        image: uint8 (H, W, C).
        to: height and width of the result.
        mode: a filter, a constant of ``weights``.
    """
    (height, width, channels), (out_height, out_width) = image.shape, to
    made = np.empty(out_height * out_width * channels, np.uint8)
    how = native.conversion(0, channels, True, 1, True, [], [], b"")
    x, y = kernels.axis(mode, width, out_width), kernels.axis(mode, height, out_height)
    kernels.resample(image, mode, x, y, False, 0, how, made)
    return made.reshape(out_height, out_width, channels)
