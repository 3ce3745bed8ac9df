"""Times of threads and processes, and who looks at them."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from fastpipe.tools.recorder import Recorder, Tally
from fastpipe.tools.stacks import Boundary, Line
from fastpipe.tools.thread_times import Spent, ThreadClock, processes_cpu_ns

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc: run it on Linux")


def burn(seconds: float) -> None:
    """Run for so long, by the thread's own clock."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


@LINUX
def test_a_threads_clock_tells_running_from_waiting() -> None:
    clock = ThreadClock()
    try:
        before = clock.read()
        burn(0.05)
        middle = clock.read()
        threading.Event().wait(0.05)
        after = clock.read()
    finally:
        clock.close()
        clock.close()
    ran, waited = middle - before, after - middle
    assert ran.cpu > 0.03e9 and waited.idle > 0  # how much of each, the machine beside it decides
    assert waited.cpu < ran.cpu


@LINUX
def test_a_clock_of_a_thread_that_has_ended_gives_nothing_more() -> None:
    numbers: list[int] = []
    ended = threading.Event()

    def run() -> None:
        numbers.append(threading.get_native_id())
        ended.wait()

    thread = threading.Thread(target=run)
    thread.start()
    while not numbers:
        threading.Event().wait(0.001)
    clock = ThreadClock(numbers[0])
    assert clock.read().cpu >= 0
    ended.set()
    thread.join()  # after which the kernel's thread may live a little longer
    for _ in range(5000):
        if clock.read()[1:] == (0, 0):
            break
        threading.Event().wait(0.001)
    assert clock.read()[1:] == (0, 0)
    clock.close()


@LINUX
def test_processors_are_counted_for_children_and_for_those_that_have_ended() -> None:
    before = processes_cpu_ns()
    code = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    after = processes_cpu_ns()
    assert before is not None and after is not None and after - before >= 0.25e9


def test_a_tally_adds_merges_and_survives_a_file() -> None:
    one, other = Tally(), Tally()
    line = Line("a.py", 3, "load")
    one.add("dataset", "read", line, Spent(10, 2, 3))
    other.add("dataset", "read", line, Spent(1, 1, 0))
    other.add("collate", "collate", Line("", 0, ""), Spent(5, 5, 0))
    for key, spent in pickle.loads(pickle.dumps(other)).items():
        one.add(*key, spent)
    assert one.stages("dataset") == {"read": Spent(11, 3, 3)}
    assert one.stages("dataset")["read"].idle == 5
    assert one.lines("dataset") == [(line, "read", Spent(11, 3, 3))]
    assert [stage for _, stage, _ in one.lines("collate", "dataset")] == ["read", "collate"]


def test_a_recorder_sees_what_runs_below_a_boundary() -> None:
    def inside(run: Callable[[], None]) -> None:
        run()

    below_inside = {inside.__code__: Boundary("dataset")}
    recorder = Recorder(below_inside, [threading.get_ident()], kind=lambda: "outside")
    recorder.start()
    inside(lambda: burn(0.5))
    burn(0.05)
    recorder.stop()
    spent = recorder.tally.stages("dataset"), recorder.tally.stages("outside")
    below, outside = (sum(one.cpu for one in stages.values()) for stages in spent)
    assert below > outside > 0
    assert any(line.function == "burn" for line, _, _ in recorder.tally.lines("dataset"))


def test_other_threads_are_seen_and_the_recorders_own_is_not() -> None:
    thread = threading.Thread(target=burn, args=(0.15,))
    recorder = Recorder({})
    recorder.start()
    thread.start()
    thread.join()
    recorder.stop()
    functions = {line.function for line, _, _ in recorder.tally.lines("")}
    assert "burn" in functions and "_look" not in functions


def test_it_tells_while_it_runs_and_when_it_ends() -> None:
    told: list[int] = []
    seen = threading.Event()

    def tell() -> None:
        told.append(len(told))
        seen.set()

    recorder = Recorder({}, [threading.get_ident()], tell)
    recorder.start()
    assert seen.wait(30)
    recorder.stop()
    assert len(told) >= 2
