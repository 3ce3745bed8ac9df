"""How many cores and how much memory a process may use, as the system has it in its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fastpipe.core import machine
from fastpipe.core.machine import ControlGroups, available_cpus, default_threads, free_disk, free_memory

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def _tree(root: Path, *parts: dict[str, Any]) -> Path:
    """A system's files below a folder."""
    for name, content in (item for part in parts for item in part.items()):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="run it on Linux, which has CPU affinity")
def test_affinity_counts() -> None:
    before = os.sched_getaffinity(0)
    assert 1 <= available_cpus() <= (os.cpu_count() or 1)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert available_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (3, 3), (2.5, 3), (100, 8), (1, 1), (0.1, 1)])
def test_the_quota_bounds_the_cores(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(ControlGroups, "cores", lambda self: quota)
    assert available_cpus() == expected


@pytest.mark.parametrize(
    ("cores", "ranks", "workers", "threads"),
    [
        (16, None, 1, 16), (16, None, 4, 4), (16, "4", 1, 4), (16, "4", 2, 2), (16, "4", 16, 1), (2, "8", 8, 1),
        (16, None, 0, 16), (16, "", 1, 16), (16, "many", 1, 16), (16, "0", 1, 16), (16, "-3", 1, 16),
    ],
)  # fmt: skip
def test_threads_are_cores_divided_by_ranks_and_workers(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: str | None, workers: int, threads: int
) -> None:
    monkeypatch.setattr(machine, "available_cpus", lambda: cores)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert default_threads(workers) == threads


# Control groups: limits of a container (version 2), of a job that lies deep, and of a container of version 1.

ROOT, DEEP = "sys/fs/cgroup", "sys/fs/cgroup/system.slice/job_7"
MOUNT = "30 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw"
MOUNTS_V1 = (
    "31 30 0:27 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    "32 30 0:28 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct"
)
SYSTEMS: dict[str, tuple[str, str, dict[str, Any], tuple[float | None, int | None]]] = {
    "container": (
        "0::/", MOUNT,
        {f"{ROOT}/cpu.max": "250000 100000", f"{ROOT}/memory.max": 4 * GIB},
        (2.5, 4 * GIB),
    ),
    "job": (
        "0::/system.slice/job_7/step", MOUNT,
        {f"{ROOT}/memory.max": "max", f"{DEEP}/memory.max": 2 * GIB, f"{DEEP}/step/memory.max": "max",
         f"{DEEP}/cpu.max": "400000 100000", f"{DEEP}/step/cpu.max": "max 100000"},
        (4, 2 * GIB),
    ),
    "version 1": (
        "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc", MOUNTS_V1,
        {f"{ROOT}/memory/memory.limit_in_bytes": 3 * GIB, f"{ROOT}/cpu,cpuacct/cpu.cfs_quota_us": 150000,
         f"{ROOT}/cpu,cpuacct/cpu.cfs_period_us": 100000},
        (1.5, 3 * GIB),
    ),
    "no groups": ("", "", {}, (None, None)),
}  # fmt: skip


@pytest.mark.parametrize("name", SYSTEMS)
def test_limits_of_control_groups(tmp_path: Path, name: str) -> None:
    cgroup, mounts, files, expected = SYSTEMS[name]
    stat = {f"{ROOT}/cpu.stat": "usage_usec 5\nnr_throttled 50"} if name == "container" else {}
    own = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts}
    groups = ControlGroups(_tree(tmp_path, own if cgroup else {}, files, stat))
    assert (groups.cores(), groups.least("memory", "memory.max", "memory.limit_in_bytes")) == expected
    assert groups.table("cpu", "cpu.stat").get("nr_throttled") == (50 if stat else None)


