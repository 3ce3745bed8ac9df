"""Runs chains of augmentations of motion: on the processor in one pass over the sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.base import FLOATS, Chain
from fastpipe.augment.motion.reference import motion_reference
from fastpipe.augment.motion.sequences import Sequences
from fastpipe.augment.parameters import Float64Array, Parameters
from fastpipe.augment.tables import Ops, untraced
from fastpipe.core.slots import SlotPool
from fastpipe.errors import AugmentError

__all__ = ["MotionChain", "on_motion"]

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class MotionChain(Chain):
    """Augmentations of motion, of which a batch may have the lengths."""

    one = "sequence"
    shapes = ("(N, T, J, C)",)
    dtypes = FLOATS

    def given(self, samples: Tensor, batch: Tensor, table: Tensor, others: Sequence[Any]) -> Any:
        self.check_gradient(batch)
        return untraced(self._given, batch, table, others)

    def _given(self, batch: Tensor, table: Tensor, others: Sequence[Any]) -> Any:
        rest, at = list(others), self.lengths_at
        if at is None:
            changed, _ = self.moved(batch, table, None)
            return (changed, *rest) if rest else changed
        if at > len(rest):
            raise AugmentError(
                f"lengths={at} says where a batch has the sequences' lengths, got {1 + len(rest)} parts"
            )
        changed, rest[at - 1] = self.moved(batch, table, checked_lengths(rest[at - 1], batch))
        return (changed, *rest)

    def moved(self, motion: Tensor, table: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Motion and its lengths changed by parameters, (N, columns)."""
        return on_motion(self.steps, motion, self.applied(table, motion.shape), lengths, self.memory)

    def by_kernels(self, samples: Tensor, table: Tensor) -> Tensor:
        return self.moved(samples, table, None)[0]

    def followed(self, table: Tensor, shape: Sequence[int], others: Sequence[Any]) -> Sequence[Any]:
        return others

    def referred(self, samples: Tensor, parameters: Sequence[Parameters]) -> Tensor:
        found: Tensor = motion_reference(self.ops, samples, parameters, None)
        return found

    def apply(self, samples: Any, parameters: Sequence[Parameters], lengths: Any = None) -> Any:
        if lengths is None:
            return super().apply(samples, parameters)
        batch, table = self.checked_with(samples, parameters)
        return self.moved(batch, table, checked_lengths(lengths, batch))

    def reference(self, samples: Any, parameters: Sequence[Parameters], lengths: Any = None) -> Any:
        if lengths is None:
            return super().reference(samples, parameters)
        batch, _ = self.checked_with(samples, parameters)
        given = lengths.cpu() if isinstance(lengths, Tensor) else lengths
        found = motion_reference(self.ops, batch.cpu(), parameters, given)
        return tuple(one.to(batch.device) for one in found)


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
