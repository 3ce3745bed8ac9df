"""How much memory and disk there is to use, also inside a container."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["free_disk", "free_memory"]

_UNLIMITED = 1 << 60  # what version 1 of cgroups says for "no limit" is just below 2**63


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory that could still be used: the machine's, or what the cgroup leaves of them.

    Pages of files that are only cached count as free, in the machine as in the cgroup.

    Args:
        root: where ``proc`` and ``sys`` lie.

    Returns:
        The bytes; None where nobody says.
    """
    known = [_machine(root), _cgroup_2(root), _cgroup_1(root)]
    return min((value for value in known if value is not None), default=None)


def free_disk(descriptor: int) -> int:
    """Bytes that this user can still write to the file system of an open file or folder."""
    status = os.fstatvfs(descriptor)
    return status.f_bavail * status.f_frsize


def _machine(root: Path) -> int | None:
    table = _table(root / "proc/meminfo")
    available = table.get("MemAvailable:")
    return None if available is None else available * 1024


def _cgroup_2(root: Path) -> int | None:
    folder = root / "sys/fs/cgroup"
    limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
    if limit is None or used is None:
        return None
    return max(0, limit - used + _table(folder / "memory.stat").get("inactive_file", 0))


def _cgroup_1(root: Path) -> int | None:
    folder = root / "sys/fs/cgroup/memory"
    limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    return max(0, limit - used + _table(folder / "memory.stat").get("total_inactive_file", 0))


def _number(path: Path) -> int | None:
    """A file's number; None without a file, or where it stands for no limit."""
    try:
        value = int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None
    return value if value < _UNLIMITED else None


def _table(path: Path) -> dict[str, int]:
    """A file of lines "name number …"."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1])
    return found
