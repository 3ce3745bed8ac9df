"""A process that ends in the middle of an epoch, however it ends, leaves nothing and prints nothing.

Importing torch takes seconds, so one process imports it once and forks each scenario, which
then ends like any other interpreter.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from generated import environment

from fastpipe.bench.synthetic import photo_tree as make_photos

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"),
    reason="run it on Linux, where a process can be watched without being its parent",
)

PATIENCE_MS = 60_000
_SERVES = re.compile(r"multiprocessing/resource_sharer.py.*, in _serve")

_SERVER = """
import json, os, sys, tempfile
import fastpipe.torch
job = None
for line in sys.stdin:
    asked = json.loads(line)
    if "wait" in asked:
        print(os.waitpid(asked["wait"], 0)[1], flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        os.setsid()
        tempfile.tempdir = asked["temporary"]
        for name, number, mode in (("/dev/null", 0, os.O_RDONLY), (asked["out"], 1, os.O_WRONLY), (asked["err"], 2, os.O_WRONLY)):
            opened = os.open(name, mode)
            os.dup2(opened, number)
            os.close(opened)
        job = asked
        break
    print(pid, flush=True)
if job is not None:
    exec(compile(job["code"], "scenario", "exec"), {"__name__": "__main__"})
"""

_PREPARE = """
import multiprocessing, os, signal, sys, threading
import torch
from torch.utils.data import DataLoader
from torchvision import transforms
from fastpipe import FastImageFolder, FastLoader

def noise(image):
    return image

def ready():
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    os.close(1)
    os.open("/dev/null", os.O_WRONLY)

def apart(worker):
    "What processes write at the same time is mixed: each worker has a file of its own."
    opened = os.open(f"{{os.readlink('/proc/self/fd/2')}}.{{worker}}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, 2)
    os.close(opened)

def loader(kind, workers, serial=False, **options):
    if workers:
        options["worker_init_fn"] = apart
    parts = [transforms.RandomResizedCrop(24), transforms.ToTensor()]
    dataset = FastImageFolder({root!r}, transforms.Compose(parts + [noise] * serial), threads=2)
    return kind(dataset, 2, sampler=list(range(len(dataset))) * 100_000, num_workers=workers, **options)
"""


class Scenario:
    """A forked program in a session of its own: its pid, those of its children, and what it left."""

    def __init__(self, server: Any, folder: Path, code: str) -> None:
        # Short, as the path of a socket must be: torch's workers make one there.
        self.temporary = Path(tempfile.mkdtemp(prefix="t"))
        self.err, out = folder / "err", folder / "out"
        self.err.touch()
        os.mkfifo(out)
        self._server = server
        asked = {"code": code, "out": str(out), "err": str(self.err), "temporary": str(self.temporary)}
        self.pid = int(self._ask(asked))
        with out.open() as answers:
            self.children = [int(pid) for pid in answers.readline().split()]
        self._watched = [os.pidfd_open(pid) for pid in self.children]

    def _ask(self, question: dict[str, Any]) -> str:
        self._server.stdin.write(json.dumps(question) + "\n")
        self._server.stdin.flush()
        return self._server.stdout.readline()

    def end(self) -> int:
        """Wait for the end of the program and of its children; its exit code."""
        code = os.waitstatus_to_exitcode(int(self._ask({"wait": self.pid})))
        for number, watched in zip(self.children, self._watched, strict=True):
            poll = select.poll()
            poll.register(watched, select.POLLIN)
            assert poll.poll(PATIENCE_MS), f"child {number} lives on"
            os.close(watched)
        return code

    def left(self) -> list[str]:
        """Temporary files and shared memory that it left."""
        mine = tuple(f"torch_{pid}_" for pid in (self.pid, *self.children))
        shared = [name for name in os.listdir("/dev/shm") if name.startswith(mine)]
        # multiprocessing ends daemonic workers without letting them remove their folders.
        files = [path.name for path in self.temporary.iterdir() if not path.name.startswith("pymp-")]
        shutil.rmtree(self.temporary)
        return [*files, *shared]

    def said(self) -> str:
        """What it and its workers wrote to stderr, without what torch's way to hand over descriptors says
        when the process that asks for one is gone."""
        files = sorted(self.err.parent.glob(f"{self.err.name}*"))
        parts = [part for file in files for part in re.split(r"(?m)^(?=Traceback )", file.read_text())]
        return "".join(part for part in parts if not _SERVES.search(part))

    def lost_interrupt(self) -> bool:
        """Whether Ctrl-C came while a finalizer ran, whose errors Python only shows: who wants to end the
        program then presses it again."""
        return bool(re.search(r"(?s)Exception ignored in: .*?\nKeyboardInterrupt", self.err.read_text()))

    def interrupted(self, everybody: bool) -> bool:
        """Whether Ctrl-C came through; a program that has lost it is killed.

        Args:
            everybody: send it to the workers as well, as a terminal does.
        """
        watched = os.pidfd_open(self.pid)
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        (os.killpg if everybody else os.kill)(self.pid, signal.SIGINT)
        while not poll.poll(100) and not self.lost_interrupt():
            pass
        os.close(watched)
        if self.lost_interrupt():
            os.kill(self.pid, signal.SIGKILL)
            return False
        return True


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    command = [sys.executable, "-c", _SERVER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_photos(tmp_path_factory.mktemp("tree"), classes=2, per_class=4, sizes=(40, 44))


@pytest.fixture
def start(server: Any, tree: Path, tmp_path: Path) -> Callable[[str], Scenario]:
    """Starts a scenario: the code after the one above."""

    def start(code: str) -> Scenario:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return Scenario(server, folder, _PREPARE.format(root=str(tree)) + textwrap.dedent(code))

    return start


def interrupted(start: Callable[[str], Scenario], code: str, everybody: bool) -> tuple[Scenario, int]:
    """A scenario that was ended by Ctrl-C, and its exit code."""
    for _ in range(3):
        scenario = start(code)
        came, end = scenario.interrupted(everybody), scenario.end()
        if came:
            break
        scenario.left()
    return scenario, end


LOADERS = {
    "threads": "FastLoader, 0",
    "threads, far ahead": "FastLoader, 0, prefetch_batches=50",
    "threads and a serial transform": "FastLoader, 0, serial=True",
    "a seed": "FastLoader, 0, seed=1",
    "workers": "FastLoader, 2",
    "persistent workers": "FastLoader, 2, persistent_workers=True",
    "stock loader": "DataLoader, 0",
    "stock loader with workers": "DataLoader, 2",
}

_FOREVER = """
    batches = iter(loader({}))
    next(batches)
    ready()
    for batch in batches:
        pass
"""


# Orphaned workers of torch look for their parent every five seconds: few of these for every day.
@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_process_that_is_killed_leaves_nothing(start: Any, loader: str, number: int) -> None:
    scenario = start(_FOREVER.format(LOADERS[loader]))
    os.kill(scenario.pid, number)
    assert scenario.end() == -number, scenario.err.read_text()
    assert (scenario.said(), scenario.left()) == ("", [])


@pytest.mark.few(1)
@pytest.mark.parametrize("loader", LOADERS)
def test_ctrl_c_prints_one_traceback(start: Any, loader: str) -> None:
    scenario, code = interrupted(start, _FOREVER.format(LOADERS[loader]), everybody=True)
    assert code == -signal.SIGINT, scenario.err.read_text()
    said = scenario.said()
    assert said.startswith("Traceback (most recent call last):") and said.endswith("\nKeyboardInterrupt\n")
    assert said.count("Traceback") == 1 and "Exception ignored" not in said
    assert scenario.left() == []


@pytest.mark.few(1)
@pytest.mark.parametrize("loader", ["FastLoader, 0", "FastLoader, 0, serial=True", "FastLoader, 1"])
def test_a_loader_works_after_the_script_has_caught_ctrl_c(start: Any, loader: str) -> None:
    code = f"""
        work = loader({loader})
        batches = iter(work)
        next(batches)
        try:
            ready()
            for batch in batches:
                pass
        except KeyboardInterrupt:
            pass
        del batches
        for number, batch in enumerate(work):
            assert batch[0].shape == (2, 3, 24, 24)
            if number == 5:
                break
    """
    scenario, end = interrupted(start, code, everybody=False)
    assert (end, scenario.said(), scenario.left()) == (0, "", [])


ENDS = {
    "the script ends": "",
    "the script ends with a batch": "batch = next(batches)",
    "sys.exit": "sys.exit(0)",
    "everything in a cycle": "cycle = [batches]; cycle.append(cycle); del batches, cycle",
    "a thread iterates on": "threading.Thread(target=lambda: list(batches), daemon=True).start()",
    "another iterator": "more = iter(batches._loader) if hasattr(batches, '_loader') else iter(loader(FastLoader, 0)); next(more)",
    "a fork in between": "child = os.fork()\nif child == 0:\n    os._exit(0)\nassert os.waitpid(child, 0)[1] == 0\nnext(batches)",
    "a module keeps it": "sys.modules['kept'] = batches",
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "loader", ["FastLoader, 0", "FastLoader, 1, persistent_workers=True", "DataLoader, 0"]
)
@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_the_interpreter_leaves_nothing(start: Any, loader: str, end: str) -> None:
    if end == "a thread iterates on" and loader != "FastLoader, 0":
        pytest.skip(
            "where a daemon thread is inside torch's own iterator, the end of the interpreter may abort"
        )
    scenario = start(
        f"\nwork = loader({loader})\nbatches = iter(work)\nnext(batches)\nready()\n{ENDS[end]}\n"
    )
    assert (scenario.end(), scenario.said(), scenario.left()) == (0, "", [])


def test_an_uncaught_error_is_all_that_is_printed(start: Any) -> None:
    scenario = start("""
        batches = iter(loader(FastLoader, 0))
        next(batches)
        ready()
        raise ValueError("the script's own")
    """)
    assert scenario.end() == 1, scenario.err.read_text()
    said = scenario.said()
    assert said.count("Traceback") == 1 and said.endswith("ValueError: the script's own\n")
    assert scenario.left() == []


@pytest.mark.slow
def test_a_forked_child_may_use_what_its_parent_began(start: Any) -> None:
    scenario = start("""
        work = loader(FastLoader, 0)
        batches = iter(work)
        next(batches)
        ready()
        child = os.fork()
        if child == 0:
            try:
                for _ in range(10):
                    next(batches)  # begun by threads that are not here
            except RuntimeError as error:
                assert "parent" in str(error), error
            else:
                raise AssertionError("no error")
            again = iter(work)
            assert next(again)[0].shape == (2, 3, 24, 24)
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        next(batches)
    """)
    assert (scenario.end(), scenario.said(), scenario.left()) == (0, "", [])


_STORE = """
import threading
import numpy as np
from fastpipe.errors import StoreBusyError
from fastpipe.stores.fetching import ObjectReader
from fastpipe.stores.retrying import Retries, RetryingStore

asked = threading.Event()

class Store:
    name = "nowhere"
    def get(self, key, version=""):
        asked.set()
        raise StoreBusyError("no answer")
    def close(self):
        pass

class Listing:
    sizes = np.ones(4, np.int64)
    def __len__(self):
        return 4
    def key(self, row):
        return str(row)
    version = path = key

# Between two tries it would wait for most of an hour.
store = RetryingStore(Store(), Retries(base=3000, cap=3000, seconds=1e6), draw=lambda: 1.0)
reader = ObjectReader(store, Listing(), None, str, connections=2, read_ahead=100)
reader.need(np.arange(4))
asked.wait()
print("over", flush=True)
"""


def test_a_program_ends_while_its_threads_wait_for_a_store() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _STORE], capture_output=True, text=True, timeout=120, env=environment(), check=False
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr


_QUIET = """
import logging, sys
import numpy as np
from torch.utils.data import IterableDataset
from torchvision import transforms
import fastpipe
from fastpipe import FastHDF5Dataset, FastImageFolder, FastLoader, FastPatchDataset

class Own:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return np.ones((3, 60, 60)) * index

class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))

