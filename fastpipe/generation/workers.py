"""Workers that make blocks of rows in this thread, in threads, in processes, or in any executor."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, ClassVar, Literal

from fastpipe.core.extras import require, require_threadpoolctl
from fastpipe.core.files import open_regular
from fastpipe.core.machine import available_cpus
from fastpipe.core.processes import end_with_parent, signal_name
from fastpipe.core.text import printable
from fastpipe.errors import FastpipeError, OptionError, WorkerError
from fastpipe.generation.rows import Block, Failure, Maker, Task
from fastpipe.generation.storage import Layout, Stored, Writer, described, replace_file

Kind = Literal["processes", "threads"]
FUNCTION = "function"  # name of the file from which an executor's workers read the task


@dataclass(frozen=True)
class Done:
    """What a worker returns for one block of rows."""

    stored: Stored  # the record of the rows; it has no rows if the first row failed
    failure: Failure | None  # the failure that ended the block early
    seconds: float  # duration of the block
    who: tuple[str, int, int]  # machine, process and thread
    sent: tuple[bytes, int] | None = (
        None  # the pickled rows and their checksum, if the worker has not stored the rows
    )

    def block(self) -> Block | None:
        """Return the rows that the worker sent, or None; raise a ValueError if their checksum differs."""
        if self.sent is None:
            return None
        content, crc = self.sent
        if zlib.crc32(content) != crc:
            rows = f"rows {self.stored.first} to {self.stored.last - 1}"
            raise ValueError(f"{rows} did not arrive as {self.who[0]} sent them: checksums differ")
        block: Block = pickle.loads(content)
        return block


def _work(task: Task, writer: Writer | None, *, sends: bool = False) -> Callable[[int, int], Done]:
    """Return a function that makes a block of rows and stores the block with ``writer``.

    If ``writer`` is None, the function returns the rows if ``sends`` is true, and otherwise discards them.
    """
    maker, put = Maker(task), writer.put if writer else described

    def run(first: int, last: int) -> Done:
        begun = time.perf_counter()
        block, failure = maker.block(first, last)
        stored, sent = put(block), None
        who = socket.gethostname(), os.getpid(), threading.get_native_id()
        if sends:
            content = pickle.dumps(block, pickle.HIGHEST_PROTOCOL)
            sent = content, zlib.crc32(content)
        return Done(stored, failure, time.perf_counter() - begun, who, sent)

    return run


class _ThisThread(Executor):
    """An executor that runs each call immediately, in the thread that submits it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Workers(AbstractContextManager["Workers"]):
    """Workers that make ``count`` blocks of rows at the same time; they end with the ``with`` block."""

    def __init__(
        self, executor: Executor, run: Callable[[int, int], Done], count: int, *, limits: bool = True
    ) -> None:
        self._executor, self._run, self._count = executor, run, count
        self._limits = OneThreadEach() if limits else None

    @property
    def count(self) -> int:
        return self._count

    @property
    def slots(self) -> int:
        """Largest number of submitted blocks: for each worker, a block that it makes and one that waits."""
        return 2 * self.count

    def submit(self, first: int, last: int) -> Future[Done]:
        """Submit the block of rows from ``first`` to ``last - 1``."""
        return self._executor.submit(self._run, first, last)

    def abandon(self) -> None:
        """End the workers; if possible, do not wait for the blocks that they are making."""

    def close(self) -> None:
        """End the workers after they have finished the blocks that they have started."""
        self._executor.shutdown(cancel_futures=True)
        if self._limits is not None:
            self._limits.lift()

    def __exit__(self, *_: object) -> None:
        self.close()


class ThisThread(Workers):
    """A worker in this thread: ``submit`` makes the block before it returns."""

    slots = 1

    def __init__(self, task: Task, writer: Writer | None) -> None:
        super().__init__(_ThisThread(), _work(task, writer), 1)


class Threads(Workers):
    """Worker threads, for functions that release the GIL."""

    def __init__(self, task: Task, writer: Writer | None, count: int) -> None:
        pool = ThreadPoolExecutor(count, "fastpipe-generate", limit_this_thread)
        super().__init__(pool, _work(task, writer), count)


class Cluster(Workers):
    """Workers in an executor of the user, who also closes the executor.

    The workers must be able to read ``folder``.  They return the rows, and this process stores the rows.  If
    ``count`` is None and the executor does not name its number of workers, each worker is counted when it
    returns its first block.
    """

    def __init__(self, task: Task, folder: Path, executor: Executor, count: int | None) -> None:
        content = _pickled(task)
        replace_file(folder / FUNCTION, content)
        run = functools.partial(_run_from_folder, str(folder.resolve()), hashlib.sha256(content).hexdigest())
        # The executor's workers may be threads of this process, so libraries' threads are limited here, too.
        super().__init__(executor, run, count or getattr(executor, "_max_workers", None) or 0)
        self._seen: set[tuple[str, int, int]] = set()

    @property
    def count(self) -> int:
        return self._count or len(self._seen) + 1

    def submit(self, first: int, last: int) -> Future[Done]:
        future = super().submit(first, last)
        future.add_done_callback(self._see)
        return future

    def close(self) -> None:
        assert self._limits is not None
        self._limits.lift()

    def _see(self, future: Future[Done]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._seen.add(future.result().who)


def _run_from_folder(folder: str, digest: str, first: int, last: int) -> Done:
    """Make rows in a worker of an executor; read the task from a folder that all workers share."""
    try:
        task = _task(folder, digest)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            error.errno, f"a worker on {socket.gethostname()} does not see {folder!r}: name an out= in a "
            "folder that all workers of the executor share"
        ) from error  # fmt: skip
    with OneThreadEach():
        return _work(task, None, sends=True)(first, last)


