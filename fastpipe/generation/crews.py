"""Who makes blocks: this thread, threads, processes, or somebody's executor."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from fastpipe.errors import FastpipeError, OptionError
from fastpipe.generation.limits import OneThreadEach, limit_this_thread
from fastpipe.generation.processes import Processes
from fastpipe.generation.storing import Nowhere, Places, Stores
from fastpipe.generation.work import FUNCTION, Done, Task, Work, pickled, run_from_folder
from fastpipe.hdf5.checkpoints import write_whole

__all__ = ["Cluster", "Crew", "Here", "Kind", "Separate", "Threads", "unpicklable"]

Kind = Literal["processes", "threads"]


class Crew(ABC):
    """What all have: a ``with`` block that ends them.

    Args:
        workers: how many blocks are made at a time.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers

    @property
    def workers(self) -> int:
        """How many blocks are made at a time."""
        return self._workers

    @property
    def slots(self) -> int:
        """How many blocks it is to have at a time: while one is made, the next one waits."""
        return 2 * self.workers

    @abstractmethod
    def submit(self, first: int, last: int) -> Future[Done]:
        """Have rows made."""

    def withdraw(self, future: Future[Done]) -> bool:
        """Take a block back that nobody has begun; whether that was possible.  Default: nobody knows."""
        return False

    def abandon(self) -> None:  # noqa: B027
        """End without finishing what is in flight.  Default: that is not possible."""

    def close(self) -> None:  # noqa: B027
        """End, when what is in flight is done.  Default: somebody else does that."""

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Here(Crew):
    """This thread: a block is made when it is submitted."""

    def __init__(self, task: Task, stores: Stores | None) -> None:
        super().__init__(1)
        self._limits = OneThreadEach()
        self._work = Work(task, stores or Nowhere())

    @property
    def slots(self) -> int:
        """None waits."""
        return 1

    def submit(self, first: int, last: int) -> Future[Done]:
        """Make rows."""
        future: Future[Done] = Future()
        try:
            future.set_result(self._work.run(first, last))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Give other libraries their threads again."""
        self._limits.lift()


class Threads(Crew):
    """Threads, for functions that let go of the interpreter's lock."""

    def __init__(self, task: Task, stores: Stores | None, workers: int) -> None:
        super().__init__(workers)
        self._limits = OneThreadEach()
        self._work = Work(task, stores or Nowhere())
        self._pool = ThreadPoolExecutor(workers, "fastpipe-generate", limit_this_thread)

    def submit(self, first: int, last: int) -> Future[Done]:
        """Have rows made."""
        return self._pool.submit(self._work.run, first, last)

    def withdraw(self, future: Future[Done]) -> bool:
        """Take a block back that nobody has begun."""
        return future.cancel()

    def close(self) -> None:
        """End the threads, after what they are doing."""
        self._pool.shutdown(cancel_futures=True)
        self._limits.lift()


class Separate(Crew):
    """Processes of this machine."""

    def __init__(self, task: Task, places: Places | None, workers: int) -> None:
        super().__init__(workers)
        try:
            self._processes = Processes(task, places, workers)
        except (FastpipeError, OSError):  # of starting them
            raise
        except Exception as error:
            raise unpicklable(task, error) from error

    def submit(self, first: int, last: int) -> Future[Done]:
        """Have rows made."""
        return self._processes.submit(first, last)

    def withdraw(self, future: Future[Done]) -> bool:
        """Take a block back that nobody has begun."""
        return future.cancel()

    def abandon(self) -> None:
        """Kill them."""
        self._processes.close(kill=True)

    def close(self) -> None:
        """End them, after what they are doing."""
        self._processes.close()


class Cluster(Crew):
    """Somebody's executor, whose workers see the folder: a share of the network, say.

    Args:
        task: what is made.
        folder: of the job.
        executor: of the user's, who closes it.
        workers: how many blocks are made at a time; None to learn it from who makes them.
    """

    def __init__(self, task: Task, folder: Path, executor: Executor, workers: int | None) -> None:
        try:
            content = pickled(task)
        except FastpipeError:
            raise
        except Exception as error:
            raise unpicklable(task, error) from error
        self._folder, self._digest = str(folder.resolve()), hashlib.sha256(content).hexdigest()
        write_whole(folder / FUNCTION, [content])
        super().__init__(workers or getattr(executor, "_max_workers", None) or 0)
        self._executor, self._limits = executor, OneThreadEach()  # its workers may be threads of this process
        self._seen: set[tuple[str, int, int]] = set()

    @property
    def workers(self) -> int:
        """How many blocks are made at a time; where nobody says, one more than were seen to be."""
        return self._workers or len(self._seen) + 1

    def submit(self, first: int, last: int) -> Future[Done]:
        """Have rows made."""
        future: Future[Done] = self._executor.submit(run_from_folder, self._folder, self._digest, first, last)
        future.add_done_callback(self._see)
        return future

    def withdraw(self, future: Future[Done]) -> bool:
        """Take a block back that nobody has begun."""
        return future.cancel()

    def close(self) -> None:
        """Give libraries their threads again; the executor is its owner's."""
        self._limits.lift()

    def _see(self, future: Future[Done]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._seen.add(future.result().who)


def unpicklable(task: Task, error: BaseException) -> OptionError:
    """The error of a function that cannot go to another process."""
    name: Any = getattr(task.function, "__qualname__", type(task.function).__name__)
    return OptionError(
        f"{name} cannot be sent to another process: {type(error).__name__}: {error}. Open files, locks and "
        "connections within the function, not before it; or make rows without other processes: workers=0, or "
        "executor='threads'"
    )
