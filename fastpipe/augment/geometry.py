"""Flips, crops and affine maps: torchvision's v2 transforms, with separate parameters for each image."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from fastpipe.augment.base import Shape, Table
from fastpipe.augment.chains import BatchTransform, Columns, Moves, Size, chosen, per_channel
from fastpipe.augment.distributions import affine_table, between, crop_boxes
from fastpipe.augment.matrices import forward_affine, identity, inverse_affine, of_crops
from fastpipe.augment.parameters import (
    Fill,
    Float64Array,
    check_fill,
    fill_numbers,
    filling_of,
    increasing,
    interpolation_of,
    limits_of,
    probability,
    two_numbers,
)
from fastpipe.augment.steps import Step
from fastpipe.errors import AugmentError

# ---- flips and crops -------------------------------------------------------------------------------

_INTERPOLATIONS = ("nearest", "bilinear", "bicubic")


class _RandomFlip(BatchTransform):
    names = ("is_flipped",)
    _dim = -1

    def __init__(self, p: float = 0.5) -> None:
        self.p = probability(p)

    def table(self, u: Float64Array, shape: Shape) -> Table:
        return u < self.p

    def for_masks(self) -> BatchTransform:
        return self

    def moves(self, table: Float64Array, shape: Shape, of_points: bool) -> Moves:
        found, (diagonal, last) = identity(len(table)), ((0, 2) if self._dim == -1 else (4, 5))
        is_flipped = table[:, 0] > 0
        found[is_flipped, diagonal] = -1
        found[is_flipped, last] = shape[self._dim] - of_points
        return Moves(found, np.zeros(len(table), np.bool_))

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return [Step("flip", column, (int(self._dim == -2),))]

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        return chosen(columns["is_flipped"], images.flip(self._dim), images)


class RandomHorizontalFlip(_RandomFlip):
    """Mirror some images left to right.

    Args:
        p: the probability that an image is mirrored, from 0 to 1.

    >>> RandomHorizontalFlip(1.0)(torch.tensor([[[[1.0, 2.0]]]]))
    tensor([[[[2., 1.]]]])
    """


class RandomVerticalFlip(_RandomFlip):
    """Mirror some images top to bottom.

    Args:
        p: the probability that an image is mirrored, from 0 to 1.

    >>> RandomVerticalFlip(0.0)(torch.tensor([[[[1.0], [2.0]]]])).flatten()
    tensor([1., 2.])
    """

    _dim = -2


class RandomResizedCrop(BatchTransform):
    """Cut a box out of each image, and resize the box.

    Args:
        size: the height and the width of the result in pixels, or one number for both.
        scale: the least and the greatest area of the box, as a fraction of the image's area.
        ratio: the least and the greatest width / height of the box.
        interpolation: ``"bilinear"`` or ``"bicubic"``, both with antialiasing, or ``"nearest"``.
            torchvision's enumeration is accepted as well.

    Arguments and results match ``torchvision.transforms.v2.RandomResizedCrop``.  Up to ten boxes are tried.
    If no box fits, the largest central box is used.

    >>> RandomResizedCrop(4)(torch.ones(2, 3, 8, 8)).shape
    torch.Size([2, 3, 4, 4])
    """

    draws = 22
    names = ("top", "left", "height", "width")

    def __init__(
        self,
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: Any = "bilinear",
    ) -> None:
        sizes = (size, size) if isinstance(size, int) else tuple(size)
        if len(sizes) not in (1, 2) or not all(isinstance(one, int) and one > 0 for one in sizes):
            raise AugmentError(
                f"size must be (height, width) in pixels, or one number for both, got {size!r}"
            )
        self.size: Size = (sizes[0], sizes[-1])
        self.scale, self.ratio = increasing(scale, "scale", 1.0), increasing(ratio, "ratio")
        self.interpolation = interpolation_of(interpolation, _INTERPOLATIONS)

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        return crop_boxes(shape[1], shape[2], self.scale, self.ratio, u)

    def shape_after(self, shape: Shape) -> Shape:
        return shape[0], *self.size

    def for_masks(self) -> BatchTransform:
        return RandomResizedCrop(self.size, interpolation="nearest")

    def moves(self, table: Float64Array, shape: Shape, of_points: bool) -> Moves:
        return Moves(of_crops(table, *self.size), np.ones(len(table), np.bool_))

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return [Step("crop", column, (*self.size, _INTERPOLATIONS.index(self.interpolation)))]

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        (height, width), mode = self.size, self.interpolation
        across = axis_weights(columns["left"], columns["width"], images.shape[3], width, mode)
        down = axis_weights(columns["top"], columns["height"], images.shape[2], height, mode)
        values = images @ across.transpose(1, 2).unsqueeze(1)
        values = down.unsqueeze(1) @ values
        return values.round().clamp(0, 255) if of_bytes else values


def axis_weights(begin: Tensor, extent: Tensor, size: int, wanted: int, interpolation: str) -> Tensor:
    """Return the weight of each input pixel in each output pixel along an axis: (N, wanted, size).

    The weights are those of ``torch.nn.functional.interpolate`` with ``antialias=True``.  The filter becomes
    wider with the number of input pixels per output pixel.  The filter is clipped at the box's borders, and
    its weights sum to 1.
    """
    begin, extent = begin.view(-1, 1, 1), extent.view(-1, 1, 1)
    step = extent / wanted
    centre = step * (torch.arange(wanted, device=begin.device).view(1, -1, 1) + 0.5)
    place = torch.arange(size, device=begin.device).view(1, 1, -1) - begin
    if interpolation == "nearest":
        index = (centre - 0.5 * step).floor().clamp(max=extent - 1)
        return (place == index).float()
    stretch = step.clamp(min=1.0)
    reach = stretch * (1.0 if interpolation == "bilinear" else 2.0)
    first = (centre - reach + 0.5).floor().clamp(min=0.0)
    last = torch.minimum((centre + reach + 0.5).floor(), extent)
    distance = ((place + 0.5 - centre) / stretch).abs()
    weights = (1 - distance).clamp(min=0.0) if interpolation == "bilinear" else _cubic(distance)
    weights = torch.where((place >= first) & (place < last), weights, torch.zeros_like(weights))
    return weights / weights.sum(2, keepdim=True)


def _cubic(distance: Tensor) -> Tensor:
    """Return Keys's filter with a = -1/2, which torch and Pillow use for antialiasing."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros_like(distance)))


