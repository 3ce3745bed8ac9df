"""Augmentations of motion, (N, T, J, C): N sequences of T frames of J joints with C coordinates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastpipe.augment.base import (
    FLOATS,
    Augmentation,
    Chain,
    Ops,
    Shape,
    Table,
    columns_of,
    untraced,
    uploaded,
)
from fastpipe.augment.distributions import between
from fastpipe.augment.parameters import Float64Array, Parameters, increasing, probability
from fastpipe.augment.reference import Changes, Row, changed_sample
from fastpipe.augment.steps import aligned
from fastpipe.core.native import native
from fastpipe.core.slots import SlotPool
from fastpipe.errors import AugmentError

Int64Array = npt.NDArray[np.int64]
# The native core's numbers of dtypes. In NumPy, 16-bit floats are stored as int16.
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Sequences:
    """Sequences, and the changes that are still to be made: a speed, and ``scale * frame[order] + shift`` for
    each frame.

    Speeds and changes of frames do not depend on each other, so ``end`` applies all of them at once.

    Args:
        values: (N, T, J, C), float32. On the CPU the values may also be float16 or bfloat16, and have any
            strides.  The values are not written to.
        lengths: int64 (N,), in frames, possibly on another device. None means that all frames are motion,
            before and after the changes.
        memory: host memory for the new sequences.
        is_host: whether the CPU kernels are used.
    """

    def __init__(self, values: Tensor, lengths: Tensor | None, memory: SlotPool, is_host: bool) -> None:
        self.values, self.lengths = values, lengths
        self._memory, self._is_host = memory, is_host
        self.begin()

    def begin(self) -> None:
        """Reset the pending changes."""
        count, _, self.joints, coordinates = self.values.shape
        self.speeds: Float64Array | None = None
        self.scales, self.shifts = np.ones((count, coordinates)), np.zeros((count, coordinates))
        # Shifts that depend on the first frame: factors (N, C), and the index of the joint, (N,).
        self.of_first: list[tuple[Float64Array, Int64Array]] = []
        self.order = np.tile(np.arange(self.joints), (count, 1))

    def end(self, dtype: torch.dtype = torch.float32) -> None:
        """Make the pending changes: replace ``values`` by values of the dtype ``dtype``, and replace
        ``lengths``."""
        speeds = np.ones(len(self.values)) if self.speeds is None else self.speeds
        self.values, after = (self._on_host if self._is_host else self._on_device)(speeds, dtype)
        self.lengths = None if self.lengths is None else after.to(self.lengths.device)

    def _on_host(self, speeds: Float64Array, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        values, shifts = self.values, self.shifts
        for part, joint in self.of_first:
            first = values[torch.arange(len(values)), 0, torch.from_numpy(joint)]
            shifts = shifts + part * first.double().numpy()
        source = values if values.dtype == torch.float32 else values.view(torch.int16)
        out = self._memory.take(tuple(values.shape), np.float32 if dtype == torch.float32 else np.int16)
        after = np.empty(len(values), np.int64)
        lengths = None if self.lengths is None else self.lengths.cpu().contiguous().numpy()
        native.change_motion(
            aligned(source.numpy()), _TYPES[values.dtype], out, _TYPES[dtype], speeds, self.scales, shifts,
            self.order, lengths, after, torch.get_num_threads(),
        )  # fmt: skip
        found = torch.from_numpy(out)
        return found if found.dtype == dtype else found.view(dtype), torch.from_numpy(after)

    def _on_device(self, speeds: Float64Array, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        values, device = self.values, self.values.device
        count, frames = values.shape[:2]
        before = torch.full((count,), frames) if self.lengths is None else self.lengths
        here = uploaded(speeds, before.device)
        after = before.clamp(1, frames)  # lengths on a device have not been checked
        after = torch.where(here == 1, after, (((after - 1) / here).long() + 1).clamp(max=frames))
        rows = torch.arange(count, device=device).view(-1, 1)
        scales, shifts = (uploaded(one.astype(np.float32), device) for one in (self.scales, self.shifts))
        for part, joint in self.of_first:
            first = values[:, 0].take_along_dim(uploaded(joint, device).view(-1, 1, 1), dim=1)[:, 0]
            shifts = shifts + uploaded(part.astype(np.float32), device) * first
        lengths, new_lengths = (one.to(device, non_blocking=True).view(-1, 1) for one in (before, after))
        speed, time = uploaded(speeds, device).view(-1, 1), torch.arange(frames, device=device)
        is_beyond = time >= new_lengths
        place = torch.minimum(time, new_lengths - 1) * speed
        at = torch.minimum(place.long(), lengths - 1)
        weight = (place - at).float()
        # A frame of weight 0 must not contribute NaN values.
        next_at = torch.where(weight > 0, torch.minimum(at + 1, lengths - 1), at)
        weight = weight[:, :, None, None]
        found = values[rows, at] * (1 - weight) + values[rows, next_at] * weight
        order = uploaded(self.order, device).view(count, 1, -1, 1)
        found = found.take_along_dim(order, dim=2) * scales[:, None, None] + shifts[:, None, None]
        if self.lengths is None:
            return found.to(dtype), after
        # Frames beyond the end keep their values. They become zeros if a speed moved the end.
        rest = torch.where((speed == 1)[:, :, None, None], values, values.new_zeros(()))
        return torch.where(is_beyond[:, :, None, None], rest, found).to(dtype), after


# ---- the reference: motion is changed with NumPy, in a loop ----------------------------------------

Values = Any  # a NumPy array, float64 (T, J, C)


def motion_reference(
    ops: Sequence[Any], motion: Tensor, parameters: Sequence[Parameters], lengths: Tensor | None
) -> Any:
    """Change sequences in a loop. If lengths are given, return a tuple of the sequences and their new
    lengths."""
    found, after = [], []
    for at, sequence in enumerate(motion.double().numpy()):
        state = sequence, len(sequence) if lengths is None else int(lengths[at]), lengths is not None
        for op, one in zip(ops, parameters, strict=True):
            row = {name: float(column[at]) for name, column in one.items()}
            state = changed_sample(op, state, row, _CHANGES)
        found.append(state[0])
        after.append(state[1])
    made = torch.from_numpy(np.stack(found)).to(motion.dtype)
    return made if lengths is None else (made, torch.tensor(after, dtype=lengths.dtype))


# A sequence, the number of its frames that are motion, and whether this length was given.
_State = tuple[Values, int, bool]


def _replayed(op: Any, state: _State, p: Row) -> _State:
    (sequence, length, has_lengths), speed = state, p["speed"]
    if speed == 1:
        return state
    frames = len(sequence)
    new_length = min(frames, int(np.floor((length - 1) / speed)) + 1)
    places, flat = np.arange(new_length) * speed, sequence[:length].reshape(length, -1)
    lines = [np.interp(places, np.arange(length), line) for line in flat.T]
    found = np.zeros_like(sequence)
    found[:new_length] = np.stack(lines, axis=1).reshape(new_length, *sequence.shape[1:])
    if not has_lengths:
        found[new_length:] = found[new_length - 1]
    return found, new_length if has_lengths else frames, has_lengths


def _by_frames(change: Callable[[Any, Values, Row], Values]) -> Callable[[Any, Any, Row], Any]:
    def changed(op: Any, state: _State, p: Row) -> _State:
        sequence, length, has_lengths = state
        return np.concatenate([change(op, sequence[:length], p), sequence[length:]]), length, has_lengths

    return changed


def _translated(op: Any, frames: Values, p: Row) -> Values:
    return frames + np.array(list(p.values()))[: frames.shape[2]]


def _scaled(op: Any, frames: Values, p: Row) -> Values:
    centre = 0.0 if op.about is None else frames[0, op.about]
    return (frames - centre) * p["factor"] + centre


def _mirrored(op: Any, frames: Values, p: Row) -> Values:
    if not p["is_mirrored"]:
        return frames
    found = frames.copy()
    for one, other in op.pairs:
        found[:, [one, other]] = frames[:, [other, one]]
    found[..., op.axis] = 2 * op.about - found[..., op.axis]
    return found


_CHANGES: Changes = {
    "MotionMirror": _by_frames(_mirrored), "MotionScale": _by_frames(_scaled), "MotionSpeed": _replayed,
    "MotionTranslation": _by_frames(_translated),
}  # fmt: skip


# ---- chains ----------------------------------------------------------------------------------------

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class MotionChain(Chain):
    """A chain of augmentations of motion. A batch may contain the lengths of the sequences."""

    one = "sequence"
    shapes = ("(N, T, J, C)",)
    dtypes = FLOATS

    def given(self, samples: Tensor, batch: Tensor, table: Tensor, others: Sequence[Any]) -> Any:
        self.check_gradient(batch)
        rest, at = list(others), self.lengths_at
        if at is None:
            changed, _ = self.moved(batch, table, None)
            return (changed, *rest) if rest else changed
        if at > len(rest):
            raise AugmentError(
                f"lengths={at} must be the index of the part of a batch that holds the lengths of the "
                f"sequences, got {1 + len(rest)} parts"
            )
        changed, rest[at - 1] = self.moved(batch, table, _checked_lengths(rest[at - 1], batch))
        return (changed, *rest)

    def moved(self, motion: Tensor, table: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Change motion and its lengths with a table of parameters, (N, columns)."""

        def moved() -> tuple[Tensor, Tensor | None]:
            return on_motion(self.steps, motion, self.applied(table, motion.shape), lengths, self.memory)

        return untraced(moved)

    def by_kernels(self, samples: Tensor, table: Tensor) -> Tensor:
        return self.moved(samples, table, None)[0]

    def apply(self, samples: Any, parameters: Sequence[Parameters], lengths: Any = None) -> Any:
        if lengths is None:
            return super().apply(samples, parameters)
        batch, table = self.checked_with(samples, parameters)
        return self.moved(batch, table, _checked_lengths(lengths, batch))

    def reference(self, samples: Any, parameters: Sequence[Parameters], lengths: Any = None) -> Any:
        batch, _ = self.checked_with(samples, parameters)
        given = lengths.cpu() if isinstance(lengths, Tensor) else lengths
        found = motion_reference(self.ops, batch.cpu(), parameters, given)
        return found.to(batch.device) if lengths is None else tuple(one.to(batch.device) for one in found)


