"""Affine geometry: rotation, translation, scale and shear, with parameters of its own for each image."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from fastpipe.augment.distributions import affine_table, between
from fastpipe.augment.images import BatchTransform, Columns, Moves, Size
from fastpipe.augment.matrices import forward_affine, inverse_affine
from fastpipe.augment.options import (
    Fill,
    fill_numbers,
    filling_of,
    increasing,
    interpolation_of,
    range_about_zero,
    two_numbers,
)  # fmt: skip
from fastpipe.augment.parameters import Float64Array
from fastpipe.augment.steps import Step
from fastpipe.augment.tables import Shape
from fastpipe.errors import AugmentError

__all__ = [
    "MATRIX", "RandomAffine", "RandomRotation", "filling", "is_fused", "resampled", "sampling_grid",
    "warp_step",
]  # fmt: skip

# What is applied: from pixels about the centre of the result to those about the image's.
MATRIX = ("xx", "xy", "x1", "yx", "yy", "y1")


# Angles, translations, scales and shears.
Maps = tuple[Float64Array, Float64Array, Float64Array, Float64Array]


class _Warped(BatchTransform):
    """Resamples images by matrices."""

    applied_names = MATRIX
    interpolation: str
    fill: Fill

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return [warp_step(column, self.interpolation == "nearest", self.fill, (shape[1], shape[2]))]

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        return resampled(images, columns, self.interpolation, self.fill, of_bytes)

    def check(self, shape: Sequence[int]) -> None:
        if isinstance(self.fill, tuple) and len(self.fill) not in (1, shape[1]):
            raise AugmentError(f"fill= has {len(self.fill)} numbers for images of {shape[1]} channels")


class _Affine(_Warped, ABC):
    """Resamples images by affine maps about a centre."""

    center: tuple[float, float] | None

    @abstractmethod
    def _maps(self, table: Float64Array) -> Maps:
        """What ``matrices`` makes maps of."""

    def applied(self, table: Float64Array, shape: Shape) -> Float64Array:
        return inverse_affine(*self._maps(table), self._about_centre(*shape[1:]))

    def moves(self, table: Float64Array, shape: Shape, of_points: bool) -> Moves | None:
        found = forward_affine(*self._maps(table), self._centre(*shape[1:]))
        return Moves(found, np.ones(len(table), np.bool_))

    def for_masks(self) -> BatchTransform:
        return _MaskWarp(self.fill if self.fill is None or isinstance(self.fill, float) else self.fill[0])

    def _about_centre(self, height: int, width: int) -> Float64Array:
        """The centre of the map, from the image's."""
        if self.center is None:
            return np.zeros(2)
        x, y = self.center
        return np.asarray((x - width * 0.5, y - height * 0.5))

    def _centre(self, height: int, width: int) -> Float64Array:
        found: Float64Array = self._about_centre(height, width) + np.array([width, height]) * 0.5
        return found


