"""Cores, memory, limits and threads: as the system has them, and as it might."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastpipe.core.machine import ControlGroups
from fastpipe.tools.doctor import machine
from fastpipe.tools.doctor.report import Examined, Finding

GIB = 1 << 30


def states(found: Any) -> list[str]:
    return [one.state for one in found]


def test_fewer_cores_than_there_are_installed() -> None:
    assert states(machine._count(64, 64, None)) == ["ok"]
    assert states(machine._count(64, 8, None)) == ["warning"]
    first = next(iter(machine._count(64, 64, 2.5)))
    assert first.state == "warning" and "cores to use: 2.5;" in first.text and "but as 2" in first.remedy


@pytest.mark.parametrize(
    ("stat", "state"),
    [
        ({}, "ok"),
        ({"nr_periods": 1000, "nr_throttled": 5}, "ok"),
        ({"nr_periods": 1000, "nr_throttled": 500, "throttled_usec": 7_000_000}, "warning"),
        ({"nr_periods": 1000, "nr_throttled": 500, "throttled_time": 7_000_000_000}, "warning"),
    ],
)
def test_throttling(stat: dict[str, int], state: str) -> None:
    (found,) = machine._throttling(stat)
    assert found.state == state and ("7 s" in found.text) == (state == "warning")


def test_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    found = [one for one in machine.check_cores(Examined()) if "1000 ranks" in one.text]
    assert states(found) == ["warning"]


def space(size: int, free: int) -> Any:
    return SimpleNamespace(f_frsize=1, f_blocks=size, f_bavail=free)


@pytest.mark.parametrize(
    ("free", "state"), [(64 << 20, "warning"), (20 << 20, "problem"), (GIB, "ok"), (147 << 20, "warning")]
)
def test_shared_memory_against_the_arithmetic(free: int, state: str) -> None:
    found = machine._shared_memory(space(GIB, free), workers=4)
    assert found.state == state
    assert "(36.8 MiB) × prefetch_factor 2 × 4 workers" in found.text and "need 294 MiB" in found.text
    assert state == "ok" or ("--shm-size" in found.remedy and "--ipc=host" in found.remedy)


def test_without_shared_memory() -> None:
    assert machine._shared_memory(None, 4).state == "ok"


def test_little_memory_and_processes_that_were_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 28)
    monkeypatch.setattr(ControlGroups, "table", lambda *_: {"oom_kill": 3})
    found = list(machine.check_memory(Examined()))
    assert states(found)[:2] == ["warning", "warning"] and "256 MiB are free" in found[0].text
    assert "so far: 3" in found[1].text


def test_open_files() -> None:
    assert machine._open_files(256, 4096, 2).state == "warning"
    assert machine._open_files(1024, 4096, 2).state == "ok"
    found = machine._open_files(1024, 1024, 128)
    assert found.state == "warning" and "make 1,280" in found.text and "higher hard limit" in found.remedy
    assert machine._open_files(-1, -1, 10_000).state == "ok"


def test_processes() -> None:
    assert machine._processes(None, 64).state == "ok"
    assert machine._processes(100, 8).state == "warning"
    assert machine._processes(1000, 8).state == "ok"


def test_limits_of_this_process_are_found() -> None:
    found = list(machine.check_limits(Examined()))
    assert any("ulimit -n" in one.text for one in found) and any(
        "processes and threads" in one.text for one in found
    )


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ["ok"]),
        ({"OMP_NUM_THREADS": "4"}, ["ok"]),
        ({"OMP_NUM_THREADS": "64"}, ["warning"]),
        ({"OMP_NUM_THREADS": "many"}, ["warning"]),
        ({"MKL_NUM_THREADS": "4,2"}, ["ok"]),
    ],
)
def test_settings_of_threads(environment: dict[str, str], expected: list[str]) -> None:
    assert states(machine._thread_settings(environment, 8, 8)) == expected


def test_threads_for_more_cores_than_a_rank_has() -> None:
    (found,) = machine._thread_settings({}, 2, 64)
    assert found.state == "warning" and "libraries take 64 threads" in found.text


def test_torchs_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "default_threads", lambda: 4)

    def last(count: int) -> Finding:
        return list(machine.check_threads(Examined(torch={"threads": count})))[-1]

    assert (last(4).state, last(64).state) == ("ok", "warning")
    assert last(64).remedy == "export OMP_NUM_THREADS=4"
