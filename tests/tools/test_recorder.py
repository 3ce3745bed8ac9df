"""Times of threads and processes, and the folders and names of profiles."""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastpipe import tools
from fastpipe.tools import thread_times
from fastpipe.tools.folders import Scratch
from fastpipe.tools.recorder import Recorder, Tally
from fastpipe.tools.stacks import Boundary, Line
from fastpipe.tools.thread_times import Spent, ThreadClock, processes_cpu_ns, threads_delay_ns

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc: run it on Linux")


def burn(seconds: float) -> None:
    """Run for so long, by the thread's own clock."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


@LINUX
def test_a_clock_of_a_thread_tells_running_from_waiting_until_it_ends() -> None:
    ready, steps = threading.Event(), [threading.Event() for _ in range(3)]

    def run() -> None:
        for step in steps:
            ready.set()
            step.wait()
            burn(0.05)

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    clock = ThreadClock(thread.native_id)
    before = clock.read()
    ready.clear()
    steps[0].set()
    ready.wait()
    ran = clock.read() - before
    assert ran.cpu > 0.03e9 and ran.wall > ran.cpu
    before = clock.read()
    threading.Event().wait(0.05)
    waited = clock.read() - before
    assert waited.idle > 0 and waited.cpu < ran.cpu  # how much of each, the machine beside it decides
    steps[1].set()
    steps[2].set()
    thread.join()  # after which the kernel's thread may live a little longer
    while clock.read()[1:] != (0, 0):
        pass
    clock.close()
    clock.close()


@LINUX
def test_processors_of_children_that_have_ended_are_counted() -> None:
    before = processes_cpu_ns()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    after = processes_cpu_ns()
    assert before is not None and after is not None and after - before >= 0.25e9


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="keeps threads on one core: run it on Linux")
def test_threads_that_share_a_core_wait_for_it() -> None:
    before, cores = threads_delay_ns(), os.sched_getaffinity(0)
    if before is None:
        pytest.skip("this kernel does not tell: it needs CONFIG_SCHED_INFO")
    seen: list[int | None] = []
    data, together = bytes(1 << 26), threading.Barrier(2)

    def work() -> None:  # without Python's lock, so that both are ready to run all the time
        together.wait()
        hashlib.sha256(data).digest()
        seen.append(threads_delay_ns())
        together.wait()  # what an ended thread has waited is not counted

    os.sched_setaffinity(0, {min(cores)})
    try:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        os.sched_setaffinity(0, cores)
    assert max(delay or 0 for delay in seen) > before + 1_000_000


def test_delays_are_unknown_where_the_kernel_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_times, "_TASKS", tmp_path)
    assert threads_delay_ns() is None
    (tmp_path / "1").mkdir()
    for text, delay in (("", None), ("5 7 1\n", 7)):
        (tmp_path / "1" / "schedstat").write_text(text)
        assert threads_delay_ns() == delay


def test_a_tally_adds_merges_and_survives_a_file() -> None:
    one, other, line = Tally(), Tally(), Line("a.py", 3, "load")
    one.add("dataset", "read", line, Spent(10, 2, 3))
    other.add("dataset", "read", line, Spent(1, 1, 0))
    other.add("collate", "collate", Line("", 0, ""), Spent(5, 5, 0))
    for key, spent in pickle.loads(pickle.dumps(other)).items():
        one.add(*key, spent)
    assert one.stages("dataset") == {"read": Spent(11, 3, 3)} and one.stages("dataset")["read"].idle == 5
    assert one.lines("dataset") == [(line, "read", Spent(11, 3, 3))]
    assert [stage for _, stage, _ in one.lines("collate", "dataset")] == ["read", "collate"]


def test_a_recorder_sees_the_functions_below_a_boundary_and_calls_back() -> None:
    def inside(run: Callable[[], None]) -> None:
        run()

    calls: list[int] = []
    called = threading.Event()

    def call() -> None:
        calls.append(1)
        called.set()

    boundaries = {inside.__code__: Boundary("dataset")}
    recorder = Recorder(boundaries, [threading.get_ident()], call, kind=lambda: "outside")
    recorder.start()
    inside(lambda: burn(0.3))
    burn(0.03)
    assert called.wait(30)
    recorder.stop()
    assert len(calls) >= 2
    below, outside = (
        sum(one.cpu for one in recorder.tally.stages(kind).values()) for kind in ("dataset", "outside")
    )
    assert below > outside > 0
    assert any(line.function == "burn" for line, _, _ in recorder.tally.lines("dataset"))


def test_a_recorder_sees_other_threads_but_not_its_own() -> None:
    recorder, thread = Recorder({}), threading.Thread(target=burn, args=(0.15,))
    recorder.start()
    thread.start()
    thread.join()
    recorder.stop()
    functions = {line.function for line, _, _ in recorder.tally.lines("")}
    assert "burn" in functions and "_look" not in functions


@pytest.mark.skipif(not hasattr(os, "fork"), reason="run it on Linux or macOS, where folders can be locked")
def test_a_folder_that_a_killed_profile_left_is_removed_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: Callable[[Callable[[], object]], int]
) -> None:
    def make_old(folder: Any) -> None:
        before = time.time() - 3600
        os.utime(Path(folder) / ".lock", (before, before))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reader, writer = os.pipe()

    def work() -> None:
        scratch = Scratch()
        (Path(scratch.path) / "inner").mkdir()
        make_old(scratch.path)
        os.write(writer, scratch.path.encode() + b"\n")
        signal.pause()

    pid = forked(work)
    left = Path(os.read(reader, 4096).decode().strip())
    prefix, elsewhere = "fastpipe-profile-", tmp_path / "elsewhere"
    (tmp_path / f"{prefix}is-a-file").touch()
    for path in (elsewhere, tmp_path / f"{prefix}young", tmp_path / f"{prefix}without"):
        path.mkdir()
        if not path.name.endswith("without"):
            (path / ".lock").touch()
    (tmp_path / f"{prefix}link").symlink_to(elsewhere)
    make_old(elsewhere)
    kept = {path.name for path in tmp_path.iterdir()} - {left.name}
    scratches = [Scratch()]
    make_old(scratches[0].path)
    assert left.is_dir(), "its process is alive"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    scratches.append(Scratch())
    assert not left.exists()
    assert {path.name for path in tmp_path.iterdir()} == {*kept, *(Path(one.path).name for one in scratches)}
    for scratch in scratches:
        scratch.close()
        scratch.close()
    os.close(reader), os.close(writer)
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_the_former_module_has_the_same_names_and_warns() -> None:
    old = importlib.import_module("fastpipe.profiling")
    assert set(old.__all__) == set(tools.__all__) - {"BatchSizes", "Tuning"}
    for name in old.__all__:
        with pytest.warns(DeprecationWarning, match=f"is now fastpipe.tools.{name}"):
            assert getattr(old, name) is getattr(tools, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        old.nothing
