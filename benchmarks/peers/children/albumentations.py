"""albumentations: images (H, W, C) as NumPy arrays, one by one."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from benchmarks.peers.children.chosen import Work, stream_of
from benchmarks.peers.children.protocol import AugmentJob, Stream

__all__ = ["HAS", "stream"]


# Recipes that it has, and what differs in them.  It has no policies.
HAS: Mapping[str, str] = {"simclr": "no antialiasing; NHWC"}


def stream(job: AugmentJob) -> Stream:
    """Batches of the recipe chosen, stacked."""
    # It would ask the network whether there is a newer version.
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
    import albumentations

    photos = [np.ascontiguousarray(image.transpose(1, 2, 0)) for image in np.load(job.photos)]

    def make(recipe: str, dtype: str) -> Work:
        views = albumentations.Compose([
            albumentations.RandomResizedCrop((job.side, job.side)), albumentations.HorizontalFlip(p=0.5),
            albumentations.ColorJitter((0.2, 1.8), (0.2, 1.8), (0.2, 1.8), (-0.2, 0.2), p=0.8),
            albumentations.ToGray(p=0.2), albumentations.GaussianBlur((23, 23), (0.1, 2.0), p=0.5),
            albumentations.Normalize(tuple(job.mean), tuple(job.std)),
        ])  # fmt: skip
        return lambda: np.stack([views(image=image)["image"] for image in photos])

    return stream_of(job, make, ("albumentations", "opencv-python-headless"))
