"""Tables of a chain's numbers: what is drawn for its samples, and what is computed from that on the host.

A chain's parameters are one table, (N, columns), in which those of each operation come one after the other;
so are the numbers that are applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastpipe.augment.distributions import drawn
from fastpipe.augment.parameters import Float64Array

__all__ = [
    "Layout", "Ops", "Shape", "applied_table", "drawn_table", "dtype_after", "shape_after", "untraced",
    "uploaded",
]  # fmt: skip

_Made = TypeVar("_Made")
Ops = Sequence[Any]  # augmentations, of which the methods of ``Augmentation`` are called
Shape = tuple[int, ...]  # of a sample


def uploaded(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device; nobody waits for pinned memory's way there."""
    found = torch.from_numpy(np.require(array, requirements="W"))  # torch warns of what is read-only
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def untraced(function: Callable[..., _Made], *args: Any) -> _Made:
    """Call a function that torch.compile does not look into.

    As a decorator, ``torch.compiler.disable`` would load the compiler, which takes more than a second.
    """
    if torch.compiler.is_compiling():
        found: _Made = torch.compiler.disable(function)(*args)  # type: ignore[no-untyped-call]
        return found
    return function(*args)


class _Part(NamedTuple):
    """An operation, and the columns of its uniform numbers, its parameters and what is applied."""

    op: Any
    is_simple: bool  # see ``drawn_as``
    draws: slice
    names: slice
    applied: slice


class _Simple(NamedTuple):
    """Parameters of a kind (see ``Drawn``): their columns, and those of uniform numbers."""

    kind: str
    draws: npt.NDArray[np.intp]
    names: npt.NDArray[np.intp]
    low: Float64Array
    high: Float64Array


class Layout:
    """The columns of a chain's tables.

    An operation that others are in, ``RandomApply``, has a number of its own before theirs.

    Args:
        ops: the chain.
        channels: of its samples.

    Attributes:
        draws, names, applied: columns of uniform numbers, of parameters, and of what is applied.
    """

    def __init__(self, ops: Ops, channels: int) -> None:
        self.draws = self.names = self.applied = 0
        self._parts: list[_Part] = []
        self._gates: list[tuple[slice, slice]] = []  # columns of parameters, and of what is applied
        simple: dict[str, list[tuple[int, int, float, float]]] = {}
        self._add(ops, channels, simple)
        # Numbers of a kind are drawn together.
        self._simple = [
            _Simple(kind, *(np.array(column) for column in zip(*columns, strict=True)))
            for kind, columns in simple.items()
        ]
        self._copies = self._same()

    def _add(self, ops: Ops, channels: int, simple: dict[str, list[tuple[int, int, float, float]]]) -> None:
        for op in ops:
            inner = op.inner
            if inner is not None:
                simple.setdefault("flag", []).append((self.draws, self.names, op.p, 0.0))
                names, applied = slice(self.names, self.names + 1), slice(self.applied, self.applied + 1)
                self._gates.append((names, applied))
                self.draws, self.names, self.applied = self.draws + 1, self.names + 1, self.applied + 1
                self._add(inner, channels, simple)
                continue
            drawn_as = op.drawn_as(channels)
            for at, one in enumerate(drawn_as or ()):
                place = (self.draws + at, self.names + at, one.low, one.high)
                simple.setdefault(one.kind, []).append(place)
            ends = (
                self.draws + op.draws_for(channels),
                self.names + len(op.names_for(channels)),
                self.applied + len(op.applied_names_for(channels)),
            )
            begins = (self.draws, self.names, self.applied)
            slices = (slice(*pair) for pair in zip(begins, ends, strict=True))
            self._parts.append(_Part(op, drawn_as is not None, *slices))
            self.draws, self.names, self.applied = ends

    def _same(self) -> list[tuple[slice, slice]]:
        """Columns of parameters that are applied as they are, in as few pieces as can be."""
        edges = [(part.names, part.applied) for part in self._parts if part.op.applies_parameters]
        edges += self._gates
        found: list[tuple[slice, slice]] = []
        for names, applied in sorted(edges, key=lambda pair: (pair[0].start, pair[0].stop)):
            if found and found[-1][0].stop == names.start and found[-1][1].stop == applied.start:
                before = found.pop()
                names = slice(before[0].start, names.stop)
                applied = slice(before[1].start, applied.stop)
            found.append((names, applied))
        return found

    def drawn(self, u: Float64Array, shape: Shape) -> Float64Array:
        """Parameters for uniform numbers, of samples of this shape: (N, names)."""
        found = np.empty((len(u), self.names))
        for one in self._simple:
            found[:, one.names] = drawn(one.kind, u[:, one.draws], one.low, one.high)
        for part in self._parts:
            if not part.is_simple:
                found[:, part.names] = part.op.table(u[:, part.draws], shape)
            shape = part.op.shape_after(shape)
        return found

    def computed(self, table: Float64Array, shape: Shape) -> Float64Array:
        """Compute what is applied for parameters of samples of this shape: (N, applied)."""
        found = np.empty((len(table), self.applied))
        for names, applied in self._copies:
            found[:, applied] = table[:, names]
        for part in self._parts:
            if not part.op.applies_parameters:
                found[:, part.applied] = part.op.applied(table[:, part.names], shape)
            shape = part.op.shape_after(shape)
        return found


def drawn_table(ops: Ops, u: Float64Array, shape: Shape) -> Float64Array:
    """Compute the parameters of a chain from uniform numbers.

    Args:
        ops: the chain.
        u: (N, the sum of ``draws_for``).
        shape: of a sample.
    """
    return Layout(ops, shape[0]).drawn(u, shape)


def applied_table(ops: Ops, table: Float64Array, shape: Shape) -> Float64Array:
    """Compute what is applied for the parameters of a chain."""
    return Layout(ops, shape[0]).computed(table, shape)


def shape_after(ops: Ops, shape: Shape) -> Shape:
    """The shape of a sample after a chain."""
    for op in ops:
        shape = op.shape_after(shape)
    return shape


def dtype_after(ops: Ops, dtype: torch.dtype) -> torch.dtype:
    """The dtype of samples after a chain."""
    for op in ops:
        dtype = op.dtype_after(dtype)
    return dtype
