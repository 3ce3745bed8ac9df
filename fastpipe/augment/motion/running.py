"""Runs chains of augmentations of motion, some sequences at a time, which are in cache together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.parameters import Float64Array
from fastpipe.augment.running import run_all
from fastpipe.engine.slots import SlotPool
from fastpipe.errors import AugmentError

if TYPE_CHECKING:
    from fastpipe.augment.base import BatchTransform

__all__ = ["checked_lengths", "on_motion"]

_PART = 1 << 19  # bytes of sequences that are worked on together


def checked_lengths(lengths: Any, motion: Tensor) -> Tensor:
    """The lengths of sequences, as they came with them.

    Raises:
        AugmentError: they are none.
    """
    if not isinstance(lengths, Tensor) or lengths.shape != motion.shape[:1] or lengths.is_floating_point():
        seen = (
            f"{lengths.dtype} {tuple(lengths.shape)}"
            if isinstance(lengths, Tensor)
            else type(lengths).__name__
        )
        raise AugmentError(
            f"lengths= says where the batch has the lengths of its {len(motion)} sequences, whole numbers "
            f"({len(motion)},), got {seen} there"
        )
    if lengths.device.type == "cpu" and not ((lengths >= 1) & (lengths <= motion.shape[1])).all():
        bad = int(torch.nonzero((lengths < 1) | (lengths > motion.shape[1]))[0])
        raise AugmentError(
            f"sequence {bad} of the batch has length {int(lengths[bad])}: lengths are from 1 to the "
            f"number of frames, {motion.shape[1]}"
        )
    return lengths


def on_motion(
    ops: Sequence[BatchTransform], motion: Tensor, applied: Float64Array, lengths: Tensor | None,
    memory: SlotPool, is_host: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Changed sequences and their lengths, wherever they are.

    Args:
        ops: the chain.
        motion: (N, T, J, C).
        applied: what is applied.
        lengths: whole numbers (N,), or None.
        memory: of the processor, where the new sequences are.
        is_host: whether the processor's kernels do it.  Default: where they can.
    """
    is_host = motion.device.type == "cpu" if is_host is None else is_host
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(motion.device.type, enabled=False):
        motion = motion.detach()
        if is_host:
            found, now = _on_host(ops, motion, applied, lengths, memory)
        else:
            found, now = _on_device(ops, motion, applied, lengths)
    return found, None if lengths is None else now.to(lengths.dtype)


def _on_host(
    ops: Sequence[BatchTransform], motion: Tensor, applied: Float64Array, lengths: Tensor | None,
    memory: SlotPool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    count, frames = motion.shape[:2]
    flat = memory.take((math.prod(motion.shape) * motion.element_size(),), np.uint8)
    out = torch.from_numpy(flat).view(motion.dtype).view(motion.shape)
    now = np.full(count, frames, np.int64) if lengths is None else lengths.numpy().astype(np.int64)
    size = max(1, _PART // max(1, math.prod(motion.shape[1:]) * 4))

    def task(number: int) -> None:
        part = slice(number * size, min((number + 1) * size, count))
        values = out[part] if out.dtype == torch.float32 else torch.empty(out[part].shape)
        values.copy_(motion[part])
        begin, own = 0, now[part]
        for op in ops:
            end = begin + len(op.names_applied)
            op.on_motion(
                values.numpy(), np.ascontiguousarray(applied[part, begin:end]), own, lengths is not None
            )
            begin = end
        if out.dtype != torch.float32:
            out[part].copy_(values)

    run_all(task, -(-count // size))
    return out, torch.from_numpy(now)


def _on_device(
    ops: Sequence[BatchTransform], motion: Tensor, applied: Float64Array, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    table = torch.from_numpy(applied)
    table = table.pin_memory() if motion.is_cuda else table
    table, begin = table.to(motion.device, non_blocking=True), 0
    values = motion.float()
    now = torch.full((len(motion),), motion.shape[1], dtype=torch.int64, device=motion.device)
    now = now if lengths is None else lengths.to(motion.device, torch.int64)
    for op in ops:
        names = op.names_applied
        columns = {name: table[:, begin + at] for at, name in enumerate(names)}
        values, now = op.on_frames(values, columns, now, lengths is not None)
        begin += len(names)
    return values.to(motion.dtype), now
