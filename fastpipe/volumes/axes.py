"""The order and the direction of a volume's dimensions: which are channels, and the orientation of images."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.errors import OptionError, VolumeError

_LETTERS = "LR", "PA", "IS"  # the two directions of each dimension of space
View = tuple[list[int], list[bool]]  # the dimensions in their new order, and which of these are reversed


class Axes(NamedTuple):
    """The options ``channel_dim`` and ``orientation`` of a dataset with patches of ``dims`` dimensions."""

    channel_dim: tuple[int, ...]
    orientation: str | None
    dims: int

    @classmethod
    def of(cls, channel_dim: Any, orientation: Any, dims: int) -> Axes | None:
        """Return None if nothing is to be changed."""
        if channel_dim is None and orientation is None:
            return None
        try:
            given = () if channel_dim is None else np.atleast_1d(np.asarray(channel_dim, object)).tolist()
            found = tuple(map(operator.index, given))
        except TypeError:
            raise OptionError(f"channel_dim must be an integer, or several, got {channel_dim!r}") from None
        is_known = isinstance(orientation, str) and len(orientation) == len(_LETTERS)
        if orientation is not None and not (
            is_known and all(sum(letter in pair for letter in orientation) == 1 for pair in _LETTERS)
        ):
            raise OptionError(
                'orientation must be three letters, one each of L or R, P or A, and I or S, such as "RAS", '
                f"got {orientation!r}"
            )
        return cls(found, orientation, dims)

    def view(self, shape: Sequence[int], name: str, affine: Any) -> View | None:
        """Return how to see an array of this shape; None for as it is.

        ``affine`` is that of the image, float64 (4, 4), or None if the format has no affine.
        """
        axes, flips, channels = list(range(len(shape))), [False] * len(shape), self._channels(shape, name)
        if self.orientation is not None:
            if affine is None or len(shape) < 3:
                raise OptionError(
                    "orientation= is for DICOM series, and for NIfTI images of at least three dimensions, "
                    f"and {name} is none: reorient it when it is written"
                )
            if min(channels, default=3) < 3:
                raise OptionError(
                    f"channel_dim={self.channel_dim} is one of the dimensions of space of {name}"
                )
            axes[:3], flips[:3] = _oriented(affine, self.orientation, name)
        order = [*map(axes.index, channels), *(at for at, axis in enumerate(axes) if axis not in channels)]
        axes, flips = [axes[at] for at in order], [flips[at] for at in order]
        return None if axes == sorted(axes) and not any(flips) else (axes, flips)

    def _channels(self, shape: Sequence[int], name: str) -> list[int]:
        if len(shape) <= self.dims:
            return []
        found = [dim + len(shape) if dim < 0 else dim for dim in self.channel_dim]
        if len(set(found)) < len(found) or not all(0 <= dim < len(shape) for dim in found):
            raise OptionError(
                f"channel_dim={self.channel_dim} does not name dimensions of {name}, which has the shape "
                f"{tuple(shape)}"
            )
        return found


def viewed_array(array: npt.NDArray[Any], axes: Sequence[int], flips: Sequence[bool]) -> npt.NDArray[Any]:
    box = tuple(slice(None, None, -1 if flip else None) for flip in flips)
    seen: npt.NDArray[Any] = array.transpose(axes)[box]
    return seen


def _oriented(affine: npt.NDArray[np.float64], orientation: str, name: str) -> View:
    """Return the dimensions of space in the order of ``orientation``, and which of them are reversed."""
    nibabel = require("nibabel", extra="volume").orientations
    stored = nibabel.io_orientation(affine)
    if not np.isfinite(stored).all():
        raise VolumeError(
            f"{name} has no orientation: its affine has the columns {affine[:3, :3].T.tolist()}; correct it"
        )
    change = nibabel.ornt_transform(stored, nibabel.axcodes2ornt(orientation))
    axes = np.argsort(change[:, 0]).tolist()
    return axes, (change[axes, 1] < 0).tolist()
