"""From uniform random numbers to parameters: the distributions of torchvision's transforms, for a batch.

Every function takes uniform numbers in [0, 1), a row of them for each sample, and nothing else that is
random, so that a sample's parameters depend on its own numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.augment.parameters import Float64Array

__all__ = [
    "BETA_DRAWS", "Drawn", "about_one", "affine_table", "beta", "between", "crop_boxes", "drawn",
    "erased_boxes", "erasing_table", "integers", "jitter_table", "orders",
]  # fmt: skip

_TRIES = 10
_GAMMA_TRIES = 12
_SEEDS = 1 << 24  # whole numbers up to this are exact as float32
BETA_DRAWS = 2 * (3 * _GAMMA_TRIES + 1)


def between(u: Float64Array, low: Any, high: Any) -> Float64Array:
    """Uniform numbers in [low, high).

    >>> between(np.array([0.0, 0.5]), -1.0, 3.0)
    array([-1.,  1.])
    """
    found: Float64Array = low + u * (high - low)
    return found


class Drawn(NamedTuple):
    """A parameter that is computed from one uniform number.

    Attributes:
        kind: ``"flag"``: whether the number is below ``low``; ``"between"``: see ``between``;
            ``"about_one"``: see ``about_one``; ``"whole"``: whole numbers below ``low``.
        low, high: see there.
    """

    kind: str
    low: float
    high: float = 0.0


def drawn(kind: str, u: Float64Array, low: Any, high: Any) -> npt.NDArray[Any]:
    """Parameters of uniform numbers (N, K): see ``Drawn``; ``low`` and ``high`` are numbers, or (K,)."""
    if kind == "flag":
        found: npt.NDArray[Any] = u < low
        return found
    if kind == "whole":
        return np.asarray(np.floor(u * low))
    return between(u, low, high) if kind == "between" else about_one(u, low, high)


def about_one(u: Float64Array, low: Any, high: Any) -> Float64Array:
    """Factors in [low, high), of which half are below 1, which is between them: as nnU-Net draws them.

    >>> about_one(np.array([0.0, 0.25, 0.5, 0.75]), 0.5, 2.0)
    array([0.5 , 0.75, 1.  , 1.5 ])
    """
    twice = 2 * u
    return np.where(u < 0.5, between(twice, low, 1.0), between(twice - 1, 1.0, high))


def integers(u: Float64Array, count: npt.ArrayLike) -> Float64Array:
    """Whole numbers in 0 … count - 1, all equally likely.

    >>> integers(np.array([0.0, 0.99]), 3)
    array([0., 2.])
    """
    counts = np.asarray(count, np.float64)
    return np.minimum(np.floor(u * counts), counts - 1)


def orders(u: Float64Array) -> npt.NDArray[np.int64]:
    """Permutations of as many things as there are columns, all equally likely: (N, things).

    >>> orders(np.array([[0.3, 0.1, 0.2]]))
    array([[1, 2, 0]])
    """
    return np.argsort(u, axis=1, kind="stable")


def crop_boxes(
    height: int, width: int, scale: Sequence[float], ratio: Sequence[float], u: Float64Array
) -> Float64Array:
    """The boxes of ``RandomResizedCrop.get_params``.

    Args:
        height, width: of the images, in pixels.
        scale: least and greatest part of their area.
        ratio: least and greatest width / height.
        u: (N, 22): area and aspect for each of ten tries, then top and left.

    Returns:
        (N, 4): top, left, height, width.

    >>> crop_boxes(100, 100, (1.0, 1.0), (1.0, 1.0), np.full((1, 22), 0.5))
    array([[  0.,   0., 100., 100.]])
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    area = height * width * between(u[:, : 2 * _TRIES : 2], scale[0], scale[1])
    aspect = np.exp(between(u[:, 1 : 2 * _TRIES : 2], low, high))
    w, h = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    first = np.argmax(fits, axis=1)
    rows = np.arange(len(u))
    found = fits[rows, first]
    h, w = h[rows, first], w[rows, first]
    last_h, last_w = _largest_box(height, width, ratio)
    h, w = np.where(found, h, last_h), np.where(found, w, last_w)
    top = np.where(found, integers(u[:, 2 * _TRIES], height - h + 1), (height - last_h) // 2)
    left = np.where(found, integers(u[:, 2 * _TRIES + 1], width - w + 1), (width - last_w) // 2)
    return np.stack([top, left, h, w], axis=1)


def _largest_box(height: int, width: int, ratio: Sequence[float]) -> tuple[int, int]:
    """The largest box of a shape that is allowed: after ten tries of boxes that did not fit."""
    if width / height < min(ratio):
        return round(width / min(ratio)), width
    if width / height > max(ratio):
        return height, round(height * max(ratio))
    return height, width


def erased_boxes(
    height: int, width: int, scale: Sequence[float], ratio: Sequence[float], u: Float64Array
) -> Float64Array:
    """The boxes of ``RandomErasing``: as ``crop_boxes``, but ratios are height / width, a box is smaller than
    the image in both directions, and where ten tries were too large it is empty.

    >>> erased_boxes(100, 100, (0.25, 0.25), (1.0, 1.0), np.zeros((1, 22)))
    array([[ 0.,  0., 50., 50.]])
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    area = height * width * between(u[:, : 2 * _TRIES : 2], scale[0], scale[1])
    aspect = np.exp(between(u[:, 1 : 2 * _TRIES : 2], low, high))
    h, w = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (h < height) & (w < width)
    first, rows = np.argmax(fits, axis=1), np.arange(len(u))
    found = fits[rows, first]
    h, w = np.where(found, h[rows, first], 0), np.where(found, w[rows, first], 0)
    top, left = integers(u[:, 2 * _TRIES], height - h + 1), integers(u[:, 2 * _TRIES + 1], width - w + 1)
    return np.stack([top * found, left * found, h, w], axis=1)


def affine_table(
    u: Float64Array,
    size: Sequence[int],
    degrees: Sequence[float],
    translate: Sequence[float],
    scale: Sequence[float] | None,
    shear: Sequence[Sequence[float]] = ((0.0, 0.0), (0.0, 0.0)),
) -> Float64Array:
    """The parameters of ``RandomAffine``.

    Args:
        u: (N, 6).
        size: height and width of the images, in pixels.
        degrees: least and greatest angle, clockwise.
        translate: greatest shifts along x and y, as parts of width and height; they are whole pixels.
        scale: least and greatest factor; None for 1.
        shear: least and greatest angle along x, and along y; degrees.

    Returns:
        (N, 6): angle, shift along x and y, factor, shear along x and y.

    >>> affine_table(np.full((1, 6), 0.75), (10, 20), (-30, 30), (0.1, 0.2), None)
    array([[15.,  1.,  1.,  1.,  0.,  0.]])
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
    """The parameters of ``ColorJitter``: factors of brightness, contrast and saturation, parts of a turn of
    hue, and the order of the four.

    Args:
        u: (N, 8).
        ranges: least and greatest of each of the four.

    Returns:
        (N, 8).
    """
    factors = [between(u[:, at], *limits) for at, limits in enumerate(ranges)]
    return np.concatenate([np.stack(factors, axis=1), orders(u[:, 4:])], axis=1)


def erasing_table(
    u: Float64Array, size: Sequence[int], p: float, scale: Sequence[float], ratio: Sequence[float]
) -> Float64Array:
    """The parameters of ``RandomErasing``.

    Args:
        u: (N, 24).
        size: height and width of the images, in pixels.
        p: the part of the images in which there is a box.
        scale, ratio: see ``erased_boxes``.

    Returns:
        (N, 5): top, left, height and width, which are 0 where there is no box; and a seed of noise.
    """
    boxes = erased_boxes(size[0], size[1], scale, ratio, u[:, :22])
    boxes *= u[:, 22:23] < p
    return np.concatenate([boxes, np.floor(u[:, 23:] * _SEEDS)], axis=1)


def beta(u: Float64Array, alpha: float) -> Float64Array:
    """Numbers of a Beta(alpha, alpha) distribution, as two gamma variables give them: X / (X + Y).

    Gamma variables by G. Marsaglia and W. W. Tsang, "A simple method for generating gamma variables" (2000),
    which rejects less than one try in twenty; of twelve tries one is taken but for one sample in 10**15.

    Args:
        u: (N, 74): thirty-seven for each of the two.
        alpha: above 0.

    >>> numbers = beta(np.random.default_rng(0).random((20_000, BETA_DRAWS)), 0.4)
    >>> bool(abs(numbers.mean() - 0.5) < 0.01), bool(abs(numbers.var() - 0.25 / 1.8) < 0.003)
    (True, True)
    """
    half = BETA_DRAWS // 2
    x, y = _log_gamma_draws(u[:, :half], alpha), _log_gamma_draws(u[:, half:], alpha)
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(y - x))


def _log_gamma_draws(u: Float64Array, alpha: float) -> Float64Array:
    """Logarithms of Gamma(alpha, 1) variables: those of a small shape are often too small for a float."""
    shape = alpha if alpha >= 1 else alpha + 1
    d = shape - 1 / 3
    c = 1 / math.sqrt(9 * d)
    first, second, accept = (u[:, at : 3 * _GAMMA_TRIES : 3] for at in range(3))
    # Box and Muller's normal variable.
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
