"""How many threads this process may use without taking somebody else's cores."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["available_cpus", "default_threads", "local_ranks"]


def available_cpus() -> int:
    """Cores that this process may use: its affinity, bounded by the cgroup's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cgroup_quota(Path("/sys/fs/cgroup"))
    return max(1, min(cores, quota) if quota else cores)


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


def _cgroup_quota(root: Path) -> int | None:
    """Whole cores that the cgroup grants (rounded up), or None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()[:2]  # version 2
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()  # version 1
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    try:
        if int(quota) <= 0 or int(period) <= 0:
            return None
        return -(-int(quota) // int(period))
    except ValueError:  # "max"
        return None
