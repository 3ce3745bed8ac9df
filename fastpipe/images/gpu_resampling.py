"""Resample images on a GPU to the very bytes of the CPU's kernels: by torch, or by one kernel of Triton's.

An output pixel's horizontal sums are made for each of the rows that its vertical sum takes, so nothing is
stored between the two passes; where an image is made smaller, a row is needed by about two of the output.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.core.transfer import uploaded
from fastpipe.images.kernels import Axis, axis_tables
from fastpipe.images.pixels import Resampling

# The CPU computes each image's weights, as it does for its own kernels: Pillow's, in 22-bit fixed point.
# The device multiplies and adds integers, and rounds to bytes between the two passes. So a batch differs
# from one made on the CPU only where its images were decoded differently.

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
    """Compute the tables of a batch's images."""
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

    Of each image ``sources`` has the pixels of its box, a uint8 tensor (H, W, 3) on the device; ``out``,
    uint8 (N, 3, height, width) there, is written.
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
    """Do one pass: uint8 (H, W, 3) with the axis ``dim`` resampled to ``count``."""
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


# ---- the same for all images of a batch, by one kernel of Triton's -----------------------------------

# mypy: disable-error-code="no-untyped-call"

_COLUMNS = 9  # of a row of numbers about an image
_BLOCK = 128
tl: Any = None  # Triton's language, which the kernel's code finds by this name


def resample_by_triton(sources: Sequence[Any], tables: Tables, out: Any) -> None:
    """Resample images by one kernel, as ``resample_by_torch``."""
    torch = require("torch", extra="torch")
    height, width = out.shape[2:]
    places = np.array([(pixels.data_ptr(), pixels.stride(0)) for pixels in sources], np.int64)
    numbers = np.column_stack([places, tables.numbers])
    on_device = [uploaded(torch.from_numpy(part), out.device) for part in (numbers, tables.flat)]
    grid = (len(sources), height, -(-width // _BLOCK))
    jitted()[grid](*on_device, out, height, width, *out.stride(), columns=_COLUMNS, block=_BLOCK)


_compiling = threading.Lock()


def jitted() -> Any:
    """Return the kernel, to be compiled at its first use."""
    with _compiling:  # a cache lets several threads make what is not there yet
        return _jitted()


@functools.cache
def _jitted() -> Any:
    global tl, _byte
    jit, tl = require("triton", extra="torch").jit, require("triton.language", extra="torch")
    _byte = jit(_byte)
    return jit(_kernel)


def _byte(total):  # type: ignore[no-untyped-def]
    """A sum of products with weights of 22 bits, as a byte."""
    return tl.minimum(tl.maximum((total + (1 << 21)) >> 22, 0), 255)


def _kernel(  # type: ignore[no-untyped-def]
    numbers, tables, out, height, width, n_stride, c_stride, y_stride, x_stride,
    columns: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """A block of an output row, of one image."""
    # A batch may have more bytes than 32 bits count.
    image, y = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = tl.program_id(2) * block + tl.arange(0, block)
    is_inside = x < width
    about = numbers + image * columns
    source = tl.load(about).to(tl.pointer_type(tl.uint8))
    row_stride, left, top = tl.load(about + 1), tl.load(about + 2), tl.load(about + 3)
    x_table, y_table = tables + tl.load(about + 4), tables + tl.load(about + 5)
    x_pitch, y_pitch = tl.load(about + 6), tl.load(about + 7)
    vertical_first = tl.load(about + 8)
    x_start = tl.load(x_table + x, mask=is_inside, other=0) - left
    x_taps = tl.load(x_table + width + x, mask=is_inside, other=0)
    y_start, y_taps = tl.load(y_table + y) - top, tl.load(y_table + height + y)
    x_weights = x_table + 2 * width + x * x_pitch
    y_weights = y_table + 2 * height + y * y_pitch
    most = tl.max(x_taps, 0)
    to = out + image * n_stride + y * y_stride + x * x_stride
    for channel in tl.static_range(3):
        first = source + y_start * row_stride + x_start * 3 + channel
        total = tl.zeros((block,), tl.int32)
        if vertical_first != 0:
            for i in range(most):
                is_there = is_inside & (i < x_taps)
                column = tl.zeros((block,), tl.int32)
                for k in range(y_taps):
                    value = tl.load(first + k * row_stride + i * 3, mask=is_there, other=0)
                    column += value.to(tl.int32) * tl.load(y_weights + k)
                total += _byte(column) * tl.load(x_weights + i, mask=is_there, other=0)
        else:
            for k in range(y_taps):
                row = tl.zeros((block,), tl.int32)
                for i in range(most):
                    is_there = is_inside & (i < x_taps)
                    value = tl.load(first + k * row_stride + i * 3, mask=is_there, other=0)
                    row += value.to(tl.int32) * tl.load(x_weights + i, mask=is_there, other=0)
                total += _byte(row) * tl.load(y_weights + k)
        tl.store(to + channel * c_stride, _byte(total).to(tl.uint8), mask=is_inside)
