"""Worker processes that are killed, crash, hang or fail: an error that says which, where and why, no
hang, nothing left.  And batches that come from them stay what they are."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, default_collate
from torchvision import transforms as v1

import fastpipe
from fastpipe import FastImageFolder, FastLoader
from fastpipe.bench.synthetic import photo_tree
from fastpipe.core.native import native
from fastpipe.errors import BadSampleError, WorkerError
from fastpipe.torch import workers as workers_module

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"),
    reason="run it on Linux, where a process can be watched without being its parent",
)

PATIENCE_S = 60
AT = 7  # the sample at which something happens: in the fourth batch of two
SIZE = (47, 31)  # of its image
CROP = v1.Compose([v1.RandomResizedCrop(16), v1.ToTensor()])


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = photo_tree(tmp_path_factory.mktemp("tree"), classes=2, per_class=8, sizes=(20, 24))
    Image.new("RGB", SIZE, (9, 8, 7)).save(root / f"class_000/{AT:04d}.jpg")
    return root


# ---- what happens in a worker: objects that travel to any kind of process -------------------------


class Once:
    """Does something where it is called first, in whatever process."""

    def __init__(self, folder: Path, act: Callable[[], None]) -> None:
        self._flag, self._act = str(folder / "flag"), act
        Path(self._flag).touch()

    def __call__(self) -> None:
        try:
            os.unlink(self._flag)
        except FileNotFoundError:
            return
        self._act()


class Meet:
    """Tells the test which process is here, and does the rest."""

    def __init__(self, folder: Path, rest: Callable[[], None]) -> None:
        self._fifo, self._rest = str(folder / "fifo"), rest
        os.mkfifo(self._fifo)

    def __call__(self) -> None:
        Path(self._fifo).write_text(f"{os.getpid()}\n")
        self._rest()

    def pid(self) -> int:
        """In the test: wait until somebody is there."""
        pid = int(Path(self._fifo).read_text())
        assert pid, "the process that should have come failed before"
        return pid

    def nobody_comes(self) -> None:
        """Let the test not wait for ever."""
        Path(self._fifo).write_text("0\n")


class Numbers:
    """A dataset of the user's own; something happens at one of its samples."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == AT:
            self._act()
        return torch.full((4,), index)


class AtSize:
    """A transform of the user's; something happens at the image of one size."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def __call__(self, image: Any) -> torch.Tensor:
        if image.size == SIZE:
            self._act()
        return torch.full((4,), image.size[0])


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


def leave_with_3() -> None:
    sys.exit(3)


def leave_at_once_with_3() -> None:
    os._exit(3)


def leave_with_0() -> None:
    sys.exit(0)


KINDS = ["own dataset", "image folder"]


def make(kind: str, tree: Path, act: Callable[[], None], workers: int = 2, **options: Any) -> FastLoader[Any]:
    if kind == "own dataset":
        return FastLoader(Numbers(act), 2, num_workers=workers, workers="processes", **options)
    dataset = FastImageFolder(tree, AtSize(act), thread_safe=True, threads=2)
    return FastLoader(dataset, 2, num_workers=workers, workers="processes", **options)


def sample_of(kind: str, tree: Path) -> str:
    return f"{AT}." if kind == "own dataset" else str(tree / f"class_000/{AT:04d}.jpg")


def error_of(loader: FastLoader[Any]) -> tuple[WorkerError, list[int]]:
    """The error that an epoch ends with, and the workers' pids."""
    iterator = iter(loader)
    pids = [worker.pid for worker in iterator._workers]  # type: ignore[attr-defined]
    try:
        for _ in iterator:
            pass
    except WorkerError as error:
        # Its traceback has this frame, and in it the loader, whose workers would live until the garbage
        # collector comes.
        return error.with_traceback(None), pids
    raise AssertionError("no error")


def check(error: WorkerError, number: int, pid: int, sample: str, *texts: str) -> None:
    assert isinstance(error, RuntimeError)
    assert (error.worker, error.pid) == (number, pid)
    check_text(str(error), number, pid, sample, *texts)


