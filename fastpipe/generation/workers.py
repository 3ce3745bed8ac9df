"""Workers that make blocks: this thread, threads, processes, or an executor such as Dask's."""

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
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal

from fastpipe.core.extras import require, require_threadpoolctl
from fastpipe.core.files import open_regular
from fastpipe.core.machine import available_cpus
from fastpipe.core.processes import end_with_parent, signal_name
from fastpipe.core.text import printable
from fastpipe.errors import FastpipeError, OptionError, WorkerError
from fastpipe.generation.rows import Block, Failure, Maker, Task
from fastpipe.generation.storage import Layout, Stored, Writer, described, ragged_crcs, replace_file

__all__ = [
    "FUNCTION",
    "Cluster",
    "Done",
    "Kind",
    "OneThreadEach",
    "Processes",
    "ThisThread",
    "Threads",
    "Workers",
    "serve",
]  # fmt: skip

Kind = Literal["processes", "threads"]
FUNCTION = "function"  # the file with a task for the workers of an executor


@dataclass(frozen=True)
class Done:
    """What a worker returns.

    Attributes:
        stored: the rows; none, where the first raised.
        failure: what ended it.
        seconds: it took.
        who: made it: machine, process and thread.
        block: the rows, if they are still to be stored.
        ragged_crcs: checksums of its ragged columns; those of the others are in ``stored``.
    """

    stored: Stored
    failure: Failure | None
    seconds: float
    who: tuple[str, int, int]
    block: Block | None = None
    ragged_crcs: tuple[int, ...] = ()

    def check_arrived(self, stored: Stored) -> None:
        """Compare what was stored of a block that was sent with what was made.

        Raises:
            ValueError: it is something else.
        """
        if (stored.crcs, tuple(one.crc for one in stored.spooled)) != (self.stored.crcs, self.ragged_crcs):
            rows = f"rows {self.stored.first} to {self.stored.last - 1}"
            raise ValueError(f"{rows} did not arrive as {self.who[0]} has sent them: checksums differ")


class _Work:
    """Makes and writes blocks in this process; without a writer they are thrown away, or sent."""

    def __init__(self, task: Task, writer: Writer | None, *, sends: bool = False) -> None:
        self._maker, self._put, self._sends = Maker(task), writer.put if writer else described, sends

    def run(self, first: int, last: int) -> Done:
        """Make and store rows."""
        begun = time.perf_counter()
        block, failure = self._maker.block(first, last)
        stored = self._put(block)
        who = socket.gethostname(), os.getpid(), threading.get_native_id()
        sent = (block, ragged_crcs(block)) if self._sends else (None, ())
        return Done(stored, failure, time.perf_counter() - begun, who, *sent)


class Workers(ABC):
    """What all kinds of workers have; a ``with`` block ends them."""

    def __init__(self, count: int) -> None:
        self._count = count

    @property
    def count(self) -> int:
        """How many blocks are made at a time."""
        return self._count

    @property
    def slots(self) -> int:
        """How many blocks may be in flight: while one is made, the next one waits."""
        return 2 * self.count

    @abstractmethod
    def submit(self, first: int, last: int) -> Future[Done]:
        """Have rows made."""

    def abandon(self) -> None:  # noqa: B027
        """End without finishing what is in flight, if that is possible."""

    def close(self) -> None:  # noqa: B027
        """End, when what is in flight is done."""

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ThisThread(Workers):
    """This thread: a block is made when it is submitted."""

    def __init__(self, task: Task, writer: Writer | None) -> None:
        super().__init__(1)
        self._limits = OneThreadEach()
        self._work = _Work(task, writer)

    @property
    def slots(self) -> int:
        return 1

    def submit(self, first: int, last: int) -> Future[Done]:
        future: Future[Done] = Future()
        try:
            future.set_result(self._work.run(first, last))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        self._limits.lift()


class Threads(Workers):
    """Threads, for functions that release the interpreter's lock."""

    def __init__(self, task: Task, writer: Writer | None, count: int) -> None:
        super().__init__(count)
        self._limits = OneThreadEach()
        self._work = _Work(task, writer)
        self._pool = ThreadPoolExecutor(count, "fastpipe-generate", limit_this_thread)

    def submit(self, first: int, last: int) -> Future[Done]:
        return self._pool.submit(self._work.run, first, last)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._limits.lift()


