"""Augmentations that change values without moving voxels: intensity, noise, blur and resolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastpipe.augment.base import Shape
from fastpipe.augment.distributions import about_one, between
from fastpipe.augment.parameters import Float64Array, limits_of, probability
from fastpipe.augment.volumes.base import PerChannel, VolumeTransform, axes_of
from fastpipe.augment.volumes.volume import SEEDS, Volume, add_noise, along, gaussian, lower_resolution
from fastpipe.errors import AugmentError

_LEAST = 1e-7  # the least number to divide by


class GaussianNoise3D(VolumeTransform):
    """Add normal noise to each volume.

    Args:
        std: the least and the greatest standard deviation, or one number. One standard deviation is drawn for
            all channels of a volume.

    Noise depends only on the parameters and the voxel's position. The noise is therefore equal on every
    device.

    >>> import torch
    >>> GaussianNoise3D(0.1)(torch.zeros(2, 1, 8, 8, 8)).shape
    torch.Size([2, 1, 8, 8, 8])
    """

    names = ("std", "noise")
    native_step = "noise"

    def __init__(self, std: Any = (0.0, 0.1)) -> None:
        self.std = limits_of(std, "std", 0.0)

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        return np.stack([between(u[:, 0], *self.std), np.floor(u[:, 1] * SEEDS)], axis=1)

    def on_canvas(self, canvas: Volume, row: Float64Array) -> None:
        if row[0]:
            add_noise(canvas, float(row[0]), int(row[1]))


class _Factor(PerChannel):
    """The base class of augmentations with one factor per channel."""

    of_channel: tuple[str, ...] = ("is_changed", "factor")
    limits: tuple[float, float]

    def numbers(self, u: Float64Array) -> Float64Array:
        drawn = about_one if self.limits[0] < 1.0 < self.limits[1] else between
        return drawn(u, *self.limits)


class Brightness3D(_Factor):
    """Multiply each channel of each volume by a factor.

    Args:
        factor: the least and the greatest factor. If 1 lies between these two numbers, half of the factors
            are below 1.
        p_channel: the probability that a channel is changed, from 0 to 1.

    >>> import torch
    >>> Brightness3D((2.0, 2.0))(torch.ones(1, 1, 2, 2, 2)).unique()
    tensor([2.])
    """

    native_step = "brightness"

    def __init__(self, factor: Any = (0.75, 1.25), p_channel: float = 1.0) -> None:
        self.factor = self.limits = limits_of(factor, "factor", 0.0)
        self.p_channel = probability(p_channel, "p_channel")

    def on_channel(self, canvas: Volume, channel: int, *numbers: float) -> None:
        canvas.values[channel].mul_(*numbers)


class Contrast3D(_Factor):
    """Move the values of each channel of each volume away from their mean, or closer to it.

    Args:
        factor: the least and the greatest factor. If 1 lies between these two numbers, half of the factors
            are below 1.
        keep_range: whether to clip the result to the channel's original range of values.
        p_channel: the probability that a channel is changed, from 0 to 1.

    >>> import torch
    >>> Contrast3D((0.0, 0.0))(torch.arange(8.0).view(1, 1, 2, 2, 2)).unique()
    tensor([3.5000])
    """

    native_step = "contrast"

    def __init__(self, factor: Any = (0.75, 1.25), keep_range: bool = True, p_channel: float = 1.0) -> None:
        self.factor = self.limits = limits_of(factor, "factor", 0.0)
        self.p_channel = probability(p_channel, "p_channel")
        self.keep_range = keep_range

    def on_channel(self, canvas: Volume, channel: int, *numbers: float) -> None:
        (factor,) = numbers
        mean, _, low, high = canvas.statistics(channel)
        values = canvas.values[channel].sub_(mean).mul_(factor).add_(mean)
        if self.keep_range:
            values.clamp_(low, high)

    def step_options(self) -> tuple[int, ...]:
        return (int(self.keep_range),)


class Gamma3D(_Factor):
    """Raise the values of each channel of each volume to a power. Values count as fractions of their range.

    Args:
        gamma: the least and the greatest exponent. If 1 lies between these two numbers, half of the exponents
            are below 1.
        inverted: whether to negate the values before and after, so that dark values change as bright values
            would.
        keep_stats: whether to restore the mean and the standard deviation of the values.
        p_channel: the probability that a channel is changed, from 0 to 1.

    >>> import torch
    >>> Gamma3D((2.0, 2.0), keep_stats=False)(torch.tensor([0.0, 0.5, 1.0]).view(1, 1, 1, 1, 3)).flatten()
    tensor([0.0000, 0.2500, 1.0000])
    """

    native_step = "gamma"

    def __init__(
        self, gamma: Any = (0.7, 1.5), inverted: bool = False, keep_stats: bool = True, p_channel: float = 1.0
    ) -> None:
        self.gamma = self.limits = limits_of(gamma, "gamma", 0.0)
        self.p_channel = probability(p_channel, "p_channel")
        self.inverted, self.keep_stats = inverted, keep_stats

    def on_channel(self, canvas: Volume, channel: int, *numbers: float) -> None:
        (gamma,) = numbers
        mean, deviation, low, high = canvas.statistics(channel)
        extent = high - low
        # If values are negated, (high - x) / extent is raised to the power, and the result is subtracted from
        # high.
        base, sign = (high, -1.0) if self.inverted else (low, 1.0)
        scale = sign / extent.clamp(min=_LEAST)
        values = canvas.values[channel]
        values.sub_(base).mul_(scale).pow_(gamma).mul_(sign * extent).add_(base)
        if self.keep_stats:
            now_mean, now_deviation, _, _ = canvas.statistics(channel)
            factor = deviation / now_deviation.clamp(min=_LEAST)
            values.sub_(now_mean).mul_(factor).add_(mean)

    def step_options(self) -> tuple[int, ...]:
        return int(self.inverted), int(self.keep_stats)


_BLURRED = 1e-3  # in voxels; a smaller sigma does not blur


class GaussianBlur3D(PerChannel):
    """Blur each channel of each volume with a Gaussian, with a separate width along each axis.

    Args:
        sigma: the least and the greatest standard deviation, in voxels, or one number.
        axes: the axes along which to blur. 0, 1 and 2 are depth, height and width.
        p_channel: the probability that a channel is blurred, from 0 to 1.

    Results match ``scipy.ndimage.gaussian_filter1d`` with ``truncate=3`` and ``mode="mirror"``.

    >>> import torch
    >>> GaussianBlur3D((0.5, 1.0))(torch.rand(2, 1, 8, 8, 8)).shape
    torch.Size([2, 1, 8, 8, 8])
    """

    native_step = "blur"
    of_channel = ("is_blurred", "sigma_depth", "sigma_height", "sigma_width")

    def __init__(
        self, sigma: Any = (0.5, 1.0), axes: int | Sequence[int] = (0, 1, 2), p_channel: float = 1.0
    ) -> None:
        self.sigma, self.axes = limits_of(sigma, "sigma", 0.0), axes_of(axes)
        self.p_channel = probability(p_channel, "p_channel")

    def numbers(self, u: Float64Array) -> Float64Array:
        return between(u, *self.sigma) * [axis in self.axes for axis in range(3)]

    def on_channel(self, canvas: Volume, channel: int, *numbers: float) -> None:
        for axis, sigma in enumerate(numbers):
            if sigma > _BLURRED:
                along(canvas, channel, axis, gaussian(canvas.shape[1 + axis], sigma))


class LowResolution3D(PerChannel):
    """Keep some of each channel's voxels, spread evenly, and interpolate all other voxels linearly.

    Args:
        scale: the least and the greatest fraction of the voxels kept along an axis, at most 1, or one number.
        axes: the axes along which voxels are replaced. 0, 1 and 2 are depth, height and width.
        p_channel: the probability that a channel is changed, from 0 to 1.

    nnU-Net simulates low resolution in this way: it shrinks with nearest neighbours, and enlarges with linear
    interpolation.

    >>> import torch
    >>> LowResolution3D((0.5, 1.0))(torch.rand(2, 1, 8, 8, 8)).shape
    torch.Size([2, 1, 8, 8, 8])
    """

    native_step = "low_resolution"
    of_channel = ("is_changed", "scale")

    def __init__(
        self, scale: Any = (0.5, 1.0), axes: int | Sequence[int] = (0, 1, 2), p_channel: float = 1.0
    ) -> None:
        self.scale, self.axes = limits_of(scale, "scale", 0.0), axes_of(axes)
        self.p_channel = probability(p_channel, "p_channel")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise AugmentError(
                f"scale must be a fraction of the voxels, above 0 and at most 1, got {scale!r}"
            )

    def numbers(self, u: Float64Array) -> Float64Array:
        return between(u, *self.scale)

    def on_channel(self, canvas: Volume, channel: int, *numbers: float) -> None:
        (scale,) = numbers
        for axis in self.axes:
            length = canvas.shape[1 + axis]
            fewer = max(1, round(length * scale))
            if fewer < length:
                along(canvas, channel, axis, lower_resolution(length, fewer))

    def step_options(self) -> tuple[int, ...]:
        return self.axes
