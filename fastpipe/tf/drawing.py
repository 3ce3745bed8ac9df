"""Parameters of augmentations from uniform numbers, by TensorFlow's operations.

The distributions, and which number is for what, are those of ``fastpipe.augment``: ``distributions``,
``affine.RandomAffine``, ``colour.ColorJitter`` and ``erasing.RandomErasing``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

__all__ = ["affine_matrices", "between", "erased_boxes", "jitter"]

_TRIES = 10


def between(u: Any, low: float, high: float) -> Any:
    """Uniform numbers in [low, high)."""
    return low + u * (high - low)


def affine_matrices(
    u: Any, height: Any, width: Any, degrees: tuple[float, float], parts: tuple[float, float],
    scale: tuple[float, float] | None,
) -> Any:  # fmt: skip
    """Where pixels come from, about centres, as ``augment.matrices.inverse_affine`` says.

    Args:
        u: float64 (N, 6), of which the last two are for shears, which there are not.
        height, width: of the images.
        degrees: least and greatest angle, clockwise.
        parts: greatest shifts along x and y, as parts of width and height; they are whole pixels.
        scale: least and greatest factor, or None.

    Returns:
        float32 (N, 6).
    """
    turn = between(u[:, 0], *degrees) * (math.pi / 180)
    most = [parts[0] * tf.cast(width, tf.float64), parts[1] * tf.cast(height, tf.float64)]
    x, y = (tf.round(-most[at] + u[:, 1 + at] * (2 * most[at])) for at in (0, 1))
    factor = tf.ones_like(turn) if scale is None else between(u[:, 3], *scale)
    cos, sin = tf.cos(turn) / factor, tf.sin(turn) / factor
    rows = [cos, sin, -(cos * x + sin * y), -sin, cos, -(-sin * x + cos * y)]
    return tf.cast(tf.stack(rows, axis=1), tf.float32)


def jitter(u: Any, ranges: Mapping[int, tuple[float, float]]) -> tuple[Any, Any]:
    """Factors of some of brightness, contrast, saturation and hue, which are 0 to 3, and their order.

    Args:
        u: float64 (N, 8): for the factors of all four, and for their order.
        ranges: by kind, of the factors of those that are used.

    Returns:
        float32 (N, K), int32 (N, K): of which of the K factors comes first, and so on.
    """
    factors = tf.stack([between(u[:, kind], *limits) for kind, limits in ranges.items()], axis=1)
    places = tf.stack([u[:, 4 + kind] for kind in ranges], axis=1)
    return tf.cast(factors, tf.float32), tf.argsort(places, axis=1, stable=True)


def erased_boxes(
    u: Any, height: Any, width: Any, p: float, scale: tuple[float, float], ratio: tuple[float, float]
) -> Any:
    """The boxes that are erased: top, left, height and width, of which the last two may be 0.

    Args:
        u: float64 (N, 24), of which the last is for noise, which there is not.
        height, width: of the images.
        p: the part of the images.
        scale, ratio: of ``augment.RandomErasing``.

    Returns:
        int32 (N, 4).
    """
    tall, wide = tf.cast(height, tf.float64), tf.cast(width, tf.float64)
    area = tall * wide * between(u[:, : 2 * _TRIES : 2], *scale)
    aspect = tf.exp(between(u[:, 1 : 2 * _TRIES : 2], math.log(ratio[0]), math.log(ratio[1])))
    h, w = tf.round(tf.sqrt(area * aspect)), tf.round(tf.sqrt(area / aspect))
    fits = (h < tall) & (w < wide)
    first = tf.argmax(tf.cast(fits, tf.int32), axis=1, output_type=tf.int32)
    is_any = tf.reduce_any(fits, axis=1) & (u[:, 22] < p)
    h, w = (tf.gather(side, first, axis=1, batch_dims=1) for side in (h, w))
    zero = tf.zeros_like(h)
    h, w = tf.where(is_any, h, zero), tf.where(is_any, w, zero)
    top = tf.minimum(tf.floor(u[:, 20] * (tall - h + 1)), tall - h)
    left = tf.minimum(tf.floor(u[:, 21] * (wide - w + 1)), wide - w)
    return tf.cast(tf.stack([top, left, h, w], axis=1), tf.int32)