@functools.lru_cache(maxsize=4)
def _task(folder: str, digest: str) -> Task:
    with open(os.path.join(folder, FUNCTION), "rb", opener=open_regular) as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != digest:
        raise OSError(printable(f"{Path(folder, FUNCTION)} holds another function than it was asked to run"))
    task: Task = pickle.loads(data)
    return task


def _pickled(task: Task) -> bytes:
    """Pickle a task for another process; functions of a script and inner functions are pickled by value."""
    cloudpickle = require("cloudpickle", extra="generation")
    try:
        data: bytes = cloudpickle.dumps(task, protocol=pickle.HIGHEST_PROTOCOL)
        return data
    except FastpipeError:
        raise
    except Exception as error:
        name: Any = getattr(task.function, "__qualname__", type(task.function).__name__)
        raise OptionError(
            f"{name} cannot be sent to another process: {type(error).__name__}: {error}. Open files, locks "
            "and connections within the function, not before it; or make rows without other processes: "
            "workers=0, or executor='threads'"
        ) from error


# ---- worker processes, each a new interpreter ------------------------------------------------------------
#
# The standard library's executor imports the script again in each process that it spawns, so scripts need a
# ``__main__`` guard.  When one process dies, that executor fails and does not report the task of the process.
# Here a worker process receives only the function, by value.  When a worker process dies, the others go on.
# Each side of the pipe detects that the other side has ended.

_CHILD = """import sys; sys.path[:] = {path!r}; sys.argv[:] = {argv!r}
from fastpipe.generation.workers import serve; serve({descriptor}, {parent})"""
_END_S = 5.0  # time that a worker has to end before it is killed
_LOOK_S = 0.5  # interval at which the parent checks that a busy worker is alive


class Processes(Workers):
    """Worker processes, which make rows and store the rows in the files that ``layout`` describes.

    If a process dies, a new process replaces it, and the future of its block raises a `WorkerError`.  If
    ``layout`` is None, the rows are discarded.
    """

    def __init__(self, task: Task, layout: Layout | None, count: int) -> None:
        content = _pickled(task), pickle.dumps(layout)
        self._processes = [_Process(content) for _ in range(count)]
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        try:
            for process in self._processes:
                process.start()
                self._idle.put(process)
        except BaseException:
            for process in self._processes:
                process.end(kills=True)
            raise
        pool = ThreadPoolExecutor(count, "fastpipe-generate")  # each thread waits for one process
        super().__init__(pool, self._run_in_one, count, limits=False)

    def abandon(self) -> None:
        for process in self._processes:
            process.kill()
        self.close()

    def close(self) -> None:
        super().close()
        for process in self._processes:
            process.end()

    def _run_in_one(self, first: int, last: int) -> Done:
        process = self._idle.get()
        try:
            return process.run(first, last)
        finally:
            self._idle.put(process)


