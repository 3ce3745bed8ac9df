"""What happens in a worker process beside torch's own loop, and what its parent learns of its end."""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from fastpipe.core.lanes import Lane, lanes_are_possible, stack_signal
from fastpipe.core.processes import end_with_parent, end_with_pipe, outliving_parent, signal_name
from fastpipe.core.text import printable
from fastpipe.errors import SharedMemoryError, WorkerError
from fastpipe.torch.fetching import UsersDataset
from fastpipe.torch.lane_memory import NAMED_MEMORY, expect_from, room, send_through
from fastpipe.torch.samples import BatchSample, BatchSamples, collated
from fastpipe.torch.threads import start_noting

if sys.platform != "win32":  # where there are no lanes either
    import resource

__all__ = ["WorkerCollate", "WorkerInit", "bytes_of", "lanes_for", "named_in", "worker_error"]

_STACK_S = 1.0


def lanes_for(workers: int, segments: int) -> list[Lane]:
    """A lane for each worker; none where the system has no such memory."""
    if not workers or not lanes_are_possible():
        return []
    # Each segment is two descriptors here, one of its mapping: a quarter of those allowed is enough.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8 // workers - 2
    lanes = [Lane(max(0, min(segments, most))) for _ in range(workers)]
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
        self.lanes = list(lanes)
        self._sent = 0
        self._is_forked = True
        # The signal is tied to the thread that starts the worker, which may end before the loader.
        is_main = threading.current_thread() is threading.main_thread()
        self._parent = os.getpid() if is_main else None

    def __call__(self, worker_id: int) -> None:
        # A forked worker must not collect its parent's garbage: TensorFlow's functions, for one, crash where
        # they are freed in a process that has not TensorFlow's threads.  It also keeps memory shared.  In a
        # started one, what is frozen would stay when the interpreter ends, and some libraries print that.
        if self._is_forked:
            gc.freeze()
        worker = get_worker_info()
        if worker is not None and isinstance(worker.dataset, UsersDataset):
            object.__setattr__(worker, "dataset", worker.dataset.dataset)
        _end_with(self._parent)
        lane = self.lanes[worker_id] if worker_id < len(self.lanes) else None
        if lane is not None:
            self._use(lane)
        if self._function is not None:
            self._function(worker_id)

    def __getstate__(self) -> dict[str, Any]:
        # Pickled for each worker in turn.  It gets its own lane only: a fork server takes no more
        # than 250 descriptors.
        number, self._sent = self._sent, self._sent + 1
        own = [None] * number + self.lanes[number : number + 1]
        return {**self.__dict__, "lanes": own, "_is_forked": False}

    def _use(self, lane: Lane) -> None:
        for other in self.lanes:
            if other is not None and other is not lane:
                other.close()
        writer = lane.writer()
        send_through(writer)
        start_noting(writer.note, writer.native_lines())
        faulthandler.disable()  # the script's, whose handlers torch has just replaced
        faulthandler.enable(writer.stack_fd, all_threads=True)
        faulthandler.register(stack_signal(), writer.stack_fd, all_threads=True)


class WorkerCollate:
    """A collate function as workers call it: with an error that says what to do where a batch does not
    fit into the memory that torch shares.

    Args:
        function: the collate function.
    """

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function

    def __call__(self, samples: Any) -> Any:
        # torch's own puts tensors into shared memory, unless they are there already.
        if self._function is default_collate and samples and not _are_shared(samples):
            needed, space = bytes_of(_first(samples)) * len(samples), room()
            if space is not None and needed > space[0]:
                raise SharedMemoryError(_no_room(f"of {_mib(needed)} ", space))
        try:
            # Its memory has a name for a moment, which a worker that is killed would leave.
            with outliving_parent() if self._function is default_collate else nullcontext():
                return collated(samples, self._function)
        except RuntimeError as error:
            space = room()
            if space is None or not ("shared memory" in str(error) and "No space" in str(error)):
                raise
            raise SharedMemoryError(_no_room("", space)) from error


def _are_shared(samples: Any) -> bool:
    """Return whether samples are in shared memory already, as the rows of a batch are."""
    return type(samples) is BatchSamples or type(_first(samples)) is BatchSample


