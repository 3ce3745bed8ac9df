"""batchgeneratorsv2: nnU-Net's own augmentation, of one volume and its labels at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.peers.children.chosen import Change, volume_stream
from benchmarks.peers.children.protocol import AugmentJob, Stream

__all__ = ["HAS", "stream"]


# Recipes that it has, and what differs in them.
HAS: Mapping[str, str] = {"volume": "labels are weighted, not nearest"}


def stream(job: AugmentJob) -> Stream:
    """Batches of the recipe, in nnU-Net's arguments."""
    return volume_stream(job, _changer, ("batchgeneratorsv2", "torch"))


def _changer(size: Any) -> Change:
    from batchgeneratorsv2.transforms.intensity.brightness import MultiplicativeBrightnessTransform
    from batchgeneratorsv2.transforms.intensity.contrast import BGContrast, ContrastTransform
    from batchgeneratorsv2.transforms.intensity.gamma import GammaTransform
    from batchgeneratorsv2.transforms.intensity.gaussian_noise import GaussianNoiseTransform
    from batchgeneratorsv2.transforms.noise.gaussian_blur import GaussianBlurTransform
    from batchgeneratorsv2.transforms.spatial.low_resolution import SimulateLowResolutionTransform
    from batchgeneratorsv2.transforms.spatial.mirroring import MirrorTransform
    from batchgeneratorsv2.transforms.spatial.spatial import SpatialTransform
    from batchgeneratorsv2.transforms.utils.compose import ComposeTransforms
    from batchgeneratorsv2.transforms.utils.random import RandomTransform

    angle, factor, power = math.radians(30), BGContrast((0.75, 1.25)), BGContrast((0.7, 1.5))
    spatial = SpatialTransform(
        tuple(size), 0, False, p_rotation=0.2, rotation=(-angle, angle), p_scaling=0.2, scaling=(0.7, 1.4),
        p_synchronize_scaling_across_axes=1, border_mode_seg="constant", padding_value_seg=-1,
    )  # fmt: skip
    some = [
        (GaussianNoiseTransform((0, 0.1), 1, True), 0.1),
        (GaussianBlurTransform((0.5, 1.0), False, False, 0.5, benchmark=True), 0.2),
        (MultiplicativeBrightnessTransform(factor, False, 1), 0.15),
        (ContrastTransform(factor, True, False, 1), 0.15),
        (SimulateLowResolutionTransform((0.5, 1), False, True, None, None, 0.5), 0.25),
        (GammaTransform(power, 1, False, 1, 1), 0.1),
        (GammaTransform(power, 0, False, 1, 1), 0.3),
    ]
    mirrors = MirrorTransform((0, 1, 2))
    chain = ComposeTransforms([spatial, *(RandomTransform(op, p) for op, p in some), mirrors])

    def change(volume: Any, labels: Any) -> tuple[Any, Any]:
        found = chain(image=volume, segmentation=labels)
        return found["image"], found["segmentation"]

    return change
