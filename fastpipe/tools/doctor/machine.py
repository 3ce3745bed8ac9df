"""Check the cores, the memory, the limits and the numbers of threads of this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from fastpipe.core.machine import ControlGroups, available_cpus, default_threads, free_memory, local_ranks
from fastpipe.core.text import counted, in_bytes, in_duration
from fastpipe.tools.doctor.report import Examined, Finding, judged, ok, problem, warning

with contextlib.suppress(ImportError):  # Windows lacks it; the failing check is then a finding
    import resource

_OFTEN = 0.01  # throttled fraction of the periods in which a control group had work
_SHARED = "/dev/shm"
_LITTLE = 1 << 30
_BATCH, _SHAPE, _ITEM, _PREFETCH = 64, (3, 224, 224), 4, 2
_CONNECTIONS = 128  # largest number of connections to a store
_LIBRARIES = 128  # number of files, pipes and sockets that libraries open
_FOR_WORKER = 4  # tensors of a batch, with a descriptor each; times two for prefetching
_THREADS = 64
_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_cores(examined: Examined) -> Iterator[Finding]:
    groups = ControlGroups()
    installed, affinity, quota = os.cpu_count() or 1, _affinity(), groups.cores()
    yield from _count(installed, affinity, quota)
    yield from _throttling(groups.table("cpu", "cpu.stat"))
    ranks = local_ranks()
    if ranks > 1:
        cores = affinity if quota is None else min(affinity, quota)
        text = f"{ranks} ranks on this machine (LOCAL_WORLD_SIZE): {cores / ranks:.3g} cores for each"
        yield judged("cores", cores < ranks, text, "start fewer ranks on this machine, or request more cores")


def _count(installed: int, affinity: int, quota: float | None) -> Iterator[Finding]:
    limit = "no quota" if quota is None else f"a quota of {quota:.3g}"
    cores = affinity if quota is None else min(affinity, quota)
    text = (
        f"cores to use: {cores:.3g}; os.cpu_count() says {installed}, affinity gives {affinity}, and there "
        f"is {limit}"
    )
    remedy = f"derive num_workers and thread counts not from os.cpu_count(), but use {max(1, int(cores))}"
    yield judged("cores", cores < installed, text, remedy)


def _throttling(stat: dict[str, int]) -> Iterator[Finding]:
    periods, throttled = stat.get("nr_periods", 0), stat.get("nr_throttled", 0)
    if not periods:
        yield ok("cores", "nothing is throttled: there are no periods in cpu.stat")
        return
    lost = stat.get("throttled_usec", 0) / 1e6 or stat.get("throttled_time", 0) / 1e9
    text = f"throttled in {throttled:,} of {periods:,} periods so far, for {in_duration(lost)}"
    remedy = "request more cores, or use no more threads and workers than cores"
    yield judged("cores", throttled > _OFTEN * periods, text, remedy)


def check_memory(examined: Examined) -> Iterator[Finding]:
    groups = ControlGroups()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = groups.least("memory", "memory.max", "memory.limit_in_bytes")
    free = free_memory()
    text = f"the machine has {in_bytes(total)}"
    text += "" if limit is None or limit >= total else f", of which this group may use {in_bytes(limit)}"
    if free is not None:
        text = f"{in_bytes(free)} are free; {text}"
    is_little = free is not None and free < _LITTLE
    yield judged("memory", is_little, text, "end other programs, or raise the limit")
    killed = groups.table("memory", "memory.events").get("oom_kill", 0)
    if killed:
        yield warning(
            "memory", f"processes of this group killed so far because memory ran out: {killed:,}",
            "fewer worker processes (FastLoader's threads share one), a smaller cache, or a higher limit",
        )  # fmt: skip
    yield _shared_memory(os.statvfs(_SHARED) if os.path.isdir(_SHARED) else None, available_cpus())


def _shared_memory(status: os.statvfs_result | None, workers: int) -> Finding:
    if status is None:
        return ok("memory", f"there is no {_SHARED} here, and it is not needed")
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
    return problem("memory", text, remedy) if free < batch else judged("memory", free < needed, text, remedy)


def check_limits(examined: Examined) -> Iterator[Finding]:
    cores = available_cpus()
    yield _open_files(*resource.getrlimit(resource.RLIMIT_NOFILE), cores)
    left = []
    for folder in ControlGroups().folders("pids"):
        with contextlib.suppress(OSError, ValueError):  # there is no limit, or it is "max"
            left.append(int((folder / "pids.max").read_text()) - int((folder / "pids.current").read_text()))
    yield _processes(min(left, default=None), cores)


def _open_files(soft: int, hard: int, workers: int) -> Finding:
    needed = _CONNECTIONS + _LIBRARIES + workers * _FOR_WORKER * 2
    limit = "without a limit" if soft < 0 else f"{soft:,} at most"
    text = (
        f"open files (ulimit -n): {limit}. {_CONNECTIONS} connections to a store, about {_LIBRARIES} of "
        f"libraries, and {_FOR_WORKER} tensors × 2 batches of {counted(workers, 'worker')} make {needed:,}"
    )
    most = "ulimit -n $(ulimit -Hn)" if hard < 0 or hard > soft else "a higher hard limit (limits.conf)"
    remedy = f"{most} before the training, or docker run --ulimit nofile=65536"
    return judged("limits", 0 <= soft < needed, text, remedy)


def _processes(left: int | None, workers: int) -> Finding:
    needed = _THREADS + workers * workers
    some = f"{counted(workers, 'worker')} with {counted(workers, 'thread')} each"
    text = f"{some}, and {_THREADS} of libraries, make {needed:,}"
    if left is not None and left < needed:
        remedy = "docker run --pids-limit (Kubernetes: podPidsLimit); or fewer workers"
        return warning("limits", f"{left:,} more processes and threads are allowed; {text}", remedy)
    allowed = "without a limit" if left is None else f"{left:,} more are allowed"
    return ok("limits", f"processes and threads: {allowed}; {text}")


def check_threads(examined: Examined) -> Iterator[Finding]:
    cores = default_threads()
    yield from _thread_settings(os.environ, cores, _affinity())
    torch = examined.torch or {}
    if "threads" in torch:
        count = counted(torch["threads"], "thread")
        text = f"torch's operations take {count} in a training, 1 in a DataLoader's worker"
        is_bad = torch["threads"] > cores
        text += f"; it has {counted(cores, 'core')}" if is_bad else ""
        yield judged("threads", is_bad, text, f"export OMP_NUM_THREADS={cores}")


def _thread_settings(environment: Mapping[str, str], cores: int, seen: int) -> Iterator[Finding]:
    """Check the environment variables that set numbers of threads.

    If they are not set, libraries ignore CPU quotas and start one thread for each of the ``seen`` cores.
    """
    given = {name: environment[name] for name in _COUNTS if name in environment}
    if not given:
        count = counted(seen, "thread")
        text = f"{_COUNTS[0]}, {_COUNTS[1]} are not set: libraries take {count}, one for each core"
        text += f"; this process has {cores}" if seen > cores else ""
        yield judged("threads", seen > cores, text, f"export {_COUNTS[0]}={cores}")
    for name, value in given.items():
        first = value.split(",")[0].strip()
        if not first.isdigit() or int(first) < 1:
            yield warning("threads", f"{name}={value!r} is not a number of threads", f"unset {name}")
            continue
        is_bad = int(first) > cores
        text = f"{name}={value}, {'and it has' if is_bad else 'of'} {counted(cores, 'core')}"
        yield judged("threads", is_bad, text, f"export {name}={cores}")
