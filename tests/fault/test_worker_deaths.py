"""Workers that end at every point of their work, in every way: always a `WorkerError` that says which, and a
loader that can be iterated again."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import multiprocessing.connection
import multiprocessing.queues
import multiprocessing.resource_sharer
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fastpipe import FastLoader, accelerate
from fastpipe.errors import WorkerError
from fastpipe.torch import transport as lane_memory

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "SIGRTMIN"), reason="run it on Linux, whose signals these are"
)


AT = 15  # a sample of the second worker's, wherever it is told its samples


def _end_by_signal(number: int) -> None:
    os.kill(os.getpid(), number)
    threading.Event().wait()


WAYS: dict[str, tuple[Callable[[], Any], str]] = {
    "SIGKILL": (functools.partial(_end_by_signal, signal.SIGKILL), "was killed with SIGKILL"),
    "SIGTERM": (functools.partial(_end_by_signal, signal.SIGTERM), "died of SIGTERM"),
    "real-time": (
        functools.partial(_end_by_signal, signal.SIGRTMIN + 3),
        f"died of signal {signal.SIGRTMIN + 3} (SIGRTMIN+3)",
    ),
    "os._exit": (functools.partial(os._exit, 3), "ended with exit code 3"),
    "sys.exit": (functools.partial(sys.exit, 4), "ended with exit code 4"),
}


class EndsAt:
    """A ``worker_init_fn`` that has the second worker end at some point of its work, once.

    Args:
        folder: for the flag that it is to happen.
        moment: the point.
        way: how.
    """

    def __init__(self, folder: Path, moment: str, way: str = "SIGKILL") -> None:
        self._flag, self.moment, self._way = folder / "flag", moment, way
        self._flag.touch()

    def end(self) -> None:
        """End this process, if it is not done yet."""
        if self._flag.exists():
            self._flag.unlink()
            WAYS[self._way][0]()

    def __call__(self, number: int) -> None:
        if number == 1:
            getattr(self, f"_{self.moment}", lambda: None)()

    def _init(self) -> None:
        self.end()

    def _send(self) -> None:
        """In the middle of a message, with the lock of the queue."""
        send: Any = multiprocessing.connection.Connection._send  # type: ignore[attr-defined]

        def half(connection: Any, buffer: Any, **options: Any) -> None:
            if self._flag.exists():
                os.write(connection.fileno(), bytes(buffer[: len(buffer) // 2]))
                self.end()
            send(connection, buffer, **options)

        multiprocessing.connection.Connection._send = half  # type: ignore[attr-defined]

    def _receive(self) -> None:
        """With the lock of the queue of indices, for the second time."""
        get, count = multiprocessing.queues.Queue.get, itertools.count()

        def second(queue: Any, *arguments: Any, **options: Any) -> Any:
            if next(count) == 1:
                with queue._rlock:
                    self.end()
            return get(queue, *arguments, **options)

        multiprocessing.queues.Queue.get = second  # type: ignore[method-assign]

    def _share(self) -> None:
        """As it puts a batch into shared memory."""
        for owner, name in (
            (lane_memory, "_unnamed"),
            (torch.UntypedStorage, "_new_using_fd_cpu"),
            (torch.UntypedStorage, "share_memory_"),
        ):
            setattr(owner, name, self._before(getattr(owner, name)))

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def ends(*arguments: Any) -> Any:
            self.end()
            return function(*arguments)

        return ends

    def _fetch(self) -> None:
        """After a batch was sent, as its memory is asked for."""
        sharer: Any = multiprocessing.resource_sharer._ResourceSharer  # type: ignore[attr-defined]
        sharer._serve = self._before(sharer._serve)


class Numbers:
    """A dataset of the script's own, whose batches are too large to travel in a message."""

    def __init__(self, end: EndsAt) -> None:
        self.end = end

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == AT and self.end.moment == "sample":
            self.end.end()
        return torch.full((3, 60, 60), index)


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, end: EndsAt) -> None:
        self.numbers = Numbers(end)

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        assert worker is not None
        for index in range(12 * worker.id, 12 * worker.id + 12):
            yield self.numbers[index]


def error_of(make: Callable[[], Any]) -> WorkerError:
    """The error that an epoch ends with; wherever the news of the death come, it is this one."""
    try:
        for _ in make():
            pass
    except WorkerError as error:
        return error.with_traceback(None)
    raise AssertionError("no error")


def check(error: WorkerError, way: str = "SIGKILL") -> None:
    assert isinstance(error, RuntimeError)
    assert f"Worker {error.worker} (pid {error.pid}) {WAYS[way][1]}" in str(error)


def check_again(loader: Any) -> None:
    """It can be iterated again, and nothing is left."""
    values = sorted(int(value) for batch in loader for value in batch.reshape(-1, 3 * 60 * 60)[:, 0])
    assert values == list(range(24))
    gc.collect()


