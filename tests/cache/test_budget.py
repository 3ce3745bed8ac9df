"""How much memory there is: the machine's, or what the groups that a process is in leave of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fastpipe.core.machine import free_disk, free_memory

KIB, MIB = 1 << 10, 1 << 20
MEMINFO = {"proc/meminfo": "MemTotal:  900 kB\nMemFree:  10 kB\nMemAvailable:  700 kB\n"}
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


def _tree(root: Path, *parts: dict[str, Any]) -> Path:
    for name, content in (item for part in parts for item in part.items()):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


def _v2(limit: Any, used: int, cached: int = 0, group: str = "") -> dict[str, Any]:
    stat = f"anon 5\ninactive_file {cached}\nactive_file 77"
    return {
        f"{V2}{group}/memory.max": limit, f"{V2}{group}/memory.current": used, f"{V2}{group}/memory.stat": stat
    }  # fmt: skip


def _v1(limit: int, used: int, cached: int = 0, group: str = "") -> dict[str, Any]:
    stat = f"cache 5\ninactive_file 1\ntotal_inactive_file {cached}"
    return {
        f"{V1}{group}/memory.limit_in_bytes": limit, f"{V1}{group}/memory.usage_in_bytes": used,
        f"{V1}{group}/memory.stat": stat,
    }  # fmt: skip


def test_without_groups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert free_memory(_tree(tmp_path, MEMINFO)) == 700 * KIB


def test_where_nobody_says_it_is_none(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    # Before Linux 3.14 there was no such line.
    assert free_memory(_tree(tmp_path, {"proc/meminfo": "MemFree:  10 kB"})) is None


@pytest.mark.parametrize("make", [_v1, _v2])
def test_a_limit_counts_and_cached_files_do_not(tmp_path: Path, make: Any) -> None:
    assert free_memory(_tree(tmp_path, MEMINFO, make(500 * KIB, 300 * KIB, 40 * KIB))) == 240 * KIB


@pytest.mark.parametrize("make", [_v1, _v2])
def test_the_machine_may_have_less_than_the_limit(tmp_path: Path, make: Any) -> None:
    assert free_memory(_tree(tmp_path, MEMINFO, make(MIB, 0))) == 700 * KIB


@pytest.mark.parametrize("make", [_v1, _v2])
def test_a_group_that_uses_more_than_its_limit_leaves_nothing(tmp_path: Path, make: Any) -> None:
    assert free_memory(_tree(tmp_path, MEMINFO, make(100, 500))) == 0


def test_no_limit(tmp_path: Path) -> None:
    assert free_memory(_tree(tmp_path / "2", MEMINFO, _v2("max", 300))) == 700 * KIB
    assert free_memory(_tree(tmp_path / "1", MEMINFO, _v1(0x7FFFFFFFFFFFF000, 300))) == 700 * KIB


def test_files_that_make_no_sense_are_as_none(tmp_path: Path) -> None:
    tree = _tree(tmp_path, {"proc/meminfo": "MemAvailable: lots", "proc/self/cgroup": "", **_v2("", 3)})
    assert free_memory(tree) is None


@pytest.mark.parametrize(
    ("make", "line"), [(_v2, "0::/slurm/job_7/step"), (_v1, "4:cpu,memory:/slurm/job_7/step")]
)
def test_the_limit_may_be_that_of_any_group_above(tmp_path: Path, make: Any, line: str) -> None:
    named = {"proc/self/cgroup": f"9:freezer:/\n{line}"}
    tree = _tree(
        tmp_path, MEMINFO, named,
        make(600 * KIB, 100 * KIB, group="/slurm"),
        make(300 * KIB, 200 * KIB, group="/slurm/job_7"),
        make(400 * KIB, 100 * KIB, group="/slurm/job_7/step"),
        make(10, 10, group="/slurm/job_8"),
    )  # fmt: skip
    assert free_memory(tree) == 100 * KIB


def test_a_group_outside_of_what_is_visible(tmp_path: Path) -> None:
    # In a container whose group is not that of who looks at it.
    tree = _tree(tmp_path, MEMINFO, {"proc/self/cgroup": "0::/../../other"}, _v2(500 * KIB, 0))
    assert free_memory(tree) == 500 * KIB


def test_this_machine_says_something(tmp_path: Path) -> None:
    if os.path.exists("/proc/meminfo"):
        assert free_memory()
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        assert free_disk(descriptor) > 0
    finally:
        os.close(descriptor)