def row(index, rng):
    return {"x": rng.random(3)}

def datasets(images):
    yield Own()
    yield Stream()
    yield FastImageFolder(images, transforms.Compose([transforms.CenterCrop(16), transforms.ToTensor()]))
    yield FastHDF5Dataset("rows.h5", "x")
    yield FastPatchDataset(np.zeros((8, 8, 8), np.uint8), (4, 4, 4), seed=0)

if __name__ == "__main__":
    method, images = sys.argv[1:]
    for dataset in datasets(images):
        list(FastLoader(dataset, 2, num_workers=1, workers="processes", multiprocessing_context=method))
    fastpipe.generate(row, 8, "made.h5", seed=0, workers=1, progress=False)
    print("done")
"""


# A started worker takes seconds to import torch.
@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("forkserver", "spawn"))]
)
def test_no_worker_prints_anything(tmp_path: Path, photo_tree: Path, method: str) -> None:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = np.zeros((8, 4))
    (tmp_path / "train.py").write_text(_QUIET)
    ran = subprocess.run(
        [sys.executable, "train.py", method, str(photo_tree)],
        cwd=tmp_path, capture_output=True, text=True, env=environment(), check=False,
    )  # fmt: skip
    assert (ran.stdout, ran.stderr) == ("done\n", "")
