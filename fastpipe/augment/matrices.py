"""Affine maps of pixels, with one matrix per sample, and rotations of volumes.

Matrices of pixels are (N, 6), two rows of three numbers, as in torchvision.  A matrix maps a point (x, y) to
``(m0 x + m1 y + m2, m3 x + m4 y + m5)``.  An image is resampled with the inverse matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastpipe.augment.parameters import Float64Array


def identity(count: int) -> Float64Array:
    """Return ``count`` identity matrices."""
    return np.tile(np.array([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]), (count, 1))


def forward_affine(
    angle: Float64Array,
    translate: Float64Array,
    scale: Float64Array,
    shear: Float64Array,
    centre: Float64Array,
) -> Float64Array:
    """Return the matrices that map pixels of the image to pixels of the result.

    Args:
        angle: (N,), degrees, clockwise as seen in the image.
        translate: (N, 2), pixels along x and y.
        scale: (N,), above 0.
        shear: (N, 2), degrees along x and y.
        centre: (2,) or (N, 2), x and y of the centre of rotation, shear and scale.

    The linear part is ``scale · R(angle) · ShearY · ShearX``. torchvision documents these factors in
    ``torchvision.transforms.functional.affine``.
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
    """Return the inverses of the matrices of ``forward_affine``, for the same arguments."""
    a, b, c, d = _linear(angle, shear)
    # The determinant of the matrix [a b; c d] is 1.
    matrices = np.stack([d, -b, 0 * a, -c, a, 0 * a], axis=1) / scale[:, None]
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
    """Return the matrices of crops that are resized to ``height`` and ``width``. ``boxes`` is (N, 4): top,
    left, height and width."""
    top, left, h, w = boxes.T
    nothing = 0 * top
    return np.stack([width / w, nothing, -left * width / w, nothing, height / h, -top * height / h], axis=1)


def after(first: Float64Array, second: Float64Array) -> Float64Array:
    """Return the matrices that apply ``first`` and then ``second``."""
    return (_square(second) @ _square(first))[:, :2].reshape(-1, 6)


def inverted(matrices: Float64Array) -> Float64Array:
    """Return the inverse matrices."""
    return np.asarray(np.linalg.inv(_square(matrices))[:, :2].reshape(-1, 6), np.float64)


def about_centres(matrices: Float64Array, size: Sequence[int], wanted: Sequence[int]) -> Float64Array:
    """Convert matrices, (N, 6), from coordinates relative to upper left corners to coordinates relative to
    centres.

    ``size`` is the height and width of the images that the matrices map to. ``wanted`` is the height and
    width of the images that the matrices map from.
    """
    found = matrices.copy()
    for row, middle in ((0, size[1] / 2), (3, size[0] / 2)):
        found[:, row + 2] += matrices[:, row] * wanted[1] / 2 + matrices[:, row + 1] * wanted[0] / 2 - middle
    return found


def _square(matrices: Float64Array) -> Float64Array:
    found = np.zeros((len(matrices), 3, 3))
    found[:, :2], found[:, 2, 2] = matrices.reshape(-1, 2, 3), 1
    return found


def rotations(degrees: Float64Array) -> Float64Array:
    """Return matrices (N, 3, 3) that rotate by angles (N, 3) about depth, then height, then width."""
    radians = np.deg2rad(degrees).T
    cosines, sines = np.cos(radians), np.sin(radians)
    turns = np.zeros((3, len(degrees), 3, 3))
    for axis, turn in enumerate(turns):
        turn[:, axis, axis] = 1.0
        # Each matrix rotates in the plane of the next two axes. About depth, axis 1 turns to axis 2; about
        # height, 2 to 0.
        first, second = (axis + 1) % 3, (axis + 2) % 3
        turn[:, first, first] = turn[:, second, second] = cosines[axis]
        turn[:, second, first] = sines[axis]
        turn[:, first, second] = -sines[axis]
    found: Float64Array = turns[2] @ (turns[1] @ turns[0])
    return found


def covering(size: Float64Array, degrees: Sequence[tuple[float, float]]) -> Float64Array:
    """Return the size, (3,), of a box that covers a second box of the size ``size``, however the second box
    is rotated about one axis by these angles."""
    found = size.astype(np.float64)
    for axis, limits in enumerate(degrees):
        most = np.deg2rad(min(90.0, max(map(abs, limits))))
        plane = [(axis + 1) % 3, (axis + 2) % 3]
        for own, other in (plane, plane[::-1]):
            angle = min(most, np.arctan2(size[other], size[own]))  # at larger angles the extent shrinks again
            found[own] = max(found[own], size[own] * np.cos(angle) + size[other] * np.sin(angle))
    return found