def check_text(text: str, number: int, pid: int, sample: str, *texts: str) -> None:
    about = text[text.index(f"Worker {number} (pid {pid}) ") :]
    assert sample in about[about.index("Its last sample: ") :]
    for expected in texts:
        assert expected in about


def check_it_works(kind: str, loader: FastLoader[Any]) -> None:
    batches = list(loader)
    assert len(batches) == 8
    if kind == "own dataset":
        assert [int(value) for batch in batches for value in batch[:, 0]] == list(range(16))
    else:
        assert batches[3][0][1].tolist() == [SIZE[0]] * 4


def wait_until_gone(watched: list[int]) -> None:
    for descriptor in watched:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(1000 * PATIENCE_S), "a worker lives on"
        os.close(descriptor)


# ---- killed --------------------------------------------------------------------------------------


def make_in(
    method: str, kind: str, tree: Path, act: Callable[[], None], workers: int, persistent: bool
) -> FastLoader[Any]:
    return make(kind, tree, act, workers, multiprocessing_context=method, persistent_workers=persistent)


def error_of_the_killed(pid: int) -> WorkerError:
    """The error that comes while the script does something else than wait for a batch."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its signal has been sent by now
        threading.Event().wait(PATIENCE_S)
    except WorkerError as error:  # which this frame, in its traceback, does not keep: workers end with it
        return error
    raise AssertionError("no error")


PLACES = [
    ("fork", 1, False), ("fork", 2, False), ("fork", 2, True),
    pytest.param("spawn", 2, True, marks=pytest.mark.slow),
    pytest.param("forkserver", 1, False, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize(("method", "workers", "persistent"), PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_while_the_script_waits_for_a_batch(
    tree: Path, tmp_path: Path, kind: str, method: str, workers: int, persistent: bool
) -> None:
    meet = Meet(tmp_path, stuck_in_python)
    loader = make_in(method, kind, tree, Once(tmp_path, meet), workers, persistent)
    killed: list[int] = []

    def kill() -> None:
        killed.append(meet.pid())
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    error, _ = error_of(loader)
    thread.join()
    check(error, workers - 1, killed[0], sample_of(kind, tree), "SIGKILL", "num_workers=0")
    check_it_works(kind, loader)


def wait_for_ever(number: int) -> None:
    """As a worker's initialisation: files are read, and then decoding never ends."""
    native.simulate_decoding(3600 * 10**9)


