"""Runs chains of augmentations of motion: on the processor in one pass over the sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.motion import kernels
from fastpipe.augment.motion.maps import FrameMaps
from fastpipe.augment.parameters import Float64Array
from fastpipe.augment.running import run_all
from fastpipe.engine.slots import SlotPool
from fastpipe.errors import AugmentError

if TYPE_CHECKING:
    from fastpipe.augment.base import BatchTransform

__all__ = ["checked_lengths", "on_motion"]

Step = tuple[Any, Float64Array]
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_PART = 1 << 19  # bytes of sequences that a thread works on at a time


def checked_lengths(lengths: Any, motion: Tensor) -> Tensor:
    """The lengths of sequences, as they came with them.

    Raises:
        AugmentError: they are none.
    """
    if not isinstance(lengths, Tensor) or lengths.shape != motion.shape[:1] or lengths.dtype not in _WHOLE:
        seen = (
            f"{lengths.dtype} {tuple(lengths.shape)}"
            if isinstance(lengths, Tensor)
            else type(lengths).__name__
        )
        raise AugmentError(
            f"lengths= says where the batch has the lengths of its {len(motion)} sequences, whole numbers "
            f"({len(motion)},), got {seen} there"
        )
    if lengths.device.type != "cpu":
        return lengths  # to look at them would be to wait for the device
    numbers = lengths.numpy()
    if numbers.min() < 1 or numbers.max() > motion.shape[1]:
        bad = int(np.flatnonzero((numbers < 1) | (numbers > motion.shape[1]))[0])
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
    with torch.inference_mode(False), torch.no_grad():
        motion = motion.detach()
        if is_host:
            given = None if lengths is None else lengths.cpu()
            found, now = _on_host(ops, motion, applied, given, memory)
        else:
            found, now = _on_device(ops, motion, applied, lengths)
            if lengths is not None and lengths.device.type == "cpu":  # nobody waits for those of the device
                now = _lengths_after(ops, applied, lengths, motion.shape[1])
    return found, None if lengths is None else now.to(lengths.device, lengths.dtype)


def _on_host(
    ops: Sequence[BatchTransform], motion: Tensor, applied: Float64Array, lengths: Tensor | None,
    memory: SlotPool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    now = np.full(len(motion), motion.shape[1], np.int64)
    now = now if lengths is None else lengths.numpy().astype(np.int64)
    values = motion.float().contiguous()
    for steps in _played_once(ops, applied):
        maps = FrameMaps(values[:, 0].numpy())
        for op, rows in steps:
            op.onto(maps, rows)
        values = _changed(maps, values, now, lengths is None, memory)
    if motion.dtype != torch.float32:
        return values.to(motion.dtype), torch.from_numpy(now)
    return values if values is not motion else motion.clone(), torch.from_numpy(now)


def _changed(maps: FrameMaps, values: Tensor, lengths: Any, holds: bool, memory: SlotPool) -> Tensor:
    """New sequences; lengths become theirs."""
    count = len(values)
    source, out = values.numpy(), memory.take((values.numel() * 4,), np.uint8).view(np.float32)
    out = out.reshape(source.shape)
    speeds = np.ones(count) if maps.speeds is None else np.ascontiguousarray(maps.speeds)
    order = np.ascontiguousarray(maps.order)
    # Few parts, as each costs a thread some time, and more than threads, as some take longer.
    size = max(-(-count // (2 * torch.get_num_threads())), _PART // max(1, source[0].nbytes), 1)

    def task(number: int) -> None:
        part = number * size, min((number + 1) * size, count)
        kernels.change(source, out, speeds, maps.scales, maps.shifts, order, lengths, holds, *part)

    run_all(task, -(-count // size), joins=True)
    return torch.from_numpy(out)


def _lengths_after(
    ops: Sequence[BatchTransform], applied: Float64Array, lengths: Tensor, frames: int
) -> Tensor:
    """What the lengths of sequences are afterwards, on the host."""
    now = lengths.numpy().astype(np.int64)
    for op, rows in _flat(ops, applied):
        if "speed" in op.names:
            played = np.minimum(((now - 1) / rows[:, 0]).astype(np.int64) + 1, frames)
            now = np.where(rows[:, 0] == 1, now, played)
    return torch.from_numpy(now)


def _played_once(ops: Sequence[BatchTransform], applied: Float64Array) -> Iterator[list[Step]]:
    """Operations in parts, of which each plays sequences at other speeds at most once: what is between frames
    that are themselves between frames is not between the first ones."""
    part: list[Step] = []
    plays = False
    for op, rows in _flat(ops, applied):
        if "speed" in op.names and plays:
            yield part
            part = []
        plays = plays or "speed" in op.names
        part.append((op, rows))
    yield part


def _flat(ops: Sequence[Any], applied: Float64Array) -> Iterator[Step]:
    """Each operation with what is applied; of a ``RandomApply`` what changes nothing, where it does not."""
    begin = 0
    for op in ops:
        end = begin + len(op.names_applied)
        rows = applied[:, begin:end]
        begin = end
        if not hasattr(op, "neutral"):
            which = rows[:, :1] > 0
            for inner, own in _flat(op.ops, rows[:, 1:]):
                yield inner, np.where(which, own, inner.neutral())
        else:
            yield op, rows


def _on_device(
    ops: Sequence[BatchTransform], motion: Tensor, applied: Float64Array, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    table = torch.from_numpy(applied)
    table = table.pin_memory() if motion.is_cuda else table
    table, begin = table.to(motion.device, non_blocking=True), 0
    values = motion.float()
    now = torch.full((len(motion),), motion.shape[1], dtype=torch.int64, device=motion.device)
    if lengths is not None:  # of which nobody has looked at those that are there
        now = lengths.to(motion.device, torch.int64, non_blocking=True).clamp(1, motion.shape[1])
    for op in ops:
        names = op.names_applied
        columns = {name: table[:, begin + at] for at, name in enumerate(names)}
        values, now = op.on_frames(values, columns, now, lengths is not None)
        begin += len(names)
    return values.to(motion.dtype), now
