"""Workers that end or hang at every point of their work, in every way: a ``WorkerError`` says which, where and
why, the loader can be iterated again, and nothing is left."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.queues
import multiprocessing.resource_sharer
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from scripts import ran, wait_until_ended
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map
from torchvision import transforms as v1

from fastpipe import FastImageFolder, FastLoader, accelerate
from fastpipe.bench.synthetic import photo_tree
from fastpipe.core.lanes import LaneWriter
from fastpipe.core.native import native
from fastpipe.errors import WorkerError
from fastpipe.torch import transport

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="run it on Linux, which has /proc")

AT, LATER = 7, 15  # a sample of the second worker's, of a dataset and of a stream
SIZE = (47, 31)  # of its image
COUNT = 24


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = photo_tree(tmp_path_factory.mktemp("tree"), classes=2, per_class=12, sizes=(20, 24))
    Image.new("RGB", SIZE, (9, 8, 7)).save(root / f"class_000/{AT:04d}.jpg")
    return root


# What happens in a worker: objects that go to any kind of process.


def stuck_in_python() -> None:
    threading.Event().wait()


def stuck_in_c() -> None:
    """Wait for ever, without a system call that a signal ends, and keep the GIL."""
    lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()


def segmentation_fault() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def abort() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


def end_by_signal(number: int) -> None:
    os.kill(os.getpid(), number)
    threading.Event().wait()


killed = functools.partial(end_by_signal, signal.SIGKILL)


def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Meet:
    """An act that tells the test which process it is in, and does the rest."""

    def __init__(self, folder: Path, rest: Callable[[], Any]) -> None:
        self._fifo, self._rest = str(folder / "fifo"), rest
        os.mkfifo(self._fifo)

    def __call__(self) -> None:
        Path(self._fifo).write_text(f"{os.getpid()}\n")
        self._rest()

    def pid(self) -> int:
        """In the test: wait for the process; an error where it failed before."""
        pid = int(Path(self._fifo).read_text())
        assert pid
        return pid

    def give_up(self) -> None:
        Path(self._fifo).write_text("0\n")


class Once:
    """An act at one moment of the second worker's work, once; it is the ``worker_init_fn``, too."""

    def __init__(self, folder: Path, act: Callable[[], Any], moment: str = "sample") -> None:
        self._flag, self._act, self.moment = folder / "flag", act, moment
        self._flag.touch()

    def act(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._flag.unlink()
            self._act()

    def __call__(self, number: int) -> None:
        if number == 1:
            getattr(self, f"_{self.moment}", lambda: None)()

    def _init(self) -> None:
        self.act()

    def _send(self) -> None:
        """In the middle of a message, with the lock of the queue."""
        send: Any = multiprocessing.connection.Connection._send  # type: ignore[attr-defined]

        def half(connection: Any, buffer: Any, **options: Any) -> None:
            if self._flag.exists():
                os.write(connection.fileno(), bytes(buffer[: len(buffer) // 2]))
                self.act()
            send(connection, buffer, **options)

        multiprocessing.connection.Connection._send = half  # type: ignore[attr-defined]

    def _receive(self) -> None:
        """With the lock of the queue of indices, for the second time."""
        get, count = multiprocessing.queues.Queue.get, itertools.count()

        def second(queue: Any, *arguments: Any, **options: Any) -> Any:
            if next(count) == 1:
                with queue._rlock:
                    self.act()
            return get(queue, *arguments, **options)

        multiprocessing.queues.Queue.get = second  # type: ignore[method-assign]

    def _share(self) -> None:
        """As it puts a batch into shared memory."""
        for owner, name in (
            (LaneWriter, "take"), (transport, "_unnamed"), (torch.UntypedStorage, "_new_using_fd_cpu"), (torch.UntypedStorage, "share_memory_"),
        ):  # fmt: skip
            setattr(owner, name, self._before(getattr(owner, name)))

    def _fetch(self) -> None:
        """After a batch was sent, as its memory is asked for."""
        sharer: Any = multiprocessing.resource_sharer._ResourceSharer  # type: ignore[attr-defined]
        sharer._serve = self._before(sharer._serve)

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*arguments: Any) -> Any:
            self.act()
            return function(*arguments)

        return acting


class Numbers:
    """A dataset of the script's own, whose batches are too large to travel in a message."""

    def __init__(self, once: Once, at: int = AT) -> None:
        self.once, self.at = once, at

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at and self.once.moment == "sample":
            self.once.act()
        return torch.full((3, 60, 60), index)


class OfTwoTypes(Numbers):
    """Tensors that torch itself stacks, in shared memory that has a name for a moment."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index).to(torch.float32 if index % 2 else torch.float64)


def part(samples: Any) -> torch.Tensor:
    """Stack tensors as a part of a storage, whose descriptor the parent asks the worker for."""
    return torch.stack([*samples, samples[0]])[:-1]


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, once: Once) -> None:
        self.numbers = Numbers(once, LATER)

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        assert worker is not None
        for index in range(12 * worker.id, 12 * worker.id + 12):
            yield self.numbers[index]


class AtSize:
    """A transform of the script's own; something happens at the image of one size."""

    def __init__(self, once: Once) -> None:
        self.once = once

    def __call__(self, image: Any) -> torch.Tensor:
        if image.size == SIZE and self.once.moment == "sample":
            self.once.act()
        return torch.zeros(4)


def images(tree: Path) -> Callable[[Once], FastImageFolder]:
    return lambda once: FastImageFolder(tree, AtSize(once), thread_safe=True, threads=2)


@pytest.fixture(params=["own", "images"])
def kind(request: pytest.FixtureRequest, tree: Path) -> Any:
    return Numbers if request.param == "own" else images(tree)


def make(once: Once, kind: Any = Numbers, **options: Any) -> FastLoader[Any]:
    options = {"batch_size": 2, "num_workers": 2, "multiprocessing_context": "fork", **options}
    if once.moment == "fetch":
        options["collate_fn"] = part
    return FastLoader(kind(once), worker_init_fn=once, workers="processes", **options)


def error_of(batches: Any) -> WorkerError:
    """The error that an epoch ends with; wherever the news of the death come, it is this one."""
    try:
        for _ in batches:
            pass
    except WorkerError as error:
        # Its traceback has this frame, and in it the loader, whose workers would live on.
        return error.with_traceback(None)
    raise AssertionError("no error")


def check(error: WorkerError, words: str, *more: str) -> None:
    assert isinstance(error, RuntimeError)
    for expected in (f"Worker {error.worker} (pid {error.pid}) {words}", *more):
        assert expected in str(error)


def check_again(loader: Any) -> None:
    """It can be iterated again, and nothing is left."""
    batches = list(loader)
    if isinstance(batches[0], list | tuple):
        assert sum(len(batch[1]) for batch in batches) == COUNT
    else:
        values = sorted(int(value) for batch in batches for value in batch.reshape(-1, 3 * 60 * 60)[:, 0])
        assert values == list(range(COUNT))
    del batches
    gc.collect()


MOMENTS = ["init", "sample", "send", "receive", "share", "fetch"]
MODES: dict[str, dict[str, Any]] = {
    "plain": {}, "persistent": {"persistent_workers": True}, "any order": {"in_order": False},
    "samples": {"batch_size": None}, "timeout": {"timeout": 60}, "one ahead": {"prefetch_factor": 1},
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_a_worker_that_is_killed_at_any_point_is_named(
    tmp_path: Path, kind: Any, moment: str, mode: str
) -> None:
    loader = make(Once(tmp_path, killed, moment), kind, **MODES[mode])
    error = error_of(loader)
    check(error, "was killed with SIGKILL", "num_workers=0")
    assert error.worker == 1 or mode == "any order"  # where either may get the sample
    check_again(loader)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_worker_that_ctrl_c_ends_is_a_keyboard_interrupt(tmp_path: Path, moment: str) -> None:
    """Ctrl-C reaches all processes, and Python loses it in this one if a finalizer runs, or a fork."""
    loader = make(Once(tmp_path, interrupted, moment))
    with pytest.raises(KeyboardInterrupt):
        list(loader)
    check_again(loader)


def test_ctrl_c_while_workers_are_forked_is_raised_after_that(tmp_path: Path) -> None:
    class Forks:
        is_due = True

        def interrupt(self) -> None:
            if self.is_due:
                self.is_due = False
                signal.raise_signal(signal.SIGINT)

    forks = Forks()  # Python ignores what such a function raises
    os.register_at_fork(after_in_parent=forks.interrupt)
    loader = make(Once(tmp_path, killed, "never"))
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    check_again(loader)


def test_an_interrupt_between_a_lock_and_its_block_leaves_no_lock_held(tmp_path: Path) -> None:
    """Ctrl-C as the loader sends a request to a worker; torch's error about a worker may come there, too."""
    loader = make(Once(tmp_path, killed, "none"))
    iterator = iter(loader)

    def interrupt(frame: Any, event: str, argument: Any) -> None:
        if event == "return" and frame.f_code is threading.Condition.__enter__.__code__:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(iterator)
    del iterator  # it tells its workers to end, through the same queues
    check_again(loader)


def test_a_handler_of_the_scripts_own_gets_every_interrupt(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        loader = make(Once(tmp_path, functools.partial(os.kill, 0, signal.SIGINT)))
        check_again(loader)  # a sample sends Ctrl-C to all processes
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


# A fork server's children are not the script's: no signal says that one has ended.
@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_started_worker_that_is_killed_at_any_point_is_named(
    tmp_path: Path, moment: str, method: str
) -> None:
    loader = make(Once(tmp_path, killed, moment), multiprocessing_context=method)
    check(error_of(loader), "was killed with SIGKILL")
    check_again(loader)


ENDS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "SIGKILL": (killed, ["was killed with SIGKILL"]),
    "SIGTERM": (functools.partial(end_by_signal, signal.SIGTERM), ["died of SIGTERM"]),
    "real-time": (functools.partial(end_by_signal, signal.SIGRTMIN + 3), [f"died of signal {signal.SIGRTMIN + 3} (SIGRTMIN+3)"]),
    "os._exit": (functools.partial(os._exit, 3), ["ended with exit code 3"]),
    "sys.exit": (functools.partial(sys.exit, 4), ["ended with exit code 4"]),
    "without an error": (functools.partial(sys.exit, 0), ["ended with exit code 0"]),
    "segmentation fault": (segmentation_fault, ["died of SIGSEGV", "in segmentation_fault\n", "in act\n"]),
    "abort": (abort, ["died of SIGABRT", "in abort\n", "in act\n"]),
}  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("end", "kind"), [*((end, "own") for end in ENDS), ("SIGKILL", "images"), ("segmentation fault", "images")],
    indirect=["kind"],
)  # fmt: skip
def test_the_error_says_how_a_worker_ended(tree: Path, tmp_path: Path, end: str, kind: Any) -> None:
    (act, words), timeout = ENDS[end], 2 if end in ("sys.exit", "without an error") else 0
    loader = make(Once(tmp_path, act), kind, timeout=timeout)
    iterator = iter(loader)
    error = error_of(iterator)
    sample = f"{AT}." if kind is Numbers else str(tree / f"class_000/{AT:04d}.jpg")
    assert sample in str(error)[str(error).index("Its last sample: ") :]
    check(error, *words)
    assert "Extension modules" not in str(error)
    assert words[0] in str(error_of(iterator)), "the next call does not hang"
    del iterator
    check_again(loader)


def test_a_transform_that_runs_after_all_files_were_read_names_its_sample(tree: Path, tmp_path: Path) -> None:
    dataset = FastImageFolder(tree, AtSize(Once(tmp_path, functools.partial(os._exit, 3))), threads=1)
    loader = FastLoader(dataset, 8, sampler=[AT, *range(7)], num_workers=1, workers="processes")
    check(error_of(loader), "ended with exit code 3", f"class_000/{AT:04d}.jpg")


@pytest.mark.few(1)
@pytest.mark.parametrize("moment", ["sample", "send", "fetch"])
def test_an_accelerated_loader_names_the_worker_too(tmp_path: Path, moment: str) -> None:
    once = Once(tmp_path, killed, moment)
    collate = part if moment == "fetch" else None
    loader = accelerate(DataLoader(Numbers(once), 2, num_workers=2, worker_init_fn=once, collate_fn=collate))
    check(error_of(loader), "was killed with SIGKILL")
    check_again(loader)


def test_persistent_workers_that_end_or_hang_between_epochs_are_named(tmp_path: Path) -> None:
    once = Once(tmp_path, killed, "none")
    loader = make(once, multiprocessing_context="forkserver", persistent_workers=True)
    check_again(loader)
    worker = loader._iterator._workers[1]  # type: ignore[union-attr]
    os.kill(worker.pid, signal.SIGKILL)
    multiprocessing.connection.wait([worker.sentinel])
    check(error_of(loader), "was killed with SIGKILL")
    check_again(loader)

    meet = Meet(tmp_path, stuck_in_c)
    loader = make(Once(tmp_path, meet), timeout=2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator), next(iterator)
    pid = meet.pid()
    del iterator
    with pytest.raises(WorkerError) as caught:
        iter(loader)  # asks its workers to begin again
    assert "in stuck_in_c\n" in str(caught.value).partition(f"Worker 1 (pid {pid}) does not answer")[2]
    del caught
    check_again(loader)


def test_a_worker_that_is_killed_while_the_core_decodes_names_its_samples(tree: Path) -> None:
    crop = v1.Compose([v1.RandomResizedCrop(16), v1.ToTensor()])
    dataset, hour = FastImageFolder(tree, crop, threads=2), 3600 * 10**9
    options: Any = {"workers": "processes", "worker_init_fn": lambda number: native.simulate_decoding(hour)}
    iterator = iter(FastLoader(dataset, 2, num_workers=1, **options))
    lane, worker = iterator._lanes[0], iterator._workers[0]  # type: ignore[attr-defined]
    while len(lane.notes()) < 2:
        threading.Event().wait(0.001)
    os.kill(worker.pid, signal.SIGKILL)
    error = error_of(iterator)
    for number in (0, 1):
        assert str(tree / f"class_000/{number:04d}.jpg") in str(error).partition("Its last sample: ")[2]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("method", "persistent"),
    [("fork", False), ("fork", True), pytest.param("spawn", True, marks=pytest.mark.slow)],
)
def test_a_worker_that_ends_while_the_script_does_something_else_is_named(
    tmp_path: Path, kind: Any, method: str, persistent: bool
) -> None:
    """And not one of another loader."""
    meet = Meet(tmp_path, stuck_in_python)
    options = {"multiprocessing_context": method, "persistent_workers": persistent}
    loader = make(Once(tmp_path, meet), kind, **options)
    others = tmp_path / "other"
    others.mkdir()
    other = iter(make(Once(others, killed, "none"), persistent_workers=True))
    iterator = iter(loader)
    next(iterator), next(iterator)
    pid = meet.pid()
    with pytest.raises(WorkerError) as caught:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its signal has been sent by now
        threading.Event().wait(60)
    error = caught.value.with_traceback(None)
    check(error, "was killed with SIGKILL")
    assert (error.worker, error.pid, str(error).count("\nWorker ")) == (1, pid, 1)
    del iterator, error, other, caught
    check_again(loader)


STUCK = {
    stuck_in_python: "it is waiting",
    stuck_in_c: "it is waiting",
    stopped: "it has been stopped (SIGSTOP)",
}


@pytest.mark.few(1)
@pytest.mark.parametrize("act", STUCK)
def test_a_worker_that_hangs_is_named_with_its_stack_and_ends(tmp_path: Path, kind: Any, act: Any) -> None:
    loader = make(Once(tmp_path, act), kind, timeout=2)
    iterator = iter(loader)
    pids = [worker.pid for worker in iterator._workers]  # type: ignore[attr-defined]
    # Another may be named before it, which waits for the lock of their queue that this one has.
    about = str(error_of(iterator)).partition(f"Worker 1 (pid {pids[1]}) ")[2]
    assert STUCK[act] in about and f"in {act.__name__}\n" in about and "Its last sample: " in about
    del iterator
    gc.collect()
    wait_until_ended(pids)
    check_again(loader)


def test_a_worker_that_hangs_in_the_scripts_init_function_shows_its_stack() -> None:
    def never_ends(number: int) -> None:
        threading.Event().wait()

    loader = FastLoader(list(range(4)), 2, num_workers=1, timeout=1, worker_init_fn=never_ends)
    with pytest.raises(WorkerError, match=r"(?s)Worker 0 .* it is waiting.*Its stack:.*in never_ends"):
        next(iter(loader))


class Blocked:
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


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("act", "state"), [("wait", "it is waiting"), ("stop", "it has been stopped (SIGSTOP)")]
)
def test_a_worker_that_has_not_begun_is_named_and_goes_on(tmp_path: Path, act: str, state: str) -> None:
    dataset = Blocked(tmp_path, act)
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
    found = None
    while found is None:
        with contextlib.suppress(WorkerError):
            found = next(iterator).tolist()
    assert found == [0, 1]


_UNGUARDED = """
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

_STOPPED = """
import os, signal, sys, threading
import torch
from fastpipe import FastLoader

torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5  # how long its end waits for a worker

class Stops:
    blocks = False
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if self.blocks and index == 2:
            open(f"/dev/shm/torch_{os.getpid()}_0_0", "w").close()  # as torch does for a moment
            threading.Event().wait()
        if index == 5:
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.tensor(index)

def uncaught():
    list(FastLoader(Stops(), 2, num_workers=2, timeout=1))

def kept():
    global kept
    Stops.blocks = True
    kept = FastLoader(Stops(), 2, num_workers=2, persistent_workers=True)
    iter(kept)
    os.waitid(os.P_PID, kept._iterator._workers[0].pid, os.WSTOPPED | os.WNOWAIT)

for end in (uncaught, kept):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(write, 2)  # its workers have it as well
        os.close(write)
        end()
        sys.exit(0)
    os.close(write)
    said = open(read).read()  # to the end: all of them are gone
    print(end.__name__, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "stopped (SIGSTOP)" in said,
          said.count("Traceback"), "Exception ignored" in said)
"""


@pytest.mark.parametrize(
    ("script", "lines", "words"),
    [
        pytest.param(
            _UNGUARDED, ["Worker 0 ended while it was being started, before it had read what it needs True"],
            "An attempt has been made to start a new process", id="without a guard"),
        pytest.param(_STOPPED, ["uncaught 1 True 1 False", "kept 0 False 0 False"], "", id="stopped worker",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_script_ends_with_what_it_needs_to_know(
    tmp_path: Path, script: str, lines: list[str], words: str
) -> None:
    (tmp_path / "train.py").write_text(script)
    done = ran("train.py", cwd=tmp_path)
    assert done.stdout.splitlines() == lines, done.stderr
    assert words in done.stderr


def test_a_forked_copy_of_the_iterator_ends_no_workers(tree: Path, tmp_path: Path, in_child: Any) -> None:
    iterators = [iter(make(Once(tmp_path, killed, "none")))]
    next(iterators[0])

    def drop() -> None:
        iterators.clear()
        gc.collect()

    in_child(drop)
    assert len(list(iterators[0])) == COUNT // 2 - 1


def test_names_that_a_killed_worker_leaves_in_shared_memory_are_removed(tmp_path: Path) -> None:
    def leave_a_name() -> None:
        """As torch does in a worker that is killed while it makes shared memory."""
        Path(f"/dev/shm/torch_{os.getpid()}_0_0").touch()
        killed()

    pid = error_of(make(Once(tmp_path, leave_a_name))).pid
    gc.collect()
    assert not list(Path("/dev/shm").glob(f"torch_{pid}_*"))


def until_parent_has_ended() -> None:
    """Both as the pipe to it tells and as the kernel does, which come one after the other."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    while os.getppid() == parent.pid:
        pass


class SlowNames:
    """Lets a worker do something while the memory that torch makes has a name."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def __call__(self, worker: int) -> None:
        make_memory = torch.UntypedStorage._new_using_fd_cpu  # type: ignore[attr-defined]

        def slowly(size: int) -> Any:
            name = Path(f"/dev/shm/torch_{os.getpid()}_0_0")
            name.touch()
            self._act()
            name.unlink()
            return make_memory(size)

        torch.UntypedStorage._new_using_fd_cpu = slowly  # type: ignore[attr-defined]


def work(loader: FastLoader[Any]) -> None:
    iterator = iter(loader)
    next(iterator), next(iterator)
    threading.Event().wait()


def work_in_a_thread(loader: FastLoader[Any]) -> None:
    threading.Thread(target=work, args=(loader,)).start()
    threading.Event().wait()


def ended_with_parent(parent: int, meet: Meet) -> int:
    """Kill a process, wait for its worker's end, and return the worker's number."""
    pid = meet.pid()
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_until_ended([pid])
    return pid


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("method", "run", "act"),
    [
        ("fork", work, stuck_in_c), ("fork", work_in_a_thread, until_parent_has_ended),
        ("forkserver", work, until_parent_has_ended),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("fork", work_in_a_thread, stuck_in_c), ("fork", work, until_parent_has_ended),
            ("fork", work, stuck_in_python), ("fork", work, stopped),
            ("forkserver", work, stuck_in_c), ("spawn", work, stuck_in_c),
        )),
    ],
)  # fmt: skip
def test_workers_end_with_a_parent_that_is_killed_and_leave_no_names(
    tree: Path, tmp_path: Path, forked: Any, method: str, run: Callable[[Any], None], act: Callable[[], None]
) -> None:
    meet = Meet(tmp_path, act)

    def train() -> None:
        # A fork server of the test process is not this process's child, and its tracker removes the
        # names of semaphores when the test process ends; one of its own does so at this one's end.
        multiprocessing.forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]
        tracker: Any = multiprocessing.resource_tracker._resource_tracker
        tracker._fd = tracker._pid = None
        options = {"num_workers": 1, "multiprocessing_context": method}
        if act is until_parent_has_ended:
            once = Once(tmp_path, act, "none")
            run(FastLoader(OfTwoTypes(once), 2, worker_init_fn=SlowNames(meet), **options))
        else:
            run(make(Once(tmp_path, meet), images(tree), **options))

    def train_or_give_up() -> None:
        try:
            train()
        finally:
            meet.give_up()

    parent = forked(train_or_give_up)
    pid = ended_with_parent(parent, meet)
    assert not list(Path("/dev/shm").glob(f"torch_{pid}_*"))


class Target:
    """A target that torch collates with a function of the script's."""


def test_a_worker_that_is_stuck_while_it_collates_ends_with_its_parent(tmp_path: Path, forked: Any) -> None:
    meet = Meet(tmp_path, stuck_in_c)

    def train() -> None:
        default_collate_fn_map[Target] = lambda batch, collate_fn_map=None: meet()
        try:
            list(FastLoader([(torch.zeros(9999), Target())] * 4, 2, num_workers=1))
        finally:
            meet.give_up()

    parent = forked(train)
    ended_with_parent(parent, meet)