def test_killed_while_the_native_core_decodes(tree: Path) -> None:
    dataset = FastImageFolder(tree, CROP, threads=2)
    loader = FastLoader(dataset, 2, num_workers=1, workers="processes", worker_init_fn=wait_for_ever)
    iterator = iter(loader)
    lane, worker = iterator._lanes[0], iterator._workers[0]  # type: ignore[attr-defined]

    def kill() -> None:
        while len(lane.notes()) < 2:
            threading.Event().wait(0.001)
        os.kill(worker.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(WorkerError) as caught:
        next(iterator)
    thread.join()
    noted = re.search("Its last sample: (.*)[.]", str(caught.value))
    assert noted is not None
    assert sorted(noted[1].split(", ")) == [str(tree / f"class_000/{number:04d}.jpg") for number in (0, 1)]


# A fork server's children are not the script's: it hears of their end in the next call only.
@pytest.mark.parametrize(("method", "workers", "persistent"), PLACES[:-1])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_while_the_script_does_something_else(
    tree: Path, tmp_path: Path, kind: str, method: str, workers: int, persistent: bool
) -> None:
    meet = Meet(tmp_path, stuck_in_python)
    loader = make_in(method, kind, tree, Once(tmp_path, meet), workers, persistent)
    iterator = iter(loader)
    next(iterator), next(iterator)
    pid = meet.pid()
    error = error_of_the_killed(pid)
    check(error, workers - 1, pid, sample_of(kind, tree), "SIGKILL")
    del iterator, error
    check_it_works(kind, loader)


def test_the_worker_that_was_killed_is_named_and_not_another_loaders(tree: Path, tmp_path: Path) -> None:
    errors = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        meet = Meet(folder, stuck_in_python)
        loader = make("own dataset", tree, Once(folder, meet))
        other = iter(make("image folder", tree, leave_with_0, persistent_workers=True))
        iterator = iter(loader)
        next(iterator), next(iterator)
        pid = meet.pid()
        error = error_of_the_killed(pid)
        check(error, 1, pid, f"{AT}.")
        errors.append(error)  # and with it the iterator that failed
        assert str(error).count("\nWorker ") == 1
        del other, iterator


@pytest.mark.parametrize("kind", KINDS)
def test_after_an_error_the_next_call_does_not_hang(tree: Path, tmp_path: Path, kind: str) -> None:
    iterator = iter(make(kind, tree, leave_at_once_with_3))
    with pytest.raises(WorkerError):
        for _ in iterator:
            pass
    with pytest.raises(WorkerError, match="exit code 3"):
        for _ in iterator:
            pass


def test_a_transform_that_runs_after_all_files_have_been_read_names_its_sample(
    tree: Path, tmp_path: Path
) -> None:
    dataset = FastImageFolder(tree, AtSize(Once(tmp_path, leave_at_once_with_3)), threads=1)
    error, pids = error_of(
        FastLoader(dataset, 8, sampler=[AT, *range(AT)], num_workers=1, workers="processes")
    )
    check(error, 0, pids[0], sample_of("image folder", tree), "exit code 3")


# ---- crashed, ended ------------------------------------------------------------------------------


CRASHES = [(segmentation_fault, "SIGSEGV"), (abort, "SIGABRT")]


@pytest.mark.parametrize(("crash", "name"), CRASHES, ids=[name for _, name in CRASHES])
@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_comes_with_its_python_stack(
    tree: Path, tmp_path: Path, kind: str, crash: Callable[[], None], name: str
) -> None:
    loader = make(kind, tree, Once(tmp_path, crash))
    error, pids = error_of(loader)
    check(
        error, 1, pids[1], sample_of(kind, tree), f"died of {name}", f"in {crash.__name__}\n", "in __call__\n"
    )
    assert "Extension modules" not in str(error)
    check_it_works(kind, loader)


ENDS = [(leave_with_3, 3), (leave_at_once_with_3, 3), (leave_with_0, 0)]


@pytest.mark.parametrize(("leave", "code"), ENDS, ids=[leave.__name__ for leave, _ in ENDS])
def test_a_worker_that_leaves_is_named_with_its_exit_code(
    tree: Path, tmp_path: Path, leave: Callable[[], None], code: int
) -> None:
    loader = make("own dataset", tree, Once(tmp_path, leave), timeout=2)
    error, pids = error_of(loader)
    check(error, 1, pids[1], f"{AT}.", f"exit code {code}")
    check_it_works("own dataset", loader)


# ---- stuck ---------------------------------------------------------------------------------------


STUCK = {
    stuck_in_python: "it is waiting", stuck_in_c: "it is waiting", stopped: "it has been stopped (SIGSTOP)",
}  # fmt: skip
# Each waits for a timeout: every state once, and either kind, for every day.
_DAILY = {("own dataset", stuck_in_python), ("image folder", stuck_in_c), ("own dataset", stopped)}
_STUCK = [
    pytest.param(kind, act, id=f"{kind}-{act.__name__}", marks=() if (kind, act) in _DAILY else pytest.mark.slow)
    for kind in KINDS for act in STUCK
]  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "act"), _STUCK)
def test_a_stuck_worker_is_named_with_its_stack_and_ends(
    tree: Path, tmp_path: Path, kind: str, act: Callable[[], None]
) -> None:
    loader = make(kind, tree, Once(tmp_path, act), timeout=2)
    iterator = iter(loader)
    pids = [worker.pid for worker in iterator._workers]  # type: ignore[attr-defined]
    watched = [os.pidfd_open(pid) for pid in pids]
    with pytest.raises(WorkerError) as caught:
        for _ in iterator:
            pass
    # Another may be named before it, which waits for the lock of their queue that this one has.
    check_text(str(caught.value), 1, pids[1], sample_of(kind, tree), STUCK[act], f"in {act.__name__}\n")
    del iterator, caught
    gc.collect()
    wait_until_gone(watched)
    check_it_works(kind, loader)


