"""The same as ``resampling``, for all images of a batch by one kernel of Triton's.

An output pixel's horizontal sums are made for each of the rows that its vertical sum takes, so nothing is
stored between the two passes; where an image is made smaller, a row is needed by about two of the output.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe.device.resampling import Tables
from fastpipe.device.transfer import uploaded

__all__ = ["resample_by_triton"]

_COLUMNS = 9  # of a row of numbers about an image
_BLOCK = 128
tl: Any = None  # Triton's language, which the kernel's code finds by this name


def resample_by_triton(sources: Sequence[Any], tables: Tables, out: Any) -> None:
    """Resample images by one kernel.

    Args:
        sources, tables, out: as of `fastpipe.device.resampling.resample_by_torch`.
    """
    torch = require("torch", extra="torch")
    height, width = out.shape[2:]
    places = np.array([(pixels.data_ptr(), pixels.stride(0)) for pixels in sources], np.int64)
    numbers = np.column_stack([places, tables.numbers])
    on_device = [uploaded(torch.from_numpy(part), out.device) for part in (numbers, tables.flat)]
    grid = (len(sources), height, -(-width // _BLOCK))
    jitted()[grid](*on_device, out, height, width, *out.stride(), columns=_COLUMNS, block=_BLOCK)


_compiling = threading.Lock()


def jitted() -> Any:
    """The kernel, to be compiled at its first use.

    Raises:
        MissingDependencyError: Triton is not installed.
    """
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