class Cluster(Workers):
    """An executor of the user's, whose workers see the folder of the job and send the blocks they made.

    Args:
        task: what is made.
        folder: of the job.
        executor: closed by its owner.
        count: how many blocks are made at a time; None to learn it from who makes them.
    """

    def __init__(self, task: Task, folder: Path, executor: Executor, count: int | None) -> None:
        super().__init__(count or getattr(executor, "_max_workers", None) or 0)
        content = _pickled(task)
        self._folder, self._digest = str(folder.resolve()), hashlib.sha256(content).hexdigest()
        replace_file(folder / FUNCTION, content)
        self._executor, self._limits = executor, OneThreadEach()  # its workers may be threads of this process
        self._seen: set[tuple[str, int, int]] = set()

    @property
    def count(self) -> int:
        return self._count or len(self._seen) + 1

    def submit(self, first: int, last: int) -> Future[Done]:
        future: Future[Done] = self._executor.submit(
            _run_from_folder, self._folder, self._digest, first, last
        )
        future.add_done_callback(self._see)
        return future

    def close(self) -> None:
        self._limits.lift()

    def _see(self, future: Future[Done]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._seen.add(future.result().who)


def _run_from_folder(folder: str, digest: str, first: int, last: int) -> Done:
    """Make rows in a worker of an executor, by the task in a folder that all of them see."""
    try:
        task = _task(folder, digest)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            error.errno, f"a worker on {socket.gethostname()} does not see {folder!r}: name an out= in a "
            "folder that all workers of the executor share"
        ) from error  # fmt: skip
    with OneThreadEach():
        return _Work(task, None, sends=True).run(first, last)


@functools.lru_cache(maxsize=4)
def _task(folder: str, digest: str) -> Task:
    with open(os.path.join(folder, FUNCTION), "rb", opener=open_regular) as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != digest:
        raise OSError(printable(f"{Path(folder, FUNCTION)} holds another function than it was asked to run"))
    task = pickle.loads(data)
    assert isinstance(task, Task)
    return task


def _pickled(task: Task) -> bytes:
    """A task for another process; functions of a script or within others by their content."""
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


# ---- processes, each a fresh interpreter, of which one may die without the others -----------------------
#
# The standard library's executor runs a script's own file again in each process that it spawns, so that
# scripts need a guard; it ends when one process dies, and does not say which task that had.  Here a worker
# knows the function alone, by its content; the pipe to it tells when it is gone, and it when the parent is.

_CHILD = """import sys; sys.path[:] = {path!r}; sys.argv[:] = {argv!r}
from fastpipe.generation.workers import serve; serve({descriptor}, {parent})"""
_END_S = 5.0  # for a worker that was asked to end, before it is killed
_LOOK_S = 0.5  # how often the parent looks whether a worker that it waits for is there
_QUIT = None


