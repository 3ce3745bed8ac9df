"""The CPU kernels: resampling that equals Pillow's bit for bit, mirroring, conversion.

Resampling works as Pillow's does for 8-bit images (its ``Resample.c`` is the reference):
weights are computed in double precision and rounded to 22-bit fixed point, and each of the
two passes rounds to bytes.  Only the layout differs.  The vertical pass runs vectors along
the rows.  The horizontal pass cannot, as every output pixel starts at its own input pixel:
there LANES rows at a time are transposed and resampled side by side, one row in each lane;
transposing back also separates the colours and mirrors, for nothing.

Results lie in rows of colours, ``(height, channels, width)``, from which the last step
makes what is asked for: planes or interleaved pixels, bytes or normalised floats.

Every function releases the GIL and is compiled when this module is imported (or loaded from
numba's cache), so that no thread ever waits for a compiler.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fastpipe._extras import require
from fastpipe._jit import compiled
from fastpipe.transform._simd import LANES, transpose_block, weighted_lanes
from fastpipe.transform.weights import axis_weights, span

__all__ = [
    "Axis",
    "axis",
    "grey",
    "resample",
    "resample_to_affine",
    "resample_to_bytes",
    "scratch_sizes",
    "to_affine",
    "to_bytes",
    "to_table",
]


class Axis(NamedTuple):
    """One axis of a resize, as ``resample`` takes it.

    Attributes:
        in_size, out_size: pixels before and after.
        start8, extent8: the part of the input that becomes the output, in eighths of a pixel.
        first, length: the part of the output that is wanted.
        turned: 1 to resample the input as if it had been mirrored before, else 0.
        mirrored: 1 to mirror the output, else 0.
        low, high: the range of input pixels that is needed, and has to be there.
        pitch: weights kept for each output pixel.
    """

    in_size: int
    start8: int
    extent8: int
    out_size: int
    first: int
    length: int
    turned: int
    mirrored: int
    low: int
    high: int
    pitch: int


def axis(
    mode: int,
    in_size: int,
    out_size: int,
    first: int = 0,
    length: int | None = None,
    turned: bool = False,
    mirrored: bool = False,
    start8: int = 0,
    extent8: int | None = None,
) -> Axis:
    """The axis of a resize with this filter, or of a part of its output: see ``Axis``.

    >>> axis(1, 340, 224).high  # bilinear
    340
    """
    length = out_size if length is None else length
    extent8 = 8 * in_size if extent8 is None else extent8
    if turned:  # weights are those of the input as it is after turning
        start8 = 8 * in_size - start8 - extent8
    low, high, pitch = span(mode, in_size, start8, extent8, out_size, first, length, turned)
    return Axis(
        in_size, start8, extent8, out_size, first, length, int(turned), int(mirrored), low, high, pitch
    )


_t = require("numba.types", extra="image")

_in8 = _t.Array(_t.uint8, 1, "C", readonly=True)
_u8, _i32, _f32 = _t.uint8[::1], _t.int32[::1], _t.float32[::1]
_inf32 = _t.Array(_t.float32, 1, "C", readonly=True)
_int, _flag = _t.int64, _t.boolean
_axis_type = _t.UniTuple(_int, len(Axis._fields))


@compiled()
def _clip(total: int) -> int:
    return min(max(total >> 22, 0), 255)


@compiled()
def _vertical(
    src: Any, start: int, pitch: int, nbytes: int, top: int, starts: Any, taps: Any, weights: Any,
    weight_pitch: int, count: int, mirror: bool, dst: Any,
) -> None:  # fmt: skip
    """Resample columns: rows of ``nbytes``, which begin ``pitch`` apart, in; ``count`` such rows out."""
    for y in range(count):
        source = start + (starts[y] - top) * pitch
        to = (count - 1 - y if mirror else y) * nbytes
        first = y * weight_pitch
        if nbytes >= LANES:
            for block in range(0, nbytes, LANES):
                x = min(block, nbytes - LANES)
                weighted_lanes(src, source + x, pitch, weights, first, np.int64(taps[y]), dst, to + x)
        else:
            for x in range(nbytes):
                total = 1 << 21
                for k in range(taps[y]):
                    total += src[source + k * pitch + x] * weights[first + k]
                dst[to + x] = _clip(total)


@compiled()
def _horizontal_plain(
    src: Any, start: int, pitch: int, height: int, width: int, channels: int, left: int, starts: Any,
    taps: Any, weights: Any, weight_pitch: int, count: int, mirror: bool, dst: Any,
) -> None:  # fmt: skip
    """Resample rows one pixel at a time: for images too small for vectors."""
    for y in range(height):
        for x in range(count):
            to = count - 1 - x if mirror else x
            for c in range(channels):
                total = 1 << 21
                source = start + y * pitch + (starts[x] - left) * channels + c
                for k in range(taps[x]):
                    total += src[source + k * channels] * weights[x * weight_pitch + k]
                dst[(y * channels + c) * count + to] = _clip(total)


@compiled()
def _horizontal(
    src: Any, start: int, pitch: int, height: int, width: int, channels: int, left: int, starts: Any,
    taps: Any, weights: Any, weight_pitch: int, count: int, mirror: bool, dst: Any, columns: Any,
    resampled: Any,
) -> None:  # fmt: skip
    """Resample rows, LANES of them side by side, and separate the colours of each row."""
    in_bytes, out_bytes = width * channels, count * channels
    if height < LANES or in_bytes < 16 or out_bytes < 16:
        _horizontal_plain(
            src, start, pitch, height, width, channels, left, starts, taps, weights, weight_pitch, count,
            mirror, dst,
        )  # fmt: skip
        return
    lanes = np.int64(LANES)
    for strip in range(0, height, LANES):
        y = min(strip, height - LANES)  # the last strip, and below the last block, overlaps
        for block in range(0, in_bytes, 16):
            x = min(block, in_bytes - 16)
            for half in range(0, LANES, 16):
                transpose_block(src, start + (y + half) * pitch + x, pitch, columns, x * LANES + half, lanes)
        for x in range(count):
            to = count - 1 - x if mirror else x
            source = (starts[x] - left) * channels * LANES
            for c in range(channels):
                weighted_lanes(
                    columns, source + c * LANES, channels * lanes, weights, x * weight_pitch,
                    np.int64(taps[x]), resampled, (c * count + to) * LANES,
                )  # fmt: skip
        for block in range(0, out_bytes, 16):
            x = min(block, out_bytes - 16)
            for half in range(0, LANES, 16):
                transpose_block(
                    resampled, x * LANES + half, lanes, dst, (y + half) * out_bytes + x, out_bytes
                )


def scratch_sizes(height: int, width: int, channels: int, x: Axis, y: Axis) -> tuple[int, int]:
    """Scratch that ``resample`` needs: int32 elements, bytes."""
    numbers = x.length * (x.pitch + 2) + y.length * (y.pitch + 2)
    between = max(height * x.length, y.length * width)
    return numbers, (between + (width + x.length) * LANES) * channels


@compiled()
def _weights_of(mode: int, axis: Any, memory: Any) -> tuple[Any, Any, Any]:
    """Starts, taps and weights of an axis, in this memory."""
    in_size, start8, extent8, out_size, first, count, turned, _, _, _, pitch = axis
    starts, taps, weights = memory[:count], memory[count : 2 * count], memory[2 * count :]
    axis_weights(
        mode, in_size, start8, extent8, out_size, first, count, starts, taps, weights, pitch, turned != 0
    )
    return starts, taps, weights


_resample_types = (
    _in8, _int, _int, _int, _int, _int, _int, _axis_type, _axis_type, _flag, _i32, _u8, _u8,
)  # fmt: skip


@compiled(_t.void(*_resample_types))
def resample(
    src: Any, start: int, pitch: int, height: int, width: int, channels: int, mode: int, x: Any, y: Any,
    vertical_first: bool, numbers: Any, scratch: Any, dst: Any,
) -> None:  # fmt: skip
    """Resample an interleaved image into rows of colours.

    Args:
        src: uint8 (N,), in which the pixels from (y.low, x.low) on are.
        start, pitch: where the first of them is, and how far apart rows begin.
        height, width, channels: of the part that is there.
        mode: the filter, a constant of ``weights``.
        x, y: the axes, an ``Axis`` each.
        vertical_first: the order of the two passes, each of which rounds.
        numbers, scratch: int32 and uint8 memory of at least ``scratch_sizes``.
        dst: uint8 (y.length * channels * x.length,), the result.
    """
    _, _, _, _, _, out_width, _, mirror_x, left, _, x_pitch = x
    _, _, _, _, _, out_height, _, mirror_y, top, _, y_pitch = y
    x_starts, x_taps, x_weights = _weights_of(mode, x, numbers[: out_width * (x_pitch + 2)])
    y_starts, y_taps, y_weights = _weights_of(mode, y, numbers[out_width * (x_pitch + 2) :])
    columns = scratch[: width * channels * LANES]
    resampled = scratch[len(columns) : len(columns) + out_width * channels * LANES]
    between = scratch[len(columns) + len(resampled) :]
    if vertical_first:
        nbytes = width * channels
        _vertical(
            src, start, pitch, nbytes, top, y_starts, y_taps, y_weights, y_pitch, out_height, mirror_y != 0,
            between,
        )  # fmt: skip
        _horizontal(
            between, 0, nbytes, out_height, width, channels, left, x_starts, x_taps, x_weights, x_pitch,
            out_width, mirror_x != 0, dst, columns, resampled,
        )  # fmt: skip
    else:
        nbytes = out_width * channels
        _horizontal(
            src, start, pitch, height, width, channels, left, x_starts, x_taps, x_weights, x_pitch, out_width,
            mirror_x != 0, between, columns, resampled,
        )  # fmt: skip
        _vertical(
            between, 0, nbytes, nbytes, top, y_starts, y_taps, y_weights, y_pitch, out_height, mirror_y != 0,
            dst,
        )  # fmt: skip


@compiled(_t.void(_in8, _int, _int, _flag, _u8))
def grey(src: Any, height: int, width: int, interleaved: bool, dst: Any) -> None:
    """ITU-R 601-2 luma with Pillow's integer weights, as ``convert("L")`` computes it.

    Args:
        src: uint8 (height * width * 3,) RGB, interleaved or in rows of colours.
        dst: uint8 (height * width,).
    """
    step, plane = (3, 1) if interleaved else (1, width)
    for y in range(height):
        for x in range(width):
            i = y * width * 3 + x * step
            red, green, blue = src[i], src[i + plane], src[i + 2 * plane]
            dst[y * width + x] = np.uint8((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16)


@compiled(
    _t.void(_in8, _int, _int, _int, _flag, _inf32, _inf32, _flag, _f32),
    error_model="numpy",  # lets the division vectorise: no check for zero in the loop
)
def to_affine(
    src: Any, height: int, width: int, channels: int, divide: bool, mean: Any, std: Any, last: bool, dst: Any
) -> None:
    """Bytes to float32: ``(v / 255 - mean) / std``, or with ``v * (1 / 255)``, in float32.

    Args:
        src: uint8 (height * channels * width,), rows of colours.
        divide: divide by 255 (``ToTensor``) instead of multiplying by 1/255 (``v2.ToDtype``).
        mean, std: float32 (channels,).
        last: interleave the channels (channels-last memory) instead of making planes.
        dst: float32 (channels * height * width,).
    """
    factor = np.float32(1) / np.float32(255)
    whole = np.float32(255)
    if last and channels == 3:
        for y in range(height):
            red = src[y * 3 * width : (y * 3 + 1) * width]
            green = src[(y * 3 + 1) * width : (y * 3 + 2) * width]
            blue = src[(y * 3 + 2) * width : (y * 3 + 3) * width]
            out = dst[y * width * 3 : (y + 1) * width * 3]
            for x in range(width):
                r, g, b = np.float32(red[x]), np.float32(green[x]), np.float32(blue[x])
                out[3 * x] = ((r / whole if divide else r * factor) - mean[0]) / std[0]
                out[3 * x + 1] = ((g / whole if divide else g * factor) - mean[1]) / std[1]
                out[3 * x + 2] = ((b / whole if divide else b * factor) - mean[2]) / std[2]
        return
    # One channel lies the same way whether it is interleaved or not.
    for y in range(height):
        for c in range(channels):
            m, s = mean[c], std[c]
            line = src[(y * channels + c) * width : (y * channels + c + 1) * width]
            out = dst[(c * height + y) * width : (c * height + y + 1) * width]
            if divide:
                for x in range(width):
                    out[x] = (np.float32(line[x]) / whole - m) / s
            else:
                for x in range(width):
                    out[x] = (np.float32(line[x]) * factor - m) / s


def _to_table(src: Any, height: int, width: int, channels: int, table: Any, last: bool, dst: Any) -> None:
    """Bytes to anything, through a table of 256 values for each channel.

    Args:
        src: uint8 (height * channels * width,), rows of colours.
        table: (channels * 256,), the values' bit patterns as unsigned integers.
        last: interleave the channels (channels-last memory) instead of making planes.
        dst: (channels * height * width,), of the table's type.
    """
    for c in range(channels):
        values = table[c * 256 : (c + 1) * 256]
        for y in range(height):
            line = src[(y * channels + c) * width : (y * channels + c + 1) * width]
            if last:
                start = y * width * channels + c
                for x in range(width):
                    dst[start + x * channels] = values[line[x]]
            else:
                out = dst[(c * height + y) * width : (c * height + y + 1) * width]
                for x in range(width):
                    out[x] = values[line[x]]


to_table = compiled(
    *(
        _t.void(_in8, _int, _int, _int, _t.Array(word, 1, "C", readonly=True), _flag, word[::1])
        for word in (_t.uint8, _t.uint16, _t.uint32, _t.uint64)
    )
)(_to_table)


@compiled(_t.void(_in8, _int, _int, _int, _flag, _u8))
def to_bytes(src: Any, height: int, width: int, channels: int, last: bool, dst: Any) -> None:
    """Rows of colours to planes, or to interleaved pixels.

    Args:
        src: uint8 (height * channels * width,), rows of colours.
        last: interleave the channels instead of making planes.
        dst: uint8 (channels * height * width,).
    """
    if last and channels == 3:
        for y in range(height):
            red = src[y * 3 * width : (y * 3 + 1) * width]
            green = src[(y * 3 + 1) * width : (y * 3 + 2) * width]
            blue = src[(y * 3 + 2) * width : (y * 3 + 3) * width]
            out = dst[y * width * 3 : (y + 1) * width * 3]
            for x in range(width):
                out[3 * x] = red[x]
                out[3 * x + 1] = green[x]
                out[3 * x + 2] = blue[x]
        return
    # One channel lies the same way whether it is interleaved or not.
    for c in range(channels):
        for y in range(height):
            line = src[(y * channels + c) * width : (y * channels + c + 1) * width]
            out = dst[(c * height + y) * width : (c * height + y + 1) * width]
            for x in range(width):
                out[x] = line[x]


# Both steps without the GIL in between: on its way back to Python a thread may have to wait for others.


@compiled(_t.void(*_resample_types, _flag, _u8))
def resample_to_bytes(
    src: Any, start: int, pitch: int, height: int, width: int, channels: int, mode: int, x: Any, y: Any,
    vertical_first: bool, numbers: Any, scratch: Any, rows: Any, last: bool, dst: Any,
) -> None:  # fmt: skip
    """``resample`` into ``rows``, then ``to_bytes``."""
    resample(src, start, pitch, height, width, channels, mode, x, y, vertical_first, numbers, scratch, rows)
    to_bytes(rows, y[5], x[5], channels, last, dst)


@compiled(_t.void(*_resample_types, _flag, _inf32, _inf32, _flag, _f32))
def resample_to_affine(
    src: Any, start: int, pitch: int, height: int, width: int, channels: int, mode: int, x: Any, y: Any,
    vertical_first: bool, numbers: Any, scratch: Any, rows: Any, divide: bool, mean: Any, std: Any,
    last: bool, dst: Any,
) -> None:  # fmt: skip
    """``resample`` into ``rows``, then ``to_affine``."""
    resample(src, start, pitch, height, width, channels, mode, x, y, vertical_first, numbers, scratch, rows)
    to_affine(rows, y[5], x[5], channels, divide, mean, std, last, dst)
