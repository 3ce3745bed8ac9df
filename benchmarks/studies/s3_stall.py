"""Measure how long training waits for data in its first epoch, for a given rate of steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.cases.s3_rows import Bucket, EmptyStages, MountRow, first_loader
from fastpipe.bench.runner import timeline_of, touch

__all__ = ["Stalled", "fast_stall", "mount_stall", "stalls"]


RATE = 300.0  # images in a second that a step takes


@dataclass(frozen=True)
class Stalled:
    """A loader whose stall is measured.

    Attributes:
        key, label: as of its row.
        opened: gives a loader that has nothing yet, by the number of the run.
    """

    key: str
    label: str
    opened: Callable[[int], AbstractContextManager[Any]]


def fast_stall(key: str, label: str, bucket: Bucket, batch_size: int, stages: EmptyStages | None) -> Stalled:
    """fastpipe's, over whole first epochs; arguments as of `FirstEpochs`."""

    def opened(run: int) -> AbstractContextManager[Any]:
        return first_loader(bucket, batch_size, run, None if stages is None else stages.next())

    return Stalled(key, label, opened)


def mount_stall(row: MountRow, label: str, count: int) -> Stalled:
    """A row's over a mount.

    Args:
        row: which.
        label: its name in tables.
        count: images of a run, in whole batches.
    """

    @contextmanager
    def opened(run: int) -> Iterator[Any]:
        yield row.batches(count)

    return Stalled(row.key, label, opened)


def stalls(
    loaders: Sequence[Stalled], runs: int, rate: float = RATE, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Go through an epoch of each loader, run after run, and sleep for the time of a step after each batch.

    Args:
        loaders: which.
        runs: how often each.
        rate: images in a second that a step takes.
        say: told what is measured.

    Returns:
        ``rate``, and ``rows`` of ``key``, ``label``, ``images``, ``raw`` and ``median``: the share of the
        epoch's time in which the step waited, from asking for the iterator on.
    """
    rows = [{"key": one.key, "label": one.label, "images": 0, "raw": [], "median": 0.0} for one in loaders]  # type: list[dict[str, Any]]
    for run in range(runs):
        for one, row in zip(loaders, rows, strict=True):
            say(f"stall at {rate:g} images/s: {one.label}")
            with one.opened(run) as loader:
                row["images"], share = stall_of(loader, rate)
                del loader
            row["raw"].append(round(share, 4))
    for row in rows:
        row["median"] = statistics.median(row["raw"])
    return {"rate": rate, "rows": rows}


def stall_of(loader: Any, rate: float) -> tuple[int, float]:
    """Images of an epoch, and the share of its time in which the step waited."""
    images = 0

    def step(batch: Any) -> float:
        nonlocal images
        count = touch(batch)
        images += count
        return count / rate

    share = timeline_of(loader, step).share
    return images, share
