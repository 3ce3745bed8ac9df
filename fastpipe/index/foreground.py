"""Where the voxels of each label are: some of each, drawn from all in one pass, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["LabelVoxels", "VoxelSketch"]

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

_GOLDEN, _MIX_1, _MIX_2 = 0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB


class LabelVoxels(NamedTuple):
    """Some voxels of each label of a volume.

    Attributes:
        labels: int64 (L,): the labels, ascending.
        counts: int64 (L,): how many voxels each has.
        ends: int64 (L,): where its voxels end in ``voxels``; they begin where those before end.
        voxels: int64 (M,): the voxels, as places in the volume in C order.
    """

    labels: Int64Array
    counts: Int64Array
    ends: Int64Array
    voxels: Int64Array

    def of(self, label: int) -> Int64Array:
        """The voxels of a label that are known."""
        place = int(np.searchsorted(self.labels, label))
        if place == len(self.labels) or self.labels[place] != label:
            return np.zeros(0, np.int64)
        begin = int(self.ends[place - 1]) if place else 0
        return self.voxels[begin : int(self.ends[place])]


class VoxelSketch:
    """Draws voxels of each label: those whose places have the least hash values, so that the parts of a
    volume may come in any order, and every set of voxels is as likely as any other.

    Args:
        shape: of the volume.
        most: how many voxels of each label.
        labels: which labels; None takes all above 0.
    """

    def __init__(self, shape: Sequence[int], most: int, labels: Sequence[int] | None = None) -> None:
        self._shape, self._most = tuple(shape), most
        self._labels = None if labels is None else np.array(sorted(set(labels)), np.int64)
        self._counts: dict[int, int] = {}
        self._kept: dict[int, tuple[UInt64Array, Int64Array]] = {}

    def add(self, part: npt.NDArray[Any], start: Sequence[int]) -> None:
        """Look at a part of the volume.

        Args:
            part: of the volume's dimensions, numbers.
            start: where it begins in the volume.
        """
        flat = np.ascontiguousarray(part).reshape(-1)
        for label in self._labels_in(flat):
            inside = np.flatnonzero(flat == label)
            self._counts[label] = self._counts.get(label, 0) + len(inside)
            at = np.unravel_index(inside, part.shape)
            places = np.ravel_multi_index(
                tuple(axis + first for axis, first in zip(at, start, strict=True)), self._shape
            ).astype(np.int64)
            self._keep(label, _hashes(places), places)

    def _labels_in(self, flat: npt.NDArray[Any]) -> list[int]:
        if flat.dtype.kind == "u" and flat.dtype.itemsize <= 2:  # much faster than sorting
            found = np.flatnonzero(np.bincount(flat.astype(np.intp, copy=False)))
        elif flat.dtype.kind in "biu":
            found = np.unique(flat.astype(np.int64))
        else:
            values = np.unique(flat)
            found = values[np.isfinite(values) & (values == np.floor(values))].astype(np.int64)
        wanted = found[found > 0] if self._labels is None else np.intersect1d(found, self._labels)
        return [int(label) for label in wanted]

    def _keep(self, label: int, hashes: UInt64Array, places: Int64Array) -> None:
        before = self._kept.get(label)
        if before is not None:
            if len(before[0]) == self._most:  # most of what comes later is not among the least
                less = hashes < before[0].max()
                hashes, places = hashes[less], places[less]
            hashes, places = np.concatenate([before[0], hashes]), np.concatenate([before[1], places])
        if len(hashes) > self._most:
            least = np.argpartition(hashes, self._most - 1)[: self._most]
            hashes, places = hashes[least], places[least]
        self._kept[label] = hashes, places

    def found(self) -> LabelVoxels:
        """What was drawn of all parts that were added."""
        labels = sorted(self._kept)
        voxels = [np.sort(self._kept[label][1]) for label in labels]
        return LabelVoxels(
            np.array(labels, np.int64),
            np.array([self._counts[label] for label in labels], np.int64),
            np.cumsum([len(some) for some in voxels], dtype=np.int64),
            np.concatenate([np.zeros(0, np.int64), *voxels]),
        )


def _hashes(places: Int64Array) -> UInt64Array:
    """SplitMix64's finaliser of each place (D. Stafford's variant 13), which is one to one."""
    values = places.astype(np.uint64)
    values += np.uint64(1)
    values *= np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))