def _checked_lengths(lengths: Any, motion: Tensor) -> Tensor:
    """Return the lengths that came with sequences, or raise an error."""
    if not isinstance(lengths, Tensor) or lengths.shape != motion.shape[:1] or lengths.dtype not in _WHOLE:
        is_tensor = isinstance(lengths, Tensor)
        seen = f"{lengths.dtype} {tuple(lengths.shape)}" if is_tensor else type(lengths).__name__
        raise AugmentError(
            f"lengths= says where the batch has the lengths of its {len(motion)} sequences, whole numbers "
            f"({len(motion)},), got {seen} there"
        )
    if lengths.device.type != "cpu":
        return lengths  # a check would wait for the device
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
    """Return changed sequences and their lengths. The native core makes the changes if ``is_host``, and
    otherwise torch makes them."""
    is_host = motion.device.type == "cpu" if is_host is None else is_host
    with torch.inference_mode(False), torch.no_grad():
        values = motion.detach() if is_host else motion.detach().float()
        sequences = Sequences(values, None if lengths is None else lengths.long(), memory, is_host)
        for op, own in columns_of(ops, sequences.joints, of_applied=True):
            op.onto(sequences, applied[:, own])
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


# ---- transforms ------------------------------------------------------------------------------------

_MOST_COORDINATES = 3  # the number of coordinates if one number is given for all coordinates


