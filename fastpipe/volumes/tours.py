"""Orders that visit patches near to each other soon after each other, from several places at a time.

Patches of a volume are put in *stripes*, boxes that are as long as the volume along one dimension, and within
each in the order along that dimension, forth in one stripe and back in the next: a tour through the volume.
What a patch needs of the volume was then, for the most part, decoded for the patches before it.  The tour of
all volumes, in a random order, is cut into as many parts as the window has *fronts*, and the epoch takes a
patch of each in turn: those of a batch come from different places.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.index.order import tour_words
from fastpipe.volumes.places import PatchSpace, Places

__all__ = ["Geometry", "Stripes", "tour_of"]

Int64Array = npt.NDArray[np.int64]


class Stripes(NamedTuple):
    """How volumes are visited.

    Attributes:
        axis: the dimension along a stripe.
        widths: of a stripe along each dimension, in units; along ``axis`` it has no meaning.
    """

    axis: int
    widths: tuple[int, ...]


class Geometry(NamedTuple):
    """What of volumes decides how they are best visited.

    Attributes:
        space: where patches can be.
        units: int64 (V, D): of each volume, the shape of what is decoded at once.
        unit_nbytes: of the largest of these, in all arrays that are read at the same place.
    """

    space: PatchSpace
    units: Int64Array
    unit_nbytes: int


def tour_of(geometry: Geometry, places: Places, stripes: Stripes, *, seed: int, epoch: int) -> Int64Array:
    """The place of each patch in a tour through all volumes.

    Another one in each epoch: volumes come in another order, stripes begin elsewhere, and each volume is
    gone through from one end or from the other.

    Args:
        geometry: of the volumes.
        places: where patches are.
        stripes: how volumes are visited.
        seed, epoch: of the epoch.

    Returns:
        int64 (N,): a permutation of ``range(N)``.
    """
    space, volumes = geometry.space, places.volumes
    count, dims = len(space.shapes), len(space.patch)
    words = tour_words(count * (1 + 2 * dims), seed, epoch)
    turn = np.empty(count, np.int64)
    turn[np.argsort(words[:count], kind="stable")] = np.arange(count)
    is_from_end = (words[count : count * (1 + dims)] & np.uint64(1)).astype(np.bool_).reshape(count, dims)
    shifts = (words[count * (1 + dims) :] >> np.uint64(33)).astype(np.int64).reshape(count, dims)
    at = places.starts - space.lows[volumes]
    widths = np.array(stripes.widths, np.int64)
    # A stripe begins with a unit, which else two of them would decode.
    units = geometry.units[volumes]
    cells = (at // units + (shifts % widths)[volumes]) // widths
    cells = np.where(is_from_end[volumes], -cells, cells)
    # Forth and back: along each dimension by whether the stripe is an odd one along those before it.
    before = np.zeros(len(volumes), np.int64)
    keys = [turn[volumes]]
    for dim in [dim for dim in range(dims) if dim != stripes.axis]:
        keys.append(np.where(before % 2 == 1, -cells[:, dim], cells[:, dim]))
        before += cells[:, dim]
    backwards = (before % 2 == 1) != is_from_end[volumes, stripes.axis]
    along = at[:, stripes.axis]
    keys.append(np.where(backwards, -along, along))
    order = np.lexsort(tuple(reversed(keys)))
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    return ranks
