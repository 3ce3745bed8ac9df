"""Sequences on their way through a chain of augmentations: what is done to them is put together first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastpipe.augment.parameters import Float64Array
from fastpipe.augment.tables import uploaded
from fastpipe.core.native import native
from fastpipe.core.slots import SlotPool

__all__ = ["Int64Array", "Sequences"]

Int64Array = npt.NDArray[np.int64]
# Numbers of types in the native core; NumPy has no bfloat16, and sees both small ones as whole numbers.
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Sequences:
    """Sequences, and what is to be done to them: a speed, and of each frame ``scale * frame[order] + shift``.

    A speed changes no frame's map, and a map no speed, so both wait until they are needed.

    Args:
        values: (N, T, J, C), float32; on the processor also float16 or bfloat16, and with any strides.  It is
            only read.
        lengths: int64 (N,), in frames, perhaps on another device; None if all frames are motion, and have to
            be afterwards.
        memory: of the processor, where new sequences are.
        is_host: whether the processor's kernels work on them.
    """

    def __init__(self, values: Tensor, lengths: Tensor | None, memory: SlotPool, is_host: bool) -> None:
        self.values, self.lengths = values, lengths
        self._memory, self._is_host = memory, is_host
        self._begin()

    def _begin(self) -> None:
        count, _, joints, coordinates = self.values.shape
        self._speeds: Float64Array | None = None
        self._scales, self._shifts = np.ones((count, coordinates)), np.zeros((count, coordinates))
        # What shifts have of joints in the first frame: (N, C) factors, and which joint, (N,).
        self._of_first: list[tuple[Float64Array, Int64Array]] = []
        self._order = np.empty((count, joints), np.int64)
        self._order[:] = np.arange(joints)

    @property
    def joints(self) -> int:
        """How many each frame has."""
        return int(self.values.shape[2])

    # ---- what is to be done --------------------------------------------------------------------

    def play(self, speeds: Float64Array) -> None:
        """Play at other speeds, (N,)."""
        if self._speeds is not None:
            # What is between frames that are themselves between frames is not between the first ones.
            self.end()
            self._begin()
        self._speeds = np.ascontiguousarray(speeds)

    def move(self, shifts: Float64Array) -> None:
        """Add to coordinates: (N, C) at least."""
        self._shifts += shifts[:, : self._shifts.shape[1]]

    def scale(self, factors: Float64Array, about: int | None) -> None:
        """Multiply by factors, (N,), as seen from where a joint is in the first frame, or from 0."""
        by = factors[:, None]
        if about is None:
            self._shifts *= by
            self._of_first = [(part * by, joint) for part, joint in self._of_first]
        else:  # with a place p of the joint: by * (x - p) + p, and p = scale * first + shift
            self._of_first.append(((1 - by) * self._scales, self._order[:, about].copy()))
        self._scales = self._scales * by

    def mirror(self, which: npt.NDArray[np.bool_], order: Int64Array, axis: int, about: float) -> None:
        """Mirror some, (N,), at a place on an axis, and let joints become others, (J,)."""
        signs = np.where(which, -1.0, 1.0)
        for part in (self._scales, self._shifts, *(part for part, _ in self._of_first)):
            part[:, axis] *= signs
        self._shifts[which, axis] += 2 * about
        self._order[which] = self._order[which][:, order]

    # ---- doing it ------------------------------------------------------------------------------

    def end(self, dtype: torch.dtype = torch.float32) -> None:
        """Do what waits: afterwards ``values``, of this dtype, and ``lengths`` are the new ones."""
        speeds = np.ones(len(self.values)) if self._speeds is None else self._speeds
        self.values, after = (self._on_host if self._is_host else self._on_device)(speeds, dtype)
        self.lengths = None if self.lengths is None else after.to(self.lengths.device)

    def _on_host(self, speeds: Float64Array, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        values, shifts = self.values, self._shifts
        for part, joint in self._of_first:
            first = values[torch.arange(len(values)), 0, torch.from_numpy(joint)]
            shifts = shifts + part * first.double().numpy()
        source = values if values.dtype == torch.float32 else values.view(torch.int16)
        out = self._memory.take(tuple(values.shape), np.float32 if dtype == torch.float32 else np.int16)
        after = np.empty(len(values), np.int64)
        lengths = None if self.lengths is None else self.lengths.cpu().contiguous().numpy()
        native.change_motion(
            source.numpy(), _TYPES[values.dtype], out, _TYPES[dtype], speeds, self._scales, shifts,
            self._order, lengths, after, torch.get_num_threads(),
        )  # fmt: skip
        found = torch.from_numpy(out)
        return found if found.dtype == dtype else found.view(dtype), torch.from_numpy(after)

    def _on_device(self, speeds: Float64Array, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        values, device = self.values, self.values.device
        count, frames = values.shape[:2]
        before = torch.full((count,), frames) if self.lengths is None else self.lengths
        after = _played(before, speeds, frames)
        rows = torch.arange(count, device=device).view(-1, 1)
        scales, shifts = (uploaded(one.astype(np.float32), device) for one in (self._scales, self._shifts))
        for part, joint in self._of_first:
            first = values[:, 0].take_along_dim(uploaded(joint, device).view(-1, 1, 1), dim=1)[:, 0]
            shifts = shifts + uploaded(part.astype(np.float32), device) * first
        lengths, new_lengths = (one.to(device, non_blocking=True).view(-1, 1) for one in (before, after))
        speed, time = uploaded(speeds, device).view(-1, 1), torch.arange(frames, device=device)
        is_beyond = time >= new_lengths
        place = torch.minimum(time, new_lengths - 1) * speed
        at = torch.minimum(place.long(), lengths - 1)
        weight = (place - at).float()
        # Of what has no part in a frame NaN is none of its.
        next_at = torch.where(weight > 0, torch.minimum(at + 1, lengths - 1), at)
        weight = weight[:, :, None, None]
        found = values[rows, at] * (1 - weight) + values[rows, next_at] * weight
        order = uploaded(self._order, device).view(count, 1, -1, 1)
        found = found.take_along_dim(order, dim=2) * scales[:, None, None] + shifts[:, None, None]
        if self.lengths is None:
            return found.to(dtype), after
        # Beyond a sequence's end is what was there, or nothing where that is another now.
        rest = torch.where((speed == 1)[:, :, None, None], values, values.new_zeros(()))
        return torch.where(is_beyond[:, :, None, None], rest, found).to(dtype), after


def _played(lengths: Tensor, speeds: Float64Array, frames: int) -> Tensor:
    """The lengths of sequences that are played at other speeds, where lengths are; at most all frames.

    On a device nobody has looked at them: what cannot be a length is the nearest that can.
    """
    lengths = lengths.clamp(1, frames)
    speed = uploaded(speeds, lengths.device)
    return torch.where(speed == 1, lengths, (((lengths - 1) / speed).long() + 1).clamp(max=frames))
