"""The distributions of torchvision's transforms: parameters for a batch from uniform random numbers.

Every function takes uniform random numbers in [0, 1), one row per sample, as its only source of randomness.
So a sample's parameters depend only on the sample's own random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.augment.parameters import Float64Array

_TRIES = 10
_GAMMA_TRIES = 12
_SEEDS = 1 << 24  # float32 holds whole numbers up to this number exactly
BETA_DRAWS = 2 * (3 * _GAMMA_TRIES + 1)


def between(u: Float64Array, low: Any, high: Any) -> Float64Array:
    """Scale uniform random numbers from [0, 1) to [low, high)."""
    found: Float64Array = low + u * (high - low)
    return found


def about_one(u: Float64Array, low: Any, high: Any) -> Float64Array:
    """Return factors in [low, high), half of them below 1, as nnU-Net draws them. The range contains 1."""
    twice = 2 * u
    return np.where(u < 0.5, between(twice, low, 1.0), between(twice - 1, 1.0, high))


def integers(u: Float64Array, count: npt.ArrayLike) -> Float64Array:
    """Return whole numbers from 0 to count - 1. All numbers are equally likely."""
    counts = np.asarray(count, np.float64)
    return np.minimum(np.floor(u * counts), counts - 1)


def crop_boxes(
    height: int, width: int, scale: Sequence[float], ratio: Sequence[float], u: Float64Array
) -> Float64Array:
    """Return the boxes of ``RandomResizedCrop.get_params``: top, left, height and width, (N, 4).

    ``u`` is (N, 22). Ten pairs of numbers give the areas and the aspect ratios of the boxes to try. The last
    two numbers give the top and the left of the box.
    """
    w, h = _tried(height, width, scale, ratio, u)
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    last_h, last_w = height, width  # the largest central box, if no box fits
    if width / height < min(ratio):
        last_h = round(width / min(ratio))
    elif width / height > max(ratio):
        last_w = round(height * max(ratio))
    last = ((height - last_h) // 2, (width - last_w) // 2, last_h, last_w)
    return _placed(height, width, h, w, fits, last, u)


def _tried(
    height: int, width: int, scale: Sequence[float], ratio: Sequence[float], u: Float64Array
) -> tuple[Float64Array, Float64Array]:
    """Return the first and the second side of ten boxes, (N, 10) each. ``ratio`` is the range of
    ``first / second``."""
    area = height * width * between(u[:, : 2 * _TRIES : 2], scale[0], scale[1])
    aspect = np.exp(between(u[:, 1 : 2 * _TRIES : 2], math.log(ratio[0]), math.log(ratio[1])))
    return np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))


def _placed(
    height: int, width: int, h: Float64Array, w: Float64Array, fits: npt.NDArray[np.bool_],
    last: tuple[int, ...], u: Float64Array,
) -> Float64Array:  # fmt: skip
    """Return each sample's first box that fits, at its position in the image. If no box fits, return
    ``last``."""
    rows, first = np.arange(len(u)), np.argmax(fits, axis=1)
    h, w = h[rows, first], w[rows, first]
    top, left = integers(u[:, 2 * _TRIES], height - h + 1), integers(u[:, 2 * _TRIES + 1], width - w + 1)
    found: Float64Array = np.stack([top, left, h, w], axis=1)
    return np.where(fits[rows, first][:, None], found, np.array(last, np.float64))


def affine_table(
    u: Float64Array,
    size: Sequence[int],
    degrees: Sequence[float],
    translate: Sequence[float],
    scale: Sequence[float] | None,
    shear: Sequence[Sequence[float]] = ((0.0, 0.0), (0.0, 0.0)),
) -> Float64Array:
    """Return the parameters of ``RandomAffine``, (N, 6): the angle, two shifts, the scale and two shears.

    Shifts and shears are given along x, then along y.

    Args:
        u: (N, 6).
        size: the height and the width of the images, in pixels.
        degrees, translate, scale, shear: as in ``RandomAffine``. If ``scale`` is None, the factor is 1.
    """
    most = (translate[0] * size[1], translate[1] * size[0])
    columns = [
        between(u[:, 0], *degrees),
        *(np.rint(between(u[:, 1 + at], -most[at], most[at])) for at in (0, 1)),
        np.ones(len(u)) if scale is None else between(u[:, 3], *scale),
        between(u[:, 4], *shear[0]),
        between(u[:, 5], *shear[1]),
    ]
    return np.stack(columns, axis=1)


def jitter_table(u: Float64Array, ranges: Sequence[Sequence[float]]) -> Float64Array:
    """Convert uniform random numbers, (N, 8), to the parameters of ``ColorJitter``, (N, 8).

    The parameters are the factors of brightness, contrast, saturation and hue, then the changes' order.
    """
    factors = [between(u[:, at], *limits) for at, limits in enumerate(ranges)]
    return np.concatenate([np.stack(factors, axis=1), np.argsort(u[:, 4:], axis=1, kind="stable")], axis=1)


def erasing_table(
    u: Float64Array, size: Sequence[int], p: float, scale: Sequence[float], ratio: Sequence[float]
) -> Float64Array:
    """Convert ``u``, (N, 24), to the parameters of ``RandomErasing``, (N, 5): a box and a seed of noise.

    The box is empty with probability 1 - ``p``.  Boxes are drawn as in ``crop_boxes``, with three
    differences.  The ratio is height / width.  A box is smaller than the image in both directions.  If all
    ten boxes are too large, the box is empty.
    """
    height, width = size
    h, w = _tried(height, width, scale, ratio, u)
    boxes = _placed(height, width, h, w, (h < height) & (w < width), (0, 0, 0, 0), u)
    boxes *= u[:, 22:23] < p
    return np.concatenate([boxes, np.floor(u[:, 23:] * _SEEDS)], axis=1)


def beta(u: Float64Array, alpha: float) -> Float64Array:
    """Convert ``u``, (N, BETA_DRAWS), to Beta(alpha, alpha) numbers: X / (X + Y) of two gamma variables.

    Gamma variables are drawn by the method of G. Marsaglia and W. W. Tsang, "A simple method for generating
    gamma variables" (2000).  The method rejects less than one try in twenty.  All twelve tries fail for one
    sample in 10**15.
    """
    half = BETA_DRAWS // 2
    x, y = _log_gamma_draws(u[:, :half], alpha), _log_gamma_draws(u[:, half:], alpha)
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(y - x))


def _log_gamma_draws(u: Float64Array, alpha: float) -> Float64Array:
    """Return logarithms of Gamma(alpha, 1) variables, because the variables may be too small for a float."""
    shape = alpha if alpha >= 1 else alpha + 1
    d = shape - 1 / 3
    c = 1 / math.sqrt(9 * d)
    first, second, accept = (u[:, at : 3 * _GAMMA_TRIES : 3] for at in range(3))
    # A normal variable, by the method of Box and Muller.
    normal = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * math.pi * second)
    v = (1 + c * normal) ** 3
    with np.errstate(invalid="ignore", divide="ignore"):
        bound = 0.5 * normal**2 + d - d * v + d * np.log(v)
        fits = (v > 0) & (np.log(accept) < bound)
        rows = np.arange(len(u))
        made = np.log(d * v[rows, np.argmax(fits, axis=1)])
        if alpha < 1:  # Gamma(a) is Gamma(a + 1) · U ** (1 / a)
            made += np.log(u[:, 3 * _GAMMA_TRIES]) / alpha
    found: Float64Array = made
    return found
