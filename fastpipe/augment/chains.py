"""Augmentations of images and spectrograms: the base class, chains (several in order), and annotations."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastpipe.augment.base import (
    FLOATS,
    Augmentation,
    Chain,
    Ops,
    Shape,
    applied_table,
    columns_of,
    for_masks,
    shape_after,
    untraced,
    uploaded,
)
from fastpipe.augment.matrices import after, identity
from fastpipe.augment.parameters import Float64Array, probability
from fastpipe.augment.steps import Step, check_change, plan_of, run_plan
from fastpipe.core.extras import require
from fastpipe.core.native import native
from fastpipe.core.slots import SlotPool
from fastpipe.core.types import Key
from fastpipe.errors import AugmentError

# The applied numbers on the images' device: name → float32 tensor (N,).
Columns = Mapping[str, Tensor]
Size = tuple[int, int]  # height and width
_ELEMENTS = {
    torch.uint8: "uint8", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32",
}  # fmt: skip


class Moves(NamedTuple):
    """How an augmentation moves the pixels of each image."""

    matrices: Float64Array  # (N, 6), pixels before → after; see the module ``matrices``
    clips: npt.NDArray[np.bool_]  # (N,), whether boxes are clipped at the image's borders


class ImageChain(Chain):
    """A chain of augmentations of images."""

    one = "image"
    shapes = ("(N, C, H, W)",)
    dtypes = (torch.uint8, *FLOATS)

    def wanted(self) -> Sequence[str]:
        takes_spectrograms = bool(self.ops) and all(3 in op.ranks for op in self.ops)
        return ["(N, F, T)", "(N, C, F, T)"] if takes_spectrograms else self.shapes

    def given(self, samples: Tensor, batch: Tensor, table: Tensor, others: Sequence[Any]) -> Any:
        if any(op.mixes for op in self.ops):
            labels: Any = others[0] if others else None
            next(op for op in self.steps if op.mixes).check_labels(labels, len(batch))
            applied = torch.ops.fastpipe.applied(table, self.number, batch.shape[1:], labels.is_cuda)
            applied = applied.to(labels.device, non_blocking=True)
            for op, own in columns_of(self.steps, batch.shape[1], of_applied=True):
                if op.mixes:
                    op.check_labels(labels, len(batch))
                    labels = op.mixed_labels(labels, op.columns(applied[:, own]))
            others = [labels, *others[1:]]
        return super().given(samples, batch, table, others)

    def changed(self, samples: Tensor, table: Tensor) -> Tensor:
        is_recorded = samples.requires_grad and torch.is_grad_enabled()
        if samples.device.type == "cpu" and not is_recorded:
            return super().changed(samples, table)
        columns = torch.ops.fastpipe.applied(table, self.number, samples.shape[1:], samples.is_cuda)
        return on_device(self.steps, samples, columns.to(samples.device, non_blocking=True))

    def by_kernels(self, samples: Tensor, table: Tensor) -> Tensor:
        return on_processor(self.steps, samples, self.applied(table, samples.shape), self.memory)

    def followed(self, table: Tensor, shape: Sequence[int], others: Sequence[Any]) -> Sequence[Any]:
        return follow(self.steps, table, shape, others)

    def native_batch(
        self, shape: Sequence[int], key: Key, out: Tensor, places: npt.NDArray[np.int64] | None = None
    ) -> Any:
        """Return a ``native.AugmentBatch`` that changes uint8 images one at a time, in any thread.

        Each image becomes what it would become in a batch of this shape, (N, C, H, W).  Image ``number`` is
        written to ``out``, (M, …), at the index ``places[number]``.  If ``places`` is None, the index is
        ``number``.
        """
        rows = self.applied(torch.from_numpy(self.table(shape, None, key)), shape)
        (part,) = _parts(self.steps, tuple(shape[1:]), torch.uint8)
        assert part.plan is not None  # only fastpipe's own augmentations, without mixing
        elements = _ELEMENTS[torch.uint8], _ELEMENTS[out.dtype]
        return native.augment_batch(
            part.plan, rows, None, elements[0], _array(out), elements[1], shape[1:], places
        )

    check_change = staticmethod(check_change)


class BatchTransform(Augmentation, ABC):
    """The base class of augmentations of images, and of spectrograms if ``ranks`` contains 3.

    A subclass must define ``on_tensors``. A subclass that draws random numbers must also define ``table``.

    Attributes:
        channels: the accepted numbers of channels. If this is empty, any number is accepted.
    """

    kind = "images"
    chain_type: type[Chain] = ImageChain
    channels: tuple[int, ...] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Inherited native steps compute the parent's result. Drop the steps if a subclass redefines only
        # ``on_tensors``.
        if "on_tensors" in cls.__dict__ and not {"native_step", "steps"} & set(cls.__dict__):
            cls.native_step, cls.steps = None, Augmentation.steps  # type: ignore[method-assign]

    @abstractmethod
    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        """Change the whole batch with torch operations, and return it.

        Args:
            images: (N, C, H, W), float32.
            columns: the numbers to apply, by name: float32 (N,), on the same device.
            of_bytes: whether the values are whole numbers from 0 to 255. The values of the result must then
                be whole numbers from 0 to 255 as well.
        """

    def columns(self, applied: Tensor) -> Columns:
        """Convert a table of numbers to apply, float32 (N, len(applied_names)), to ``on_tensors``'s
        argument."""
        return dict(zip(self.applied_names_for(1), applied.unbind(1), strict=True))

    def moves(self, table: Float64Array, shape: Shape, of_points: bool) -> Moves | None:
        """Return how boxes and keypoints move, or None if they do not move.

        Args:
            table: the parameters, (N, len(names)).
            shape: the shape of an image, (C, H, W).
            of_points: whether the result is for keypoints, which torchvision mirrors as indices of pixels.
        """
        return None

    def check_labels(self, labels: Any, count: int) -> None:  # not abstract: few classes mix
        """Raise an ``AugmentError`` if this augmentation cannot mix these labels of ``count`` images.
        ``labels`` may be None."""

    def mixed_labels(self, labels: Tensor, columns: Columns) -> Tensor:
        """Mix labels as the images are mixed. This method is called only if ``mixes`` is true.

        Args:
            labels: class numbers, (N,), or probabilities, (N, classes).
            columns: the numbers to apply, by name, on the labels' device.

        Returns:
            (N, classes), floats.
        """
        return labels

    def check(self, shape: Sequence[int]) -> None:
        if self.channels and shape[1] not in self.channels:
            wanted = " or ".join(map(str, self.channels))
            looks = shape[3] in self.channels
            raise AugmentError(
                f"{type(self).__name__} takes images of {wanted} channels, got shape {tuple(shape)}"
                + (": it looks like (N, H, W, C), of which images.movedim(-1, 1) makes (N, C, H, W)" * looks)
            )


def chosen(which: Tensor, changed: Tensor, images: Tensor) -> Tensor:
    """Return the changed image where ``which``, (N,), is not 0, and the original image elsewhere."""
    return torch.where(which.bool().view(-1, 1, 1, 1), changed, images)


def per_channel(images: Tensor, numbers: Iterable[float]) -> Tensor:
    """Return numbers as (1, K, 1, 1) on the images' device, without an upload, which would wait."""
    return torch.cat([images.new_full((1, 1, 1, 1), number) for number in numbers], dim=1)


