"""What a dataset of patches is asked for: sizes, margins, what is beyond the ends of volumes."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.casting import unheld
from fastpipe.errors import OptionError
from fastpipe.volumes.places import PatchPlaces, PatchSpace, Places
from fastpipe.volumes.reader import PatchReader, padded_indices

__all__ = [
    "PADDING_MODES",
    "Padding",
    "WithMargin",
    "check_held",
    "checked_margin",
    "checked_nan",
    "checked_size",
    "filling",
    "read_patch",
]

PADDING_MODES = ("constant", "edge", "reflect", "symmetric", "wrap")


def checked_size(patch_size: Sequence[int]) -> tuple[int, ...]:
    try:
        size = tuple(operator.index(side) for side in patch_size)
    except TypeError:
        size = ()
    if not size or min(size) < 1:
        raise OptionError(f"patch_size must be numbers from 1, one for each dimension, got {patch_size!r}")
    return size


def checked_nan(nan: Any, dtype: np.dtype[Any]) -> Any:
    if nan in ("keep", "error"):
        return nan
    if not isinstance(nan, (int, float)) or isinstance(nan, bool):
        raise OptionError(f"nan must be 'keep', 'error' or a number, got {nan!r}")
    if dtype.kind in "fc":
        check_held(nan, dtype, "nan=")
    return nan


def check_held(value: float, dtype: np.dtype[Any], what: str) -> None:
    """Refuse a number that elements of a type would hold as another; floats round.

    Raises:
        OptionError: they would.
    """
    if dtype.kind in "fc":
        is_lost = float(np.finfo(dtype).max) < abs(value) != np.inf
    else:
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        is_lost = bool(unheld(np.asarray(whole), dtype).any())
    if is_lost:
        raise OptionError(f"{what} is {value}, which elements of {dtype} cannot hold: give one that they can")


def filling(space: PatchSpace) -> int:
    """As many patches as have the size of the volumes."""
    voxels = sum(math.prod(shape) for shape in space.shapes.tolist())
    return int(max(1, voxels // math.prod(space.patch.tolist())))


def checked_margin(margin: Any, patch_size: Sequence[int]) -> tuple[int, ...]:
    """Voxels on each side, of each dimension.

    Args:
        margin: a number for all, one for each, or something that says what it needs: ``margin(patch_size)``.
        patch_size: of the patches.

    Raises:
        OptionError: it is nothing of these.
    """
    asks = getattr(margin, "margin", None)
    given = asks(tuple(patch_size)) if callable(asks) else margin
    try:
        found = tuple(operator.index(one) for one in np.atleast_1d(np.asarray(given, object)).tolist())
    except TypeError:
        found = (-1,)
    found = found * len(patch_size) if len(found) == 1 else found
    if len(found) != len(patch_size) or min(found) < 0:
        raise OptionError(
            "margin must be a number of voxels from 0, one for each dimension, or an augmentation of "
            f"fastpipe.augment, got {margin!r}"
        )
    return found


class WithMargin:
    """Where patches begin with what is around them.

    Args:
        places: where they begin themselves.
        margin: voxels on each side, of each dimension.
    """

    def __init__(self, places: PatchPlaces, margin: Sequence[int]) -> None:
        self._places, self._margin = places, np.array(margin, np.int64)
        self.count, self.is_random = places.count, places.is_random

    def places(self, seed: int, epoch: int, indices: npt.NDArray[np.int64]) -> Places:
        """As of ``PatchPlaces``; perhaps before the volume's beginning."""
        found = self._places.places(seed, epoch, indices)
        return Places(found.volumes, found.starts - self._margin)