class RandomAffine(_Affine):
    """Rotate, shift, scale and shear each image about its centre.

    Args:
        degrees: angles are drawn from [-degrees, degrees], or from the two numbers given; clockwise.
        translate: greatest shifts along x and y, as parts of width and height; they are whole pixels.
        scale: least and greatest factor.
        shear: angles along x are drawn from [-shear, shear], or from two numbers; of four, the last two are
            of angles along y.  Degrees.
        interpolation: ``"nearest"`` or ``"bilinear"``, or torchvision's name for it.
        fill: what is outside, one number or one for each channel; None is 0.
        center: x and y that stay, in pixels from the upper left corner.  Default: the image's centre.

    Arguments and results are those of ``torchvision.transforms.v2.RandomAffine``; the result is as large as
    the image.

    >>> shift = RandomAffine(0, translate=(0.5, 0.0))
    >>> shift(torch.ones(2, 3, 8, 8)).shape
    torch.Size([2, 3, 8, 8])
    """

    draws = 6
    names = ("angle", "translate_x", "translate_y", "scale", "shear_x", "shear_y")

    def __init__(
        self,
        degrees: float | Sequence[float],
        translate: Sequence[float] | None = None,
        scale: Sequence[float] | None = None,
        shear: float | Sequence[float] | None = None,
        interpolation: Any = "nearest",
        fill: Fill | Sequence[float] = 0.0,
        center: Sequence[float] | None = None,
    ) -> None:
        self.degrees = range_about_zero(degrees, "degrees")
        self.translate = _parts_of(translate)
        self.scale = None if scale is None else increasing(scale, "scale")
        self.shear = _shears(shear)
        self.interpolation = interpolation_of(interpolation, ("nearest", "bilinear"))
        self.fill, self.center = filling_of(fill), _point(center)

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        return affine_table(u, shape[1:], self.degrees, self.translate, self.scale, self.shear)

    def _maps(self, table: Float64Array) -> Maps:
        return table[:, 0], table[:, 1:3], table[:, 3], table[:, 4:6]

    def extra_repr(self) -> str:
        return (
            f"degrees={self.degrees}, translate={self.translate}, scale={self.scale}, shear={self.shear}, "
            f"interpolation={self.interpolation!r}, fill={self.fill}, center={self.center}"
        )


class RandomRotation(_Affine):
    """Rotate each image.

    Args:
        degrees: angles are drawn from [-degrees, degrees], or from the two numbers given; counter-clockwise.
        interpolation, fill, center: as of ``RandomAffine``.

    Arguments and results are those of ``torchvision.transforms.v2.RandomRotation``, but for ``expand``: all
    images of a batch are of one size.
    """

    draws = 1
    names = ("angle",)

    def __init__(
        self,
        degrees: float | Sequence[float],
        interpolation: Any = "nearest",
        fill: Fill | Sequence[float] = 0.0,
        center: Sequence[float] | None = None,
    ) -> None:
        self.degrees = range_about_zero(degrees, "degrees")
        self.interpolation = interpolation_of(interpolation, ("nearest", "bilinear"))
        self.fill, self.center = filling_of(fill), _point(center)

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        return between(u, *self.degrees)

    def _maps(self, table: Float64Array) -> Maps:
        none = np.zeros((len(table), 2))
        return -table[:, 0], none, np.ones(len(table)), none

    def extra_repr(self) -> str:
        return (
            f"degrees={self.degrees}, interpolation={self.interpolation!r}, fill={self.fill}, "
            f"center={self.center}"
        )


class _MaskWarp(_Warped):
    """Moves masks as images were."""

    names = MATRIX

    def __init__(self, fill: float | None) -> None:
        self.interpolation, self.fill = "nearest", fill


# ---- resampling ----------------------------------------------------------------------------------


def warp_step(column: int, is_nearest: bool, fill: Fill, size: Size) -> Step:
    """A resampling by a matrix, to images of this size."""
    return Step("warp", column, (is_nearest, is_fused(*size), *size), fill_numbers(fill))


# Below so many multiplications torch computes the product of two matrices by a loop of its own.
_LEAST_PRODUCTS = 400


def is_fused(height: int, width: int) -> bool:
    """Whether in torchvision's grid for a result of this size products are rounded once they are added.

    The grid is a product of matrices, (H · W, 3) by (3, 2), which a library computes: on processors of one
    kind it does so with fused instructions, on others without.
    """
    return height * width * 6 >= _LEAST_PRODUCTS and _library_fuses()


@functools.cache
def _library_fuses() -> bool:
    """Whether a product of matrices here is that of fused instructions."""
    x, y = torch.rand(2, 1000, generator=torch.Generator().manual_seed(0)) * 200 - 100
    xx, xy, x1 = (np.float32(number) for number in (0.7123, 0.3317, 0.25))
    points, column = torch.stack([x, y, torch.ones_like(x)], dim=1)[None], torch.tensor([[[xx], [xy], [x1]]])
    found = points.bmm(column.expand(1, 3, 2))[0, :, 0].numpy()
    across, down = x.numpy() * xx, y.numpy()
    fused = (down.astype(np.float64) * np.float64(xy) + across).astype(np.float32) + x1
    plain = (across + down * xy) + x1
    return int((found != fused).sum()) < int((found != plain).sum())