def moves_of(ops: Ops, table: Float64Array, shape: Shape, of_points: bool) -> Moves:
    """Return how all augmentations together, in order, move the pixels of each image."""
    matrices, clips = identity(len(table)), np.zeros(len(table), np.bool_)
    for op, own in columns_of(ops, shape[0]):
        part = op.moves(table[:, own], shape, of_points)
        if part is not None:
            matrices, clips = after(matrices, part.matrices), clips | part.clips
        shape = op.shape_after(shape)
    return Moves(matrices, clips)


# ---- chains on devices and on the processor --------------------------------------------------------


def on_device(ops: Ops, images: Tensor, applied: Tensor) -> Tensor:
    """Change images with torch operations on the images' device. torch.compile traces this function.

    ``applied``, the table of numbers to apply, is float32 on the same device.
    """
    dtype = images.dtype
    # Mixed precision is for the model. Weights and coordinates of lower precision would visibly change
    # images.
    with torch.autocast(images.device.type, enabled=False):
        values = images.float()
        for op, own in columns_of(ops, 1, of_applied=True):
            values = op.on_tensors(values, op.columns(applied[:, own]), dtype == torch.uint8)
            dtype = op.dtype_after(dtype)
    return values.to(dtype, memory_format=_layout(images))


def _layout(images: Tensor) -> torch.memory_format:
    is_last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    return torch.channels_last if is_last else torch.contiguous_format


