"""One volume on its way through a chain of augmentations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.volumes import kernels

__all__ = ["PART", "PIECE", "Run", "Statistics", "Volume", "ranges"]

# Does so many numbered tasks: here, or in threads.
Run = Callable[[Callable[[int], None], int], None]
# Mean, standard deviation (of n - 1), least and greatest value: of a device tensors without axes, so that
# nobody waits for it.
Statistics = tuple[Tensor | float, Tensor | float, Tensor | float, Tensor | float]

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
        # Channels that nobody has changed yet, whose values are still where they were given.
        self._unread = set(range(len(source)))

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, D, H, W), as it is now."""
        return tuple((self.source if self._values is None else self._values).shape)

    @property
    def values(self) -> Tensor:
        """(C, D, H, W), contiguous; changed in place."""
        values = self._place()
        if len(self._unread) == len(values):
            self.copy(self.source, values)
        else:
            for channel in self._unread:
                self.copy(self.source[channel : channel + 1], values[channel : channel + 1])
        self._unread.clear()
        return values

    def given(self) -> Tensor:
        """The values to read only: those that were given, where they are what ``values`` would be."""
        is_plain = self.source.dtype == self.goal.dtype and self.source.is_contiguous()
        return self.source if len(self._unread) == len(self.source) and is_plain else self.values

    def moved(self) -> tuple[Tensor, Tensor]:
        """For what moves voxels: where they are, and where they go; which may be the same memory."""
        if self._values is None:
            values = self._place()
            self._unread.clear()
            return self.source, values
        return self.values, self.values

    def changed(self, channel: int) -> tuple[Tensor, Tensor]:
        """For what changes a channel: its values as they are, and as they will be, float32 (D, H, W) both;
        which may be the same memory."""
        values = self._place()[channel]
        if channel not in self._unread:
            return values, values
        source = self.source[channel]
        if source.dtype != values.dtype or not source.is_contiguous():
            self.copy(source[None], values[None])
            source = values
        self._unread.discard(channel)
        return source, values

    def empty(self, shape: Sequence[int]) -> Tensor:
        """Memory for values of a shape, which are not these: the goal, if it can be."""
        fits = tuple(shape) == tuple(self.goal.shape) and self._values is not self.goal
        return self.goal if fits else self.goal.new_empty(tuple(shape))

    def replace(self, values: Tensor) -> None:
        """Go on with other values."""
        self._values = values
        self._unread.clear()

    def end(self) -> None:
        """Put the values where they go."""
        if self.values is not self.goal:
            self.copy(self.values, self.goal)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy values of the same shape."""
        if not self.is_host:
            target.copy_(source, non_blocking=True)
            return
        planes = ranges(source.shape[1:], 0, PART)

        def task(number: int) -> None:
            target[:, planes[number]].copy_(source[:, planes[number]])

        self.run(task, len(planes))

    def _place(self) -> Tensor:
        """Where values are, or will be when they are read."""
        if self._values is None:
            self._values = self.empty(self.source.shape)
        return self._values

    # ---- voxel by voxel ------------------------------------------------------------------------

    def each(
        self, channel: int, change: Callable[[Tensor], object], with_statistics: bool = False
    ) -> Statistics | None:
        """Change a channel voxel by voxel: ``change`` is given parts of it, which it changes in place.

        Returns:
            Those of the new values, if they are asked for.
        """
        given, values = (self._parts(one) for one in self.changed(channel))
        is_new = given[0].data_ptr() != values[0].data_ptr()
        moments = _Moments(values) if with_statistics and self.is_host else None

        def task(number: int) -> None:
            part = values[number]
            if is_new:
                part.copy_(given[number])
            change(part)
            if moments is not None:  # while it is in cache
                moments.look(number)

        self.run(task, len(values))
        if moments is not None:
            return moments.found()
        return _of_device(values[0]) if with_statistics else None

    def statistics(self, channel: int) -> Statistics:
        """Mean, standard deviation (of n - 1), least and greatest value of a channel: each without axes."""
        source = self.source[channel]
        is_plain = source.dtype == self.goal.dtype and source.is_contiguous()
        is_there = channel in self._unread and is_plain
        parts = self._parts(source if is_there else self.values[channel])
        if not self.is_host:
            return _of_device(parts[0])
        moments = _Moments(parts)
        self.run(moments.look, len(parts))
        return moments.found()

    def _parts(self, values: Tensor) -> list[Tensor]:
        flat = values.view(-1)
        return list(torch.split(flat, PART)) if self.is_host else [flat]

    # ---- where something is made of parts -------------------------------------------------------

    def flat_pieces(self, channel: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A channel in order, as of ``changed``, in pieces so small that what is made of one takes little
        memory; of an even number of voxels, but for the last."""
        pairs = (torch.split(one.view(-1), self._most) for one in self.changed(channel))
        return zip(*pairs, strict=True)

    def pieces(self, axis: int, count: int | None = None) -> list[slice]:
        """Ranges along an axis of (D, H, W), of which the same is true; of its first ``count`` places."""
        return ranges(self.shape[1:], axis, self._most, count)

    @property
    def _most(self) -> int:
        return PART if self.is_host else PIECE


def ranges(size: Sequence[int], axis: int, most: int, count: int | None = None) -> list[slice]:
    """Ranges along an axis of (D, H, W), of at most so many voxels each and at least one plane.

    Args:
        size: (D, H, W).
        axis: along which.
        most: voxels of a range.
        count: of how many of the axis's places; default: all.
    """
    count = size[axis] if count is None else count
    step = max(1, most // (math.prod(size) // size[axis]))
    return [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]


def _of_device(values: Tensor) -> Statistics:
    deviation, mean = torch.std_mean(values, correction=min(1, values.numel() - 1))
    return mean, deviation, *torch.aminmax(values)


class _Moments:
    """Mean, standard deviation, least and greatest value of parts that are looked at one by one.

    Args:
        parts: float32 (n,) each.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts, self._table = parts, np.empty((len(parts), 5))

    def look(self, number: int) -> None:
        """Look at a part."""
        kernels.moments(self._parts[number].numpy(), self._table[number])

    def found(self) -> Statistics:
        """What all of them have."""
        counts = np.array([len(part) for part in self._parts], np.float64)
        firsts, total, squares = self._table[:, 0], self._table[:, 1], self._table[:, 2]
        means, count = firsts + total / counts, counts.sum()
        mean = (counts * means).sum() / count
        spread = (squares - total**2 / counts + counts * (means - mean) ** 2).sum()
        deviation = (max(spread, 0.0) / max(count - 1, 1)) ** 0.5
        told = (mean, deviation, self._table[:, 3].min(), self._table[:, 4].max())
        one, two, three, four = map(float, told)
        return one, two, three, four