class MotionTransform(Augmentation, ABC):
    """The base class of augmentations of motion, (N, T, J, C), floats: T frames of J joints with C
    coordinates.

    ``Compose(ops, lengths=1)`` declares that the part of a batch after the sequences holds their lengths.
    Frames beyond a sequence's length are left unchanged.
    """

    kind = "motion"
    chain_type = MotionChain

    @abstractmethod
    def onto(self, sequences: Sequences, rows: Float64Array) -> None:
        """Add this augmentation to the pending changes of ``sequences``. ``rows``, (N, len(applied_names)),
        are the numbers to apply."""

    def neutral(self) -> Float64Array:
        """Return the numbers to apply, (len(applied_names),), that change nothing.  Default: zeros."""
        return np.zeros(len(self.applied_names_for(1)))


class _Factors(MotionTransform):
    """The base class of augmentations that draw a factor for each sequence, uniform in the factor's
    logarithm."""

    limits: tuple[float, float]

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        found: Float64Array = np.exp(between(u, *np.log(self.limits)))
        return found

    def neutral(self) -> Float64Array:
        return np.ones(1)


class MotionSpeed(_Factors):
    """Play sequences faster or slower, with linear interpolation between frames.

    Args:
        speed: the least and the greatest speed. At speed 2, a sequence takes half as many frames.  The
            logarithm of the speed is uniform.  So with the limits 0.5 and 2, a higher and a lower speed are
            equally likely.

    Sequences that would become longer than T frames are cut to T frames.  If lengths are given, the lengths
    are updated, and zeros follow the new end of a sequence.  Otherwise the last frame is repeated until frame
    T.

    >>> import torch
    >>> MotionSpeed((2.0, 2.0))(torch.arange(5.0).view(1, 5, 1, 1)).flatten()
    tensor([0., 2., 4., 4., 4.])
    """

    names = ("speed",)

    def __init__(self, speed: Sequence[float] = (0.8, 1.25)) -> None:
        self.speed = self.limits = increasing(speed, "speed")

    def onto(self, sequences: Sequences, rows: Float64Array) -> None:
        if sequences.speeds is not None:
            # Two interpolations differ from one interpolation, so apply the first speed before the second.
            sequences.end()
            sequences.begin()
        sequences.speeds = np.ascontiguousarray(rows[:, 0])