class _Process:
    """A worker process and the pipe to it."""

    def __init__(self, content: tuple[bytes, bytes]) -> None:
        self._content = content
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._is_killed = False

    def start(self) -> None:
        """Start the process."""
        self._pipe, its = Pipe()
        with its:
            path = [one for one in sys.path if isinstance(one, str)]  # Python ignores all other types
            code = _CHILD.format(path=path, argv=sys.argv, descriptor=its.fileno(), parent=os.getpid())
            flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", code], pass_fds=[its.fileno()], stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C goes only to the parent, which lets this block finish
                env={**os.environ, **ONE_THREAD},
            )  # fmt: skip
        with suppress(OSError):  # the process has ended already; the first call of `run` reports this
            for part in self._content:
                self._pipe.send_bytes(part)

    def run(self, first: int, last: int) -> Done:
        """Make rows in the process; raise the error of the process, or a WorkerError if the process died."""
        if self._process is None:
            if self._is_killed:
                raise CancelledError
            self.start()
        assert self._process is not None and self._pipe is not None
        try:
            self._pipe.send((first, last))
            # The pipe may not report the end of the worker: a child of the worker may hold the pipe open.
            while not self._pipe.poll(_LOOK_S):
                if self._process.poll() is not None and not self._pipe.poll():
                    raise EOFError
            found = self._pipe.recv()
        except (EOFError, OSError) as error:
            pid = self._process.pid
            self._process.kill()
            code = self._process.wait()
            if not self._is_killed:
                self.end()  # a new process is started for the next rows
            how = f"was ended by {signal_name(-code)}" if code < 0 else f"exited with {code}"
            raise WorkerError(
                f"the worker process {pid} {how} while it made rows {first} to {last - 1}", pid=pid
            ) from error
        if isinstance(found, BaseException):
            raise found
        assert isinstance(found, Done)
        return found

    def kill(self) -> None:
        """Kill the process, and start no new process."""
        self._is_killed = True
        if (process := self._process) is not None:  # another thread may be ending it at this moment
            process.kill()

    def end(self, *, kills: bool = False) -> None:
        """End the process, and wait until it has ended."""
        pipe, self._pipe = self._pipe, None
        process, self._process = self._process, None
        if pipe is not None:
            pipe.close()
        if process is not None:
            if kills:
                process.kill()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def serve(descriptor: int, parent: int) -> None:
    """Make blocks of rows in a worker process until the parent process closes the pipe.

    ``descriptor`` is the worker's end of the pipe.
    """
    if not end_with_parent(parent) and sys.platform == "linux":
        return  # the parent has ended; on other systems the pipe reports the end after the block
    pipe = Connection(descriptor)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has closed its end
        content, where = pipe.recv_bytes(), pipe.recv_bytes()
        run: Callable[[int, int], Done] | None = None
        while True:
            first, last = pipe.recv()
            answer: Any
            try:
                if run is None:
                    task, layout = pickle.loads(content), pickle.loads(where)
                    run = _work(task, None if layout is None else Writer(layout))
                answer = run(first, last)
            except BaseException as raised:
                answer = raised
            try:
                pipe.send(answer)
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception as unsent:
                text = f"{type(answer).__name__}: {answer} (which cannot be sent: {unsent})"
                pipe.send(RuntimeError(text))


# ---- one thread for each library: more gain nothing, and with one all sums are equal on any machine -----

# The environment variables that libraries read when they are loaded.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS",
     "NUMEXPR_NUM_THREADS", "NUMBA_NUM_THREADS"), "1",
)  # fmt: skip


class OneThreadEach(AbstractContextManager["OneThreadEach"]):
    """Limits each library that uses threads, such as NumPy's BLAS, to one thread.

    The limit begins when the object is created, and ends with ``lift``.  It also holds for libraries that are
    loaded in between.  Several threads of an executor may have such objects at the same time.  The first
    object sets the limits of the process, and the last object restores these limits.  Each object sets and
    restores the limits of its own thread.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _count: ClassVar[int] = 0
    _limits: ClassVar[Any] = None
    _known: ClassVar[set[str]] = set()  # paths of the libraries that were loaded before the limit began
    _environment: ClassVar[dict[str, str | None]] = {}

    def __init__(self) -> None:
        self._thread, self._own = threading.get_ident(), limit_this_thread()
        with OneThreadEach._lock:
            if not OneThreadEach._count:
                OneThreadEach._begin()
            OneThreadEach._count += 1

    def lift(self) -> None:
        """Restore the libraries' numbers of threads."""
        with OneThreadEach._lock:
            OneThreadEach._count -= 1
            if not OneThreadEach._count:
                OneThreadEach._end()
        if threading.get_ident() == self._thread:
            self._own.restore_original_limits()

    def __exit__(self, *_: object) -> None:
        self.lift()

    @classmethod
    def _begin(cls) -> None:
        cls._environment = {name: os.environ.get(name) for name in ONE_THREAD}
        os.environ.update(ONE_THREAD)
        _let_this_thread_set_limits()
        blas = _libraries("blas")
        cls._known = {library.filepath for library in blas.lib_controllers}
        cls._limits = blas.limit(limits=1)

    @classmethod
    def _end(cls) -> None:
        given = cls._environment
        for name in ONE_THREAD:
            del os.environ[name]
        os.environ.update({name: value for name, value in given.items() if value is not None})
        _let_this_thread_set_limits()
        cls._limits.restore_original_limits()
        wanted = given["OPENBLAS_NUM_THREADS"] or given["OMP_NUM_THREADS"] or ""
        for library in _libraries("blas").lib_controllers:
            if library.filepath not in cls._known:  # loaded during the limit: set its number without a limit
                library.set_num_threads(int(wanted) if wanted.isdigit() else available_cpus())
        _let_this_thread_set_limits()


def limit_this_thread() -> Any:
    """Limit OpenMP libraries to one thread in calls from this thread; return an object to end the limit."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.get_num_threads()  # makes torch set this thread's default now, not after the limit
    return _libraries("openmp").limit(limits=1)


def _let_this_thread_set_limits() -> None:
    """Let this thread set OpenBLAS's limits, although another thread has set them.

    threadpoolctl lets only the thread that set the limits change them, but another thread may restore them.
    """
    controller = getattr(require_threadpoolctl("generation"), "OpenBLASController", None)
    clear = getattr(controller, "clear_controlling_thread", None)
    if clear is not None:
        clear(force=True)


def _libraries(kind: str) -> Any:
    """Return the loaded libraries of a kind; when a limit on them ends, only they are restored."""
    return require_threadpoolctl("generation").ThreadpoolController().select(user_api=kind)
