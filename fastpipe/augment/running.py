"""Runs chains of augmentations: image by image in threads on the processor, else as operations on batches.

A chain's parameters are one table here, (N, columns), in which those of each operation come one after the
other; so are the numbers that are computed from them once, on the host, and applied then.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastpipe._intraop import do_without_helpers
from fastpipe.augment.canvas import Canvas
from fastpipe.augment.parameters import Float64Array
from fastpipe.engine.pool import ThreadPool
from fastpipe.engine.slots import SlotPool

if TYPE_CHECKING:
    from fastpipe.augment.base import Augmentation, BatchTransform

__all__ = [
    "applied_table", "by_image", "close_threads", "drawn_table", "dtype_after", "on_device", "on_processor",
    "run_all", "shape_after", "uploaded",
]  # fmt: skip

Ops = Sequence["BatchTransform"]
Steps = Sequence[tuple["BatchTransform", Float64Array]]
Shape = tuple[int, ...]
_PART = 1 << 19  # bytes of small images that are worked on together


def uploaded(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device; nobody waits for pinned memory's way there."""
    found = torch.from_numpy(np.require(array, requirements="W"))  # torch warns of what is read-only
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def drawn_table(ops: Sequence[Augmentation], u: Float64Array, shape: Shape) -> Float64Array:
    """The parameters of a chain: of each operation, by uniform numbers that no other has.

    Args:
        ops: the chain.
        u: (N, the sum of ``draws_for``).
        shape: of a sample.
    """
    tables, begin = [np.zeros((len(u), 0))], 0
    for op in ops:
        end = begin + op.draws_for(shape[0])
        tables.append(op.table(u[:, begin:end], shape))
        begin, shape = end, op.shape_after(shape)
    return np.concatenate(tables, axis=1)


def applied_table(ops: Sequence[Augmentation], table: Float64Array, shape: Shape) -> Float64Array:
    """What is applied for the parameters of a chain."""
    tables, begin = [np.zeros((len(table), 0))], 0
    for op in ops:
        end = begin + len(op.names_for(shape[0]))
        tables.append(op.applied(table[:, begin:end], shape))
        begin, shape = end, op.shape_after(shape)
    return np.concatenate(tables, axis=1)


def shape_after(ops: Sequence[Augmentation], shape: Shape) -> Shape:
    """The shape of a sample after a chain."""
    for op in ops:
        shape = op.shape_after(shape)
    return shape


def dtype_after(ops: Sequence[Augmentation], dtype: torch.dtype) -> torch.dtype:
    """The dtype of images after a chain."""
    for op in ops:
        dtype = op.dtype_after(dtype)
    return dtype


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


def on_processor(ops: Ops, images: Tensor, applied: Float64Array, memory: SlotPool) -> Tensor:
    """Changed images, by the processor's kernels: each goes through the whole chain while it is in cache.

    Args:
        ops: the chain.
        images: (N, C, H, W), of the processor.
        applied: what is applied.
        memory: where the new images are: fresh memory costs more time than most augmentations.
    """
    # The threads write to tensors that are made here: they are in neither mode of the caller's.
    with torch.inference_mode(False), torch.no_grad():
        images, begin = images.detach(), 0
        for mixes, group in groupby(ops, lambda op: op.mixes):
            part = list(group)
            end = begin + sum(len(op.names_applied) for op in part)
            if mixes:
                images = _mixed(part, images, applied[:, begin:end], memory)
            else:
                images = _image_by_image(part, images, applied[:, begin:end], memory)
            begin = end
    return images


def _mixed(ops: Ops, images: Tensor, applied: Float64Array, memory: SlotPool) -> Tensor:
    """Each image mixed with the one before it."""
    for op, rows in _parts(ops, applied):
        given = images
        out = _empty(given.shape, given.dtype, _layout(given) is torch.channels_last, memory)

        def run(
            number: int, op: BatchTransform = op, rows: Float64Array = rows, given: Tensor = given,
            out: Tensor = out,
        ) -> None:  # fmt: skip
            op.on_pair(given[number], given[number - 1], rows[number], out[number])

        run_all(run, len(given))
        images = out
    return images


