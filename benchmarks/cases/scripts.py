"""Augmentations of one sample, as scripts write them with torch, NumPy and SciPy."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from fastpipe.bench.augment import SpecAugment as SpecAugment
from fastpipe.core.extras import require

# ---- Spectrograms, (F, T) --------------------------------------------------------------------------


class RandomGain:
    """Another loudness."""

    def __init__(self, gain_db: float) -> None:
        self._gain_db = gain_db

    def __call__(self, spectrogram: Any) -> Any:
        return spectrogram * 10 ** (random.uniform(-self._gain_db, self._gain_db) / 20)


class TimeShift:
    """Frames move, those at the end to the begin."""

    def __init__(self, most: int) -> None:
        self._most = most

    def __call__(self, spectrogram: Any) -> Any:
        return spectrogram.roll(random.randint(-self._most, self._most), -1)


# ---- Volumes, (C, D, H, W); what moves voxels moves labels, (D, H, W), too -------------------------

Values = Any  # NumPy arrays, and tensors at the ends


def _ndimage() -> Any:
    return require("scipy.ndimage", extra="dev")


class _Script(ABC):
    """Takes and gives tensors; arrays within."""

    def __call__(self, volume: Any, *labels: Any) -> Any:
        torch = require("torch", extra="torch")
        found = self.arrays(volume.numpy(), *(one.numpy() for one in labels))
        made = tuple(torch.from_numpy(np.ascontiguousarray(one)) for one in found)
        return made if labels else made[0]

    @abstractmethod
    def arrays(self, volume: Values, *labels: Values) -> tuple[Values, ...]:
        """Return the changed sample."""


class _OfValues(_Script):
    """Leaves voxels, and so labels, where they are."""

    def arrays(self, volume: Values, *labels: Values) -> tuple[Values, ...]:
        return (self.values(volume), *labels)

    @abstractmethod
    def values(self, volume: Values) -> Values:
        """Transform values."""


class RandomApply(_Script):
    """Some of the volumes."""

    def __init__(self, op: Any, p: float) -> None:
        self._op, self._p = op, p

    def arrays(self, volume: Values, *labels: Values) -> tuple[Values, ...]:
        found: tuple[Values, ...] = (
            self._op.arrays(volume, *labels) if random.random() < self._p else (volume, *labels)
        )
        return found


class RandomAffine3D(_Script):
    """Rotate and scale, by ``affine_transform``."""

    def __init__(
        self, degrees: float = 0.0, scale: Any = (1.0, 1.0), p_rotation: float = 1.0, p_scale: float = 1.0
    ) -> None:
        self._degrees, self._scale = degrees, scale
        self._p_rotation, self._p_scale = p_rotation, p_scale

    def matrix(self) -> Values | None:
        """Of the result's places to the volume's, or None where nothing is drawn."""
        is_rotated, is_scaled = random.random() < self._p_rotation, random.random() < self._p_scale
        if not is_rotated and not is_scaled:
            return None
        matrix = np.eye(3)
        for axis in range(3):
            angle = np.deg2rad(random.uniform(-self._degrees, self._degrees)) if is_rotated else 0.0
            turn, (first, second) = np.eye(3), ((axis + 1) % 3, (axis + 2) % 3)
            turn[[first, second], [first, second]] = np.cos(angle)
            turn[second, first], turn[first, second] = np.sin(angle), -np.sin(angle)
            matrix = turn @ matrix
        return matrix * (random.uniform(*self._scale) if is_scaled else 1.0)

    def arrays(self, volume: Values, *labels: Values) -> tuple[Values, ...]:
        matrix = self.matrix()
        if matrix is None:
            return (volume, *labels)
        middle = (np.array(volume.shape[1:]) - 1) / 2
        offset, warp = middle - matrix @ middle, _ndimage().affine_transform
        found = np.stack([warp(one, matrix, offset, order=1) for one in volume])
        return (found, *(warp(one, matrix, offset, order=0) for one in labels))


class RandomElastic3D(_Script):
    """Bend, by ``map_coordinates``."""

    def __init__(self, points: Any, sigma: float) -> None:
        self._points, self._sigma = points, sigma

    def arrays(self, volume: Values, *labels: Values) -> tuple[Values, ...]:
        size = volume.shape[1:]
        factors = [side / points for side, points in zip(size, self._points, strict=True)]
        bends = self._sigma * np.random.randn(3, *self._points).astype(np.float32)
        places = np.indices(size, np.float32)
        places += np.stack([_ndimage().zoom(bend, factors, order=1) for bend in bends])
        move = _ndimage().map_coordinates
        found = np.stack([move(one, places, np.float32, order=1) for one in volume])
        return (found, *(move(one, places, order=0) for one in labels))


class RandomFlip3D(_Script):
    """Mirror along each axis half of them."""

    def arrays(self, volume: Values, *labels: Values) -> tuple[Values, ...]:
        axes = tuple(axis for axis in (-3, -2, -1) if random.random() < 0.5)
        return tuple(np.flip(one, axes).copy() for one in (volume, *labels))


class RandomRotate90(_Script):
    """Turn half of them in the plane of height and width."""

    def arrays(self, volume: Values, *labels: Values) -> tuple[Values, ...]:
        turns = random.randint(1, 3) if random.random() < 0.5 else 0
        return tuple(np.rot90(one, turns, (-2, -1)).copy() for one in (volume, *labels))


class GaussianNoise3D(_OfValues):
    """Add noise."""

    def __init__(self, std: Any) -> None:
        self._std = std

    def values(self, volume: Values) -> Values:
        noise = np.random.default_rng(random.getrandbits(32)).standard_normal(volume.shape, np.float32)
        return volume + np.float32(random.uniform(*self._std)) * noise


class _PerChannel(_OfValues):
    def __init__(self, limits: Any, p_channel: float = 1.0) -> None:
        self._limits, self._p_channel = limits, p_channel

    def values(self, volume: Values) -> Values:
        return np.stack([self.channel(one) if random.random() < self._p_channel else one for one in volume])

    @abstractmethod
    def channel(self, values: Values) -> Values:
        """Transform a channel."""

    def factor(self) -> np.float32:
        """A factor, of which half are below 1."""
        low, high = self._limits
        is_below = random.random() < 0.5
        return np.float32(random.uniform(low, 1.0) if is_below else random.uniform(1.0, high))


class GaussianBlur3D(_PerChannel):
    """Blur, by ``gaussian_filter``."""

    def channel(self, values: Values) -> Values:
        sigmas = [random.uniform(*self._limits) for _ in range(3)]
        return _ndimage().gaussian_filter(values, sigmas, mode="mirror", truncate=3)


class LowResolution3D(_PerChannel):
    """Fewer voxels, and as many again, by ``zoom``."""

    def channel(self, values: Values) -> Values:
        scale = random.uniform(*self._limits)
        fewer = [max(1, round(side * scale)) / side for side in values.shape]
        small = _ndimage().zoom(values, fewer, order=0, mode="nearest", grid_mode=True)
        back = [side / few for side, few in zip(values.shape, small.shape, strict=True)]
        return _ndimage().zoom(small, back, order=1, mode="nearest", grid_mode=True)


class Brightness3D(_PerChannel):
    """Multiply."""

    def channel(self, values: Values) -> Values:
        return values * self.factor()


class Contrast3D(_PerChannel):
    """Away from the mean, or nearer to it."""

    def channel(self, values: Values) -> Values:
        mean = values.mean()
        return ((values - mean) * self.factor() + mean).clip(values.min(), values.max())


class Gamma3D(_PerChannel):
    """To a power, with mean and standard deviation as they were."""

    def __init__(self, limits: Any, inverted: bool = False) -> None:
        super().__init__(limits)
        self._inverted = inverted

    def channel(self, values: Values) -> Values:
        values = -values if self._inverted else values
        low, extent = values.min(), np.ptp(values)
        found = ((values - low) / extent) ** self.factor() * extent + low
        found = (found - found.mean()) * (values.std() / max(found.std(), 1e-7)) + values.mean()
        return -found if self._inverted else found


# ---- Motion, (T, J, C); sequences come with their length, which may become another -----------------


class _MotionScript(ABC):
    """Takes and gives tensors; arrays within."""

    def __call__(self, motion: Any, length: Any) -> Any:
        torch = require("torch", extra="torch")
        values, now = self.changed(motion.numpy(), int(length))
        return torch.from_numpy(values), torch.tensor(now)

    @abstractmethod
    def changed(self, motion: Values, length: int) -> tuple[Values, int]:
        """Return the changed sample."""


class _OfFrames(_MotionScript):
    def changed(self, motion: Values, length: int) -> tuple[Values, int]:
        found = motion.copy()
        found[:length] = self.frames(motion[:length])
        return found, length

    @abstractmethod
    def frames(self, motion: Values) -> Values:
        """Transform the frames before the end."""


def _between(low: float, high: float) -> float:
    return math.exp(random.uniform(math.log(low), math.log(high)))


class MotionSpeed(_MotionScript):
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
