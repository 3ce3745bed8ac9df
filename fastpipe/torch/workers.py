"""What happens in a worker process beside torch's own loop, and what its parent learns of its end."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import get_worker_info

from fastpipe.engine.lanes import Lane, lanes_are_possible, stack_signal
from fastpipe.errors import WorkerError
from fastpipe.torch import noting
from fastpipe.torch.fetching import UsersDataset
from fastpipe.torch.lane_memory import expect_from, send_through

__all__ = ["WorkerInit", "explained", "lanes_for"]

_STACK_S = 1.0
_PR_SET_PDEATHSIG = 1


def lanes_for(workers: int, segments: int) -> list[Lane]:
    """A lane for each worker; none where the system has no such memory."""
    lanes = [Lane(segments) for _ in range(workers)] if lanes_are_possible() else []
    for lane in lanes:
        expect_from(lane)
    return lanes


class WorkerInit:
    """Runs first in each worker, then the user's own init function.

    ``WorkerInfo.dataset`` becomes the user's dataset.  The worker ends with its parent, notes what
    it is doing, and writes its stacks where the parent finds them, when it crashes or is asked.

    Args:
        function: the user's ``worker_init_fn``.
        lanes: one for each worker.
    """

    def __init__(self, function: Callable[[int], None] | None, lanes: Sequence[Lane]) -> None:
        self._function = function
        self.lanes = lanes
        # The signal is tied to the thread that starts the worker, which may end before the loader.
        is_main = threading.current_thread() is threading.main_thread()
        self._parent = os.getpid() if is_main else None

    def __call__(self, worker_id: int) -> None:
        worker = get_worker_info()
        if worker is not None and isinstance(worker.dataset, UsersDataset):
            object.__setattr__(worker, "dataset", worker.dataset.dataset)
        if self._parent is not None:
            _end_with(self._parent)
        if self.lanes:
            self._use(self.lanes[worker_id])
        if self._function is not None:
            self._function(worker_id)

    def _use(self, lane: Lane) -> None:
        for other in self.lanes:
            if other is not lane:
                other.close()
        writer = lane.writer()
        send_through(writer)
        noting.start(writer.note)
        faulthandler.enable(writer.stack_fd, all_threads=True)
        faulthandler.register(stack_signal(), writer.stack_fd, all_threads=True)


def explained(
    error: RuntimeError, workers: Sequence[Any], lanes: Sequence[Lane], stuck: int | None
) -> RuntimeError:
    """An error about workers that says which, at what sample, and where in the code.

    Args:
        error: torch's.
        workers: the processes.
        lanes: theirs, or none.
        stuck: number of a worker that does not answer; None to look for those that have ended.

    Returns:
        The error to raise; the given one if nothing more is known.
    """
    if isinstance(error, WorkerError):
        return error
    found = [stuck] if stuck is not None else [n for n, worker in enumerate(workers) if worker.exitcode]
    if not found:
        return error
    parts = [str(error).rstrip(".") + "."]
    for number in found:
        worker, lane = workers[number], lanes[number] if lanes else None
        parts.append(_about(number, worker, lane, stuck is not None))
    first = workers[found[0]]
    return WorkerError("\n".join(parts), worker=found[0], pid=first.pid)


def _about(number: int, worker: Any, lane: Lane | None, is_stuck: bool) -> str:
    text = f"Worker {number} (pid {worker.pid}) "
    text += f"does not answer: {_state_of(worker.pid)}" if is_stuck else _end_of(worker.exitcode)
    if lane is None:
        return text
    notes = lane.notes()
    if notes:
        text += f"\nIts last sample: {', '.join(notes)}."
    stack = _ask_for_stack(worker.pid, lane) if is_stuck else lane.stack()
    return text + (f"\nIts stack:\n{stack.rstrip()}" if stack else "\nIts stack is not known.")


def _end_of(exitcode: int) -> str:
    if exitcode == -signal.SIGKILL:
        return (
            "was killed with SIGKILL, which is what the kernel does when memory is short (dmesg tells): use "
            "fewer workers or smaller batches, or num_workers=0, where threads share the memory."
        )
    if exitcode == -signal.SIGBUS:
        return (
            "died of a bus error: a file that is mapped became shorter, or /dev/shm is full: enlarge it "
            "(docker run --shm-size=…), or use fewer workers or smaller batches."
        )
    if exitcode < 0:
        return f"died of {signal.Signals(-exitcode).name}."
    return f"ended with exit code {exitcode}."


def _state_of(pid: int) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "it is gone."
    return {
        "T": "it has been stopped (SIGSTOP).", "D": "it waits for a disk or a network file system.",
        "R": "it is computing.", "S": "it is waiting.",
    }.get(state, f"its state is {state}.")  # fmt: skip


def _ask_for_stack(pid: int, lane: Lane) -> str:
    """Let the worker write its stacks, which it does also while C code runs."""
    start = lane.stack_so_far()
    try:
        os.kill(pid, stack_signal())
    except OSError:
        return ""
    deadline = time.monotonic() + _STACK_S
    size = start
    while time.monotonic() < deadline:
        time.sleep(0.02)
        grown = lane.stack_so_far()
        if grown > start and grown == size:
            break
        size = grown
    return lane.stack(start)


def _end_with(parent: int) -> None:
    """Let the kernel end this process together with its parent, also while it is stuck."""
    if sys.platform != "linux" or os.getppid() != parent:
        return  # another start method's process in between
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # which has ended meanwhile
        os.kill(os.getpid(), signal.SIGKILL)
