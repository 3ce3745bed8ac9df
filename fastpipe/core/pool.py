"""Threads that work through jobs: a job is some numbered tasks, finished when all are done.

Life cycle, which the tests hold the code to:

* Threads start with the first job, in the process that submits it.  In a forked child the
  pool is empty again: threads do not survive a fork, and jobs of the parent stay there.
* Tasks start in the order in which jobs were submitted; a thread that finds a job's tasks
  all started continues with the next job, so that a slow task delays only its own job.
* ``cancel`` on a job keeps its unstarted tasks from starting; those that run finish.
* ``close``, the collection of the pool, and the end of the interpreter end the threads after
  the task that each is running.  Waiting for a job of a closed pool raises ``ClosedError``.
* A signal handler's exception (Ctrl-C) may interrupt the script's thread at any line of Python.
  So it uses C locks only: an interrupt in the middle of an ``Event`` or of ``with condition:``, which are
  written in Python, would leave a lock held forever.
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
    """Some numbered tasks.  Made by ``ThreadPool.submit``.

    ``task`` is called with 0 … count - 1, from several threads; ``last`` once all are done, by the thread
    that did the last; the job is finished after it.
    """

    def __init__(
        self, task: Callable[[int], None], count: int, last: Callable[[], None] | None = None
    ) -> None:
        # Dropped with the last task: a task's closure may hold a batch, which holds the job.
        self._task: Callable[[int], None] | None = task if count else None
        self._last = last
        self._count = count
        # A finalizer, run by the garbage collector, may cancel the job in the middle of any of
        # its methods, in the same thread: the lock lets it in.
        self._lock = threading.RLock()
        self._finished = count == 0
        self._next = 0
        self._unfinished = count
        self._gates: tuple[threading.Lock, ...] = ()  # closed gates of waiting threads
        self._error: BaseException | None = None
        self._pid = os.getpid()
        self._when_begun: Callable[[], None] | None = None
        self._when_done: Callable[[], None] | None = None

    def expect(self, count: int) -> None:
        """Set the number of tasks if it is known only now; call this before any task begins."""
        with self._lock:
            if self._finished:
                return
            self._count = self._unfinished = count
            if not count:
                self._finish(None)

    def wait(self) -> None:
        """Block until every task is done.

        Raises:
            ClosedError: the pool was closed, or the job cancelled, before it was done.
            BaseException: what a task raised: an error of the program, as tasks keep errors of a sample to
                themselves.
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
        """Block until this job is done (return True), or until every task of the last submitted job has been
        started, so that threads would idle.  For one thread at a time."""
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
        """Return whether every task has been started; if not, call ``news`` once they are."""
        with self._lock:
            self._when_begun = news
            return self._next >= self._count

    def cancel(self, error: BaseException | None = None) -> None:
        """Start no further task and let ``wait`` raise; running tasks finish."""
        with self._lock:
            if not self._finished:
                self._finish(error or ClosedError("the job was cancelled before it was done"))

    def run_here(self) -> None:
        while self.run_next():
            pass

    def run_next(self) -> bool:
        """Run one task that has not started; return False if there is none."""
        with self._lock:
            number, task = self._next, self._task
            if task is None or number >= self._count:
                return False
            self._next += 1
            if self._next == self._count and self._when_begun is not None:
                self._when_begun()
        try:
            task(number)
            task = None  # whoever hears that all is done finds nothing here that keeps a batch alive
            with self._lock:
                self._unfinished -= 1
                is_last = not self._unfinished
                last = self._last if is_last and not self._finished else None
            if last is not None:
                last()
                last = None
        except BaseException as error:  # of any kind: ``wait`` raises it, else a waiting thread would not end
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
        self._finished = True  # after it: another thread's ``wait`` looks at them in the other order
        self._next = self._count
        self._task = self._last = None
        gates, self._gates = self._gates, ()
        for gate in gates:
            _open_gate(gate)
        for heard in (self._when_begun, self._when_done):
            if heard is not None:
                heard()


def _shut_gate() -> threading.Lock:
    """Return a held lock: acquiring it again waits until it is released."""
    gate = threading.Lock()
    gate.acquire()
    return gate


def _open_gate(gate: threading.Lock) -> None:
    """Release a lock, which may be released already."""
    with suppress(RuntimeError):
        gate.release()


