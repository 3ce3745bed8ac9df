"""TensorStore: chunks decoded side by side into a pool of a given size, the next batch ahead."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peers.children.protocol import Batches, PeerError, Stream, VolumeJob
from fastpipe.bench.samples import box_at, start_of

__all__ = ["stream"]


_AHEAD = 2  # batches that are being read while one is handed out


def stream(job: VolumeJob) -> Stream:
    """Batches of random patches.

    Raises:
        PeerError: it cannot read these arrays.
    """
    numbers = itertools.count()
    try:
        arrays = _opened(job)
        if job.keeps_all:
            for array in arrays:
                array.read().result()
    except ValueError as error:
        raise PeerError(f"cannot read the arrays: {str(error).splitlines()[0]}") from None
    if job.keeps_all:
        endless = _batches(job, arrays, numbers, None)
        return Stream(endless, _AHEAD, ("tensorstore",))
    renewed = functools.partial(_epochs, job, numbers)
    return Stream(renewed(), 0, ("tensorstore",), renewed=renewed)


def _opened(job: VolumeJob) -> list[Any]:
    """The arrays, of which nothing is remembered yet."""
    import tensorstore

    limits = {"total_bytes_limit": job.memory_bytes}
    threads = {"limit": job.threads}
    context = tensorstore.Context({"cache_pool": limits, "data_copy_concurrency": threads})
    opened = []
    for path in (job.values, job.labels):
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
        # What was decoded is not compared with the files again: they do not change.
        spec["recheck_cached_data"] = "open"
        opened.append(tensorstore.open(spec, context=context, read=True).result())
    return opened


def _epochs(job: VolumeJob, numbers: Iterator[int]) -> Batches:
    """Epochs that each begin with nothing remembered; the arrays of the first are open when this returns."""
    opened = [_opened(job)]

    def batches() -> Batches:
        while True:
            arrays = opened.pop() if opened else _opened(job)
            yield from _batches(job, arrays, numbers, job.epoch // job.batch_size)

    return batches()


def _batches(job: VolumeJob, arrays: list[Any], numbers: Iterator[int], count: int | None) -> Batches:
    """So many batches, or without end; none is begun that will not be handed out."""
    import tensorstore

    todo = itertools.count() if count is None else iter(range(count))

    def begin() -> tuple[list[Any], list[Any], list[Any]]:
        starts = [start_of(job.shape, job.patch, next(numbers)) for _ in range(job.batch_size)]
        outs = [np.empty((job.batch_size, *job.patch), array.dtype.numpy_dtype) for array in arrays]
        # Into the batch's memory, which is faster than to read each patch and put them together.
        writes = [
            tensorstore.array(out[row]).write(array[box_at(start, job.patch)])
            for out, array in zip(outs, arrays, strict=True)
            for row, start in enumerate(starts)
        ]
        return outs, starts, writes

    ahead = deque(begin() for _ in itertools.islice(todo, _AHEAD))
    while ahead:
        (values, labels), starts, writes = ahead.popleft()
        ahead.extend(begin() for _ in itertools.islice(todo, 1))
        for write in writes:
            write.result()
        yield values, (labels, np.stack(starts))
