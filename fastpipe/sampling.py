"""Ways to choose an epoch's patches of volumes: the ``sampling=`` of a :class:`fastpipe.FastPatchDataset`.

>>> Uniform(1000)
Uniform(samples_per_epoch=1000, volumes='equal', mask_fraction=0.0)
"""

from __future__ import annotations

import math
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
    """Patches anywhere: each place in a volume where a patch fits is equally likely.

    Args:
        samples_per_epoch: number of patches, at least 1.
        volumes: with several volumes, ``"equal"`` draws all of them equally often, ``"size"`` draws each in
            proportion to its number of places.
        mask_fraction: minimum fraction, from 0 to 1, of a patch's voxels that are not 0 in ``mask=`` (in
            any channel, if it has several).  A place with less is replaced by another draw.  A very small
            number selects patches that are not empty.  Voxels are counted in blocks whose sides are a
            quarter of the patch's, at most 4 voxels (more in volumes of more than 268 million voxels).
            Blocks at a patch's surface that are not entirely in the mask count as 0, so a patch that
            barely exceeds the fraction may be left out.

    Raises:
        OptionError: a value cannot work.

    >>> import numpy as np
    >>> from fastpipe import FastPatchDataset
    >>> volume = np.eye(8, dtype=np.uint8)
    >>> dataset = FastPatchDataset(volume, (2, 2), mask=volume, sampling=Uniform(20, mask_fraction=0.5))
    >>> all(mask.sum() == 2 for patch, mask in dataset)
    True
    """

    samples_per_epoch: int
    volumes: Literal["equal", "size"] = "equal"
    mask_fraction: float = 0.0

    def __post_init__(self) -> None:
        _check_common(self)


@dataclass(frozen=True)
class Foreground:
    """Patches anywhere, but some of them around a voxel of the foreground, as nnU-Net does it.

    With probability ``fraction``, one of the volume's classes is drawn, then one of its voxels, and the
    patch is centred there, as far as the volume's ends allow (nnU-Net's ``oversample_foreground_percent``,
    with ``probabilistic_oversampling``).

    Each label is a class of its own, also if it is not a whole number.  If a volume has more than 1,000
    labels that are not whole numbers, as in a soft segmentation, these together are one class.

    Args:
        samples_per_epoch: number of patches, at least 1.
        fraction: probability, from 0 to 1, that a patch is around the foreground.
        classes: the foreground's labels, compared by ``labels == label``; None takes all above 0.
        voxels: number of voxels to remember for each class and volume, drawn from all; nnU-Net has 10,000.
        volumes, mask_fraction: as in :class:`Uniform`; the mask does not apply to patches around the
            foreground.

    Raises:
        OptionError: a value cannot work.

    >>> import numpy as np
    >>> from fastpipe import FastPatchDataset
    >>> labels = np.zeros((50, 50), np.uint8)
    >>> labels[7, 40] = 1
    >>> dataset = FastPatchDataset(labels, (4, 4), labels=labels, sampling=Foreground(20, fraction=1.0))
    >>> all(found[2, 2] == 1 for patch, found in dataset)
    True
    """

    samples_per_epoch: int
    fraction: float = 0.33
    classes: tuple[float, ...] | None = None
    voxels: int = 10_000
    volumes: Literal["equal", "size"] = "equal"
    mask_fraction: float = 0.0

    def __post_init__(self) -> None:
        _check_common(self)
        _check_part(self, "fraction", self.fraction)
        object.__setattr__(self, "voxels", _from_1(self.voxels, "Foreground(voxels=…)"))
        if self.classes is not None:
            try:
                labels = tuple(
                    float(label) if isinstance(label, (float, np.floating)) else operator.index(label)
                    for label in self.classes
                )
            except TypeError:
                labels = (math.nan,)
            if any(label != label for label in labels):
                raise OptionError(
                    f"Foreground(classes=…) must be a tuple of labels, or None, got {self.classes!r}"
                )
            object.__setattr__(self, "classes", labels)


@dataclass(frozen=True)
class Grid:
    """All patches of a regular grid; those at the ends are moved inwards so that they fit.

    Args:
        stride: voxels from one patch to the next: one number, or one for each dimension.  None is the
            patch's size, without overlap.

    Raises:
        OptionError: a value cannot work.

    >>> import numpy as np
    >>> from fastpipe import FastPatchDataset
    >>> dataset = FastPatchDataset(np.zeros((9, 6)), (4, 6), sampling=Grid(stride=3))
    >>> dataset.places()[1].tolist()
    [[0, 0], [3, 0], [5, 0]]
    """

    stride: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.stride is None:
            return
        try:
            given = np.atleast_1d(np.asarray(self.stride, object)).tolist()
            sides = [0 if isinstance(side, bool) else operator.index(side) for side in given]
        except TypeError:
            sides = []
        if min(sides, default=0) < 1:
            raise OptionError(f"Grid(stride=…) must be numbers from 1, got {self.stride!r}")
        is_one = np.ndim(self.stride) == 0
        object.__setattr__(self, "stride", sides[0] if is_one else tuple(sides))


@dataclass(frozen=True, eq=False)
class Positions:
    """Patches at given places.

    Args:
        array: integers (N, D): the first voxel of each patch; with several volumes (N, 1 + D), with the
            volume's number in front.  With ``padding=`` patches may extend beyond the volume.

    Raises:
        OptionError: the array has another dtype or shape.

    >>> from fastpipe import FastPatchDataset
    >>> volume = np.arange(30).reshape(5, 6)
    >>> FastPatchDataset(volume, (1, 2), sampling=Positions([[0, 0], [4, 3]]))[1].tolist()
    [[27, 28]]
    """

    array: npt.NDArray[np.int64] = field(repr=False)

    def __init__(self, array: Any) -> None:
        found = np.asarray(array)
        if found.ndim != 2 or (found.size and found.dtype.kind not in "iu"):
            raise OptionError(
                f"Positions(array) must be integers (N, D), got {found.dtype} of shape {found.shape}"
            )
        if found.dtype.kind == "u" and found.size and found.max() > np.iinfo(np.int64).max:
            raise OptionError(f"Positions(array) has {found.max()}, beyond the ends of any volume")
        object.__setattr__(self, "array", found.astype(np.int64))

    def __repr__(self) -> str:
        return f"Positions(of {len(self.array):,} patches)"


Sampling = Uniform | Foreground | Grid | Positions


def _check_common(option: Uniform | Foreground) -> None:
    name = type(option).__name__
    count = _from_1(option.samples_per_epoch, f"{name}(samples_per_epoch)")
    object.__setattr__(option, "samples_per_epoch", count)
    if option.volumes not in ("equal", "size"):
        raise OptionError(f"{name}(volumes=…) must be 'equal' or 'size', got {option.volumes!r}")
    _check_part(option, "mask_fraction", option.mask_fraction)


def _from_1(value: Any, what: str) -> int:
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        raise OptionError(f"{what} must be a number from 1, got {value!r}")
    return count


def _check_part(option: Any, name: str, value: Any) -> None:
    try:
        is_part = 0 <= float(value) <= 1 and not isinstance(value, (bool, str))
    except (TypeError, ValueError):
        is_part = False
    if not is_part:
        raise OptionError(f"{type(option).__name__}({name}=…) must be from 0 to 1, got {value!r}")
