"""Colours: what torchvision's v2 transforms do, with parameters of its own for each image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.distributions import Drawn, jitter_table
from fastpipe.augment.images import BatchTransform, Columns, chosen
from fastpipe.augment.options import probability, two_numbers
from fastpipe.augment.parameters import Float64Array
from fastpipe.augment.steps import Step
from fastpipe.augment.tables import Shape
from fastpipe.errors import AugmentError

__all__ = ["ColorJitter", "Normalize", "RandomGrayscale", "ToDtype"]

_KINDS = ("brightness", "contrast", "saturation", "hue")
_PLACES = ("first", "second", "third", "fourth")
_GREY = (0.2989, 0.587, 0.114)
# torchvision makes bytes of floats by this: 1.0 becomes 255, and all bytes are equally wide.
_TO_BYTE = 255.999


class ColorJitter(BatchTransform):
    """Change brightness, contrast, saturation and hue of each image, in an order of its own.

    Args:
        brightness, contrast, saturation: factors are drawn from [max(0, 1 - value), 1 + value], or from the
            two numbers given.
        hue: parts of a turn are drawn from [-value, value], or from the two numbers given; at most 0.5.

    Images have 3 channels or 1; floats are in [0, 1].  Each change is cut off at the range's ends, and of
    bytes rounded down, as torchvision's are.

    >>> import torch
    >>> ColorJitter(brightness=(0.5, 0.5))(torch.ones(1, 3, 2, 2)).unique()
    tensor([0.5000])
    """

    draws = 8
    names = (*_KINDS, *_PLACES)
    channels = (3, 1)

    def __init__(
        self,
        brightness: float | Sequence[float] = 0,
        contrast: float | Sequence[float] = 0,
        saturation: float | Sequence[float] = 0,
        hue: float | Sequence[float] = 0,
    ) -> None:
        self.brightness = _range_of(brightness, "brightness")
        self.contrast = _range_of(contrast, "contrast")
        self.saturation = _range_of(saturation, "saturation")
        self.hue = _range_of(hue, "hue", centre=0.0, bounds=(-0.5, 0.5))

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        ranges = (self.brightness, self.contrast, self.saturation, self.hue)
        return jitter_table(u, ranges)

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return [Step("jitter", column)]

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        factors = [columns[kind].view(-1, 1, 1, 1) for kind in _KINDS]
        for place in _PLACES:
            images = blended(images, columns[place].view(-1, 1, 1, 1), factors, of_bytes)
        return images

    def extra_repr(self) -> str:
        return ", ".join(f"{kind}={getattr(self, kind)}" for kind in _KINDS)


def blended(values: Tensor, kinds: Tensor, factors: Sequence[Tensor], of_bytes: bool) -> Tensor:
    """Images changed in brightness, contrast, saturation or hue.

    Args:
        values: (N, C, H, W), float32.
        kinds: which change, as an index of ``factors``; like these (N, 1, 1, 1).
        factors: of all four changes, or of those but the hue.
        of_bytes: whether the range is 0 … 255, of whole numbers.
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
    if values.shape[1] == 1:  # has neither saturation nor hue
        return torch.where(is_blended & (kinds <= 1), blended, values)
    changed = torch.where(is_blended, blended, values)
    if not hue:
        return changed
    turned = _turned(values / bound, hue[0])
    turned = (turned * _TO_BYTE).floor() if of_bytes else turned
    return torch.where((kinds == 3) & (hue[0] != 0), turned, changed)


def _luminance(values: Tensor, of_bytes: bool) -> Tensor:
    """One channel, (N, 1, H, W)."""
    if values.shape[1] == 1:
        return values
    red, green, blue = (values[:, c : c + 1] * part for c, part in enumerate(_GREY))
    grey = red + green + blue
    return grey.floor() if of_bytes else grey


def _turned(values: Tensor, shift: Tensor) -> Tensor:
    """Colours in [0, 1] with their hue turned; the formulas are those of the native core's ``turn_hue``."""
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


def _range_of(
    value: float | Sequence[float],
    name: str,
    centre: float = 1.0,
    bounds: tuple[float, float] = (0.0, np.inf),
) -> tuple[float, float]:
    """The range of a factor."""
    if isinstance(value, Sequence):
        low, high = two_numbers(value)
    elif value < 0:
        low = high = np.nan
    else:
        low, high = max(bounds[0], centre - value) if centre else -value, centre + value
    if not bounds[0] <= low <= high <= bounds[1]:  # NaN neither
        raise AugmentError(
            f"{name}= is a number of at least 0 or two that increase, within {bounds}, got {value!r}"
        )
    return low, high


class RandomGrayscale(BatchTransform):
    """Make some images grey, of as many channels as they had.

    Args:
        p: the part of them.
    """

    draws = 1
    names = ("is_grey",)
    channels = (3, 1)

    def __init__(self, p: float = 0.1) -> None:
        self.p = probability(p)

    def drawn_as(self, channels: int) -> Sequence[Drawn]:
        return [Drawn("flag", self.p)]

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return [Step("grey", column)]

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        grey = _luminance(images, of_bytes)
        return chosen(columns["is_grey"], grey.expand_as(images), images)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Normalize(BatchTransform):
    """Subtract a mean from each channel, and divide it by a standard deviation.

    Args:
        mean, std: one number for each channel, of images in [0, 1].
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        try:
            self.mean, self.std = (tuple(map(float, one)) for one in (mean, std))
        except (TypeError, ValueError):
            self.mean, self.std = (), ()
        if not self.mean or len(self.mean) != len(self.std) or not all(0 < one < np.inf for one in self.std):
            raise AugmentError(
                f"mean= and std= have a number for each channel, those of std above 0, got {mean} and {std}"
            )
        if not np.isfinite(self.mean).all():
            raise AugmentError(f"mean= is finite, got {mean}")
        self.channels = (len(self.mean),) if len(self.mean) > 1 else ()

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        if dtype == torch.uint8:
            raise AugmentError("Normalize takes floats, got uint8: put ToDtype(torch.float32) before it")
        return dtype

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return [Step("normalize", column, numbers=(*self.mean, *self.std))]

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        # Made there: an upload would wait for the device.
        mean, std = (
            torch.cat([images.new_full((1, 1, 1, 1), number) for number in one], dim=1)
            for one in (self.mean, self.std)
        )
        return (images - mean) / std

    def extra_repr(self) -> str:
        return f"mean={self.mean}, std={self.std}"


class ToDtype(BatchTransform):
    """Convert images, as torchvision's ``ToDtype(dtype, scale=True)``: bytes become floats in [0, 1].

    Args:
        dtype: float32, float16, bfloat16 or uint8.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.uint8):
            raise AugmentError(f"dtype= is float32, float16, bfloat16 or uint8, got {dtype}")
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

    def extra_repr(self) -> str:
        return str(self.dtype)
