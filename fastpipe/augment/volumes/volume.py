"""One volume on a device, changed with torch operations: resampling, smoothing and noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import grid_sample, interpolate

from fastpipe.augment.base import uploaded
from fastpipe.augment.parameters import Float32Array, Float64Array

PIECE = 1 << 17  # the number of voxels processed at a time by operations that need extra memory


class Volume:
    """A volume that is changed in place: float32, or labels of any dtype, (C, D, H, W).

    The given volume is copied when ``values`` is first read.  A geometric operation that comes first calls
    ``given()`` instead, and needs no copy.

    Attributes:
        source: the given volume.
        goal: the memory for the result. The shape of ``goal`` differs from the source's if an operation
            changes the shape.  Values have the dtype of ``goal``.
        channels: the number of channels for which parameters were drawn. Labels may have another number.
    """

    def __init__(self, source: Tensor, goal: Tensor, channels: int) -> None:
        self.source, self.goal, self.channels = source, goal, channels
        self._values: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The current shape, (C, D, H, W)."""
        return tuple((self.source if self._values is None else self._values).shape)

    @property
    def values(self) -> Tensor:
        """The values, (C, D, H, W), contiguous, which may be changed in place."""
        if self._values is None:
            self._values = self.empty(self.source.shape)
            self._values.copy_(self.source, non_blocking=True)
        return self._values

    def given(self) -> Tensor:
        """Return the values for reading only. Before any change, this is the given volume itself, if
        possible."""
        is_plain = self.source.dtype == self.goal.dtype and self.source.is_contiguous()
        return self.source if self._values is None and is_plain else self.values

    def empty(self, shape: Sequence[int]) -> Tensor:
        """Return memory for new values of this shape. The memory is ``goal`` if ``goal`` has this shape and
        is not in use."""
        fits = tuple(shape) == tuple(self.goal.shape) and self._values is not self.goal
        return self.goal if fits else self.goal.new_empty(tuple(shape))

    def replace(self, values: Tensor) -> None:
        """Use these values as the volume's values from now on."""
        self._values = values

    def end(self) -> None:
        """Copy the values to ``goal``, unless ``goal`` already holds them."""
        if self.values is not self.goal:
            self.goal.copy_(self.values, non_blocking=True)

    def statistics(self, channel: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a channel's mean, standard deviation (n - 1), minimum and maximum, as tensors."""
        values = self.given()[channel]
        deviation, mean = torch.std_mean(values, correction=min(1, values.numel() - 1))
        return mean, deviation, *torch.aminmax(values)


def _ranges(size: Sequence[int], axis: int) -> list[slice]:
    """Split an axis of (D, H, W) into ranges. Each range has at most PIECE voxels, but at least one plane."""
    count = size[axis]
    step = max(1, PIECE // (math.prod(size) // count))
    return [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]


# ---- resampling ------------------------------------------------------------------------------------

Fill3D = float | Literal["edge"]


def cropped(volume: Volume, size: tuple[int, ...]) -> None:
    """Keep only the central part of a volume. Its size, ``size`` (D, H, W), is at most the volume's size."""
    if volume.shape[1:] == size:
        return
    edges = [(old - new) // 2 for old, new in zip(volume.shape[1:], size, strict=True)]
    part = (slice(None), *(slice(edge, edge + new) for edge, new in zip(edges, size, strict=True)))
    given = volume.given()
    out = volume.empty((len(given), *size))
    out.copy_(given[part], non_blocking=True)
    volume.replace(out)


def warped(
    volume: Volume,
    size: tuple[int, ...],
    matrix: Float64Array,
    bends: Float32Array | None,
    fill: float | None,
    is_nearest: bool,
) -> None:
    """Resample a volume to the size ``size``, (D, H, W).

    Args:
        matrix: (12,), three rows. The matrix maps positions relative to the result's centre to positions
            relative to the volume's centre.
        bends: None, or (3, Z, Y, X), shifts of control points. They are added before the matrix is applied.
            The first and last control points of each axis are at the result's first and last voxels.
        fill: the value outside the volume; None for the nearest voxel.
        is_nearest: whether to take the nearest voxel, as for labels. Otherwise values are interpolated
            linearly.
    """
    given = volume.given()
    out = volume.empty((len(given), *size))
    sizes = tuple(given.shape[1:])
    moves = None if bends is None else uploaded(bends, given.device)[None]
    mode = "border" if fill is None else "zeros"
    for planes in _ranges(size, 0):
        places = _places(matrix, moves, sizes, size, planes.start, planes.stop, given.device)
        if is_nearest:
            _take(given, places, fill, out[:, planes])
            continue
        inside = None if not fill else _parts_inside(places, sizes)
        for place, length in zip(places, sizes, strict=True):
            place.mul_(2 / length).add_(1 / length - 1)
        grid = torch.stack(places[::-1], dim=-1)[None]
        part = grid_sample(given[None], grid, padding_mode=mode, align_corners=False)[0]
        if inside is not None:
            part = torch.where(inside < 1, part + (1 - inside) * (fill or 0.0), part)
        out[:, planes].copy_(part)
    volume.replace(out)


def _places(
    matrix: Float64Array, bends: Tensor | None, sizes: tuple[int, ...], wanted: tuple[int, ...], begin: int,
    end: int, device: torch.device,
) -> list[Tensor]:  # fmt: skip
    """Return the positions from which the voxels of the planes ``begin`` to ``end - 1`` are taken: a tensor
    (end - begin, h, w) for each axis."""
    spans = ((begin, end), (0, wanted[1]), (0, wanted[2]))
    axes = [
        torch.arange(first, last, dtype=torch.float32, device=device) - 0.5 * (size - 1)
        for (first, last), size in zip(spans, wanted, strict=True)
    ]
    about = [axis.view([-1 if at == own else 1 for at in range(3)]) for own, axis in enumerate(axes)]
    if bends is not None:
        # Interpolate the control points for these planes only.
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
    """Return, for each position, the part of the interpolation's weights that falls inside the volume."""
    found: Tensor | None = None
    for place, size in zip(places, sizes, strict=True):
        part = torch.minimum(place + 1, size - place).clamp_(0, 1)
        found = part if found is None else found.mul_(part)
    assert found is not None
    return found


def _take(given: Tensor, places: list[Tensor], fill: float | None, out: Tensor) -> None:
    """Copy the voxels nearest to these places to ``out``, for any dtype."""
    index, inside = None, None
    for place, size in zip(places, given.shape[1:], strict=True):
        place = place.clamp(0, size - 1) if fill is None else place
        at = (place + 0.5).floor()
        is_in = (at >= 0) & (at < size)
        inside = is_in if inside is None else inside & is_in
        at = at.clamp_(0, size - 1).long()
        index = at if index is None else index * size + at
    assert index is not None and inside is not None
    # Unsigned integers are viewed as signed integers, so the fill is converted in the same way.
    outside = torch.tensor(fill or 0.0, dtype=torch.float64)
    outside = (outside if given.dtype.is_floating_point else outside.long()).to(given.dtype).to(given.device)
    for channel, target in zip(given, out, strict=True):
        found = channel.reshape(-1).take(index)
        target.copy_(torch.where(inside, found, outside))


# ---- noise -----------------------------------------------------------------------------------------
#
# Noise depends only on a seed and the voxel's position. The noise is equal on every device up to the last
# digits.

SEEDS = 2**32
# Constants of MurmurHash3's finaliser (A. Appleby, 2011), as signed 32-bit numbers.
_FIRST, _SECOND = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
_GOLDEN = 0x9E3779B9  # the difference between the seeds of two channels
_UNIT = 2.0**-24


def add_noise(volume: Volume, std: float, seed: int) -> None:
    """Add noise of this standard deviation to all channels."""
    for channel, values in enumerate(volume.values):
        begin, own = 0, (seed + channel * _GOLDEN) % SEEDS
        for piece in torch.split(values.view(-1), PIECE):
            even, odd = normal_noise(begin, len(piece), own, piece.device)
            piece[::2].add_(even, alpha=std)
            piece[1::2].add_(odd[: len(piece) // 2], alpha=std)
            begin += len(piece)


def normal_noise(begin: int, count: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two tensors of normally distributed numbers: one for the voxels with even indices, one for those
    with odd indices, among the ``count`` voxels that start at ``begin``.  ``begin`` must be even."""
    # The method of Box and Muller.
    pairs = torch.arange(begin // 2, begin // 2 + (count + 1) // 2, dtype=torch.int32, device=device)
    mixed = _mixed(_mixed(pairs) ^ _signed(seed))
    first, second = _mixed(mixed ^ _signed(0x5851F42D)), _mixed(mixed ^ _signed(0x14057B7E))
    # In (0, 1], so that the logarithm is finite.
    radius = _high(first).add_(1).mul_(_UNIT).log_().mul_(-2).sqrt_()
    angle = _high(second).mul_(2 * math.pi * _UNIT)
    return angle.cos().mul_(radius), angle.sin_().mul_(radius)


def _mixed(values: Tensor) -> Tensor:
    """Apply MurmurHash3's finaliser to 32-bit integers. Products keep their low 32 bits."""
    values = values ^ ((values >> 16) & 0xFFFF)
    values.mul_(_FIRST)
    values.bitwise_xor_((values >> 13) & 0x7FFFF)
    values.mul_(_SECOND)
    return values.bitwise_xor_((values >> 16) & 0xFFFF)


def _high(values: Tensor) -> Tensor:
    """Return the upper 24 bits as floats."""
    return ((values >> 8) & 0xFFFFFF).float()


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


# ---- sums along lines of voxels: blurs, and lower resolutions --------------------------------------

# Indices and weights, (length, K). Each voxel of a line becomes a weighted sum of K voxels of the line.
Taps = tuple[npt.NDArray[np.int64], Float32Array]
TRUNCATE = 3.0  # standard deviations; a Gaussian has no weights beyond


def gaussian(length: int, sigma: float) -> Taps:
    """Return indices and weights of ``scipy.ndimage.gaussian_filter1d`` with ``truncate=3,
    mode="mirror"``."""
    radius = int(TRUNCATE * sigma + 0.5)
    steps = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (steps / sigma) ** 2)
    index = np.arange(length)[:, None] + steps
    if length == 1:
        index[:] = 0
    else:  # mirrored about the first and the last voxel, as often as needed
        index = np.abs((index + length - 1) % (2 * (length - 1)) - (length - 1))
    values = np.broadcast_to((weights / weights.sum()).astype(np.float32), index.shape)
    return np.ascontiguousarray(index, np.int64), np.ascontiguousarray(values)


@lru_cache(maxsize=64)
def lower_resolution(length: int, fewer: int) -> Taps:
    """Return indices and weights that keep ``fewer`` voxels, spread evenly, and interpolate between them."""
    kept = (2 * np.arange(fewer) + 1) * length // (2 * fewer)
    at = ((np.arange(length) + 0.5) * (fewer / length) - 0.5).clip(0, fewer - 1)
    below = np.floor(at).astype(np.int64)
    part = (at - below).astype(np.float32)
    index = np.stack([kept[below], kept[np.minimum(below + 1, fewer - 1)]], axis=1)
    return index, np.stack([1 - part, part], axis=1)


def along(volume: Volume, channel: int, axis: int, taps: Taps) -> None:
    """Replace each voxel of a channel by a weighted sum of voxels along an axis of (D, H, W)."""
    values, (index, weights) = volume.values[channel], taps
    across = 1 if axis == 0 else 0  # the axis that is split into pieces
    # Use sums, because a matrix product may be less precise on a GPU.
    places, factors = uploaded(index, values.device), uploaded(weights, values.device)
    form = [-1 if at == axis else 1 for at in range(3)]
    for piece in _ranges(volume.shape[1:], across):
        part = values[:, piece] if across else values[piece]
        total = part.index_select(axis, places[:, 0]).mul_(factors[:, 0].view(form))
        for tap in range(1, index.shape[1]):
            total.add_(part.index_select(axis, places[:, tap]).mul_(factors[:, tap].view(form)))
        part.copy_(total)
