"""Tables of a chain's numbers: what is drawn for its samples, and what is computed from that on the host.

A chain's parameters are one table, (N, columns), in which those of each operation come one after the other;
so are the numbers that are applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastpipe.augment.parameters import Float64Array

__all__ = ["Ops", "Shape", "applied_table", "drawn_table", "dtype_after", "shape_after", "uploaded"]

Ops = Sequence[Any]  # augmentations, of which the methods of ``Augmentation`` are called
Shape = tuple[int, ...]  # of a sample


def uploaded(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device; nobody waits for pinned memory's way there."""
    found = torch.from_numpy(np.require(array, requirements="W"))  # torch warns of what is read-only
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def drawn_table(ops: Ops, u: Float64Array, shape: Shape) -> Float64Array:
    """The parameters of a chain: of each operation, by uniform numbers that no other has.

    Args:
        ops: the chain.
        u: (N, the sum of ``draws_for``).
        shape: of a sample.
    """
    tables, begin = [np.zeros((len(u), 0))], 0
    for op in ops:
        end = begin + op.draws_for(shape[0])
        tables.append(op.table(u[:, begin:end], shape))
        begin, shape = end, op.shape_after(shape)
    return np.concatenate(tables, axis=1)


def applied_table(ops: Ops, table: Float64Array, shape: Shape) -> Float64Array:
    """What is applied for the parameters of a chain."""
    tables, begin = [np.zeros((len(table), 0))], 0
    for op in ops:
        end = begin + len(op.names_for(shape[0]))
        tables.append(op.applied(table[:, begin:end], shape))
        begin, shape = end, op.shape_after(shape)
    return np.concatenate(tables, axis=1)


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