class _Queue:
    """The threads' shared state.  It does not refer to the pool, so the pool can be collected."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # to be entered by the lock itself
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
    """A fixed number of threads; ``prepare`` is called in each before its first task."""

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
        """Queue a job without begun tasks that continues another job of this pool, before all waiting
        jobs."""
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
        """End the threads and wait for them.  May be called again."""
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
                _busy.add(thread)  # before it starts: it may end at once
                try:
                    thread.start()
                except RuntimeError:  # the thread limit is reached: fewer are enough, but not 0
                    _busy.discard(thread)
                    if not self._running:
                        raise
                    return
                self._running.append(thread)

    def _after_fork(self) -> None:
        # A lock that another thread held at the fork would stay locked for ever.
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
                # The pool's finalizer may run in this very thread just before it waits, and then
                # no other thread wakes it up.
                queue.changed.wait(_LOOK_AGAIN_S)
            job = next(iter(queue.jobs), None)  # none: closed, perhaps this moment
            if job is None or queue.closed:
                return
        if not job.run_next():
            with queue.lock:
                jobs = queue.jobs  # ours even if a finalizer closes the queue between these lines
                if jobs and jobs[0] is job:
                    jobs.popleft()
        del job  # a finished job must not be kept alive by a thread that waits


class Process(NamedTuple):
    """A framework's description of a process that makes batches: its threads (None for the calling one), the
    number of parallel processes that make batches for another one, and this one's number among them; 0 if
    batches are used here."""

    pool: ThreadPool | None
    workers: int = 0
    number: int = 0


class ProcessRuntime(Generic[_Options]):
    """The state of a dataset with certain options in one process, which must not move to another."""

    def __init__(self, options: _Options, pool: ThreadPool | None) -> None:
        self._pid, self.options, self.pool = os.getpid(), options, pool

    def fits(self, options: _Options) -> bool:
        return self._pid == os.getpid() and self.options == options

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


_pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()
# Threads that have not ended.  A collected pool's thread may still be inside a C library, and
# is then referenced nowhere else.
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
    """Keep the script's daemon threads out of the block when the interpreter ends.

    Python ends such a thread by unwinding its stack when it next asks for the GIL, and C++ code on
    that stack (torch's) then aborts the process.  So the end of the interpreter waits for threads
    in the block, and stops them for good where they would leave or enter it.
    """
    thread = threading.current_thread()
    if not thread.daemon:
        yield
        return
    number = threading.get_ident()
    outermost = number not in _inside
    _inside.add(number)  # before looking whether the end has begun, which looks here after it has
    try:
        _stop_if_ending()
        yield
    finally:
        if outermost:
            _inside.discard(number)
            _stop_if_ending()


def _stop_if_ending() -> None:
    """Stop a daemon thread for good when the interpreter ends, as Python does a little later: an
    error would be printed as the thread's last words.

    Threads not started by Python are exempt: their library, such as TensorFlow, waits and handles the error.
    So are a pool's own threads, which are awaited and end on their own."""
    thread = threading.current_thread()
    is_started = not isinstance(thread, threading._DummyThread)
    if _is_ending and thread.daemon and is_started and thread not in _busy:
        _inside.discard(threading.get_ident())
        threading.Event().wait()


def say_ending() -> None:
    """Stop the script's daemon threads for good where a job that was cancelled at exit would
    raise an error."""
    global _is_ending
    _is_ending = True


def _close_all() -> None:
    say_ending()
    for pool in list(_pools):
        pool.close()
    for thread in list(_busy):
        thread.join()
    # Those that are left are in the middle of user code, or wait for the GIL.
    deadline = time.monotonic() + _LEAVE_S
    while _inside and time.monotonic() < deadline:
        time.sleep(0.001)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads_in_child)
# Daemon threads must not be inside a C library while the interpreter is taken down.
atexit.register(_close_all)


# Jobs of the native engine: begun here, watched by one thread, waited for like those of a ``ThreadPool``.
#
# The engine's threads do not use Python. One thread of this module, the *watcher*, receives events from the
# engine: a job is done, or all its items are begun if a thread waits for that. It runs the next steps, so
# that no batch has to wait for the script's thread.

_log = logging.getLogger("fastpipe")

_BEGUN, _DONE, _STOPPED = 1, 2, 3  # kinds of events
_LISTEN_MS = 10_000
# The training's thread has priority: it gets the core of an engine thread when it needs one.
# With as many threads of equal priority as cores, a step of 5 ms took 50 % longer (16 cores).
_NICENESS = 10
_LEAVE_MS = 10_000  # at the interpreter's end, for images that are being made


class NativeJob(Job):
    """A batch (``native.ImageBatch``) that the native engine makes; ``channel`` bounds how many threads are
    busy with it.

    ``last`` is called by the watcher when nothing of the batch runs any more, unless it was given up.
    """

    def __init__(self, batch: Any, channel: Any, threads: int, last: Callable[[], None]) -> None:
        super().__init__(_no_task, 1, last)
        self._batch = batch
        # With the watcher locked out: it must not get events of a job that is not in the table yet.
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
        """Cancel as ``Job`` does; the memory that the engine writes to stays until the engine has stopped."""
        if not self._finished and os.getpid() == self._pid:
            native.cancel(self._number)
        super().cancel(error)

    def _watch_begun(self, news: Callable[[], None]) -> bool:
        """Do as ``Job`` does; the watcher is woken only for waiting threads."""
        return super()._watch_begun(news) or bool(native.watch_begun(self._number))

    def begun(self) -> None:
        with self._lock:
            self._next = self._count
            if self._when_begun is not None:
                self._when_begun()

    def ended(self) -> None:
        """Handle the end of the job: nothing of it runs any more."""
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
_jobs: dict[int, NativeJob] = {}  # jobs in the engine: their memory must stay
_watcher: threading.Thread | None = None


def _watch() -> None:
    """Start the watcher, if there is none; with ``_table_lock`` held."""
    global _watcher
    if _watcher is None or not _watcher.is_alive():  # Ctrl-C may have come before it was started
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
        job = None  # nothing of a batch is kept alive while waiting


def _forget_in_child() -> None:
    """Forget all jobs in a forked child, which has neither engine nor watcher; they are the parent's."""
    global _table_lock, _watcher
    _table_lock, _watcher = threading.Lock(), None
    _abandoned.extend(_jobs.values())  # their memory may have been written to just then: never used again
    _jobs.clear()


_abandoned: list[NativeJob] = []


def _stop() -> None:
    """End the engine's threads: they must not write to memory that the interpreter frees."""
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
