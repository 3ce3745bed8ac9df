"""Augmentations that move the voxels of volumes, and move labels in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastpipe.augment.base import Shape, Table
from fastpipe.augment.matrices import covering, rotations
from fastpipe.augment.parameters import Float32Array, Float64Array, limits_of, plain, probability
from fastpipe.augment.steps import Step
from fastpipe.augment.volumes.base import AXES, VolumeTransform, axes_of
from fastpipe.augment.volumes.volume import SEEDS, Fill3D, Volume, cropped, normal_noise, warped
from fastpipe.errors import AugmentError

# Scaled volumes fill the result up to this factor, as in nnU-Net. At greater factors, patches would have to
# be several times as large.
_MOST_COVERED = 1 / 0.85
_STILL = np.array([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])  # the parameters of a volume that is not moved
_IDENTITY = np.concatenate([np.eye(3), np.full((3, 1), -0.0)], axis=1).ravel()
MATRIX = tuple(f"{row}{column}" for row in "zyx" for column in ("z", "y", "x", "1"))


class _Geometry(VolumeTransform):
    """The base class of augmentations that only move voxels, so that labels move in the same way."""

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def for_masks(self) -> VolumeTransform:
        return self


class RandomFlip3D(_Geometry):
    """Mirror some volumes along each axis.

    Args:
        axes: one or several of the axes 0, 1 and 2, which are depth, height and width.
        p: the probability that a volume is mirrored along an axis. Each axis is drawn separately.

    >>> RandomFlip3D(2, p=1.0)(torch.arange(3.0).view(1, 1, 1, 1, 3)).flatten()
    tensor([2., 1., 0.])
    """

    def __init__(self, axes: int | Sequence[int] = (0, 1, 2), p: float = 0.5) -> None:
        self.axes, self.p = axes_of(axes), probability(p)
        self.draws, self.names = len(self.axes), tuple(f"flips_{AXES[axis]}" for axis in self.axes)

    def table(self, u: Float64Array, shape: Shape) -> Table:
        return u < self.p

    def on_canvas(self, canvas: Volume, row: Float64Array) -> None:
        axes = [axis for axis, is_flipped in zip(self.axes, row, strict=True) if is_flipped]
        for channel in canvas.values if axes else ():
            channel[...] = channel.flip(axes)

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return [Step("flip", column, self.axes)]


class RandomRotate90(_Geometry):
    """Rotate volumes by 90, 180 or 270 degrees, which are equally likely.

    Args:
        axes: the plane of rotation, given by two of the axes 0, 1 and 2 (depth, height and width). Volumes
            must have the same size along both axes.
        p: the probability that a volume is rotated, from 0 to 1.

    The direction is that of ``numpy.rot90``, from the first axis to the second.

    >>> RandomRotate90(p=1.0)(torch.ones(2, 1, 4, 8, 8)).shape
    torch.Size([2, 1, 4, 8, 8])
    """

    draws = 2
    names = ("turns",)

    def __init__(self, axes: Sequence[int] = (1, 2), p: float = 0.5) -> None:
        self.axes, self.p = axes_of(axes), probability(p)
        if len(self.axes) != 2:
            raise AugmentError(f"axes must be a plane, two of 0, 1 and 2, got {axes!r}")

    def check(self, shape: Sequence[int]) -> None:
        first, second = (shape[axis + 2] for axis in self.axes)
        if first != second:
            raise AugmentError(
                f"RandomRotate90 turns {AXES[self.axes[0]]} and {AXES[self.axes[1]]}, which are "
                f"{first} and {second} here, and have to be the same; axes= says which they are"
            )

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        return (u[:, :1] < self.p) * (1.0 + np.minimum(np.floor(3 * u[:, 1:]), 2.0))

    def on_canvas(self, canvas: Volume, row: Float64Array) -> None:
        for channel in canvas.values if row[0] else ():
            channel[...] = torch.rot90(channel, int(row[0]), self.axes)

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return [Step("rotate90", column, self.axes)]


class RandomAffine3D(VolumeTransform):
    """Rotate, scale and shift volumes about their centres, in one resampling. Labels take the nearest voxel.

    Args:
        degrees: angles about the axes of depth, height and width are drawn from [-degrees, degrees], or
            between two numbers. Three numbers or three pairs give one range per axis.
        scale: the least and the greatest factor by which coordinates of the result are multiplied to get
            coordinates of the volume. With a factor above 1, the result shows more of the volume, at a
            smaller size, as in nnU-Net and MONAI.
        translate: the greatest shifts along depth, height and width, as fractions of the size, or one number
            for all axes.
        p_rotation, p_scale: the probabilities that a volume is rotated, and that it is scaled. A volume may
            be both rotated and scaled, independently.
        scale_axes: the axes along which a volume is scaled, all by the same factor.
        spacing: the distances between voxels along depth, height and width, in any unit. With the spacing,
            rotated objects keep their shape.
        size: (D, H, W) of the result, which is the central part of the volumes and at most as large as the
            volumes.  Default: the volumes' size.
        fill, label_fill: the value outside volumes, and the value outside labels. ``fill="edge"`` takes the
            nearest voxel for volumes and labels.

    Values between voxels are interpolated linearly.

    >>> RandomAffine3D(30, (0.7, 1.4))(torch.rand(2, 1, 8, 16, 16)).shape
    torch.Size([2, 1, 8, 16, 16])
    """

    draws = 9
    names: tuple[str, ...] = (
        "angle_depth", "angle_height", "angle_width", "scale", "shift_depth", "shift_height", "shift_width",
    )  # fmt: skip
    applied_names: tuple[str, ...] = ("is_changed", *MATRIX)
    points: tuple[int, ...] = ()  # the numbers of control points, for ``RandomElastic3D``
    sigma: tuple[float, ...] = (0.0, 0.0, 0.0)

    def __init__(
        self,
        degrees: Any = 0.0,
        scale: Sequence[float] | None = None,
        translate: float | Sequence[float] = 0.0,
        *,
        p_rotation: float = 1.0,
        p_scale: float = 1.0,
        scale_axes: int | Sequence[int] = (0, 1, 2),
        spacing: Sequence[float] = (1.0, 1.0, 1.0),
        size: Sequence[int] | None = None,
        fill: Fill3D = 0.0,
        label_fill: float = 0.0,
    ) -> None:
        self.degrees = _angles(degrees)
        self.scale = (1.0, 1.0) if scale is None else limits_of(scale, "scale", 1e-3)
        self.translate = _three(translate, "translate", 0.0)
        self.p_rotation, self.p_scale = probability(p_rotation, "p_rotation"), probability(p_scale, "p_scale")
        self.scale_axes, self.spacing = axes_of(scale_axes, "scale_axes"), _three(spacing, "spacing", 1e-9)
        self.size = None if size is None else _size(size)
        self.fill: Fill3D = "edge" if fill == "edge" else _number(fill, "fill")
        self.label_fill = _number(label_fill, "label_fill")

    def check(self, shape: Sequence[int]) -> None:
        size = tuple(shape[2:])
        if self.size is not None and any(map(int.__gt__, self.size, size)):
            raise AugmentError(f"size={self.size} is larger than the volumes, which are {size}")

    def shape_after(self, shape: Shape) -> tuple[int, ...]:
        return shape if self.size is None else (shape[0], *self.size)

    def size_before(self, size: Shape) -> tuple[int, ...]:
        if self.size is None:
            raise AugmentError(
                f"{self} cuts nothing off: give size=, as large as patches are to be, for a margin"
            )
        if size != self.size:
            raise AugmentError(f"{self} makes volumes of {self.size}, asked for {size}")
        largest = covering(np.array(size) * self.spacing, self.degrees) / self.spacing
        scales = np.ones(3)
        scales[list(self.scale_axes)] = max(1.0, min(self.scale[1], _MOST_COVERED)) if self.p_scale else 1.0
        largest = (largest + 2 * np.array(self.translate) * size) * scales
        return tuple(int(np.ceil(one - 1e-6)) for one in largest)

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        size = self.shape_after(shape)[1:]
        moves = [part * length for part, length in zip(self.translate, size, strict=True)]
        low = np.array([*(one for one, _ in self.degrees), self.scale[0], *(-one for one in moves)])
        high = np.array([*(one for _, one in self.degrees), self.scale[1], *moves])
        found: Float64Array = low + u[:, :7] * (high - low)
        found[:, :3] *= u[:, 7:8] < self.p_rotation
        found[u[:, 8] >= self.p_scale, 3] = 1.0
        return found

    def applied(self, table: Float64Array, shape: Shape) -> Float64Array:
        found = np.zeros((len(table), 13))
        found[:, 1:] = _IDENTITY
        is_moved = (table[:, :7] != _STILL).any(axis=1)
        if is_moved.any():
            rows = table if is_moved.all() else table[is_moved]
            scales = np.ones((len(rows), 3))
            scales[:, list(self.scale_axes)] = rows[:, 3:4]
            spacing = np.asarray(self.spacing)
            linear = rotations(rows[:, :3]) * scales[:, None] * (spacing / spacing[:, None])
            matrices = np.concatenate([linear, -(linear @ rows[:, 4:7, None])], axis=2)
            flat = matrices.reshape(-1, 12)
            found[is_moved, 0] = (flat != _IDENTITY).any(axis=1)
            found[is_moved, 1:] = flat
        return found

    def for_masks(self) -> VolumeTransform:
        return _LabelAffine(self)

    def on_canvas(self, canvas: Volume, row: Float64Array, is_labels: bool = False) -> None:
        size = canvas.shape[1:] if self.size is None else self.size
        if not row[0]:
            cropped(canvas, size)
            return
        bends = self.moves_of_points(int(row[14])) if self.points and row[13] else None
        warped(canvas, size, np.ascontiguousarray(row[1:13]), bends, self._fill(is_labels), is_labels)

    def _fill(self, is_labels: bool) -> float | None:
        """Return the value outside volumes; None for the nearest voxel."""
        return None if self.fill == "edge" else self.label_fill if is_labels else self.fill

    def steps(self, column: int, shape: Shape, is_labels: bool = False) -> list[Step]:
        options = (*self.shape_after(shape)[1:], int(self.fill == "edge"), *(self.points or (0, 0, 0)))
        kind = "warp_nearest" if is_labels else "warp"
        return [Step(kind, column, options, (self._fill(is_labels) or 0.0, *self.sigma))]

    def moves_of_points(self, bend: int) -> Float32Array:
        """Return random shifts of control points, (3, Z, Y, X), in voxels. ``bend`` is their seed."""
        count = 3 * int(np.prod(self.points))
        even, odd = normal_noise(0, count, bend, torch.device("cpu"))
        normal = torch.stack([even, odd], dim=1).flatten()[:count].numpy().reshape(3, *self.points)
        found: Float32Array = normal * np.array(self.sigma, np.float32)[:, None, None, None]
        return found


class RandomElastic3D(RandomAffine3D):
    """Bend volumes, and rotate, scale and shift them in the same resampling.

    Control points are spread evenly over a volume, from its first to its last voxels. The control points are
    moved at random.  The shifts of the voxels between control points are interpolated.

    Args:
        points: the numbers of control points along depth, height and width, at least 2, or one number for all
            axes.
        sigma: the standard deviations of the control points' shifts along depth, height and width, in voxels,
            or one number for all axes.
        p: the probability that a volume is bent, from 0 to 1.
        degrees … label_fill: see ``RandomAffine3D``.

    >>> RandomElastic3D((3, 4, 4), 2.0)(torch.rand(2, 1, 8, 16, 16)).shape
    torch.Size([2, 1, 8, 16, 16])
    """

    draws = RandomAffine3D.draws + 2
    names = (*RandomAffine3D.names, "is_bent", "bend")
    applied_names = (*RandomAffine3D.applied_names, "is_bent", "bend")

    def __init__(
        self,
        points: int | Sequence[int] = 7,
        sigma: float | Sequence[float] = 2.0,
        p: float = 1.0,
        degrees: Any = 0.0,
        scale: Sequence[float] | None = None,
        translate: float | Sequence[float] = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(degrees, scale, translate, **options)
        points = plain(points)
        given = (points,) * 3 if isinstance(points, int) else tuple(points)
        if len(given) != 3 or not all(isinstance(one, int) and one >= 2 for one in given):
            raise AugmentError(
                f"points must be three numbers of at least 2, for depth, height and width, got {points!r}"
            )
        self.points, self.sigma, self.p = given, _three(sigma, "sigma", 0.0), probability(p)

    def size_before(self, size: Shape) -> tuple[int, ...]:
        # Add two standard deviations on each side if volumes may be bent.
        largest = super().size_before(size)
        more = self.sigma if self.p else (0.0,) * 3
        return tuple(one + 2 * int(np.ceil(2 * by)) for one, by in zip(largest, more, strict=True))

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        first = super().table(u[:, :-2], shape)
        return np.concatenate([first, u[:, -2:-1] < self.p, np.floor(u[:, -1:] * SEEDS)], axis=1)

    def applied(self, table: Float64Array, shape: Shape) -> Float64Array:
        found = super().applied(table[:, :-2], shape)
        found[:, 0] = np.maximum(found[:, 0], table[:, -2])
        return np.concatenate([found, table[:, -2:]], axis=1)


class _LabelAffine(_Geometry):
    """An augmentation that moves labels as ``op`` moves volumes."""

    def __init__(self, op: RandomAffine3D) -> None:
        self._op, self.names = op, op.applied_names_for(1)

    def shape_after(self, shape: Shape) -> tuple[int, ...]:
        return self._op.shape_after(shape)

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        fill = self._op.label_fill
        limits = (0, 1) if dtype == torch.bool else (-np.inf, np.inf)
        if dtype.is_complex:
            raise AugmentError(f"labels must be integers or floats, got {dtype}")
        if not dtype.is_floating_point and dtype != torch.bool:
            limits = (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        is_whole = dtype.is_floating_point or fill == np.floor(fill)
        if self._op.fill != "edge" and not (limits[0] <= fill <= limits[1] and is_whole):
            raise AugmentError(f"label_fill={fill:g} is no label of {dtype}")
        return dtype

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return self._op.steps(column, shape, is_labels=True)

    def on_canvas(self, canvas: Volume, row: Float64Array) -> None:
        self._op.on_canvas(canvas, row, is_labels=True)


def _angles(degrees: Any) -> tuple[tuple[float, float], ...]:
    degrees = plain(degrees)
    given = degrees if isinstance(degrees, Sequence) and len(degrees) == 3 else [degrees] * 3
    return tuple(limits_of(one, "degrees", about=0.0) for one in given)


def _three(value: float | Sequence[float], name: str, least: float) -> tuple[float, ...]:
    value = plain(value)
    try:
        given = tuple(map(float, value if isinstance(value, Sequence) else (value,) * 3))
    except (TypeError, ValueError):
        given = ()
    if len(given) != 3 or not all(least <= one < np.inf for one in given):
        raise AugmentError(f"{name} must be three numbers, for depth, height and width, got {value!r}")
    return given


def _number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise AugmentError(f"{name} must be a number, or fill='edge', got {value!r}") from None


def _size(size: Sequence[int]) -> tuple[int, ...]:
    given = tuple(plain(size))
    if len(given) != 3 or not all(isinstance(one, int) and one > 0 for one in given):
        raise AugmentError(f"size must be (depth, height, width) in voxels, got {size!r}")
    return given
