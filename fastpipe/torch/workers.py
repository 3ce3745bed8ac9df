"""Worker processes: their initialisation, errors about workers that end, and ``num_workers="auto"``."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import operator
import os
import re
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from fastpipe.core.lanes import Lane, LaneWriter, lanes_are_possible, stack_signal
from fastpipe.core.machine import default_threads
from fastpipe.core.processes import (
    end_with_parent,
    end_with_pipe,
    signal_name,
    why_no_processes,
)
from fastpipe.core.text import in_bytes, printable
from fastpipe.core.types import Key
from fastpipe.errors import SharedMemoryError, WorkerError
from fastpipe.torch.fetching import UsersDataset
from fastpipe.torch.samples import collated
from fastpipe.torch.source import Source
from fastpipe.torch.threads import start_noting
from fastpipe.torch.transport import NAMED_MEMORY, expect_from, note_tensors, room, send_through

if sys.platform != "win32":  # Windows has neither this module nor lanes
    import resource


# Nobody knows how many large tensors a batch of the script's own code has: images, or views and masks.
# Segments take no memory before they are used.
_OWN_TENSORS, _MOST_SEGMENTS = 4, 32
_STACK_S = 1.0  # longest time to wait for the stack that a worker writes


def opens_lazily(source: Source | None, workers: int) -> bool:
    """Return whether workers open images through ``fastpipe.pillow``: those of a dataset or a transform with
    code of its own, in a script that has imported Pillow."""
    is_own = source is None or source.leaves_images
    if not is_own or not workers or "PIL.Image" not in sys.modules:
        return False
    from fastpipe import pillow

    return not pillow.why_not()


def segments_for(
    source: Source | None, batch_size: int | None, prefetch_factor: int | None, workers: int
) -> int:
    """Return the number of tensors that each worker may send before the user releases the first."""
    if not prefetch_factor:  # there are no workers
        return 0
    # The user holds this batch and the previous batch, which one worker or two workers have made.
    batches = prefetch_factor + (2 if workers == 1 else 1)
    if source is not None:
        return batches * source.tensors(batch_size or 1)
    return min(batches * _OWN_TENSORS, _MOST_SEGMENTS)


def lanes_for(workers: int, segments: int) -> list[Lane]:
    """Return a lane (memory shared with the parent) for each worker.  Return an empty list if the system does
    not support lanes."""
    if not workers or not lanes_are_possible():
        return []
    # Each segment takes two file descriptors in this process: use at most a quarter of the limit.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8 // workers - 2
    lanes = [Lane(max(0, min(segments, most))) for _ in range(workers)]
    for lane in lanes:
        expect_from(lane)
    return lanes


class WorkerInit:
    """The init function of each worker.  At its end, it calls the user's own init function.

    The function makes the worker end when its parent ends.  It also lets the worker write notes about its
    current work, and its stacks if the worker crashes or if the parent requests them.
    """

    def __init__(
        self, function: Callable[[int], None] | None, lanes: Sequence[Lane], lazy_images: bool
    ) -> None:
        self._function = function
        self._lazy_images = lazy_images  # whether Pillow opens images through ``fastpipe.pillow``
        self.lanes = list(lanes)
        self._sent = 0
        self._is_forked = True
        # A handler of the script's own is left to its workers, too.
        self._is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        # The signal that ends a worker is sent when the thread ends that has started the worker.  Only the
        # main thread is sure to live as long as the loader.
        is_main = threading.current_thread() is threading.main_thread()
        self._parent = os.getpid() if is_main else None

    def __call__(self, worker_id: int) -> None:
        # A forked worker must not collect its parent's garbage: TensorFlow's functions, for example, crash if
        # they are freed in a process without TensorFlow's threads.  Freezing also keeps memory shared.  In a
        # spawned worker, frozen objects would remain at the interpreter's exit; some libraries report this.
        if self._is_forked:
            gc.freeze()
        worker = get_worker_info()
        if worker is not None and isinstance(worker.dataset, UsersDataset):
            object.__setattr__(worker, "dataset", worker.dataset.dataset)  # the user's own dataset
        if sys.platform == "linux" and not end_with_parent(self._parent):
            end_with_pipe()  # a fork server, or another thread than the main thread, started this process
        lane = self.lanes[worker_id] if worker_id < len(self.lanes) else None
        writer = None if lane is None else self._use(lane)
        if self._is_interruptible:

            def interrupted(number: int, frame: Any) -> None:
                if writer is not None:
                    writer.interrupt()  # the parent then raises KeyboardInterrupt, not a WorkerError
                raise KeyboardInterrupt

            signal.signal(signal.SIGINT, interrupted)
        if self._lazy_images:
            from fastpipe import pillow

            pillow.register()
        if self._function is not None:
            self._function(worker_id)

    def __getstate__(self) -> dict[str, Any]:
        # This object is pickled once for each worker, in order.  Each worker gets only its own lane, because
        # a fork server accepts at most 250 file descriptors.
        number, self._sent = self._sent, self._sent + 1
        own = [None] * number + self.lanes[number : number + 1]
        return {**self.__dict__, "lanes": own, "_is_forked": False}

    def _use(self, lane: Lane) -> LaneWriter:
        for other in self.lanes:
            if other is not None and other is not lane:
                other.close()
        writer = lane.writer()
        send_through(writer)
        start_noting(writer.note, writer.native_lines())
        faulthandler.disable()  # the one that the script enabled; torch has just replaced its handlers
        faulthandler.enable(writer.stack_fd, all_threads=True)
        faulthandler.register(stack_signal(), writer.stack_fd, all_threads=True)
        return writer


class WorkerCollate:
    """A collate function for workers.  It raises a clear error if a batch does not fit into shared memory."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function

    def __call__(self, samples: Any) -> Any:
        try:
            batch = collated(samples, self._function)
        except RuntimeError as error:
            space = room()
            if space is None or not ("shared memory" in str(error) and "No space" in str(error)):
                raise
            raise SharedMemoryError(
                f"a batch does not fit into {NAMED_MEMORY}, through which torch's workers send batches: of "
                f"{in_bytes(space[1])} there are {in_bytes(space[0])} free. Enlarge it (docker run "
                "--shm-size=…), or use smaller batches, a smaller prefetch_factor, fewer workers, or "
                "num_workers=0"
            ) from error
        note_tensors(batch)
        return batch


