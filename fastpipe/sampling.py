"""Ways to choose the patches of an epoch, for ``sampling=`` of :class:`fastpipe.FastPatchDataset`.

>>> Uniform(1000)
Uniform(samples_per_epoch=1000, volumes='equal', mask_fraction=0.0)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastpipe.errors import OptionError

__all__ = ["Foreground", "Grid", "Positions", "Sampling", "Uniform"]


@dataclass(frozen=True)
class Uniform:
    """Random patches: all positions of a volume where a patch fits are equally likely.

    Args:
        samples_per_epoch: number of patches, at least 1.
        volumes: how the volume of a patch is chosen.  With ``"equal"``, all volumes are equally likely.  With
            ``"size"``, a volume's probability is proportional to its number of positions.
        mask_fraction: minimum fraction, from 0 to 1, of a patch's voxels that are in the mask: the dataset's
            ``mask=`` is not 0 there.  If the mask has several channels, a voxel is in the mask if any channel
            is not 0.  A position with a smaller fraction is replaced by another random position.  With a very
            small ``mask_fraction``, a patch contains at least a part of the mask.  The voxels are counted in
            blocks.  A side of a block is a quarter of the patch's side and at most 4 voxels.  It is larger if
            a volume would have more than 2**22 blocks.  A block that is only partly in the patch counts as 0
            unless the block is entirely in the mask.  Therefore a patch whose fraction is only slightly above
            ``mask_fraction`` may be left out.

    Raises:
        OptionError: an argument has a value that cannot work.

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
    """Random patches, some of which are centred on a voxel of the foreground, as in nnU-Net and MONAI.

    With probability ``fraction``, a random class of the volume is chosen, then a random voxel of this class.
    The patch is centred on this voxel, but moved inwards if it would extend beyond the volume.  This is
    nnU-Net's ``oversample_foreground_percent`` with ``probabilistic_oversampling``.

    With ``fraction=1.0``, these are MONAI's probabilities for labels of ``C`` classes::

        # RandCropByPosNegLabeld(pos=2, neg=1, image_key="image", image_threshold=0)
        Foreground(n, 1.0, classes=(range(1, C), 0), ratios=(2, 1), image_threshold=0)
        # RandCropByLabelClassesd(ratios=[1, 2, 3], num_classes=3)
        Foreground(n, 1.0, classes=(0, 1, 2), ratios=(1, 2, 3))

    Each label is a class, even if the label is not a whole number.  A soft segmentation has many such labels.
    If a volume has more than 1,000 labels that are not whole numbers, all these labels are one class.

    Args:
        samples_per_epoch: number of patches, at least 1.
        fraction: probability, from 0 to 1, that a patch is centred on a voxel of the foreground.
        classes: labels of the foreground, compared by ``labels == label``.  None takes all labels above 0.
            A sequence of labels inside ``classes`` is one class, such as a region of nnU-Net.
        ratios: how likely each of ``classes`` is, relative to the others in the same volume.  None makes all
            classes equally likely.
        image_threshold: of the label 0, only voxels where the sample's volume is above this number are
            chosen.  If the volume has several channels, one of them must be above it.
        voxels: number of random voxels to keep for each class of each volume.  nnU-Net keeps 10,000.
        volumes, mask_fraction: as for :class:`Uniform`.  The mask does not apply to patches that are
            centred on a voxel of the foreground.

    Raises:
        OptionError: an argument has a value that cannot work.

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
    classes: tuple[float | tuple[float, ...], ...] | None = None
    voxels: int = 10_000
    volumes: Literal["equal", "size"] = "equal"
    mask_fraction: float = 0.0
    ratios: tuple[float, ...] | None = None
    image_threshold: float | None = None

    def __post_init__(self) -> None:
        _check_common(self)
        _check_part(self, "fraction", self.fraction)
        object.__setattr__(self, "voxels", _from_1(self.voxels, "Foreground(voxels=…)"))
        if self.classes is not None:
            try:
                classes = tuple(dict.fromkeys(map(_label_or_labels, self.classes)))
            except TypeError:
                raise OptionError(
                    "Foreground(classes=…) must be a tuple of labels, or of tuples of labels, or None, got "
                    f"{self.classes!r}"
                ) from None
            object.__setattr__(self, "classes", classes)
        if self.ratios is not None:
            object.__setattr__(self, "ratios", _checked_ratios(self.ratios, self.classes))
        threshold = self.image_threshold
        is_number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
        if threshold is not None and not (is_number and threshold == threshold):
            raise OptionError(f"Foreground(image_threshold=…) must be a number or None, got {threshold!r}")
        if threshold is not None and not any(0 in labels_of(one) for one in self.classes or ()):
            raise OptionError("Foreground(image_threshold=…) is for the label 0: name it in classes=")


@dataclass(frozen=True)
class Grid:
    """All patches of a regular grid.  Patches that would extend beyond the volume are moved inwards.

    Args:
        stride: number of voxels from one patch to the next: one number, or a number for each dimension.
            None takes the size of a patch, so that neighbouring patches do not overlap.

    Raises:
        OptionError: ``stride`` has a value that cannot work.

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
    """Patches at given positions.

    Args:
        array: integers (N, D): the index of the first voxel of each patch.  With several volumes, the shape
            is (N, 1 + D), and the first column is the number of the volume.  If the dataset has
            ``padding=``, patches may extend beyond the volume.

    Raises:
        OptionError: ``array`` has another dtype or shape.

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


def labels_of(one: float | tuple[float, ...]) -> tuple[float, ...]:
    """Return the labels of a class."""
    return one if isinstance(one, tuple) else (one,)


def _label_or_labels(given: Any) -> float | tuple[float, ...]:
    if isinstance(given, Iterable) and not isinstance(given, (str, bytes, np.ndarray)):
        labels = tuple(map(_label, given))
        if not labels:
            raise TypeError(given)
        return labels
    return _label(given)


def _label(given: Any) -> float:
    label = float(given) if isinstance(given, (float, np.floating)) else operator.index(given)
    if label != label:
        raise TypeError(given)
    return label


def _checked_ratios(ratios: Any, classes: Any) -> tuple[float, ...]:
    if classes is None:
        raise OptionError("Foreground(ratios=…) needs classes=, a class for each ratio")
    try:
        found = tuple(map(float, ratios))
    except (TypeError, ValueError):
        found = ()
    if len(found) != len(classes) or not all(0 <= one < math.inf for one in found) or not any(found):
        raise OptionError(
            f"Foreground(ratios=…) must be {len(classes)} numbers from 0, one for each class, and not all "
            f"of them 0, got {ratios!r}"
        )
    return found


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
