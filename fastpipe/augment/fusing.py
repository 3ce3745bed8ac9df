"""Fused augmentation: all geometry of a run as one resampling, all linear colour as one matrix."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from fastpipe.augment.affine import MATRIX, RandomAffine, RandomRotation, filling, sampling_grid, warp_step
from fastpipe.augment.applying import RandomApply
from fastpipe.augment.blur import GaussianBlur
from fastpipe.augment.colour import ColorJitter, Normalize, RandomGrayscale, ToDtype
from fastpipe.augment.colour_maps import IDENTITY, bounds_of, colour_maps
from fastpipe.augment.geometry import (
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    axis_weights,
)
from fastpipe.augment.images import BatchTransform, Columns, Moves, Size
from fastpipe.augment.matrices import about_centres, after, identity, inverted
from fastpipe.augment.options import Fill, fill_numbers
from fastpipe.augment.parameters import Float64Array
from fastpipe.augment.steps import Step
from fastpipe.augment.tables import Shape

__all__ = ["FusedRun", "fused"]

_GEOMETRY = (RandomHorizontalFlip, RandomVerticalFlip, RandomAffine, RandomRotation)
_COLOUR = (ColorJitter, RandomGrayscale, Normalize, ToDtype)
_MOST_TAPS = 16  # along each side of a pixel
_NEAR = 1e-9
# Where a map is that of a box: how far that goes, and whether it is mirrored; and what it becomes.
_BOX = (
    "is_box", "top", "extent_y", "is_up", "left", "extent_x", "is_left", "wanted_height", "wanted_width",
)  # fmt: skip


def fused(ops: Sequence[BatchTransform]) -> list[BatchTransform]:
    """A chain in which runs of augmentations are fused, of the same parameters in the same order."""
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
    """What becomes of it: a part of the resampling, of the matrix, a blur after both, or nothing."""
    if isinstance(op, RandomApply):
        kinds = {_kind(inner) for inner in op.ops}
        return kinds.pop() if len(kinds) == 1 and (kinds != {"blur"} or len(op.ops) == 1) else ""
    if isinstance(op, _GEOMETRY) or (isinstance(op, RandomResizedCrop) and op.interpolation != "nearest"):
        return "geometry"
    if isinstance(op, _COLOUR):
        return "colour"
    return "blur" if isinstance(op, GaussianBlur) else ""


class FusedRun(BatchTransform):
    """Geometry, then colours, then blurs, whatever their order was.

    Args:
        ops: the augmentations, of which those of geometry come before any blur.
    """

    def __init__(self, ops: Sequence[BatchTransform]) -> None:
        self.ops = tuple(ops)
        self.geometry = [op for op in ops if _kind(op) == "geometry"]
        self.blurs = [op for op in ops if _kind(op) == "blur"]
        self.colours = [op for op in ops if _kind(op) == "colour"]
        self.draws = sum(op.draws for op in ops)
        self.names = tuple(f"{at}.{name}" for at, op in enumerate(ops) for name in op.names)
        crops = [op for op in _inner(self.geometry) if isinstance(op, RandomResizedCrop)]
        self.is_cubic = any(op.interpolation == "bicubic" for op in crops)
        self.is_boxes = not any(
            isinstance(op, (RandomAffine, RandomRotation)) for op in _inner(self.geometry)
        )
        fills = [op.fill for op in _inner(self.geometry) if isinstance(op, (RandomAffine, RandomRotation))]
        self.fill: Fill = fills[0] if fills else None
        self.bounds = bounds_of(self.colours)
        dtypes = [op.dtype for op in self.colours if isinstance(op, ToDtype)]
        self.gives_bytes = dtypes[-1] == torch.uint8 if dtypes else None  # None: as it was given
        maps = [f"map{at}" for at in range(IDENTITY.size)] if self.colours else []
        self.applied_names = (
            *((*MATRIX, *_BOX) if self.geometry else ()), *maps,
            *(f"blur{at}.{name}" for at, op in enumerate(self.blurs) for name in op.names_applied),
        )  # fmt: skip

    def check(self, shape: Sequence[int]) -> None:
        at = list(shape)
        for op in self.ops:
            op.check(at)
            at[1:] = op.shape_after(tuple(at[1:]))

    def shape_after(self, shape: Shape) -> Shape:
        for op in self.ops:
            shape = op.shape_after(shape)
        return shape

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        for op in self.ops:
            dtype = op.dtype_after(dtype)
        return dtype

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        tables, begin = [], 0
        for op in self.ops:
            tables.append(op.table(u[:, begin : begin + op.draws], shape))
            begin, shape = begin + op.draws, op.shape_after(shape)
        return np.concatenate(tables, axis=1)

    # ---- what is applied -----------------------------------------------------------------------

    def _parts(
        self, table: Float64Array, shape: Shape
    ) -> Iterable[tuple[BatchTransform, Float64Array, Shape]]:
        """Each operation with its parameters and the shape of what it takes."""
        begin = 0
        for op in self.ops:
            yield op, table[:, begin : begin + len(op.names)], shape
            begin, shape = begin + len(op.names), op.shape_after(shape)

    def moves(self, table: Float64Array, shape: Shape, of_points: bool) -> Moves | None:
        matrices, clips = identity(len(table)), np.zeros(len(table), np.bool_)
        if not self.geometry:
            return None
        for op, own, given in self._parts(table, shape):
            part = op.moves(own, given, of_points)
            if part is not None:
                matrices, clips = after(matrices, part.matrices), clips | part.clips
        return Moves(matrices, clips)

    def applied(self, table: Float64Array, shape: Shape) -> Float64Array:
        parts = [np.zeros((len(table), 0))]
        moves = self.moves(table, shape, of_points=False)
        if moves is not None:
            size, wanted = _size(shape), _size(self.shape_after(shape))
            back = inverted(moves.matrices)
            parts += [about_centres(back, size, wanted), _boxes(back, size, wanted)]
        operations = list(self._parts(table, shape))
        if self.colours:
            parts.append(colour_maps([(op, own) for op, own, _ in operations if _kind(op) == "colour"]))
        parts += [op.applied(own, given) for op, own, given in operations if _kind(op) == "blur"]
        return np.concatenate(parts, axis=1)

    def for_masks(self) -> BatchTransform | None:
        return _FusedMask(self.ops, self.names_applied) if self.geometry else None

    # ---- on the processor ----------------------------------------------------------------------

    def steps(self, column: int, shape: Shape) -> list[Step]:
        found, at = [Step("as_floats", column)], column
        if self.geometry:
            size = _size(self.shape_after(shape))
            found.append(Step("place", at, (*size, int(self.is_cubic)), fill_numbers(self.fill or 0.0)))
            at += len(MATRIX) + len(_BOX)
        if self.colours:
            gives = 0 if self.gives_bytes is None else 1 + self.gives_bytes
            low, high = (tuple(map(float, bound)) for bound in self.bounds)
            found.append(Step("colour", at, (gives,), (*low, *high)))
            at += IDENTITY.size
        for op in self.blurs:
            found += _blur_steps(op, at)
            at += len(op.names_applied)
        return [*found, Step("round", at)]

    # ---- elsewhere -----------------------------------------------------------------------------

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        gives_bytes = of_bytes if self.gives_bytes is None else self.gives_bytes
        if self.geometry:
            images = self._resampled(images, columns, of_bytes)
        if self.colours:
            images = self._coloured(
                images, columns, 255.0 if of_bytes else 1.0, 255.0 if gives_bytes else 1.0
            )
        for at, op in enumerate(self.blurs):
            own = {name: columns[f"blur{at}.{name}"] for name in op.names_applied}
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
        # As many samples of each pixel as the largest box asks for: what was drawn is not known here.
        steps = [_samples(size, one) for size, one in zip(images.shape[2:], wanted, strict=True)]
        shifts = [[(at + 0.5) / count - 0.5 for at in range(count)] for count in steps]
        values, total = torch.cat([images, torch.ones_like(images[:, :1])], dim=1), None
        for along_y, along_x in itertools.product(*shifts):
            grid = sampling_grid(columns, images.shape[2], images.shape[3], wanted, (along_y, along_x))
            part = grid_sample(values, grid, padding_mode="zeros", align_corners=False)
            total = part if total is None else total + part
        assert total is not None
        total = total / (steps[0] * steps[1])
        return total[:, :-1] + filling(images, self.fill or 0.0) * (1 - total[:, -1:])

    def _coloured(self, images: Tensor, columns: Columns, unit: float, new_unit: float) -> Tensor:
        count, channels, height, width = images.shape
        maps = torch.stack([columns[f"map{at}"] for at in range(IDENTITY.size)], dim=1).view(-1, 3, 7)
        values = images.flatten(2) / unit
        means = values.mean(2, keepdim=True).expand(-1, 3, -1)
        linear, added = maps[:, :, :3], maps[:, :, 6:] + maps[:, :, 3:6] @ means
        if channels == 1:  # all three colours are what it is
            linear, added = linear.sum(2, keepdim=True)[:, :1], added[:, :1]
        found = (linear @ values + added) * new_unit
        low, high = (bound * new_unit for bound in self.bounds)
        if np.isfinite(low).all():
            found = torch.minimum(torch.maximum(found, _of_channels(found, low)), _of_channels(found, high))
        return found.view(count, channels, height, width)

    def extra_repr(self) -> str:
        return ", ".join(map(repr, self.ops))


class _FusedMask(BatchTransform):
    """Moves masks as images were."""

    def __init__(self, ops: Sequence[BatchTransform], applied_names: tuple[str, ...]) -> None:
        self.run = FusedRun(ops)
        self.names = self.applied_names = applied_names

    def shape_after(self, shape: Shape) -> Shape:
        return self.run.shape_after(shape)

    def steps(self, column: int, shape: Shape) -> list[Step]:
        fill = self.run.fill or 0.0
        return [warp_step(column, True, fill_numbers(fill)[0], _size(self.shape_after(shape)))]

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        size = _size(self.shape_after(tuple(images.shape[1:])))
        grid = sampling_grid(columns, images.shape[2], images.shape[3], size)
        fill = self.run.fill or 0.0
        values = images - (fill if isinstance(fill, float) else fill[0])  # what is outside is 0
        found = grid_sample(values, grid, mode="nearest", padding_mode="zeros", align_corners=False)
        return found + (fill if isinstance(fill, float) else fill[0])


def _size(shape: Shape) -> Size:
    return shape[1], shape[2]


def _samples(size: float, wanted: int) -> int:
    """Samples along a side of a pixel, which is so much of the image."""
    return min(max(math.ceil(size / wanted - _NEAR), 1), _MOST_TAPS)


def _blur_steps(op: BatchTransform, column: int) -> list[Step]:
    """A blur, or one of some images."""
    if isinstance(op, RandomApply):
        return [Step("skip", column, (1,)), *_blur_steps(op.ops[0], column + 1)]
    assert isinstance(op, GaussianBlur)
    return [op.fused_step(column)]


def _inner(ops: Iterable[BatchTransform]) -> list[BatchTransform]:
    return [inner for op in ops for inner in (op.ops if isinstance(op, RandomApply) else (op,))]


def _boxes(back: Float64Array, size: Size, wanted: Size) -> Float64Array:
    """Where maps are of boxes inside of the image, without rotation or shear: (N, len(_BOX)).

    Args:
        back: (N, 6), where pixels come from, from the upper left corners.
        size: height and width of the images.
        wanted: those afterwards.
    """
    is_box = (np.abs(back[:, 1]) < _NEAR) & (np.abs(back[:, 3]) < _NEAR)
    columns: list[Float64Array] = []
    for diagonal, shift, most, target in ((4, 5, size[0], wanted[0]), (0, 2, size[1], wanted[1])):
        begin, extent = back[:, shift], back[:, diagonal] * target
        begin, extent = np.where(extent < 0, begin + extent, begin), np.abs(extent)
        # Whole numbers, as they were drawn, but for rounding.
        begin, extent = (
            np.where(np.abs(one - np.rint(one)) < 1e-6, np.rint(one), one) for one in (begin, extent)
        )
        is_box &= (begin >= 0) & (begin + extent <= most) & (extent > 0)
        columns += [begin, extent, (back[:, diagonal] < 0).astype(np.float64)]
    same = [np.full(len(back), float(number)) for number in wanted]
    return np.stack([is_box.astype(np.float64), *columns, *same], axis=1)


def _of_channels(images: Tensor, numbers: Float64Array) -> Tensor:
    """Numbers for the channels of (N, C, pixels); made there, as an upload would wait for the device."""
    return torch.cat([images.new_full((1, 1, 1), number) for number in numbers[: images.shape[1]]], dim=1)
