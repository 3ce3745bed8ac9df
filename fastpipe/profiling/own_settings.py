"""Advice about a ``DataLoader``'s own settings, which follows from what was seen of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from fastpipe.core.text import in_duration
from fastpipe.profiling.candidate import GAIN, place_of
from fastpipe.profiling.copying import Copies
from fastpipe.profiling.findings import Advice
from fastpipe.profiling.report import Report
from fastpipe.profiling.watching import Watched, processes_of

__all__ = ["pin_advice", "start_advice"]

_START_SHARE = 0.03  # of an epoch, from which on it is told how long its workers take to start


def pin_advice(watched: Watched, report: Report, copies: Copies | None) -> Iterator[Advice]:
    """For batches that lie where a GPU cannot copy them from by itself.

    Args:
        watched: the loader.
        report: what is known.
        copies: of a batch to the GPU.
    """
    step_s = report.step_s
    if copies is None or getattr(watched.loader, "pin_memory", True):
        return
    left = step_s - (copies.as_it_is_s - copies.pinned_s)
    if step_s > GAIN * left:
        yield Advice(
            f"pin_memory=True{place_of(watched)}, and .to(device, non_blocking=True)",
            f"a batch is copied to the GPU in {in_duration(copies.as_it_is_s)}, from pinned memory in "
            f"{in_duration(copies.pinned_s)}",
            left,
        )  # fmt: skip


def start_advice(watched: Watched, report: Report) -> Iterator[Advice]:
    """For workers that are started anew for each epoch, where that is a part of it that counts.

    Args:
        watched: the loader.
        report: what is known.
    """
    loader = watched.loader
    starts, steps = watched.loop.epoch_starts, _length(loader)
    if getattr(loader, "persistent_workers", True) or not processes_of(loader):
        return
    if len(starts) < 2 or steps is None or not report.step_s:
        return
    lost = statistics.median(starts[1:]) - report.step_s
    share = lost / (lost + steps * report.step_s)
    if share > _START_SHARE:
        yield Advice(
            f"persistent_workers=True{place_of(watched)}",
            f"an epoch of {steps} steps begins with {in_duration(lost)} in which workers start, "
            f"{share:.0%} of it",
        )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # of what is iterated without an end that is known
        return None
