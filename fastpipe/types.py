"""What the layers of fastpipe hand to each other; see also ``options`` and ``protocols``.

``index``, ``read``, ``transform`` and ``engine`` never import each other.  They meet here,
and the adapters in ``fastpipe.torch`` (and, later, other frameworks) plug them together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "Box",
    "FetchedObject",
    "Key",
    "Size",
    "StoredObject",
]

UInt8Array = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float64]


class Size(NamedTuple):
    """Height and width in pixels, in that order."""

    height: int
    width: int


class Box(NamedTuple):
    """A rectangle in pixels.  It may reach outside the image it refers to."""

    top: int
    left: int
    height: int
    width: int


class Key(NamedTuple):
    """What fixes the random parameters of one batch.

    Attributes:
        seed: any integer; taken modulo 2**64.
        epoch: number of the epoch, from 0.
        draws: int64 array (N,): for each sample its position in the epoch's unsharded
            order, so that a sample drawn twice is augmented twice.
    """

    seed: int
    epoch: int
    draws: npt.NDArray[np.int64]


class StoredObject(NamedTuple):
    """One object of a store, as it is listed.

    Attributes:
        key: its name, from the store's beginning.
        size: in bytes.
        version: changes when it does (an ETag, quotes included); empty where the store has none.
    """

    key: str
    size: int
    version: str


class FetchedObject(NamedTuple):
    """An object's content, and its version."""

    data: bytes
    version: str
