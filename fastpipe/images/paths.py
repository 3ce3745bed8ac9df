"""Paths of a batch's files as the native core takes them: slices of one piece of memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.index.storage import FrozenSamples

__all__ = ["PackedPaths", "packed", "paths_of"]

Int64Array = npt.NDArray[np.int64]


class PackedPaths(NamedTuple):
    """Path ``i`` is ``prefix + arena[starts[i]:ends[i]]``, encoded as the file system takes it."""

    prefix: bytes
    arena: bytes
    starts: Int64Array
    ends: Int64Array


def paths_of(samples: Any, positions: Int64Array) -> PackedPaths:
    """The paths of some samples, without a Python object for each where they are stored flat.

    Args:
        samples: a ``FrozenSamples``, or a sequence of (path, target).
        positions: int64 (N,), from 0.
    """
    if isinstance(samples, FrozenSamples) and samples.is_of_file_system:
        starts, ends = samples.offsets[positions], samples.offsets[positions + 1]
        return PackedPaths(os.fsencode(samples.prefix), samples.arena, starts, ends)
    return packed([samples[position][0] for position in positions.tolist()])


def packed(paths: Sequence[Any]) -> PackedPaths:
    """Paths that are Python objects, in one piece of memory."""
    names = [os.fsencode(path) for path in paths]
    lengths = np.array([len(name) for name in names], np.int64)
    ends = np.cumsum(lengths)
    return PackedPaths(b"", b"".join(names), ends - lengths, ends)
