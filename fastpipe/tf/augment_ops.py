"""The steps of ``Augment`` as TensorFlow operations, which XLA fuses into few loops.

The random numbers, the distributions and the formulas are the same as in ``fastpipe.augment``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

# As in ``augment.parameters``: a batch's random numbers differ from the random numbers of a dataset's
# transform.
STREAM = 0x6175676D656E74

_GREY = (0.2989, 0.587, 0.114)
_TO_BYTE = 255.999  # torchvision's factor from floats to bytes: each byte covers an equal range
_TRIES = 10


def change(
    step: str, arguments: Mapping[str, Any], ranges: Mapping[int, tuple[float, float]], values: Any, u: Any,
    of_bytes: bool,
) -> Any:  # fmt: skip
    """Do one step of ``Augment`` on float32 (N, H, W, C). ``u`` are uniform random numbers, float64 (N, K).

    ``ranges`` are the ranges of the colour changes in use; 0 to 3 are brightness, contrast, saturation and
    hue.  ``of_bytes`` says whether the values are whole numbers from 0 to 255. The values of the result must
    then be whole numbers from 0 to 255 as well.
    """
    low, high = (0.0, 1.0) if of_bytes else arguments["value_range"]
    if step in ("horizontal_flip", "vertical_flip"):
        which = (u[:, 0] < arguments[step])[:, None, None, None]
        return tf.where(which, tf.reverse(values, [2 if step == "horizontal_flip" else 1]), values)
    if step == "affine":
        matrices = _affine_matrices(u, values, arguments)
        is_nearest = arguments["interpolation"] == "nearest"
        fill = arguments["fill"] - low  # the least value becomes 0, as in torchvision
        shifted = values - low if low else values
        made = _warped(shifted, matrices, is_nearest=is_nearest, fill=fill, of_bytes=of_bytes)
        return made + low if low else made
    if step == "cutout":
        return _erased(values, u, arguments)
    if not ranges:
        return values
    factors = tf.stack([_between(u[:, kind], *limits) for kind, limits in ranges.items()], axis=1)
    places = tf.stack([u[:, 4 + kind] for kind in ranges], axis=1)
    order = tf.argsort(places, axis=1, stable=True)
    factors = tf.cast(factors, tf.float32)
    if (low, high) == (0.0, 1.0):
        return _jittered(values, factors, order, list(ranges), of_bytes)
    scaled = (values - low) / (high - low)
    return _jittered(scaled, factors, order, list(ranges), False) * (high - low) + low


def _between(u: Any, low: float, high: float) -> Any:
    return low + u * (high - low)


# ---- affine maps ---------------------------------------------------------------------------------


def _affine_matrices(u: Any, images: Any, arguments: Mapping[str, Any]) -> Any:
    """Draw the matrices of ``augment.matrices.inverse_affine`` relative to the centres: float32 (N, 6).

    The last two of the six numbers in ``u`` would be shears. These two numbers are unused.
    """
    shape = tf.shape(images)
    turn = _between(u[:, 0], *arguments["rotation"]) * (math.pi / 180)
    parts = arguments["translation"]
    most = [parts[0] * tf.cast(shape[2], tf.float64), parts[1] * tf.cast(shape[1], tf.float64)]
    x, y = (tf.round(-most[at] + u[:, 1 + at] * (2 * most[at])) for at in (0, 1))
    zoom = arguments["zoom"]
    factor = tf.ones_like(turn) if zoom == (1, 1) else _between(u[:, 3], *zoom)
    cos, sin = tf.cos(turn) / factor, tf.sin(turn) / factor
    rows = [cos, sin, -(cos * x + sin * y), -sin, cos, -(-sin * x + cos * y)]
    return tf.cast(tf.stack(rows, axis=1), tf.float32)


def _warped(images: Any, matrices: Any, *, is_nearest: bool, fill: float, of_bytes: bool) -> Any:
    """Resample images with matrices, (N, 6), from pixels of the result to pixels of the image.

    Pixels are relative to the centres.  ``fill`` is the value outside the image. At the border, ``fill`` is
    blended with the image as in torchvision.
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
        """Return the pixels at integer positions, 0 outside, and a mask: 1 inside, 0 outside."""
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


# ---- colours -------------------------------------------------------------------------------------


def _jittered(images: Any, factors: Any, order: Any, kinds: Sequence[int], of_bytes: bool) -> Any:
    """Change colours by K factors, (N, K). In ``kinds``, 0 to 3 are brightness, contrast, saturation and hue.

    ``order``, (N, K), is the order in which the K factors are applied.  Images are floats in [0, 1], or
    bytes.
    """
    by_kind = {kind: (place, factors[:, place, None, None, None]) for place, kind in enumerate(kinds)}
    mixed = {kind: found for kind, found in by_kind.items() if kind < 3}
    for turn in tf.unstack(order, axis=1):
        turn = turn[:, None, None, None]
        if mixed:
            images = _blended(images, turn, mixed, of_bytes)
        if 3 in by_kind:
            place, shift = by_kind[3]
            images = tf.where((turn == place) & (shift != 0), _hue_turned(images, shift, of_bytes), images)
    return images


