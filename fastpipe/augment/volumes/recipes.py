"""Recipes for volumes."""

from __future__ import annotations

from collections.abc import Sequence

from fastpipe.augment.chains import RandomApply
from fastpipe.augment.compose import Compose
from fastpipe.augment.volumes.geometry import RandomAffine3D, RandomFlip3D
from fastpipe.augment.volumes.intensity import (
    Brightness3D,
    Contrast3D,
    Gamma3D,
    GaussianBlur3D,
    GaussianNoise3D,
    LowResolution3D,
)
from fastpipe.errors import AugmentError

# If the ratio of length to depth of a patch is above this number, nnU-Net augments within planes only.
_ANISOTROPIC = 3


def nnunet_default(
    size: Sequence[int] | None = None,
    *,
    mirror_axes: int | Sequence[int] = (0, 1, 2),
    spacing: Sequence[float] = (1.0, 1.0, 1.0),
    planes: bool | None = None,
) -> Compose:
    """Return nnU-Net's default augmentation, with nnU-Net's order, probabilities and ranges.

    The source is F. Isensee et al., "nnU-Net", Nature Methods 18, 2021. The values are those of the class
    ``nnUNetTrainer`` of nnunetv2 2.8.  Volumes are floats with a mean of about 0 and a standard deviation of
    about 1.  Labels that are passed with the volumes move as the volumes move.

    Args:
        size: (D, H, W) of the result, which is the centre of the volumes.  If the volumes are larger than
            ``size``, the corners of rotated volumes show voxels instead of the fill.  Default: the volumes'
            size.
        mirror_axes: the axes along which volumes are mirrored; () for none.
        spacing: the distances between voxels along depth, height and width.  The default distances are equal,
            as nnU-Net assumes.
        planes: whether to rotate and scale only within planes of height and width.  Default: nnU-Net's rule,
            True if the longest side of ``size`` is more than 3 times its depth.

    Raises:
        AugmentError: an argument is invalid.

    There are two differences from nnU-Net.  Labels are those of the nearest voxel, while nnU-Net weights the
    labels around the voxel.  Blurs reach three standard deviations, while nnU-Net rounds their size to an odd
    number of voxels.

    >>> import torch
    >>> from fastpipe import augment
    >>> views = augment.nnunet_default((8, 16, 16))
    >>> volumes, labels = views(torch.randn(2, 1, 12, 24, 24), torch.ones(2, 12, 24, 24, dtype=torch.uint8))
    >>> volumes.shape, labels.shape
    (torch.Size([2, 1, 8, 16, 16]), torch.Size([2, 8, 16, 16]))
    """
    if planes is None:
        planes = size is not None and len(size) == 3 and max(size) > _ANISOTROPIC * size[0]
    if planes and len(tuple(spacing)) == 3 and spacing[1] != spacing[2]:
        raise AugmentError(f"planes=True turns height into width, which have spacing {tuple(spacing[1:])}")
    axes = (1, 2) if planes else (0, 1, 2)
    ops = [
        RandomAffine3D(
            ((-180, 180), 0, 0) if planes else 30, (0.7, 1.4), p_rotation=0.2, p_scale=0.2, scale_axes=axes,
            spacing=spacing, size=size,
        ),
        RandomApply(GaussianNoise3D((0.0, 0.1)), 0.1),
        RandomApply(GaussianBlur3D((0.5, 1.0), p_channel=0.5), 0.2),
        RandomApply(Brightness3D((0.75, 1.25)), 0.15),
        RandomApply(Contrast3D((0.75, 1.25)), 0.15),
        RandomApply(LowResolution3D((0.5, 1.0), axes=axes, p_channel=0.5), 0.25),
        RandomApply(Gamma3D((0.7, 1.5), inverted=True), 0.1),
        RandomApply(Gamma3D((0.7, 1.5)), 0.3),
    ]  # fmt: skip
    mirrors = RandomFlip3D(mirror_axes)
    return Compose([*ops, mirrors] if mirrors.axes else ops)
