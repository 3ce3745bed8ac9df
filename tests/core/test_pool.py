"""The life cycle that the pool's module docstring states, line by line."""

from __future__ import annotations

import gc
import linecache
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fastpipe.core import pool as pool_module
from fastpipe.core.pool import Job, ThreadPool
from fastpipe.errors import ClosedError

InChild = Callable[[Callable[[], object]], None]
WAIT_S = 60.0
needs_fork = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="run it on Linux or macOS, where processes fork"
)


@pytest.fixture
def one() -> Iterator[ThreadPool]:
    pool = ThreadPool(1, "test")
    yield pool
    pool.close()


@pytest.fixture
def two() -> Iterator[ThreadPool]:
    pool = ThreadPool(2, "test")
    yield pool
    pool.close()


def _nothing(number: int) -> None:
    pass


class Gate:
    """A task that stops at number 0 until it is opened, and remembers what ran."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self.ran: list[int] = []

    def __call__(self, number: int) -> None:
        self.ran.append(number)
        if number == 0:
            self.entered.set()
            assert self.opened.wait(WAIT_S)


# ---- threads --------------------------------------------------------------------------------


def test_each_thread_is_prepared_before_its_first_task() -> None:
    prepared: list[str] = []
    unprepared: list[str] = []
    meet = threading.Barrier(2)

    def task(number: int) -> None:
        name = threading.current_thread().name
        if name not in prepared:
            unprepared.append(name)
        meet.wait(WAIT_S)  # so that both threads have a task

    pool = ThreadPool(2, "test", lambda: prepared.append(threading.current_thread().name))
    assert prepared == []
    for _ in range(2):
        pool.submit(task, 2).wait()
    pool.close()
    assert (sorted(prepared), unprepared) == (["test-0", "test-1"], [])


def test_threads_start_with_the_first_job_and_bear_the_name() -> None:
    before = set(threading.enumerate())
    pool = ThreadPool(3, "named")
    assert set(threading.enumerate()) == before
    pool.submit(_nothing, 5).wait()
    started = set(threading.enumerate()) - before
    assert sorted(thread.name for thread in started) == ["named-0", "named-1", "named-2"]
    assert all(thread.daemon for thread in started)
    pool.submit(_nothing, 5).wait()
    assert set(threading.enumerate()) - before == started
    pool.close()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_each_task_runs_exactly_once(threads: int, count: int) -> None:
    pool, ran = ThreadPool(threads), []
    job = pool.submit(ran.append, count)
    job.wait()
    assert job.done()
    assert sorted(ran) == list(range(count))
    pool.close()


def test_tasks_run_in_the_threads_of_the_pool(two: ThreadPool) -> None:
    names: set[str] = set()
    two.submit(lambda number: names.add(threading.current_thread().name), 50).wait()
    assert names <= {"test-0", "test-1"}


def test_all_threads_work_on_one_job() -> None:
    pool, barrier = ThreadPool(4), threading.Barrier(4, timeout=WAIT_S)
    pool.submit(lambda number: barrier.wait() and None, 4).wait()
    pool.close()


# ---- order ----------------------------------------------------------------------------------


def test_tasks_start_in_the_order_of_the_jobs(one: ThreadPool) -> None:
    gate, ran = Gate(), []
    first = one.submit(gate, 1)
    assert gate.entered.wait(WAIT_S)
    jobs = [one.submit(lambda n, name=name: ran.append((name, n)), 3) for name in "abc"]
    gate.opened.set()
    for job in [first, *jobs]:
        job.wait()
    assert ran == [(name, n) for name in "abc" for n in range(3)]


def test_a_slow_task_holds_up_only_its_own_job(two: ThreadPool) -> None:
    gate = Gate()
    slow = two.submit(gate, 3)
    assert gate.entered.wait(WAIT_S)
    for _ in range(20):
        two.submit(_nothing, 5).wait()
    assert not slow.done()
    gate.opened.set()
    slow.wait()
    assert sorted(gate.ran) == [0, 1, 2]


def test_jobs_may_be_waited_for_in_any_order_and_more_than_once(two: ThreadPool) -> None:
    jobs = [two.submit(_nothing, 3) for _ in range(10)]
    for job in reversed(jobs):
        job.wait()
        job.wait()


def test_jobs_are_counted_until_their_last_task_is_over(one: ThreadPool) -> None:
    assert one.count_jobs() == 0
    gate = Gate()
    busy = one.submit(gate, 1)
    assert gate.entered.wait(WAIT_S)
    last = [one.submit(_nothing, 1) for _ in range(2)][-1]
    assert one.count_jobs() == 3
    gate.opened.set()
    busy.wait()
    last.wait()
    assert one.count_jobs() <= 1


def test_no_tasks_are_done_at_once(one: ThreadPool) -> None:
    gate = Gate()
    busy = one.submit(gate, 1)
    assert gate.entered.wait(WAIT_S)
    empty = one.submit(_nothing, 0)
    assert empty.done()
    empty.wait()
    gate.opened.set()
    busy.wait()


def test_many_jobs(two: ThreadPool) -> None:
    ran: list[int] = []
    jobs = [two.submit(ran.append, 3) for _ in range(3000)]
    for job in jobs:
        job.wait()
    assert len(ran) == 9000


def test_many_threads_may_submit(two: ThreadPool) -> None:
    ran: list[int] = []

    def submit() -> None:
        for _ in range(100):
            two.submit(ran.append, 4).wait()

    threads = [threading.Thread(target=submit) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(ran) == 6 * 100 * 4


def test_run_here_runs_in_the_calling_thread() -> None:
    ran: list[tuple[int, threading.Thread]] = []
    job = Job(lambda number: ran.append((number, threading.current_thread())), 3)
    job.run_here()
    job.wait()
    assert ran == [(number, threading.current_thread()) for number in range(3)]


# ---- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyError("k"), SystemExit(3), KeyboardInterrupt()])
def test_what_a_task_raises_comes_out_of_wait(two: ThreadPool, error: BaseException) -> None:
    def fail(number: int) -> None:
        raise error

    job = two.submit(fail, 3)
    with pytest.raises(type(error)) as caught:
        job.wait()
    assert caught.value is error
    two.submit(_nothing, 10).wait()  # the threads live on


def test_after_an_error_no_further_task_starts(one: ThreadPool) -> None:
    ran: list[int] = []

    def fail(number: int) -> None:
        ran.append(number)
        raise ValueError(number)

    job = one.submit(fail, 5)
    with pytest.raises(ValueError, match="0"):
        job.wait()
    one.submit(_nothing, 1).wait()
    assert ran == [0]


# ---- cancel ---------------------------------------------------------------------------------


def test_cancel_keeps_tasks_from_starting_and_lets_running_ones_finish(one: ThreadPool) -> None:
    gate = Gate()
    job = one.submit(gate, 4)
    assert gate.entered.wait(WAIT_S)
    behind = one.submit(_nothing, 2)
    job.cancel()
    assert job.done()
    with pytest.raises(ClosedError, match="cancelled"):
        job.wait()
    gate.opened.set()
    behind.wait()
    assert gate.ran == [0]


def test_cancel_may_bring_its_own_error(one: ThreadPool) -> None:
    gate = Gate()
    job = one.submit(gate, 2)
    assert gate.entered.wait(WAIT_S)
    job.cancel(LookupError("mine"))
    job.cancel(KeyError("later"))
    gate.opened.set()
    with pytest.raises(LookupError, match="mine"):
        job.wait()


def test_cancel_of_a_finished_job_changes_nothing(one: ThreadPool) -> None:
    job = one.submit(_nothing, 2)
    job.wait()
    job.cancel()
    job.wait()


def test_cancel_wakes_up_who_waits(one: ThreadPool) -> None:
    gate, caught = Gate(), []
    job = one.submit(gate, 2)
    assert gate.entered.wait(WAIT_S)

    def wait() -> None:
        try:
            job.wait()
        except ClosedError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    job.cancel()
    waiting.join(WAIT_S)
    assert len(caught) == 1
    gate.opened.set()


# ---- close ----------------------------------------------------------------------------------


def test_close_ends_the_threads_after_the_running_task() -> None:
    pool, gate = ThreadPool(1), Gate()
    job = pool.submit(gate, 3)
    behind = pool.submit(_nothing, 1)
    assert gate.entered.wait(WAIT_S)
    threads = list(pool._running)
    closing = threading.Thread(target=pool.close)
    closing.start()
    for closed in (job, behind):
        with pytest.raises(ClosedError, match="closed"):
            closed.wait()
    assert threads[0].is_alive()
    gate.opened.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert not any(thread.is_alive() for thread in threads)
    assert gate.ran == [0]


def test_close_twice_and_before_any_job() -> None:
    pool = ThreadPool(2)
    pool.close()
    pool.close()
    with pytest.raises(ClosedError):
        pool.submit(_nothing, 1)


def test_a_closed_pool_takes_no_job() -> None:
    pool = ThreadPool(2)
    done = pool.submit(_nothing, 2)
    done.wait()
    pool.close()
    with pytest.raises(ClosedError, match="closed"):
        pool.submit(_nothing, 1)
    with pytest.raises(ClosedError, match="closed"):
        pool.submit(_nothing, 0)
    done.wait()  # what was done stays done


def test_a_task_may_close_its_own_pool() -> None:
    pool = ThreadPool(1)
    job = pool.submit(lambda number: pool.close(), 2)
    with pytest.raises(ClosedError):
        job.wait()
    with pytest.raises(ClosedError):
        pool.submit(_nothing, 1)
    pool.close()


# ---- collection -----------------------------------------------------------------------------


def test_collection_ends_the_threads_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        pool = ThreadPool(2)
        pool.submit(_nothing, 4).wait()
        threads = list(pool._running)
        del pool
        for thread in threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        gc.enable()


def test_waiting_for_a_job_of_a_collected_pool_raises() -> None:
    pool, gate = ThreadPool(1), Gate()
    busy = pool.submit(gate, 1)
    assert gate.entered.wait(WAIT_S)
    behind = pool.submit(_nothing, 1)
    thread = pool._running[0]
    del pool
    with pytest.raises(ClosedError):
        behind.wait()
    gate.opened.set()
    with pytest.raises(ClosedError):  # it was queued still
        busy.wait()
    thread.join(WAIT_S)
    assert not thread.is_alive()


class _Closure:
    def __call__(self, number: int) -> None:
        pass


@pytest.mark.parametrize("how", ["done", "cancelled", "failed", "closed"])
def test_a_job_that_is_over_keeps_nothing_alive(how: str) -> None:
    pool, gate, task = ThreadPool(1), Gate(), _Closure()
    busy = pool.submit(gate, 1)
    assert gate.entered.wait(WAIT_S)
    gone = weakref.ref(task)
    if how == "failed":
        task.__class__ = type("Fails", (_Closure,), {"__call__": lambda self, number: 1 / 0})
    job = pool.submit(task, 2)
    del task
    assert gone() is not None
    if how == "cancelled":
        job.cancel()
    gate.opened.set()
    busy.wait() if how != "closed" else pool.close()
    if how == "failed":
        with pytest.raises(ZeroDivisionError):
            job.wait()
        job._error = None  # its traceback refers to the task
    elif how == "done":
        job.wait()
        pool.submit(_nothing, 1).wait()
    else:
        with pytest.raises(ClosedError):
            job.wait()
    pool.close()
    gc.collect()
    assert gone() is None


# ---- finalizers: the garbage collector may run anything, anywhere ------------------------------


def _run_with_interruption(call: Callable[[], Any], interrupt: Callable[[], None], at_line: int) -> bool:
    """Run ``call``, and ``interrupt`` before the ``at_line``-th line that it executes; False where
    it ends before that line."""
    seen = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        if event == "line" and frame.f_code.co_filename.endswith(("pool.py", "threading.py")):
            seen += 1
            if seen == at_line:
                sys.settrace(None)
                interrupt()
                sys.settrace(trace)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return seen >= at_line


@pytest.mark.hang_after(30)
def test_a_finalizer_may_cancel_a_job_inside_any_of_its_methods() -> None:
    line, reached = 0, True
    while reached:
        line += 1
        ran: list[int] = []
        job = Job(ran.append, 2)
        reached = _run_with_interruption(job.run_here, job.cancel, line)
        assert job.done()
        assert ran == list(range(len(ran)))
        if len(ran) < 2:
            with pytest.raises(ClosedError):
                job.wait()
    assert line > 20


@pytest.mark.hang_after(30)
def test_a_finalizer_may_close_the_queue_inside_a_thread_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_LOOK_AGAIN_S", 0.02)
    for line in range(1, 90):
        queue = pool_module._Queue()
        job = Job(_nothing, 1)
        queue.jobs.append(job)
        # Where no thread closes it in time (past the last line that runs before it waits), this one does.
        late = threading.Timer(2.0, queue.close)
        late.start()
        _run_with_interruption(lambda: pool_module._work(queue, None), queue.close, line)
        late.cancel()
        late.join()
        assert job.done()
        assert queue.closed


# ---- fork -----------------------------------------------------------------------------------


@needs_fork
def test_a_forked_child_has_threads_of_its_own(two: ThreadPool, in_child: InChild) -> None:
    two.submit(_nothing, 3).wait()

    def check() -> None:
        ran: list[int] = []
        two.submit(ran.append, 6).wait()
        two.close()
        assert sorted(ran) == list(range(6))

    in_child(check)
    two.submit(_nothing, 3).wait()  # and the parent keeps its own


@needs_fork
def test_a_job_of_the_parent_raises_in_the_child(one: ThreadPool, in_child: InChild) -> None:
    gate = Gate()
    job = one.submit(gate, 2)
    assert gate.entered.wait(WAIT_S)

    def check() -> None:
        with pytest.raises(ClosedError, match="parent"):
            job.wait()

    in_child(check)
    gate.opened.set()
    job.wait()


@needs_fork
def test_locks_held_at_the_fork_are_free_in_the_child(two: ThreadPool, in_child: InChild) -> None:
    two.submit(_nothing, 1).wait()

    def check() -> None:
        two.submit(_nothing, 2).wait()

    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with two._start_lock, two._queue.lock:
            held.set()
            release.wait(WAIT_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(WAIT_S)
    try:
        in_child(check)
    finally:
        release.set()
        holder.join(WAIT_S)


@needs_fork
def test_a_pool_closed_in_the_parent_is_closed_in_the_child_too(in_child: InChild) -> None:
    pool = ThreadPool(1)
    pool.close()

    def check() -> None:
        with pytest.raises(ClosedError):
            pool.submit(_nothing, 1)

    in_child(check)


# ---- the end of the interpreter ----------------------------------------------------------------

_EXITS = {
    "idle": "pool.submit(lambda n: None, 3).wait()",
    "working": "pool.submit(lambda n: sum(range(200_000)), 2_000)",
    "working, and nobody holds the pool": "pool.submit(lambda n: sum(range(200_000)), 2_000); del pool",
    "with a batch in a cycle": "job = pool.submit(lambda n: sum(range(200_000)), 2_000); job.me = [job, pool]",
    "after an error of a task": "pool.submit(lambda n: 1 / 0, 3)",
    "through sys.exit": "pool.submit(lambda n: sum(range(200_000)), 2_000); sys.exit(0)",
}


@pytest.mark.parametrize("how", _EXITS.values(), ids=_EXITS.keys())
def test_the_interpreter_ends_quietly(how: str) -> None:
    code = f"import sys\nfrom fastpipe.core.pool import ThreadPool\npool = ThreadPool(3)\n{how}\n"
    assert _said_by(code) == ""


_GOES_ON = """
import os, threading
from fastpipe.core import pool
begun, job = threading.Event(), pool.Job(lambda n: None, 1)
def go_on():
    begun.set()
    while not threads._queue.closed:
        pass
    try:
        threads.go_on_with(job)
    except pool.ClosedError as error:
        os.write(1, str(error).encode())
        raise
