"""``num_workers="auto"``: threads here or worker processes, by measuring for less than a second."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import struct
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch

from fastpipe._machine import default_threads
from fastpipe.torch.source import Source
from fastpipe.types import Key

__all__ = ["choose_workers"]

_EACH_S = 0.3  # two measurements, and a process to start
_ALL_S = 0.9
# Sending a batch to another process costs about as much as this.
_WORTH_S = 0.002
# The estimate for workers supposes that their number makes up for it, which it never does entirely.
_MARGIN = 1.2

_log = logging.getLogger("fastpipe")


def choose_workers(dataset: Any, source: Source | None, batch_size: int) -> tuple[int, str]:
    """How many worker processes make batches of a dataset fastest.

    Samples are made in a forked process, so that nothing of the dataset is opened here: batch by
    batch as with ``num_workers=0``, then one by one as in a worker.

    Args:
        dataset: the user's dataset.
        source: what fastpipe makes its batches with, or None.
        batch_size: samples in a batch.

    Returns:
        The number of workers, and the reason in words.
    """
    cores = default_threads()
    try:
        length = len(dataset)
    except TypeError:
        length = 0
    if cores == 1:
        chosen, why = 0, "this process may use one core only"
    elif not length:
        chosen, why = 0, "the dataset has no samples to measure"
    elif source is not None and source.lookout(is_here=True) is not None:
        chosen, why = 0, "what comes next is fetched ahead in this process"
    elif not hasattr(os, "fork"):
        chosen, why = cores, "nothing was measured, as this system cannot fork"
    else:
        measured = _in_child(lambda: _measure(dataset, source, batch_size, length))
        if measured is None:
            chosen, why = cores, f"no batch and no sample was ready within {_ALL_S} s"
        else:
            chosen, why = _judge(*measured, cores, batch_size)
    _log.info("num_workers='auto' is %d: %s", chosen, why)
    return chosen, why


def _judge(here: float, alone: float, cores: int, batch_size: int) -> tuple[int, str]:
    """The choice, from samples per second made here and by one worker."""
    there = alone * cores
    said = f"{here:,.0f} samples/s here, about {there:,.0f} in {cores} workers"
    if batch_size / here < _WORTH_S:
        return 0, f"{said}; a batch is made faster than it is sent"
    return (cores, said) if there > _MARGIN * here else (0, said)


def _measure(dataset: Any, source: Source | None, batch_size: int, length: int) -> tuple[float, float]:
    """Samples per second: in batches as without workers, and one after the other in one thread."""
    indices = np.random.Generator(np.random.PCG64(0)).integers(0, length, 1 << 16).tolist()

    def one(at: int) -> int:
        dataset[indices[at]]
        return 1

    alone = _rate(one)
    if source is None:
        return alone, alone

    def batch(at: int) -> int:
        taken = indices[at : at + batch_size]
        source.finish(source.start(taken, Key(0, 0, np.arange(len(taken), dtype=np.int64))))
        return len(taken)

    return _rate(batch), alone


def _rate(make: Callable[[int], int]) -> float:
    made = make(0)  # opens what is opened once
    first, made = made, 0
    start = perf_counter()
    while (taken := perf_counter() - start) < _EACH_S and made < (1 << 15):
        made += make(first + made)
    return made / taken


def _in_child(measure: Callable[[], tuple[float, float]]) -> tuple[float, float] | None:
    """The result of ``measure`` in a forked process; None where it fails, or takes too long."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):  # the parent learns of any by the missing answer
            gc.freeze()  # the parent's garbage is not to be collected here, as in `WorkerInit`
            os.close(reading)
            torch.set_num_threads(1)  # as torch does in its workers
            os.write(writing, struct.pack("dd", *measure()))
        os._exit(0)
    os.close(writing)
    try:
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        found = os.read(reading, 16) if poll.poll(1000 * _ALL_S) else b""
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return struct.unpack("dd", found) if len(found) == 16 else None
