"""Chains of augmentations, which can also be built from torchvision's transforms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastpipe.augment.base import Augmentation, OfBatches
from fastpipe.augment.chains import BatchTransform, RandomApply, checked_ops, kind_of
from fastpipe.augment.colour import (
    ColorJitter,
    GaussianBlur,
    Normalize,
    RandomErasing,
    RandomGrayscale,
    ToDtype,
)
from fastpipe.augment.fusing import fused
from fastpipe.augment.geometry import (
    RandomAffine,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
)
from fastpipe.augment.mixing import CutMix, MixUp
from fastpipe.augment.parameters import Parameters
from fastpipe.augment.policy import RandAugment, TrivialAugmentWide
from fastpipe.core.types import Key
from fastpipe.errors import AugmentError
from fastpipe.images.steps import is_pristine, is_torchvision


class Compose(OfBatches):
    """A chain of augmentations, which gives the result of torchvision's transforms in the same order.

    On the CPU, each image goes through the whole chain before the next image, in as many threads as torch
    uses.

    Args:
        ops: the augmentations. All are for images, all are for volumes, or all are for motion.
        fuse: whether to read and write each image only once (images only). All geometry before a blur becomes
            one resampling, all colour changes become one matrix, and blurs come last.  The parameters are the
            same, but the results differ:

            * colours are clipped and rounded once, at the end, and not after each change;
            * hue is changed by a rotation of colours about the grey axis, which is exact at thirds of a turn;
            * blurs leave out weights below 1/2000 of the sum of the weights;
            * contrast uses the mean of the colours before clipping;
            * rotated images are always interpolated linearly; a rotated image after a ``RandomResizedCrop``
              shows the surroundings of the crop's box, not the fill.

            A chain of only crops and flips gives the same result as without ``fuse``.

        lengths: the index of the part of a motion batch that holds the lengths of the sequences, integers
            (N,) in frames. Index 1 is the part right after the motion.  The new lengths replace this part.

    >>> import torch
    >>> from fastpipe import augment
    >>> views = augment.Compose([augment.RandomResizedCrop(32), augment.RandomHorizontalFlip()])
    >>> views(torch.rand(4, 3, 64, 64)).shape
    torch.Size([4, 3, 32, 32])
    """

    def __init__(
        self, ops: Sequence[Augmentation], fuse: bool = False, *, lengths: int | None = None
    ) -> None:
        self.ops, self.fuse = checked_ops(ops, "Compose"), fuse
        kind = kind_of(self.ops)
        if fuse and kind.kind != "images":
            raise AugmentError(f"fuse=True applies to images only, got augmentations of {kind.kind}")
        if lengths is not None and (kind.kind != "motion" or not isinstance(lengths, int) or lengths < 1):
            raise AugmentError(
                "lengths applies to motion batches only: pass the index (from 1) of the part that holds "
                f"the lengths; got {lengths!r} for "
                f"augmentations of {kind.kind}"
            )
        self.lengths = lengths
        self._chain = kind.chain_type(self.ops, "Compose", fused(self.ops) if fuse else None, lengths)

    def draw(
        self, shape: Sequence[int], *, generator: torch.Generator | None = None, key: Key | None = None
    ) -> list[Parameters]:
        """Draw the parameters of each augmentation, for a batch of this shape, such as (N, C, H, W)."""
        return self._chain.draw(shape, generator, key)

    def __repr__(self) -> str:
        end = "], fuse=True)" if self.fuse else "])"
        end = end if self.lengths is None else f"], lengths={self.lengths})"
        return "\n".join(["Compose([", *(f"    {op}," for op in self.ops), end])


# ---- torchvision's transforms ----------------------------------------------------------------------


def from_torchvision(transform: Any, *, fuse: bool = False) -> Compose:
    """Translate a torchvision transform of samples to augmentations of batches.

    Args:
        transform: a transform of ``torchvision.transforms`` or its ``v2``, or a nested ``Compose`` or
            ``torch.nn.Sequential``.  Conversions to tensors (``ToImage``, ``PILToTensor``) are left out,
            because batches are tensors already. ``ToTensor`` also converts bytes to floats.
        fuse: see ``Compose``.

    Returns:
        The augmentations.  Their random numbers differ from torchvision's, but have the same distributions.

    Raises:
        AugmentError: a transform or an argument has no counterpart for batches. The error names the transform
            or the argument.

    >>> from torchvision.transforms import v2
    >>> from_torchvision(v2.Compose([v2.RandomHorizontalFlip(0.3), v2.RandomGrayscale()]))
    Compose([
        RandomHorizontalFlip(p=0.3),
        RandomGrayscale(p=0.1),
    ])
    """
    return Compose(translated(transform), fuse=fuse)


def translated(transform: Any) -> list[BatchTransform]:
    """Return the augmentations of ``from_torchvision`` as a list."""
    kind = type(transform)
    if isinstance(transform, (list, tuple)) or kind is torch.nn.Sequential:
        return [op for one in transform for op in translated(one)]
    name = kind.__name__
    # A subclass may do anything, and a function that replaces a method may do anything as well.
    if not (is_torchvision(transform) and name in _TRANSLATIONS and is_pristine(transform)):
        raise AugmentError(
            f"there is no augmentation of batches for {kind.__module__}.{name}: it belongs in the "
            "dataset's transform, before batches are made"
        )
    return _TRANSLATIONS[name](transform)


def _with(kind: type[BatchTransform]) -> Callable[[Any], list[BatchTransform]]:
    """Return a function that translates a transform. The transform's attributes become arguments of
    ``kind``."""

    def translate(transform: Any) -> list[BatchTransform]:
        names = list(inspect.signature(kind.__init__).parameters)[1:]
        given = {name: getattr(transform, name) for name in names if hasattr(transform, name)}
        if isinstance(given.get("fill"), dict):
            raise AugmentError(f"{kind.__name__}(fill={given['fill']!r}): one fill for images is needed")
        return [kind(**given)]

    return translate


def _crop(transform: Any) -> list[BatchTransform]:
    mode = transform.interpolation
    if not transform.antialias and getattr(mode, "value", mode) in ("bilinear", "bicubic"):
        raise AugmentError(
            "RandomResizedCrop(antialias=False) has no augmentation of batches: they antialias"
        )
    return _with(RandomResizedCrop)(transform)


def _rotation(transform: Any) -> list[BatchTransform]:
    if transform.expand:
        raise AugmentError("RandomRotation(expand=True) makes images of several sizes, and a batch has one")
    return _with(RandomRotation)(transform)


def _jitter(transform: Any) -> list[BatchTransform]:
    ranges = {kind: getattr(transform, kind) for kind in ("brightness", "contrast", "saturation", "hue")}
    return [ColorJitter(**{kind: tuple(limits) for kind, limits in ranges.items() if limits is not None})]


def _erasing(transform: Any) -> list[BatchTransform]:
    value: Any = "random" if transform.value is None else transform.value  # v2 has a list, or None for noise
    return [RandomErasing(transform.p, transform.scale, transform.ratio, value)]


def _converted(transform: Any) -> list[BatchTransform]:
    dtype = transform.dtype
    if isinstance(dtype, dict) or not getattr(transform, "scale", True):
        raise AugmentError(f"{transform!r} has no augmentation of batches: ToDtype(dtype, scale=True) has")
    return [ToDtype(dtype)]


_LEFT_OUT = ("Identity", "PILToTensor", "ToImage", "ToImageTensor", "ToPureTensor")
_TRANSLATIONS: dict[str, Callable[[Any], list[BatchTransform]]] = {
    "ColorJitter": _jitter, "Compose": lambda transform: translated(list(transform.transforms)),
    "ConvertImageDtype": _converted, "CutMix": _with(CutMix), "GaussianBlur": _with(GaussianBlur),
    "MixUp": _with(MixUp), "Normalize": _with(Normalize),
    "RandAugment": _with(RandAugment), "RandomAffine": _with(RandomAffine),
    "RandomApply": lambda transform: [RandomApply(translated(list(transform.transforms)), transform.p)],
    "RandomErasing": _erasing, "RandomGrayscale": _with(RandomGrayscale),
    "RandomHorizontalFlip": _with(RandomHorizontalFlip), "RandomResizedCrop": _crop,
    "RandomRotation": _rotation, "RandomVerticalFlip": _with(RandomVerticalFlip), "ToDtype": _converted,
    **dict.fromkeys(_LEFT_OUT, lambda transform: []),
    "ToTensor": lambda transform: [ToDtype(torch.float32)], "TrivialAugmentWide": _with(TrivialAugmentWide),
}  # fmt: skip
