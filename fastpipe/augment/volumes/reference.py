"""The reference for volumes: the same augmentations, computed slowly with NumPy and SciPy for comparison."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.reference import Changes, Row
from fastpipe.augment.volumes.volume import SEEDS, normal_noise
from fastpipe.core.extras import require

Values = Any  # a NumPy array, float64


def _affine(op: Any, volume: Values, p: Row) -> Values:
    """Resample with homogeneous matrices, which convert voxels to millimetres about the centre, and back."""
    size = np.array(volume.shape[1:] if op.size is None else op.size)
    matrix = np.eye(4)
    for axis, name in enumerate(("depth", "height", "width")):
        angle = np.deg2rad(p[f"angle_{name}"])
        turn = np.eye(4)
        first, second = (axis + 1) % 3, (axis + 2) % 3
        turn[[first, second], [first, second]] = np.cos(angle)
        turn[second, first], turn[first, second] = np.sin(angle), -np.sin(angle)
        matrix = turn @ matrix
    scales = [p["scale"] if axis in op.scale_axes else 1.0 for axis in range(3)]
    spacing, shift, centre, middle = np.diag([*op.spacing, 1.0]), np.eye(4), np.eye(4), np.eye(4)
    shift[:3, 3] = [-p["shift_depth"], -p["shift_height"], -p["shift_width"]]
    centre[:3, 3], middle[:3, 3] = -(size - 1) / 2, (np.array(volume.shape[1:]) - 1) / 2
    whole = middle @ np.linalg.inv(spacing) @ matrix @ np.diag([*scales, 1.0]) @ spacing @ shift @ centre
    bends = _bends(op, size, p)
    is_still = np.allclose(matrix[:3, :3], np.eye(3)) and set(scales) == {1.0} and not shift[:3, 3].any()
    if is_still and bends is None:
        begin = (np.array(volume.shape[1:]) - size) // 2
        return volume[(slice(None), *(slice(at, at + one) for at, one in zip(begin, size, strict=True)))]
    places = np.stack(np.meshgrid(*map(np.arange, size), indexing="ij")).reshape(3, -1).astype(np.float64)
    places += 0.0 if bends is None else bends
    places = (whole[:3, :3] @ places + whole[:3, 3:]).reshape(3, *size)
    if op.fill == "edge":
        options: dict[str, Any] = {"mode": "nearest"}
    else:  # a rim makes SciPy interpolate between the outermost voxels and the fill
        volume, places = np.stack([np.pad(one, 1, constant_values=op.fill) for one in volume]), places + 1
        options = {"mode": "constant", "cval": op.fill}
    ndimage = require("scipy.ndimage", extra="dev")
    return np.stack([ndimage.map_coordinates(one, places, order=1, **options) for one in volume])


def _bends(op: Any, size: Values, p: Row) -> Values | None:
    """Return each voxel's shift, (3, D · H · W), interpolated linearly between control points."""
    if not p.get("is_bent"):
        return None
    points = op.moves_of_points(int(p["bend"])).astype(np.float64)
    for axis, length in enumerate(size):
        ends, at = np.arange(points.shape[1 + axis]), np.linspace(0, points.shape[1 + axis] - 1, length)
        points = np.apply_along_axis(lambda line: np.interp(at, ends, line), 1 + axis, points)  # noqa: B023
    return points.reshape(3, -1)


def _flipped(op: Any, volume: Values, p: Row) -> Values:
    names = ("flips_depth", "flips_height", "flips_width")
    return np.flip(volume, tuple(axis + 1 for axis in op.axes if p[names[axis]]))


def _noisy(op: Any, volume: Values, p: Row) -> Values:
    found = []
    for channel, values in enumerate(volume):
        seed = (int(p["noise"]) + channel * 0x9E3779B9) % SEEDS
        even, odd = normal_noise(0, values.size, seed, torch.device("cpu"))
        added = torch.stack([even, odd], dim=1).flatten()[: values.size].numpy()
        found.append(values + p["std"] * added.reshape(values.shape))
    return np.stack(found)


def _contrasted(op: Any, values: Values, p: Row) -> Values:
    found = (values - values.mean()) * p["factor"] + values.mean()
    return found.clip(values.min(), values.max()) if op.keep_range else found


def _raised(op: Any, values: Values, p: Row) -> Values:
    values = -values if op.inverted else values
    low, extent = values.min(), np.ptp(values)
    found = ((values - low) / max(extent, 1e-7)) ** p["factor"] * extent + low
    if op.keep_stats:
        found = (found - found.mean()) * (values.std(ddof=1) / max(found.std(ddof=1), 1e-7)) + values.mean()
    return -found if op.inverted else found


def _blurred(op: Any, values: Values, p: Row) -> Values:
    ndimage = require("scipy.ndimage", extra="dev")
    for axis, name in enumerate(("sigma_depth", "sigma_height", "sigma_width")):
        if p[name] > 1e-3:
            values = ndimage.gaussian_filter1d(values, p[name], axis, mode="mirror", truncate=3)
    return values


def _coarse(op: Any, values: Values, p: Row) -> Values:
    for axis in op.axes:
        length = values.shape[axis]
        fewer = max(1, round(length * p["scale"]))
        middles = (np.arange(fewer) + 0.5) * length / fewer
        kept = values.take([int(Fraction((2 * at + 1) * length, 2 * fewer)) for at in range(fewer)], axis)
        places = np.arange(length) + 0.5
        if fewer < length:
            values = np.apply_along_axis(lambda line: np.interp(places, middles, line), axis, kept)  # noqa: B023
    return values


def _by_volume(change: Callable[[Any, Values, Row], Values]) -> Callable[[Any, Tensor, Row], Tensor]:
    def changed(op: Any, volume: Tensor, p: Row) -> Tensor:
        values = volume.double().numpy()
        return torch.from_numpy(np.ascontiguousarray(change(op, values, p))).to(volume.dtype)

    return changed


def _by_channel(change: Callable[[Any, Values, Row], Values]) -> Callable[[Any, Tensor, Row], Tensor]:
    def changed(op: Any, volume: Tensor, p: Row) -> Tensor:
        found = []
        for c, values in enumerate(volume.double().numpy()):
            own = {name: p[f"{c}.{name}"] for name in op.of_channel}
            found.append(change(op, values, own) if own[op.of_channel[0]] else values)
        return torch.from_numpy(np.stack(found)).to(volume.dtype)

    return changed


VOLUME_CHANGES: Changes = {
    "Brightness3D": _by_channel(lambda op, values, p: values * p["factor"]),
    "Contrast3D": _by_channel(_contrasted), "Gamma3D": _by_channel(_raised),
    "GaussianBlur3D": _by_channel(_blurred),
    "GaussianNoise3D": _by_volume(_noisy), "LowResolution3D": _by_channel(_coarse),
    "RandomAffine3D": _by_volume(_affine), "RandomElastic3D": _by_volume(_affine),
    "RandomFlip3D": _by_volume(_flipped), "RandomRotate90": _by_volume(
        lambda op, volume, p: np.rot90(volume, int(p["turns"]), (op.axes[0] + 1, op.axes[1] + 1))
    ),
}  # fmt: skip
