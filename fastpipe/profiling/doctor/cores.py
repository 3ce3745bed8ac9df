"""How many processors this process really has."""

from __future__ import annotations

import os
from collections.abc import Iterator

from fastpipe.core.machine import ControlGroups, local_ranks
from fastpipe.core.text import counted, in_duration
from fastpipe.profiling.doctor.findings import Examined, Finding, ok, warning

__all__ = ["check"]

_TOPIC = "cores"
_OFTEN = 0.01  # of the periods in which a group had work


def check(examined: Examined) -> Iterator[Finding]:
    """Look at affinity, quota, throttling, load and the ranks beside this one."""
    groups = ControlGroups()
    installed, affinity, quota = os.cpu_count() or 1, _affinity(), groups.cores()
    cores = affinity if quota is None else min(affinity, quota)
    yield from _count(installed, affinity, quota)
    yield from _throttling(groups.table("cpu", "cpu.stat"))
    yield from _load(installed)
    ranks = local_ranks()
    if ranks > 1:
        text = f"{ranks} ranks on this machine (LOCAL_WORLD_SIZE): {cores / ranks:.3g} cores for each"
        if cores < ranks:
            yield warning(_TOPIC, text, "start fewer ranks on this machine, or ask for more cores")
        else:
            yield ok(_TOPIC, text)


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count(installed: int, affinity: int, quota: float | None) -> Iterator[Finding]:
    limit = "no quota" if quota is None else f"a quota of {quota:.3g}"
    cores = affinity if quota is None else min(affinity, quota)
    text = (
        f"cores to use: {cores:.3g}; os.cpu_count() says {installed}, affinity gives {affinity}, and there "
        f"is {limit}"
    )
    if cores < installed:
        yield warning(
            _TOPIC,
            text,
            f"take num_workers and thread counts not from os.cpu_count(), but as {max(1, int(cores))}",
        )
    else:
        yield ok(_TOPIC, text)


def _throttling(stat: dict[str, int]) -> Iterator[Finding]:
    periods, throttled = stat.get("nr_periods", 0), stat.get("nr_throttled", 0)
    if not periods:
        yield ok(_TOPIC, "nothing is throttled: there are no periods in cpu.stat")
        return
    lost = stat.get("throttled_usec", 0) / 1e6 or stat.get("throttled_time", 0) / 1e9
    text = f"throttled in {throttled:,} of {periods:,} periods so far, for {in_duration(lost)}"
    if throttled > _OFTEN * periods:
        yield warning(_TOPIC, text, "ask for more cores, or use no more threads and workers than those")
    else:
        yield ok(_TOPIC, text)


def _load(installed: int) -> Iterator[Finding]:
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):
        return
    text = f"load of the last minute: {load:.1f}, on a machine of {counted(installed, 'core')}"
    if load > installed:
        yield warning(
            _TOPIC,
            f"{text}: others are using them, and what is measured here is too low",
            "run this again when the machine is free; for a training have cores of its own",
        )
    else:
        yield ok(_TOPIC, text)
