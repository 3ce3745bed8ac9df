"""MONAI's dictionary transforms: what it has of nnU-Net's default, of one volume and its labels at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastpipe.bench.peer_children.chosen import Work, stream_of, volumes_of
from fastpipe.bench.peer_children.protocol import AugmentJob, Stream

__all__ = ["HAS", "stream"]

# Recipes that it has, and what differs in them.
HAS: Mapping[str, str] = {"volume": "rotation and scale together, as often as either"}


def stream(job: AugmentJob) -> Stream:
    """Batches of the recipe; ``options["one_thread"]`` as workers of a loader have it."""
    import torch

    torch.set_num_threads(1 if job.options.get("one_thread") else job.threads)
    torch.set_grad_enabled(False)
    volumes, labels = volumes_of(job)
    labels = labels[:, None]

    def make(recipe: str, dtype: str) -> Work:
        change = _chain()

        def work() -> Any:
            made = [
                change({"image": volume, "label": label})
                for volume, label in zip(volumes, labels, strict=True)
            ]
            return tuple(torch.stack([one[name].as_tensor() for one in made]) for name in ("image", "label"))

        return work

    return stream_of(job, make, ("monai", "torch"))


def _chain() -> Any:
    from monai import transforms as t

    angle, image, both = math.radians(30), ["image"], ["image", "label"]
    return t.Compose([
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
