"""One volume on its way through a chain of augmentations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.volumes import kernels

__all__ = ["PART", "PIECE", "Run", "Volume"]

# Does so many numbered tasks: here, or in threads.
Run = Callable[[Callable[[int], None], int], None]

PART = 1 << 16  # voxels that a thread works on at a time: 256 KB, which stay in its cache
PIECE = 1 << 17  # voxels that a device works on where it needs more memory for them


class Volume:
    """A volume that is worked on in place: float32, or labels of any dtype, (C, D, H, W).

    It is read when its values are first asked for, so that geometry that comes first reads what was given.

    Attributes:
        source: what was given.
        goal: where it is in the end; of another shape where geometry changes that.  Its dtype is worked with.
        run: does tasks, on the processor.
        is_host: whether the processor's kernels work on it.
        channels: of the volume that numbers were drawn for; labels may have others.
    """

    def __init__(self, source: Tensor, goal: Tensor, run: Run, channels: int, is_host: bool) -> None:
        self.source, self.goal, self.run = source, goal, run
        self.channels, self.is_host = channels, is_host
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
            self.copy(self.source, self._values)
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
            self.copy(self.values, self.goal)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy values of the same shape."""
        if not self.is_host:
            target.copy_(source, non_blocking=True)
            return
        step = max(1, PART // source[:, 0].numel())

        def task(number: int) -> None:
            part = slice(number * step, (number + 1) * step)
            target[:, part].copy_(source[:, part])

        self.run(task, -(-source.shape[1] // step))

    # ---- voxel by voxel ------------------------------------------------------------------------

    def each(self, channel: int, change: Callable[[Tensor], object]) -> None:
        """Change a channel voxel by voxel: ``change`` is given parts of it, which it changes in place."""
        parts = self._parts(channel)
        self.run(lambda number: _ignore(change(parts[number])), len(parts))

    def statistics(self, channel: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean, standard deviation (of n - 1), least and greatest value of a channel: each without axes."""
        parts = self._parts(channel)
        if not self.is_host:
            deviation, mean = torch.std_mean(parts[0])
            return mean, deviation, *torch.aminmax(parts[0])
        first, count = float(parts[0][0]), sum(map(len, parts))
        found = np.empty((len(parts), 4))

        def task(number: int) -> None:
            kernels.moments(parts[number].numpy(), first, found[number])

        self.run(task, len(parts))
        total, squares = found[:, :2].sum(0)
        variance = max(squares - total * total / count, 0.0) / max(count - 1, 1)
        told = (first + total / count, variance**0.5, found[:, 2].min(), found[:, 3].max())
        mean, deviation, low, high = torch.tensor(told, dtype=torch.float32)
        return mean, deviation, low, high

    def _parts(self, channel: int) -> list[Tensor]:
        flat = self.values[channel].view(-1)
        return list(torch.split(flat, PART)) if self.is_host else [flat]

    # ---- where something is made of parts -------------------------------------------------------

    def flat_pieces(self, channel: int) -> tuple[Tensor, ...]:
        """A channel in order, in pieces so small that what is made of one takes little memory; of an even
        number of voxels, but for the last."""
        return torch.split(self.values[channel].view(-1), self._most)

    def pieces(self, axis: int, count: int | None = None) -> list[slice]:
        """Ranges along an axis of (D, H, W), of which the same is true; of its first ``count`` places."""
        size = self.shape[1:]
        count, plane = size[axis] if count is None else count, math.prod(size) // size[axis]
        step = max(1, self._most // plane)
        return [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]

    @property
    def _most(self) -> int:
        return PART if self.is_host else PIECE


def _ignore(value: object) -> None:
    pass
