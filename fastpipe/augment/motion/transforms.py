"""What is done to motion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from fastpipe.augment.base import Augmentation
from fastpipe.augment.distributions import between
from fastpipe.augment.motion.running import MotionChain
from fastpipe.augment.motion.sequences import Int64Array, Sequences
from fastpipe.augment.options import increasing, probability
from fastpipe.augment.parameters import Float64Array
from fastpipe.errors import AugmentError

__all__ = ["MotionMirror", "MotionScale", "MotionSpeed", "MotionTransform", "MotionTranslation"]

_MOST_COORDINATES = 3  # where one number is given for all


class MotionTransform(Augmentation, ABC):
    """An augmentation of motion, (N, T, J, C): T frames of J joints with C coordinates, floats.

    ``Compose(ops, lengths=1)`` says that the batch has the sequences' lengths behind them; frames from a
    sequence's length on are left as they are.
    """

    kind = "motion"
    chain_type = MotionChain

    @abstractmethod
    def onto(self, sequences: Sequences, rows: Float64Array) -> None:
        """Say what is to be done to sequences.

        Args:
            sequences: with what comes before it.
            rows: what is applied, (N, len(applied_names)).
        """

    def neutral(self) -> Float64Array:
        """What is applied to sequences to leave them as they are: (len(applied_names),).  Default: zeros."""
        return np.zeros(len(self.names_applied))


class MotionSpeed(MotionTransform):
    """Play sequences faster or slower: linearly between frames.

    Args:
        speed: least and greatest; 2 takes half as many frames, up to T.  As likely to be faster than slower:
            its logarithm is uniform.

    Sequences that become longer than T frames end there.  Where lengths are given they become others, with
    zeros behind; else the last frame stays until the end.

    >>> import torch
    >>> MotionSpeed((2.0, 2.0))(torch.arange(5.0).view(1, 5, 1, 1)).flatten()
    tensor([0., 2., 4., 4., 4.])
    """

    draws = 1
    names = ("speed",)

    def __init__(self, speed: Sequence[float] = (0.8, 1.25)) -> None:
        self.speed = increasing(speed, "speed")

    def table(self, u: Float64Array, shape: tuple[int, ...]) -> Float64Array:
        found: Float64Array = np.exp(between(u, *np.log(self.speed)))
        return found

    def neutral(self) -> Float64Array:
        return np.ones(1)

    def onto(self, sequences: Sequences, rows: Float64Array) -> None:
        sequences.play(rows[:, 0])

    def extra_repr(self) -> str:
        return f"{self.speed}"


class MotionTranslation(MotionTransform):
    """Move sequences as a whole.

    Args:
        most: greatest shift along each coordinate, both ways; a number is for up to three coordinates.

    >>> import torch
    >>> MotionTranslation((0.0, 0.5))(torch.zeros(2, 4, 3, 2))[..., 0].abs().max()
    tensor(0.)
    """

    def __init__(self, most: float | Sequence[float] = 0.1) -> None:
        self.most = most if isinstance(most, (int, float)) else tuple(map(float, most))
        limits = (self.most,) * _MOST_COORDINATES if isinstance(self.most, (int, float)) else self.most
        if not limits or not all(0 <= one < np.inf for one in limits):
            raise AugmentError(f"most= is a number of at least 0, or one for each coordinate, got {most!r}")
        self._limits = tuple(map(float, limits))
        self.draws, self.names = len(limits), tuple(f"shift{at}" for at in range(len(limits)))

    def check(self, shape: Sequence[int]) -> None:
        coordinates, count = shape[3], len(self._limits)
        if coordinates > count or (not isinstance(self.most, (int, float)) and coordinates != count):
            raise AugmentError(
                f"most= has {count} numbers for motion of {coordinates} coordinates, shape {tuple(shape)}: "
                "give one for each"
            )

    def table(self, u: Float64Array, shape: tuple[int, ...]) -> Float64Array:
        found: Float64Array = (2 * u - 1) * np.array(self._limits)
        return found

    def onto(self, sequences: Sequences, rows: Float64Array) -> None:
        sequences.move(rows)

    def extra_repr(self) -> str:
        return f"{self.most}"


class MotionScale(MotionTransform):
    """Make sequences larger or smaller in space.

    Args:
        factor: least and greatest; its logarithm is uniform.
        about: the joint whose place in the first frame stays; None keeps the origin where it is.

    >>> import torch
    >>> MotionScale((2.0, 2.0), about=0)(torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)).flatten()
    tensor([1., 5.])
    """

    draws = 1
    names = ("factor",)

    def __init__(self, factor: Sequence[float] = (0.9, 1.1), about: int | None = None) -> None:
        self.factor, self.about = increasing(factor, "factor"), about
        if about is not None and (not isinstance(about, int) or about < 0):
            raise AugmentError(f"about= is the number of a joint, or None, got {about!r}")

    def check(self, shape: Sequence[int]) -> None:
        if self.about is not None and self.about >= shape[2]:
            raise AugmentError(f"about={self.about} is none of {shape[2]} joints, shape {tuple(shape)}")

    def table(self, u: Float64Array, shape: tuple[int, ...]) -> Float64Array:
        found: Float64Array = np.exp(between(u, *np.log(self.factor)))
        return found

    def neutral(self) -> Float64Array:
        return np.ones(1)

    def onto(self, sequences: Sequences, rows: Float64Array) -> None:
        sequences.scale(rows[:, 0], self.about)

    def extra_repr(self) -> str:
        return f"{self.factor}, about={self.about}"


class MotionMirror(MotionTransform):
    """Mirror some sequences: left becomes right.

    Args:
        pairs: joints that change places, such as ((left_hand, right_hand), …), or a mapping of one of each
            pair to the other; joints in none are in the middle.
        axis: the coordinate that points from left to right.
        p: the part of the sequences.
        about: where the mirror is on that coordinate.

    >>> import torch
    >>> MotionMirror([(0, 1)], p=1.0)(torch.tensor([[1.0, 5.0], [2.0, 6.0]])[None, None]).tolist()
    [[[[-2.0, 6.0], [-1.0, 5.0]]]]
    """

    draws = 1
    names = ("is_mirrored",)

    def __init__(
        self,
        pairs: Sequence[Sequence[int]] | Mapping[int, int] = (),
        axis: int = 0,
        p: float = 0.5,
        about: float = 0.0,
    ) -> None:
        given = list(pairs.items()) if isinstance(pairs, Mapping) else [tuple(pair) for pair in pairs]
        # A mapping may have both of a pair.
        self.pairs = tuple(sorted({(min(pair), max(pair)) for pair in given if len(pair) == 2}))
        joints = [joint for pair in self.pairs for joint in pair]
        is_whole = all(len(pair) == 2 and all(isinstance(one, int) for one in pair) for pair in given)
        if not is_whole or len(set(joints)) < len(joints) or min(joints, default=0) < 0:
            raise AugmentError(
                f"pairs= is numbers of joints, two by two, each joint in one pair, got {pairs!r}"
            )
        if not isinstance(axis, int) or axis < 0:
            raise AugmentError(f"axis= is the number of a coordinate, got {axis!r}")
        self.axis, self.p, self.about = axis, probability(p), float(about)

    def check(self, shape: Sequence[int]) -> None:
        most = max((pair[1] for pair in self.pairs), default=0)
        if most >= shape[2]:
            raise AugmentError(f"pairs= has joint {most}, and there are {shape[2]}, shape {tuple(shape)}")
        if self.axis >= shape[3]:
            raise AugmentError(f"axis={self.axis} is none of {shape[3]} coordinates, shape {tuple(shape)}")

    def table(self, u: Float64Array, shape: tuple[int, ...]) -> Float64Array:
        return (u < self.p).astype(np.float64)

    def order(self, joints: int) -> Int64Array:
        """The joint that each one becomes: int64 (J,)."""
        found = np.arange(joints)
        for one, other in self.pairs:
            found[one], found[other] = other, one
        return found

    def onto(self, sequences: Sequences, rows: Float64Array) -> None:
        sequences.mirror(rows[:, 0] > 0, self.order(sequences.joints), self.axis, self.about)

    def extra_repr(self) -> str:
        return f"{self.pairs}, axis={self.axis}, p={self.p}, about={self.about}"
