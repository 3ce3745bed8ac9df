"""Augmentations of some images, and not of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.base import Augmentation, Chain
from fastpipe.augment.images import BatchTransform, Columns, ImageChain, Moves, Untouched, chosen
from fastpipe.augment.matrices import after, identity
from fastpipe.augment.options import probability
from fastpipe.augment.parameters import Float64Array
from fastpipe.augment.steps import Step
from fastpipe.augment.tables import Shape, applied_table, drawn_table
from fastpipe.errors import AugmentError

__all__ = ["RandomApply", "chain_type_of", "checked_ops", "kind_of"]


class RandomApply(BatchTransform):
    """Apply augmentations to some images, volumes or sequences.

    Args:
        ops: one or several, which keep the size and the dtype.
        p: the part of the images.
    """

    # It is of the kind of its operations, and has what runs each: ``steps`` on the processor, elsewhere
    # ``on_tensors`` of images, ``on_canvas`` of volumes and ``onto`` of motion.

    def __init__(self, ops: Augmentation | Sequence[Augmentation], p: float = 0.5) -> None:
        self.ops = checked_ops([ops] if isinstance(ops, Augmentation) else ops, "RandomApply")
        self.p = probability(p)
        for op in self.ops:
            if op.mixes:
                raise AugmentError(f"RandomApply leaves some {op.kind} as they are, and {op} mixes all")
        self.draws, self.names, self.applied_names = (
            self.draws_for(1),
            self.names_for(1),
            self.applied_names_for(1),
        )
        self.kind, self.chain_type = kind_of(self.ops), chain_type_of(self.ops)
        self._chain = self.chain_type([self], "RandomApply")
        self.ranks = tuple(rank for rank in (3, 4, 5) if all(rank in op.ranks for op in self.ops))

    @property
    def inner(self) -> Sequence[Augmentation]:
        return self.ops

    def draws_for(self, channels: int) -> int:
        found: int = 1 + sum(op.draws_for(channels) for op in self.ops)
        return found

    def names_for(self, channels: int) -> tuple[str, ...]:
        return ("is_applied", *_nested([op.names_for(channels) for op in self.ops]))

    def applied_names_for(self, channels: int) -> tuple[str, ...]:
        return ("is_applied", *_nested([op.applied_names_for(channels) for op in self.ops]))

    def check(self, shape: Sequence[int]) -> None:
        for op in self.ops:
            op.check(shape)
            if op.shape_after(tuple(shape[1:])) != tuple(shape[1:]):
                raise AugmentError(f"RandomApply leaves some {op.kind} as they are, and {op} resizes")

    def size_before(self, size: tuple[int, ...]) -> tuple[int, ...]:
        for op in reversed(self.ops):
            size = op.size_before(size)
        return size

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        for op in self.ops:
            if op.dtype_after(dtype) != dtype:
                hint = f": give {op.kind}.float()" if op.kind == "volumes" else ""
                raise AugmentError(f"RandomApply leaves some {op.kind} as they are, and {op} converts{hint}")
        return dtype

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        return drawn_table([self], u, shape)

    def applied(self, table: Float64Array, shape: Shape) -> Float64Array:
        return applied_table([self], table, shape)

    def moves(self, table: Float64Array, shape: Shape, of_points: bool) -> Moves | None:
        matrices, clips, begin = identity(len(table)), np.zeros(len(table), np.bool_), 1
        if self.for_masks() is None:
            return None
        for op in self.ops:
            part = op.moves(table[:, begin : begin + len(op.names)], shape, of_points)
            if part is not None:
                matrices, clips = after(matrices, part.matrices), clips | part.clips
            begin += len(op.names)
        is_applied = table[:, :1] > 0
        return Moves(np.where(is_applied, matrices, identity(len(table))), clips & is_applied[:, 0])

    def for_masks(self) -> BatchTransform | None:
        return _MaskApply(self.ops) if any(op.for_masks() for op in self.ops) else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._chain = self.chain_type([self], "RandomApply")

    def steps(self, column: int, shape: Shape) -> list[Step] | None:
        inner: list[Step] = []
        at = column + 1
        for op in self.ops:
            own = op.steps(at, shape)
            if own is None:
                return None
            inner += own
            at += len(op.applied_names_for(shape[0]))
        return [Step("skip", column, (len(inner),)), *inner]

    def on_canvas(self, canvas: Any, row: Float64Array) -> None:
        if row[0]:
            begin = 1
            for op in self.ops:
                end = begin + len(op.applied_names_for(canvas.channels))
                op.on_canvas(canvas, row[begin:end])
                begin = end

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        changed = images
        for at, op in enumerate(self.ops):
            own = {name: columns[f"{at}.{name}"] for name in op.names_applied}
            changed = op.on_tensors(changed, own, of_bytes)
        return chosen(columns["is_applied"], changed, images)

    def onto(self, sequences: Any, rows: Float64Array) -> None:
        which, begin = rows[:, :1] > 0, 1
        for op in self.ops:
            end = begin + len(op.names_applied)
            op.onto(sequences, np.where(which, rows[:, begin:end], op.neutral()))
            begin = end

    def neutral(self) -> Float64Array:
        """What is applied to sequences to leave them as they are."""
        return np.zeros(len(self.names_applied))

    def extra_repr(self) -> str:
        return f"{list(self.ops)}, p={self.p}"


def _nested(names: Sequence[Sequence[str]]) -> list[str]:
    """Names of several operations, of which some may be of one kind."""
    return [f"{at}.{name}" for at, own in enumerate(names) for name in own]


class _MaskApply(RandomApply):
    """Applies to masks what belongs to geometry."""

    def __init__(self, ops: Sequence[Augmentation]) -> None:
        super().__init__([op.for_masks() or Untouched(op) for op in ops])


def checked_ops(ops: Sequence[Augmentation], name: str) -> tuple[Any, ...]:
    """The augmentations, all of one kind, that were given to whoever has this name.

    Raises:
        AugmentError: they are something else.
    """
    for op in ops:
        if not isinstance(op, Augmentation):
            raise AugmentError(
                f"{name} takes augmentations of batches, of fastpipe.augment, got {type(op).__name__}"
            )
    if len({op.kind for op in ops}) > 1:
        told = ", ".join(f"{type(op).__name__} of {op.kind}" for op in ops)
        raise AugmentError(f"{name} takes augmentations of one kind, got {told}")
    return tuple(ops)


def kind_of(ops: Sequence[Augmentation]) -> str:
    """What augmentations that were checked are for."""
    return ops[0].kind if ops else "images"


def chain_type_of(ops: Sequence[Augmentation]) -> type[Chain]:
    """Return the chain class of augmentations that were checked."""
    return ops[0].chain_type if ops else ImageChain
