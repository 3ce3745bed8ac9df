"""A process that ends in the middle of an epoch, however it ends, leaves nothing and says nothing.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastpipe
from fastpipe.bench.synthetic import photo_tree

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
    root = Path(fastpipe.__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_tree(tmp_path_factory.mktemp("tree"), classes=2, per_class=4, sizes=(40, 44))


def _start(server: Any, folder: Path, tree: Path, code: str) -> Scenario:
    return Scenario(server, folder, _PREPARE.format(root=str(tree)) + textwrap.dedent(code))


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
    batches = iter(loader({loader}))
    next(batches)
    ready()
    for batch in batches:
        pass
"""


# Orphaned workers of torch look for their parent every five seconds: one case of each is enough
# for every day.
_SELDOM = {(signal.SIGTERM, "persistent workers"), (signal.SIGTERM, "stock loader with workers"), (signal.SIGKILL, "workers"),
           (signal.SIGKILL, "stock loader with workers"), (signal.SIGKILL, "threads, far ahead")}  # fmt: skip
_KILLS = [
    pytest.param(
        number, loader, id=f"{number.name}-{name}", marks=[pytest.mark.slow] if (number, name) in _SELDOM else []
    )
    for number in (signal.SIGTERM, signal.SIGKILL) for name, loader in LOADERS.items()
]  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize(("number", "loader"), _KILLS)
def test_killed_in_the_middle_of_an_epoch(
    server: Any, tree: Path, tmp_path: Path, loader: str, number: int
) -> None:
    scenario = _start(server, tmp_path, tree, _FOREVER.format(loader=loader))
    os.kill(scenario.pid, number)
    assert scenario.end() == -number, scenario.err.read_text()
    assert scenario.said() == ""
    assert scenario.left() == []


# An end of an interpreter with torch takes a second: for every day one of each kind of loader.
_INTERRUPTED = [
    pytest.param(loader, id=name, marks=[pytest.mark.slow] if name in ("threads, far ahead", "a seed", "workers") else [])
    for name, loader in LOADERS.items()
]  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("loader", _INTERRUPTED)
def test_ctrl_c_in_the_middle_of_an_epoch(server: Any, tree: Path, tmp_path: Path, loader: str) -> None:
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        scenario = _start(server, folder, tree, _FOREVER.format(loader=loader))
        came = scenario.interrupted(everybody=True)
        code = scenario.end()
        if came:
            break
        scenario.left()
    assert code == -signal.SIGINT, scenario.err.read_text()
    said = scenario.said()
    assert said.startswith("Traceback (most recent call last):")
    assert said.endswith("\nKeyboardInterrupt\n")
    assert said.count("Traceback") == 1
    assert "Exception ignored" not in said
    assert scenario.left() == []


@pytest.mark.few(1)
@pytest.mark.parametrize("loader", ["FastLoader, 0", "FastLoader, 0, serial=True", "FastLoader, 1"])
def test_ctrl_c_that_the_script_catches(server: Any, tree: Path, tmp_path: Path, loader: str) -> None:
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
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        scenario = _start(server, folder, tree, code)
        came, end = scenario.interrupted(everybody=False), scenario.end()
        if came:
            break
        scenario.left()
    assert (end, scenario.said()) == (0, "")
    assert scenario.left() == []


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


_WITH_WORKERS = ("the script ends", "everything in a cycle", "a fork in between")
# "The script ends", with one batch more or from a function, is there every day.
_LIKE_ANOTHER = ("the script ends with a batch", "sys.exit")
_ENDS = [
    *(pytest.param("FastLoader, 0", end, id=name, marks=[pytest.mark.slow] if name in _LIKE_ANOTHER else [])
      for name, end in ENDS.items()),
    *(pytest.param("FastLoader, 1, persistent_workers=True", ENDS[name], id=f"{name}-workers") for name in _WITH_WORKERS),
    # Where a daemon thread is inside torch's own iterator, the end of the interpreter may abort.
    *(pytest.param("DataLoader, 0", end, id=f"{name}-stock", marks=pytest.mark.slow) for name, end in ENDS.items()
      if name != "a thread iterates on"),
]  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize(("loader", "end"), _ENDS)
def test_the_interpreter_ends_in_the_middle_of_an_epoch(
    server: Any, tree: Path, tmp_path: Path, loader: str, end: str
) -> None:
    begin = f"\nwork = loader({loader})\nbatches = iter(work)\nnext(batches)\nready()\n"
    scenario = _start(server, tmp_path, tree, begin + end + "\n")
    assert (scenario.end(), scenario.said()) == (0, "")
    assert scenario.left() == []


def test_an_uncaught_error_in_the_middle_of_an_epoch(server: Any, tree: Path, tmp_path: Path) -> None:
    code = """
        batches = iter(loader(FastLoader, 0))
        next(batches)
        ready()
        raise ValueError("the script's own")
    """
    scenario = _start(server, tmp_path, tree, code)
    assert scenario.end() == 1, scenario.err.read_text()
    said = scenario.said()
    assert said.count("Traceback") == 1
    assert said.endswith("ValueError: the script's own\n")
    assert scenario.left() == []


def test_a_forked_child_may_use_what_its_parent_began(server: Any, tree: Path, tmp_path: Path) -> None:
    code = """
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
    """
    scenario = _start(server, tmp_path, tree, code)
    assert (scenario.end(), scenario.said()) == (0, "")
    assert scenario.left() == []
