"""Runs chains of augmentations of volumes, one volume after the other: nothing is needed of a whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.parameters import Float64Array
from fastpipe.augment.running import applied_table, dtype_after, run_all, shape_after
from fastpipe.augment.volumes.volume import Run, Volume
from fastpipe.engine.slots import SlotPool
from fastpipe.errors import AugmentError

if TYPE_CHECKING:
    from fastpipe.augment.volumes.base import VolumeTransform

__all__ = ["followed_volumes", "on_volumes"]

Ops = Sequence["VolumeTransform"]
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_SMALL = 1 << 15  # voxels; smaller volumes are not shared by threads, which have one each


def on_volumes(
    ops: Ops,
    volumes: Tensor,
    applied: Float64Array,
    memory: SlotPool,
    channels: int | None = None,
    is_host: bool | None = None,
) -> Tensor:
    """Changed volumes, wherever they are.

    At a time there are the volumes, those that are made of them, and less than two volumes more.

    Args:
        ops: the chain.
        volumes: (N, C, D, H, W).
        applied: what is applied.
        memory: of the processor, where the new volumes are.
        channels: of the volumes that numbers were drawn for, where these are labels of them.
        is_host: whether the processor's kernels do it, or torch's operations.  Default: where they can.
    """
    shape = (len(volumes), *shape_after(ops, tuple(volumes.shape[1:])))
    dtype, device = dtype_after(ops, volumes.dtype), volumes.device.type
    is_host = device == "cpu" if is_host is None else is_host
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
        if device == "cpu":
            flat = memory.take((math.prod(shape) * dtype.itemsize,), np.uint8)
            out = torch.from_numpy(flat).view(dtype).view(shape)
        else:
            out = torch.empty(shape, dtype=dtype, device=volumes.device)
        volumes, goal = volumes.detach(), out
        if not is_host and dtype in _SIGNED and dtype == volumes.dtype:
            # Devices move bits of these as those of numbers with a sign: few operations know them.
            volumes, goal = volumes.view(_SIGNED[dtype]), out.view(_SIGNED[dtype])
        change = _changer(ops, volumes, applied, goal, channels or volumes.shape[1], is_host)
        if is_host and out[0].numel() <= _SMALL:
            run_all(lambda number: change(number, _here), len(volumes))
        else:
            for number in range(len(volumes)):
                change(number, run_all if is_host else _here)
    return out


def _changer(
    ops: Ops, volumes: Tensor, applied: Float64Array, out: Tensor, channels: int, is_host: bool
) -> Callable[[int, Run], None]:
    """What changes one of the volumes."""
    steps, begin = [], 0
    for op in ops:
        end = begin + len(op.applied_names_for(channels))
        steps.append((op, np.ascontiguousarray(applied[:, begin:end])))
        begin = end
    # Half precision is of what is given and taken: ops would lose digits with each.
    is_half = out.dtype in (torch.float16, torch.bfloat16)

    def change(number: int, run: Run) -> None:
        target = out[number]
        goal = target.new_empty(target.shape, dtype=torch.float32) if is_half else target
        volume = Volume(volumes[number], goal, run, channels, is_host)
        for op, rows in steps:
            op.on_canvas(volume, rows[number])
        volume.end()
        if goal is not target:
            volume.copy(goal, target)

    return change


def _here(task: Callable[[int], None], count: int) -> None:
    for number in range(count):
        task(number)


# ---- labels --------------------------------------------------------------------------------------


@torch.compiler.disable  # type: ignore[untyped-decorator]
def followed_volumes(ops: Ops, table: Tensor, shape: Sequence[int], others: Sequence[object]) -> list[object]:
    """What belongs to volumes, after a chain.

    Args:
        ops: the chain.
        table: its parameters.
        shape: of the volumes before, (N, C, D, H, W).
        others: tensors of as many voxels, (N, D, H, W) or (N, K, D, H, W), go where those of the volumes go,
            from the nearest, also in dictionaries, lists and tuples; anything else is handed through.

    Raises:
        AugmentError: volumes of another size are among them, or labels that cannot be filled up.
    """
    applied = applied_table(ops, table.numpy(), tuple(shape[1:]))
    twins: list[VolumeTransform] = []
    parts, begin = [applied[:, :0]], 0
    for op in ops:
        end = begin + len(op.applied_names_for(shape[1]))
        if (twin := op.for_masks()) is not None:
            twins.append(twin)
            parts.append(applied[:, begin:end])
        begin = end
    rows = np.concatenate(parts, axis=1)

    def followed(thing: object) -> object:
        if isinstance(thing, dict):
            return {name: followed(value) for name, value in thing.items()}
        if isinstance(thing, (list, tuple)):
            made: list[Any] = [followed(value) for value in thing]
            return type(thing)(*made) if hasattr(thing, "_fields") else type(thing)(made)
        if not isinstance(thing, Tensor) or not twins or not _is_of(thing, shape):
            return thing
        labels = thing.as_subclass(Tensor)
        labels = labels.unsqueeze(1) if thing.ndim == 4 else labels
        found = on_volumes(twins, labels, rows, SlotPool(0), shape[1])
        return found.squeeze(1) if thing.ndim == 4 else found

    return [followed(thing) for thing in others]


def _is_of(thing: Tensor, shape: Sequence[int]) -> bool:
    """Whether a tensor is of the volumes' voxels."""
    if thing.ndim not in (4, 5) or len(thing) != shape[0]:
        return False
    is_whole = tuple(thing.shape[-3:]) == tuple(shape[-3:])
    if thing.ndim == 5 and not is_whole:  # of four axes it may be something else
        raise AugmentError(
            f"volumes of {tuple(shape[-3:])} come with others of {tuple(thing.shape[-3:])}, which cannot be "
            "moved as they are: make labels of other sizes after the augmentation"
        )
    return is_whole
