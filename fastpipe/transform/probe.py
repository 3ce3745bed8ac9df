"""Small images with which other libraries are asked what they do."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastpipe.transform import kernels
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
    axes = kernels.axis(mode, width, out_width), kernels.axis(mode, height, out_height)
    numbers, scratch = kernels.scratch_sizes(height, width, channels, *axes)
    rows: Any = np.empty(out_height * channels * out_width, np.uint8)
    kernels.resample(
        image.reshape(-1), 0, width * channels, height, width, channels, mode, *map(tuple, axes), False,
        np.empty(numbers, np.int32), np.empty(scratch, np.uint8), rows,
    )  # fmt: skip
    made: UInt8Array = rows.reshape(out_height, channels, out_width).transpose(0, 2, 1)
    return made
