"""Augmentations of images and spectrograms, run by the native core on the processor and by torch's operations
elsewhere."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastpipe.augment.base import FLOATS, Augmentation, Chain
from fastpipe.augment.following import follow
from fastpipe.augment.parameters import Float64Array, Parameters
from fastpipe.augment.reference import chain_reference
from fastpipe.augment.steps import Step, check_change, plan_of, run_plan
from fastpipe.augment.tables import Ops, Shape, uploaded
from fastpipe.core.native import native
from fastpipe.core.slots import SlotPool
from fastpipe.core.types import Key
from fastpipe.errors import AugmentError

__all__ = [
    "BatchTransform", "Columns", "ImageChain", "Moves", "Size", "Untouched", "chosen",
    "on_device", "on_processor",
]  # fmt: skip

# What is applied, where the images are: name → float32 tensor (N,).
Columns = Mapping[str, Tensor]
Size = tuple[int, int]  # height and width
_ELEMENTS = {
    torch.uint8: "uint8", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32",
}  # fmt: skip


class Moves(NamedTuple):
    """Where pixels go.

    Attributes:
        matrices: (N, 6): see ``matrices``.
        clips: (N,), whether boxes are cut off at the image's borders.
    """

    matrices: Float64Array
    clips: npt.NDArray[np.bool_]


class ImageChain(Chain):
    """Augmentations of images."""

    one = "image"
    shapes = ("(N, C, H, W)",)
    dtypes = (torch.uint8, *FLOATS)

    def wanted(self) -> Sequence[str]:
        takes_spectrograms = bool(self.ops) and all(3 in op.ranks for op in self.ops)
        return ["(N, F, T)", "(N, C, F, T)"] if takes_spectrograms else self.shapes

    def given(self, samples: Tensor, batch: Tensor, table: Tensor, others: Sequence[Any]) -> Any:
        if any(op.mixes for op in self.ops):
            others = [self._mixed_labels(others[0] if others else None, batch, table), *others[1:]]
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
        return follow(self.steps, table, shape, others, _followed_images)

    def referred(self, samples: Tensor, parameters: Sequence[Parameters]) -> Tensor:
        return chain_reference(self.ops, samples, parameters)

    def native_batch(
        self, shape: Sequence[int], key: Key, out: Tensor, places: npt.NDArray[np.int64] | None = None
    ) -> Any:
        """A ``native.AugmentBatch`` that changes images of bytes, given one by one, in any thread.

        Args:
            shape: of the batch, (N, C, H, W).
            key: of its samples; each becomes what it would be in the whole batch.
            out: (M, …), where images go.
            places: which of ``out`` each becomes; default: the one of its number.
        """
        rows = self.layout(True, shape[1]).computed(self.table(shape, None, key), tuple(shape[1:]))
        (part,) = _parts(self.steps, tuple(shape[1:]), torch.uint8)
        assert part.plan is not None  # there are only augmentations of fastpipe's, and none mixes
        elements = _ELEMENTS[torch.uint8], _ELEMENTS[out.dtype]
        return native.augment_batch(
            part.plan, rows, None, elements[0], _array(out), elements[1], shape[1:], places
        )

    check_change = staticmethod(check_change)

    def _mixed_labels(self, labels: Any, images: Tensor, table: Tensor) -> Tensor:
        next(op for op in self.steps if op.mixes).check_labels(labels, len(images))
        applied = torch.ops.fastpipe.applied(table, self.number, images.shape[1:], labels.is_cuda)
        applied, begin = applied.to(labels.device, non_blocking=True), 0
        for op in self.steps:
            end = begin + len(op.names_applied)
            if op.mixes:
                op.check_labels(labels, len(images))
                columns = dict(zip(op.names_applied, applied[:, begin:end].unbind(1), strict=True))
                labels = op.mixed_labels(labels, columns)
            begin = end
        mixed: Tensor = labels
        return mixed


class BatchTransform(Augmentation, ABC):
    """An augmentation of images; of spectrograms, where ``ranks`` says so.

    A class of your own needs ``on_tensors``, and ``table`` where it draws numbers.

    Attributes:
        channels: numbers of channels that it takes; empty for any.
    """

    kind = "images"
    chain_type: type[Chain] = ImageChain
    channels: tuple[int, ...] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Steps are those of the operation that it was; what a script has instead is done here, too.
        if "on_tensors" in cls.__dict__ and "steps" not in cls.__dict__:
            cls.steps = Augmentation.steps  # type: ignore[method-assign]

    def for_masks(self) -> BatchTransform | None:
        return None

    @abstractmethod
    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        """Changed images, by operations of torch's on the whole batch.

        Args:
            images: (N, C, H, W), float32.
            columns: what is applied, on the same device.
            of_bytes: whether they are whole numbers of 0 … 255, and have to be afterwards.
        """

    def columns(self, rows: Float64Array) -> Columns:
        """What is applied, (N, len(applied_names)), as ``on_tensors`` takes it."""
        values = torch.from_numpy(rows.astype(np.float32)).unbind(1)
        return dict(zip(self.names_applied, values, strict=True))

    def moves(self, table: Float64Array, shape: Shape, of_points: bool) -> Moves | None:
        """Where pixels go, for boxes and keypoints; None where they stay.

        Args:
            table: parameters.
            shape: of an image, (C, H, W).
            of_points: whether it is for keypoints, which torchvision mirrors as indices of pixels.
        """
        return None

    def check_labels(self, labels: Any, count: int) -> None:  # not all mix
        """Raise an error for labels that it cannot mix; called where it ``mixes``.

        Args:
            labels: what came with the images, or None.
            count: of the images.

        Raises:
            AugmentError: it says what was got, and what to do.
        """

    def mixed_labels(self, labels: Tensor, columns: Columns) -> Tensor:
        """Labels mixed as the images are; called where it ``mixes``.

        Args:
            labels: (N,), numbers of classes, or (N, classes), probabilities.
            columns: what is applied, on their device.

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


