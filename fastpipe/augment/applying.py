"""Augmentations of some images, and not of others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.base import BatchTransform, Columns, Moves, Untouched, chosen
from fastpipe.augment.canvas import Canvas
from fastpipe.augment.matrices import after, identity
from fastpipe.augment.options import probability
from fastpipe.augment.parameters import Float64Array
from fastpipe.augment.running import applied_table, drawn_table
from fastpipe.errors import AugmentError

__all__ = ["RandomApply", "checked_ops"]


class RandomApply(BatchTransform):
    """Apply augmentations to some images.

    Args:
        ops: one or several, which keep the size and the dtype.
        p: the part of the images.
    """

    def __init__(self, ops: BatchTransform | Sequence[BatchTransform], p: float = 0.5) -> None:
        self.ops = checked_ops([ops] if isinstance(ops, BatchTransform) else ops, "RandomApply")
        self.p = probability(p)
        for op in self.ops:
            if op.mixes:
                raise AugmentError(f"RandomApply leaves some images as they are, and {op} mixes all")
        self.draws = 1 + sum(op.draws for op in self.ops)
        self.ranks = (3, 4) if all(3 in op.ranks for op in self.ops) else (4,)
        self.names = ("is_applied", *_nested([op.names for op in self.ops]))
        self.applied_names = ("is_applied", *_nested([op.names_applied for op in self.ops]))

    def check(self, shape: Sequence[int]) -> None:
        for op in self.ops:
            op.check(shape)
            if op.size_after(shape[2], shape[3]) != (shape[2], shape[3]):
                raise AugmentError(f"RandomApply leaves some images as they are, and {op} resizes")

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        for op in self.ops:
            if op.dtype_after(dtype) != dtype:
                raise AugmentError(f"RandomApply leaves some images as they are, and {op} converts")
        return dtype

    def table(self, u: Float64Array, height: int, width: int) -> Float64Array:
        is_applied = (u[:, :1] < self.p).astype(np.float64)
        return np.concatenate([is_applied, drawn_table(self.ops, u[:, 1:], height, width)], axis=1)

    def applied(self, table: Float64Array, height: int, width: int) -> Float64Array:
        return np.concatenate([table[:, :1], applied_table(self.ops, table[:, 1:], height, width)], axis=1)

    def moves(self, table: Float64Array, height: int, width: int, of_points: bool) -> Moves | None:
        matrices, clips, begin = identity(len(table)), np.zeros(len(table), np.bool_), 1
        if self.for_masks() is None:
            return None
        for op in self.ops:
            part = op.moves(table[:, begin : begin + len(op.names)], height, width, of_points)
            if part is not None:
                matrices, clips = after(matrices, part.matrices), clips | part.clips
            begin += len(op.names)
        is_applied = table[:, :1] > 0
        return Moves(np.where(is_applied, matrices, identity(len(table))), clips & is_applied[:, 0])

    def for_masks(self) -> BatchTransform | None:
        return _MaskApply(self.ops) if any(op.for_masks() for op in self.ops) else None

    def on_canvas(self, canvas: Canvas, row: Float64Array) -> None:
        if row[0]:
            begin = 1
            for op in self.ops:
                op.on_canvas(canvas, row[begin : begin + len(op.names_applied)])
                begin += len(op.names_applied)

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        changed = images
        for at, op in enumerate(self.ops):
            own = {name: columns[f"{at}.{name}"] for name in op.names_applied}
            changed = op.on_tensors(changed, own, of_bytes)
        return chosen(columns["is_applied"], changed, images)

    def extra_repr(self) -> str:
        return f"{list(self.ops)}, p={self.p}"


def _nested(names: Sequence[Sequence[str]]) -> list[str]:
    """Names of several operations, of which some may be of one kind."""
    return [f"{at}.{name}" for at, own in enumerate(names) for name in own]


class _MaskApply(RandomApply):
    """Applies to masks what belongs to geometry."""

    def __init__(self, ops: Sequence[BatchTransform]) -> None:
        super().__init__([op.for_masks() or Untouched(op.names_applied) for op in ops])


def checked_ops(ops: Sequence[BatchTransform], name: str) -> tuple[BatchTransform, ...]:
    """The augmentations that were given to whoever has this name.

    Raises:
        AugmentError: they are something else.
    """
    for op in ops:
        if not isinstance(op, BatchTransform):
            raise AugmentError(
                f"{name} takes augmentations of batches, of fastpipe.augment, got {type(op).__name__}"
            )
    return tuple(ops)