def named_in(error: BaseException, workers: Sequence[Any]) -> list[int]:
    named = re.search(r"\(pid(?:\(s\))? ([\d, ]+)\)", str(error))
    pids = [int(pid) for pid in named[1].split(",")] if named else []
    return [number for number, worker in enumerate(workers) if worker.pid in pids]


def worker_error(
    head: str, found: Sequence[int], workers: Sequence[Any], lanes: Sequence[Lane], *, are_stuck: bool
) -> WorkerError:
    """Return an error with the numbers of the workers ``found``, their last samples and their stacks."""
    about = (_about(number, workers[number], lanes[number] if lanes else None, are_stuck) for number in found)
    text = "\n".join([head.strip().rstrip(".") + ".", *about])
    return WorkerError(text, worker=found[0], pid=workers[found[0]].pid)


def _about(number: int, worker: Any, lane: Lane | None, is_stuck: bool) -> str:
    text, state = f"Worker {number} (pid {worker.pid}) ", _state_of(worker.pid)
    text += (
        f"does not answer: {_STATES.get(state, f'its state is {state}.')}" if is_stuck else _end_of(worker)
    )
    if lane is None:
        return text
    if notes := lane.notes():
        text += f"\nIts last sample: {', '.join(map(printable, notes))}."
    if is_stuck and state not in ("", "Z") and not _answers(worker.pid):
        return f"{text}\nIt has not begun yet: it is still being started, or imports what it needs."
    stack = _ask_for_stack(worker.pid, state, lane) if is_stuck else lane.stack()
    stack = stack.partition("\nExtension modules:")[0]
    return text + (f"\nIts stack:\n{stack.rstrip()}" if stack else "\nIts stack is not known.")


