"""A chain of crops, one resize, flips and more crops, folded into one region of the image.

Folding says which pixels must be decoded and how one kernel call turns them into the output.
What cannot be folded without changing a pixel is refused (None), and the caller runs the
chain step by step instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from fastpipe.types import Box, Size

__all__ = ["Crop", "Flip", "Grey", "Operation", "Region", "Resize", "fold"]

Fill = tuple[int, int, int]


class Crop(NamedTuple):
    """Cut a box, which may reach outside; what lies outside is filled, if there is a fill.

    ``by_channel`` says that the fill was given as three values, which torchvision refuses on an
    image of one channel, also where nothing is filled.
    """

    box: Box
    fill: Fill | None = (0, 0, 0)
    by_channel: bool = False


class Resize(NamedTuple):
    """Resample to a size; ``mode`` is a constant of ``kernels``.  Each of the two passes rounds."""

    size: Size
    mode: int
    vertical_first: bool = False


class Flip(NamedTuple):
    """Mirror left to right and, or, top to bottom."""

    horizontal: bool
    vertical: bool


_STILL = Flip(False, False)


class Grey(NamedTuple):
    """Luma, in one channel or copied to three."""

    channels: int


Operation = Crop | Resize | Flip | Grey


class Region(NamedTuple):
    """What to decode and how to get from there to the output.

    Attributes:
        source: the part of the image that is used; it lies inside the image.
        placed: where ``source`` lies on the canvas, which is what is resampled.
        canvas: size of the canvas; where ``source`` does not cover it, it is filled.
        fill: the colour of that.
        size: the size to which the canvas is resampled.
        mode: the filter, a constant of ``kernels``; None where nothing is resampled.
        vertical_first: the order of the passes.
        window: the part of the resampled canvas that is the output.
        flip_before, flip_after: mirror before and after resampling (rounding differs).
        grey: when to turn the colours to grey, if at all.
        grey_channels: 1 or 3.
    """

    source: Box
    placed: Box
    canvas: Size
    fill: Fill
    size: Size
    mode: int | None
    vertical_first: bool
    window: Box
    flip_before: Flip
    flip_after: Flip
    grey: Literal["before", "after"] | None = None
    grey_channels: int = 0


def fold(operations: Sequence[Operation], image: Size) -> Region | None:
    """Fold a chain of operations on an image of a given size.

    Args:
        operations: in the order in which they are applied.
        image: the size of the image.

    Returns:
        The region, or None where one pass of the kernel cannot give the same pixels: a second
        resize, a crop that reaches outside after a resize or after another filled crop of
        another colour, a fill by channel of an image without colours, grey before and after.

    >>> fold([Crop(Box(10, 20, 100, 100)), Resize(Size(50, 50), 1)], Size(300, 400)).source
    Box(top=10, left=20, height=100, width=100)
    """
    whole = Box(0, 0, *image)
    region: Region | None = Region(whole, whole, image, (0, 0, 0), image, None, False, whole, _STILL, _STILL)
    for operation in operations:
        if region is None:
            return None
        if isinstance(operation, Crop):
            crop = _crop_canvas if region.mode is None else _crop_window
            refused = operation.by_channel and region.grey_channels == 1
            region = None if refused else crop(region, operation)
        elif isinstance(operation, Resize):
            region = _resize(region, operation)
        elif isinstance(operation, Flip):
            region = _flip(region, operation)
        else:
            region = _grey(region, operation)
    return region


def _resize(region: Region, operation: Resize) -> Region | None:
    current = Size(region.window.height, region.window.width)
    if operation.size == current:  # every library returns the image as it is
        return region
    if region.mode is not None:
        return None
    size, mode, vertical_first = operation
    # In one piece, here and below: it is done for each image, and ``_replace`` takes five times as long.
    return Region(
        region.source, region.placed, region.canvas, region.fill, size, mode, vertical_first,
        Box(0, 0, *size), region.flip_before, region.flip_after, region.grey, region.grey_channels,
    )  # fmt: skip


def _flip(region: Region, operation: Flip) -> Region:
    is_before = region.mode is None
    old = region.flip_before if is_before else region.flip_after
    new = Flip(old.horizontal != operation.horizontal, old.vertical != operation.vertical)
    before, after = (new, region.flip_after) if is_before else (region.flip_before, new)
    return Region(
        region.source, region.placed, region.canvas, region.fill, region.size, region.mode,
        region.vertical_first, region.window, before, after, region.grey, region.grey_channels,
    )  # fmt: skip


def _grey(region: Region, operation: Grey) -> Region | None:
    if region.grey is not None:
        return None
    when: Literal["before", "after"] = "before" if region.mode is None else "after"
    return region._replace(grey=when, grey_channels=operation.channels)


def _crop_canvas(region: Region, operation: Crop) -> Region | None:
    """Crop before the resize: the crop becomes the canvas."""
    box = _mirrored(operation.box, region.canvas, region.flip_before)
    source, placed, canvas = region.source, region.placed, region.canvas
    outside = box.top < 0 or box.left < 0 or _bottom(box) > canvas.height or _right(box) > canvas.width
    covered = placed == (0, 0, *canvas)
    if outside and (
        operation.fill is None
        or (not covered and operation.fill != region.fill)
        or (region.grey is not None and len(set(operation.fill)) > 1)
    ):
        return None
    top, left = max(box.top, placed.top), max(box.left, placed.left)
    bottom, right = min(_bottom(box), _bottom(placed)), min(_right(box), _right(placed))
    if bottom <= top or right <= left:  # nothing of the image is left
        return None
    height, width = bottom - top, right - left
    size = Size(box.height, box.width)
    return Region(
        Box(source.top + top - placed.top, source.left + left - placed.left, height, width),
        Box(top - box.top, left - box.left, height, width), size,
        operation.fill if outside and operation.fill else region.fill, size, region.mode,
        region.vertical_first, Box(0, 0, *size), region.flip_before, region.flip_after, region.grey,
        region.grey_channels,
    )  # fmt: skip


def _crop_window(region: Region, operation: Crop) -> Region | None:
    """Crop after the resize: the output is a smaller part of the resampled canvas."""
    window = region.window
    box = _mirrored(operation.box, Size(window.height, window.width), region.flip_after)
    if box.top < 0 or box.left < 0 or _bottom(box) > window.height or _right(box) > window.width:
        return None
    return region._replace(window=Box(window.top + box.top, window.left + box.left, box.height, box.width))


def _mirrored(box: Box, size: Size, flip: Flip) -> Box:
    """A box of a mirrored image, in the coordinates of the image that is not mirrored."""
    if not (flip.horizontal or flip.vertical):
        return box
    top = size.height - _bottom(box) if flip.vertical else box.top
    left = size.width - _right(box) if flip.horizontal else box.left
    return Box(top, left, box.height, box.width)


def _bottom(box: Box) -> int:
    return box.top + box.height


def _right(box: Box) -> int:
    return box.left + box.width
