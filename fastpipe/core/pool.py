"""A pool of threads that runs jobs.  A job has numbered tasks, and is finished when all tasks are done.

The life cycle of a pool, which tests check:

* Threads start with the first job, in the process that submits the job.  In a forked child the
  pool is empty, because threads do not survive a fork.  Jobs of the parent stay in the parent.
* Tasks start in the order in which their jobs were submitted.  When all tasks of a job have started,
  threads continue with the next job.  So a slow task delays only its own job.
* After ``cancel`` of a job, tasks that have not started never start.  Running tasks finish.
* If the pool is closed or garbage-collected, or if the interpreter ends, each thread ends after its
  current task.  Waiting for a job of a closed pool raises ``ClosedError``.
* Ctrl-C may raise an exception in the user's thread at any line of Python.  So the user's thread uses only
  locks that are implemented in C.  ``Event`` and ``with condition:`` are written in Python, and an exception
  in the middle of their code would leave a lock held forever.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from fastpipe.core.native import native
from fastpipe.errors import ClosedError

_LOOK_AGAIN_S = 30.0

_Options = TypeVar("_Options")


class Job:
    """A job of numbered tasks, as returned by ``ThreadPool.submit``.

    Several threads call ``task`` with the numbers 0 … count - 1.  When all tasks are done, the thread of the
    last task calls ``last``.  The job is finished after this call.
    """

    def __init__(
        self, task: Callable[[int], None], count: int, last: Callable[[], None] | None = None
    ) -> None:
        # Set to None after the last task, because the task's closure may refer to a batch that refers to this
        # job.
        self._task: Callable[[int], None] | None = task if count else None
        self._last = last
        self._count = count
        # The garbage collector may run a finalizer that cancels the job during any method of the job, in the
        # same thread.  So the lock is re-entrant.
        self._lock = threading.RLock()
        self._finished = count == 0
        self._next = 0
        self._unfinished = count
        self._gates: tuple[threading.Lock, ...] = ()  # held locks on which threads wait
        self._error: BaseException | None = None
        self._pid = os.getpid()
        self._when_begun: Callable[[], None] | None = None
        self._when_done: Callable[[], None] | None = None

    def expect(self, count: int) -> None:
        """Set the number of tasks, if this number was unknown at first.  Call this before any task begins."""
        with self._lock:
            if self._finished:
                return
            self._count = self._unfinished = count
            if not count:
                self._finish(None)

    def wait(self) -> None:
        """Block until every task is done.

        Raises:
            ClosedError: the pool was closed, or the job was cancelled, before the job was done.
            BaseException: the error that a task raised.  This is an error of the program, because tasks
                handle the errors of samples themselves.
        """
        if os.getpid() != self._pid:
            raise ClosedError(
                "this batch was started in the parent process, whose threads do not exist in this one"
            )
        if not self._finished:
            self._until_done()
        if self._error is not None:
            _stop_if_ending()
            raise self._error

    def done(self) -> bool:
        return self._finished

    def _until_done(self) -> None:
        gate = _shut_gate()
        with self._lock:
            if self._finished:
                return
            self._gates += (gate,)
        gate.acquire()

    def wait_for_either(self, last: Job) -> bool:
        """Block until this job is done, or until every task of the last submitted job ``last`` has started.

        Return whether this job is done.  Once every task has started, threads become idle if no further job
        is submitted.  Only one thread at a time may call this.
        """
        gate = _shut_gate()
        news = partial(_open_gate, gate)
        is_begun = last._watch_begun(news)
        with self._lock:
            self._when_done = news
            is_done = self._finished
        if not (is_begun or is_done):
            gate.acquire()
        last._when_begun = self._when_done = None
        return self.done()

    def _watch_begun(self, news: Callable[[], None]) -> bool:
        """Return whether every task has started.  If not, ``news`` is called once every task has started."""
        with self._lock:
            self._when_begun = news
            return self._next >= self._count

    def cancel(self, error: BaseException | None = None) -> None:
        """Start no further task, and make ``wait`` raise ``error``.  Running tasks finish."""
        with self._lock:
            if not self._finished:
                self._finish(error or ClosedError("the job was cancelled before it was done"))

    def run_here(self) -> None:
        while self.run_next():
            pass

    def run_next(self) -> bool:
        """Run one task that has not started.  Return False if there was no such task or the task failed."""
        with self._lock:
            number, task = self._next, self._task
            if task is None or number >= self._count:
                return False
            self._next += 1
            if self._next == self._count and self._when_begun is not None:
                self._when_begun()
        try:
            task(number)
            task = None  # when the job is finished, this frame must not keep the batch alive
            with self._lock:
                self._unfinished -= 1
                is_last = not self._unfinished
                last = self._last if is_last and not self._finished else None
            if last is not None:
                last()
                last = None
        except BaseException as error:  # any error, because ``wait`` must end and raise it
            task = last = None
            self.cancel(error)
            return False
        if is_last:
            with self._lock:
                if not self._finished:
                    self._finish(None)
        return True

    def _finish(self, error: BaseException | None) -> None:
        self._error = error
        self._finished = True  # set after ``_error``, because ``wait`` reads ``_finished`` first
        self._next = self._count
        self._task = self._last = None
        gates, self._gates = self._gates, ()
        for gate in gates:
            _open_gate(gate)
        for heard in (self._when_begun, self._when_done):
            if heard is not None:
                heard()


def _shut_gate() -> threading.Lock:
    """Return a held lock.  A thread that acquires the lock waits until the lock is released."""
    gate = threading.Lock()
    gate.acquire()
    return gate


def _open_gate(gate: threading.Lock) -> None:
    """Release a lock, which may be released already."""
    with suppress(RuntimeError):
        gate.release()


class _Queue:
    """The state that a pool's threads share.  It does not refer to the pool, which can then be collected."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # enter the condition through ``lock``
        self.jobs: deque[Job] = deque()
        self.closed = False

    def close(self) -> None:
        with self.lock:
            self.closed = True
            jobs, self.jobs = self.jobs, deque()
            self.changed.notify_all()
        for job in jobs:
            job.cancel(ClosedError("the thread pool was closed before the batch was done"))


