"""Data for tests and benchmarks, shipped with fastpipe: photographs, log-mels and volumes made from a seed,
odd files, and what plain Python says of a JPEG.

Of fastpipe only ``bench`` and ``doctor`` import this package.
"""

from __future__ import annotations

from fastpipe.testing._odd_damaged import damaged_at_random
from fastpipe.testing.array_image import ArrayImage
from fastpipe.testing.jpeg_walk import walked_header
from fastpipe.testing.mels import log_mels, mel_rows, mel_segments, read_wav, spoken, write_table
from fastpipe.testing.odd_images import OddImage, odd_images, write_fifo
from fastpipe.testing.photos import imagenet_size, photo_tree, photograph
from fastpipe.testing.volumes import scroll_slabs, write_zarr

__all__ = [
    "ArrayImage", "OddImage", "damaged_at_random", "imagenet_size", "log_mels", "mel_rows", "mel_segments",
    "odd_images", "photo_tree", "photograph", "read_wav", "scroll_slabs", "spoken", "walked_header",
    "write_fifo", "write_table", "write_zarr",
]  # fmt: skip