class MotionTranslation(MotionTransform):
    """Move each sequence as a whole.

    Args:
        most: the greatest shift along each coordinate, in both directions. One number applies to up to three
            coordinates.

    >>> import torch
    >>> MotionTranslation((0.0, 0.5))(torch.zeros(2, 4, 3, 2))[..., 0].abs().max()
    tensor(0.)
    """

    def __init__(self, most: float | Sequence[float] = 0.1) -> None:
        self.most = most if isinstance(most, (int, float)) else tuple(map(float, most))
        limits = (self.most,) * _MOST_COORDINATES if isinstance(self.most, (int, float)) else self.most
        if not limits or not all(0 <= one < np.inf for one in limits):
            raise AugmentError(
                f"most must be a number of at least 0, or one for each coordinate, got {most!r}"
            )
        self._limits = tuple(map(float, limits))
        self.draws, self.names = len(limits), tuple(f"shift{at}" for at in range(len(limits)))

    def check(self, shape: Sequence[int]) -> None:
        coordinates, count = shape[3], len(self._limits)
        if coordinates > count or (not isinstance(self.most, (int, float)) and coordinates != count):
            raise AugmentError(
                f"most= has {count} numbers for motion of {coordinates} coordinates, shape {tuple(shape)}: "
                "give one for each"
            )

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        return np.asarray((2 * u - 1) * np.array(self._limits))

    def onto(self, sequences: Sequences, rows: Float64Array) -> None:
        sequences.shifts += rows[:, : sequences.shifts.shape[1]]


