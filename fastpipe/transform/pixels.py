"""From an encoded image and a region to output pixels: decode the part, run the kernels."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe.protocols import EncodedImage
from fastpipe.transform import kernels, weights
from fastpipe.transform.geometry import Region
from fastpipe.transform.reduction import reduction
from fastpipe.types import Box, Size, UInt8Array

__all__ = ["Conversion", "Resampling", "convert", "draw", "part_of", "render", "resampling_of"]

Words = npt.NDArray[Any]


@dataclass(frozen=True)
class Conversion:
    """How bytes become the output's values.

    Attributes:
        kind: ``"bytes"`` leaves them, ``"affine"`` computes float32, ``"table"`` looks up.
        channels: colour channels.
        interleaved: channels-last memory.
        word: NumPy type of an output element in memory.
        divide, mean, std: of ``kernels.to_affine``.
        table: of ``kernels.to_table``, as unsigned integers.
    """

    kind: Literal["bytes", "affine", "table"]
    channels: int
    interleaved: bool
    word: Any = np.uint8
    divide: bool = True
    mean: npt.NDArray[np.float32] | None = None
    std: npt.NDArray[np.float32] | None = None
    table: Words | None = None

    @property
    def affine(self) -> tuple[bool, bytes, bytes]:
        """What an affine conversion computes; equal for those that compute the same."""
        assert self.mean is not None
        assert self.std is not None
        return self.divide, self.mean.tobytes(), self.std.tobytes()

    def of_tensor(self, batch: Any) -> Any:
        """An affine conversion on any device: the kernel's numbers, by the same float32 arithmetic.

        Args:
            batch: uint8 tensor (N, C, H, W).

        Returns:
            float32 (N, C, H, W).
        """
        torch = require("torch", extra="torch")
        mean, std = (torch.from_numpy(part).to(batch.device).view(-1, 1, 1) for part in (self.mean, self.std))
        values = batch.to(torch.float32)
        if self.divide:  # by a tensor: on a GPU, torch multiplies by the inverse of a number
            values = values.div_(torch.full((), 255.0, device=values.device))
        else:
            values = values.mul_(float(np.float32(1) / np.float32(255)))
        return values.sub_(mean).div_(std)


_LARGEST_KEPT = 1 << 23  # elements: one enormous image must not cost memory for ever


class _Scratch(threading.local):
    """Arrays that a thread reuses from sample to sample; they only grow, up to a limit."""

    def __init__(self) -> None:
        self._arrays: dict[str, Any] = {}

    def array(self, name: str, size: int, dtype: Any) -> Any:
        if size > _LARGEST_KEPT:
            return np.empty(size, dtype)
        array = self._arrays.get(name)
        if array is None or array.size < size:
            self._arrays[name] = array = np.empty(max(size, 1 << 12) * 5 // 4, dtype)
        return array[:size]


_scratch = _Scratch()


class _Source(NamedTuple):
    """Pixels, and what is to be done to them.

    Attributes:
        memory: uint8 (N,).
        start, pitch: where in it the first pixel is, and how far apart rows begin.
        mode: the filter.
        x, y: the axes along which they are resampled.
    """

    memory: UInt8Array
    start: int
    pitch: int
    mode: int
    x: kernels.Axis
    y: kernels.Axis

    @property
    def size(self) -> Size:
        return Size(self.y.high - self.y.low, self.x.high - self.x.low)


class Resampling(NamedTuple):
    """How a part of an image becomes an output of three colours, for whoever decodes and resamples elsewhere.

    Attributes:
        part: what of the image is needed.
        mode: the filter, a constant of ``weights``.
        x, y: the axes along which it is resampled.
        vertical_first: the order of the passes, each of which rounds.
    """

    part: Box
    mode: int
    x: kernels.Axis
    y: kernels.Axis
    vertical_first: bool


def resampling_of(image: EncodedImage, region: Region) -> Resampling | None:
    """All that ``render`` does with an image; None where that is more than decoding and resampling a part.

    Args:
        image, region: as of ``render``.
    """
    mode = weights.NEAREST_FLOOR if region.mode is None else region.mode
    if region.grey is not None or _is_reduced(image, region, mode):
        return None
    x, y = _whole_axes(region, mode)
    needed = _needed(x, y)
    part = _placed_part(region, needed)
    if part is None or part[2:] != needed[2:]:
        return None
    return Resampling(part, mode, x, y, region.vertical_first)


def render(image: EncodedImage, region: Region) -> tuple[UInt8Array, Size, int]:
    """Decode and resample.

    Args:
        image: the encoded image.
        region: what of it, and how; see :class:`fastpipe.transform.geometry.Region`.

    Returns:
        The pixels as rows of colours, uint8 (height * channels * width,), in memory that the
        thread's next call overwrites; their size; the number of channels (1 or 3).
    """
    source, channels = _source(image, region)
    size = Size(region.window.height, region.window.width)
    arguments, pixels = _resampling(source, region, channels)
    kernels.resample(*arguments)
    if region.grey == "after":
        pixels, channels = _grey(pixels, size.height, size.width, interleaved=False), 1
    return pixels, size, channels


def draw(image: EncodedImage, region: Region, how: Conversion, out: Words) -> None:
    """Decode, resample, and write what the output wants: ``render`` and ``convert``.

    Args:
        image, region: as of ``render``.
        how, out: as of ``convert``.
    """
    if region.grey is not None or how.channels != 3 or how.kind == "table":
        convert(*render(image, region), how, out)
        return
    arguments, _ = _resampling(_source(image, region)[0], region, 3)
    if how.kind == "bytes":
        kernels.resample_to_bytes(*arguments, how.interleaved, out)
    else:
        kernels.resample_to_affine(*arguments, how.divide, how.mean, how.std, how.interleaved, out)


def part_of(image: EncodedImage, region: Region) -> Box | None:
    """What of an image ``draw`` and ``render`` will ask for by its ``region``; None where they will not.

    Args:
        image, region: as of ``render``.
    """
    mode = weights.NEAREST_FLOOR if region.mode is None else region.mode
    if _is_reduced(image, region, mode):
        return None
    return _placed_part(region, _needed(*_whole_axes(region, mode)))


def _is_reduced(image: EncodedImage, region: Region, mode: int) -> bool:
    """Whether an image is made smaller while it is decoded."""
    factor = reduction(region, mode, image.size)
    return factor > 1 and image.reduced(factor) is not None


def _source(image: EncodedImage, region: Region) -> tuple[_Source, int]:
    """The pixels that a region needs, and how many channels they have."""
    mode = weights.NEAREST_FLOOR if region.mode is None else region.mode
    source = _reduced_source(image, region, mode) or _exact_source(image, region, mode)
    if region.grey != "before":
        return source, 3
    height, width = source.size
    rows = source.memory[source.start :]
    if source.pitch != 3 * width:
        parts = (rows[y * source.pitch :][: 3 * width] for y in range(height))
        rows = np.concatenate(list(parts))
    grey = _grey(rows, height, width, interleaved=True)
    return source._replace(memory=grey, start=0, pitch=width), 1


def _resampling(source: _Source, region: Region, channels: int) -> tuple[tuple[Any, ...], UInt8Array]:
    """The arguments of ``kernels.resample``, and the memory that it will write."""
    height, width = source.size
    numbers, scratch = kernels.scratch_sizes(height, width, channels, source.x, source.y)
    pixels = _scratch.array("pixels", channels * region.window.height * region.window.width, np.uint8)
    return (
        source.memory, source.start, source.pitch, height, width, channels, source.mode, tuple(source.x),
        tuple(source.y), region.vertical_first, _scratch.array("numbers", numbers, np.int32),
        _scratch.array("bytes", scratch, np.uint8), pixels,
    ), pixels  # fmt: skip


def convert(pixels: UInt8Array, size: Size, channels: int, how: Conversion, out: Words) -> None:
    """Write pixels as the output wants them.

    Args:
        pixels, size, channels: as ``render`` returned them.
        how: the conversion; where it has more channels than the pixels, grey is copied.
        out: ``how.word`` (how.channels * height * width,), written completely.
    """
    height, width = size
    if channels != how.channels:
        rows = pixels.reshape(height, 1, width)
        pixels = np.ascontiguousarray(np.broadcast_to(rows, (height, how.channels, width))).reshape(-1)
    if how.kind == "bytes":
        kernels.to_bytes(pixels, height, width, how.channels, how.interleaved, out)
    elif how.kind == "affine":
        kernels.to_affine(
            pixels, height, width, how.channels, how.divide, how.mean, how.std, how.interleaved, out
        )
    else:
        assert how.table is not None
        words = out.view(how.table.dtype)
        kernels.to_table(pixels, height, width, how.channels, how.table, how.interleaved, words)


def _axes(region: Region, mode: int, canvas: Size, part8: Box) -> tuple[kernels.Axis, kernels.Axis]:
    """How columns and rows are resampled, where so many eighths of a canvas become the output."""
    window, before, after = region.window, region.flip_before, region.flip_after
    return (
        kernels.axis(mode, canvas.width, region.size.width, window.left, window.width,
                     before.horizontal, after.horizontal, part8.left, part8.width),
        kernels.axis(mode, canvas.height, region.size.height, window.top, window.height,
                     before.vertical, after.vertical, part8.top, part8.height),
    )  # fmt: skip


def _whole_axes(region: Region, mode: int) -> tuple[kernels.Axis, kernels.Axis]:
    """The same of all of the region's canvas."""
    canvas = region.canvas
    return _axes(region, mode, canvas, Box(0, 0, 8 * canvas.height, 8 * canvas.width))