# ---- rotation, translation, scale and shear --------------------------------------------------------

# The applied numbers map pixels relative to the result's centre to pixels relative to the image's centre.
MATRIX = ("xx", "xy", "x1", "yx", "yy", "y1")


Maps = tuple[Float64Array, Float64Array, Float64Array, Float64Array]


class _Affine(BatchTransform, ABC):
    """The base class of augmentations that map images affinely about a centre."""

    applied_names = MATRIX

    def __init__(
        self,
        degrees: float | Sequence[float],
        interpolation: Any = "nearest",
        fill: Fill | Sequence[float] = 0.0,
        center: Sequence[float] | None = None,
    ) -> None:
        self.degrees = limits_of(degrees, "degrees", about=0.0)
        self.interpolation = interpolation_of(interpolation, ("nearest", "bilinear"))
        self.fill, self.center = filling_of(fill), None if center is None else two_numbers(center)
        if self.center is not None and not np.isfinite(self.center).all():
            raise AugmentError(f"center must be (x, y) in pixels, got {center!r}")

    @abstractmethod
    def _maps(self, table: Float64Array) -> Maps:
        """Return angles, translations, scales and shears as the functions of ``matrices`` take them."""

    def check(self, shape: Sequence[int]) -> None:
        check_fill(self.fill, shape[1])

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return [warp_step(column, self.interpolation == "nearest", self.fill, (shape[1], shape[2]))]

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        return resampled(images, columns, self.interpolation, self.fill, of_bytes)

    def applied(self, table: Float64Array, shape: Shape) -> Float64Array:
        return inverse_affine(*self._maps(table), self._about_centre(*shape[1:]))

    def moves(self, table: Float64Array, shape: Shape, of_points: bool) -> Moves | None:
        _, height, width = shape
        centre = self._about_centre(height, width) + np.array([width, height]) * 0.5
        return Moves(forward_affine(*self._maps(table), centre), np.ones(len(table), np.bool_))

    def for_masks(self) -> BatchTransform:
        return MaskWarp(self, self.fill)

    def _about_centre(self, height: int, width: int) -> Float64Array:
        """Return the centre of the map relative to the image's centre."""
        if self.center is None:
            return np.zeros(2)
        x, y = self.center
        return np.asarray((x - width * 0.5, y - height * 0.5))


