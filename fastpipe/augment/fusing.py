"""Fused augmentation. A run is a sequence of augmentations that are computed together.

All geometry of a run becomes one resampling, and all linear colour changes become one matrix.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from fastpipe.augment.base import Shape, columns_of, dtype_after, shape_after
from fastpipe.augment.chains import BatchTransform, Columns, Moves, RandomApply, Size, moves_of, per_channel
from fastpipe.augment.colour import ColorJitter, GaussianBlur, Normalize, RandomGrayscale, ToDtype
from fastpipe.augment.geometry import (
    MATRIX,
    MaskWarp,
    RandomAffine,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    axis_weights,
    sampling_grid,
)
from fastpipe.augment.matrices import about_centres, inverted
from fastpipe.augment.parameters import Float64Array, fill_numbers
from fastpipe.augment.steps import Step

# ---- several changes of colours as one map, for each sample ----------------------------------------
#
# Let x be a pixel's red, green and blue in [0, 1], and m the means of red, green and blue over the image.
# Each change of colours is ``x → A x + B m + c``. Several changes in sequence have this form as well.  A map
# is ``[A | B | c]``, (N, 3, 7).

IDENTITY: Float64Array = np.concatenate([np.eye(3), np.zeros((3, 4))], axis=1)
_GREY = np.array([0.2989, 0.587, 0.114])
_ONES = np.ones((3, 1))


def _colour_maps(changes: Sequence[tuple[BatchTransform, Float64Array]]) -> Float64Array:
    """Return one map per image, (N, 21), that does several colour changes, given with their parameters."""
    maps = np.tile(IDENTITY, (len(changes[0][1]), 1, 1))
    for op, table in changes:
        maps = _after(maps, op, table)
    return maps.reshape(len(maps), -1)


def _after(maps: Float64Array, op: BatchTransform, table: Float64Array) -> Float64Array:
    if isinstance(op, RandomApply):
        changed = maps
        for inner, own in columns_of(op.ops, 3):
            changed = _after(changed, inner, table[:, 1:][:, own])
        return np.where(table[:, :1, None] > 0, changed, maps)
    if isinstance(op, ColorJitter):
        for place in range(4, 8):
            maps = _jittered(maps, table[:, place], table[:, :4])
        return maps
    if isinstance(op, RandomGrayscale):
        return np.where(table[:, :1, None] > 0, (_ONES * _GREY) @ maps, maps)
    if isinstance(op, Normalize):
        maps = maps.copy()
        maps[:, :, 6] -= np.array(op.mean)
        maps /= np.array(op.std)[:, None]
        return maps
    return maps  # a conversion of the dtype, which changes no colour


def _jittered(maps: Float64Array, kinds: Float64Array, factors: Float64Array) -> Float64Array:
    """Return colour maps that do one more change, a change of ``ColorJitter``."""
    kind = kinds.astype(np.int64)[:, None, None]
    factor = np.where(kind < 3, np.take_along_axis(factors, kind[:, 0], axis=1)[:, :, None], 1.0)
    grey = (_ONES * _GREY) @ maps
    # The mean of an image's luminance is the luminance of its mean colour.
    mean = np.concatenate([0 * grey[:, :, :3], grey[:, :, :3] + grey[:, :, 3:6], grey[:, :, 6:]], axis=2)
    blended = factor * maps + (1 - factor) * np.where(kind == 1, mean, np.where(kind == 2, grey, 0.0))
    return np.where(kind == 3, _turns(factors[:, 3]) @ maps, blended)


def _turns(parts: Float64Array) -> Float64Array:
    """Return rotations of colours about the grey axis (1, 1, 1), by fractions of a turn: (N, 3, 3).

    The rotations change the hue exactly at thirds of a turn, and approximately in between.  Rodrigues's
    formula gives the rotations.
    """
    angle = 2 * np.pi * parts[:, None, None]
    across = np.array([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]]) / np.sqrt(3)
    found: Float64Array = np.cos(angle) * np.eye(3) + np.sin(angle) * across + (1 - np.cos(angle)) / 3
    return found


def _bounds_of(ops: Sequence[BatchTransform]) -> tuple[Float64Array, Float64Array]:
    """Return the least and the greatest value of each colour after ``ops``. ``ColorJitter`` clips colours."""
    low, high = np.full(3, -np.inf), np.full(3, np.inf)
    for op in ops:
        if isinstance(op, ColorJitter):
            low, high = np.zeros(3), np.ones(3)
        elif isinstance(op, Normalize):
            low, high = ((bound - np.array(op.mean)) / np.array(op.std) for bound in (low, high))
    return low, high


# ---- runs of augmentations -------------------------------------------------------------------------

_GEOMETRY = (RandomHorizontalFlip, RandomVerticalFlip, RandomAffine, RandomRotation)
_COLOUR = (ColorJitter, RandomGrayscale, Normalize, ToDtype)
_MOST_TAPS = 16  # along each side of a pixel
_LEAST_WEIGHT = 2.0**19  # of blurs, in units of 2**-30 of their sum: smaller weights change no byte
_NEAR = 1e-9
# Columns for maps that only cut and resize a box: the box's extent, whether the box is mirrored, and the size
# of the result.
_BOX = (
    "is_box", "top", "extent_y", "is_up", "left", "extent_x", "is_left", "wanted_height", "wanted_width",
)  # fmt: skip


def fused(ops: Sequence[BatchTransform]) -> list[BatchTransform]:
    """Fuse each run of augmentations that can be computed together. Parameters and their order do not
    change."""
    found: list[BatchTransform] = []
    run: list[BatchTransform] = []
    for op in ops:
        kind = _kind(op)
        if kind == "" or (kind == "geometry" and any(_kind(other) == "blur" for other in run)):
            found += _of_run(run)
            run = []
        if kind:
            run.append(op)
        else:
            found.append(op)
    return found + _of_run(run)


def _of_run(run: list[BatchTransform]) -> list[BatchTransform]:
    kinds = [_kind(op) for op in run]
    is_worth_it = kinds.count("geometry") > 1 or kinds.count("colour") > 1 or len(set(kinds)) > 1
    return [FusedRun(run)] if is_worth_it else run


def _kind(op: BatchTransform) -> str:
    """Return how ``op`` is fused: as "geometry" (in the resampling), as "colour" (in the matrix), or as
    "blur" (last). Return "" if ``op`` is not fused."""
    if isinstance(op, RandomApply):
        kinds = {_kind(inner) for inner in op.ops}
        return kinds.pop() if len(kinds) == 1 and (kinds != {"blur"} or len(op.ops) == 1) else ""
    if isinstance(op, _GEOMETRY) or (isinstance(op, RandomResizedCrop) and op.interpolation != "nearest"):
        return "geometry"
    if isinstance(op, _COLOUR):
        return "colour"
    return "blur" if isinstance(op, GaussianBlur) else ""


class FusedRun(BatchTransform):
    """Several augmentations, computed together.  Geometry is computed first, then colours, then blurs,
    whatever the order of ``ops``.

    Args:
        ops: the augmentations in their original order, in which no geometric augmentation follows a blur.
    """

    def __init__(self, ops: Sequence[BatchTransform]) -> None:
        self.ops = tuple(ops)
        self.geometry = [op for op in ops if _kind(op) == "geometry"]
        self.blurs = [op for op in ops if _kind(op) == "blur"]
        self.colours = [op for op in ops if _kind(op) == "colour"]
        self.names = tuple(f"{at}.{name}" for at, op in enumerate(ops) for name in op.names)
        crops = [op for op in _inner(self.geometry) if isinstance(op, RandomResizedCrop)]
        self.is_cubic = any(op.interpolation == "bicubic" for op in crops)
        turns = [op for op in _inner(self.geometry) if isinstance(op, (RandomAffine, RandomRotation))]
        self.is_boxes, self.fill = not turns, (turns[0].fill if turns else None) or 0.0
        self.bounds = _bounds_of(_inner(self.colours))
        dtypes = [op.dtype for op in self.colours if isinstance(op, ToDtype)]
        self.gives_bytes = dtypes[-1] == torch.uint8 if dtypes else None  # None: the dtype does not change
        maps = [f"map{at}" for at in range(IDENTITY.size)] if self.colours else []
        self.applied_names = (
            *((*MATRIX, *_BOX) if self.geometry else ()), *maps,
            *(f"blur{at}.{name}" for at, op in enumerate(self.blurs) for name in op.applied_names_for(1)),
        )  # fmt: skip

    def shape_after(self, shape: Shape) -> Shape:
        return shape_after(self.ops, shape)

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        return dtype_after(self.ops, dtype)

    def moves(self, table: Float64Array, shape: Shape, of_points: bool) -> Moves | None:
        return moves_of(self.ops, table, shape, of_points) if self.geometry else None

    def applied(self, table: Float64Array, shape: Shape) -> Float64Array:
        parts = [np.zeros((len(table), 0))]
        moves = self.moves(table, shape, of_points=False)
        if moves is not None:
            size, wanted = _size(shape), _size(self.shape_after(shape))
            back = inverted(moves.matrices)
            parts += [about_centres(back, size, wanted), _boxes(back, size, wanted)]
        own = [(op, table[:, columns]) for op, columns in columns_of(self.ops, shape[0])]
        if self.colours:
            parts.append(_colour_maps([(op, rows) for op, rows in own if op in self.colours]))
        parts += [op.applied(rows, shape) for op, rows in own if op in self.blurs]
        return np.concatenate(parts, axis=1)

    def for_masks(self) -> BatchTransform | None:
        return MaskWarp(self, self.fill) if self.geometry else None

    def steps(self, column: int, shape: Shape) -> list[Step]:
        found, at = [Step("as_floats", column)], column
        if self.geometry:
            size = _size(self.shape_after(shape))
            found.append(Step("place", at, (*size, int(self.is_cubic)), fill_numbers(self.fill)))
            at += len(MATRIX) + len(_BOX)
        if self.colours:
            gives = 0 if self.gives_bytes is None else 1 + self.gives_bytes
            low, high = (tuple(map(float, bound)) for bound in self.bounds)
            found.append(Step("colour", at, (gives,), (*low, *high)))
            at += IDENTITY.size
        for op in self.blurs:
            found += _blur_steps(op, at)
            at += len(op.applied_names_for(1))
        return [*found, Step("round", at)]

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        gives_bytes = of_bytes if self.gives_bytes is None else self.gives_bytes
        if self.geometry:
            images = self._resampled(images, columns, of_bytes)
        if self.colours:
            images = self._coloured(
                images, columns, 255.0 if of_bytes else 1.0, 255.0 if gives_bytes else 1.0
            )
        for at, op in enumerate(self.blurs):
            own = {name: columns[f"blur{at}.{name}"] for name in op.applied_names_for(1)}
            images = op.on_tensors(images, own, of_bytes=False)
        return images.round().clamp(0, 255) if gives_bytes else images

    def _resampled(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        wanted = _size(self.shape_after(tuple(images.shape[1:])))
        if self.is_boxes:
            mode = "bicubic" if self.is_cubic else "bilinear"
            across = axis_weights(columns["left"], columns["extent_x"], images.shape[3], wanted[1], mode)
            down = axis_weights(columns["top"], columns["extent_y"], images.shape[2], wanted[0], mode)
            across = torch.where(columns["is_left"].view(-1, 1, 1) > 0, across.flip(1), across)
            down = torch.where(columns["is_up"].view(-1, 1, 1) > 0, down.flip(1), down)
            found: Tensor = down.unsqueeze(1) @ (images @ across.transpose(1, 2).unsqueeze(1))
            return found.clamp(0, 255) if self.is_cubic and of_bytes else found
        # The parameters are unknown on the host, so each pixel takes as many samples as the largest box
        # needs.
        steps = [_samples(size, one) for size, one in zip(images.shape[2:], wanted, strict=True)]
        shifts = [[(at + 0.5) / count - 0.5 for at in range(count)] for count in steps]
        values, total = torch.cat([images, torch.ones_like(images[:, :1])], dim=1), None
        for along_y, along_x in itertools.product(*shifts):
            grid = sampling_grid(columns, images.shape[2], images.shape[3], wanted, (along_y, along_x))
            part = grid_sample(values, grid, padding_mode="zeros", align_corners=False)
            total = part if total is None else total + part
        assert total is not None
        total = total / (steps[0] * steps[1])
        return total[:, :-1] + per_channel(images, fill_numbers(self.fill)) * (1 - total[:, -1:])

    def _coloured(self, images: Tensor, columns: Columns, unit: float, new_unit: float) -> Tensor:
        count, channels, height, width = images.shape
        maps = torch.stack([columns[f"map{at}"] for at in range(IDENTITY.size)], dim=1).view(-1, 3, 7)
        values = images.flatten(2) / unit
        means = values.mean(2, keepdim=True).expand(-1, 3, -1)
        linear, added = maps[:, :, :3], maps[:, :, 6:] + maps[:, :, 3:6] @ means
        if channels == 1:  # red, green and blue all equal the grey value
            linear, added = linear.sum(2, keepdim=True)[:, :1], added[:, :1]
        found = (linear @ values + added) * new_unit
        low, high = (bound * new_unit for bound in self.bounds)
        if np.isfinite(low).all():
            least, most = (per_channel(images, bound[:channels])[..., 0] for bound in (low, high))
            found = torch.minimum(torch.maximum(found, least), most)
        return found.view(count, channels, height, width)


def _size(shape: Shape) -> Size:
    return shape[1], shape[2]


def _samples(size: float, wanted: int) -> int:
    """Return how many samples of the image along an axis are averaged for a pixel of the result."""
    return min(max(math.ceil(size / wanted - _NEAR), 1), _MOST_TAPS)


def _blur_steps(op: BatchTransform, column: int) -> list[Step]:
    """Return the steps of a blur, or of a blur in a ``RandomApply``."""
    if isinstance(op, RandomApply):
        return [Step("skip", column, (1,)), *_blur_steps(op.ops[0], column + 1)]
    assert isinstance(op, GaussianBlur)
    return op.steps(column, (), _LEAST_WEIGHT)


def _inner(ops: Iterable[BatchTransform]) -> list[BatchTransform]:
    return [inner for op in ops for inner in (op.ops if isinstance(op, RandomApply) else (op,))]


def _boxes(back: Float64Array, size: Size, wanted: Size) -> Float64Array:
    """Return the columns ``_BOX``, (N, len(_BOX)): the boxes that maps cut out. A map has a box if it has no
    rotation or shear and stays inside the image."""
    is_box = (np.abs(back[:, 1]) < _NEAR) & (np.abs(back[:, 3]) < _NEAR)
    columns: list[Float64Array] = []
    for diagonal, shift, most, target in ((4, 5, size[0], wanted[0]), (0, 2, size[1], wanted[1])):
        begin, extent = back[:, shift], back[:, diagonal] * target
        begin, extent = np.where(extent < 0, begin + extent, begin), np.abs(extent)
        # Edges were drawn as whole numbers. Remove rounding errors.
        begin, extent = (
            np.where(np.abs(one - np.rint(one)) < 1e-6, np.rint(one), one) for one in (begin, extent)
        )
        is_box &= (begin >= 0) & (begin + extent <= most) & (extent > 0)
        columns += [begin, extent, (back[:, diagonal] < 0).astype(np.float64)]
    same = [np.full(len(back), float(number)) for number in wanted]
    return np.stack([is_box.astype(np.float64), *columns, *same], axis=1)
