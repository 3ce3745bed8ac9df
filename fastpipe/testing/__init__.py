"""Data for tests and benchmarks, shipped with fastpipe: photographs made from a seed, odd files.

Nothing else in fastpipe imports this package.
"""

from __future__ import annotations

from fastpipe.testing.array_image import ArrayImage
from fastpipe.testing.odd_images import OddImage, odd_images, write_fifo
from fastpipe.testing.photos import imagenet_size, photo_tree, photograph

__all__ = ["ArrayImage", "OddImage", "imagenet_size", "odd_images", "photo_tree", "photograph", "write_fifo"]
