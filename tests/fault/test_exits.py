"""A process that ends in the middle of an epoch, however it ends, leaves nothing and prints nothing.

Importing torch takes seconds, so one process imports it once and forks each scenario.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from scripts import has_ended, ran, started, wait_until_ended

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="run it on Linux, which has /proc")

_SERVES = re.compile(r"multiprocessing/resource_sharer.py.*, in _serve")

_SERVER = """
import json, os, sys, tempfile
import fastpipe.torch, torchvision
for line in sys.stdin:
    asked = json.loads(line)
    if "wait" in asked:
        print(os.waitpid(asked["wait"], 0)[1], flush=True)
    elif pid := os.fork():
        print(pid, flush=True)
    else:
        os.setsid()
        tempfile.tempdir = asked["temporary"]
        for name, number, mode in (("/dev/null", 0, os.O_RDONLY), (asked["out"], 1, os.O_WRONLY), (asked["err"], 2, os.O_WRONLY)):
            opened = os.open(name, mode)
            os.dup2(opened, number)
            os.close(opened)
        break
else:
    sys.exit()
exec(compile(asked["code"], "scenario", "exec"), {"__name__": "__main__"})
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

    def _ask(self, question: dict[str, Any]) -> str:
        self._server.stdin.write(json.dumps(question) + "\n")
        self._server.stdin.flush()
        return self._server.stdout.readline()

    def end(self) -> int:
        """Wait for the end of the program and of its children; its exit code."""
        code = os.waitstatus_to_exitcode(int(self._ask({"wait": self.pid})))
        wait_until_ended(self.children)
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
        (os.killpg if everybody else os.kill)(self.pid, signal.SIGINT)
        while not has_ended(self.pid) and not self.lost_interrupt():
            threading.Event().wait(0.01)
        if self.lost_interrupt():
            os.kill(self.pid, signal.SIGKILL)
            return False
        return True


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with started("-c", _SERVER, stdin=subprocess.PIPE, stderr=None) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.fixture
def start(server: Any, tree: Path, tmp_path: Path) -> Any:
    """Starts a scenario: the code after the one above."""
    prepare = _PREPARE.format(root=str(tree))
    return lambda code: Scenario(
        server, Path(tempfile.mkdtemp(dir=tmp_path)), prepare + textwrap.dedent(code)
    )


def interrupted(start: Any, code: str, everybody: bool) -> tuple[Scenario, int]:
    """A scenario that was ended by Ctrl-C, and its exit code."""
    for _ in range(3):
        scenario = start(code)
        came, end = scenario.interrupted(everybody), scenario.end()
        if came:
            break
        scenario.left()
    return scenario, end


LOADERS = [
    "FastLoader, 0", "FastLoader, 0, prefetch_batches=50", "FastLoader, 0, serial=True", "FastLoader, 0, seed=1",
    "FastLoader, 2", "FastLoader, 2, persistent_workers=True", "DataLoader, 0", "DataLoader, 2",
]  # fmt: skip

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
    scenario = start(_FOREVER.format(loader))
    os.kill(scenario.pid, number)
    assert scenario.end() == -number, scenario.err.read_text()
    assert (scenario.said(), scenario.left()) == ("", [])


@pytest.mark.few(1)
@pytest.mark.parametrize("loader", LOADERS)
def test_ctrl_c_prints_one_traceback(start: Any, loader: str) -> None:
    scenario, code = interrupted(start, _FOREVER.format(loader), everybody=True)
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
    "another iterator": "more = iter(work); next(more)",
    "a fork in between": "child = os.fork()\nif child == 0:\n    os._exit(0)\nassert os.waitpid(child, 0)[1] == 0\nnext(batches)",
    "a module keeps it": "sys.modules['kept'] = batches",
    "an error": "raise ValueError('of the script')",
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "loader", ["FastLoader, 0", "DataLoader, 0", "FastLoader, 1, persistent_workers=True"]
)
@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_the_interpreter_leaves_nothing(start: Any, loader: str, end: str) -> None:
    if end == "a thread iterates on" and loader != "FastLoader, 0":
        pytest.skip("a daemon thread inside torch's own iterator may abort the end of the interpreter")
    scenario = start(f"work = loader({loader}); batches = iter(work); next(batches); ready()\n{ENDS[end]}\n")
    code, said = scenario.end(), scenario.said()
    assert code == (end == "an error") and scenario.left() == [], said
    if end == "an error":
        assert said.count("Traceback") == 1 and said.endswith("\nValueError: of the script\n")
    else:
        assert said == ""


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
    name, close = "nowhere", lambda self: None
    def get(self, key, version=""):
        asked.set()
        raise StoreBusyError("no answer")

class Listing(list):
    sizes = np.ones(4, np.int64)
    key = version = path = lambda self, row: str(row)

# Between two tries it would wait for most of an hour.
store = RetryingStore(Store(), Retries(base=3000, cap=3000, seconds=1e6), draw=lambda: 1.0)
reader = ObjectReader(store, Listing(range(4)), None, str, connections=2, read_ahead=100)
reader.need(np.arange(4))
asked.wait()
print("over", flush=True)
"""


def test_a_program_ends_while_its_threads_wait_for_a_store() -> None:
    done = ran("-c", _STORE)
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr


_QUIET = """
import sys
import numpy as np
from torch.utils.data import IterableDataset
from torchvision import transforms
import fastpipe
from fastpipe import FastHDF5Dataset, FastImageFolder, FastLoader, FastPatchDataset

class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))

def row(index, rng):
    return {"x": rng.random(3)}

if __name__ == "__main__":
    method, images = sys.argv[1:]
    crop = transforms.Compose([transforms.CenterCrop(16), transforms.ToTensor()])
    for dataset in (
        [np.full((3, 60, 60), index) for index in range(4)], Stream(), FastImageFolder(images, crop),
        FastHDF5Dataset("rows.h5", "x"), FastPatchDataset(np.zeros((8, 8, 8), np.uint8), (4, 4, 4), seed=0),
    ):
        list(FastLoader(dataset, 2, num_workers=1, workers="processes", multiprocessing_context=method))
    fastpipe.generate(row, 8, "made.h5", seed=0, workers=1, progress=False)
    print("done")
"""


# A started worker takes seconds to import torch.
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_no_worker_prints_anything(tmp_path: Path, photo_tree: Path, method: str) -> None:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = np.zeros((8, 4))
    (tmp_path / "train.py").write_text(_QUIET)
    done = ran("train.py", method, photo_tree, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("done\n", "")
