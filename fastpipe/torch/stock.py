"""Transforms of torchvision's that fastpipe's plan does not know, but that may run in threads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch

from fastpipe.images.steps import is_pristine

__all__ = ["is_thread_safe", "stock_note", "thread_safe_types"]

Transform = Callable[[Any], Any]


def is_thread_safe(transforms: Sequence[Transform]) -> bool:
    """Whether :func:`run_keyed` reproduces these transforms from any thread.

    Args:
        transforms: callables.  Containers (``Compose``, ``RandomApply``, ``nn.Sequential``, and
            v2's ``RandomChoice`` and ``RandomOrder``) are as good as what they hold.

    Returns:
        True when all are exactly of a type in :func:`thread_safe_types` (a subclass may do
        anything) and unmodified: without hooks, and without methods replaced on object or class.

    >>> from torchvision import transforms as v1
    >>> is_thread_safe([v1.Compose([v1.ColorJitter(0.4), v1.ToTensor()])])
    True
    >>> is_thread_safe([v1.Lambda(lambda image: image)])
    False
    """
    return all(map(_is_safe, transforms))


def stock_note(is_promised: bool, stock: Sequence[Any]) -> str:
    """How transforms run that the plan does not know, in words.

    Args:
        is_promised: whether the script says that several threads may call them.
        stock: the transforms.
    """
    if is_promised:
        return "as it is, in threads (thread_safe=True)"
    if is_thread_safe(stock):
        return "torchvision, in threads, with a generator for each sample"
    return "as it is, one sample after the other: fastpipe does not know it, or what follows it"


def thread_safe_types() -> frozenset[type]:
    """Types that draw through torch alone, where ``KeyedGenerator`` sees it, or not at all.

    Exact types of ``torchvision.transforms`` and ``torchvision.transforms.v2``, once a script has imported
    these; each is run in threads and compared with a serial run in fastpipe's tests.  Not among them:
    ``RandomChoice`` and ``RandomOrder`` of the first generation (they draw from Python's ``random``),
    ``Lambda`` and whatever else takes a function, and transforms of batches (``MixUp``, ``CutMix``).
    """
    return _types()[0]


def _is_safe(transform: Any) -> bool:
    types, containers = _types()
    # Hooks and replaced methods are someone's code, of which nothing is known.
    if type(transform) not in types or not is_pristine(transform):
        return False
    if type(transform) in containers:
        children: Iterable[Any] = getattr(transform, "transforms", transform)
        return all(map(_is_safe, children))
    return True


def _types() -> tuple[frozenset[type], frozenset[type]]:
    """The types, and those of them that hold others."""
    if "torchvision.transforms" not in sys.modules:  # then nobody has one of its transforms
        none: frozenset[type] = frozenset({torch.nn.Sequential})
        return none, none
    return _types_of_torchvision()


@cache
def _types_of_torchvision() -> tuple[frozenset[type], frozenset[type]]:
    from torchvision import transforms as v1
    from torchvision.transforms import v2

    containers = (
        _named(v1, "Compose RandomApply")
        | _named(v2, "Compose RandomApply RandomChoice RandomOrder")
        | {torch.nn.Sequential}
    )
    return containers | _named(v1, _SHARED) | _named(v2, _SHARED + _ONLY_V2), containers


def _named(module: Any, names: str) -> frozenset[type]:
    """Those of the classes that the installed torchvision has."""
    return frozenset(getattr(module, name) for name in names.split() if hasattr(module, name))


# In both generations of torchvision's transforms.
_SHARED = """
    AugMix AutoAugment CenterCrop ColorJitter ConvertImageDtype ElasticTransform FiveCrop
    GaussianBlur Grayscale LinearTransformation Normalize PILToTensor Pad RandAugment
    RandomAdjustSharpness RandomAffine RandomAutocontrast RandomCrop RandomEqualize RandomErasing
    RandomGrayscale RandomHorizontalFlip RandomInvert RandomPerspective RandomPosterize
    RandomResizedCrop RandomRotation RandomSolarize RandomVerticalFlip Resize TenCrop ToPILImage
    ToTensor TrivialAugmentWide
"""
_ONLY_V2 = """
    ClampBoundingBoxes ConvertBoundingBoxFormat GaussianNoise Identity JPEG RGB
    RandomChannelPermutation RandomIoUCrop RandomPhotometricDistort RandomResize
    RandomShortestSize RandomZoomOut ScaleJitter ToDtype ToImage ToPureTensor
    UniformTemporalSubsample
"""
