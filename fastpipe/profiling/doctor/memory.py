"""How much memory there is, and how much of it processes can share."""

from __future__ import annotations

import os
from collections.abc import Iterator

from fastpipe.core.machine import ControlGroups, available_cpus, free_memory
from fastpipe.core.text import counted, in_bytes
from fastpipe.profiling.doctor.findings import Examined, Finding, ok, problem, warning

__all__ = ["check"]

_TOPIC = "memory"
_SHARED = "/dev/shm"
_LITTLE = 1 << 30
_BATCH, _SHAPE, _ITEM, _PREFETCH = 64, (3, 224, 224), 4, 2


def check(examined: Examined) -> Iterator[Finding]:
    """Look at the machine's memory, the group's limit, and /dev/shm."""
    groups = ControlGroups()
    yield from _ordinary(groups)
    killed = groups.table("memory", "memory.events").get("oom_kill", 0)
    if killed:
        yield warning(
            _TOPIC,
            f"processes of this group that were killed for want of memory so far: {killed:,}",
            "fewer worker processes (FastLoader's threads share one), a smaller cache, or a higher limit",
        )
    yield from shared_memory(os.statvfs(_SHARED) if os.path.isdir(_SHARED) else None, available_cpus())


def _ordinary(groups: ControlGroups) -> Iterator[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = groups.least("memory", "memory.max", "memory.limit_in_bytes")
    free = free_memory()
    of = f"the machine has {in_bytes(total)}"
    of += "" if limit is None or limit >= total else f", of which this group may use {in_bytes(limit)}"
    if free is None:
        yield ok(_TOPIC, of)
    elif free < _LITTLE:
        yield warning(_TOPIC, f"{in_bytes(free)} are free; {of}", "end other programs, or raise the limit")
    else:
        yield ok(_TOPIC, f"{in_bytes(free)} are free; {of}")


def shared_memory(status: os.statvfs_result | None, workers: int) -> Iterator[Finding]:
    """What torch's workers need of it, and what there is.

    Args:
        status: of its file system; None where there is none.
        workers: how many there would be.
    """
    if status is None:
        yield ok(_TOPIC, f"there is no {_SHARED} here, and nothing needs it")
        return
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    batch = _BATCH * _SHAPE[0] * _SHAPE[1] * _SHAPE[2] * _ITEM
    needed = batch * _PREFETCH * workers
    shape = " × ".join(map(str, (_BATCH, *_SHAPE)))
    text = (
        f"{_SHARED}: {in_bytes(free)} of {in_bytes(size)} are free. Batches of {shape} float32 "
        f"({in_bytes(batch)}) × prefetch_factor {_PREFETCH} × {counted(workers, 'worker')} of torch's "
        f"DataLoader need {in_bytes(needed)}"
    )
    remedy = (
        "docker run --shm-size=… or --ipc=host (Kubernetes: an emptyDir of medium Memory at /dev/shm); or "
        "FastLoader, whose workers do not use it for fastpipe's datasets"
    )
    if free < batch:
        yield problem(_TOPIC, text, remedy)
    elif free < needed:
        yield warning(_TOPIC, text, remedy)
    else:
        yield ok(_TOPIC, text)