class ThreadPool:
    """A pool of a fixed number of threads.  Each thread calls ``prepare`` before its first task."""

    def __init__(
        self, threads: int, name: str = "fastpipe", prepare: Callable[[], None] | None = None
    ) -> None:
        self.threads = threads
        self._name, self._prepare = name, prepare
        self._start_lock = threading.Lock()
        self._reset()
        _pools.add(self)

    def submit(self, task: Callable[[int], None], count: int, last: Callable[[], None] | None = None) -> Job:
        """Queue a job, or raise a ``ClosedError`` if the pool has been closed."""
        job = Job(task, count, last)
        self._queue_job(job, deque.append)
        return job

    def go_on_with(self, job: Job) -> None:
        """Queue a job in front of all waiting jobs.  No task of ``job`` has started, and ``job`` continues
        another job of this pool."""
        self._queue_job(job, deque.appendleft)

    def _queue_job(self, job: Job, queue: Callable[[deque[Job], Job], None]) -> None:
        self._start()
        with self._queue.lock:
            closed = self._queue.closed
            if not job.done() and not closed:
                queue(self._queue.jobs, job)
                self._queue.changed.notify_all()
        if closed:
            _stop_if_ending()
            raise ClosedError("this thread pool has been closed")

    def close(self) -> None:
        """End the threads, and wait for their end.  ``close`` may be called again."""
        self._queue.close()
        for thread in self._running:
            if thread is not threading.current_thread():
                thread.join()

    def _reset(self) -> None:
        self._queue = _Queue()
        self._running: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _Queue.close, self._queue)
        self._finalizer.atexit = False

    def _start(self) -> None:
        with self._start_lock:
            if self._running or self._queue.closed:
                return
            for number in range(self.threads):
                thread = threading.Thread(
                    target=_work, args=(self._queue, self._prepare), name=f"{self._name}-{number}",
                    daemon=True,
                )  # fmt: skip
                _busy.add(thread)  # added before the start, because the thread may end at once
                try:
                    thread.start()
                except RuntimeError:  # the limit of threads is reached: one thread is enough
                    _busy.discard(thread)
                    if not self._running:
                        raise
                    return
                self._running.append(thread)

    def _after_fork(self) -> None:
        # A lock that another thread held at the fork would stay locked forever.
        self._finalizer.detach()
        self._start_lock = threading.Lock()
        closed = self._queue.closed
        self._reset()
        self._queue.closed = closed


