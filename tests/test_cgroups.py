"""What groups of processes may use, as the system has it in its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastpipe.core.machine import ControlGroups

GIB = 1 << 30


def machine(root: Path, cgroup: str, mounts: str, files: dict[str, str]) -> ControlGroups:
    """A system's files below a folder."""
    for name, text in {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return ControlGroups(root)


def test_limits_of_version_2_in_a_container(tmp_path: Path) -> None:
    groups = machine(
        tmp_path, "0::/\n", "30 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
        {
            "sys/fs/cgroup/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/cpu.stat": "usage_usec 5\nnr_periods 200\nnr_throttled 50\nthrottled_usec 3000000\n",
        },
    )  # fmt: skip
    assert groups.cores() == 2.5
    assert groups.least("memory", "memory.max", "memory.limit_in_bytes") == 4 * GIB
    assert groups.table("cpu", "cpu.stat")["nr_throttled"] == 50


def test_limits_of_a_job_that_lie_deep(tmp_path: Path) -> None:
    deep = "sys/fs/cgroup/system.slice/job_7"
    groups = machine(
        tmp_path, "0::/system.slice/job_7/step\n", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        {
            "sys/fs/cgroup/memory.max": "max\n", f"{deep}/memory.max": f"{2 * GIB}\n",
            f"{deep}/step/memory.max": "max\n", f"{deep}/cpu.max": "400000 100000", f"{deep}/step/cpu.max": "max 100000",
        },
    )  # fmt: skip
    assert groups.cores() == 4
    assert groups.least("memory", "memory.max") == 2 * GIB


def test_limits_of_version_1(tmp_path: Path) -> None:
    groups = machine(
        tmp_path, "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
        "31 30 0:27 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        "32 30 0:28 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n",
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )  # fmt: skip
    assert groups.cores() == 1.5
    assert groups.least("memory", "memory.max", "memory.limit_in_bytes") == 3 * GIB


def test_a_system_without_groups(tmp_path: Path) -> None:
    groups = ControlGroups(tmp_path)
    assert (groups.cores(), groups.least("memory", "memory.max"), groups.table("cpu", "cpu.stat")) == (
        None,
        None,
        {},
    )


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000\n", None), ("200000 100000\n", 2), ("150000 100000\n", 1.5), ("50000 100000\n", 0.5),
        ("1600000 100000\n", 16), ("0 100000\n", None), ("-1 100000\n", None), ("", None), ("garbage\n", None),
        ("garbage 100000\n", None), ("100000 0\n", None),
    ],
)  # fmt: skip
def test_a_quota_of_version_2(tmp_path: Path, text: str, cores: float | None) -> None:
    groups = machine(
        tmp_path, "0::/\n", "30 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
        {"sys/fs/cgroup/cpu.max": text},
    )  # fmt: skip
    assert groups.cores() == cores


@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [("-1", "100000", None), ("200000", "100000", 2), ("250000", "100000", 2.5), ("x", "100000", None)],
)
def test_a_quota_of_version_1(tmp_path: Path, quota: str, period: str, cores: float | None) -> None:
    groups = machine(
        tmp_path, "3:cpu,cpuacct:/\n", "32 30 0:28 / /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct\n",
        {
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": f"{quota}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": f"{period}\n",
        },
    )  # fmt: skip
    assert groups.cores() == cores
