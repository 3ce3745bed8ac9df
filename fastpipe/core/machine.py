"""The number of processors, the memory and the disk space that this process may use."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path


def available_cpus() -> int:
    """Return the number of cores that this process may use, from its CPU affinity and cgroup quotas."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = ControlGroups().cores()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def default_threads(workers: int = 1) -> int:
    """Return the default number of threads for one process.

    The number is the available cores ÷ (ranks on this machine × ``workers``), at least 1.  ``workers`` is the
    number of worker processes that share the work of a rank.
    """
    return max(1, available_cpus() // (local_ranks() * max(1, workers)))


def local_ranks() -> int:
    """Return the number of ranks on this machine, from the launcher's ``LOCAL_WORLD_SIZE``; default 1."""
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1


# For cgroup versions 2 and 1: the file of the limit, the file of the usage, and the name of the cached part
# of the usage.
_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_USUAL = "/sys/fs/cgroup"
_UNLIMITED = 1 << 60  # version 1's value for "no limit" is just below 2**63


class ControlGroups:
    """Reads the limits of this process's cgroups, from the process's own group to the highest visible group.
    Versions 1 and 2 of cgroups are supported.  ``root`` is the folder that contains ``proc`` and ``sys``."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._own = _own_groups(root / "proc/self/cgroup")
        self._mounts = _mounts(root / "proc/self/mountinfo")

    def folders(self, controller: str) -> list[Path]:
        """Return the folders of the groups that limit ``controller``, beginning with the process's own group.
        ``controller`` is ``"cpu"``, ``"memory"`` or ``"pids"``."""
        found = []
        for name in ("", controller):  # version 2 has one tree for all controllers
            # If the mounts are unknown, assume the usual place.
            top, mount = self._mounts.get(name, ("/", f"{_USUAL}/{name}"))
            group = self._own.get(name, "")
            inner = group[len(top) :] if top != "/" and group.startswith(top) else group
            parts = [part for part in inner.split("/") if part not in ("", "..")]
            base = self._root / mount.lstrip("/")
            found += [base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
        return [folder for folder in found if folder.is_dir()]

    def least(self, controller: str, *names: str) -> int | None:
        """Return the lowest limit of all groups; None if no group has a limit.  ``names`` are the names of
        the file with the limit: in version 2, and in version 1."""
        values = [_number(folder / name) for folder in self.folders(controller) for name in names]
        return min((value for value in values if value is not None), default=None)

    def cores(self) -> float | None:
        """Return how many cores' time the groups allow this process to use; None if there is no limit."""
        found = []
        for folder in self.folders("cpu"):
            try:
                quota, period = map(int, (folder / "cpu.max").read_text().split()[:2])
            except (OSError, ValueError):  # no file, or "max"
                quota = _number(folder / "cpu.cfs_quota_us") or 0
                period = _number(folder / "cpu.cfs_period_us") or 0
            if quota > 0 and period > 0:
                found.append(quota / period)
        return min(found, default=None)

    def free_memory(self) -> int | None:
        """Return the free bytes of the group that has the fewest free bytes; None if there is no limit.
        Cached file pages count as free."""
        least = None
        for folder in self.folders("memory"):
            for limit_name, used_name, cached_name in _MEMORY:
                limit, used = _number(folder / limit_name), _number(folder / used_name)
                if limit is not None and used is not None:
                    left = max(0, limit - used + numbers_by_name(folder / "memory.stat").get(cached_name, 0))
                    least = left if least is None else min(least, left)
        return least

    def table(self, controller: str, name: str) -> dict[str, int]:
        """Return the numbers by name in a file of lines "name number", of the lowest group with this file."""
        tables = (numbers_by_name(folder / name) for folder in self.folders(controller))
        return next(filter(None, tables), {})


def numbers_by_name(path: Path) -> dict[str, int]:
    """Return the first number by name in a file of lines "name number …"; {} if the file does not exist."""
    found = {}
    for line in _lines(path):
        words = line.split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1])
    return found


def _own_groups(path: Path) -> dict[str, str]:
    """Return the process's group by controller.  For the group of version 2, the controller is ""."""
    found = {}
    for line in _lines(path):
        parts = line.split(":", 2)  # number:controllers:group
        if len(parts) == 3:
            found.update(dict.fromkeys(parts[1].split(","), parts[2]))
    return found


def _mounts(path: Path) -> dict[str, tuple[str, str]]:
    """Return the mounted group and the mount point for each controller."""
    found: dict[str, tuple[str, str]] = {}
    for line in _lines(path):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 5 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        names = [""] if kind[0] == "cgroup2" else re.split(",", kind[-1])
        for name in names:
            found.setdefault(name, (fields[3], fields[4]))
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return []


def _number(path: Path) -> int | None:
    """Return the number in a file; None if the file does not exist or its content means "no limit"."""
    try:
        value = int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None
    return value if 0 <= value < _UNLIMITED else None


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the free bytes of memory; None if unknown.  This is the smaller of the machine's and the
    cgroups' free memory.  Cached file pages count as free."""
    available = numbers_by_name(root / "proc/meminfo").get("MemAvailable:")
    known = [None if available is None else available * 1024, ControlGroups(root).free_memory()]
    return min((value for value in known if value is not None), default=None)


def free_disk(descriptor: int) -> int:
    """Return the bytes that this user can still write to the file system of an open file or folder."""
    status = os.fstatvfs(descriptor)
    return status.f_bavail * status.f_frsize
