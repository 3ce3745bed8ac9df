"""Volumes like tomographs of a rolled scroll, made from a seed to be as hard to compress as real ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.errors import OptionError

__all__ = ["scroll_slabs", "write_zarr"]

UInt16Array = npt.NDArray[np.uint16]
UInt8Array = npt.NDArray[np.uint8]

_PITCH = 18.0  # voxels from a sheet to the next
_STEP = 32  # what such detectors tell apart, in levels of 16 bits
_NOISE = 900.0
# Where the sine across a sheet is above it, there is ink or papyrus to be found.
_SHEET = 0.6


def scroll_slabs(
    shape: Sequence[int], thickness: int = 64, seed: int = 0
) -> Iterator[tuple[UInt16Array, UInt8Array]]:
    """A rolled scroll, a slab at a time: sheets of a spiral whose axis bends, smooth changes of density, and
    the noise of a sensor in levels of 32.

    Args:
        shape: (depth, height, width), the axis along the first.
        thickness: planes in a slab; the last may have fewer.
        seed: the same seed, shape and thickness give the same volume.

    Yields:
        uint16 (planes, height, width) of densities, and uint8 of the same shape: 1 within sheets, 0 between.

    Raises:
        OptionError: the shape is not of three dimensions.

    >>> [(values.shape, int(labels.max())) for values, labels in scroll_slabs((5, 30, 40), 3)]
    [((3, 30, 40), 1), ((2, 30, 40), 1)]
    """
    if len(shape) != 3 or min(shape) < 1:
        raise OptionError(f"scroll_slabs(shape=…) must be (depth, height, width), got {tuple(shape)!r}")
    rng = np.random.default_rng(seed)
    depth, height, width = shape
    y = np.arange(height, dtype=np.float32)[:, None]
    x = np.arange(width, dtype=np.float32)
    for first in range(0, depth, thickness):
        z = np.arange(first, min(first + thickness, depth), dtype=np.float32)[:, None, None]
        from_axis_y = y - height * np.float32(0.52) + height * np.float32(0.04) * np.sin(z / 90)
        from_axis_x = x - width * np.float32(0.49) + width * np.float32(0.03) * np.cos(z / 70)
        turns = np.arctan2(from_axis_y, from_axis_x) / np.float32(2 * np.pi)
        turns += np.hypot(from_axis_y, from_axis_x) / np.float32(_PITCH)
        across = np.sin(np.float32(2 * np.pi) * turns)
        values = 20_000 + 14_000 * across + 3000 * np.sin(z / 13) * np.cos(y / 17)
        values += np.float32(_NOISE) * rng.standard_normal(values.shape, np.float32)
        levels = np.clip(values, 0, 65_535).astype(np.uint16) // _STEP * _STEP
        yield levels, (across > _SHEET).astype(np.uint8)


def write_zarr(
    path: Path,
    parts: Iterable[npt.NDArray[np.generic]],
    shape: Sequence[int],
    chunk: Sequence[int],
    *,
    compressed: bool = True,
) -> Path:
    """Write a Zarr array of version 3, compressed by zstd (level 5) in blosc after shuffling bytes.

    Args:
        path: its folder, which is made.
        parts: arrays that follow each other along the first dimension, at least one; an iterator will do.
        shape: of the whole.
        chunk: of a chunk.
        compressed: False leaves the chunks as they are.

    Returns:
        ``path``.
    """
    tensorstore = require("tensorstore", extra="volume")
    array, first = None, 0
    for part in parts:
        if array is None:
            compression = {"cname": "zstd", "clevel": 5, "shuffle": "shuffle", "typesize": part.itemsize}
            metadata = {
                "shape": list(shape),
                "data_type": str(part.dtype),
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
                "codecs": [
                    {"name": "bytes", "configuration": {"endian": "little"}},
                    *([{"name": "blosc", "configuration": compression}] if compressed else []),
                ],
            }
            store = {"driver": "file", "path": str(path)}
            spec = {"driver": "zarr3", "kvstore": store, "metadata": metadata}
            array = tensorstore.open(spec, create=True).result()
        array[first : first + len(part)].write(part).result()
        first += len(part)
    return path