def _blended(images: Any, turn: Any, used: Mapping[int, tuple[int, Any]], of_bytes: bool) -> Any:
    """Blend each image with black, with its mean or with its grey image, as its current change requires.

    ``used`` has the index and the factors, (N, 1, 1, 1), of each kind of change. ``turn`` is the index of
    each image's current change.
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


def _hue_turned(images: Any, shift: Any, of_bytes: bool) -> Any:
    """Change the hue of colours by fractions of a turn, (N, 1, 1, 1), in the model hue-saturation-value."""
    images = images / (255.0 if of_bytes else 1.0)
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
    hue = hue / 6 + shift[..., 0] + 2
    sixths = (hue - tf.floor(hue)) * 6
    channels = []
    for begin in (5.0, 3.0, 1.0):
        part = sixths + begin
        part = tf.where(part >= 6, part - 6, part)
        channels.append(high - high * saturation * tf.clip_by_value(tf.minimum(part, 4 - part), 0.0, 1.0))
    turned = tf.clip_by_value(tf.stack(channels, axis=3), 0.0, 1.0)
    return tf.floor(turned * _TO_BYTE) if of_bytes else turned


# ---- boxes ---------------------------------------------------------------------------------------


def _erased(images: Any, u: Any, arguments: Mapping[str, Any]) -> Any:
    """Fill a box in some images, drawn as ``augment.RandomErasing`` draws it.

    The last of the 24 numbers in ``u`` would be the seed of noise. That number is unused.
    """
    shape = tf.shape(images)
    tall, wide = tf.cast(shape[1], tf.float64), tf.cast(shape[2], tf.float64)
    ratio = arguments["cutout_ratio"]
    area = tall * wide * _between(u[:, : 2 * _TRIES : 2], *arguments["cutout_scale"])
    aspect = tf.exp(_between(u[:, 1 : 2 * _TRIES : 2], math.log(ratio[0]), math.log(ratio[1])))
    h, w = tf.round(tf.sqrt(area * aspect)), tf.round(tf.sqrt(area / aspect))
    fits = (h < tall) & (w < wide)
    first = tf.argmax(tf.cast(fits, tf.int32), axis=1, output_type=tf.int32)
    is_any = tf.reduce_any(fits, axis=1) & (u[:, 22] < arguments["cutout"])
    h, w = (tf.gather(side, first, axis=1, batch_dims=1) for side in (h, w))
    zero = tf.zeros_like(h)
    h, w = tf.where(is_any, h, zero), tf.where(is_any, w, zero)
    top = tf.minimum(tf.floor(u[:, 20] * (tall - h + 1)), tall - h)
    left = tf.minimum(tf.floor(u[:, 21] * (wide - w + 1)), wide - w)
    top, left, h, w = (tf.cast(side, tf.int32)[:, None, None, None] for side in (top, left, h, w))
    y = tf.range(shape[1])[None, :, None, None]
    x = tf.range(shape[2])[None, None, :, None]
    inside = (y >= top) & (y < top + h) & (x >= left) & (x < left + w)
    return tf.where(inside, tf.cast(arguments["fill"], images.dtype), images)


# ---- random numbers ------------------------------------------------------------------------------

_GOLDEN = 0x9E37_79B9_7F4A_7C15
_MIX_1 = 0xBF58_476D_1CE4_E5B9
_MIX_2 = 0x94D0_49BB_1331_11EB


def uniforms(seed: Any, epoch: Any, draws: Any, count: int) -> Any:
    """Return the numbers of ``core.keys.uniforms``, in a graph, outside a graph, and in code that XLA
    compiles.

    ``seed`` and ``epoch`` are int64, modulo 2**64. ``draws`` are positions, int64 (N,).  The result is
    float64 (N, count), in [0, 1).
    """
    golden = _word(_GOLDEN)
    one = _word(1)
    state = _mix(_mix(_bits(seed) + golden) + (_bits(epoch) + one) * golden)
    states = _mix(state + (_bits(draws) + one) * golden)
    steps = tf.range(1, count + 1, dtype=tf.int64)
    words = _mix(states[:, None] + (_bits(steps) * golden)[None, :])
    # float64 holds 53 bits exactly. Convert through int64, because no device converts unsigned words.
    whole = tf.cast(tf.bitcast(_shifted(words, 11), tf.int64), tf.float64)
    return whole * tf.constant(2.0**-53, tf.float64)


def _mix(value: Any) -> Any:
    value = tf.bitwise.bitwise_xor(value, _shifted(value, 30)) * _word(_MIX_1)
    value = tf.bitwise.bitwise_xor(value, _shifted(value, 27)) * _word(_MIX_2)
    return tf.bitwise.bitwise_xor(value, _shifted(value, 31))


def _shifted(value: Any, by: int) -> Any:
    return tf.bitwise.right_shift(value, tf.fill(tf.shape(value), _word(by)))


def _bits(value: Any) -> Any:
    return tf.bitcast(tf.cast(value, tf.int64), tf.uint64)


def _word(value: int) -> Any:
    return tf.constant(value, tf.uint64)