def test_persistent_workers_that_are_stuck_between_epochs_are_named(tree: Path, tmp_path: Path) -> None:
    meet = Meet(tmp_path, stuck_in_c)
    loader = make("own dataset", tree, Once(tmp_path, meet), timeout=2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator), next(iterator)
    pid = meet.pid()
    del iterator
    with pytest.raises(WorkerError) as caught:
        iter(loader)  # asks its workers to begin again
    text = str(caught.value)
    about = text[text.index(f"Worker 1 (pid {pid}) does not answer") :]
    assert "in stuck_in_c\n" in about
    del caught
    check_it_works("own dataset", loader)


def test_a_forked_copy_of_the_iterator_ends_no_workers(tree: Path, in_child: Any) -> None:
    loader = FastLoader(FastImageFolder(tree, CROP), 2, num_workers=2, workers="processes")
    iterators = [iter(loader)]
    next(iterators[0])

    def drop() -> None:
        iterators.clear()
        gc.collect()

    in_child(drop)
    assert len(list(iterators[0])) == 7


class _LeavesNames:
    """What torch leaves in a worker that is killed while it makes shared memory."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        Path(f"/dev/shm/torch_{os.getpid()}_{index}_0").touch()
        return torch.tensor(index)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="run it on Linux, where shared memory has files")
def test_what_killed_workers_leave_in_shared_memory_is_removed() -> None:
    iterator = iter(FastLoader(_LeavesNames(), 2, num_workers=1, workers="processes"))
    next(iterator)
    pid = iterator._workers[0].pid
    assert list(Path("/dev/shm").glob(f"torch_{pid}_*"))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError):
        list(iterator)
    del iterator
    gc.collect()
    assert not list(Path("/dev/shm").glob(f"torch_{pid}_*"))


_SCRIPT = """
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

for what in (uncaught, kept):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(write, 2)  # its workers have it as well
        os.close(write)
        what()
        sys.exit(0)
    os.close(write)
    said = open(read).read()  # to the end: all of them are gone
    print(what.__name__, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "stopped (SIGSTOP)" in said,
          said.count("Traceback"), "Exception ignored" in said)