def _work(queue: _Queue, prepare: Callable[[], None] | None) -> None:
    try:
        if prepare is not None:
            prepare()
        _work_until_closed(queue)
    finally:
        _busy.discard(threading.current_thread())


def _work_until_closed(queue: _Queue) -> None:
    while True:
        with queue.lock:
            while not queue.jobs and not queue.closed:
                # The pool's finalizer may run in this thread just before the thread waits.  Then no
                # other thread wakes this thread.
                queue.changed.wait(_LOOK_AGAIN_S)
            job = next(iter(queue.jobs), None)  # None if the queue has been closed
            if job is None or queue.closed:
                return
        if not job.run_next():
            with queue.lock:
                jobs = queue.jobs  # between these lines, a finalizer may replace ``queue.jobs``
                if jobs and jobs[0] is job:
                    jobs.popleft()
        del job  # a waiting thread must not keep a finished job alive


class Process(NamedTuple):
    """Describes a process that makes batches, as PyTorch's or TensorFlow's part of fastpipe knows it.

    Attributes:
        pool: the threads of the process; None if the calling thread makes the batches.
        workers: the number of parallel worker processes; 0 if this process is not a worker process.
        number: the number of this process among the worker processes.
    """

    pool: ThreadPool | None
    workers: int = 0
    number: int = 0


class ProcessRuntime(Generic[_Options]):
    """Holds a dataset's state in one process, for one set of options.  Other processes must not use it."""

    def __init__(self, options: _Options, pool: ThreadPool | None) -> None:
        self._pid, self.options, self.pool = os.getpid(), options, pool

    def fits(self, options: _Options) -> bool:
        return self._pid == os.getpid() and self.options == options

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


_pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()
# Threads that have not ended.  The thread of a collected pool may still be inside a C library, and only this
# set refers to it.
_busy: set[threading.Thread] = set()


def _forget_threads_in_child() -> None:
    _busy.clear()
    _inside.clear()
    for pool in list(_pools):
        pool._after_fork()


_is_ending = False
_inside: set[int] = set()
_LEAVE_S = 10.0


@contextmanager
def stopped_at_exit() -> Iterator[None]:
    """Keep the user's daemon threads out of the ``with`` block when the interpreter ends.

    When the interpreter ends, Python ends a daemon thread by unwinding the thread's stack as soon as the
    thread requests the GIL.  If that stack contains C++ code of torch, the process aborts.  So the
    interpreter waits at its end for threads in the block, and a thread that then leaves or enters the block
    stops forever.
    """
    thread = threading.current_thread()
    if not thread.daemon:
        yield
        return
    number = threading.get_ident()
    outermost = number not in _inside
    # Add the thread before testing ``_is_ending``, because ``_close_all`` sets ``_is_ending`` before it tests
    # ``_inside``.
    _inside.add(number)
    try:
        _stop_if_ending()
        yield
    finally:
        if outermost:
            _inside.discard(number)
            _stop_if_ending()


def _stop_if_ending() -> None:
    """Stop a daemon thread forever when the interpreter ends, as Python does a little later.

    If it did not stop, the thread would end with an error, and Python would print the error.  Threads that
    Python did not start are not stopped, because their library (such as TensorFlow) waits for them and
    handles the error.  A pool's own threads are not stopped either: they end by themselves, and the
    interpreter waits for them."""
    thread = threading.current_thread()
    is_started = not isinstance(thread, threading._DummyThread)
    if _is_ending and thread.daemon and is_started and thread not in _busy:
        _inside.discard(threading.get_ident())
        threading.Event().wait()


def say_ending() -> None:
    """Record that the interpreter ends.  From now on, a daemon thread of the user stops forever where a
    cancelled job would raise an error in the thread."""
    global _is_ending
    _is_ending = True


def _close_all() -> None:
    say_ending()
    for pool in list(_pools):
        pool.close()
    for thread in list(_busy):
        thread.join()
    # The remaining threads in ``_inside`` run user code, or wait for the GIL.
    deadline = time.monotonic() + _LEAVE_S
    while _inside and time.monotonic() < deadline:
        time.sleep(0.001)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads_in_child)
# Daemon threads must not be inside a C library during the interpreter's shutdown.
atexit.register(_close_all)


