"""Erasing of boxes, with one of its own for each image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fastpipe.augment.distributions import erasing_table
from fastpipe.augment.images import BatchTransform, Columns
from fastpipe.augment.options import filling_of, increasing, probability
from fastpipe.augment.parameters import Float64Array
from fastpipe.augment.steps import Step
from fastpipe.augment.tables import Shape
from fastpipe.errors import AugmentError

__all__ = ["RandomErasing"]

_BITS = 0xFFFF_FFFF


class RandomErasing(BatchTransform):
    """Fill a box in some images.

    Args:
        p: the part of the images.
        scale: least and greatest part of the image's area.
        ratio: least and greatest height / width.
        value: what fills the box: one number, one for each channel, or ``"random"`` for normal noise.

    Arguments and results are those of ``torchvision.transforms.v2.RandomErasing``: of boxes ten are tried
    that are smaller than the image; where none is, it stays as it is.  Noise is a function of the parameter
    ``noise`` and of where a pixel is.  Masks, boxes and keypoints stay as they are.

    >>> RandomErasing(1.0, value=1.0)(torch.zeros(2, 3, 32, 32)).amax((1, 2, 3))
    tensor([1., 1.])
    """

    draws = 24
    names = ("top", "left", "height", "width", "noise")

    def __init__(
        self,
        p: float = 0.5,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: float | Sequence[float] | Literal["random"] = 0.0,
    ) -> None:
        self.p = probability(p)
        self.scale, self.ratio = increasing(scale, "scale", 1.0), increasing(ratio, "ratio")
        self.value: tuple[float, ...] | None = None
        if value != "random":
            filling = filling_of(value, "value")
            if filling is None:
                raise AugmentError("value= is a number, one for each channel, or 'random', got None")
            self.value = (filling,) if isinstance(filling, float) else filling

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        return erasing_table(u, shape[1:], self.p, self.scale, self.ratio)

    def check(self, shape: Sequence[int]) -> None:
        if self.value is not None and len(self.value) not in (1, shape[1]):
            raise AugmentError(f"value= has {len(self.value)} numbers for images of {shape[1]} channels")

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        if dtype == torch.uint8 and self.value is None:
            raise AugmentError(
                "RandomErasing(value='random') fills in normal noise, which bytes cannot hold: put "
                "ToDtype(torch.float32) before it"
            )
        return dtype

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return [Step("erase", column, numbers=self.value or ())]

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        top, left, height, width = (columns[name].view(-1, 1, 1, 1) for name in self.names[:4])
        y = torch.arange(images.shape[2], device=images.device).view(-1, 1)
        x = torch.arange(images.shape[3], device=images.device)
        inside = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
        if self.value is None:
            return torch.where(inside, self.noise(images, columns["noise"]), images)
        # Made there: an upload would wait for the device.
        numbers = [math.trunc(number) if of_bytes else number for number in self.value]
        values = torch.cat([images.new_full((1, 1, 1, 1), number) for number in numbers], dim=1)
        return torch.where(inside, values, images)

    def noise(self, images: Tensor, seeds: Tensor) -> Tensor:
        """Normal noise of the parameter ``noise``, (N,), for every pixel of images (N, C, H, W)."""
        places = torch.arange(images[0].numel(), device=images.device).view(images.shape[1:])
        mixed = _mixed(_mixed(places) ^ seeds.long().view(-1, 1, 1, 1))
        first, second = _mixed(mixed ^ 0x5851F42D), _mixed(mixed ^ 0x14057B7E)
        radius = torch.sqrt(-2 * torch.log(((first >> 8) + 1).float() * 2.0**-24))
        return radius * torch.cos((second >> 8).float() * (2 * math.pi * 2.0**-24))

    def extra_repr(self) -> str:
        value = "random" if self.value is None else self.value
        return f"p={self.p}, scale={self.scale}, ratio={self.ratio}, value={value!r}"


def _mixed(values: Tensor) -> Tensor:
    """The finaliser of MurmurHash3, of 32 bits in 64: products overflow above those that are kept."""
    values = values ^ (values >> 16)
    values = (values * 0x85EBCA6B) & _BITS
    values = values ^ (values >> 13)
    values = (values * 0xC2B2AE35) & _BITS
    return values ^ (values >> 16)
