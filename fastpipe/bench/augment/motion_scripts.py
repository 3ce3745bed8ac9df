"""Augmentations of one sequence of motion, (T, J, C), as scripts write them with NumPy.

Arguments are those of ``fastpipe.augment``.  Sequences come with their length, which may become another.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from fastpipe.core.extras import require

__all__ = ["MotionMirror", "MotionScale", "MotionSpeed", "MotionTranslation"]

Values = Any  # NumPy arrays, and tensors at the ends


class _Script(ABC):
    """Takes and gives tensors; arrays within."""

    def __call__(self, motion: Any, length: Any) -> Any:
        torch = require("torch", extra="torch")
        values, now = self.changed(motion.numpy(), int(length))
        return torch.from_numpy(values), torch.tensor(now)

    @abstractmethod
    def changed(self, motion: Values, length: int) -> tuple[Values, int]:
        """What is done."""


class _OfFrames(_Script):
    def changed(self, motion: Values, length: int) -> tuple[Values, int]:
        found = motion.copy()
        found[:length] = self.frames(motion[:length])
        return found, length

    @abstractmethod
    def frames(self, motion: Values) -> Values:
        """What is done to the frames before the end."""


def _between(low: float, high: float) -> float:
    return math.exp(random.uniform(math.log(low), math.log(high)))


class MotionSpeed(_Script):
    """Frames between frames."""

    def __init__(self, speed: tuple[float, float]) -> None:
        self._speed = speed

    def changed(self, motion: Values, length: int) -> tuple[Values, int]:
        speed = _between(*self._speed)
        now = min(len(motion), int((length - 1) / speed) + 1)
        places = np.arange(now) * speed
        first = places.astype(np.int64)
        part = (places - first).astype(np.float32)[:, None, None]
        found = np.zeros_like(motion)
        found[:now] = motion[first] * (1 - part) + motion[np.minimum(first + 1, length - 1)] * part
        return found, now


class MotionTranslation(_OfFrames):
    """Another place."""

    def __init__(self, most: float) -> None:
        self._most = most

    def frames(self, motion: Values) -> Values:
        shift = [random.uniform(-self._most, self._most) for _ in range(motion.shape[2])]
        return motion + np.array(shift, np.float32)


class MotionScale(_OfFrames):
    """Another size."""

    def __init__(self, factor: tuple[float, float]) -> None:
        self._factor = factor

    def frames(self, motion: Values) -> Values:
        return motion * np.float32(_between(*self._factor))


class MotionMirror(_OfFrames):
    """Left becomes right in half of them."""

    def __init__(self, pairs: Any) -> None:
        self._pairs = pairs

    def frames(self, motion: Values) -> Values:
        if random.random() >= 0.5:
            return motion
        order = list(range(motion.shape[1]))
        for one, other in self._pairs:
            order[one], order[other] = other, one
        found = motion[:, order]
        found[..., 0] *= -1
        return found
