"""Geometry: torchvision's v2 transforms, with parameters of its own for each image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.distributions import Drawn, crop_boxes
from fastpipe.augment.images import BatchTransform, Columns, Moves, Size, chosen
from fastpipe.augment.matrices import identity, of_crops
from fastpipe.augment.options import increasing, interpolation_of, probability
from fastpipe.augment.parameters import Float64Array
from fastpipe.augment.steps import Step
from fastpipe.augment.tables import Shape
from fastpipe.errors import AugmentError

__all__ = ["RandomHorizontalFlip", "RandomResizedCrop", "RandomVerticalFlip", "axis_weights"]


_INTERPOLATIONS = ("nearest", "bilinear", "bicubic")


class _RandomFlip(BatchTransform):
    draws = 1
    names = ("is_flipped",)
    _dim = -1

    def __init__(self, p: float = 0.5) -> None:
        self.p = probability(p)

    def drawn_as(self, channels: int) -> Sequence[Drawn]:
        return [Drawn("flag", self.p)]

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

    def extra_repr(self) -> str:
        return f"p={self.p}"


class RandomHorizontalFlip(_RandomFlip):
    """Mirror some images, left and right.

    Args:
        p: the part of them.

    >>> RandomHorizontalFlip(1.0)(torch.tensor([[[[1.0, 2.0]]]]))
    tensor([[[[2., 1.]]]])
    """


class RandomVerticalFlip(_RandomFlip):
    """Mirror some images, top and bottom.

    Args:
        p: the part of them.

    >>> RandomVerticalFlip(0.0)(torch.tensor([[[[1.0], [2.0]]]])).flatten()
    tensor([1., 2.])
    """

    _dim = -2


class RandomResizedCrop(BatchTransform):
    """Cut a box out of each image, and resize it.

    Args:
        size: height and width afterwards, or one number for both.
        scale: least and greatest part of the image's area.
        ratio: least and greatest width / height.
        interpolation: ``"bilinear"`` or ``"bicubic"``, with antialiasing, or ``"nearest"``; or torchvision's
            name for it.

    Arguments and results are those of ``torchvision.transforms.v2.RandomResizedCrop``: ten boxes are
    tried, then the largest central one is taken.

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
            raise AugmentError(f"size= is height and width in pixels, or one number for both, got {size!r}")
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
        across = axis_weights(
            columns["left"], columns["width"], images.shape[3], self.size[1], self.interpolation
        )
        down = axis_weights(
            columns["top"], columns["height"], images.shape[2], self.size[0], self.interpolation
        )
        values = images @ across.transpose(1, 2).unsqueeze(1)
        values = down.unsqueeze(1) @ values
        return values.round().clamp(0, 255) if of_bytes else values

    def extra_repr(self) -> str:
        return f"{self.size}, scale={self.scale}, ratio={self.ratio}, interpolation={self.interpolation!r}"


def axis_weights(begin: Tensor, extent: Tensor, size: int, wanted: int, interpolation: str) -> Tensor:
    """What each input pixel adds to each output pixel along an axis: (N, wanted, size).

    As ``torch.nn.functional.interpolate`` has it with ``antialias=True``: a filter as wide as the input's
    pixels are for one of the output, cut off at the box's borders, of which the sum is 1.
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
    weights = _linear(distance) if interpolation == "bilinear" else _cubic(distance)
    weights = torch.where((place >= first) & (place < last), weights, torch.zeros_like(weights))
    return weights / weights.sum(2, keepdim=True)


def _linear(distance: Tensor) -> Tensor:
    return (1 - distance).clamp(min=0.0)


def _cubic(distance: Tensor) -> Tensor:
    """Keys's filter with a = -1/2, which torch uses for antialiasing, as Pillow does."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros_like(distance)))