class MotionScale(_Factors):
    """Make sequences larger or smaller in space.

    Args:
        factor: the least and the greatest factor. The logarithm of the factor is uniform.
        about: the index of the joint whose position in the first frame is kept. None keeps the origin.

    >>> import torch
    >>> MotionScale((2.0, 2.0), about=0)(torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)).flatten()
    tensor([1., 5.])
    """

    names = ("factor",)

    def __init__(self, factor: Sequence[float] = (0.9, 1.1), about: int | None = None) -> None:
        self.factor = self.limits = increasing(factor, "factor")
        self.about = about
        if about is not None and (not isinstance(about, int) or about < 0):
            raise AugmentError(f"about must be the index of a joint, or None, got {about!r}")

    def check(self, shape: Sequence[int]) -> None:
        if self.about is not None and self.about >= shape[2]:
            raise AugmentError(f"about={self.about} is none of {shape[2]} joints, shape {tuple(shape)}")

    def onto(self, sequences: Sequences, rows: Float64Array) -> None:
        if self.about is None:
            sequences.shifts *= rows
            sequences.of_first = [(part * rows, joint) for part, joint in sequences.of_first]
        else:  # joint at p: by * (x - p) + p, where p = scale * first + shift
            joint = sequences.order[:, self.about].copy()
            sequences.of_first.append(((1 - rows) * sequences.scales, joint))
        sequences.scales = sequences.scales * rows


class MotionMirror(MotionTransform):
    """Mirror some sequences: left becomes right.

    Args:
        pairs: pairs of indices of joints that swap positions, such as ((left_hand, right_hand), …). A mapping
            from one joint of each pair to the other joint is accepted as well.  Joints in no pair keep their
            index.
        axis: the coordinate that points from left to right.
        p: the probability that a sequence is mirrored, from 0 to 1.
        about: the position of the mirror on the coordinate ``axis``.

    >>> import torch
    >>> MotionMirror([(0, 1)], p=1.0)(torch.tensor([[1.0, 5.0], [2.0, 6.0]])[None, None]).tolist()
    [[[[-2.0, 6.0], [-1.0, 5.0]]]]
    """

    names = ("is_mirrored",)

    def __init__(
        self,
        pairs: Sequence[Sequence[int]] | Mapping[int, int] = (),
        axis: int = 0,
        p: float = 0.5,
        about: float = 0.0,
    ) -> None:
        given = list(pairs.items()) if isinstance(pairs, Mapping) else [tuple(pair) for pair in pairs]
        # A mapping may contain a pair in both directions.
        self.pairs = tuple(sorted({(min(pair), max(pair)) for pair in given if len(pair) == 2}))
        joints = [joint for pair in self.pairs for joint in pair]
        is_whole = all(len(pair) == 2 and all(isinstance(one, int) for one in pair) for pair in given)
        if not is_whole or len(set(joints)) < len(joints) or min(joints, default=0) < 0:
            raise AugmentError(
                f"pairs must be pairs of joint indices, each joint in one pair only, got {pairs!r}"
            )
        if not isinstance(axis, int) or axis < 0:
            raise AugmentError(f"axis must be the index of a coordinate, got {axis!r}")
        self.axis, self.p, self.about = axis, probability(p), float(about)

    def check(self, shape: Sequence[int]) -> None:
        most = max((pair[1] for pair in self.pairs), default=0)
        if most >= shape[2]:
            raise AugmentError(f"pairs= has joint {most}, and there are {shape[2]}, shape {tuple(shape)}")
        if self.axis >= shape[3]:
            raise AugmentError(f"axis={self.axis} is none of {shape[3]} coordinates, shape {tuple(shape)}")

    def table(self, u: Float64Array, shape: Shape) -> Table:
        return u < self.p

    def onto(self, sequences: Sequences, rows: Float64Array) -> None:
        which, becomes = rows[:, 0] > 0, np.arange(sequences.joints)
        for one, other in self.pairs:
            becomes[one], becomes[other] = other, one
        signs = np.where(which, -1.0, 1.0)
        for part in (sequences.scales, sequences.shifts, *(part for part, _ in sequences.of_first)):
            part[:, self.axis] *= signs
        sequences.shifts[which, self.axis] += 2 * self.about
        sequences.order[which] = sequences.order[which][:, becomes]
