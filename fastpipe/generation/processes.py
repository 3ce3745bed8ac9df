"""Worker processes, each a fresh interpreter, of which one may die without the others.

The standard library's executor runs a script's own file again in each process that it spawns, so that scripts
need a guard; it ends when one process dies, and does not say which task that had.  Here a worker knows the
function alone, by its content; the pipe to it tells when it is gone, and it when the parent is.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe
from typing import Any

from fastpipe.core.processes import end_with_parent, signal_name
from fastpipe.errors import WorkerError
from fastpipe.generation.limits import ONE_THREAD
from fastpipe.generation.storing import Nowhere, Places, Stores
from fastpipe.generation.work import Done, Task, Work, pickled

__all__ = ["Processes"]

_CHILD = """import sys; sys.path[:] = {path!r}; sys.argv[:] = {argv!r}
from fastpipe.generation.processes import serve; serve({descriptor}, {parent})"""
_END_S = 5.0  # for a worker that was asked to end, before it is killed
_LOOK_S = 0.5  # how often somebody who waits for a worker looks whether it is there
_QUIT = None


class Processes:
    """Worker processes.

    Args:
        task: what they make.
        places: where it goes; None to keep nothing.
        count: how many.

    Where one dies another takes its place.

    Raises:
        Exception: as pickling raises it.
    """

    def __init__(self, task: Task, places: Places | None, count: int) -> None:
        self._content = pickled(task), pickle.dumps(places)
        self._tasks: queue.SimpleQueue[tuple[Future[Done], int, int] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._workers: list[_Worker] = []
        try:
            for _ in range(count):
                self._workers.append(_Worker(self._content))
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
        """Have rows made; a future of a `WorkerError` where the worker died."""
        future: Future[Done] = Future()
        self._tasks.put((future, first, last))
        return future

    def close(self, *, kill: bool = False) -> None:
        """End the workers: after what they are doing, or, with ``kill``, now."""
        self._is_closed = True
        if kill:
            for worker in self._workers:
                worker.kill()
        for _ in self._threads:
            self._tasks.put(_QUIT)
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            worker.close()

    def _serve(self, worker: _Worker) -> None:
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


class _Worker:
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
            self._process = subprocess.Popen(
                [sys.executable, *_flags(), "-c", code],
                pass_fds=[its.fileno()], stdin=subprocess.DEVNULL,
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
        except OSError:  # it is gone already, which the first task will tell
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
            raise WorkerError(
                f"the worker process {self._process.pid} {_ended(code)} while it made rows {first} to "
                f"{last - 1}",
                pid=self._process.pid,
            ) from error
        if isinstance(found, BaseException):
            raise found
        assert isinstance(found, Done)
        return found

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """End it now."""
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
    """The worker's side: runs until the pipe is closed.

    Args:
        descriptor: of its end of the pipe.
        parent: the process at the other end.
    """
    if not end_with_parent(parent) and sys.platform == "linux":
        return  # it has ended meanwhile; elsewhere the end of the pipe tells, when the block is done
    pipe = Connection(descriptor)
    try:
        work, error = _opened(pipe), None
    except EOFError:
        return
    except BaseException as raised:
        work, error = None, raised
    while True:
        try:
            first, last = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if work is None:
                assert error is not None
                raise error
            answer: Any = work.run(first, last)
        except BaseException as raised:
            answer = raised
        try:
            pipe.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as unsent:
            pipe.send(RuntimeError(f"{type(answer).__name__}: {answer} (which cannot be sent: {unsent})"))


def _opened(pipe: Connection) -> Work:
    """The work that the parent has sent."""
    content, where = pipe.recv_bytes(), pipe.recv_bytes()
    task, places = pickle.loads(content), pickle.loads(where)
    return Work(task, Nowhere() if places is None else Stores(places))


def _ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal_name(-code)}"
    return f"exited with {code}"


def _flags() -> list[str]:
    """Python's options of this process, which workers have, too."""
    found: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return found
