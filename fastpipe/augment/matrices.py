"""Affine maps of pixels, a matrix for each sample: (N, 6), in rows of two, as torchvision's.

A point (x, y) goes to ``(m0 x + m1 y + m2, m3 x + m4 y + m5)``.  Rotation by an angle, shear along both axes,
scale and translation make the forward map, around a centre; images are resampled by its inverse.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastpipe.augment.parameters import Float64Array

__all__ = ["about_centres", "after", "forward_affine", "identity", "inverse_affine", "inverted", "of_crops"]


def identity(count: int) -> Float64Array:
    """Matrices that move nothing."""
    return np.tile(np.array([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]), (count, 1))


def forward_affine(
    angle: Float64Array,
    translate: Float64Array,
    scale: Float64Array,
    shear: Float64Array,
    centre: Float64Array,
) -> Float64Array:
    """Where pixels go.

    Args:
        angle: (N,), degrees, clockwise as the image is seen.
        translate: (N, 2), pixels along x and y.
        scale: (N,), above 0.
        shear: (N, 2), degrees along x and y.
        centre: (2,) or (N, 2), x and y, of rotation, shear and scale.

    The linear part is ``scale · R(angle) · ShearY · ShearX``, of which torchvision documents the factors
    (``torchvision.transforms.functional.affine``).

    >>> none = np.zeros((1, 2))
    >>> forward_affine(np.array([90.0]), none, np.ones(1), none, np.zeros(2)).round(6) + 0.0
    array([[ 0., -1.,  0.,  1.,  0.,  0.]])
    """
    a, b, c, d = _linear(angle, shear)
    matrices = np.stack([a, b, 0 * a, c, d, 0 * a], axis=1) * scale[:, None]
    for at in (0, 1):
        moved = matrices[:, 3 * at] * centre[..., 0] + matrices[:, 3 * at + 1] * centre[..., 1]
        matrices[:, 3 * at + 2] = centre[..., at] + translate[:, at] - moved
    return matrices


def inverse_affine(
    angle: Float64Array,
    translate: Float64Array,
    scale: Float64Array,
    shear: Float64Array,
    centre: Float64Array,
) -> Float64Array:
    """Where pixels come from; arguments as of ``forward_affine``."""
    a, b, c, d = _linear(angle, shear)
    matrices = (
        np.stack([d, -b, 0 * a, -c, a, 0 * a], axis=1) / scale[:, None]
    )  # the determinant of a … d is 1
    shift = centre + translate
    for at in (0, 1):
        moved = matrices[:, 3 * at] * shift[:, 0] + matrices[:, 3 * at + 1] * shift[:, 1]
        matrices[:, 3 * at + 2] = centre[..., at] - moved
    return matrices


def _linear(angle: Float64Array, shear: Float64Array) -> tuple[Float64Array, ...]:
    turn, x, y = np.radians(angle), np.radians(shear[:, 0]), np.radians(shear[:, 1])
    a, c = np.cos(turn - y) / np.cos(y), np.sin(turn - y) / np.cos(y)
    return a, -a * np.tan(x) - np.sin(turn), c, -c * np.tan(x) + np.cos(turn)


def of_crops(boxes: Float64Array, height: int, width: int) -> Float64Array:
    """Where pixels go when boxes (N, 4), of top, left, height and width, are resized to ``height, width``."""
    top, left, h, w = boxes.T
    nothing = 0 * top
    return np.stack([width / w, nothing, -left * width / w, nothing, height / h, -top * height / h], axis=1)


def after(first: Float64Array, second: Float64Array) -> Float64Array:
    """What two maps do one after the other.

    >>> shift, double = np.array([[1.0, 0, 3, 0, 1, 0]]), np.array([[2.0, 0, 0, 0, 2, 0]])
    >>> after(shift, double)
    array([[2., 0., 6., 0., 2., 0.]])
    """
    return (_square(second) @ _square(first))[:, :2].reshape(-1, 6)


def inverted(matrices: Float64Array) -> Float64Array:
    """The maps back."""
    found: Float64Array = np.asarray(np.linalg.inv(_square(matrices))[:, :2].reshape(-1, 6), np.float64)
    return found


def about_centres(matrices: Float64Array, size: Sequence[int], wanted: Sequence[int]) -> Float64Array:
    """Maps of coordinates from upper left corners, for coordinates from the centres of images.

    Args:
        matrices: (N, 6).
        size: height and width of the images that they lead to.
        wanted: those of the images that they come from.
    """
    found = matrices.copy()
    for row, middle in ((0, size[1] / 2), (3, size[0] / 2)):
        found[:, row + 2] += matrices[:, row] * wanted[1] / 2 + matrices[:, row + 1] * wanted[0] / 2 - middle
    return found


def _square(matrices: Float64Array) -> Float64Array:
    found = np.zeros((len(matrices), 3, 3))
    found[:, :2], found[:, 2, 2] = matrices.reshape(-1, 2, 3), 1
    return found
