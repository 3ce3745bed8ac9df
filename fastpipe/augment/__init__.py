"""Augmentation of whole batches, with separate parameters for each sample.

::

    from fastpipe import FastLoader, augment

    views = augment.Compose([
        augment.RandomResizedCrop(224),
        augment.RandomHorizontalFlip(),
        augment.RandomApply(augment.ColorJitter(0.8, 0.8, 0.8, 0.2), p=0.8),
        augment.RandomGrayscale(0.2),
        augment.RandomApply(augment.GaussianBlur(23), p=0.5),
    ])
    loader = FastLoader(dataset, batch_size=64, device="cuda", augment=views)

Images are (N, C, H, W), spectrograms (N, F, T) or (N, C, F, T), volumes (N, C, D, H, W) or (N, D, H, W), and
motion is (N, T, J, C).  All augmentations of a chain are for the same kind of data.  Parameters are first
drawn in NumPy and then applied: ``op.draw(images.shape)`` and ``op.apply(images, parameters)`` are the two
halves of ``op(images)``.  ``preview(views, images, "views.png")`` draws a picture that shows the effect of a
chain.

``FastLoader(dataset, augment="auto")`` builds a chain from the dataset's own transform: from the steps that
follow the crop.

On GPUs, crops and blurs are matrix products and convolutions.  Their precision depends on
``torch.set_float32_matmul_precision`` and ``torch.backends.cudnn.allow_tf32``.  ``torch.compile`` traces a
call without ``generator=`` and ``key=`` as a whole.  A call with ``generator=`` or ``key=`` draws its
parameters in Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastpipe.core.extras import load_part

if TYPE_CHECKING:
    from fastpipe.augment.base import Augmentation
    from fastpipe.augment.chains import BatchTransform, RandomApply
    from fastpipe.augment.colour import (
        ColorJitter,
        GaussianBlur,
        Normalize,
        RandomErasing,
        RandomGrayscale,
        ToDtype,
    )
    from fastpipe.augment.compose import Compose, from_torchvision
    from fastpipe.augment.geometry import (
        RandomAffine,
        RandomHorizontalFlip,
        RandomResizedCrop,
        RandomRotation,
        RandomVerticalFlip,
    )
    from fastpipe.augment.mixing import CutMix, MixUp
    from fastpipe.augment.motion import MotionMirror, MotionScale, MotionSpeed, MotionTranslation
    from fastpipe.augment.parameters import Parameters
    from fastpipe.augment.pictures import preview
    from fastpipe.augment.policy import RandAugment, TrivialAugmentWide
    from fastpipe.augment.spectrograms import RandomGain, SpecAugment, TimeShift
    from fastpipe.augment.volumes.geometry import (
        RandomAffine3D,
        RandomElastic3D,
        RandomFlip3D,
        RandomRotate90,
    )
    from fastpipe.augment.volumes.intensity import (
        Brightness3D,
        Contrast3D,
        Gamma3D,
        GaussianBlur3D,
        GaussianNoise3D,
        LowResolution3D,
    )
    from fastpipe.augment.volumes.recipes import nnunet_default

__all__ = [
    "Augmentation", "BatchTransform", "Brightness3D", "ColorJitter", "Compose", "Contrast3D", "CutMix",
    "Gamma3D", "GaussianBlur", "GaussianBlur3D", "GaussianNoise3D", "LowResolution3D", "MixUp",
    "MotionMirror", "MotionScale", "MotionSpeed", "MotionTranslation", "Normalize", "Parameters",
    "RandAugment", "RandomAffine", "RandomAffine3D", "RandomApply", "RandomElastic3D", "RandomErasing",
    "RandomFlip3D", "RandomGain", "RandomGrayscale", "RandomHorizontalFlip", "RandomResizedCrop",
    "RandomRotate90", "RandomRotation", "RandomVerticalFlip", "SpecAugment", "TimeShift", "ToDtype",
    "TrivialAugmentWide", "from_torchvision", "nnunet_default", "preview",
]  # fmt: skip

# Parameters need only NumPy, and TensorFlow uses them as well. The code that applies parameters needs torch.
_PARTS = {
    "base": ["Augmentation"],
    "colour": [
        "ColorJitter", "GaussianBlur", "Normalize", "RandomErasing", "RandomGrayscale", "ToDtype",
    ],
    "compose": ["Compose", "from_torchvision"],
    "geometry": [
        "RandomAffine", "RandomHorizontalFlip", "RandomResizedCrop", "RandomRotation", "RandomVerticalFlip",
    ],
    "chains": ["BatchTransform", "RandomApply"],
    "mixing": ["CutMix", "MixUp"],
    "motion": ["MotionMirror", "MotionScale", "MotionSpeed", "MotionTranslation"],
    "parameters": ["Parameters"],
    "pictures": ["preview"],
    "policy": ["RandAugment", "TrivialAugmentWide"],
    "spectrograms": ["RandomGain", "SpecAugment", "TimeShift"],
    "volumes.geometry": ["RandomAffine3D", "RandomElastic3D", "RandomFlip3D", "RandomRotate90"],
    "volumes.intensity": [
        "Brightness3D", "Contrast3D", "Gamma3D", "GaussianBlur3D", "GaussianNoise3D", "LowResolution3D",
    ],
    "volumes.recipes": ["nnunet_default"],
}  # fmt: skip
_PART_OF = {name: part for part, names in _PARTS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _PART_OF:
        value = getattr(load_part(f"fastpipe.augment.{_PART_OF[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fastpipe.augment' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
