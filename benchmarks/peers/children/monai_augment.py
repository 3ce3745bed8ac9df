"""MONAI's dictionary transforms: what it has of nnU-Net's default, of one volume and its labels at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.peers.children.chosen import Change, volume_stream
from benchmarks.peers.children.protocol import AugmentJob, Stream

__all__ = ["HAS", "stream"]


# Recipes that it has, and what differs in them.
HAS: Mapping[str, str] = {"volume": "rotation and scale together, as often as either"}


def stream(job: AugmentJob) -> Stream:
    """Batches of the recipe."""
    return volume_stream(job, _changer, ("monai", "torch"))


def _changer(size: Any) -> Change:
    from monai import transforms as t

    angle, image, both = math.radians(30), ["image"], ["image", "label"]
    chain = t.Compose([
        t.ToTensord(both),
        # In nnU-Net either has probability 0.2, hence 0.36 for any.  Factors are added to 1.
        t.RandAffined(
            both, prob=0.36, rotate_range=[(-angle, angle)] * 3, scale_range=[(-0.3, 0.4)] * 3,
            mode=("bilinear", "nearest"), padding_mode="zeros",
        ),
        t.RandGaussianNoised(image, prob=0.1, std=0.1),
        t.RandGaussianSmoothd(image, (0.5, 1.0), (0.5, 1.0), (0.5, 1.0), prob=0.1),
        t.RandScaleIntensityd(image, factors=0.25, prob=0.15),
        t.RandScaleIntensityFixedMeand(image, factors=0.25, preserve_range=True, prob=0.15),
        t.RandSimulateLowResolutiond(image, prob=0.125, zoom_range=(0.5, 1.0)),
        t.RandAdjustContrastd(image, prob=0.1, gamma=(0.7, 1.5), invert_image=True, retain_stats=True),
        t.RandAdjustContrastd(image, prob=0.3, gamma=(0.7, 1.5), retain_stats=True),
        *(t.RandFlipd(both, prob=0.5, spatial_axis=axis) for axis in range(3)),
    ])  # fmt: skip

    def change(volume: Any, labels: Any) -> tuple[Any, Any]:
        found = chain({"image": volume, "label": labels})
        return found["image"].as_tensor(), found["label"].as_tensor()

    return change
