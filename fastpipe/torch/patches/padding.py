"""Patches that reach beyond a volume's ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.errors import OptionError
from fastpipe.read.volumes.patches import PatchReader, padded_indices

__all__ = ["Padding", "read_patch"]

_MODES = ("constant", "edge", "reflect", "symmetric", "wrap")


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
        if isinstance(option, str) and option in ("error", *_MODES):
            return cls(option)
        if isinstance(option, tuple) and len(option) in (2, 3) and option[0] == "constant":
            try:
                return cls("constant", *(float(value) for value in option[1:]))
            except (TypeError, ValueError):
                pass
        raise OptionError(
            f"padding must be 'error', one of {', '.join(map(repr, _MODES))}, or ('constant', value[, value "
            f"of labels]), got {option!r}"
        )

    def check(self, role: str, dtype: np.dtype[Any]) -> None:
        """Raise an error if elements of a type cannot be what is beyond.

        Raises:
            OptionError: they cannot.
        """
        value = {"volume": self.value, "labels": self.label, "mask": 0}[role]
        if self.mode != "constant" or dtype.kind not in "biu":
            return
        limits = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        if not (limits[0] <= value <= limits[1] and value == int(value)):
            raise OptionError(f"padding= has the constant {value} for {role}, whose elements are {dtype}")

    @property
    def pads(self) -> bool:
        """Whether patches may reach beyond a volume."""
        return self.mode != "error"


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
    # The box that has all that is needed is never larger than the patch.
    lows = [int(index[index >= 0].min()) for index in indices]
    sizes = [int(index.max()) + 1 - low for low, index in zip(lows, indices, strict=True)]
    box = np.empty((*out.shape[:lead], *sizes), out.dtype)
    reader.read([*front, *lows], box)
    if padding.mode == "constant":
        out[...] = {"volume": padding.value, "labels": padding.label, "mask": 0}[role]
        begins = [low - at for low, at in zip(lows, start, strict=True)]
        inside: list[Any] = [slice(at, at + side) for at, side in zip(begins, sizes, strict=True)]
        out[(..., *inside)] = box
        return
    taken = [index - low for index, low in zip(indices, lows, strict=True)]
    out[...] = box[np.ix_(*map(range, out.shape[:lead]), *taken)]