def _needed(x: kernels.Axis, y: kernels.Axis) -> Box:
    """The part of a canvas that is resampled."""
    return Box(y.low, x.low, y.high - y.low, x.high - x.low)


def _exact_source(image: EncodedImage, region: Region, mode: int) -> _Source:
    """The pixels that are needed, and the axes along which they are resampled."""
    canvas, placed = region.canvas, region.source
    x, y = _whole_axes(region, mode)
    if region.placed == Box(0, 0, *canvas):  # no fill anywhere
        rows = image.rows(placed.top + y.low, y.high - y.low)
        if rows is not None:
            return _Source(rows.reshape(-1), 3 * (placed.left + x.low), 3 * rows.shape[1], mode, x, y)
    pixels = _decode(image, region, _needed(x, y))
    return _Source(pixels.reshape(-1), 0, 3 * (x.high - x.low), mode, x, y)


def _reduced_source(image: EncodedImage, region: Region, mode: int) -> _Source | None:
    """The same from an image that was made smaller while it was decoded; None where it is not to be,
    or that is not worth while."""
    factor = reduction(region, mode, image.size)
    reduced = image.reduced(factor) if factor > 1 else None
    if reduced is None:
        return None
    part8 = Box(*(8 // factor * number for number in region.source))
    x, y = _axes(region, mode, reduced.size, part8)
    rows = reduced.rows(y.high)
    if rows is None:
        return None
    pitch = 3 * rows.shape[1]
    return _Source(rows.reshape(-1), y.low * pitch + 3 * x.low, pitch, mode, x, y)


def _decode(image: EncodedImage, region: Region, needed: Box) -> UInt8Array:
    """The needed part of the canvas: decoded, and filled where the image does not reach."""
    part = _placed_part(region, needed)
    if part is not None and part[2:] == needed[2:]:  # no fill anywhere
        return image.region(part)
    canvas: UInt8Array = np.empty((needed.height, needed.width, 3), np.uint8)
    canvas[:] = region.fill
    if part is not None:
        placed, source = region.placed, region.source
        top = placed.top + part.top - source.top - needed.top
        left = placed.left + part.left - source.left - needed.left
        canvas[top : top + part.height, left : left + part.width] = image.region(part)
    return canvas


def _placed_part(region: Region, needed: Box) -> Box | None:
    """The part of the image that lies in a part of the canvas; None where it has none there."""
    placed, source = region.placed, region.source
    top, left = max(needed.top, placed.top), max(needed.left, placed.left)
    bottom = min(needed.top + needed.height, placed.top + placed.height)
    right = min(needed.left + needed.width, placed.left + placed.width)
    if bottom <= top or right <= left:
        return None
    return Box(source.top + top - placed.top, source.left + left - placed.left, bottom - top, right - left)


def _grey(pixels: UInt8Array, height: int, width: int, *, interleaved: bool) -> UInt8Array:
    grey = _scratch.array(f"grey {interleaved}", height * width, np.uint8)
    kernels.grey(pixels.reshape(-1), height, width, interleaved, grey)
    return grey  # type: ignore[no-any-return]
