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
    return _least(
        root / "sys/fs/cgroup", _own_group(root, ""), "memory.max", "memory.current", "inactive_file"
    )


def _cgroup_1(root: Path) -> int | None:
    return _least(
        root / "sys/fs/cgroup/memory", _own_group(root, "memory"),
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
    )  # fmt: skip


def _least(top: Path, group: str, limit_name: str, used_name: str, cached_name: str) -> int | None:
    """What the tightest limit leaves, of those of a group and of the groups that it is in.

    A container usually sees its own group at the top; elsewhere, as in a job of Slurm, the
    top has no limit and the group lies deep below.
    """
    least = None
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for depth in range(len(parts) + 1):
        folder = top.joinpath(*parts[:depth])
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None:
            left = max(0, limit - used + _table(folder / "memory.stat").get(cached_name, 0))
            least = left if least is None else min(least, left)
    return least


def _own_group(root: Path, controller: str) -> str:
    """This process's group below the top: with version 1 of a controller, with version 2 of ""."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        parts = line.split(":", 2)  # number:controllers:group
        if len(parts) == 3 and controller in parts[1].split(","):
            return parts[2]
    return ""


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