threads = pool.ThreadPool(1)
threads.submit(lambda n: None, 1, go_on)
begun.wait()
"""


def test_a_thread_that_goes_on_with_a_job_when_the_interpreter_ends_is_told_and_ends() -> None:
    assert _said_by(_GOES_ON) == "this thread pool has been closed"


_DAEMON = """
import os, threading
from fastpipe.core import pool
inside = threading.Event()

def leave():
    with pool.stopped_at_exit():
        with pool.stopped_at_exit():
            inside.set()
            while not pool._is_ending:
                pass
            sum(range(3_000_000))
        os.write(1, b"done, ")
    os.write(1, b"never")

def enter():
    with pool.stopped_at_exit():
        os.write(1, b"never")

threading.Thread(target=leave, daemon=True).start()
inside.wait()
"""
_ENDINGS = {
    "the script ends": "",
    "sys.exit": "import sys\nsys.exit(0)",
    "another thread enters": "pool._close_all()\nthreading.Thread(target=enter, daemon=True).start()",
}


@pytest.mark.parametrize("ending", _ENDINGS.values(), ids=_ENDINGS)
def test_a_daemon_thread_is_stopped_where_it_leaves_or_enters_the_block(ending: str) -> None:
    assert _said_by(_DAEMON + ending + "\n") == "done, "


def test_other_threads_are_not_stopped_at_the_end() -> None:
    code = "import threading\nfrom fastpipe.core import pool\n" + textwrap.dedent("""
        def work():
            threading.main_thread().join()
            with pool.stopped_at_exit():
                print("in", end="")
            print(" and out", end="")
        threading.Thread(target=work).start()
    """)
    assert _said_by(code) == "in and out"


def _said_by(code: str) -> str:
    """What a program prints that ends well and without a word on stderr."""
    root = Path(pool_module.__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


# ---- waiting for a job that one task holds up ------------------------------------------------


def test_waiting_ends_when_the_last_job_has_nothing_left_to_begin(two: ThreadPool) -> None:
    gate = Gate()
    slow = two.submit(gate, 1)
    last = two.submit(_nothing, 20)
    assert not slow.wait_for_either(last), "the slow one is still at it"
    gate.opened.set()
    slow.wait()
    assert slow.wait_for_either(last)


def test_waiting_ends_when_the_job_is_done(one: ThreadPool) -> None:
    gate = Gate()
    first = one.submit(_nothing, 5)
    last = one.submit(gate, 2)  # one of its tasks is begun, the other is not
    assert first.wait_for_either(last)
    gate.opened.set()
    last.wait()


def test_waiting_for_the_last_job_itself(two: ThreadPool) -> None:
    gate = Gate()
    only = two.submit(gate, 3)
    assert not only.wait_for_either(only), "all is begun, one is not done"
    gate.opened.set()
    only.wait()
    assert only.wait_for_either(only)


@pytest.mark.parametrize("which", ["due", "last"])
def test_waiting_ends_with_the_pool(which: str) -> None:
    pool = ThreadPool(1, "test")
    gate = Gate()
    due, last = pool.submit(gate, 2), pool.submit(_nothing, 2)
    outcome: list[bool] = []
    waiting = threading.Thread(
        target=lambda: outcome.append((due if which == "due" else last).wait_for_either(last))
    )
    waiting.start()
    closing = threading.Thread(target=pool.close)
    closing.start()
    gate.opened.set()
    waiting.join(WAIT_S)
    closing.join(WAIT_S)
    assert outcome == [True]


# ---- Ctrl-C --------------------------------------------------------------------------------------


def _interrupted_at(moment: int, act: Callable[[], object]) -> bool:
    """Whether what a signal's handler raises, at so many lines of the pool's code and of ``threading``, came
    before the end.

    Not at a line that begins or ends ``with`` on a lock of C's: the interpreter looks for signals in none of them,
    but a trace function is called there.
    """
    seen = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        code = frame.f_code
        if code.co_filename not in (pool_module.__file__, threading.__file__):
            return None
        if event == "line" and not _line(code.co_filename, frame.f_lineno).startswith("with "):
            seen += 1
            if seen == moment:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def _line(file: str, number: int) -> str:
    return linecache.getline(file, number).strip()


def test_ctrl_c_at_any_line_leaves_a_pool_that_works() -> None:
    def act() -> None:
        before = pool.submit(lambda number: gate.acquire() and gate.release(), 2)
        last = pool.submit(_nothing, 3)
        gate.release()
        before.wait_for_either(last)
        before.wait()
        last.wait()

    moment, came = 1, True
    while came:
        pool, gate = ThreadPool(2, "test"), threading.Lock()
        pool.submit(_nothing, 1).wait()  # its threads are there
        gate.acquire()
        came = _interrupted_at(moment, act)
        with suppress(RuntimeError):
            gate.release()
        assert pool._queue.lock.acquire(timeout=WAIT_S)
        pool._queue.lock.release()
        ran = threading.Event()
        job = pool.submit(lambda number, ran=ran: ran.set(), 1)  # type: ignore[misc]
        assert ran.wait(WAIT_S)
        job.wait()
        pool.close()
        moment += 1
    assert moment > 40