"""


@pytest.mark.slow
def test_the_interpreter_ends_beside_a_stopped_worker(tmp_path: Path) -> None:
    root = Path(fastpipe.__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=150,
        env={**os.environ, "PYTHONPATH": str(root)}, check=False,
    )  # fmt: skip
    assert ran.stdout.splitlines() == ["uncaught 1 True 1 False", "kept 0 False 0 False"], ran.stderr


def _work(loader: FastLoader[Any]) -> None:
    iterator = iter(loader)
    next(iterator), next(iterator)
    threading.Event().wait()


def _work_in_a_thread(loader: FastLoader[Any]) -> None:
    threading.Thread(target=_work, args=(loader,)).start()
    threading.Event().wait()


PARENTS = [
    (_work, "fork", stuck_in_python), (_work, "fork", stuck_in_c), (_work, "fork", stopped),
    (_work_in_a_thread, "fork", stuck_in_c),
    (_work, "forkserver", stuck_in_c), pytest.param(_work, "spawn", stuck_in_c, marks=pytest.mark.slow),
]  # fmt: skip


def outlived(meet: Meet, train: Callable[[], None]) -> int:
    """The pid of a worker that came, whose parent was then killed, and which has ended by now."""
    parent = os.fork()
    if parent == 0:
        try:
            # A fork server of the test process is not this process's child, and its tracker removes the
            # names of semaphores when the test process ends; one of its own does so at this one's end.
            multiprocessing.forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]
            tracker: Any = multiprocessing.resource_tracker._resource_tracker
            tracker._fd = tracker._pid = None
            train()
        finally:
            traceback.print_exc()
            meet.nobody_comes()
            os._exit(1)
    pid = meet.pid()
    worker = os.pidfd_open(pid)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_until_gone([worker])
    return pid


@pytest.mark.few(2)
@pytest.mark.parametrize(("work", "method", "act"), PARENTS)
def test_stuck_workers_end_with_a_parent_that_is_killed(
    tree: Path, tmp_path: Path, work: Callable[[Any], None], method: str, act: Callable[[], None]
) -> None:
    meet = Meet(tmp_path, act)
    # A process is stopped by the thread that fetches: another might do so while that one collates, which is put
    # in no danger of being ended (`outliving_parent`).
    kind = "own dataset" if act is stopped else "image folder"
    outlived(meet, lambda: work(make(kind, tree, meet, 1, multiprocessing_context=method)))


def nothing() -> None:
    pass


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


@pytest.mark.parametrize(
    ("work", "method"),
    [(_work, "fork"), (_work_in_a_thread, "fork"), (_work, "forkserver")],
)
def test_workers_leave_no_names_where_their_parent_is_killed(
    tmp_path: Path, work: Callable[[Any], None], method: str
) -> None:
    meet = Meet(tmp_path, until_parent_has_ended)

    def train() -> None:
        work(
            FastLoader(
                Numbers(nothing),
                2,
                num_workers=1,
                workers="processes",
                worker_init_fn=SlowNames(meet),
                multiprocessing_context=method,
            )
        )

    pid = outlived(meet, train)
    assert not list(Path("/dev/shm").glob(f"torch_{pid}_*"))


# ---- errors of the user's code -------------------------------------------------------------------


class Files:
    """A dataset of files, as torchvision's are, one of which cannot be read."""

    def __init__(self, error: type[Exception]) -> None:
        self.samples = [(f"/data/{index}.bin", 0) for index in range(16)]
        self._error = error

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        if index == AT:
            self._read(index)
        return index

    def _read(self, index: int) -> None:
        raise self._error("the disk's own words")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [OSError, ValueError, KeyError])
def test_an_error_of_the_dataset_keeps_its_type_and_says_where(kind: type[Exception], workers: int) -> None:
    iterator = iter(FastLoader(Files(kind), 2, num_workers=workers, workers="processes"))
    batches, text = 0, ""
    while True:
        try:
            next(iterator)
            batches += 1
        except StopIteration:
            break
        except kind as error:
            notes = getattr(error, "__notes__", [])
            text = "\n".join([str(error), *notes])
            assert not isinstance(error, WorkerError)
    assert batches == 7  # the others come
    assert "the disk's own words" in text
    if workers:
        assert "in _read" in text
    if hasattr(Exception, "add_note"):
        assert f"while loading sample {AT} from '/data/{AT}.bin'" in text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_is_no_image_is_named(tmp_path: Path, workers: int) -> None:
    root = photo_tree(tmp_path / "tree", classes=2, per_class=4, sizes=(20, 24))
    path = root / "class_001/0001.jpg"
    path.write_bytes(b"no picture")
    loader = FastLoader(FastImageFolder(root, CROP), 2, num_workers=workers, workers="processes")
    text = ""
    try:
        list(loader)
    except BadSampleError as error:
        text = str(error)
    assert str(path) in text
    assert "sample 5" in text


# ---- batches stay what they are ------------------------------------------------------------------


def seeded(tree: Path, workers: int, **options: Any) -> FastLoader[Any]:
    return FastLoader(
        FastImageFolder(tree, CROP, threads=2), 2, seed=3, num_workers=workers, workers="processes", **options
    )


def same(batches: Any, expected: Any) -> bool:
    pairs = zip(batches, expected, strict=True)
    return all(torch.equal(x[0], y[0]) and torch.equal(x[1], y[1]) for x, y in pairs)


