"""Where the voxels of each label are: some of each, drawn from all in one pass, in any order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["LabelVoxels", "VoxelSketch"]

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

# Labels that are no whole numbers, as those of soft segmentations, are classes of their own up to so many.
_MOST_FRACTIONS = 1000
_TOGETHER = math.nan  # what they are together; told from others by its identity

_GOLDEN, _MIX_1, _MIX_2 = 0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB


class LabelVoxels(NamedTuple):
    """Some voxels of each class of a volume.

    Attributes:
        labels: (C,), the classes' labels, of the volume's own kind: int64, uint64 or float64; ascending.
            NaN, at the end, is the class of all that are no whole numbers, if there are too many of them.
        counts: int64 (C,): how many voxels each has.
        ends: int64 (C,): where its voxels end in ``voxels``; they begin where those before end.
        voxels: int64 (M,): the voxels, as places in the volume in C order.
    """

    labels: npt.NDArray[Any]
    counts: Int64Array
    ends: Int64Array
    voxels: Int64Array

    def each(self) -> list[Int64Array]:
        """The voxels of each class that are known."""
        return np.split(self.voxels, self.ends)[:-1]


class VoxelSketch:
    """Draws voxels of each label: those whose places have the least hash values, so that the parts of a
    volume may come in any order, and every set of voxels is as likely as any other.

    Args:
        shape: of the volume.
        most: how many voxels of each label.
        labels: which labels, compared as NumPy compares numbers with the volume's; None takes all above 0.
            Of these, labels that are no whole numbers are one class together if there are more than 1,000.
    """

    def __init__(self, shape: Sequence[int], most: int, labels: Sequence[float] | None = None) -> None:
        self._shape, self._most = tuple(shape), most
        self._labels = None if labels is None else list(dict.fromkeys(labels))
        self._kind: np.dtype[Any] = np.dtype(np.int64)
        self._counts: dict[float, int] = {}
        self._kept: dict[float, tuple[UInt64Array, Int64Array]] = {}
        self._fractions: set[float] = set()

    def add(self, part: npt.NDArray[Any], start: Sequence[int]) -> None:
        """Look at a part of the volume.

        Args:
            part: of the volume's dimensions, real numbers or bool.
            start: where it begins in the volume.
        """
        flat = np.ascontiguousarray(part).reshape(-1)
        flat = flat.view(np.uint8) if flat.dtype.kind == "b" else flat
        self._kind = np.dtype({"u": np.uint64, "f": np.float64}.get(flat.dtype.kind, np.int64))
        for label, inside in self._classes_in(flat):
            self._counts[label] = self._counts.get(label, 0) + len(inside)
            at = np.unravel_index(inside, part.shape)
            places = np.ravel_multi_index(
                tuple(axis + first for axis, first in zip(at, start, strict=True)), self._shape
            ).astype(np.int64)
            self._keep(label, _hashes(places), places)

    def _classes_in(self, flat: npt.NDArray[Any]) -> Iterator[tuple[float, npt.NDArray[np.intp]]]:
        """The classes of some voxels, and which of them each has."""
        if self._labels is not None:
            for label in self._labels:
                with np.errstate(over="ignore"):  # of labels that a small float cannot be
                    inside = np.flatnonzero(flat == label)
                if len(inside):
                    yield label, inside
            return
        if flat.dtype.kind == "u" and flat.dtype.itemsize <= 2:  # much faster than sorting
            for label in np.flatnonzero(np.bincount(flat.astype(np.intp, copy=False))).tolist():
                if label:
                    yield label, np.flatnonzero(flat == label)
            return
        above = np.flatnonzero(flat > 0)
        above = above[np.argsort(flat[above], kind="stable")]
        values = flat[above]
        is_whole = values == np.floor(values) if values.dtype.kind == "f" else np.ones(len(values), np.bool_)
        yield from _grouped(values[is_whole], above[is_whole])
        values, above = values[~is_whole], above[~is_whole]
        if not len(above):
            return
        yield _TOGETHER, above
        if len(self._fractions) <= _MOST_FRACTIONS:
            self._fractions.update(np.unique(values).tolist())
            if len(self._fractions) <= _MOST_FRACTIONS:
                yield from _grouped(values, above)

    def _keep(self, label: float, hashes: UInt64Array, places: Int64Array) -> None:
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
        is_many = len(self._fractions) > _MOST_FRACTIONS
        left_out = self._fractions if is_many else set()
        labels = sorted(label for label in self._kept if label is not _TOGETHER and label not in left_out)
        labels += [_TOGETHER] if is_many else []
        voxels = [np.sort(self._kept[label][1]) for label in labels]
        return LabelVoxels(
            np.array(labels, self._kind),
            np.array([self._counts[label] for label in labels], np.int64),
            np.cumsum([len(some) for some in voxels], dtype=np.int64),
            np.concatenate([np.zeros(0, np.int64), *voxels]),
        )


def _grouped(
    values: npt.NDArray[Any], places: npt.NDArray[np.intp]
) -> Iterator[tuple[float, npt.NDArray[np.intp]]]:
    """Values that are sorted, each with its places."""
    if len(values):
        ends = np.flatnonzero(values[1:] != values[:-1]) + 1
        yield from zip(values[[0, *ends]].tolist(), np.split(places, ends), strict=True)


def _hashes(places: Int64Array) -> UInt64Array:
    """SplitMix64's finaliser of each place (D. Stafford's variant 13), which is one to one."""
    values = places.astype(np.uint64)
    values += np.uint64(1)
    values *= np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))