# Jobs of the native engine (``fastpipe.native``).  Callers wait for them as for jobs of a ``ThreadPool``.
#
# The engine's threads do not use Python.  One thread of this module, the *watcher*, receives events from the
# engine.  An event says that a job is done, or that all items of a job are begun (if a thread waits for this
# event).  The watcher runs the next steps, so that no batch has to wait for the user's thread.

_log = logging.getLogger("fastpipe")

_BEGUN, _DONE, _STOPPED = 1, 2, 3  # kinds of events
_LISTEN_MS = 10_000
# The training thread has priority over the engine's threads.  With as many threads of equal priority as
# cores, a step of 5 ms took 50 % longer (16 cores).
_NICENESS = 10
_LEAVE_MS = 10_000  # how long the interpreter's end waits for images that are being made


class NativeJob(Job):
    """A job of the native engine, which makes a batch (``native.ImageBatch``).

    ``channel`` limits the number of threads for the batch.  When no part of the batch runs any more, the
    watcher thread calls ``last``, unless the job was cancelled.
    """

    def __init__(self, batch: Any, channel: Any, threads: int, last: Callable[[], None]) -> None:
        super().__init__(_no_task, 1, last)
        self._batch = batch
        # The lock keeps the watcher from handling events of a job that is not in the table yet.
        with _table_lock:
            _watch()
            self._number: int = native.submit(batch, channel, threads)
            if self._number:
                _jobs[self._number] = self
        if not self._number:
            raise ClosedError("no thread can be started to decode images, or the interpreter ends")

    def run_next(self) -> bool:
        return False

    def cancel(self, error: BaseException | None = None) -> None:
        """Cancel the job as ``Job.cancel`` does.  The memory of the batch stays allocated until the engine
        has stopped writing to it."""
        if not self._finished and os.getpid() == self._pid:
            native.cancel(self._number)
        super().cancel(error)

    def _watch_begun(self, news: Callable[[], None]) -> bool:
        """Do as ``Job._watch_begun``, and ask the engine to report when every task has started."""
        return super()._watch_begun(news) or bool(native.watch_begun(self._number))

    def begun(self) -> None:
        with self._lock:
            self._next = self._count
            if self._when_begun is not None:
                self._when_begun()

    def ended(self) -> None:
        """Call ``last`` and finish the job.  The engine has stopped working on the batch."""
        with self._lock:
            last = None if self._finished else self._last
        try:
            if last is not None:
                last()
        except BaseException as error:  # ``wait`` raises it
            super().cancel(error)
        with self._lock:
            if not self._finished:
                self._finish(None)
        self._batch = None


def _no_task(number: int) -> None:
    raise AssertionError("the native engine runs its own tasks")


_table_lock = threading.Lock()
_jobs: dict[int, NativeJob] = {}  # jobs in the engine, whose memory must stay allocated
_watcher: threading.Thread | None = None


def _watch() -> None:
    """Start the watcher if it does not run.  The caller holds ``_table_lock``."""
    global _watcher
    if _watcher is None or not _watcher.is_alive():  # Ctrl-C may have come before the watcher started
        _watcher = threading.Thread(target=_listen, name="fastpipe-watcher", daemon=True)
        _watcher.start()


def _listen() -> None:
    while True:
        number, kind = native.next_event(_LISTEN_MS)
        if kind == _STOPPED:
            return
        if kind == _BEGUN:
            with _table_lock:
                job = _jobs.get(number)
            if job is not None:
                job.begun()
        elif kind == _DONE:
            with _table_lock:
                job = _jobs.pop(number, None)
            if job is not None:
                job.ended()
        job = None  # do not keep a batch alive while waiting


def _forget_in_child() -> None:
    """Forget all jobs in a forked child.  The engine and the watcher exist only in the parent process."""
    global _table_lock, _watcher
    _table_lock, _watcher = threading.Lock(), None
    # The engine may have been writing to the memory of these jobs, so the memory is never used again.
    _abandoned.extend(_jobs.values())
    _jobs.clear()


_abandoned: list[NativeJob] = []


def _stop() -> None:
    """End the engine's threads, which must not write to memory that the interpreter frees."""
    if _watcher is None or not _watcher.is_alive():
        return
    say_ending()
    if native.stop(_LEAVE_MS):
        _watcher.join(_LEAVE_MS / 1000)
    else:
        _log.warning("a thread that reads an image has not ended within %d s", _LEAVE_MS // 1000)


native.set_niceness(_NICENESS)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_stop)
