from __future__ import annotations

import os

import pytest

from fastpipe.core import machine as cpus
from fastpipe.core.machine import ControlGroups, available_cpus, default_threads


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
