"""The threads of a dataset in this process."""

from __future__ import annotations

from torch.utils.data import get_worker_info

from fastpipe._intraop import do_without_helpers
from fastpipe._machine import default_threads
from fastpipe.arrays.process import Process
from fastpipe.engine.pool import ThreadPool

__all__ = ["new_pool", "process_of"]

_MANY = 8  # threads of which one less is hardly slower


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
