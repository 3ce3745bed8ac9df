"""One volume on its way through a chain of augmentations on a device, by torch's operations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["PIECE", "Statistics", "Volume", "ranges"]

# Mean, standard deviation (of n - 1), least and greatest value: tensors without axes, which need no waiting.
Statistics = tuple[Tensor, Tensor, Tensor, Tensor]

PIECE = 1 << 17  # voxels that are worked on where more memory is needed for them


class Volume:
    """A volume that is worked on in place: float32, or labels of any dtype, (C, D, H, W).

    It is read when its values are first asked for, so that geometry that comes first reads what was given.

    Attributes:
        source: what was given.
        goal: where it is in the end; of another shape where geometry changes that.  Its dtype is worked with.
        channels: of the volume that numbers were drawn for; labels may have others.
    """

    def __init__(self, source: Tensor, goal: Tensor, channels: int) -> None:
        self.source, self.goal, self.channels = source, goal, channels
        self._values: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, D, H, W), as it is now."""
        return tuple((self.source if self._values is None else self._values).shape)

    @property
    def values(self) -> Tensor:
        """(C, D, H, W), contiguous; changed in place."""
        if self._values is None:
            self._values = self.empty(self.source.shape)
            self._values.copy_(self.source, non_blocking=True)
        return self._values

    def given(self) -> Tensor:
        """The values to read only: those that were given, where they are what ``values`` would be."""
        is_plain = self.source.dtype == self.goal.dtype and self.source.is_contiguous()
        return self.source if self._values is None and is_plain else self.values

    def empty(self, shape: Sequence[int]) -> Tensor:
        """Memory for values of a shape, which are not these: the goal, if it can be."""
        fits = tuple(shape) == tuple(self.goal.shape) and self._values is not self.goal
        return self.goal if fits else self.goal.new_empty(tuple(shape))

    def replace(self, values: Tensor) -> None:
        """Go on with other values."""
        self._values = values

    def end(self) -> None:
        """Put the values where they go."""
        if self.values is not self.goal:
            self.goal.copy_(self.values, non_blocking=True)

    def statistics(self, channel: int) -> Statistics:
        """Mean, standard deviation (of n - 1), least and greatest value of a channel: each without axes."""
        values = self.given()[channel]
        deviation, mean = torch.std_mean(values, correction=min(1, values.numel() - 1))
        return mean, deviation, *torch.aminmax(values)

    def pieces(self, axis: int) -> list[slice]:
        """Ranges along an axis of (D, H, W), so small that what is made of one takes little memory."""
        return ranges(self.shape[1:], axis, PIECE)


def ranges(size: Sequence[int], axis: int, most: int) -> list[slice]:
    """Ranges along an axis of (D, H, W), of at most so many voxels each and at least one plane.

    Args:
        size: (D, H, W).
        axis: along which.
        most: voxels of a range.
    """
    count = size[axis]
    step = max(1, most // (math.prod(size) // count))
    return [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]
