"""Colours, blurs and erased boxes: torchvision's v2 transforms, with separate parameters for each image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from fastpipe.augment.base import Shape, Table
from fastpipe.augment.chains import BatchTransform, Columns, chosen, per_channel
from fastpipe.augment.distributions import between, erasing_table, jitter_table
from fastpipe.augment.parameters import (
    Float64Array,
    check_fill,
    filling_of,
    increasing,
    limits_of,
    probability,
)
from fastpipe.augment.steps import Step
from fastpipe.errors import AugmentError

_KINDS = ("brightness", "contrast", "saturation", "hue")
_PLACES = ("first", "second", "third", "fourth")
_GREY = (0.2989, 0.587, 0.114)
# torchvision's factor from floats to bytes: 1.0 becomes 255, and each byte covers an equal range of floats.
_TO_BYTE = 255.999


class ColorJitter(BatchTransform):
    """Change brightness, contrast, saturation and hue of each image, in an order drawn for each image.

    Args:
        brightness, contrast, saturation: factors are drawn from [max(0, 1 - value), 1 + value], or between
            the two given numbers.  Default: 0, no change.
        hue: fractions of a full turn are drawn from [-value, value], or between two numbers; at most 0.5.

    Images have 1 or 3 channels. Floats are in [0, 1].  As in torchvision, each change clips its result to the
    range and rounds bytes down.

    >>> import torch
    >>> ColorJitter(brightness=(0.5, 0.5))(torch.ones(1, 3, 2, 2)).unique()
    tensor([0.5000])
    """

    names = (*_KINDS, *_PLACES)
    native_step = "jitter"
    channels = (3, 1)

    def __init__(
        self,
        brightness: float | Sequence[float] = 0,
        contrast: float | Sequence[float] = 0,
        saturation: float | Sequence[float] = 0,
        hue: float | Sequence[float] = 0,
    ) -> None:
        self.brightness = limits_of(brightness, "brightness", 0.0, about=1.0)
        self.contrast = limits_of(contrast, "contrast", 0.0, about=1.0)
        self.saturation = limits_of(saturation, "saturation", 0.0, about=1.0)
        self.hue = limits_of(hue, "hue", -0.5, 0.5, about=0.0)

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        return jitter_table(u, (self.brightness, self.contrast, self.saturation, self.hue))

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        factors = [columns[kind].view(-1, 1, 1, 1) for kind in _KINDS]
        for place in _PLACES:
            images = blended(images, columns[place].view(-1, 1, 1, 1), factors, of_bytes)
        return images


def blended(values: Tensor, kinds: Tensor, factors: Sequence[Tensor], of_bytes: bool) -> Tensor:
    """Change brightness, contrast, saturation or hue of images (N, C, H, W). ``kinds``, (N, 1, 1, 1), selects
    one of these changes for each image: 0 to 3.

    ``factors`` holds the factors of these four changes. The factor of hue may be missing.  If ``of_bytes`` is
    True, values are integers from 0 to 255.
    """
    bound = 255.0 if of_bytes else 1.0
    brightness, contrast, saturation, *hue = factors
    factor = torch.where(kinds == 0, brightness, torch.where(kinds == 1, contrast, saturation))
    is_blended = (kinds <= 2) & (factor != 1)
    grey = _luminance(values, of_bytes)
    other = torch.where(kinds == 1, grey.mean(dim=(1, 2, 3), keepdim=True), grey)
    other = torch.where(kinds == 0, torch.zeros_like(other), other)
    blended = (values * factor + other * (1 - factor)).clamp(0, bound)
    blended = blended.floor() if of_bytes else blended
    if values.shape[1] == 1:  # a grey image has no saturation and no hue
        return torch.where(is_blended & (kinds <= 1), blended, values)
    changed = torch.where(is_blended, blended, values)
    if not hue:
        return changed
    turned = _turned(values / bound, hue[0])
    turned = (turned * _TO_BYTE).floor() if of_bytes else turned
    return torch.where((kinds == 3) & (hue[0] != 0), turned, changed)


def _luminance(values: Tensor, of_bytes: bool) -> Tensor:
    """Return the luminance, (N, 1, H, W)."""
    if values.shape[1] == 1:
        return values
    red, green, blue = (values[:, c : c + 1] * part for c, part in enumerate(_GREY))
    grey = red + green + blue
    return grey.floor() if of_bytes else grey


def _turned(values: Tensor, shift: Tensor) -> Tensor:
    """Change the hue of colours in [0, 1] with the formulas of the native core's ``turn_hue``."""
    red, green, _ = values.unbind(1)
    high, low = values.amax(1), values.amin(1)
    span = high - low
    one = torch.ones_like(span)
    is_grey = span == 0
    saturation = span / torch.where(is_grey, one, high)
    parts = (high.unsqueeze(1) - values) / torch.where(is_grey, one, span).unsqueeze(1)
    of_red, of_green, of_blue = parts.unbind(1)
    hue = of_green + 4 - of_red
    hue = torch.where(high == green, of_red + 2 - of_blue, hue)
    hue = torch.where(high == red, of_blue - of_green, hue)
    hue = hue / 6 + shift.view(-1, 1, 1) + 2
    sixths = (hue - hue.floor()) * 6
    channels = []
    for begin in (5, 3, 1):
        k = (sixths + begin) % 6
        channels.append(high - high * saturation * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, 1).clamp(0, 1)


