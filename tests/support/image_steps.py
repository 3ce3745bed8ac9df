"""Crops, resizes, flips and grey, and the native steps that they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fastpipe.core.types import Box, Size
from fastpipe.images import pixels as geometry
from fastpipe.images.pillow_rules import pillow_filter
from fastpipe.images.pixels import Region
from fastpipe.images.steps import BOX, FLIP, GREY, RESIZE, described_step


class Crop(NamedTuple):
    """Cut a box, which may reach outside; what lies outside is filled, if there is a fill."""

    box: Box
    fill: tuple[int, int, int] | None = (0, 0, 0)


class Resize(NamedTuple):
    """Resample to a size; ``mode`` is a constant of ``kernels``, ``order`` a ``PassOrder``."""

    size: Size
    mode: int
    order: int = 0


class Flip(NamedTuple):
    """Mirror left to right and, or, top to bottom."""

    horizontal: bool
    vertical: bool


class Grey(NamedTuple):
    """Luma, in one channel or copied to three."""

    channels: int


Operation = Crop | Resize | Flip | Grey


def pillow_resize(mode: int, to: Size) -> Resize:
    """A resize as the installed Pillow does it."""
    found = pillow_filter(mode)
    assert found is not None
    return Resize(to, *found)


def fold(operations: Sequence[Operation], size: Size) -> Region | None:
    """What operations on an image of a size come to."""
    steps: list[Any] = []
    numbers: list[float] = []
    for operation in operations:
        if isinstance(operation, Crop):
            box, fill = operation.box, operation.fill or (0, 0, 0)
            step = described_step(BOX, outside=2, has_fill=operation.fill is not None, fill=fill)
            step.draw = len(numbers)
            numbers += [box.left, box.top, box.left + box.width, box.top + box.height]
            steps.append(step)
        elif isinstance(operation, Resize):
            to, mode, order = operation
            steps.append(described_step(RESIZE, size=tuple(to), filter=mode, order=order))
        elif isinstance(operation, Flip):
            for is_horizontal, is_done in zip((True, False), operation, strict=True):
                step = described_step(FLIP, probability=float(is_done), horizontal=is_horizontal)
                step.draw = len(numbers)
                numbers.append(0.5)
                steps.append(step)
        else:
            steps.append(described_step(GREY, channels=operation.channels))
    return geometry.fold(steps, size, numbers)
