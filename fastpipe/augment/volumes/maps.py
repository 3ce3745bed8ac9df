"""Resampling of volumes by affine maps and by moved control points, by torch's operations."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample, interpolate

from fastpipe.augment.parameters import Float32Array, Float64Array
from fastpipe.augment.tables import uploaded
from fastpipe.augment.volumes.volume import PIECE, Volume, ranges

__all__ = ["NO_BENDS", "Fill3D", "Map", "cropped", "warped"]

Fill3D = float | Literal["edge"]

NO_BENDS = np.zeros((3, 0, 0, 0), np.float32)


def _as_labels(number: float, dtype: torch.dtype) -> Tensor:
    """A fill in the dtype of labels, (1,), on the host; integers as they are with another sign."""
    value = torch.tensor([number], dtype=torch.float64)
    return (value if dtype.is_floating_point else value.to(torch.int64)).to(dtype)


def cropped(volume: Volume, size: tuple[int, ...]) -> None:
    """Keep the middle, of a size (D, H, W) that is at most the volume's."""
    if volume.shape[1:] == size:
        return
    edges = [(old - new) // 2 for old, new in zip(volume.shape[1:], size, strict=True)]
    part = (slice(None), *(slice(edge, edge + new) for edge, new in zip(edges, size, strict=True)))
    given = volume.given()
    out = volume.empty((len(given), *size))
    out.copy_(given[part], non_blocking=True)
    volume.replace(out)


class Map(NamedTuple):
    """Where voxels come from.

    Attributes:
        matrix: (12,), from places about the centre of the result to those about the volume's: three rows,
            each of three factors and what is added.
        bends: (3, Z, Y, X), how far voxels are moved before: control points, the first and the last of each
            axis at the result's first and last voxel; or ``NO_BENDS``.
        fill: what is outside, a number or ``"edge"``, what the nearest voxel is.
        is_nearest: whether values are labels, of the nearest voxel; else they are linear between voxels.
    """

    matrix: Float64Array
    bends: Float32Array
    fill: Fill3D
    is_nearest: bool

    @property
    def number(self) -> float:
        """The fill, or any number where there is none."""
        return 0.0 if self.fill == "edge" else self.fill


def warped(volume: Volume, where: Map, size: tuple[int, ...]) -> None:
    """Resample to a size (D, H, W)."""
    given = volume.given()
    out = volume.empty((len(given), *size))
    _resampled(given, where, out)
    volume.replace(out)


def _resampled(given: Tensor, where: Map, out: Tensor) -> None:
    sizes, wanted, fill = tuple(given.shape[1:]), tuple(out.shape[1:]), where.number
    bends = uploaded(where.bends, given.device)[None] if where.bends.size else None
    mode = "border" if where.fill == "edge" else "zeros"
    for planes in ranges(wanted, 0, PIECE):
        places = _places(where.matrix, bends, sizes, wanted, planes.start, planes.stop, given.device)
        if where.is_nearest:
            _take(given, places, where, out[:, planes])
            continue
        inside = _parts_inside(places, sizes) if fill else None
        for place, size in zip(places, sizes, strict=True):
            place.mul_(2 / size).add_(1 / size - 1)
        grid = torch.stack(places[::-1], dim=-1)[None]
        part = grid_sample(given[None], grid, padding_mode=mode, align_corners=False)[0]
        if inside is not None:
            part = torch.where(inside < 1, part + (1 - inside) * fill, part)
        out[:, planes].copy_(part)


def _places(
    matrix: Float64Array, bends: Tensor | None, sizes: tuple[int, ...], wanted: tuple[int, ...], begin: int,
    end: int, device: torch.device,
) -> list[Tensor]:  # fmt: skip
    """Where voxels of some planes come from, along each axis: (end - begin, h, w) each, in voxels."""
    spans = ((begin, end), (0, wanted[1]), (0, wanted[2]))
    axes = [
        torch.arange(first, last, dtype=torch.float32, device=device) - 0.5 * (size - 1)
        for (first, last), size in zip(spans, wanted, strict=True)
    ]
    about = [axis.view([-1 if at == own else 1 for at in range(3)]) for own, axis in enumerate(axes)]
    if bends is not None:
        # The planes between control points, of which only these are made.
        at = torch.arange(begin, end, dtype=torch.float32, device=device)
        at = at * ((bends.shape[2] - 1) / max(wanted[0] - 1, 1))
        below = at.floor().clamp_(max=max(bends.shape[2] - 2, 0))
        first = below.long()
        part = (at - below).view(1, 1, -1, 1, 1)
        last = (first + 1).clamp_(max=bends.shape[2] - 1)
        planes = bends[:, :, first] * (1 - part) + bends[:, :, last] * part
        moved = interpolate(planes, (end - begin, *wanted[1:]), mode="trilinear", align_corners=True)[0]
        about = [move.add_(axis) for axis, move in zip(about, moved, strict=True)]
    found = []
    for row, size in zip(matrix.reshape(3, 4).tolist(), sizes, strict=True):
        place = about[0].new_full((end - begin, *wanted[1:]), row[3] + 0.5 * (size - 1))
        for factor, axis in zip(row[:3], about, strict=True):
            place.add_(axis, alpha=factor)
        found.append(place)
    return found


def _parts_inside(places: list[Tensor], sizes: tuple[int, ...]) -> Tensor:
    """How much of the voxels around places is inside, by their weights."""
    found: Tensor | None = None
    for place, size in zip(places, sizes, strict=True):
        part = torch.minimum(place + 1, size - place).clamp_(0, 1)
        found = part if found is None else found.mul_(part)
    assert found is not None
    return found


def _take(given: Tensor, places: list[Tensor], where: Map, out: Tensor) -> None:
    """The nearest voxels, of any dtype."""
    index, inside = None, None
    for place, size in zip(places, given.shape[1:], strict=True):
        place = place.clamp(0, size - 1) if where.fill == "edge" else place
        at = (place + 0.5).floor()
        is_in = (at >= 0) & (at < size)
        inside = is_in if inside is None else inside & is_in
        at = at.clamp_(0, size - 1).long()
        index = at if index is None else index * size + at
    assert index is not None and inside is not None
    outside = _as_labels(where.number, given.dtype).to(given.device)[0]
    for channel, target in zip(given, out, strict=True):
        found = channel.reshape(-1).take(index)
        target.copy_(torch.where(inside, found, outside))
