"""What the system lets this process have of descriptors, processes and address space."""

from __future__ import annotations

import os
from collections.abc import Iterator

from fastpipe.core.machine import ControlGroups, available_cpus
from fastpipe.core.text import counted, in_bytes
from fastpipe.profiling.doctor.findings import Examined, Finding, ok, warning

try:
    import resource
except ImportError:  # on Windows, which has no such limits
    resource = None  # type: ignore[assignment]

__all__ = ["check", "open_files", "processes"]

_TOPIC = "limits"
_CONNECTIONS = 128  # to a store, at most
_LIBRARIES = 128  # files, pipes and sockets of libraries
_FOR_WORKER = 4  # descriptors of tensors under way, times two for prefetching
_THREADS = 64
_INFINIBAND = "/dev/infiniband"


def check(examined: Examined) -> Iterator[Finding]:
    """Look at ulimits, and at the group's limit of processes."""
    if not _are_there():
        return
    cores = available_cpus()
    yield from open_files(*resource.getrlimit(resource.RLIMIT_NOFILE), cores)
    groups = ControlGroups()
    left = _processes_left(groups)
    yield from processes(left, cores)
    yield from _address_space(resource.getrlimit(resource.RLIMIT_AS)[0])
    if os.path.isdir(_INFINIBAND):  # else nothing that trains locks memory
        yield from _locked(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    core = resource.getrlimit(resource.RLIMIT_CORE)[0]
    size = "no core file" if core == 0 else "a core file" if core < 0 else f"a core file of {in_bytes(core)}"
    yield ok(_TOPIC, f"a worker that crashes leaves {size} (ulimit -c)")


def _are_there() -> bool:
    return resource is not None


def open_files(soft: int, hard: int, cores: int) -> Iterator[Finding]:
    """Descriptors against what loaders open.

    Args:
        soft, hard: the limits; below 0 for none.
        cores: how many workers there would be.
    """
    needed = _CONNECTIONS + _LIBRARIES + cores * _FOR_WORKER * 2
    limit = "without a limit" if soft < 0 else f"{soft:,} at most"
    text = (
        f"open files (ulimit -n): {limit}. {_CONNECTIONS} connections to a store, about {_LIBRARIES} of "
        f"libraries, and {_FOR_WORKER} tensors × 2 batches of {counted(cores, 'worker')} make {needed:,}"
    )
    if 0 <= soft < needed:
        most = "ulimit -n $(ulimit -Hn)" if hard < 0 or hard > soft else "a higher hard limit (limits.conf)"
        yield warning(_TOPIC, text, f"{most} before the training, or docker run --ulimit nofile=65536")
    else:
        yield ok(_TOPIC, text)


def processes(left: int | None, cores: int) -> Iterator[Finding]:
    """Threads and processes that may be added.

    Args:
        left: how many; None without a limit.
        cores: how many workers there would be.
    """
    needed = _THREADS + cores * cores
    workers = f"{counted(cores, 'worker')} with {counted(cores, 'thread')} each"
    text = f"{workers}, and {_THREADS} of libraries, make {needed:,}"
    if left is not None and left < needed:
        remedy = "ulimit -u, or docker run --pids-limit (Kubernetes: podPidsLimit); or fewer workers"
        yield warning(_TOPIC, f"{left:,} more processes and threads are allowed; {text}", remedy)
    else:
        allowed = "without a limit" if left is None else f"{left:,} more are allowed"
        yield ok(_TOPIC, f"processes and threads (ulimit -u): {allowed}; {text}")


def _processes_left(groups: ControlGroups) -> int | None:
    found = []
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft >= 0 and os.geteuid():  # root is not limited
        found.append(soft)
    for folder in groups.folders("pids"):
        try:
            found.append(int((folder / "pids.max").read_text()) - int((folder / "pids.current").read_text()))
        except (OSError, ValueError):  # none, or "max"
            continue
    return min(found, default=None)


def _address_space(soft: int) -> Iterator[Finding]:
    if soft >= 0:
        yield warning(
            _TOPIC,
            f"address space (ulimit -v): {in_bytes(soft)} at most, and CUDA reserves much more than it uses",
            "ulimit -v unlimited",
        )


def _locked(soft: int) -> Iterator[Finding]:
    if soft >= 0:
        yield warning(
            _TOPIC,
            f"locked memory (ulimit -l): {in_bytes(soft)} at most, and InfiniBand, which is here, needs more",
            "ulimit -l unlimited, or docker run --ulimit memlock=-1",
        )
    else:
        yield ok(_TOPIC, "locked memory (ulimit -l): without a limit, as InfiniBand's buffers need")