class _Part(NamedTuple):
    """Augmentations that run together: several that the kernels run, or one that the user has written."""

    op: Any  # the script's operation; None if kernels run this part
    plan: Any  # a ``native.AugmentPlan``; None if ``op`` is given
    end: int  # the end of the part's columns
    shape: Shape  # the shape of images after this part
    dtype: torch.dtype  # the dtype after this part; between parts, images that are not bytes are float32


def _parts(ops: Ops, shape: Shape, dtype: torch.dtype) -> Iterator[_Part]:
    """Split augmentations into as few parts as possible. One that mixes images begins a new part."""
    steps: list[Step] = []
    begin = end = 0
    is_first = True
    for op in ops:
        own = op.steps(end - begin, shape)
        if steps and (own is None or op.mixes):
            yield _Part(None, plan_of(tuple(steps), end - begin), end, shape, dtype)
            steps, begin, is_first = [], end, False
            own = op.steps(0, shape)
        end += len(op.applied_names_for(shape[0]))
        shape, dtype = op.shape_after(shape), op.dtype_after(dtype)
        if own is None:
            yield _Part(op, None, end, shape, dtype)
            begin, is_first = end, False
        else:
            steps += own
    if steps or is_first:
        yield _Part(None, plan_of(tuple(steps), end - begin), end, shape, dtype)


def on_processor(ops: Ops, images: Tensor, applied: Float64Array, memory: SlotPool) -> Tensor:
    """Augment images on the CPU.  The native core runs the augmentations that it implements, and tensor
    operations run the others.

    Each image goes through the whole chain while it is in the CPU's cache.  New images reuse ``memory``,
    because allocating new memory takes longer than most augmentations.
    """
    is_last, begin = _layout(images) is torch.channels_last, 0
    # Kernels write to tensors that are created here, outside the caller's gradient and inference modes.
    with torch.inference_mode(False), torch.no_grad():
        images = images.detach()
        parts = list(_parts(ops, tuple(images.shape[1:]), images.dtype))
        for part in parts:
            rows = np.ascontiguousarray(applied[:, begin : part.end])
            dtype = part.dtype if part is parts[-1] or part.dtype == torch.uint8 else torch.float32
            if part.op is not None:
                of_bytes = images.dtype == torch.uint8
                with torch.autocast("cpu", enabled=False):  # as on devices
                    columns = part.op.columns(torch.from_numpy(rows.astype(np.float32)))
                    images = part.op.on_tensors(images.float(), columns, of_bytes).to(dtype)
            else:
                out = _empty((len(images), *part.shape), dtype, is_last, memory)
                elements = _ELEMENTS[images.dtype], _ELEMENTS[dtype]
                run_plan(part.plan, rows, _array(images), _array(out), elements, torch.get_num_threads())
                images = out
            begin = part.end
    return images


