"""How much memory and disk there is to use, also inside a container."""

from __future__ import annotations

import os
from pathlib import Path

from fastpipe._machine import ControlGroups, numbers_by_name

__all__ = ["free_disk", "free_memory"]

_UNLIMITED = 1 << 60  # what version 1 of cgroups says for "no limit" is just below 2**63


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory that could still be used: the machine's, or what the cgroups leave of them.

    Pages of files that are only cached count as free, in the machine as in the cgroup.

    Args:
        root: where ``proc`` and ``sys`` lie.

    Returns:
        The bytes; None where nobody says.
    """
    available = numbers_by_name(root / "proc/meminfo").get("MemAvailable:")
    known = [None if available is None else available * 1024, ControlGroups(root).free_memory()]
    return min((value for value in known if value is not None), default=None)


def free_disk(descriptor: int) -> int:
    """Bytes that this user can still write to the file system of an open file or folder."""
    status = os.fstatvfs(descriptor)
    return status.f_bavail * status.f_frsize