@pytest.fixture(scope="module")
def epochs(tree: Path) -> list[list[Any]]:
    """What three epochs are, made without workers."""
    loader = seeded(tree, 0)
    return [[[part.clone() for part in batch] for batch in loader] for _ in range(3)]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_all_batches_are_kept(tree: Path, epochs: Any, workers: int, persistent: bool) -> None:
    loader = seeded(tree, workers, persistent_workers=persistent, prefetch_factor=1)
    kept = [list(loader) for _ in range(3)]
    assert all(map(same, kept, epochs))
    del loader
    gc.collect()
    assert all(map(same, kept, epochs))
    for batch in kept[0]:  # the script's own: it may write to them
        batch[0].fill_(1)
    assert same(kept[1], epochs[1])


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_all_batches_are_kept_from_other_kinds_of_processes(tree: Path, epochs: Any, method: str) -> None:
    loader = seeded(tree, 1, multiprocessing_context=method, persistent_workers=True)
    kept = [list(loader) for _ in range(3)]
    assert is_unnamed(kept[0][0][0])
    del loader
    assert all(map(same, kept, epochs))


@pytest.mark.parametrize("every", [2, 3, 5])
def test_some_batches_are_kept_while_the_loader_goes_on(tree: Path, epochs: Any, every: int) -> None:
    loader = seeded(tree, 2, persistent_workers=True)
    kept = []
    for expected in epochs:
        for number, (batch, right) in enumerate(zip(loader, expected, strict=True)):
            assert same([batch], [right])
            if number % every == 0:
                kept.append((batch[0][1], right[0][1]))  # a view is enough
    assert all(torch.equal(x, y) for x, y in kept)


def is_unnamed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in a lane's memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return "/memfd:fastpipe" in line
    return False


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_come_in_unnamed_memory_that_is_used_again(tree: Path, workers: int) -> None:
    loader = seeded(tree, workers, persistent_workers=True)
    seen = set()
    for _ in range(4):
        for batch in loader:
            assert is_unnamed(batch[0])
            seen.add(batch[0].data_ptr())
            del batch
    assert len(seen) <= workers * 4  # of 8 × 4 batches


def test_a_forked_child_keeps_its_batch_while_the_parent_goes_on(
    tree: Path, epochs: Any, forked: Any
) -> None:
    loader = seeded(tree, 1, persistent_workers=True)
    iterator = iter(loader)
    held = [next(iterator)]
    ours, theirs = os.pipe()

    def check_it() -> None:
        os.close(theirs)
        os.read(ours, 1)  # until the parent has gone on
        assert same(held, epochs[0][:1])

    child = forked(check_it)
    os.close(ours)
    held.clear()
    assert same(iterator, epochs[0][1:])
    assert same(loader, epochs[1])
    os.close(theirs)
    assert os.waitpid(child, 0)[1] == 0


def test_batches_are_dropped_in_any_thread(tree: Path, epochs: Any) -> None:
    loader = seeded(tree, 2)
    for batch, right in zip(loader, epochs[0], strict=True):
        held = [batch]
        del batch
        thread = threading.Thread(target=lambda: held.pop()[0].sum())
        assert same(held, [right])
        thread.start()
        thread.join()


# ---- what a collate function may return ----------------------------------------------------------


def as_dict(samples: Any) -> Any:
    images, targets = default_collate(samples)
    return {"images": images, "targets": targets, "name": "a batch"}


def as_views(samples: Any) -> Any:
    images, targets = default_collate(samples)
    return images[:, :1], images.flatten(1)[:, ::3], images.permute(0, 2, 3, 1), targets[:1]


def one_twice(samples: Any) -> Any:
    images, _ = default_collate(samples)
    return images, images, images.view(-1)


def as_samples(samples: Any) -> Any:
    return samples


def as_arrays(samples: Any) -> Any:
    images, targets = default_collate(samples)
    return images.numpy().copy(), targets.numpy(), np.float32(2)


def as_other_types(samples: Any) -> Any:
    images, targets = default_collate(samples)
    complex_images = torch.view_as_complex(images.reshape(-1, 2))
    return (
        images.to_sparse(), images > 0.5, images.half(), complex_images, torch.empty(0, 3),
        targets.double(), images.clone().requires_grad_(), torch.tensor(3.0).expand(4, 4),
    )  # fmt: skip


_last: list[Any] = []


