"""Scripts that tests run and kill, and their workers."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from generated import environment

from fastpipe.core.processes import process_tree


def started(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start Python with arguments; what it prints comes through pipes."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    return subprocess.Popen([sys.executable, *map(str, arguments)], **{**pipes, **options})


def ran(
    *arguments: object, command: Sequence[str] = (), timeout: float = 150, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments, by way of a command such as ``on_small_disk``; what it printed, and its exit code."""
    given = [*command, sys.executable, *map(str, arguments)]
    return subprocess.run(
        given, capture_output=True, text=True, timeout=timeout, env=environment(), check=False, **options
    )


def wait_until(when: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until something is so; an error if the process ends before."""
    while not when():
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)


def on_small_disk(folder: object, size: str) -> list[str]:
    """Return a command that runs another one with a small disk at a folder, which no other process sees."""
    unshare, mount = shutil.which("unshare"), f"mount -t tmpfs -o size={size} tmpfs {folder}"
    if unshare is None or subprocess.run([unshare, "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("run it as root, with util-linux installed: it mounts a small disk for one process")
    return [unshare, "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]


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