class Padding(NamedTuple):
    """What is beyond the ends of volumes.

    Attributes:
        mode: one of ``numpy.pad``; ``"error"`` for nothing.
        value: with ``"constant"``, of the volume.
        label: of the labels; masks have 0.
    """

    mode: str
    value: float = 0
    label: float = 0

    @classmethod
    def of(cls, option: Any) -> Padding:
        """What ``padding=`` asks for.

        Raises:
            OptionError: it is nothing.
        """
        if isinstance(option, str) and option in ("error", *PADDING_MODES):
            return cls(option)
        if isinstance(option, tuple) and len(option) in (2, 3) and option[0] == "constant":
            try:
                return cls("constant", *map(_number, option[1:]))
            except (TypeError, ValueError):
                pass
        raise OptionError(
            f"padding must be 'error', one of {', '.join(map(repr, PADDING_MODES))}, or ('constant', value[, "
            f"value of labels]), got {option!r}"
        )

    def check(self, role: str, dtype: np.dtype[Any]) -> None:
        """Raise an error if elements of a type cannot be what is beyond.

        Raises:
            OptionError: they cannot.
        """
        if self.mode == "constant":
            check_held(self.constant(role), dtype, f"the constant of padding= for {role}")

    def constant(self, role: str) -> float:
        """With ``"constant"``, what is beyond an array: ``"volume"``, ``"labels"`` or ``"mask"``."""
        return {"volume": self.value, "labels": self.label, "mask": 0}[role]

    @property
    def pads(self) -> bool:
        """Whether patches may reach beyond a volume."""
        return self.mode != "error"


def _number(value: Any) -> float:
    """A number as it is: integers stay exact.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, (str, bytes)):
        raise TypeError(value)
    try:
        return operator.index(value)
    except TypeError:
        return float(value)


def read_patch(
    reader: PatchReader,
    shape: Sequence[int],
    start: Sequence[int],
    out: npt.NDArray[Any],
    lead: int,
    padding: Padding,
    role: str,
) -> None:
    """Read a patch, and what is beyond the ends of its volume.

    Args:
        reader: of the volume.
        shape: of the volume, along the D dimensions that patches are cut along.
        start: integers (D,): where it begins, perhaps below 0.
        out: (*lead, *patch): its memory.
        lead: dimensions in front.
        padding: what is beyond.
        role: ``"volume"``, ``"labels"`` or ``"mask"``.
    """
    size = out.shape[lead:]
    front = [0] * lead
    if all(at >= 0 and at + side <= most for at, side, most in zip(start, size, shape, strict=True)):
        reader.read([*front, *start], out)
        return
    indices = [
        padded_indices(at, side, most, padding.mode)
        for at, side, most in zip(start, size, shape, strict=True)
    ]
    needed = [np.unique(index[index >= 0]) for index in indices]
    sizes = [len(some) for some in needed]  # never more than the patch has
    box = np.empty((*out.shape[:lead], *sizes), out.dtype)
    for runs in itertools.product(*map(_runs, needed)):
        lows = [int(some[run.start]) for some, run in zip(needed, runs, strict=True)]
        some_box: list[Any] = [slice(None)] * lead + list(runs)
        reader.read([*front, *lows], box[tuple(some_box)])
    if padding.mode == "constant":
        out[...] = padding.constant(role)
        begins = [int(some[0]) - at for some, at in zip(needed, start, strict=True)]
        inside: list[Any] = [slice(at, at + side) for at, side in zip(begins, sizes, strict=True)]
        out[(..., *inside)] = box
        return
    taken = [np.searchsorted(some, index) for some, index in zip(needed, indices, strict=True)]
    out[...] = box[np.ix_(*map(range, out.shape[:lead]), *taken)]


def _runs(indices: npt.NDArray[np.int64]) -> list[slice]:
    """Of ascending numbers the parts that follow each other: with ``"wrap"`` there may be two, at both ends
    of a dimension, and all between them need not be read."""
    cuts = [0, *(np.flatnonzero(np.diff(indices) > 1) + 1).tolist(), len(indices)]
    return [slice(begin, end) for begin, end in itertools.pairwise(cuts)]