def resampled(
    images: Tensor,
    columns: Columns,
    interpolation: str,
    fill: Fill,
    of_bytes: bool,
) -> Tensor:
    """Images resampled by the matrices in ``columns``.

    Where a pixel is partly outside of the image and there is a fill, torchvision's is weighted once more with
    what is inside; so is this.
    """
    _, channels, height, width = images.shape
    grid = sampling_grid(columns, height, width, (height, width))
    if fill is not None:
        images = torch.cat([images, torch.ones_like(images[:, :1])], dim=1)
    found = grid_sample(images, grid, mode=interpolation, padding_mode="zeros", align_corners=False)
    if fill is not None:
        outside = filling(found, fill)
        found, inside = found[:, :channels], found[:, channels:]
        if interpolation == "nearest":
            found = torch.where(inside < 0.5, outside, found)
        else:
            found = (found - outside) * inside + outside
    return found.round() if of_bytes else found


def filling(images: Tensor, fill: float | tuple[float, ...]) -> Tensor:
    """A fill, (1, 1, 1, 1) or (1, C, 1, 1); made there, as an upload would wait for the device."""
    numbers = [fill] if isinstance(fill, float) else fill
    return torch.cat([images.new_full((1, 1, 1, 1), number) for number in numbers], dim=1)


def sampling_grid(
    columns: Columns, height: int, width: int, wanted: Size, shift: tuple[float, float] = (0.0, 0.0)
) -> Tensor:
    """Where pixels come from, in [-1, 1].

    Args:
        columns: matrices.
        height, width: of the images.
        wanted: height and width of what is made of them.
        shift: along y and x, from the middles of its pixels.

    Returns:
        (N, *wanted, 2), of x and y.
    """
    device = columns["xx"].device
    x = torch.arange(wanted[1], device=device) + (0.5 * (1 - wanted[1]) + shift[1])
    y = torch.arange(wanted[0], device=device) + (0.5 * (1 - wanted[0]) + shift[0])
    to_x = torch.stack([columns[name].view(-1) / (0.5 * width) for name in MATRIX[:3]], dim=1)
    to_y = torch.stack([columns[name].view(-1) / (0.5 * height) for name in MATRIX[3:]], dim=1)
    # A product of matrices, as torchvision computes it: the last bit decides which pixel is the nearest.
    points = torch.stack([x.expand(*wanted), y.view(-1, 1).expand(*wanted), x.new_ones(wanted)], dim=2)
    maps = torch.stack([to_x, to_y], dim=2)
    return points.view(1, -1, 3).expand(len(maps), -1, -1).bmm(maps).view(-1, *wanted, 2)


# ---- arguments -----------------------------------------------------------------------------------


def _point(center: Sequence[float] | None) -> tuple[float, float] | None:
    if center is None:
        return None
    found = two_numbers(center)
    if not np.isfinite(found).all():
        raise AugmentError(f"center= is x and y, in pixels, got {center!r}")
    return found


def _parts_of(translate: Sequence[float] | None) -> tuple[float, float]:
    if translate is None:
        return 0.0, 0.0
    x, y = two_numbers(translate)
    if not (0 <= x <= 1 and 0 <= y <= 1):
        raise AugmentError(f"translate= is two parts of width and height, from 0 to 1, got {translate!r}")
    return x, y


def _shears(shear: float | Sequence[float] | None) -> tuple[tuple[float, float], tuple[float, float]]:
    if shear is None:
        return (0.0, 0.0), (0.0, 0.0)
    if isinstance(shear, Sequence) and len(shear) == 4:
        return range_about_zero(shear[:2], "shear"), range_about_zero(shear[2:], "shear")
    return range_about_zero(shear, "shear"), (0.0, 0.0)
