"""torchvision's transforms as augmentations of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fastpipe.augment.affine import RandomAffine, RandomRotation
from fastpipe.augment.applying import RandomApply
from fastpipe.augment.blur import GaussianBlur
from fastpipe.augment.colour import ColorJitter, Normalize, RandomGrayscale, ToDtype
from fastpipe.augment.compose import Compose
from fastpipe.augment.erasing import RandomErasing
from fastpipe.augment.geometry import RandomHorizontalFlip, RandomResizedCrop, RandomVerticalFlip
from fastpipe.augment.images import BatchTransform
from fastpipe.augment.mixing import CutMix, MixUp
from fastpipe.augment.policy import RandAugment, TrivialAugmentWide
from fastpipe.errors import AugmentError
from fastpipe.images.steps import is_pristine, is_torchvision

__all__ = ["from_torchvision", "translated"]


def from_torchvision(transform: Any, *, fuse: bool = False) -> Compose:
    """What a transform of torchvision's does with samples, for batches: the same arguments.

    Args:
        transform: of ``torchvision.transforms`` or its ``v2``, also a ``Compose`` of several, nested, or a
            ``torch.nn.Sequential``.  What makes tensors of images (``ToImage``, ``PILToTensor``) is left out,
            as batches are tensors already; ``ToTensor`` also converts bytes to floats.
        fuse: as of ``Compose``.

    Returns:
        The augmentations, whose draws are others, of the same distributions.

    Raises:
        AugmentError: names the transform, or its argument, that there is no augmentation of batches for.

    >>> from torchvision.transforms import v2
    >>> from_torchvision(v2.Compose([v2.RandomHorizontalFlip(0.3), v2.RandomGrayscale()]))
    Compose([
        RandomHorizontalFlip(p=0.3),
        RandomGrayscale(p=0.1),
    ])
    """
    return Compose(translated(transform), fuse=fuse)


def translated(transform: Any) -> list[BatchTransform]:
    """The augmentations, as a list; else as ``from_torchvision``."""
    kind = type(transform)
    if isinstance(transform, (list, tuple)) or kind is torch.nn.Sequential:
        return _all_of(transform)
    name = kind.__name__
    # A class of its own may do anything, whatever it is derived from; so may a function in a method's place.
    if not (is_torchvision(transform) and name in _TRANSLATIONS and is_pristine(transform)):
        raise AugmentError(
            f"there is no augmentation of batches for {kind.__module__}.{name}: it belongs in the "
            "dataset's transform, before batches are made"
        )
    return _TRANSLATIONS[name](transform)


def _all_of(transforms: Iterable[Any]) -> list[BatchTransform]:
    return [op for transform in transforms for op in translated(transform)]


def _crop(transform: Any) -> list[BatchTransform]:
    mode = transform.interpolation
    if not transform.antialias and getattr(mode, "value", mode) in ("bilinear", "bicubic"):
        raise AugmentError(
            "RandomResizedCrop(antialias=False) has no augmentation of batches: they antialias"
        )
    return [RandomResizedCrop(tuple(transform.size), transform.scale, transform.ratio, mode)]


def _affine(transform: Any) -> list[BatchTransform]:
    return [
        RandomAffine(
            transform.degrees, transform.translate, transform.scale, transform.shear,
            transform.interpolation, _fill(transform), transform.center,
        )
    ]  # fmt: skip


def _rotation(transform: Any) -> list[BatchTransform]:
    if transform.expand:
        raise AugmentError("RandomRotation(expand=True) makes images of several sizes, and a batch has one")
    return [RandomRotation(transform.degrees, transform.interpolation, _fill(transform), transform.center)]


def _fill(transform: Any) -> Any:
    if isinstance(transform.fill, dict):
        raise AugmentError(
            f"{type(transform).__name__}(fill={transform.fill!r}): one fill for images is needed"
        )
    return transform.fill


def _jitter(transform: Any) -> list[BatchTransform]:
    ranges = {kind: getattr(transform, kind) for kind in ("brightness", "contrast", "saturation", "hue")}
    return [ColorJitter(**{kind: tuple(limits) for kind, limits in ranges.items() if limits is not None})]


def _erasing(transform: Any) -> list[BatchTransform]:
    value = transform.value  # v2's is a list, or None for noise
    return [
        RandomErasing(transform.p, transform.scale, transform.ratio, "random" if value is None else value)
    ]


def _policy(transform: Any) -> list[BatchTransform]:
    return [
        RandAugment(
            transform.num_ops, transform.magnitude, transform.num_magnitude_bins, transform.interpolation,
            _fill(transform),
        )
    ]  # fmt: skip


def _trivial(transform: Any) -> list[BatchTransform]:
    return [TrivialAugmentWide(transform.num_magnitude_bins, transform.interpolation, _fill(transform))]


def _converted(transform: Any) -> list[BatchTransform]:
    dtype = transform.dtype
    if isinstance(dtype, dict) or not getattr(transform, "scale", True):
        raise AugmentError(f"{transform!r} has no augmentation of batches: ToDtype(dtype, scale=True) has")
    return [ToDtype(dtype)]


def _mixing(kind: Callable[..., BatchTransform]) -> Callable[[Any], list[BatchTransform]]:
    def translate(transform: Any) -> list[BatchTransform]:
        return [kind(alpha=transform.alpha, num_classes=transform.num_classes)]

    return translate


def _nothing(transform: Any) -> list[BatchTransform]:
    return []


_TRANSLATIONS: dict[str, Callable[[Any], list[BatchTransform]]] = {
    "ColorJitter": _jitter,
    "Compose": lambda transform: _all_of(transform.transforms),
    "ConvertImageDtype": _converted,
    "CutMix": _mixing(CutMix),
    "GaussianBlur": lambda transform: [GaussianBlur(transform.kernel_size, transform.sigma)],
    "Identity": _nothing,
    "MixUp": _mixing(MixUp),
    "Normalize": lambda transform: [Normalize(transform.mean, transform.std)],
    "PILToTensor": _nothing,
    "RandAugment": _policy,
    "RandomAffine": _affine,
    "RandomApply": lambda transform: [RandomApply(_all_of(transform.transforms), transform.p)],
    "RandomErasing": _erasing,
    "RandomGrayscale": lambda transform: [RandomGrayscale(transform.p)],
    "RandomHorizontalFlip": lambda transform: [RandomHorizontalFlip(transform.p)],
    "RandomResizedCrop": _crop,
    "RandomRotation": _rotation,
    "RandomVerticalFlip": lambda transform: [RandomVerticalFlip(transform.p)],
    "ToDtype": _converted,
    "ToImage": _nothing,
    "ToImageTensor": _nothing,
    "ToPureTensor": _nothing,
    "ToTensor": lambda transform: [ToDtype(torch.float32)],
    "TrivialAugmentWide": _trivial,
}
