"""What the kernel tells of threads."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastpipe.tools import thread_times as times
from fastpipe.tools.thread_times import threads_delay_ns


@pytest.fixture
def one_core() -> Iterator[None]:
    """Threads that are made by this one run on one core."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("threads cannot be kept on one core here: run it on Linux")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def test_threads_that_share_a_core_wait_for_it(one_core: None) -> None:
    before = threads_delay_ns()
    if before is None:
        pytest.skip("this kernel does not tell: it needs CONFIG_SCHED_INFO")
    seen: list[int | None] = []
    data, together = bytes(1 << 26), threading.Barrier(2)

    def work() -> None:  # without Python's lock, so that both are ready to run all the time
        together.wait()
        hashlib.sha256(data).digest()
        seen.append(threads_delay_ns())
        together.wait()  # what an ended thread has waited is not counted

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(delay or 0 for delay in seen) > before + 1_000_000


def test_a_kernel_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "_TASKS", tmp_path)
    assert threads_delay_ns() is None
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "schedstat").write_text("")
    assert threads_delay_ns() is None
    (tmp_path / "1" / "schedstat").write_text("5 7 1\n")
    assert threads_delay_ns() == 7
