"""How many threads this process may use without taking somebody else's cores."""

from __future__ import annotations

import math
import os

from fastpipe._cgroups import Groups

__all__ = ["available_cpus", "default_threads", "local_ranks"]


def available_cpus() -> int:
    """Cores that this process may use: its affinity, bounded by the quotas of the cgroups that it is in."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = Groups().cores()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def default_threads(workers: int = 1) -> int:
    """Threads for one process: cores ÷ (ranks on this machine × worker processes).

    Args:
        workers: how many worker processes share the work; 1 for this process alone.
    """
    return max(1, available_cpus() // (local_ranks() * max(1, workers)))


def local_ranks() -> int:
    """Ranks on this machine, as the launcher says in ``LOCAL_WORLD_SIZE``; 1 without one."""
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1