class RandomGrayscale(BatchTransform):
    """Convert some images to grey, and keep their number of channels.

    Args:
        p: the probability that an image is converted to grey, from 0 to 1.
    """

    names = ("is_grey",)
    native_step = "grey"
    channels = (3, 1)

    def __init__(self, p: float = 0.1) -> None:
        self.p = probability(p)

    def table(self, u: Float64Array, shape: Shape) -> Table:
        return u < self.p

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        grey = _luminance(images, of_bytes)
        return chosen(columns["is_grey"], grey.expand_as(images), images)


class Normalize(BatchTransform):
    """Subtract a mean from each channel, and divide the difference by a standard deviation.

    Args:
        mean, std: one number per channel, for float images in [0, 1]. The numbers of ``std`` are above 0.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        try:
            self.mean, self.std = (tuple(map(float, one)) for one in (mean, std))
        except (TypeError, ValueError):
            self.mean, self.std = (), ()
        if not self.mean or len(self.mean) != len(self.std) or not all(0 < one < np.inf for one in self.std):
            raise AugmentError(
                f"mean and std must have one number for each channel, with std above 0, got {mean} and {std}"
            )
        if not np.isfinite(self.mean).all():
            raise AugmentError(f"mean must be finite, got {mean}")
        self.channels = (len(self.mean),) if len(self.mean) > 1 else ()

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        if dtype == torch.uint8:
            raise AugmentError("Normalize takes floats, got uint8: put ToDtype(torch.float32) before it")
        return dtype

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return [Step("normalize", column, numbers=(*self.mean, *self.std))]

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        return (images - per_channel(images, self.mean)) / per_channel(images, self.std)


class ToDtype(BatchTransform):
    """Convert images as torchvision's ``ToDtype(dtype, scale=True)`` does. Bytes become floats in [0, 1].

    Args:
        dtype: float32, float16, bfloat16 or uint8.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.uint8):
            raise AugmentError(f"dtype must be float32, float16, bfloat16 or uint8, got {dtype}")
        self.dtype = dtype

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return [Step("to_bytes" if self.dtype == torch.uint8 else "to_floats", column)]

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        if of_bytes and self.dtype != torch.uint8:
            return images * (1 / 255)
        if not of_bytes and self.dtype == torch.uint8:
            return (images * _TO_BYTE).floor()
        return images


# ---- blur ------------------------------------------------------------------------------------------


