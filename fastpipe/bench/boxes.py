"""Crops, drawn as torchvision's ``RandomResizedCrop`` draws them.

For what leaves the choice of a crop to its user.  The process of a peer imports this file too, so it
needs nothing but numpy.
"""

from __future__ import annotations

import math

import numpy as np

__all__ = ["crop_box"]


def crop_box(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Top, left, height and width of a crop distributed as that of ``RandomResizedCrop``.

    Ten tries at an area of 8 to 100 % and a ratio of 3:4 to 4:3, else the centre.
    """
    for _ in range(10):
        area = height * width * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w
