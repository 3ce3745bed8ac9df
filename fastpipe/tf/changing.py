"""Changes of batches of images (N, H, W, C) by TensorFlow's operations, of which XLA makes few loops.

The formulas are those of ``fastpipe.augment``, which are torchvision's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["erased", "flipped", "jittered", "warped"]

_GREY = (0.2989, 0.587, 0.114)
# torchvision makes bytes of floats by this: 1.0 becomes 255, and all bytes are equally wide.
_TO_BYTE = 255.999


def flipped(images: Any, which: Any, axis: int) -> Any:
    """Images mirrored along an axis where ``which``, (N,)."""
    return tf.where(which[:, None, None, None], tf.reverse(images, [axis]), images)


def warped(images: Any, matrices: Any, *, is_nearest: bool, fill: float, of_bytes: bool) -> Any:
    """Images resampled by maps of coordinates about their centres.

    Args:
        images: float32 (N, H, W, C).
        matrices: (N, 6), from pixels of the result to those of the image.
        is_nearest: whether the nearest pixel is taken, in the place of bilinear interpolation.
        fill: what is outside; it fades in at the border as torchvision's does.
        of_bytes: whether values are whole numbers, and have to be afterwards.
    """
    shape = tf.shape(images)
    height, width, channels = shape[1], shape[2], images.shape[3]
    tall, wide = tf.cast(height, tf.float32), tf.cast(width, tf.float32)
    x = (tf.range(wide) + 0.5 * (1 - wide))[None, None, :]
    y = (tf.range(tall) + 0.5 * (1 - tall))[None, :, None]
    xx, xy, x1, yx, yy, y1 = (row[:, None, None] for row in tf.unstack(matrices, axis=1))
    column = (x * xx + y * xy) + x1 + 0.5 * (wide - 1)
    row = (x * yx + y * yy) + y1 + 0.5 * (tall - 1)
    pixels = tf.reshape(images, (shape[0], height * width, channels))

    def at(row: Any, column: Any) -> tuple[Any, Any]:
        """The pixels at whole places, 0 outside; and whether they are inside, as 1 and 0."""
        inside = (column >= 0) & (column < wide) & (row >= 0) & (row < tall)
        place = tf.clip_by_value(row, 0, tall - 1) * wide + tf.clip_by_value(column, 0, wide - 1)
        flat = tf.reshape(tf.cast(place, tf.int32), (shape[0], -1))
        found = tf.reshape(tf.gather(pixels, flat, batch_dims=1), shape)
        is_inside = tf.cast(inside, tf.float32)[..., None]
        return found * is_inside, is_inside

    if is_nearest:
        found, inside = at(tf.round(row), tf.round(column))
        return tf.where(inside < 0.5, fill, found)
    top, left = tf.floor(row), tf.floor(column)
    down, right = (row - top)[..., None], (column - left)[..., None]
    corners = (
        (top, left, (1 - down) * (1 - right)), (top, left + 1, (1 - down) * right),
        (top + 1, left, down * (1 - right)), (top + 1, left + 1, down * right),
    )  # fmt: skip
    found, inside = tf.zeros_like(images), tf.zeros_like(images[..., :1])
    for to_row, to_column, part in corners:
        pixel, is_inside = at(to_row, to_column)
        found, inside = found + pixel * part, inside + is_inside * part
    found = (found - fill) * inside + fill
    return tf.round(found) if of_bytes else found


def jittered(images: Any, factors: Any, order: Any, kinds: Sequence[int], *, of_bytes: bool) -> Any:
    """Images changed in some of brightness, contrast, saturation and hue, which are 0 to 3.

    Args:
        images: float32 (N, H, W, C), in [0, 1]; or whole numbers of 0 … 255.  Saturation and hue are of three
            colours.
        factors: (N, K).
        order: (N, K): which of the K factors comes first, and so on.
        kinds: what each factor is of.
        of_bytes: whether they are whole numbers.
    """
    by_kind = {kind: (place, factors[:, place, None, None, None]) for place, kind in enumerate(kinds)}
    mixed = {kind: found for kind, found in by_kind.items() if kind < 3}
    for turn in tf.unstack(order, axis=1):
        turn = turn[:, None, None, None]
        if mixed:
            images = _blended(images, turn, mixed, of_bytes)
        if 3 in by_kind:
            place, hue = by_kind[3]
            images = _turned_where((turn == place) & (hue != 0), images, hue, of_bytes)
    return images


def _blended(images: Any, turn: Any, used: Mapping[int, tuple[int, Any]], of_bytes: bool) -> Any:
    """Images mixed with black, with their mean, or with their greys, as it is their turn.

    Args:
        images, of_bytes: as above.
        turn: (N, 1, 1, 1): the place whose turn it is.
        used: by kind its place, and its factors (N, 1, 1, 1).
    """
    grey = _luminance(images, of_bytes) if set(used) != {0} else None
    factor, other = tf.ones_like(images[:, :1, :1, :1]), tf.zeros((), images.dtype)
    for kind, (place, factors) in used.items():
        is_turn = turn == place
        factor = tf.where(is_turn, factors, factor)
        if kind == 1:
            other = tf.where(is_turn, tf.reduce_mean(grey, axis=(1, 2, 3), keepdims=True), other)
        elif kind == 2:
            other = tf.where(is_turn, grey, other)
    mixed = tf.clip_by_value(images * factor + other * (1 - factor), 0.0, 255.0 if of_bytes else 1.0)
    mixed = tf.floor(mixed) if of_bytes else mixed
    return tf.where(factor != 1, mixed, images)


def _luminance(images: Any, of_bytes: bool) -> Any:
    if images.shape[3] != 3:
        return images
    red, green, blue = (images[..., at : at + 1] * part for at, part in enumerate(_GREY))
    grey = red + green + blue
    return tf.floor(grey) if of_bytes else grey


def _turned_where(which: Any, images: Any, shift: Any, of_bytes: bool) -> Any:
    bound = 255.0 if of_bytes else 1.0
    turned = _turned(images / bound, shift[..., 0])
    turned = tf.floor(turned * _TO_BYTE) if of_bytes else turned
    return tf.where(which, turned, images)


def _turned(images: Any, shift: Any) -> Any:
    """Colours in [0, 1] with their hue turned, through hue, saturation and value."""
    red, green, _ = tf.unstack(images, axis=3)
    high, low = tf.reduce_max(images, axis=3), tf.reduce_min(images, axis=3)
    span = high - low
    one = tf.ones_like(span)
    is_grey = span == 0
    saturation = span / tf.where(is_grey, one, high)
    of_red, of_green, of_blue = tf.unstack(
        (high[..., None] - images) / tf.where(is_grey, one, span)[..., None], axis=3
    )
    hue = of_green + 4 - of_red
    hue = tf.where(high == green, of_red + 2 - of_blue, hue)
    hue = tf.where(high == red, of_blue - of_green, hue)
    hue = hue / 6 + shift + 2
    sixths = (hue - tf.floor(hue)) * 6
    channels = []
    for begin in (5.0, 3.0, 1.0):
        part = sixths + begin
        part = tf.where(part >= 6, part - 6, part)
        channels.append(high - high * saturation * tf.clip_by_value(tf.minimum(part, 4 - part), 0.0, 1.0))
    return tf.clip_by_value(tf.stack(channels, axis=3), 0.0, 1.0)


def erased(images: Any, boxes: Any, value: float) -> Any:
    """Images with boxes, int32 (N, 4) of top, left, height and width, filled."""
    shape = tf.shape(images)
    top, left, height, width = (side[:, None, None, None] for side in tf.unstack(boxes, axis=1))
    y = tf.range(shape[1])[None, :, None, None]
    x = tf.range(shape[2])[None, None, :, None]
    inside = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
    return tf.where(inside, tf.cast(value, images.dtype), images)
