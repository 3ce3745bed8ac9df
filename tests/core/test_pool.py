"""The life cycle that the pool's module docstring states."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
from scripts import ran

from fastpipe.core import pool as pool_module
from fastpipe.core.pool import Job, ThreadPool
from fastpipe.errors import ClosedError

InChild = Callable[[Callable[[], object]], None]
WAIT_S = 60.0


@pytest.fixture
def one() -> Iterator[ThreadPool]:
    pool = ThreadPool(1, "test")
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


def _stopped(pool: ThreadPool, count: int = 1) -> tuple[Gate, Job]:
    """A job whose first task runs until the gate is opened."""
    gate = Gate()
    job = pool.submit(gate, count)
    assert gate.entered.wait(WAIT_S)
    return gate, job


def test_tasks_start_in_the_order_of_the_jobs(one: ThreadPool) -> None:
    gate, first = _stopped(one)
    ran: list[tuple[str, int]] = []
    jobs = [one.submit(lambda n, name=name: ran.append((name, n)), 3) for name in "abc"]
    empty = one.submit(_nothing, 0)
    assert empty.done()
    empty.wait()
    gate.opened.set()
    for job in (*reversed(jobs), *jobs, first):  # in any order, and more than once
        job.wait()
    assert ran == [(name, n) for name in "abc" for n in range(3)]


@pytest.mark.parametrize("error", [KeyError("k"), SystemExit(3), KeyboardInterrupt()])
def test_wait_raises_a_tasks_error_after_which_none_starts(one: ThreadPool, error: BaseException) -> None:
    ran: list[int] = []

    def fail(number: int) -> None:
        ran.append(number)
        raise error

    job = one.submit(fail, 3)
    with pytest.raises(type(error)) as caught:
        job.wait()
    assert caught.value is error
    one.submit(_nothing, 10).wait()  # the threads live on
    assert ran == [0]


@pytest.mark.parametrize("own", [None, LookupError("cancelled by me")])
def test_cancel_ends_waiting_and_keeps_tasks_from_starting(one: ThreadPool, own: LookupError | None) -> None:
    gate, job = _stopped(one, 4)
    behind = one.submit(_nothing, 2)
    with ThreadPoolExecutor(1) as script:
        waiting = script.submit(job.wait)
        job.cancel(own)
        job.cancel(KeyError("later"))
        with pytest.raises(LookupError if own else ClosedError, match="cancelled"):
            waiting.result(WAIT_S)
    assert job.done()
    gate.opened.set()
    behind.wait()
    behind.cancel()  # changes nothing
    behind.wait()
    assert gate.ran == [0]


def test_close_ends_the_threads_after_the_running_task() -> None:
    pool = ThreadPool(1)
    done = pool.submit(_nothing, 2)
    done.wait()
    gate, job = _stopped(pool, 3)
    behind, threads = pool.submit(_nothing, 1), list(pool._running)
    closing = threading.Thread(target=pool.close)
    closing.start()
    for closed in (job, behind):
        with pytest.raises(ClosedError, match="closed"):
            closed.wait()
    assert threads[0].is_alive()
    gate.opened.set()
    closing.join(WAIT_S)
    assert not any(thread.is_alive() for thread in (closing, *threads))
    assert gate.ran == [0]
    done.wait()  # stays done


def test_a_closed_pool_takes_no_job() -> None:
    unused, used, by_task = ThreadPool(2), ThreadPool(2), ThreadPool(1)
    assert not unused._running, "threads start with the first job"
    used.submit(_nothing, 2).wait()
    with pytest.raises(ClosedError):
        by_task.submit(lambda number: by_task.close(), 2).wait()
    for pool in (unused, used, by_task):
        pool.close()
        pool.close()
        for count in (0, 1):
            with pytest.raises(ClosedError, match="closed"):
                pool.submit(_nothing, count)


@pytest.mark.usefixtures("no_gc")
def test_collection_of_the_pool_ends_its_threads_and_jobs() -> None:
    idle, pool = ThreadPool(2), ThreadPool(1)
    idle.submit(_nothing, 4).wait()
    gate, busy = _stopped(pool)
    behind, threads = pool.submit(_nothing, 1), [*idle._running, *pool._running]
    del idle, pool
    with pytest.raises(ClosedError):
        behind.wait()
    gate.opened.set()
    with pytest.raises(ClosedError):  # it was still queued
        busy.wait()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.hang_after(30)
def test_a_finalizer_may_cancel_a_job_inside_any_of_its_methods() -> None:
    line, reached = 0, True
    while reached:
        line += 1
        ran: list[int] = []
        job = Job(ran.append, 2)
        reached = _reached(line, job.run_here, job.cancel)
        assert job.done()
        assert ran == list(range(len(ran)))
        if len(ran) < 2:
            with pytest.raises(ClosedError):
                job.wait()
    assert line > 20


def test_a_forked_child_has_threads_of_its_own(one: ThreadPool, in_child: InChild) -> None:
    gate, job = _stopped(one, 2)
    closed = ThreadPool(1)
    closed.close()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with one._start_lock, one._queue.lock:
            held.set()
            release.wait(WAIT_S)

    def check() -> None:
        ran: list[int] = []
        one.submit(ran.append, 6).wait()  # no lock of the parent's is held here
        with pytest.raises(ClosedError, match="parent"):
            job.wait()
        with pytest.raises(ClosedError):
            closed.submit(_nothing, 1)
        one.close()
        assert sorted(ran) == list(range(6))

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(WAIT_S)
    try:
        in_child(check)
    finally:
        release.set()
        holder.join(WAIT_S)
        gate.opened.set()
    job.wait()  # the parent keeps its own
    one.submit(_nothing, 3).wait()


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
_PROGRAMS = {
    "continues with a job": (_GOES_ON, "this thread pool has been closed"),
    "leaves a block": (_DAEMON + "import sys\nsys.exit(0)\n", "done, "),
    "enters a block": (
        _DAEMON + "pool._close_all()\nthreading.Thread(target=enter, daemon=True).start()\n",
        "done, ",
    ),
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_a_thread_is_stopped_or_gets_an_error_when_the_interpreter_ends(name: str) -> None:
    code, printed = _PROGRAMS[name]
    ended = ran("-W", "error", "-c", code)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, printed, "")


def _reached(moment: int, act: Callable[[], object], interrupt: Callable[[], object]) -> bool:
    """Run something, and interrupt it before so many lines of the pool's code and of ``threading``; False where
    it ends before.

    Not at a line that begins or ends ``with`` on a lock of C's: the interpreter looks for signals in none of them,
    but a trace function is called there.
    """
    seen = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        code = frame.f_code
        if code.co_filename not in (pool_module.__file__, threading.__file__):
            return None
        line = linecache.getline(code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith("with "):
            seen += 1
            if seen == moment:
                interrupt()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return seen >= moment


def _ctrl_c() -> None:
    raise KeyboardInterrupt


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
        came = _reached(moment, act, _ctrl_c)
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
