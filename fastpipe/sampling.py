"""Which patches of volumes an epoch is made of: the ``sampling=`` of a :class:`fastpipe.FastPatchDataset`.

>>> Uniform(1000)
Uniform(samples_per_epoch=1000, volumes='equal', mask_fraction=0.0)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastpipe.errors import OptionError

__all__ = ["Foreground", "Grid", "Positions", "Sampling", "Uniform"]


@dataclass(frozen=True)
class Uniform:
    """Patches anywhere: each place at which one fits is as likely as any other of its volume.

    Args:
        samples_per_epoch: how many.
        volumes: of several volumes, ``"equal"`` takes each as often, ``"size"`` each as often as there are
            places in it.
        mask_fraction: take patches only of which at least such a part of the voxels is not 0 in ``mask=``.
            A place that has less is drawn anew.
    """

    samples_per_epoch: int
    volumes: Literal["equal", "size"] = "equal"
    mask_fraction: float = 0.0

    def __post_init__(self) -> None:
        _check_common(self)


@dataclass(frozen=True)
class Foreground:
    """Patches anywhere, but some of them around a voxel of the foreground, as nnU-Net does it.

    With probability ``fraction`` a class is drawn of those that the volume has, then one of its voxels, and
    the patch is centred there, as far as the volume goes (nnU-Net's ``oversample_foreground_percent``, with
    ``probabilistic_oversampling``).

    Args:
        samples_per_epoch: how many.
        fraction: of patches around the foreground.
        classes: the labels that are foreground; None takes all but 0.
        voxels: so many of each class and volume are remembered, drawn from all; nnU-Net has 10,000.
        volumes, mask_fraction: as in :class:`Uniform`; the mask is not asked for patches around the
            foreground.
    """

    samples_per_epoch: int
    fraction: float = 0.33
    classes: tuple[int, ...] | None = None
    voxels: int = 10_000
    volumes: Literal["equal", "size"] = "equal"
    mask_fraction: float = 0.0

    def __post_init__(self) -> None:
        _check_common(self)
        if not 0 <= self.fraction <= 1:
            raise OptionError(f"Foreground(fraction=…) must be from 0 to 1, got {self.fraction!r}")
        if self.voxels < 1:
            raise OptionError(f"Foreground(voxels=…) must be a number from 1, got {self.voxels!r}")
        if self.classes is not None:
            object.__setattr__(self, "classes", tuple(operator.index(label) for label in self.classes))


@dataclass(frozen=True)
class Grid:
    """All patches at regular distances, those at the ends moved inwards so that they fit.

    Args:
        stride: from one patch to the next, along each dimension; None is the patch's size, without overlap.
    """

    stride: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.stride is None:
            return
        sides = [self.stride] if isinstance(self.stride, int) else list(self.stride)
        try:
            sides = [operator.index(side) for side in sides]
        except TypeError:
            sides = [0]
        if min(sides, default=0) < 1:
            raise OptionError(f"Grid(stride=…) must be numbers from 1, got {self.stride!r}")
        if not isinstance(self.stride, int):
            object.__setattr__(self, "stride", tuple(sides))


@dataclass(frozen=True, eq=False)
class Positions:
    """Patches at given places.

    Args:
        array: integers (N, D): where each patch begins; of several volumes (N, 1 + D), with the number of
            the volume in front.  With ``padding=`` patches may reach beyond the volume.
    """

    array: npt.NDArray[np.int64] = field(repr=False)

    def __init__(self, array: Any) -> None:
        found = np.asarray(array)
        if found.ndim != 2 or (found.size and found.dtype.kind not in "iu"):
            raise OptionError(
                f"Positions(array) must be integers (N, D), got {found.dtype} of shape {found.shape}"
            )
        object.__setattr__(self, "array", found.astype(np.int64))

    def __repr__(self) -> str:
        return f"Positions(of {len(self.array):,} patches)"


Sampling = Uniform | Foreground | Grid | Positions


def _check_common(option: Uniform | Foreground) -> None:
    name = type(option).__name__
    try:
        count = operator.index(option.samples_per_epoch)
    except TypeError:
        count = 0
    if count < 1:
        raise OptionError(
            f"{name}(samples_per_epoch) must be a number from 1, got {option.samples_per_epoch!r}"
        )
    object.__setattr__(option, "samples_per_epoch", count)
    if option.volumes not in ("equal", "size"):
        raise OptionError(f"{name}(volumes=…) must be 'equal' or 'size', got {option.volumes!r}")
    if not 0 <= option.mask_fraction <= 1:
        raise OptionError(f"{name}(mask_fraction=…) must be from 0 to 1, got {option.mask_fraction!r}")
