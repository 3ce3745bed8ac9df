"""Rows of small pictures with titles, headings and captions, drawn by Pillow with the font that it brings."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["GridRow", "Pixels", "draw_grid", "fitted", "grey", "heat"]

Pixels = npt.NDArray[np.uint8]  # (H, W, 3)
INK, MUTED, LINE = "#1f2328", "#6a717b", "#e3e6ea"
_LARGE, _SMALL = 14, 12  # sizes of letters
_LARGE_LINE, _SMALL_LINE = 19, 16
_MARGIN, _GAP, _ROW_GAP = 18, 10, 20
_LEAST_COLUMN = 104  # has room for the longest of most captions
_FEW_PIXELS = 3  # enlarged so often, pixels are shown as squares
# Of matplotlib's viridis, evenly spaced.
_HEAT = (
    (68, 1, 84), (71, 45, 123), (59, 82, 139), (44, 114, 142), (33, 145, 140), (40, 174, 128),
    (94, 201, 98), (173, 220, 48), (253, 231, 37),
)  # fmt: skip


class GridRow(NamedTuple):
    """A row of a grid.

    Attributes:
        title: lines at the left, the first one a name.
        pictures: one for each column.
        captions: lines below each picture.
    """

    title: Sequence[str]
    pictures: Sequence[Pixels]
    captions: Sequence[Sequence[str]]


def heat(values: npt.NDArray[np.float32], low: float, high: float) -> Pixels:
    """Colours of numbers (H, W), from dark to bright; those outside of the range are its ends.

    >>> heat(np.array([[0.0, 9.0]], np.float32), 0.0, 1.0).tolist()
    [[[68, 1, 84], [253, 231, 37]]]
    """
    span = high - low if high > low else 1.0
    place = np.nan_to_num((values - low) / span, nan=0.0, posinf=1.0, neginf=0.0).clip(0, 1)
    place = place * (len(_HEAT) - 1)
    ends = np.arange(len(_HEAT))
    channels = [np.interp(place, ends, channel) for channel in zip(*_HEAT, strict=True)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def grey(values: npt.NDArray[np.float32], low: float, high: float) -> Pixels:
    """Greys of numbers (H, W), from black to white; those outside of the range are its ends.

    >>> grey(np.array([[0.0, 9.0]], np.float32), 0.0, 1.0).tolist()
    [[[0, 0, 0], [255, 255, 255]]]
    """
    span = high - low if high > low else 1.0
    place = np.nan_to_num((values - low) / span, nan=0.0, posinf=1.0, neginf=0.0).clip(0, 1)
    return np.repeat((255 * place).round().astype(np.uint8)[..., None], 3, axis=-1)


def fitted(pixels: Pixels, width: int, height: int, keeps_shape: bool = True) -> Pixels:
    """A picture made as large as a tile.

    Args:
        pixels: the picture.
        width, height: of the tile.
        keeps_shape: reach the tile's borders in one direction only, if the picture is of another shape.
    """
    image = require("PIL.Image", extra="image")
    across, down = width / pixels.shape[1], height / pixels.shape[0]
    if keeps_shape:
        across = down = min(across, down)
    size = (max(1, round(pixels.shape[1] * across)), max(1, round(pixels.shape[0] * down)))
    # A box filter repeats pixels where it enlarges.
    is_smooth = keeps_shape and across < _FEW_PIXELS
    filters = image.Resampling.LANCZOS if is_smooth else image.Resampling.BOX
    return np.asarray(image.fromarray(pixels).resize(size, filters))


def draw_grid(headings: Sequence[str], rows: Sequence[GridRow], note: str = "") -> Image:
    """A picture of all rows.

    Args:
        headings: one above each column.
        rows: from above.
        note: a line at the bottom.
    """
    image = require("PIL.Image", extra="image")
    column = max(_LEAST_COLUMN, *(one.shape[1] for row in rows for one in row.pictures))
    left = _MARGIN + max(_width(line, _LARGE) for row in rows for line in row.title) + 2 * _GAP
    width = left + len(headings) * (column + _GAP) - _GAP + _MARGIN
    heights = [_height(row) for row in rows]
    top = _MARGIN + _LARGE_LINE + _GAP // 2
    bottom = (_SMALL_LINE + _GAP) * bool(note)
    height = top + sum(heights) + _ROW_GAP * (len(rows) - 1) + bottom + _MARGIN
    picture = image.new("RGB", (width, height), "white")
    canvas = require("PIL.ImageDraw", extra="image").Draw(picture)
    for at, heading in enumerate(headings):
        text = _shortened(heading, column, _LARGE)
        canvas.text((left + at * (column + _GAP), _MARGIN), text, INK, font=_font(_LARGE))
    for row, row_height in zip(rows, heights, strict=True):
        if row is not rows[0]:
            y = top - _ROW_GAP // 2
            canvas.line([(_MARGIN, y), (width - _MARGIN, y)], LINE)
        _draw_row(picture, canvas, row, left, top, column)
        top += row_height + _ROW_GAP
    if note:
        text = _shortened(note, width - 2 * _MARGIN, _SMALL)
        canvas.text((_MARGIN, height - _MARGIN - _SMALL_LINE), text, MUTED, font=_font(_SMALL))
    found: Image = picture
    return found


def _draw_row(picture: Any, canvas: Any, row: GridRow, left: int, top: int, column: int) -> None:
    image = require("PIL.Image", extra="image")
    for at, line in enumerate(row.title):
        # The last line of several is about the first ones.
        is_name = at == 0 or at < len(row.title) - 1
        place = (_MARGIN, top + at * _LARGE_LINE)
        canvas.text(place, line, INK if is_name else MUTED, font=_font(_LARGE if is_name else _SMALL))
    below = top + _tallest(row)
    for at, (pixels, lines) in enumerate(zip(row.pictures, row.captions, strict=True)):
        x = left + at * (column + _GAP)
        picture.paste(image.fromarray(pixels), (x, top))
        for number, line in enumerate(lines):
            place = (x, below + _GAP // 2 + number * _SMALL_LINE)
            canvas.text(place, _shortened(line, column, _SMALL), MUTED, font=_font(_SMALL))


def _tallest(row: GridRow) -> int:
    return max(len(one) for one in row.pictures)


def _height(row: GridRow) -> int:
    lines = max(len(one) for one in row.captions)
    captions = lines * _SMALL_LINE + _GAP // 2 if lines else 0
    return max(_tallest(row) + captions, len(row.title) * _LARGE_LINE)


@functools.cache
def _font(size: int) -> Any:
    return require("PIL.ImageFont", extra="image").load_default(size)


def _width(text: str, size: int) -> int:
    return int(_font(size).getlength(text)) + 1


def _shortened(text: str, width: int, size: int) -> str:
    """Text without the end that has no room."""
    if _width(text, size) <= width:
        return text
    while text and _width(f"{text}...", size) > width:
        text = text[:-1]
    return f"{text.rstrip()}..."
