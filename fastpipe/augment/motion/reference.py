"""What NumPy makes of motion with the same parameters, in a loop: slow, and there to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.parameters import Parameters

__all__ = ["motion_reference"]

Row = dict[str, float]
Values = Any  # float64 (T, J, C), of NumPy


def motion_reference(
    ops: Sequence[Any], motion: Tensor, parameters: Sequence[Parameters], lengths: Tensor | None
) -> Any:
    """The motion as a loop over its sequences changes it; a tuple with new lengths, where there were any."""
    sequences, now = list(motion.double().numpy().copy()), [motion.shape[1]] * len(motion)
    if lengths is not None:
        now = lengths.tolist()
    for at in range(len(motion)):
        for op, one in zip(ops, parameters, strict=True):
            row = {name: float(column[at]) for name, column in one.items()}
            sequences[at], now[at] = _changed(op, sequences[at], now[at], row, lengths is not None)
    found = torch.from_numpy(np.stack(sequences)).to(motion.dtype)
    return found if lengths is None else (found, torch.tensor(now, dtype=lengths.dtype))


def _changed(op: Any, sequence: Values, length: int, p: Row, has_lengths: bool) -> tuple[Values, int]:
    kind = type(op).__name__
    if kind == "RandomApply":
        for at, inner in enumerate(op.ops if p["is_applied"] else ()):
            own = {name: p[f"{at}.{name}"] for name in inner.names}
            sequence, length = _changed(inner, sequence, length, own, has_lengths)
        return sequence, length
    if kind == "MotionSpeed":
        return _played(sequence, length, p["speed"], has_lengths)
    found = sequence.copy()
    found[:length] = _FRAMES[kind](op, sequence[:length], p)
    return found, length


def _played(sequence: Values, length: int, speed: float, has_lengths: bool) -> tuple[Values, int]:
    if speed == 1:
        return sequence, length
    frames = len(sequence)
    new_length = min(frames, int(np.floor((length - 1) / speed)) + 1)
    places, flat = np.arange(new_length) * speed, sequence[:length].reshape(length, -1)
    lines = [np.interp(places, np.arange(length), line) for line in flat.T]
    found = np.zeros_like(sequence)
    found[:new_length] = np.stack(lines, axis=1).reshape(new_length, *sequence.shape[1:])
    if not has_lengths:
        found[new_length:] = found[new_length - 1]
    return found, new_length if has_lengths else frames


def _translated(op: Any, frames: Values, p: Row) -> Values:
    return frames + np.array(list(p.values()))[: frames.shape[2]]


def _scaled(op: Any, frames: Values, p: Row) -> Values:
    centre = 0.0 if op.about is None else frames[0, op.about]
    return (frames - centre) * p["factor"] + centre


def _mirrored(op: Any, frames: Values, p: Row) -> Values:
    if not p["is_mirrored"]:
        return frames
    found = frames.copy()
    for one, other in op.pairs:
        found[:, [one, other]] = frames[:, [other, one]]
    found[..., op.axis] = 2 * op.about - found[..., op.axis]
    return found


_FRAMES: dict[str, Callable[[Any, Values, Row], Values]] = {
    "MotionMirror": _mirrored, "MotionScale": _scaled, "MotionTranslation": _translated,
}  # fmt: skip
