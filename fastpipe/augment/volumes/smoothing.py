"""What takes detail from volumes: blur, and simulated low resolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastpipe.augment.distributions import Drawn
from fastpipe.augment.options import probability
from fastpipe.augment.parameters import Float64Array
from fastpipe.augment.volumes.base import PerChannel, axes_of, limits_of
from fastpipe.augment.volumes.lines import along, gaussian, lower_resolution
from fastpipe.augment.volumes.volume import Volume
from fastpipe.errors import AugmentError

__all__ = ["GaussianBlur3D", "LowResolution3D"]

_BLURRED = 1e-3  # voxels; less is no blur


class GaussianBlur3D(PerChannel):
    """Blur each channel of each volume, along each axis with a width of its own.

    Args:
        sigma: least and greatest standard deviation in voxels, or one number.
        axes: along which: 0, 1 and 2 are depth, height and width.
        p_channel: the part of the channels that are blurred.

    Results are those of ``scipy.ndimage.gaussian_filter1d`` with ``truncate=3`` and ``mode="mirror"``.

    >>> import torch
    >>> GaussianBlur3D((0.5, 1.0))(torch.rand(2, 1, 8, 8, 8)).shape
    torch.Size([2, 1, 8, 8, 8])
    """

    step = "blur"
    of_channel = ("is_blurred", "sigma_depth", "sigma_height", "sigma_width")

    def __init__(
        self, sigma: Any = (0.5, 1.0), axes: int | Sequence[int] = (0, 1, 2), p_channel: float = 1.0
    ) -> None:
        self.sigma, self.axes = limits_of(sigma, "sigma"), axes_of(axes)
        self.p_channel = probability(p_channel, "p_channel")

    def channel_drawn_as(self) -> Sequence[Drawn]:
        limits = [self.sigma if axis in self.axes else (0.0, 0.0) for axis in range(3)]
        return Drawn("flag", self.p_channel), *(Drawn("between", *one) for one in limits)

    def on_channel(self, canvas: Volume, channel: int, row: Float64Array) -> None:
        for axis, sigma in enumerate(row[1:]):
            if row[0] and sigma > _BLURRED:
                along(canvas, channel, axis, gaussian(canvas.shape[1 + axis], float(sigma)))

    def extra_repr(self) -> str:
        return f"{self.sigma}, axes={self.axes}, p_channel={self.p_channel}"


class LowResolution3D(PerChannel):
    """Keep some of each channel's voxels, spread evenly, and make those between them linearly.

    Args:
        scale: least and greatest part of the voxels along an axis that are kept, up to 1; or one number.
        axes: along which: 0, 1 and 2 are depth, height and width.
        p_channel: the part of the channels that are changed.

    As nnU-Net simulates low resolution: nearest neighbours downwards, trilinear upwards.

    >>> import torch
    >>> LowResolution3D((0.5, 1.0))(torch.rand(2, 1, 8, 8, 8)).shape
    torch.Size([2, 1, 8, 8, 8])
    """

    step = "low_resolution"
    of_channel = ("is_changed", "scale")

    def __init__(
        self, scale: Any = (0.5, 1.0), axes: int | Sequence[int] = (0, 1, 2), p_channel: float = 1.0
    ) -> None:
        self.scale, self.axes = limits_of(scale, "scale"), axes_of(axes)
        self.p_channel = probability(p_channel, "p_channel")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise AugmentError(f"scale= is a part of the voxels, above 0 and at most 1, got {scale!r}")

    def channel_drawn_as(self) -> Sequence[Drawn]:
        return Drawn("flag", self.p_channel), Drawn("between", *self.scale)

    def on_channel(self, canvas: Volume, channel: int, row: Float64Array) -> None:
        for axis in self.axes if row[0] else ():
            length = canvas.shape[1 + axis]
            fewer = max(1, round(length * float(row[1])))
            if fewer < length:
                along(canvas, channel, axis, lower_resolution(length, fewer))

    def step_options(self) -> tuple[int, ...]:
        return self.axes

    def extra_repr(self) -> str:
        return f"{self.scale}, axes={self.axes}, p_channel={self.p_channel}"
