"""What is done to the sequences of a batch, put together before it is done."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastpipe.augment.canvas import Float32Array
from fastpipe.augment.parameters import Float64Array

__all__ = ["FrameMaps", "Int64Array"]

Int64Array = npt.NDArray[np.int64]


class FrameMaps:
    """A speed for each sequence, and for its frames ``scale * frame[order] + shift``.

    A speed changes no frame's map, and a map no speed: whichever comes first.

    Args:
        first: the first frame of each sequence, (N, J, C).

    Attributes:
        speeds: (N,), or None while nothing is played.
        scales, shifts: (N, C).
        order: (N, J), the joint that each one becomes.
    """

    def __init__(self, first: Float32Array) -> None:
        count, joints, coordinates = first.shape
        self._first = first
        self.speeds: Float64Array | None = None
        self.scales, self.shifts = np.ones((count, coordinates)), np.zeros((count, coordinates))
        self.order = np.broadcast_to(np.arange(joints), (count, joints))

    def play(self, speeds: Float64Array) -> None:
        """Play at other speeds, (N,); once."""
        self.speeds = speeds

    def move(self, shifts: Float64Array) -> None:
        """Add to coordinates, (N, C)."""
        self.shifts = self.shifts + shifts

    def scale(self, factors: Float64Array, about: int | None) -> None:
        """Multiply by factors, (N,), as seen from where a joint is in the first frame, or from 0."""
        centres = np.zeros_like(self.shifts)
        if about is not None:
            rows = np.arange(len(factors))
            centres = self.scales * self._first[rows, self.order[:, about]] + self.shifts
        self.shifts = (self.shifts - centres) * factors[:, None] + centres
        self.scales = self.scales * factors[:, None]

    def mirror(self, which: npt.NDArray[np.bool_], order: Int64Array, axis: int, about: float) -> None:
        """Mirror some, (N,), at a place on an axis, and let joints become others, (J,)."""
        self.scales[which, axis] *= -1
        self.shifts[which, axis] = 2 * about - self.shifts[which, axis]
        self.order = np.where(which[:, None], self.order[:, order], self.order)