class Untouched(BatchTransform):
    """Leaves images as they are; stands for an operation that others of its table come after."""

    def __init__(self, op: Augmentation) -> None:
        self._op, self.names, self.kind = op, op.names_applied, op.kind

    def applied_names_for(self, channels: int) -> tuple[str, ...]:
        return self._op.applied_names_for(channels)

    def steps(self, column: int, shape: Shape) -> list[Step]:
        return []

    def on_canvas(self, canvas: Any, row: Float64Array) -> None:
        """Leave a volume as it is."""

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        return images


def chosen(which: Tensor, changed: Tensor, images: Tensor) -> Tensor:
    """Changed images where ``which``, (N,), is not 0, and the others as they were."""
    return torch.where(which.bool().view(-1, 1, 1, 1), changed, images)


# ---- as operations on batches --------------------------------------------------------------------


def on_device(ops: Ops, images: Tensor, applied: Tensor) -> Tensor:
    """Changed images, by torch's operations, on whichever device they are; torch.compile traces it.

    Args:
        ops: the chain.
        images: (N, C, H, W).
        applied: float32, on the same device.
    """
    dtype, begin = images.dtype, 0
    # Mixed precision is for the model: half a digit less of weights and coordinates would show.
    with torch.autocast(images.device.type, enabled=False):
        values = images.float()
        for op in ops:
            names = op.names_applied
            columns = {name: applied[:, begin + at] for at, name in enumerate(names)}
            values = op.on_tensors(values, columns, dtype == torch.uint8)
            dtype, begin = op.dtype_after(dtype), begin + len(names)
    return values.to(dtype, memory_format=_layout(images))


def _layout(images: Tensor) -> torch.memory_format:
    is_last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    return torch.channels_last if is_last else torch.contiguous_format


# ---- on the processor ----------------------------------------------------------------------------


class _Part(NamedTuple):
    """Operations that are done together.

    Attributes:
        op: the one of a script's own that it is; None of those that kernels do.
        plan: a ``native.AugmentPlan``; None for ``op``.
        end: of its columns.
        shape, dtype: of images afterwards; ``dtype`` is float32 where they are floats, and not at the end.
    """

    op: Any
    plan: Any
    end: int
    shape: Shape
    dtype: torch.dtype


def _parts(ops: Ops, shape: Shape, dtype: torch.dtype) -> Iterator[_Part]:
    """A chain in as few parts as can be: what mixes images begins one."""
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
    """Changed images, by the native core: each goes through the whole chain while it is in cache.

    Args:
        ops: the chain.
        images: (N, C, H, W), of the processor.
        applied: what is applied.
        memory: where the new images are: fresh memory costs more time than most augmentations.

    Raises:
        AugmentError: parameters are of pixels that an image does not have.
    """
    is_last, begin = _layout(images) is torch.channels_last, 0
    # Kernels write to tensors that are made here: they are in neither mode of the caller's.
    with torch.inference_mode(False), torch.no_grad():
        images = images.detach()
        parts = list(_parts(ops, tuple(images.shape[1:]), images.dtype))
        for part in parts:
            rows = np.ascontiguousarray(applied[:, begin : part.end])
            dtype = part.dtype if part is parts[-1] or part.dtype == torch.uint8 else torch.float32
            if part.op is not None:
                of_bytes = images.dtype == torch.uint8
                with torch.autocast("cpu", enabled=False):  # as on devices
                    images = part.op.on_tensors(images.float(), part.op.columns(rows), of_bytes).to(dtype)
            else:
                out = _empty((len(images), *part.shape), dtype, is_last, memory)
                _run(part.plan, rows, images, out)
                images = out
            begin = part.end
    return images


def _run(plan: Any, rows: Float64Array, images: Tensor, out: Tensor) -> None:
    """Change images by a plan, in as many threads as torch uses."""
    elements = _ELEMENTS[images.dtype], _ELEMENTS[out.dtype]
    run_plan(plan, rows, _array(images), _array(out), elements, torch.get_num_threads())


def _followed_images(ops: Ops, images: Tensor, applied: Float64Array) -> Tensor:
    """Masks, (N, K, H, W), changed as images were."""
    if images.device.type == "cpu":
        return on_processor(ops, images, applied, SlotPool(0))
    return on_device(ops, images, uploaded(applied.astype(np.float32), images.device))


def _array(images: Tensor) -> npt.NDArray[Any]:
    """A tensor's memory; NumPy knows nothing of bfloat16."""
    halves = images.dtype in (torch.float16, torch.bfloat16)
    found: npt.NDArray[Any] = (images.view(torch.int16) if halves else images).numpy()
    return found


def _empty(shape: Sequence[int], dtype: torch.dtype, is_last: bool, memory: SlotPool) -> Tensor:
    count, channels, height, width = shape
    values = torch.from_numpy(memory.take((math.prod(shape) * dtype.itemsize,), np.uint8)).view(dtype)
    if is_last:
        return values.view(count, height, width, channels).permute(0, 3, 1, 2)
    return values.view(count, channels, height, width)