MOMENTS = ["init", "sample", "send", "receive", "share", "fetch"]
MODES: dict[str, dict[str, Any]] = {
    "plain": {}, "persistent": {"persistent_workers": True}, "any order": {"in_order": False},
    "samples": {"batch_size": None}, "timeout": {"timeout": 60}, "one ahead": {"prefetch_factor": 1},
}  # fmt: skip


def make(end: EndsAt, kind: Any = Numbers, method: str = "fork", **options: Any) -> FastLoader[Any]:
    options = {"batch_size": 2, "num_workers": 2, **options}
    return FastLoader(kind(end), worker_init_fn=end, multiprocessing_context=method, **options)


@pytest.mark.few(12)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_a_worker_that_is_killed_at_any_point_is_named(
    tmp_path: Path, kind: Any, moment: str, mode: str
) -> None:
    loader = make(EndsAt(tmp_path, moment), kind, **MODES[mode])
    error = error_of(lambda: loader)
    check(error)
    assert error.worker == 1 or mode == "any order"  # where either may get the sample
    check_again(loader)


# A fork server's children are not the script's: no signal says that one has ended.
@pytest.mark.few(3)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_started_worker_that_is_killed_at_any_point_is_named(
    tmp_path: Path, moment: str, method: str
) -> None:
    loader = make(EndsAt(tmp_path, moment), method=method)
    check(error_of(lambda: loader))
    check_again(loader)


@pytest.mark.parametrize("way", WAYS)
def test_the_error_says_how_a_worker_ended(tmp_path: Path, way: str) -> None:
    loader = make(EndsAt(tmp_path, "sample", way), timeout=2)
    error = error_of(lambda: loader)
    check(error, way)
    assert f"Its last sample: {AT}." in str(error)
    check_again(loader)


@pytest.mark.parametrize("moment", ["sample", "send", "fetch"])
def test_an_accelerated_loader_names_it_too(tmp_path: Path, moment: str) -> None:
    end = EndsAt(tmp_path, moment)
    loader = accelerate(DataLoader(Numbers(end), 2, num_workers=2, worker_init_fn=end))
    check(error_of(lambda: loader))
    check_again(loader)


def test_persistent_workers_that_end_between_epochs_are_named(tmp_path: Path) -> None:
    end = EndsAt(tmp_path, "none")
    loader = make(end, method="forkserver", persistent_workers=True)
    check_again(loader)
    worker = loader._iterator._workers[1]  # type: ignore[union-attr]
    os.kill(worker.pid, signal.SIGKILL)
    multiprocessing.connection.wait([worker.sentinel])
    check(error_of(lambda: loader))
    check_again(loader)


_UNGUARDED = """
import multiprocessing
from fastpipe import FastLoader
from fastpipe.errors import WorkerError

class Large:  # more than the pipe to a process takes before that reads
    def __init__(self):
        self.content = bytes(1 << 20)
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index

try:
    list(FastLoader(Large(), 2, num_workers=2, multiprocessing_context="forkserver"))
except WorkerError as error:
    print(str(error).partition(" (")[0], "__name__" in str(error))
"""


def test_a_script_without_a_guard_is_told_that_it_needs_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_UNGUARDED)
    ran = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    expected = "Worker 0 ended while it was being started, before it had read what it needs True"
    assert ran.stdout.splitlines() == [expected], ran.stderr
    assert "An attempt has been made to start a new process" in ran.stderr


# ---- workers that are late before they have begun -------------------------------------------------


class _Blocked:
    """A dataset that a process waits for as it reads it, until the test lets it."""

    def __init__(self, folder: Path, act: str) -> None:
        self.fifo, self.act = folder / "fifo", act
        os.mkfifo(self.fifo)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.act == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            self.fifo.read_text()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("act", "state"), [("wait", "it is waiting"), ("stop", "it has been stopped (SIGSTOP)")]
)
def test_a_worker_that_has_not_begun_is_named_and_goes_on(tmp_path: Path, act: str, state: str) -> None:
    dataset = _Blocked(tmp_path, act)
    iterator = iter(FastLoader(dataset, 2, num_workers=1, timeout=1, multiprocessing_context="forkserver"))
    (worker,) = iterator._workers  # type: ignore[attr-defined]
    text = ""
    while state not in text:  # it may not be there yet
        with pytest.raises(WorkerError) as caught:
            next(iterator)
        text = str(caught.value)
    assert (caught.value.worker, caught.value.pid) == (0, worker.pid)
    assert "It has not begun yet" in text
    if act == "stop":
        os.kill(worker.pid, signal.SIGCONT)
    else:
        dataset.fifo.write_text("go on")
    while True:
        with contextlib.suppress(WorkerError):
            assert next(iterator).tolist() == [0, 1]
            break


def test_a_worker_that_hangs_in_the_scripts_init_function_shows_its_stack() -> None:
    def never_ends(number: int) -> None:
        threading.Event().wait()

    loader = FastLoader(list(range(4)), 2, num_workers=1, timeout=1, worker_init_fn=never_ends)
    with pytest.raises(WorkerError, match=r"(?s)Worker 0 .* it is waiting.*Its stack:.*in never_ends"):
        next(iter(loader))