def with_the_one_before(samples: Any) -> Any:
    """As some kinds of mixing do: a batch is sent once more, with the next one."""
    images, _ = default_collate(samples)
    before = _last[-1] if _last else images
    _last[:] = [images]
    return images, before


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from leaves(list(value.items()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, torch.Tensor):
        yield value.detach().to_dense().resolve_conj().numpy().tobytes()
        yield value.dtype, tuple(value.shape), value.requires_grad, value.layout
    elif isinstance(value, np.ndarray):
        yield value.tobytes(), value.dtype, value.shape
    else:
        yield value


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize(
    "collate", [as_dict, as_views, one_twice, as_samples, as_arrays, as_other_types, with_the_one_before]
)
def test_a_collate_function_may_return_anything(tree: Path, collate: Callable[[Any], Any]) -> None:
    _last.clear()
    expected = [list(leaves(batch)) for batch in seeded(tree, 0, collate_fn=collate)]
    _last.clear()
    loader = seeded(tree, 1, collate_fn=collate, persistent_workers=True)
    assert [list(leaves(batch)) for batch in loader] == expected
    loader = seeded(tree, 1, collate_fn=collate)
    kept = list(loader)
    assert [list(leaves(batch)) for batch in kept] == expected


def test_what_is_one_memory_in_the_worker_is_one_memory_here(tree: Path) -> None:
    for first, second, flat in seeded(tree, 1, collate_fn=one_twice):
        first[0, 0, 0, 0] = 5
        assert (float(second[0, 0, 0, 0]), float(flat[0])) == (5, 5)


def test_a_batch_that_is_sent_again_with_the_next_is_not_overwritten(tree: Path) -> None:
    loader = seeded(tree, 1, collate_fn=with_the_one_before, prefetch_factor=4)
    last = None
    for _ in range(3):
        for number, (images, before) in enumerate(loader):
            if number:
                assert torch.equal(before, last)
            last = images.clone()
            del images, before


# ---- several loaders, many workers ---------------------------------------------------------------


def test_two_loaders_at_once(tree: Path, epochs: Any) -> None:
    loaders = seeded(tree, 2), seeded(tree, 1, persistent_workers=True)
    for epoch in range(2):
        pairs = list(zip(*loaders, strict=True))
        assert same([pair[0] for pair in pairs], epochs[epoch])
        assert same([pair[1] for pair in pairs], epochs[epoch])


def test_many_workers_leave_no_descriptors(tree: Path) -> None:
    loader = seeded(tree, 8)
    counts = []
    for _ in range(3):
        assert len(list(loader)) == 8
        gc.collect()
        for thread in threading.enumerate():
            if (
                thread.name == "QueueFeederThread"
            ):  # torch does not wait for those of its queues, which they close
                thread.join(PATIENCE_S)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1:] == counts[:1] * 2


@pytest.mark.parametrize("prefetch_factor", [2, 700])
def test_lanes_take_a_part_of_the_descriptors_only(tree: Path, epochs: Any, prefetch_factor: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 200, before[1]))
    try:
        for workers in (1, 8):
            loader = seeded(tree, workers, prefetch_factor=prefetch_factor)
            assert same(list(loader), epochs[0])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_started_process_gets_the_lane_of_one_worker(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = workers_module.lanes_for(50, 4)
    init = workers_module.WorkerInit(None, lanes)
    states = [init.__getstate__() for _ in lanes]  # in turn, as torch starts its workers
    for number, state in enumerate(states):
        assert [lane for lane in state["lanes"] if lane is not None] == [lanes[number]]
        assert state["lanes"][number] is lanes[number]


def test_an_ordinary_loader_beside_ours(tree: Path, epochs: Any) -> None:
    stock = DataLoader(Numbers(os.getpid), 2, num_workers=1)
    pairs = list(zip(seeded(tree, 1), stock, strict=True))
    assert same([pair[0] for pair in pairs], epochs[0])
    assert [int(pair[1][0, 0]) for pair in pairs] == list(range(0, 16, 2))


def test_nothing_of_these_tests_is_left() -> None:
    assert multiprocessing.active_children() == []
    assert not [name for name in os.listdir("/dev/shm") if re.match(rf"torch_{os.getpid()}_", name)]