def _end_of(worker: Any) -> str:
    code = worker.exitcode
    if code is None:
        return "has ended."
    if code >= 0:
        return f"ended with exit code {code}."
    if code == -signal.SIGKILL:
        return (
            "was killed with SIGKILL, which is what the kernel does when memory is short (dmesg tells): use "
            "fewer workers or smaller batches, or num_workers=0, where threads share the memory."
        )
    if code == -signal.SIGBUS:
        return (
            "died of a bus error: a file that is mapped became shorter, or /dev/shm is full: enlarge it "
            "(docker run --shm-size=…), or use fewer workers or smaller batches."
        )
    return f"died of {signal_name(-code)}."


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
    """Return whether a process handles the stack signal.  The signal would kill a worker that is still
    starting, because it has no handler yet."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (stack_signal() - 1) & 1)


def _ask_for_stack(pid: int, state: str, lane: Lane) -> str:
    """Make a worker write its stacks, and return them.  This works even while the worker runs C code."""
    start = lane.stack_so_far()
    try:
        os.kill(pid, stack_signal())
        if state == "T":  # it cannot write while it is stopped
            os.kill(pid, signal.SIGCONT)
    except OSError:
        return ""
    deadline, size = time.monotonic() + _STACK_S, start
    while time.monotonic() < deadline:
        time.sleep(0.02)
        grown = lane.stack_so_far()
        if grown > start and grown == size:
            break
        size = grown
    return lane.stack(start)


# ---- num_workers="auto" ------------------------------------------------------------------------------

_EACH_S = 0.3  # duration of each of the two measurements
_ALL_S = 0.9  # time limit for both measurements and the start of a process
# If a batch takes less time than this, workers do not help: sending a batch takes about as long.
_WORTH_S = 0.002
# Workers are chosen only if they are estimated to be faster by this factor: n workers never reach the
# estimate, n times the speed of one worker.
_MARGIN = 1.2

_log = logging.getLogger("fastpipe")


# Number of threads and processes that each worker needs.  System limits count threads and processes together.
_TASKS = 3


def choose_workers(
    dataset: Any,
    source: Source | None,
    batch_size: int,
    context: Any = None,
    functions: Sequence[Callable[..., Any] | None] = (None, None),
) -> tuple[int, str]:
    """Return the number of worker processes with which batches are made fastest, and the reason.  The number
    is 0 if threads of this process are faster, or if no process can be started.  The speed is measured in a
    forked process, so that no files are opened in this process."""
    chosen, why = _chosen(dataset, source, batch_size, context, functions)
    _log.info("num_workers='auto' is %d: %s", chosen, why)
    return chosen, why


def _chosen(
    dataset: Any, source: Source | None, batch_size: int, context: Any,
    functions: Sequence[Callable[..., Any] | None],
) -> tuple[int, str]:  # fmt: skip
    cores = default_threads()
    is_forked = _start_method(context) == "fork"
    length = operator.length_hint(dataset)
    if cores == 1:
        return 0, "this process may use one core only"
    if not length:
        return 0, "the dataset has no samples to measure"
    if why_none := why_no_processes() or ("" if is_forked else _why_no_second_run()):
        return 0, why_none
    if not _have_room(_TASKS * cores):
        return 0, f"limits of this system do not allow {cores} more processes"
    if source is not None and source.prefetchers(is_here=True):
        return 0, "what comes next is fetched ahead in this process"
    if not hasattr(os, "fork"):
        return cores, "nothing was measured, as this system cannot fork"
    sent = None if is_forked else (dataset, *functions)
    try:
        found = _in_child(lambda: _measure(dataset, source, batch_size, length, sent))
    except OSError as error:
        return 0, f"no process can be started ({error})"
    if found is None:
        return cores, f"no batch and no sample was ready within {_ALL_S} s"
    here, alone = found
    if not here:
        return 0, "a sample cannot be made, or the dataset not be sent, in another process"
    return _judge(here, alone, cores, batch_size)


def _judge(here: float, alone: float, cores: int, batch_size: int) -> tuple[int, str]:
    """Return the number of workers, and the reason.  ``here`` is the speed of this process with threads, and
    ``alone`` is the speed of one worker, both in samples per second."""
    there = alone * cores
    said = f"{here:,.0f} samples/s here, about {there:,.0f} in {cores} workers"
    if batch_size / here < _WORTH_S:
        return 0, f"{said}; a batch is made faster than it is sent"
    return (cores, said) if there > _MARGIN * here else (0, said)


def _start_method(context: Any) -> str:
    """Return the name of the start method of ``context``, without setting multiprocessing's default."""
    if isinstance(context, str):
        return context
    found = (multiprocessing if context is None else context).get_start_method(allow_none=True)
    return found or multiprocessing.get_all_start_methods()[0]