class Processes(Workers):
    """Worker processes; where one dies another takes its place.

    Args:
        task: what they make.
        layout: where it goes; None to throw it away.
        count: how many.
    """

    def __init__(self, task: Task, layout: Layout | None, count: int) -> None:
        super().__init__(count)
        content = _pickled(task), pickle.dumps(layout)
        self._tasks: queue.SimpleQueue[tuple[Future[Done], int, int] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._workers: list[_Process] = []
        try:
            for _ in range(count):
                self._workers.append(_Process(content))
        except BaseException:
            for worker in self._workers:
                worker.kill()
                worker.close()
            raise
        self._threads = [
            threading.Thread(
                target=self._serve, args=(worker,), name=f"fastpipe-generate-{number}", daemon=True
            )
            for number, worker in enumerate(self._workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, first: int, last: int) -> Future[Done]:
        """Have rows made; the future raises a `WorkerError` where the worker died."""
        future: Future[Done] = Future()
        self._tasks.put((future, first, last))
        return future

    def abandon(self) -> None:
        self._is_closed = True
        for worker in self._workers:
            worker.kill()
        self.close()

    def close(self) -> None:
        self._is_closed = True
        for _ in self._threads:
            self._tasks.put(_QUIT)
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            worker.close()

    def _serve(self, worker: _Process) -> None:
        """The parent's side of a worker: one task after another."""
        while (task := self._tasks.get()) is not _QUIT:
            future, first, last = task
            if self._is_closed and not worker.is_alive():
                if future.cancel():
                    future.set_running_or_notify_cancel()  # else nobody who waits for it learns of it
                continue
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(worker.run(first, last))
            except BaseException as error:
                future.set_exception(error)
                if isinstance(error, WorkerError) and not self._is_closed:
                    try:
                        worker.start()
                    except OSError as unstarted:
                        worker.unstarted = unstarted


class _Process:
    """One process, and the pipe to it.

    Attributes:
        unstarted: why there is none in the place of one that died.
    """

    def __init__(self, content: tuple[bytes, bytes]) -> None:
        self._content = content
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self.unstarted: OSError | None = None
        self.start()

    def start(self) -> None:
        """Start it, in the place of one that is gone."""
        self.close()
        own, its = Pipe()
        try:
            path = [one for one in sys.path if isinstance(one, str)]  # Python passes over all else
            code = _CHILD.format(path=path, argv=sys.argv, descriptor=its.fileno(), parent=os.getpid())
            flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", code], pass_fds=[its.fileno()], stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the parent's, who lets this block be finished
                env={**os.environ, **ONE_THREAD},
            )  # fmt: skip
        except BaseException:
            own.close()
            raise
        finally:
            its.close()
        self._pipe = own
        try:
            for part in self._content:
                own.send_bytes(part)
        except OSError:  # it is gone already, as the first task will show
            pass

    def run(self, first: int, last: int) -> Done:
        """Have rows made.

        Raises:
            WorkerError: it died.
            Exception: as it was raised there.
        """
        if self.unstarted is not None:
            raise self.unstarted
        assert self._process is not None and self._pipe is not None
        try:
            self._pipe.send((first, last))
            # The end of the pipe does not always tell: a child of the worker's may have it, too.
            while not self._pipe.poll(_LOOK_S):
                if self._process.poll() is not None and not self._pipe.poll():
                    raise EOFError
            found = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.kill()
            code = self._process.wait()
            how = f"was ended by {signal_name(-code)}" if code < 0 else f"exited with {code}"
            raise WorkerError(
                f"the worker process {self._process.pid} {how} while it made rows {first} to {last - 1}",
                pid=self._process.pid,
            ) from error
        if isinstance(found, BaseException):
            raise found
        assert isinstance(found, Done)
        return found

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End it."""
        pipe, self._pipe = self._pipe, None
        process, self._process = self._process, None
        if pipe is not None:
            pipe.close()
        if process is not None:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def serve(descriptor: int, parent: int) -> None:
    """Serve a parent as its worker, until the pipe is closed.

    Args:
        descriptor: of this end of the pipe.
        parent: the process at the other end.
    """
    if not end_with_parent(parent) and sys.platform == "linux":
        return  # it has ended meanwhile; elsewhere the end of the pipe tells, when the block is done
    pipe = Connection(descriptor)
    run: Callable[[int, int], Done]
    try:
        content, where = pipe.recv_bytes(), pipe.recv_bytes()
        task, layout = pickle.loads(content), pickle.loads(where)
        run = _Work(task, None if layout is None else Writer(layout)).run
    except EOFError:
        return
    except BaseException as error:
        run = functools.partial(_raise, error)
    while True:
        try:
            first, last = pipe.recv()
        except (EOFError, OSError):
            return
        answer: Any
        try:
            answer = run(first, last)
        except BaseException as raised:
            answer = raised
        try:
            pipe.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as unsent:
            pipe.send(RuntimeError(f"{type(answer).__name__}: {answer} (which cannot be sent: {unsent})"))


def _raise(error: BaseException, first: int, last: int) -> Done:
    raise error


# ---- libraries' own threads: workers are enough, and sums come out the same anywhere --------------------

# What libraries look at when they are loaded.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS",
     "NUMEXPR_NUM_THREADS", "NUMBA_NUM_THREADS"), "1",
)  # fmt: skip


class OneThreadEach(AbstractContextManager["OneThreadEach"]):
    """While it lasts, libraries such as NumPy's BLAS have one thread each; those that are loaded then, too.

    It begins when it is made.  What is the process's is set by the first of several, in threads of an
    executor, and put back by the last; what is a thread's, by each.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _count: ClassVar[int] = 0
    _limits: ClassVar[Any] = None
    _known: ClassVar[set[str]] = set()  # libraries that were there
    _environment: ClassVar[dict[str, str | None]] = {}

    def __init__(self) -> None:
        self._thread, self._own = threading.get_ident(), limit_this_thread()
        with OneThreadEach._lock:
            if not OneThreadEach._count:
                OneThreadEach._begin()
            OneThreadEach._count += 1

    def lift(self) -> None:
        """Give libraries their threads again."""
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
        for name, value in cls._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _let_this_thread_set_limits()
        cls._limits.restore_original_limits()
        for library in _libraries("blas").lib_controllers:
            if library.filepath not in cls._known:  # loaded meanwhile: as it would have been without this
                library.set_num_threads(_default_threads(cls._environment))
        _let_this_thread_set_limits()
        cls._limits = None


def limit_this_thread() -> Any:
    """Have OpenMP's libraries work in this thread alone; return what undoes it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.get_num_threads()  # sets this thread's default, which would else come later
    return _libraries("openmp").limit(limits=1)


def _let_this_thread_set_limits() -> None:
    """Of OpenBLAS only the thread that set a limit may set others, and the last to leave may be another."""
    controller = getattr(require_threadpoolctl("generation"), "OpenBLASController", None)
    clear = getattr(controller, "clear_controlling_thread", None)
    if clear is not None:
        clear(force=True)


def _libraries(kind: str) -> Any:
    """Those of a kind that are loaded.  Whoever limits them puts back these alone."""
    return require_threadpoolctl("generation").ThreadpoolController().select(user_api=kind)


def _default_threads(environment: dict[str, str | None]) -> int:
    """How many threads a library would have taken."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        if (environment.get(name) or "").isdigit():
            return int(environment[name] or 1)
    return available_cpus()
