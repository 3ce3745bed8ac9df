"""Linear colour: several changes of colours as one map, for each sample.

With x a pixel's red, green and blue in [0, 1] and m their means over the image, each change is
``x → A x + B m + c``, and so is one after the other.  A map is kept as ``[A | B | c]``, (N, 3, 7).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastpipe.augment.applying import RandomApply
from fastpipe.augment.colour import ColorJitter, Normalize, RandomGrayscale
from fastpipe.augment.images import BatchTransform
from fastpipe.augment.parameters import Float64Array

__all__ = ["IDENTITY", "bounds_of", "colour_maps"]

IDENTITY: Float64Array = np.concatenate([np.eye(3), np.zeros((3, 4))], axis=1)
_GREY = np.array([0.2989, 0.587, 0.114])
_ONES = np.ones((3, 1))


def colour_maps(changes: Sequence[tuple[BatchTransform, Float64Array]]) -> Float64Array:
    """What changes of colours do one after the other.

    Args:
        changes: each with its parameters.

    Returns:
        (N, 21): the maps.
    """
    maps = np.tile(IDENTITY, (len(changes[0][1]), 1, 1))
    for op, table in changes:
        maps = _after(maps, op, table)
    return maps.reshape(len(maps), -1)


def _after(maps: Float64Array, op: BatchTransform, table: Float64Array) -> Float64Array:
    if isinstance(op, RandomApply):
        changed, begin = maps, 1
        for inner in op.ops:
            changed = _after(changed, inner, table[:, begin : begin + len(inner.names)])
            begin += len(inner.names)
        return np.where(table[:, :1, None] > 0, changed, maps)
    if isinstance(op, ColorJitter):
        for place in range(4, 8):
            maps = _jittered(maps, table[:, place], table[:, :4])
        return maps
    if isinstance(op, RandomGrayscale):
        return np.where(table[:, :1, None] > 0, (_ONES * _GREY) @ maps, maps)
    if isinstance(op, Normalize):
        maps = maps.copy()
        maps[:, :, 6] -= np.array(op.mean)
        maps /= np.array(op.std)[:, None]
        return maps
    return maps  # conversion, which changes no colour


def _jittered(maps: Float64Array, kinds: Float64Array, factors: Float64Array) -> Float64Array:
    """One change of ``ColorJitter``: brightness, contrast, saturation or hue."""
    kind = kinds.astype(np.int64)[:, None, None]
    factor = np.where(kind < 3, np.take_along_axis(factors, kind[:, 0], axis=1)[:, :, None], 1.0)
    grey = (_ONES * _GREY) @ maps
    # The mean of an image's luminance is that of its mean colour.
    mean = np.concatenate([0 * grey[:, :, :3], grey[:, :, :3] + grey[:, :, 3:6], grey[:, :, 6:]], axis=2)
    blended = factor * maps + (1 - factor) * np.where(kind == 1, mean, np.where(kind == 2, grey, 0.0))
    return np.where(kind == 3, _turns(factors[:, 3]) @ maps, blended)


def _turns(parts: Float64Array) -> Float64Array:
    """Rotations of colours about the greys, by parts of a turn: (N, 3, 3).

    At thirds of a turn it is what turning the hue does, red to green to blue; between these it is near to it.
    By O. Rodrigues's formula, for the axis (1, 1, 1).
    """
    angle = 2 * np.pi * parts[:, None, None]
    across = np.array([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]]) / np.sqrt(3)
    found: Float64Array = np.cos(angle) * np.eye(3) + np.sin(angle) * across + (1 - np.cos(angle)) / 3
    return found


def bounds_of(ops: Sequence[BatchTransform]) -> tuple[Float64Array, Float64Array]:
    """The least and the greatest value of each colour: jitter cuts off what is outside of [0, 1].

    Args:
        ops: changes of colours.
    """
    low, high = np.full(3, -np.inf), np.full(3, np.inf)
    for op in ops:
        for inner in op.ops if isinstance(op, RandomApply) else (op,):
            if isinstance(inner, ColorJitter):
                low, high = np.zeros(3), np.ones(3)
            elif isinstance(inner, Normalize):
                low, high = ((bound - np.array(inner.mean)) / np.array(inner.std) for bound in (low, high))
    return low, high
