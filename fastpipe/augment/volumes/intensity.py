"""What changes values of volumes, and leaves voxels where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastpipe.augment.distributions import Drawn
from fastpipe.augment.options import probability
from fastpipe.augment.parameters import Float64Array
from fastpipe.augment.steps import Step
from fastpipe.augment.volumes import noise
from fastpipe.augment.volumes.base import PerChannel, VolumeTransform, limits_of
from fastpipe.augment.volumes.volume import Volume

__all__ = ["Brightness3D", "Contrast3D", "Gamma3D", "GaussianNoise3D"]

_LEAST = 1e-7  # what numbers are divided by


class GaussianNoise3D(VolumeTransform):
    """Add normal noise to each volume.

    Args:
        std: least and greatest standard deviation, of which one is drawn for all channels; or a number.

    Noise is a function of the parameters and of where a voxel is: the same on every device.

    >>> import torch
    >>> GaussianNoise3D(0.1)(torch.zeros(2, 1, 8, 8, 8)).shape
    torch.Size([2, 1, 8, 8, 8])
    """

    draws = 2
    names = ("std", "noise")

    def __init__(self, std: Any = (0.0, 0.1)) -> None:
        self.std = limits_of(std, "std")

    def drawn_as(self, channels: int) -> Sequence[Drawn]:
        return Drawn("between", *self.std), Drawn("whole", noise.SEEDS)

    def steps(self, column: int, shape: tuple[int, ...]) -> list[Step]:
        return [Step("noise", column)]

    def on_canvas(self, canvas: Volume, row: Float64Array) -> None:
        if row[0]:
            noise.add(canvas, float(row[0]), int(row[1]))

    def extra_repr(self) -> str:
        return f"{self.std}"


class _Factor(PerChannel):
    """Has a factor for each channel."""

    of_channel: tuple[str, ...] = ("is_changed", "factor")
    limits: tuple[float, float]
    p_channel: float

    def channel_drawn_as(self) -> Sequence[Drawn]:
        kind = "about_one" if self.limits[0] < 1.0 < self.limits[1] else "between"
        return Drawn("flag", self.p_channel), Drawn(kind, *self.limits)

    def extra_repr(self) -> str:
        return f"{self.limits}, p_channel={self.p_channel}"


class Brightness3D(_Factor):
    """Multiply each channel of each volume.

    Args:
        factor: least and greatest factor; half of them are below 1 if 1 is between.
        p_channel: the part of the channels that are changed.

    >>> import torch
    >>> Brightness3D((2.0, 2.0))(torch.ones(1, 1, 2, 2, 2)).unique()
    tensor([2.])
    """

    step = "brightness"

    def __init__(self, factor: Any = (0.75, 1.25), p_channel: float = 1.0) -> None:
        self.limits, self.p_channel = limits_of(factor, "factor"), probability(p_channel, "p_channel")

    def on_channel(self, canvas: Volume, channel: int, row: Float64Array) -> None:
        if row[0]:
            factor = float(row[1])
            canvas.values[channel].mul_(factor)


class Contrast3D(_Factor):
    """Move the values of each channel of each volume away from their mean, or nearer to it.

    Args:
        factor: least and greatest factor; half of them are below 1 if 1 is between.
        keep_range: cut off what becomes less or more than any value was.
        p_channel: the part of the channels that are changed.

    >>> import torch
    >>> Contrast3D((0.0, 0.0))(torch.arange(8.0).view(1, 1, 2, 2, 2)).unique()
    tensor([3.5000])
    """

    step = "contrast"

    def __init__(self, factor: Any = (0.75, 1.25), keep_range: bool = True, p_channel: float = 1.0) -> None:
        self.limits, self.p_channel = limits_of(factor, "factor"), probability(p_channel, "p_channel")
        self.keep_range = keep_range

    def on_channel(self, canvas: Volume, channel: int, row: Float64Array) -> None:
        if not row[0]:
            return
        factor = float(row[1])
        mean, _, low, high = canvas.statistics(channel)
        values = canvas.values[channel].sub_(mean).mul_(factor).add_(mean)
        if self.keep_range:
            values.clamp_(low, high)

    def step_options(self) -> tuple[int, ...]:
        return (int(self.keep_range),)

    def extra_repr(self) -> str:
        return f"{self.limits}, keep_range={self.keep_range}, p_channel={self.p_channel}"


class Gamma3D(_Factor):
    """Raise the values of each channel of each volume to a power, as parts of their range.

    Args:
        gamma: least and greatest exponent; half of them are below 1 if 1 is between.
        inverted: of the negative values, which are turned back afterwards: dark becomes what bright was.
        keep_stats: give the values their mean and standard deviation back.
        p_channel: the part of the channels that are changed.

    >>> import torch
    >>> Gamma3D((2.0, 2.0), keep_stats=False)(torch.tensor([0.0, 0.5, 1.0]).view(1, 1, 1, 1, 3)).flatten()
    tensor([0.0000, 0.2500, 1.0000])
    """

    step = "gamma"

    def __init__(
        self, gamma: Any = (0.7, 1.5), inverted: bool = False, keep_stats: bool = True, p_channel: float = 1.0
    ) -> None:
        self.limits, self.p_channel = limits_of(gamma, "gamma"), probability(p_channel, "p_channel")
        self.inverted, self.keep_stats = inverted, keep_stats

    def on_channel(self, canvas: Volume, channel: int, row: Float64Array) -> None:
        if not row[0]:
            return
        gamma = float(row[1])
        mean, deviation, low, high = canvas.statistics(channel)
        extent = high - low
        # Of negative values what is raised is (high - x) / extent, and what comes of it is subtracted.
        base, sign = (high, -1.0) if self.inverted else (low, 1.0)
        scale = sign / _above_0(extent)

        values = canvas.values[channel]
        values.sub_(base).mul_(scale).pow_(gamma).mul_(sign * extent).add_(base)
        if self.keep_stats:
            now_mean, now_deviation, _, _ = canvas.statistics(channel)
            factor = deviation / _above_0(now_deviation)
            values.sub_(now_mean).mul_(factor).add_(mean)

    def step_options(self) -> tuple[int, ...]:
        return int(self.inverted), int(self.keep_stats)

    def extra_repr(self) -> str:
        return (
            f"{self.limits}, inverted={self.inverted}, keep_stats={self.keep_stats}, "
            f"p_channel={self.p_channel}"
        )


def _above_0(value: Tensor) -> Tensor:
    return value.clamp(min=_LEAST)