def _array(images: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's memory as an array. 16-bit floats become int16, because NumPy has no bfloat16."""
    halves = images.dtype in (torch.float16, torch.bfloat16)
    found: npt.NDArray[Any] = (images.view(torch.int16) if halves else images).numpy()
    return found


def _empty(shape: Sequence[int], dtype: torch.dtype, is_last: bool, memory: SlotPool) -> Tensor:
    count, channels, height, width = shape
    values = torch.from_numpy(memory.take((math.prod(shape) * dtype.itemsize,), np.uint8)).view(dtype)
    if is_last:
        return values.view(count, height, width, channels).permute(0, 3, 1, 2)
    return values.view(count, channels, height, width)


# ---- augmentations that are applied to some of the images --------------------------------------------


class RandomApply(BatchTransform):
    """Apply augmentations to some images, volumes or sequences, and leave all other samples unchanged.

    Args:
        ops: one augmentation or several augmentations, which must keep the size and the dtype.
        p: the probability that a sample is changed, from 0 to 1.
    """

    # RandomApply has the kind of its operations. Its operations run by ``steps`` on the CPU. On other devices
    # they run by ``on_tensors`` for images, by ``on_canvas`` for volumes and by ``onto`` for motion.

    def __init__(self, ops: Augmentation | Sequence[Augmentation], p: float = 0.5) -> None:
        self.ops = checked_ops([ops] if isinstance(ops, Augmentation) else ops, "RandomApply")
        self.p = probability(p)
        for op in self.ops:
            if op.mixes:
                raise AugmentError(
                    f"RandomApply cannot apply {op} to some of the {op.kind} only: it mixes all of a batch"
                )
        self._within = self.ops
        self.draws, self.names = self.draws_for(1), self.names_for(1)
        self.applied_names = self.applied_names_for(1)
        self.kind, self.chain_type = kind_of(self.ops).kind, kind_of(self.ops).chain_type
        self._chain = self.chain_type([self], "RandomApply")
        self.ranks = tuple(rank for rank in (3, 4, 5) if all(rank in op.ranks for op in self.ops))

    def draws_for(self, channels: int) -> int:
        found: int = 1 + sum(op.draws_for(channels) for op in self.ops)
        return found

    def names_for(self, channels: int) -> tuple[str, ...]:
        return ("is_applied", *_nested([op.names_for(channels) for op in self.ops]))

    def applied_names_for(self, channels: int = 1) -> tuple[str, ...]:
        return ("is_applied", *_nested([op.applied_names_for(channels) for op in self.ops]))

    def check(self, shape: Sequence[int]) -> None:
        for op in self.ops:
            op.check(shape)
            if op.shape_after(tuple(shape[1:])) != tuple(shape[1:]):
                raise AugmentError(
                    f"RandomApply cannot apply {op} to some of the {op.kind} only: it changes their size"
                )

    def size_before(self, size: tuple[int, ...]) -> tuple[int, ...]:
        for op in reversed(self.ops):
            size = op.size_before(size)
        return size

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        for op in self.ops:
            if op.dtype_after(dtype) != dtype:
                hint = f": give {op.kind}.float()" if op.kind == "volumes" else ""
                raise AugmentError(
                    f"RandomApply cannot apply {op} to some of the {op.kind} only: it changes their "
                    f"dtype{hint}"
                )
        return dtype

    def table(self, u: Float64Array, shape: Shape) -> Float64Array:
        return self._chain.layout(self._chain.ops, shape[0]).drawn(u, shape)

    def applied(self, table: Float64Array, shape: Shape) -> Float64Array:
        return self._chain.layout(self._chain.ops, shape[0]).computed(table, shape)

    def moves(self, table: Float64Array, shape: Shape, of_points: bool) -> Moves | None:
        if self.for_masks() is None:
            return None
        matrices, clips = moves_of(self.ops, table[:, 1:], shape, of_points)
        is_applied = table[:, :1] > 0
        return Moves(np.where(is_applied, matrices, identity(len(table))), clips & is_applied[:, 0])

    def for_masks(self) -> BatchTransform | None:
        twins = [op.for_masks() for op in self.ops]
        if not any(twins):
            return None
        return RandomApply([twin or _Untouched(op) for twin, op in zip(twins, self.ops, strict=True)])

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._chain = self.chain_type([self], "RandomApply")

    def steps(self, column: int, shape: Shape) -> list[Step] | None:
        inner: list[Step] = []
        for op, own in columns_of(self.ops, shape[0], of_applied=True):
            steps = op.steps(column + 1 + own.start, shape)
            if steps is None:
                return None
            inner += steps
        return [Step("skip", column, (len(inner),)), *inner]

    def on_canvas(self, canvas: Any, row: Float64Array) -> None:
        for op, own in columns_of(self.ops, canvas.channels, of_applied=True) if row[0] else ():
            op.on_canvas(canvas, row[1:][own])

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        changed = images
        for at, op in enumerate(self.ops):
            own = {name: columns[f"{at}.{name}"] for name in op.applied_names_for(1)}
            changed = op.on_tensors(changed, own, of_bytes)
        return chosen(columns["is_applied"], changed, images)

    def onto(self, sequences: Any, rows: Float64Array) -> None:
        for op, own in columns_of(self.ops, sequences.joints, of_applied=True):
            op.onto(sequences, np.where(rows[:, :1] > 0, rows[:, 1:][:, own], op.neutral()))

    def neutral(self) -> Float64Array:
        """Return the numbers to apply that leave sequences unchanged."""
        return np.zeros(len(self.applied_names_for(1)))

    def extra_repr(self) -> str:
        return f"{list(self.ops)}, p={self.p}"


def _nested(names: Sequence[Sequence[str]]) -> list[str]:
    return [f"{at}.{name}" for at, own in enumerate(names) for name in own]


class _Untouched(BatchTransform):
    """A placeholder for an augmentation. It has the same columns in the table, and changes nothing."""

    def __init__(self, op: Augmentation) -> None:
        self._op, self.names, self.kind = op, op.applied_names_for(1), op.kind

    def applied_names_for(self, channels: int = 1) -> tuple[str, ...]:
        return self._op.applied_names_for(channels)

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return []

    def on_canvas(self, canvas: Any, row: Float64Array) -> None:
        """Leave a volume unchanged."""

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        return images


def checked_ops(ops: Sequence[Augmentation], name: str) -> tuple[Any, ...]:
    """Return the augmentations. Raise an error if an item is no augmentation, or if their kinds differ."""
    for op in ops:
        if not isinstance(op, Augmentation):
            raise AugmentError(f"{name} takes augmentations from fastpipe.augment, got {type(op).__name__}")
    if len({op.kind for op in ops}) > 1:
        told = ", ".join(f"{type(op).__name__} of {op.kind}" for op in ops)
        raise AugmentError(f"{name} takes augmentations of one kind, got {told}")
    return tuple(ops)


def kind_of(ops: Sequence[Augmentation]) -> Any:
    """Return the first augmentation, as all are of one kind. Return ``BatchTransform`` if ``ops`` is
    empty."""
    return ops[0] if ops else BatchTransform


# ---- masks, boxes and keypoints --------------------------------------------------------------------


def follow(ops: Ops, table: Tensor, shape: Sequence[int], others: Sequence[Any]) -> Sequence[Any]:
    """Move masks, boxes and keypoints as images (N, C, H, W) were moved, with torchvision's rules.

    The annotations may be in dictionaries, and in lists with one item per image.  All other objects are
    returned unchanged.
    """
    kinds = sys.modules.get("torchvision.tv_tensors")  # not imported: no annotation is a ``TVTensor``
    if kinds is None or not any(_has_any(other, kinds.TVTensor) for other in others):
        return others
    for op in ops:
        if op.mixes:
            raise AugmentError(f"{op} cannot transform masks, boxes and keypoints: mix the images separately")
    return untraced(lambda: [_Follower(ops, table.numpy(), shape, kinds).changed(other) for other in others])


def _has_any(thing: Any, kind: type) -> bool:
    if isinstance(thing, dict):
        return any(_has_any(value, kind) for value in thing.values())
    if isinstance(thing, (list, tuple)):
        return any(_has_any(value, kind) for value in thing)
    return isinstance(thing, kind)


class _Follower:
    """The annotations of one batch, which move as the batch's images moved."""

    def __init__(self, ops: Ops, table: Float64Array, shape: Sequence[int], kinds: Any) -> None:
        self.ops, self.table, self.kinds = ops, table, kinds
        self.count, self.shape, self.size = shape[0], tuple(shape[1:]), (shape[2], shape[3])

    def changed(self, thing: Any, at: int | None = None) -> Any:
        """Move the annotations ``thing`` of all images, in order, or of the image ``at`` if it is given."""
        if isinstance(thing, dict):
            return {name: self.changed(value, at) for name, value in thing.items()}
        if isinstance(thing, (list, tuple)):
            if at is not None:
                return type(thing)(self.changed(value, at) for value in thing)
            if len(thing) != self.count and _has_any(thing, self.kinds.TVTensor):
                raise AugmentError(
                    f"there are {self.count} images, and {len(thing)} of what goes along with them"
                )
            return type(thing)(self.changed(value, number) for number, value in enumerate(thing))
        if not isinstance(thing, (self.kinds.Mask, self.kinds.KeyPoints, self.kinds.BoundingBoxes)):
            return thing
        values = thing.as_subclass(Tensor)
        if at is not None:
            return self._moved(thing, values[None], slice(at, at + 1), is_one=True)
        if isinstance(thing, self.kinds.BoundingBoxes):
            raise AugmentError("boxes of a batch come as a list, with BoundingBoxes for each image")
        if len(thing) != self.count:
            raise AugmentError(
                f"there are {self.count} images, and {type(thing).__name__} of shape {tuple(thing.shape)}"
            )
        return self._moved(thing, values, slice(None))

    def _moved(self, thing: Any, values: Tensor, rows: slice, is_one: bool = False) -> Any:
        """Move a ``TVTensor`` as the images in ``rows`` moved; ``values`` are its values as a batch."""
        is_mask, further = isinstance(thing, self.kinds.Mask), {}
        size = tuple(thing.shape[-2:] if is_mask else thing.canvas_size)
        if size != self.size:
            raise AugmentError(
                f"{type(thing).__name__} is of images of {size[0]} by {size[1]} pixels, which are of "
                f"{self.size[0]} by {self.size[1]} here"
            )
        if is_mask:
            found = self._of_masks(values, rows)
        else:
            further["canvas_size"] = shape_after(self.ops, self.shape)[1:]
            is_points = isinstance(thing, self.kinds.KeyPoints)
            found = self._of_points(values, rows) if is_points else self._of_boxes(thing, values, rows)
        return self.kinds.wrap(found[0] if is_one else found, like=thing, **further)

    @cached_property
    def _mask_chain(self) -> tuple[Ops, Float64Array]:
        """The augmentations that move masks, and the numbers that they apply."""
        twins, columns = for_masks(self.ops, self.shape[0])
        return twins, applied_table(self.ops, self.table, self.shape)[:, columns]

    def _of_masks(self, masks: Tensor, rows: slice) -> Tensor:
        chain, applied = self._mask_chain
        # float32 holds class numbers and object numbers up to 2**24 exactly.
        planes = masks.reshape(len(masks), -1, *self.size).float()
        if planes.device.type == "cpu":
            found = on_processor(chain, planes, applied[rows], SlotPool(0))
        else:
            found = on_device(chain, planes, uploaded(applied[rows].astype(np.float32), planes.device))
        return found.to(masks.dtype).reshape(*masks.shape[:-2], *found.shape[-2:])

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

    def _moves(self, of_points: bool) -> Iterator[tuple[Any, Shape]]:
        """Yield the ``Moves`` of each geometric operation, and the images' size after the operation."""
        shape = self.shape
        for op, own in columns_of(self.ops, shape[0]):
            moves, shape = op.moves(self.table[:, own], shape, of_points), op.shape_after(shape)
            if moves is not None:
                yield moves, shape[1:]


def _mapped(points: Tensor, matrices: Float64Array) -> Tensor:
    """Map points (N, K, 2) with matrices (N, 6)."""
    m = uploaded(matrices.astype(np.float32), points.device).view(-1, 1, 2, 3)
    found: Tensor = (m[..., :2] * points.unsqueeze(2)).sum(3) + m[..., 2]
    return found