class GaussianBlur(BatchTransform):
    """Blur each image with a Gaussian, along rows and then along columns.

    Args:
        kernel_size: odd numbers of pixels along x and along y, in torchvision's order, or one number for
            both.
        sigma: the range from which standard deviations are drawn, in pixels. One number is used for all
            images.

    The weights are torchvision's: a Gaussian of the standard deviation ``sigma``, cut off at the kernel's
    size and divided by the sum of the weights.  Images are mirrored at their borders.
    """

    names = ("sigma",)

    def __init__(self, kernel_size: int | Sequence[int], sigma: float | Sequence[float] = (0.1, 2.0)) -> None:
        sizes = (kernel_size, kernel_size) if isinstance(kernel_size, int) else tuple(kernel_size)
        self.kernel_size = (int(sizes[0]), int(sizes[-1]))
        if any(size < 1 or size % 2 == 0 for size in self.kernel_size):
            raise AugmentError(f"kernel_size must be one or two odd numbers of pixels, got {kernel_size!r}")
        limits = sigma if isinstance(sigma, Sequence) else (sigma, sigma)
        self.sigma = (float(limits[0]), float(limits[-1]))
        if not 0 < self.sigma[0] <= self.sigma[1]:
            raise AugmentError(
                f"sigma must be a positive number, or two in increasing order, in pixels, got {sigma!r}"
            )

    def check(self, shape: Sequence[int]) -> None:
        super().check(shape)
        if self.kernel_size[0] // 2 >= shape[3] or self.kernel_size[1] // 2 >= shape[2]:
            raise AugmentError(
                f"GaussianBlur(kernel_size={self.kernel_size}) mirrors images at their borders, and "
                f"{shape[2]}×{shape[3]} pixels are too few for it: take a smaller kernel"
            )

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        return between(u, *self.sigma)

    def steps(self, column: int, shape: Shape, least: float = 1.0) -> list[Step]:
        return [Step("blur", column, self.kernel_size, (least,))]

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        count, channels, height, width = images.shape
        values = images.reshape(1, count * channels, height, width)
        half_x, half_y = self.kernel_size[0] // 2, self.kernel_size[1] // 2
        values = pad(values, [half_x, half_x, half_y, half_y], mode="reflect")
        for size, shape in ((self.kernel_size[0], (1, -1)), (self.kernel_size[1], (-1, 1))):
            weights = _weights_of(size, columns["sigma"]).repeat_interleave(channels, 0)
            values = conv2d(values, weights.view(count * channels, 1, *shape), groups=count * channels)
        return (values.round() if of_bytes else values).reshape(images.shape)


def _weights_of(size: int, sigma: Tensor) -> Tensor:
    """Return the weights of each image: (N, size)."""
    limit = (size - 1) / (2 * math.sqrt(2))
    places = torch.linspace(-limit, limit, size, device=sigma.device)
    return torch.softmax(-((places / sigma.view(-1, 1)) ** 2), dim=1)


# ---- erased boxes ----------------------------------------------------------------------------------

_BITS = 0xFFFF_FFFF


class RandomErasing(BatchTransform):
    """Fill a box in some images.

    Args:
        p: the probability that an image is changed, from 0 to 1.
        scale: the least and the greatest area of the box, as a fraction of the image's area.
        ratio: the least and the greatest height / width of the box.
        value: the fill: one number, one number per channel, or ``"random"`` for normal noise, which needs
            floats.

    Arguments and results match ``torchvision.transforms.v2.RandomErasing``.  Up to ten boxes are tried.  If
    no box is smaller than the image, the image stays unchanged.  Noise depends only on the parameter
    ``noise`` and the pixel's position.  Masks, boxes and keypoints stay unchanged.

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
                raise AugmentError(
                    "value must be a number, one number for each channel, or 'random', got None"
                )
            self.value = (filling,) if isinstance(filling, float) else filling

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        return erasing_table(u, shape[1:], self.p, self.scale, self.ratio)

    def check(self, shape: Sequence[int]) -> None:
        check_fill(self.value, shape[1], "value")

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        if dtype == torch.uint8 and self.value is None:
            raise AugmentError(
                "RandomErasing(value='random') fills with normal noise, which uint8 cannot hold: put "
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
        numbers = [math.trunc(number) if of_bytes else number for number in self.value]
        return torch.where(inside, per_channel(images, numbers), images)

    def noise(self, images: Tensor, seeds: Tensor) -> Tensor:
        """Return normal noise for every pixel of images. ``seeds``, (N,), is the parameter ``noise``."""
        places = torch.arange(images[0].numel(), device=images.device).view(images.shape[1:])
        mixed = _mixed(_mixed(places) ^ seeds.long().view(-1, 1, 1, 1))
        first, second = _mixed(mixed ^ 0x5851F42D), _mixed(mixed ^ 0x14057B7E)
        radius = torch.sqrt(-2 * torch.log(((first >> 8) + 1).float() * 2.0**-24))
        return radius * torch.cos((second >> 8).float() * (2 * math.pi * 2.0**-24))

    def extra_repr(self) -> str:
        value = "random" if self.value is None else self.value
        return f"p={self.p}, scale={self.scale}, ratio={self.ratio}, value={value!r}"


def _mixed(values: Tensor) -> Tensor:
    """Return MurmurHash3's finaliser of 32-bit numbers stored in 64 bits. Products keep the low 32 bits."""
    values = values ^ (values >> 16)
    values = (values * 0x85EBCA6B) & _BITS
    values = values ^ (values >> 13)
    values = (values * 0xC2B2AE35) & _BITS
    return values ^ (values >> 16)
