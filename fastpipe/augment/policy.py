"""Policies: each image's changes are drawn from a list. Magnitudes are fixed (RandAugment) or drawn."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from fastpipe.augment.base import Shape
from fastpipe.augment.chains import BatchTransform, Columns, Moves
from fastpipe.augment.colour import blended
from fastpipe.augment.distributions import integers
from fastpipe.augment.geometry import MATRIX, MaskWarp, is_fused, resampled
from fastpipe.augment.matrices import after, forward_affine, identity, inverse_affine
from fastpipe.augment.parameters import (
    Fill,
    Float64Array,
    check_fill,
    fill_numbers,
    filling_of,
    interpolation_of,
)
from fastpipe.augment.steps import Step
from fastpipe.errors import AugmentError

# torchvision's list, in its order. The parameter ``change`` is an index into this list.
_CHANGES = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
    "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize",
)  # fmt: skip
_AT = {name: at for at, name in enumerate(_CHANGES)}
_GEOMETRY = range(_AT["ShearX"], _AT["Rotate"] + 1)
_BLENDED = {_AT["Brightness"]: 0, _AT["Contrast"]: 1, _AT["Color"]: 2}  # the kinds that ``blended`` takes
_FACTORS = ("Brightness", "Color", "Contrast", "Sharpness")
_SIGNED = range(_AT["ShearX"], _AT["Sharpness"] + 1)
_OF_CHANGE = ("change", "magnitude", *MATRIX)


class _Policy(BatchTransform):
    """The base class of policies. Changes are drawn for each image, and subclasses define the magnitudes.

    ``prefixes`` has one entry for each change of an image: the prefix of the names of the change's
    parameters.
    """

    channels: tuple[int, ...] = (3, 1)
    # The greatest magnitudes: shears as tangents, angles in degrees, shifts as fractions of the size (None:
    # 32 pixels), differences of factors from 1, and the bits that "Posterize" removes.
    _shear: float
    _angle: float
    _shift: float | None = None
    _factor: float
    _most_bits: int
    _precision: type[np.floating[Any]] = np.float64

    def __init__(
        self,
        prefixes: Sequence[str],
        num_magnitude_bins: int,
        interpolation: Any,
        fill: Fill | Sequence[float],
    ) -> None:
        if not (isinstance(num_magnitude_bins, int) and num_magnitude_bins > 1):
            raise AugmentError(
                f"num_magnitude_bins must be a whole number above 1, got {num_magnitude_bins!r}"
            )
        self.num_ops, self.num_magnitude_bins = len(prefixes), num_magnitude_bins
        self.interpolation = interpolation_of(interpolation, ("nearest", "bilinear"))
        self.fill = filling_of(fill)
        self.draws = 2 * self.num_ops
        self.names = tuple(before + name for before in prefixes for name in _OF_CHANGE[:2])
        self.applied_names = tuple(before + name for before in prefixes for name in _OF_CHANGE)

    def check(self, shape: Sequence[int]) -> None:
        super().check(shape)
        check_fill(self.fill, shape[1])

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        magnitudes, bins = self._magnitudes(*shape[1:]), self._bins(u)
        found = np.empty((len(u), 2 * self.num_ops))
        for at in range(self.num_ops):
            change = integers(u[:, 2 * at], len(_CHANGES))
            # Signed magnitudes are negative for half of the images.
            is_negative = (u[:, 2 * at + 1] <= 0.5) & np.isin(change, _SIGNED)
            sizes = magnitudes[bins, change.astype(np.int64)]
            found[:, 2 * at], found[:, 2 * at + 1] = change, np.where(is_negative, -sizes, sizes)
        return found

    @abstractmethod
    def _bins(self, u: Float64Array) -> Any:
        """Return which of the magnitudes each image gets: one index for all images, or an index for each,
        (N,)."""

    def _magnitudes(self, height: int, width: int) -> Float64Array:
        """Return all magnitudes of all changes, (bins, changes).

        Factors are given as their difference from 1, shears as tangents, shifts in pixels and angles in
        degrees.  The magnitude of "Posterize" is the number of bits that are kept.  The magnitude of
        "Solarize" is a threshold, as a fraction of the range.
        """
        count, first, last = self.num_magnitude_bins, np.zeros(len(_CHANGES)), np.zeros(len(_CHANGES))
        across, down = (32.0, 32.0) if self._shift is None else (self._shift * width, self._shift * height)
        for name, greatest in (
            ("ShearX", self._shear), ("ShearY", self._shear), ("TranslateX", across), ("TranslateY", down),
            ("Rotate", self._angle), *((name, self._factor) for name in _FACTORS),
        ):  # fmt: skip
            last[_AT[name]] = greatest
        first[_AT["Solarize"]] = 1.0
        found = _spaced(first, last, count, self._precision)
        lost = np.arange(count, dtype=np.float32) / np.float32((count - 1) / self._most_bits)
        found[:, _AT["Posterize"]] = np.rint(np.float32(8) - lost)
        return found

    def applied(self, table: Float64Array, shape: Shape) -> Float64Array:
        parts = [table[:, :0]]
        for at in range(0, 2 * self.num_ops, 2):
            change, magnitude = table[:, at], table[:, at + 1]
            parts += [table[:, at : at + 2], inverse_affine(*_affine_of(change, magnitude, *shape[1:]))]
        return np.concatenate(parts, axis=1)

    def moves(self, table: Float64Array, shape: Shape, of_points: bool) -> Moves:
        found, middle = identity(len(table)), np.array([0.5 * shape[2], 0.5 * shape[1]])
        for at in range(0, 2 * self.num_ops, 2):
            angle, shift, scale, shear, centre = _affine_of(table[:, at], table[:, at + 1], *shape[1:])
            found = after(found, forward_affine(angle, shift, scale, shear, centre + middle))
        return Moves(found, np.any(np.isin(table[:, ::2], _GEOMETRY), axis=1))

    def for_masks(self) -> BatchTransform:
        # The matrices of changes that are not geometric are identities.
        return MaskWarp(self, self.fill, [2 + at * len(_OF_CHANGE) for at in range(self.num_ops)])

    def steps(self, column: int, shape: Shape) -> list[Step]:
        options = int(self.interpolation == "nearest"), int(is_fused(shape[1], shape[2]))
        places = [column + at * len(_OF_CHANGE) for at in range(self.num_ops)]
        return [Step("policy", at, options, fill_numbers(self.fill)) for at in places]

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        names = self.applied_names_for(1)
        for at in range(0, len(names), len(_OF_CHANGE)):
            own = {name: columns[of] for name, of in zip(_OF_CHANGE, names[at:], strict=False)}
            images = self._changed(images, own, of_bytes)
        return images

    def _changed(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        """Make every change of all images, and select one result for each image. The choices are on the
        device, and the CPU does not know them."""
        change, magnitude = (columns[name].view(-1, 1, 1, 1) for name in ("change", "magnitude"))
        factor, bound = 1.0 + magnitude, 255.0 if of_bytes else 1.0
        found = images
        is_geometry = (change >= _GEOMETRY.start) & (change < _GEOMETRY.stop)
        moved = resampled(images, columns, self.interpolation, self.fill, of_bytes)
        found = torch.where(is_geometry, moved, found)
        for name, changed in (
            ("Sharpness", _sharpened(images, factor, of_bytes)),
            ("Posterize", _posterized(images, magnitude, of_bytes)),
            ("Solarize", torch.where(images >= magnitude * bound, bound - images, images)),
            ("AutoContrast", _contrasted(images, of_bytes)),
            ("Equalize", _equalized(images, of_bytes)),
        ):
            found = torch.where(change == _AT[name], changed, found)
        kind = torch.full_like(change, -1.0)
        for at, of_jitter in _BLENDED.items():
            kind = torch.where(change == at, torch.full_like(kind, of_jitter), kind)
        return torch.where(kind >= 0, blended(images, kind, [factor] * 3, of_bytes), found)


class RandAugment(_Policy):
    """Apply changes drawn from a list of fourteen to each image (E. D. Cubuk et al., 2019, arXiv:1909.13719).

    Args:
        num_ops: the number of changes of each image.
        magnitude: the magnitude of all changes, from 0 to ``num_magnitude_bins`` - 1.
        num_magnitude_bins: the number of magnitudes, at least 2.
        interpolation: the interpolation of geometric changes: ``"nearest"`` or ``"bilinear"``, or
            torchvision's enumeration.
        fill: the value outside the image, one number or one number per channel; None means 0.

    Arguments and results match ``torchvision.transforms.v2.RandAugment``. In addition, masks, boxes and
    keypoints move as the images move.  Images have 1 or 3 channels. Floats are in [0, 1].

    >>> RandAugment()(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape
    torch.Size([2, 3, 32, 32])
    """

    _shear, _angle, _shift, _factor, _most_bits = 0.3, 30.0, 150.0 / 331.0, 0.9, 4
    # Keep float32, so that a seed keeps its parameters, although the last bit of some magnitudes differs from
    # torchvision's.
    _precision = np.float32

    def __init__(
        self,
        num_ops: int = 2,
        magnitude: int = 9,
        num_magnitude_bins: int = 31,
        interpolation: Any = "nearest",
        fill: Fill | Sequence[float] = None,
    ) -> None:
        if not isinstance(num_ops, int) or num_ops < 0:
            raise AugmentError(f"num_ops must be a whole number of at least 0, got {num_ops!r}")
        super().__init__([f"{at}." for at in range(num_ops)], num_magnitude_bins, interpolation, fill)
        if not (isinstance(magnitude, int) and 0 <= magnitude < num_magnitude_bins):
            raise AugmentError(f"magnitude must be from 0 to {num_magnitude_bins - 1}, got {magnitude!r}")
        self.magnitude = magnitude

    def _bins(self, u: Float64Array) -> int:
        return self.magnitude


class TrivialAugmentWide(_Policy):
    """Apply one change from a list of fourteen, with a drawn magnitude, to each image.

    The policy is by S. G. Müller and F. Hutter, 2021, arXiv:2103.10158.

    Args:
        num_magnitude_bins: the number of magnitudes, at least 2. All magnitudes are equally likely.
        interpolation: the interpolation of geometric changes: ``"nearest"`` or ``"bilinear"``, or
            torchvision's enumeration.
        fill: the value outside the image, one number or one number per channel; None means 0.

    Arguments and results match ``torchvision.transforms.v2.TrivialAugmentWide``. In addition, masks, boxes
    and keypoints move as the images move.  Images have 1 or 3 channels. Floats are in [0, 1].

    >>> TrivialAugmentWide()(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape
    torch.Size([2, 3, 32, 32])
    """

    _shear, _angle, _factor, _most_bits = 0.99, 135.0, 0.99, 6

    def __init__(
        self,
        num_magnitude_bins: int = 31,
        interpolation: Any = "nearest",
        fill: Fill | Sequence[float] = None,
    ) -> None:
        super().__init__([""], num_magnitude_bins, interpolation, fill)
        self.draws += 1

    def _bins(self, u: Float64Array) -> Any:
        return integers(u[:, -1], self.num_magnitude_bins).astype(np.int64)


def _spaced(
    first: Float64Array, last: Float64Array, count: int, precision: type[np.floating[Any]]
) -> Float64Array:
    """Return ``torch.linspace(first, last, count)`` in columns, with products in the dtype ``precision``."""
    # torch rounds each sum once, as ``numpy.float64`` does.
    begin, end = first.astype(np.float32), last.astype(np.float32)
    step = ((end - begin) / np.float32(count - 1)).astype(precision)
    at = np.arange(count)[:, None].astype(precision)
    found: Float64Array = np.where(at < count // 2, begin + step * at, end - step * (count - 1 - at))
    return found.astype(np.float32).astype(np.float64)


def _affine_of(
    change: Float64Array, magnitude: Float64Array, height: int, width: int
) -> tuple[Float64Array, Float64Array, Float64Array, Float64Array, Float64Array]:
    """Return the arguments for the functions of ``matrices``, relative to the centre. A change that is not
    geometric gets the arguments of the identity."""
    count, none = len(change), np.zeros(len(change))
    of = {name: np.where(change == _AT[name], magnitude, none) for name in _CHANGES[1:6]}
    shear = np.degrees(np.arctan(np.stack([of["ShearX"], of["ShearY"]], axis=1)))
    is_sheared = np.isin(change, (_AT["ShearX"], _AT["ShearY"]))[:, None]  # about the upper left corner
    centre = np.where(is_sheared, np.array([[-0.5 * width, -0.5 * height]]), 0.0)
    translate = np.trunc(np.stack([of["TranslateX"], of["TranslateY"]], axis=1))
    return -of["Rotate"], translate, np.ones(count), shear, centre


# ---- colour changes of whole batches -------------------------------------------------------------


def _sharpened(images: Tensor, factor: Tensor, of_bytes: bool) -> Tensor:
    channels, bound = images.shape[1], 255.0 if of_bytes else 1.0
    if min(images.shape[2:]) <= 2:
        return images
    weights = images.new_full((channels, 1, 3, 3), 1 / 13)
    weights[:, :, 1, 1] = 5 / 13
    mean = conv2d(images, weights, groups=channels)
    inner = images[:, :, 1:-1, 1:-1]
    inner = inner + ((mean.round() if of_bytes else mean) - inner) * (1.0 - factor)
    found = images.clone()
    found[:, :, 1:-1, 1:-1] = inner
    found = found.clamp(0, bound)
    return found.floor() if of_bytes else found


def _posterized(images: Tensor, bits: Tensor, of_bytes: bool) -> Tensor:
    levels = torch.exp2(bits)
    step = 256 / levels if of_bytes else 1 / levels
    top = 255 + 0 * levels if of_bytes else levels - 1
    return torch.minimum((images / step).floor().clamp(min=0), top) * step


def _contrasted(images: Tensor, of_bytes: bool) -> Tensor:
    bound = 255.0 if of_bytes else 1.0
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    is_flat = low == high
    unit = torch.where(is_flat, torch.ones_like(low), (high - low) * (1 / bound))
    found = ((images - torch.where(is_flat, torch.zeros_like(low), low)) / unit).clamp(0, bound)
    return found.floor() if of_bytes else found


def _equalized(images: Tensor, of_bytes: bool) -> Tensor:
    values = images if of_bytes else (images * 255.999).floor()
    index = values.clamp(0, 255).nan_to_num().long().flatten(2)
    counts = torch.zeros((*images.shape[:2], 256), dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, index, torch.ones_like(index))
    places = torch.arange(256, device=images.device)
    last = torch.where(counts > 0, places, torch.zeros_like(places)).amax(2, keepdim=True)
    step = (index.shape[2] - counts.gather(2, last)) // 255
    below = counts.cumsum(2) - counts
    table = ((below + step // 2) // step.clamp(min=1)).clamp(max=255)
    table = torch.where(step > 0, table, places).float()
    return table.gather(2, index).view(images.shape) * (1.0 if of_bytes else 1 / 255)