def _why_no_second_run() -> str:
    """Return the reason why a spawned process, which imports the script, would fail or run the whole script
    again.  It is empty if the script can be imported."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None:
        return ""  # no script is imported, and `_measure` checks that no object of the script is needed
    try:
        source = Path(path).read_text(errors="replace")
    except OSError as error:
        return f"workers would import the script, which cannot be read ({error})"
    if re.search(r"__name__\s*==", source):
        return ""
    return f"workers would run all of {path}, which has no `if __name__ == '__main__':`"


def _have_room(tasks: int) -> bool:
    """Return whether system limits allow this many more tasks (threads and processes together)."""
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
) -> tuple[float, float]:
    """Return two speeds in samples per second: of batches made with threads, and of single samples made in
    one thread."""
    is_script = getattr(sys.modules["__main__"], "__file__", None) is not None
    if sent is not None and b"__main__" in bytes(ForkingPickler.dumps(sent)) and not is_script:
        raise OSError("a started process cannot have a class or function of a script without a file")
    indices = np.random.Generator(np.random.PCG64(0)).integers(0, length, 1 << 16).tolist()

    def one(at: int) -> int:
        dataset[indices[at]]
        return 1

    alone = _rate(one)
    if source is None:
        return alone, alone

    def batch(at: int) -> int:
        taken = indices[at : at + batch_size]
        source.start(taken, Key(0, 0, np.arange(len(taken), dtype=np.int64))).finish()
        return len(taken)

    return _rate(batch), alone


def _rate(make: Callable[[int], int]) -> float:
    made = make(0)  # the first call, which opens files, is not timed
    first, made = made, 0
    start = perf_counter()
    while (taken := perf_counter() - start) < _EACH_S and made < (1 << 15):
        made += make(first + made)
    return made / taken


def _in_child(measure: Callable[[], tuple[float, float]]) -> tuple[float, float] | None:
    """Call ``measure`` in a forked process, and return its result.  Return zeros if ``measure`` fails, and
    None if it takes longer than ``_ALL_S``."""
    reading, writing = os.pipe()
    try:
        child = os.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        raise
    if child == 0:
        found = 0.0, 0.0
        with contextlib.suppress(BaseException):
            gc.freeze()  # the child must not collect the parent's garbage, as in `WorkerInit`
            os.close(reading)
            torch.set_num_threads(1)  # as torch does in its workers
            found = measure()
        os.write(writing, struct.pack("dd", *found))
        os._exit(0)
    os.close(writing)
    try:
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        answer = os.read(reading, 16) if poll.poll(1000 * _ALL_S) else None
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if answer is None:
        return None
    return struct.unpack("dd", answer) if answer else (0.0, 0.0)  # no answer: the child crashed