@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [
        ("max", "100000", None), ("200000", "100000", 2), ("50000", "100000", 0.5), ("1600000", "100000", 16),
        ("0", "100000", None), ("-1", "100000", None), ("", "", None), ("x", "", None), ("x", "100000", None),
        ("100000", "0", None),
    ],
)  # fmt: skip
def test_a_quota_of_either_version(tmp_path: Path, quota: str, period: str, cores: float | None) -> None:
    two = {"proc/self/cgroup": "0::/", "proc/self/mountinfo": MOUNT, f"{ROOT}/cpu.max": f"{quota} {period}"}
    assert ControlGroups(_tree(tmp_path / "2", two)).cores() == cores
    one = {
        "proc/self/cgroup": "3:cpu,cpuacct:/",
        "proc/self/mountinfo": "32 30 0:28 / /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct",
        f"{ROOT}/cpu/cpu.cfs_quota_us": quota, f"{ROOT}/cpu/cpu.cfs_period_us": period,
    }  # fmt: skip
    assert ControlGroups(_tree(tmp_path / "1", one)).cores() == cores


MEMINFO = {"proc/meminfo": "MemTotal:  900 kB\nMemFree:  10 kB\nMemAvailable:  700 kB\n"}


def _v2(limit: Any, used: int, cached: int = 0, group: str = "") -> dict[str, Any]:
    stat = f"anon 5\ninactive_file {cached}\nactive_file 77"
    return {
        f"{ROOT}{group}/memory.max": limit, f"{ROOT}{group}/memory.current": used, f"{ROOT}{group}/memory.stat": stat
    }  # fmt: skip


def _v1(limit: Any, used: int, cached: int = 0, group: str = "") -> dict[str, Any]:
    at, stat = f"{ROOT}/memory{group}", f"cache 5\ninactive_file 1\ntotal_inactive_file {cached}"
    limit = 0x7FFFFFFFFFFFF000 if limit == "max" else limit
    return {
        f"{at}/memory.limit_in_bytes": limit, f"{at}/memory.usage_in_bytes": used, f"{at}/memory.stat": stat,
    }  # fmt: skip


@pytest.mark.parametrize("make", [_v1, _v2])
@pytest.mark.parametrize(
    ("limit", "used", "cached", "free"),
    [
        (500 * KIB, 300 * KIB, 40 * KIB, 240 * KIB), (MIB, 0, 0, 700 * KIB), (100, 500, 0, 0),
        ("max", 300, 0, 700 * KIB),
    ],
    ids=["cached files do not count", "the machine has less", "more than the limit is used", "no limit"],
)  # fmt: skip
def test_memory_in_a_group(tmp_path: Path, make: Any, limit: Any, used: int, cached: int, free: int) -> None:
    assert free_memory(_tree(tmp_path, MEMINFO, make(limit, used, cached))) == free


@pytest.mark.parametrize(
    ("make", "line"), [(_v2, "0::/slurm/job_7/step"), (_v1, "4:cpu,memory:/slurm/job_7/step")]
)
def test_the_limit_may_be_that_of_any_group_above(tmp_path: Path, make: Any, line: str) -> None:
    tree = _tree(
        tmp_path, MEMINFO, {"proc/self/cgroup": f"9:freezer:/\n{line}"},
        make(600 * KIB, 100 * KIB, group="/slurm"),
        make(300 * KIB, 200 * KIB, group="/slurm/job_7"),
        make(400 * KIB, 100 * KIB, group="/slurm/job_7/step"),
        make(10, 10, group="/slurm/job_8"),
    )  # fmt: skip
    assert free_memory(tree) == 100 * KIB


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None), (MEMINFO, 700 * KIB), ({"proc/meminfo": "MemFree:  10 kB"}, None),
        ({"proc/meminfo": "MemAvailable: lots", "proc/self/cgroup": "", **_v2("", 3)}, None),
        ({**MEMINFO, "proc/self/cgroup": "0::/../../other", **_v2(500 * KIB, 0)}, 500 * KIB),
    ],
    ids=["no files", "no groups", "before Linux 3.14", "senseless", "a group outside of what is visible"],
)  # fmt: skip
def test_free_memory_of_unusual_systems(tmp_path: Path, files: dict[str, Any], free: int | None) -> None:
    assert free_memory(_tree(tmp_path, files)) == free


def test_this_machine_has_free_memory_and_disk(tmp_path: Path) -> None:
    if os.path.exists("/proc/meminfo"):
        assert free_memory()
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        assert free_disk(descriptor) > 0
    finally:
        os.close(descriptor)
