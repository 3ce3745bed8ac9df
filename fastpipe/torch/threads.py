"""The threads of a dataset in this process; what a worker process is doing, noted for its parent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from fastpipe.core.extras import require_threadpoolctl
from fastpipe.core.machine import default_threads
from fastpipe.core.pool import Process, ThreadPool

__all__ = ["do_without_helpers", "native_lines", "new_pool", "note", "process_of", "start_noting"]

_MANY = 8  # threads of which one less is hardly slower
# Found here, where a failure is an error of the import, and not in a decoding thread.
_openmp = require_threadpoolctl("torch").ThreadpoolController().select(user_api="openmp")


def do_without_helpers() -> None:
    """Run torch's operations of this thread in this thread alone; other threads are not affected.

    torch splits an operation on a large tensor among as many threads as the machine has cores, in every
    thread that calls it.  Decoding threads occupy the cores already, so that each transform of the script's
    in them would only wait for its helpers.  torch's worker processes do without for the same reason.
    """
    torch.get_num_threads()  # sets what is the default for this thread, which would else come later
    # torch.set_num_threads would count for all threads that start later; OpenMP's own setting is
    # the calling thread's.
    _openmp.limit(limits=1)


def new_pool(threads: int | str, name: str) -> ThreadPool | None:
    """The threads of a dataset in this process; None in a worker process that would have one.

    Args:
        threads: how many, or ``"auto"``: the cores that this process may use; of 8 and more one less.
        name: what they are called.
    """
    worker = get_worker_info()
    if threads == "auto":
        threads = default_threads(worker.num_workers if worker else 1)
        if threads >= _MANY and (worker is None or worker.num_workers == 1):
            threads -= 1  # a core for the training's own thread
    if worker and threads == 1:  # beside the idle process it would only add a hand-over
        return None
    return ThreadPool(int(threads), name, do_without_helpers)


def process_of(threads: int | str, name: str) -> Process:
    """This process, with the threads of a dataset in it; see `new_pool`."""
    worker = get_worker_info()
    pool = new_pool(threads, name)
    return Process(pool) if worker is None else Process(pool, worker.num_workers, worker.id)


_write: Callable[[int, str], None] | None = None
_native_lines: npt.NDArray[np.uint8] | None = None


def start_noting(write: Callable[[int, str], None], lines: npt.NDArray[np.uint8]) -> None:
    """In a worker: from now on note with this function, which takes a thread's number and a text.

    Args:
        write: the function.
        lines: uint8 (lines, bytes), for threads that are not Python's.
    """
    global _write, _native_lines
    _write, _native_lines = write, lines


def native_lines() -> npt.NDArray[np.uint8] | None:
    """Where the threads of the native core note what they are at; None outside of workers."""
    return _native_lines


def note(about: Any) -> None:
    """Note what this thread is about to do; nothing outside of workers."""
    if _write is not None:
        _write(threading.get_ident(), str(about))
