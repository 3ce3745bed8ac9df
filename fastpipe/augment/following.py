"""Masks, boxes and keypoints go along with the images: as torchvision's transforms take them along."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastpipe.augment.parameters import Float64Array
from fastpipe.augment.tables import Ops, applied_table, shape_after, untraced, uploaded
from fastpipe.core.extras import require
from fastpipe.errors import AugmentError

__all__ = ["follow"]

# Images changed by what is applied, (N, columns), wherever they are.
Change = Callable[[Ops, Tensor, Float64Array], Tensor]


def follow(
    ops: Ops, table: Tensor, shape: Sequence[int], others: Sequence[Any], change: Change
) -> Sequence[Any]:
    """What belongs to the images, after a chain.

    Args:
        ops: the chain.
        table: its parameters.
        shape: of the images before, (N, C, H, W).
        others: each handed through, but for masks, boxes and keypoints of ``torchvision.tv_tensors``, also in
            dictionaries, and in lists of one item for each image.
        change: changes masks.

    Raises:
        AugmentError: they are not of images of this shape, or cannot be taken along.
    """
    kinds = sys.modules.get("torchvision.tv_tensors")  # nobody has any without it
    if kinds is None or not any(_has_any(other, kinds.TVTensor) for other in others):
        return others
    return untraced(_followed, ops, table, shape, others, change, kinds)


def _has_any(thing: Any, kind: type) -> bool:
    if isinstance(thing, dict):
        return any(_has_any(value, kind) for value in thing.values())
    if isinstance(thing, (list, tuple)):
        return any(_has_any(value, kind) for value in thing)
    return isinstance(thing, kind)


def _followed(
    ops: Ops, table: Tensor, shape: Sequence[int], others: Sequence[Any], change: Change, kinds: Any
) -> list[Any]:
    for op in ops:
        if op.mixes:
            raise AugmentError(f"masks, boxes and keypoints do not go along with {op}: mix the images apart")
    follower = _Follower(ops, table.numpy(), shape, change, kinds)
    return [follower.of_batch(other) for other in others]


class _Follower:
    """Takes along what belongs to one batch."""

    def __init__(
        self, ops: Ops, table: Float64Array, shape: Sequence[int], change: Change, kinds: Any
    ) -> None:
        self.ops, self.table, self.change, self.kinds = ops, table, change, kinds
        self.count, self.shape, self.size = shape[0], tuple(shape[1:]), (shape[2], shape[3])

    def of_batch(self, thing: Any) -> Any:
        """What belongs to all images, in the order of these."""
        if isinstance(thing, dict):
            return {name: self.of_batch(value) for name, value in thing.items()}
        if isinstance(thing, (list, tuple)):
            if len(thing) != self.count and _has_any(thing, self.kinds.TVTensor):
                raise AugmentError(
                    f"there are {self.count} images, and {len(thing)} of what goes along with them"
                )
            return type(thing)(self.of_sample(value, at) for at, value in enumerate(thing))
        if isinstance(thing, self.kinds.BoundingBoxes):
            raise AugmentError("boxes of a batch come as a list, with BoundingBoxes for each image")
        if isinstance(thing, (self.kinds.Mask, self.kinds.KeyPoints)):
            if len(thing) != self.count:
                raise AugmentError(
                    f"there are {self.count} images, and {type(thing).__name__} of shape {tuple(thing.shape)}"
                )
            return self._moved(thing, thing.as_subclass(Tensor), slice(None))
        return thing

    def of_sample(self, thing: Any, at: int) -> Any:
        """What belongs to one image."""
        if isinstance(thing, dict):
            return {name: self.of_sample(value, at) for name, value in thing.items()}
        if isinstance(thing, (list, tuple)):
            return type(thing)(self.of_sample(value, at) for value in thing)
        if isinstance(thing, (self.kinds.Mask, self.kinds.KeyPoints, self.kinds.BoundingBoxes)):
            return self._moved(thing, thing.as_subclass(Tensor)[None], slice(at, at + 1), is_one=True)
        return thing

    def _moved(self, thing: Any, values: Tensor, rows: slice, is_one: bool = False) -> Any:
        """Anything of torchvision's, as it is in some images.

        Args:
            thing: it.
            values: it, as a batch.
            rows: of which images.
            is_one: whether it was no batch.
        """
        found, further = values, {}
        if isinstance(thing, self.kinds.Mask):
            self._check_size(thing, tuple(thing.shape[-2:]))
            found = self._of_masks(values, rows)
        else:
            self._check_size(thing, tuple(thing.canvas_size))
            further["canvas_size"] = shape_after(self.ops, self.shape)[1:]
            if isinstance(thing, self.kinds.KeyPoints):
                found = self._of_points(values, rows)
            else:
                found = self._of_boxes(thing, values, rows)
        return self.kinds.wrap(found[0] if is_one else found, like=thing, **further)

    def _check_size(self, thing: Any, size: tuple[int, ...]) -> None:
        if size != self.size:
            raise AugmentError(
                f"{type(thing).__name__} is of images of {size[0]} by {size[1]} pixels, which are of "
                f"{self.size[0]} by {self.size[1]} here"
            )

    # ---- masks ---------------------------------------------------------------------------------

    @cached_property
    def _mask_chain(self) -> tuple[Ops, Float64Array]:
        """What is done with masks, and what is applied."""
        applied, begin = applied_table(self.ops, self.table, self.shape), 0
        chain: list[Any] = []
        parts = [applied[:, :0]]
        for op in self.ops:
            end = begin + len(op.names_applied)
            twin = op.for_masks()
            if twin is not None:
                chain.append(twin)
                parts.append(applied[:, begin:end])
            begin = end
        return chain, np.concatenate(parts, axis=1)

    def _of_masks(self, masks: Tensor, rows: slice) -> Tensor:
        chain, applied = self._mask_chain
        height, width = self.size
        # Numbers of classes and of objects are exact as floats, up to 2**24.
        planes = masks.reshape(len(masks), -1, height, width).float()
        found = self.change(chain, planes, applied[rows])
        return found.to(masks.dtype).reshape(*masks.shape[:-2], *found.shape[-2:])

    # ---- points and boxes ----------------------------------------------------------------------

    def _of_points(self, points: Tensor, rows: slice) -> Tensor:
        shape, dtype = points.shape, points.dtype
        for moves, _ in self._moves(of_points=True):
            moved = _mapped(points.float().reshape(len(points), -1, 2), moves.matrices[rows])
            points = moved.to(dtype).reshape(shape)
        return points

    def _of_boxes(self, thing: Any, boxes: Tensor, rows: slice) -> Tensor:
        formats, dtype = self.kinds.BoundingBoxFormat, boxes.dtype
        if thing.format not in (formats.XYXY, formats.XYWH, formats.CXCYWH):
            raise AugmentError(
                f"boxes come as XYXY, XYWH or CXCYWH, got {thing.format.name}: "
                "torchvision.transforms.v2.functional.convert_bounding_box_format converts them"
            )
        functional = require("torchvision.transforms.v2.functional", extra="image")
        convert = functional.convert_bounding_box_format
        for moves, (height, width) in self._moves(of_points=False):
            corners = convert(boxes[0].float(), thing.format, formats.XYXY)[None]
            four = corners[..., [0, 1, 2, 1, 2, 3, 0, 3]].reshape(1, -1, 2)
            four = _mapped(four, moves.matrices[rows]).reshape(1, -1, 4, 2)
            found = torch.cat([four.amin(2), four.amax(2)], dim=2)
            if thing.clamping_mode is not None and moves.clips[rows].all():
                most = found.new_tensor([width, height, width, height])
                found = torch.minimum(found.clamp(min=0), most)
            boxes = convert(found[0], formats.XYXY, thing.format)[None].to(dtype)
        return boxes

    def _moves(self, of_points: bool) -> list[tuple[Any, tuple[int, int]]]:
        """The ``Moves`` of each operation of geometry, and the size of images afterwards."""
        found, begin, shape = [], 0, self.shape
        for op in self.ops:
            table = self.table[:, begin : begin + len(op.names)]
            moves = op.moves(table, shape, of_points)
            begin, shape = begin + len(op.names), op.shape_after(shape)
            if moves is not None:
                found.append((moves, (shape[1], shape[2])))
        return found


def _mapped(points: Tensor, matrices: Float64Array) -> Tensor:
    """Points (N, K, 2) mapped by matrices (N, 6)."""
    m = uploaded(matrices.astype(np.float32), points.device).view(-1, 1, 2, 3)
    found: Tensor = (m[..., :2] * points.unsqueeze(2)).sum(3) + m[..., 2]
    return found
