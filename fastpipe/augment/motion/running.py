"""Runs chains of augmentations of motion: on the processor in one pass over the sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.motion.sequences import Sequences
from fastpipe.augment.parameters import Float64Array
from fastpipe.augment.tables import Ops
from fastpipe.engine.slots import SlotPool
from fastpipe.errors import AugmentError

__all__ = ["checked_lengths", "on_motion"]

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


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
    ops: Ops, motion: Tensor, applied: Float64Array, lengths: Tensor | None,
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
        values = motion.detach() if is_host else motion.detach().float()
        sequences, begin = Sequences(values, None if lengths is None else lengths.long(), memory, is_host), 0
        for op in ops:
            end = begin + len(op.names_applied)
            op.onto(sequences, applied[:, begin:end])
            begin = end
        sequences.end(motion.dtype)
    found, now = sequences.values, sequences.lengths
    if now is None or lengths is None:
        return found, now
    most = torch.iinfo(lengths.dtype).max
    if most < motion.shape[1] and len(now) and int(now.max()) > most:
        raise AugmentError(
            f"sequence {int(now.argmax())} of the batch is {int(now.max())} frames long afterwards, which "
            f"lengths of {lengths.dtype} cannot hold: give them as lengths.long()"
        )
    return found, now.to(lengths.dtype)
