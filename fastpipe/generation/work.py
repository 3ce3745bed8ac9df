"""What is run in workers: a task is the rows of a block, its result what is noted of it."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fastpipe.core.extras import require
from fastpipe.core.files import open_regular
from fastpipe.core.text import printable
from fastpipe.generation.blocks import Block, Failure
from fastpipe.generation.form import Form
from fastpipe.generation.limits import OneThreadEach
from fastpipe.generation.making import Maker, Policy
from fastpipe.generation.storing import Parts, Stored

__all__ = ["FUNCTION", "Done", "Sink", "Task", "Work", "pickled", "run_from_folder"]

FUNCTION = "function"


class Sink(Protocol):
    """Where blocks go.  Safe between threads."""

    def put(self, block: Block) -> Stored:
        """Store a block; what is noted of it."""


@dataclass(frozen=True)
class Done:
    """What came of a task.

    Attributes:
        stored: the rows that are stored; none, where the first raised.
        failure: what ended it.
        seconds: it took.
        who: made it: machine, process and thread.
    """

    stored: Stored
    failure: Failure | None
    seconds: float
    who: tuple[str, int, int]


@dataclass(frozen=True)
class Task:
    """All that does not change from block to block.

    Attributes:
        function: the user's.
        seed, form, batch_rows, policy, seeds_globals: as of `Maker`.
    """

    function: Callable[..., Any]
    seed: int
    form: Form
    batch_rows: int
    policy: Policy
    seeds_globals: bool

    def maker(self) -> Maker:
        """Who makes rows."""
        return Maker(
            self.function, self.seed, self.form, batch_rows=self.batch_rows, policy=self.policy,
            seeds_globals=self.seeds_globals,
        )  # fmt: skip


class Work:
    """Makes and stores blocks in this process.

    Args:
        task: what is made.
        sink: where it goes.
    """

    def __init__(self, task: Task, sink: Sink) -> None:
        self._maker, self._sink = task.maker(), sink

    def run(self, first: int, last: int) -> Done:
        """Make and store rows."""
        begun = time.perf_counter()
        block, failure = self._maker.block(first, last)
        stored = self._sink.put(block)
        who = socket.gethostname(), os.getpid(), threading.get_native_id()
        return Done(stored, failure, time.perf_counter() - begun, who)


def pickled(task: Task) -> bytes:
    """A task for another process; functions of a script or within others by their content.

    Raises:
        Exception: as pickling raises it.
    """
    data: bytes = require("cloudpickle", extra="generation").dumps(task, protocol=pickle.HIGHEST_PROTOCOL)
    return data


def run_from_folder(folder: str, digest: str, first: int, last: int) -> Done:
    """Make rows in a worker of somebody's executor, and store them as a part.

    Args:
        folder: of the job, which all workers see.
        digest: of the task that is in it.
        first, last: the rows.

    Raises:
        FileNotFoundError: this worker does not see the folder.
    """
    try:
        task = _task(folder, digest)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            error.errno, f"a worker on {socket.gethostname()} does not see {folder!r}: name an out= in a "
            "folder that all workers of the executor share"
        ) from error  # fmt: skip
    with OneThreadEach():
        return Work(task, Parts(Path(folder))).run(first, last)


@functools.lru_cache(maxsize=4)
def _task(folder: str, digest: str) -> Task:
    with open(os.path.join(folder, FUNCTION), "rb", opener=open_regular) as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != digest:
        raise OSError(printable(f"{Path(folder, FUNCTION)} holds another function than it was asked to run"))
    task = pickle.loads(data)
    assert isinstance(task, Task)
    return task
