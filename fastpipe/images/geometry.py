"""Ask the native core to fold a chain of steps: into the part of an image to decode, and its resampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.native import native
from fastpipe.types import Box, Size

__all__ = ["Region", "fold"]

Fill = tuple[int, int, int]


class Flip(NamedTuple):
    """Mirror left to right and, or, top to bottom."""

    horizontal: bool
    vertical: bool


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
    grey: Literal["before", "after"] | None
    grey_channels: int


_GREY: tuple[Literal["before", "after"] | None, ...] = (None, "before", "after")


def fold(steps: Sequence[Any], image: Size, parameters: npt.ArrayLike = ()) -> Region | None:
    """Fold a chain of steps for an image of a given size.

    Args:
        steps: each a ``native.Step``, in the order in which they are applied.
        image: the size of the image.
        parameters: the sample's numbers, of which a step reads some from ``step.draw`` on.

    Returns:
        The region, or None where one pass of the kernel cannot give the same pixels: a second resize, a
        crop that reaches outside after a resize or after another filled crop of another colour, a fill by
        channel of an image without colours, grey before and after; and where torchvision raises an error.

    >>> from fastpipe.images.steps import BOX, RESIZE, described_step
    >>> steps = [described_step(BOX, outside=2), described_step(RESIZE, size=(50, 50), filter=1)]
    >>> fold(steps, Size(300, 400), [20, 10, 120, 110]).source
    Box(top=10, left=20, height=100, width=100)
    """
    found = native.fold(list(steps), *image, np.ascontiguousarray(parameters, np.float64))
    if found is None:
        return None
    source, placed, canvas, fill, size, mode, vertical_first, window, before, after, grey, channels = found
    return Region(
        Box(*source), Box(*placed), Size(*canvas), fill, Size(*size), None if mode < 0 else mode,
        vertical_first, Box(*window), Flip(*before), Flip(*after), _GREY[grey], channels,
    )  # fmt: skip
