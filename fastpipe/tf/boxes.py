"""Bounding boxes: from what a table says to pixels of an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastpipe.core.types import Box, Size
from fastpipe.errors import OptionError

__all__ = ["BadBoxError", "Boxes", "boxes_of"]


class BadBoxError(ValueError):
    """A box that its image has not."""


@dataclass(frozen=True)
class Boxes:
    """The boxes of a column.

    Attributes:
        edges: float64 (N, 4): left, top, right, bottom; in pixels, or in parts of the image.
        is_relative: the latter.
    """

    edges: npt.NDArray[np.float64]
    is_relative: bool

    def __len__(self) -> int:
        return len(self.edges)

    def of(self, row: int, image: Size, outside: Literal["error", "clip", "pad"]) -> Box:
        """The box of a row in its image, in whole pixels: rounded as ``PIL.Image.crop`` does.

        Raises:
            BadBoxError: it is empty, or reaches outside and is not to.
        """
        left, top, right, bottom = self.edges[row].tolist()
        if self.is_relative:
            left, top, right, bottom = (
                left * image.width, top * image.height, right * image.width, bottom * image.height,
            )  # fmt: skip
        left, top, right, bottom = round(left), round(top), round(right), round(bottom)
        if outside == "clip":
            left, top = max(left, 0), max(top, 0)
            right, bottom = min(right, image.width), min(bottom, image.height)
        is_inside = left >= 0 and top >= 0 and right <= image.width and bottom <= image.height
        is_apart = right <= 0 or bottom <= 0 or left >= image.width or top >= image.height
        if is_apart or (outside == "error" and not is_inside):
            raise BadBoxError(
                f"the box from ({left}, {top}) to ({right}, {bottom}), x before y, reaches outside the image "
                f"of {image.width} × {image.height} pixels: correct it, or say outside='clip' or, for black "
                "there, outside='pad'"
            )
        if right <= left or bottom <= top:
            raise BadBoxError(
                f"the box from ({left}, {top}) to ({right}, {bottom}), x before y, has no pixels: correct it "
                "or leave the row out"
            )
        return Box(top, left, bottom - top, right - left)


def boxes_of(values: Any, box_format: str, name: str) -> Boxes:
    """Boxes as a table has them.

    Args:
        values: (N, 4) numbers.
        box_format: one of ``options.BOX_FORMATS``.
        name: of the column or modality, for errors.

    Raises:
        OptionError: they are no boxes, or one is empty.

    >>> boxes_of([[10, 20, 30, 40]], "xywh", "photo").edges
    array([[10., 20., 40., 60.]])
    """
    try:
        numbers = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise OptionError(f"boxes of {name!r} must be four numbers for each row") from None
    if numbers.ndim != 2 or numbers.shape[1] != 4:
        raise OptionError(
            f"boxes of {name!r} must be four numbers for each row, got an array of shape {numbers.shape}"
        )
    is_relative = box_format.startswith("rel_")
    order = box_format.removeprefix("rel_")
    first, second = numbers[:, :2], numbers[:, 2:]
    if order == "yxyx":
        edges = numbers[:, [1, 0, 3, 2]]
    elif order == "xywh":
        edges = np.hstack([first, first + second])
    elif order == "center_xywh":
        edges = np.hstack([first - second / 2, first + second / 2])
    else:
        edges = numbers
    _check(edges, numbers, box_format, name, is_relative)
    return Boxes(np.ascontiguousarray(edges), is_relative)


def _check(edges: Any, numbers: Any, box_format: str, name: str, is_relative: bool) -> None:
    # Beyond int32, which TensorFlow's operations count pixels in, no image reaches.
    is_bad = ~(np.abs(edges) < 2**31).all(axis=1) | (edges[:, 2:] <= edges[:, :2]).any(axis=1)
    if is_bad.any():
        row = int(np.flatnonzero(is_bad)[0])
        raise OptionError(
            f"row {row}: the box {numbers[row].tolist()} of {name!r} is empty, endless or no numbers, as "
            f"box_format={box_format!r} reads it: correct it, leave the row out, or name another box_format"
        )
    if is_relative and edges.size and np.abs(edges).max() > 2:
        row = int(np.flatnonzero((np.abs(edges) > 2).any(axis=1))[0])
        raise OptionError(
            f"row {row}: the box {numbers[row].tolist()} of {name!r} is in pixels, but box_format="
            f"{box_format!r} means parts of the image, from 0 to 1"
        )
