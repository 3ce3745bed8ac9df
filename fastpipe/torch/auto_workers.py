"""``num_workers="auto"``: threads here or worker processes, by measuring for less than a second."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import re
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from fastpipe.core.machine import default_threads
from fastpipe.core.processes import why_no_processes
from fastpipe.core.types import Key
from fastpipe.torch.lane_memory import room
from fastpipe.torch.source import Source
from fastpipe.torch.workers import bytes_of

__all__ = ["choose_workers"]

_EACH_S = 0.3  # two measurements, and a process to start
_ALL_S = 0.9
# Sending a batch to another process costs about as much as this.
_WORTH_S = 0.002
# The estimate for workers supposes that their number makes up for it, which it never does entirely.
_MARGIN = 1.2

_log = logging.getLogger("fastpipe")


# Threads and processes of each worker, which limits of their number count alike.
_TASKS = 3


def choose_workers(
    dataset: Any,
    source: Source | None,
    batch_size: int,
    context: Any = None,
    functions: Sequence[Callable[..., Any] | None] = (None, None),
) -> tuple[int, str]:
    """Return how many worker processes make batches of a dataset fastest; none where none can be started.

    Samples are made in a forked process, so that nothing of the dataset is opened here: batch by
    batch as with ``num_workers=0``, then one by one as in a worker.

    Args:
        dataset: the user's dataset.
        source: what fastpipe makes its batches with, or None.
        batch_size: samples in a batch.
        context: of multiprocessing, or the name of a start method; None for the usual one.
        functions: the script's ``collate_fn`` and ``worker_init_fn``, which are sent to workers too.

    Returns:
        The number of workers, and the reason in words.
    """
    cores = default_threads()
    is_forked = _start_method(context) == "fork"
    try:
        length = len(dataset)
    except TypeError:
        length = 0
    if cores == 1:
        chosen, why = 0, "this process may use one core only"
    elif not length:
        chosen, why = 0, "the dataset has no samples to measure"
    elif why_none := why_no_processes() or ("" if is_forked else _why_no_second_run()):
        chosen, why = 0, why_none
    elif not _have_room(_TASKS * cores):
        chosen, why = 0, f"limits of this system do not allow {cores} more processes"
    elif source is not None and source.lookout(is_here=True) is not None:
        chosen, why = 0, "what comes next is fetched ahead in this process"
    elif not hasattr(os, "fork"):
        chosen, why = cores, "nothing was measured, as this system cannot fork"
    else:
        sent = None if is_forked else (dataset, *functions)
        try:
            found = _in_child(lambda: _measure(dataset, source, batch_size, length, sent))
        except OSError as error:
            found, chosen, why = None, 0, f"no process can be started ({error})"
        else:
            chosen, why = cores, f"no batch and no sample was ready within {_ALL_S} s"
        if found is not None and not found[0]:
            chosen, why = 0, "a sample cannot be made, or the dataset not be sent, in another process"
        elif found is not None:
            here, alone, nbytes = found
            chosen, why = _judge(here, alone, cores, batch_size)
            # Batches of each worker that are made ahead, in the memory by which torch sends them.
            needed, space = 2 * chosen * batch_size * int(nbytes), room()
            if source is None and functions[0] is None and space is not None and needed > space[0]:
                chosen, why = 0, f"{why}; but their batches do not fit into /dev/shm"
    _log.info("num_workers='auto' is %d: %s", chosen, why)
    return chosen, why


def _judge(here: float, alone: float, cores: int, batch_size: int) -> tuple[int, str]:
    """The choice, from samples per second made here and by one worker."""
    there = alone * cores
    said = f"{here:,.0f} samples/s here, about {there:,.0f} in {cores} workers"
    if batch_size / here < _WORTH_S:
        return 0, f"{said}; a batch is made faster than it is sent"
    return (cores, said) if there > _MARGIN * here else (0, said)


def _start_method(context: Any) -> str:
    """Return how a context of multiprocessing starts processes; the usual one stays unfixed."""
    if isinstance(context, str):
        return context
    found = (multiprocessing if context is None else context).get_start_method(allow_none=True)
    return found or multiprocessing.get_all_start_methods()[0]


def _why_no_second_run() -> str:
    """Return why a process that is started must not import the script, as it does; empty if it may."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None:
        return ""  # nothing is imported, and `_sent` looks for what would be missed
    try:
        source = Path(path).read_text(errors="replace")
    except OSError as error:
        return f"workers would import the script, which cannot be read ({error})"
    if re.search(r"__name__\s*==", source):
        return ""
    return f"workers would run all of {path}, which has no `if __name__ == '__main__':`"


def _check_sent(sent: Sequence[Any]) -> None:
    """Raise an error if a process that is started cannot be given these."""
    content = bytes(ForkingPickler.dumps(sent))
    if b"__main__" in content and getattr(sys.modules["__main__"], "__file__", None) is None:
        raise OSError("a class or function of a script without a file")


def _have_room(tasks: int) -> bool:
    """Return whether limits allow so many more processes, which they count as they do threads."""
    is_over, threads = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(tasks):
            thread = threading.Thread(target=is_over.wait)
            thread.start()
            threads.append(thread)
    except RuntimeError:
        return False
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    return True


def _measure(
    dataset: Any, source: Source | None, batch_size: int, length: int, sent: Sequence[Any] | None
) -> tuple[float, float, float]:
    """Return samples per second, in batches as without workers, and one after the other in one thread; and
    the bytes of a sample."""
    if sent is not None:
        _check_sent(sent)
    indices = np.random.Generator(np.random.PCG64(0)).integers(0, length, 1 << 16).tolist()

    nbytes = 0

    def one(at: int) -> int:
        nonlocal nbytes
        nbytes = bytes_of(dataset[indices[at]])
        return 1

    alone = _rate(one)
    if source is None:
        return alone, alone, nbytes

    def batch(at: int) -> int:
        taken = indices[at : at + batch_size]
        source.finish(source.start(taken, Key(0, 0, np.arange(len(taken), dtype=np.int64))))
        return len(taken)

    return _rate(batch), alone, nbytes


def _rate(make: Callable[[int], int]) -> float:
    made = make(0)  # opens what is opened once
    first, made = made, 0
    start = perf_counter()
    while (taken := perf_counter() - start) < _EACH_S and made < (1 << 15):
        made += make(first + made)
    return made / taken


def _in_child(measure: Callable[[], tuple[float, float, float]]) -> tuple[float, float, float] | None:
    """Return the result of ``measure`` in a forked process; zeros if it fails, None if it takes too long.

    Raises:
        OSError: there can be no such process.
    """
    reading, writing = os.pipe()
    try:
        child = os.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        raise
    if child == 0:
        found = 0.0, 0.0, 0.0
        with contextlib.suppress(BaseException):
            gc.freeze()  # the parent's garbage is not to be collected here, as in `WorkerInit`
            os.close(reading)
            torch.set_num_threads(1)  # as torch does in its workers
            found = measure()
        os.write(writing, struct.pack("ddd", *found))
        os._exit(0)
    os.close(writing)
    try:
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        answer = os.read(reading, 24) if poll.poll(1000 * _ALL_S) else None
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if answer is None:
        return None
    return struct.unpack("ddd", answer) if answer else (0.0, 0.0, 0.0)  # it has crashed
