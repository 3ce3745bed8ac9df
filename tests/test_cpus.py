from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastpipe import _cpus as cpus
from fastpipe._cpus import available_cpus, default_threads


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def test_at_least_one_and_at_most_what_the_machine_has() -> None:
    assert 1 <= available_cpus() <= (os.cpu_count() or 1)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="run it on Linux, which has CPU affinity")
def test_affinity_counts() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert available_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000\n", None),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("50000 100000\n", 1),
        ("1600000 100000\n", 16),
        ("0 100000\n", None),
        ("-1 100000\n", None),
        ("", None),
        ("garbage\n", None),
        ("garbage 100000\n", None),
        ("100000 0\n", None),
    ],
)
def test_quota_of_cgroup_2(tmp_path: Path, text: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cpus._cgroup_quota(tmp_path) == cores


@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [("-1", "100000", None), ("200000", "100000", 2), ("250000", "100000", 3), ("x", "100000", None)],
)
def test_quota_of_cgroup_1(tmp_path: Path, quota: str, period: str, cores: int | None) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(quota + "\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text(period + "\n")
    assert cpus._cgroup_quota(tmp_path) == cores


def test_no_cgroup_is_no_limit(tmp_path: Path) -> None:
    assert cpus._cgroup_quota(tmp_path) is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (3, 3), (100, 8), (1, 1)])
def test_the_quota_bounds_the_cores(
    monkeypatch: pytest.MonkeyPatch, quota: int | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(cpus, "_cgroup_quota", lambda root: quota)
    assert available_cpus() == expected


@pytest.mark.parametrize(
    ("cores", "ranks", "workers", "threads"),
    [
        (16, None, 1, 16),
        (16, None, 4, 4),
        (16, "4", 1, 4),
        (16, "4", 2, 2),
        (16, "4", 16, 1),
        (2, "8", 8, 1),
        (16, None, 0, 16),
        (16, "", 1, 16),
        (16, "many", 1, 16),
        (16, "0", 1, 16),
        (16, "-3", 1, 16),
    ],
)
def test_threads_are_cores_divided_by_ranks_and_workers(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: str | None, workers: int, threads: int
) -> None:
    monkeypatch.setattr(cpus, "available_cpus", lambda: cores)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert default_threads(workers) == threads
