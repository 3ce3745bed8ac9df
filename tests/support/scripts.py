"""Scripts that tests run and kill, and their workers."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastpipe.core.processes import process_tree

__all__ = ["Started", "children", "has_ended", "parent", "wait_until_ended"]


class Started(subprocess.Popen[str]):
    """A process that is killed if its ``with`` block fails, which would wait for its end for ever."""

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)


def children(pid: int) -> list[int]:
    """Return the processes below one, as the kernel reports them.

    psutil compares times at which processes were started, and so loses some when the clock is set meanwhile.
    """
    return process_tree(pid)[1:]


def parent(pid: int) -> int:
    """Return the parent of a process that runs."""
    return int(_fields(pid)[1])


def wait_until_ended(pids: Iterable[int]) -> None:
    """Wait for processes of which another process is the parent, or none any more: they may stay zombies."""
    for pid in pids:
        while not has_ended(pid):
            time.sleep(0.001)


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or a zombie."""
    try:
        return _fields(pid)[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