class RandomAffine(_Affine):
    """Rotate, shift, scale and shear each image about its centre.

    Args:
        degrees: angles are drawn from [-degrees, degrees], or between the two given numbers; clockwise.
        translate: the greatest shifts along x and y, as fractions of the width and the height. Shifts are
            rounded to whole pixels.
        scale: the least and the greatest factor.  Default: no scaling.
        shear: angles along x, in degrees, are drawn from [-shear, shear], or between two numbers.  If four
            numbers are given, the last two numbers are the range along y.
        interpolation: ``"nearest"`` or ``"bilinear"``, or torchvision's enumeration.
        fill: the value outside the image, one number or one number per channel; None means 0.
        center: the fixed point, x and y in pixels from the upper left corner.  Default: the image's centre.

    Arguments and results match ``torchvision.transforms.v2.RandomAffine``. The result has the size of the
    image.

    >>> shift = RandomAffine(0, translate=(0.5, 0.0))
    >>> shift(torch.ones(2, 3, 8, 8)).shape
    torch.Size([2, 3, 8, 8])
    """

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
        super().__init__(degrees, interpolation, fill, center)
        self.translate = _parts_of(translate)
        self.scale = None if scale is None else increasing(scale, "scale")
        self.shear = _shears(shear)

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        return affine_table(u, shape[1:], self.degrees, self.translate, self.scale, self.shear)

    def _maps(self, table: Float64Array) -> Maps:
        return table[:, 0], table[:, 1:3], table[:, 3], table[:, 4:6]


class RandomRotation(_Affine):
    """Rotate each image.

    Args:
        degrees: angles are drawn from [-degrees, degrees], or between the two given numbers;
            counter-clockwise.
        interpolation, fill, center: see ``RandomAffine``.

    Arguments and results match ``torchvision.transforms.v2.RandomRotation``, without ``expand``, because all
    images of a batch have the same size.
    """

    names = ("angle",)

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        return between(u, *self.degrees)

    def _maps(self, table: Float64Array) -> Maps:
        none = np.zeros((len(table), 2))
        return -table[:, 0], none, np.ones(len(table)), none


class MaskWarp(BatchTransform):
    """An augmentation that moves masks as ``op`` moves images. ``begins`` are the first columns of the
    matrices with which masks are resampled."""

    def __init__(self, op: BatchTransform, fill: Fill, begins: Sequence[int] = (0,)) -> None:
        self.op, self.names, self.begins = op, op.applied_names_for(1), begins
        self.fill = next(iter(fill_numbers(fill)), None)

    def shape_after(self, shape: Shape) -> Shape:
        return self.op.shape_after(shape)

    def steps(self, column: int, shape: Shape) -> list[Step]:
        height, width = self.shape_after(shape)[1:]
        return [warp_step(column + at, True, self.fill, (height, width)) for at in self.begins]

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        height, width = self.shape_after(tuple(images.shape[1:]))[1:]
        for at in self.begins:
            own = {name: columns[of] for name, of in zip(MATRIX, self.names[at:], strict=False)}
            images = resampled(images, own, "nearest", self.fill, of_bytes, (height, width))
        return images


# ---- resampling ----------------------------------------------------------------------------------


def warp_step(column: int, is_nearest: bool, fill: Fill, size: Size) -> Step:
    """Return the step that resamples images with a matrix to this size."""
    return Step("warp", column, (is_nearest, is_fused(*size), *size), fill_numbers(fill))


# Below this number of multiplications, torch computes a matrix product with its own loop.
_LEAST_PRODUCTS = 400


