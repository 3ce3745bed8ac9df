"""pyfive: the HDF5 format read in Python, a chunk to a thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.children.protocol import Batches, PeerError, Stream, TableJob
from benchmarks.peers.children.windows import batched, endless_windows

__all__ = ["batches", "stream"]


def stream(job: TableJob) -> Stream:
    """Batches of rows, shuffled a window of chunks at a time.

    Raises:
        PeerError: it cannot read this file.
    """
    import pyfive

    try:
        dataset = pyfive.File(job.path)[job.dataset]
        dataset[0:1]
    except Exception as error:  # whatever it stumbles over
        raise PeerError(f"cannot read the file: {type(error).__name__}: {error}") from None
    # A window waits, and what is left of the one before.
    ahead = math.ceil(2 * job.group * job.window / job.batch_size)
    return Stream(batches(job, lambda first, last: dataset[first:last]), ahead, ("pyfive", "numcodecs"))


def batches(job: TableJob, read: Callable[[int, int], npt.NDArray[Any]]) -> Batches:
    """Windows of chunks, the next of which is read while the present one is handed out.

    Args:
        job: what to load.
        read: the rows from one number to another; called from several threads.
    """
    with ThreadPoolExecutor(job.threads) as pool:
        yield from batched(_windows(job, read, pool), job.batch_size)


def _windows(
    job: TableJob, read: Callable[[int, int], npt.NDArray[Any]], pool: ThreadPoolExecutor
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield for each window its values, places and rows, as `batched` takes them."""
    count, group = job.shape[0], job.group
    order = endless_windows(count, group, job.window, np.random.default_rng(0))

    def fill(out: npt.NDArray[Any], first: int) -> None:
        out[:] = read(first, first + len(out))

    def begin() -> tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.int64], list[Future[None]]]:
        groups, rows = next(order)
        values = np.empty((len(rows), *job.shape[1:]), job.dtype)
        starts, tasks, place = np.zeros(-(-count // group), np.int64), [], 0
        for one in groups:
            size = min(group, count - one * group)
            starts[one] = place
            tasks.append(pool.submit(fill, values[place : place + size], one * group))
            place += size
        return values, starts[rows // group] + rows % group, rows, tasks

    ahead = begin()
    while True:
        values, places, rows, tasks = ahead
        ahead = begin()
        for task in tasks:
            task.result()
        yield values, places, rows