def _first(samples: Any) -> Any:
    """Return the first sample, for a look: one that is asked for as usual is copied."""
    return samples.peek() if hasattr(samples, "peek") else samples[0]


def bytes_of(value: Any) -> int:
    """Return the bytes of the arrays in a sample."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(map(bytes_of, value.values()))
    return sum(map(bytes_of, value)) if isinstance(value, (tuple, list)) else 0


def _no_room(size: str, space: tuple[int, int]) -> str:
    return (
        f"a batch {size}does not fit into {NAMED_MEMORY}, through which torch's workers send batches: of "
        f"{_mib(space[1])} there are {_mib(space[0])} free. Enlarge it (docker run --shm-size=…), or use "
        "smaller batches, a smaller prefetch_factor, fewer workers, or num_workers=0"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def named_in(error: BaseException, workers: Sequence[Any]) -> list[int]:
    """Return the numbers of the workers whose processes an error of torch's names."""
    named = re.search(r"\(pid(?:\(s\))? ([\d, ]+)\)", str(error))
    pids = [int(pid) for pid in named[1].split(",")] if named else []
    return [number for number, worker in enumerate(workers) if worker.pid in pids]


def worker_error(
    head: str, found: Sequence[int], workers: Sequence[Any], lanes: Sequence[Lane], *, are_stuck: bool
) -> WorkerError:
    """Return an error about workers that says which, at what sample, and where in the code.

    Args:
        head: its first sentence.
        found: numbers of the workers.
        workers: the processes.
        lanes: theirs, or none.
        are_stuck: whether they do not answer; else they have ended.
    """
    parts = [head.strip().rstrip(".") + "."]
    for number in found:
        worker, lane = workers[number], lanes[number] if lanes else None
        parts.append(_about(number, worker, lane, are_stuck))
    return WorkerError("\n".join(parts), worker=found[0], pid=workers[found[0]].pid)


def _about(number: int, worker: Any, lane: Lane | None, is_stuck: bool) -> str:
    text = f"Worker {number} (pid {worker.pid}) "
    state = _state_of(worker.pid)
    if is_stuck:
        text += f"does not answer: {_STATES.get(state, f'its state is {state}.')}"
    else:
        text += _end_of(worker.exitcode)
    if lane is None:
        return text
    notes = lane.notes()
    if notes:
        text += f"\nIts last sample: {', '.join(map(printable, notes))}."
    if is_stuck and state not in ("", "Z") and not _answers(worker.pid):
        return f"{text}\nIt has not begun yet: it is still being started, or imports what it needs."
    stack = _ask_for_stack(worker.pid, state, lane) if is_stuck else lane.stack()
    stack = stack.partition("\nExtension modules:")[0]
    return text + (f"\nIts stack:\n{stack.rstrip()}" if stack else "\nIts stack is not known.")


def _end_of(exitcode: int | None) -> str:
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
    if exitcode is None:
        return "has ended."
    if exitcode < 0:
        return f"died of {signal_name(-exitcode)}."
    return f"ended with exit code {exitcode}."


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


_STATES = {
    "": "it is gone.", "T": "it has been stopped (SIGSTOP).",
    "D": "it waits for a disk or a network file system.", "R": "it is computing.", "S": "it is waiting.",
}  # fmt: skip


def _answers(pid: int) -> bool:
    """Return whether a process has a handler for the signal at which workers write their stacks: one that
    has not begun yet would be ended by it."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (stack_signal() - 1) & 1)


def _ask_for_stack(pid: int, state: str, lane: Lane) -> str:
    """Let the worker write its stacks, which it does also while C code runs."""
    start = lane.stack_so_far()
    try:
        os.kill(pid, stack_signal())
        if state == "T":  # it cannot write while it is stopped
            os.kill(pid, signal.SIGCONT)
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


def _end_with(parent: int | None) -> None:
    """End together with the parent, also while this process is stuck."""
    if sys.platform == "linux" and not end_with_parent(parent):
        end_with_pipe()  # a fork server is in between, or another thread has started it
