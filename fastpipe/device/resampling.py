"""Resampling of images that are on a device, to the very bytes that the CPU's kernels make.

The CPU computes each image's weights, as it does for its own kernels: Pillow's, in 22-bit fixed point.  The
device multiplies and adds integers, and rounds to bytes between the two passes.  So a batch differs from one
made on the CPU only where its images were decoded differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe.device.transfer import uploaded
from fastpipe.images.kernels import Axis, axis_tables
from fastpipe.images.pixels import Resampling

__all__ = ["Tables", "resample_by_torch", "tables_of"]

_HALF, _BITS = 1 << 21, 22
_FIELDS = [Axis._fields.index(name) for name in ("length", "low", "pitch")]


class Tables(NamedTuple):
    """How the images of a batch are resampled.

    Attributes:
        numbers: int64 (N, 7), of each image: the first input of the pixels that are there, from the left and
            from the top; where the tables of columns and of rows begin in ``flat``; how many weights each has
            for an output; whether columns are resampled first.
        flat: int32 (M,): of each axis, for each output its first input, then their numbers of inputs, then
            their weights; see `fastpipe.images.kernels.axis_tables`.
    """

    numbers: npt.NDArray[np.int64]
    flat: npt.NDArray[np.int32]


def tables_of(images: Sequence[Resampling]) -> Tables:
    """The tables of a batch's images, computed here."""
    filters = [(how.mode, axis) for how in images for axis in (how.x, how.y)]
    axes = np.array([axis for _, axis in filters], np.int64)
    length, low, pitch = axes[:, _FIELDS].T
    ends = np.cumsum(length * (pitch + 2))
    starts = np.concatenate([[0], ends[:-1]])
    flat = axis_tables(filters)
    order = np.array([how.vertical_first for how in images], np.int64)
    pairs = (column.reshape(-1, 2) for column in (low, starts, pitch))
    return Tables(np.column_stack([*pairs, order]), flat)


def resample_by_torch(sources: Sequence[Any], tables: Tables, out: Any) -> None:
    """Resample images one after the other, by torch's own operations: anywhere torch computes.

    Args:
        sources: of each image the pixels of its box, uint8 tensors (H, W, 3) on the device.
        tables: of all.
        out: uint8 tensor (N, 3, height, width) there, which is written.
    """
    torch = require("torch", extra="torch")
    flat = uploaded(torch.from_numpy(tables.flat), out.device)
    for pixels, numbers, target in zip(sources, tables.numbers.tolist(), out, strict=True):
        left, top, x_start, y_start, x_pitch, y_pitch, vertical_first = numbers
        height, width = target.shape[1:]
        passes = [(flat[x_start:], width, x_pitch, left, 1), (flat[y_start:], height, y_pitch, top, 0)]
        for table, count, pitch, first, dim in reversed(passes) if vertical_first else passes:
            pixels = _resampled(torch, pixels, table, count, pitch, first, dim)
        target.copy_(pixels.permute(2, 0, 1))


def _resampled(torch: Any, pixels: Any, table: Any, count: int, pitch: int, first: int, dim: int) -> Any:
    """One pass: uint8 (H, W, 3) with the axis ``dim`` resampled to ``count``."""
    starts, taps = table[:count].view(-1, 1) - first, table[count : 2 * count].view(-1, 1)
    weights = table[2 * count : (2 + pitch) * count].view(count, pitch)
    inputs = torch.arange(pitch, device=table.device, dtype=torch.int32).view(1, -1)
    is_there = inputs < taps  # memory behind an output's last weight holds anything
    weights = torch.where(is_there, weights, 0)
    places = torch.where(is_there, starts + inputs, 0).view(-1)
    taken = pixels.index_select(dim, places).to(torch.int32)
    if dim == 0:
        taken = taken.view(count, pitch, *pixels.shape[1:])
        total = (taken * weights.view(count, pitch, 1, 1)).sum(1, dtype=torch.int32)
    else:
        taken = taken.view(pixels.shape[0], count, pitch, 3)
        total = (taken * weights.view(1, count, pitch, 1)).sum(2, dtype=torch.int32)
    return ((total + _HALF) >> _BITS).clamp_(0, 255).to(torch.uint8)