def is_fused(height: int, width: int) -> bool:
    """Return whether torchvision's sampling grid for this size is computed with fused multiply-adds.

    torch computes the grid as a matrix product, (H · W, 3) by (3, 2), with a library.  The library uses fused
    instructions on some processors only.
    """
    return height * width * 6 >= _LEAST_PRODUCTS and _library_fuses()


@functools.cache
def _library_fuses() -> bool:
    """Return whether matrix products on this machine use fused multiply-adds."""
    x, y = torch.rand(2, 1000, generator=torch.Generator().manual_seed(0)) * 200 - 100
    xx, xy, x1 = (np.float32(number) for number in (0.7123, 0.3317, 0.25))
    points, column = torch.stack([x, y, torch.ones_like(x)], dim=1)[None], torch.tensor([[[xx], [xy], [x1]]])
    found = points.bmm(column.expand(1, 3, 2))[0, :, 0].numpy()
    across, down = x.numpy() * xx, y.numpy()
    fused = (down.astype(np.float64) * np.float64(xy) + across).astype(np.float32) + x1
    plain = (across + down * xy) + x1
    return int((found != fused).sum()) < int((found != plain).sum())


def resampled(
    images: Tensor, columns: Columns, interpolation: str, fill: Fill, of_bytes: bool, size: Size | None = None
) -> Tensor:
    """Resample images with the matrices in ``columns``, to ``size`` or to the images' own size.

    If a fill is given, a pixel at the image's edge is weighted twice, as in torchvision. The weight is the
    fraction of the pixel that is inside the image.
    """
    _, channels, height, width = images.shape
    grid = sampling_grid(columns, height, width, size or (height, width))
    if fill is not None:
        images = torch.cat([images, torch.ones_like(images[:, :1])], dim=1)
    found = grid_sample(images, grid, mode=interpolation, padding_mode="zeros", align_corners=False)
    if fill is not None:
        outside = per_channel(found, fill_numbers(fill))
        found, inside = found[:, :channels], found[:, channels:]
        if interpolation == "nearest":
            found = torch.where(inside < 0.5, outside, found)
        else:
            found = (found - outside) * inside + outside
    return found.round() if of_bytes else found


def sampling_grid(
    columns: Columns, height: int, width: int, wanted: Size, shift: tuple[float, float] = (0.0, 0.0)
) -> Tensor:
    """Return where the pixels of a result of the size ``wanted`` are taken from: (N, *wanted, 2), x and y in
    [-1, 1].

    ``height`` and ``width`` are the size of the images. ``shift``, along y and x, is relative to the pixels'
    centres.
    """
    device = columns["xx"].device
    x = torch.arange(wanted[1], device=device) + (0.5 * (1 - wanted[1]) + shift[1])
    y = torch.arange(wanted[0], device=device) + (0.5 * (1 - wanted[0]) + shift[0])
    to_x = torch.stack([columns[name].view(-1) / (0.5 * width) for name in MATRIX[:3]], dim=1)
    to_y = torch.stack([columns[name].view(-1) / (0.5 * height) for name in MATRIX[3:]], dim=1)
    # Use a matrix product, as torchvision does: the product's last bit decides which pixel is the nearest.
    points = torch.stack([x.expand(*wanted), y.view(-1, 1).expand(*wanted), x.new_ones(wanted)], dim=2)
    maps = torch.stack([to_x, to_y], dim=2)
    return points.view(1, -1, 3).expand(len(maps), -1, -1).bmm(maps).view(-1, *wanted, 2)


def _parts_of(translate: Sequence[float] | None) -> tuple[float, float]:
    if translate is None:
        return 0.0, 0.0
    x, y = two_numbers(translate)
    if not (0 <= x <= 1 and 0 <= y <= 1):
        raise AugmentError(
            f"translate must be two fractions of the width and height, from 0 to 1, got {translate!r}"
        )
    return x, y


def _shears(shear: float | Sequence[float] | None) -> tuple[tuple[float, float], tuple[float, float]]:
    if isinstance(shear, Sequence) and len(shear) == 4:
        return limits_of(shear[:2], "shear"), limits_of(shear[2:], "shear")
    return limits_of(0 if shear is None else shear, "shear", about=0.0), (0.0, 0.0)
