"""Weighted sums along the axes of volumes: of blurs, and of lower resolutions, by torch's operations."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fastpipe.augment.parameters import Float32Array
from fastpipe.augment.tables import uploaded
from fastpipe.augment.volumes.volume import Volume

__all__ = ["TRUNCATE", "Taps", "along", "gaussian", "lower_resolution"]

# Index and weights, (length, K): each voxel of a line becomes a sum of K voxels of it.
Taps = tuple[npt.NDArray[np.int64], Float32Array]
TRUNCATE = 3.0  # standard deviations, beyond which a Gaussian has no weights


def gaussian(length: int, sigma: float) -> Taps:
    """A Gaussian, as ``scipy.ndimage.gaussian_filter1d`` with ``truncate=3`` and ``mode="mirror"``.

    Args:
        length: of the lines.
        sigma: in voxels, above 0.
    """
    radius = int(TRUNCATE * sigma + 0.5)
    steps = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (steps / sigma) ** 2)
    index = np.arange(length)[:, None] + steps
    if length == 1:
        index[:] = 0
    else:  # mirrored about the voxels at the ends, as often as it takes
        index = np.abs((index + length - 1) % (2 * (length - 1)) - (length - 1))
    values = np.broadcast_to((weights / weights.sum()).astype(np.float32), index.shape)
    return np.ascontiguousarray(index, np.int64), np.ascontiguousarray(values)


@lru_cache(maxsize=64)
def lower_resolution(length: int, fewer: int) -> Taps:
    """So many voxels of a line, spread evenly, and what is between them linearly.

    Args:
        length: of the lines.
        fewer: how many of its voxels are kept: at least 1, at most all.
    """
    kept = (2 * np.arange(fewer) + 1) * length // (2 * fewer)
    at = ((np.arange(length) + 0.5) * (fewer / length) - 0.5).clip(0, fewer - 1)
    below = np.floor(at).astype(np.int64)
    part = (at - below).astype(np.float32)
    index = np.stack([kept[below], kept[np.minimum(below + 1, fewer - 1)]], axis=1)
    return index, np.stack([1 - part, part], axis=1)


def along(volume: Volume, channel: int, axis: int, taps: Taps) -> None:
    """Sum along an axis of (D, H, W), in place."""
    values, (index, weights) = volume.values[channel], taps
    across = 1 if axis == 0 else 0  # what the pieces are pieces of
    pieces = volume.pieces(across)
    # Sums, and no matrix product, which may have fewer digits on a GPU.
    places, factors = uploaded(index, values.device), uploaded(weights, values.device)
    form = [-1 if at == axis else 1 for at in range(3)]
    for piece in pieces:
        part = values[:, piece] if across else values[piece]
        total = part.index_select(axis, places[:, 0]).mul_(factors[:, 0].view(form))
        for tap in range(1, index.shape[1]):
            total.add_(part.index_select(axis, places[:, tap]).mul_(factors[:, tap].view(form)))
        part.copy_(total)