def _image_by_image(ops: Ops, images: Tensor, applied: Float64Array, memory: SlotPool) -> Tensor:
    count, *sample = images.shape
    is_last = _layout(images) is torch.channels_last
    shape = (count, *shape_after(ops, tuple(sample)))
    out = _empty(shape, dtype_after(ops, images.dtype), is_last, memory)
    if all(op.does_batches for op in ops) and images.dtype == out.dtype == torch.float32 and not is_last:
        _in_parts(list(_parts(ops, applied)), images, out)
        return out
    change = by_image(ops, applied)
    run_all(lambda number: change(number, images[number], out[number]), count)
    return out


def by_image(ops: Ops, applied: Float64Array) -> Callable[[int, Tensor, Tensor], None]:
    """What changes the images of a batch one by one, in any thread.

    Args:
        ops: the chain, in which nothing is mixed.
        applied: what is applied, a row for each image.

    Returns:
        A function of an image's number, the image, (C, H, W), and where it goes when it is changed.
    """
    steps = list(_parts(ops, applied))

    def change(number: int, image: Tensor, out: Tensor) -> None:
        canvas, (channels, height, width) = _canvas(), image.shape
        box = steps[0][0].region(steps[0][1][number], (channels, height, width)) if steps else None
        try:
            canvas.begin(image, box or (0, 0, height, width), out)
            for op, rows in steps:
                op.on_canvas(canvas, rows[number])
            canvas.end()
        finally:
            canvas.let_go()

    return change


def _in_parts(steps: Steps, images: Tensor, out: Tensor) -> None:
    """Some images at a time, which are in cache together, through operations that take several."""
    count, nbytes = len(images), images[0].numel() * images.element_size()
    size = max(1, _PART // nbytes)
    source, values = images.numpy(), out.numpy()

    def run(number: int) -> None:
        part = slice(number * size, min((number + 1) * size, count))
        values[part] = source[part]
        for op, rows in steps:
            op.on_batch(values[part], rows[part])

    run_all(run, -(-count // size))


def run_all(run: Callable[[int], None], count: int, joins: bool = False) -> None:
    """Do so many numbered tasks, in as many threads as torch uses.

    Args:
        run: does a task.
        count: how many.
        joins: this thread does some of them, which takes less time where they are short; of those that call
            nothing of torch's, whose own threads would help here and be too many.
    """
    threads = torch.get_num_threads()
    if threads == 1 or count == 1:  # also a worker process, which has a processor to itself
        for number in range(count):
            run(number)
    elif joins:
        numbers = itertools.count()

        def some(_: int) -> None:
            while (number := next(numbers)) < count:
                run(number)

        job = _pool(threads).submit(some, min(threads, count) - 1)
        try:
            some(0)
        finally:
            job.wait()
    else:
        _pool(threads).submit(run, count).wait()


def _empty(shape: Sequence[int], dtype: torch.dtype, is_last: bool, memory: SlotPool) -> Tensor:
    count, channels, height, width = shape
    values = torch.from_numpy(memory.take((math.prod(shape) * dtype.itemsize,), np.uint8)).view(dtype)
    if is_last:
        return values.view(count, height, width, channels).permute(0, 3, 1, 2)
    return values.view(count, channels, height, width)


def _parts(ops: Ops, applied: Float64Array) -> Iterator[tuple[BatchTransform, Float64Array]]:
    begin = 0
    for op in ops:
        end = begin + len(op.names_applied)
        yield op, np.ascontiguousarray(applied[:, begin:end])
        begin = end


_own = threading.local()


def _canvas() -> Canvas:
    """This thread's."""
    found = getattr(_own, "canvas", None)
    if found is None:
        found = _own.canvas = Canvas()
    return found


_pools: dict[int, ThreadPool] = {}


def _pool(count: int) -> ThreadPool:
    """Threads, as many as torch takes for an operation; they begin with the first batch."""
    if count not in _pools:
        _pools[count] = ThreadPool(count, "fastpipe-augment", do_without_helpers)
    return _pools[count]


def close_threads() -> None:
    """End the threads; they begin anew with the next batch."""
    while _pools:
        _pools.popitem()[1].close()
