"""A run that is killed and goes on from its last state gives the stream of one that was not interrupted."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import WeightedRandomSampler
from torchvision import transforms as v1

from fastpipe import FastImageFolder, FastLoader
from fastpipe.bench.synthetic import photo_tree

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="run it where processes fork")

CROP = v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()])
EPOCHS, BATCHES = 3, 6  # 17 samples, by threes
Run = Callable[[Callable[[], FastLoader[Any]], Any, Path, int | None], int]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = photo_tree(tmp_path_factory.mktemp("tree"), classes=3, per_class=6, sizes=(32, 40))
    os.unlink(root / "class_001/0003.jpg")
    return root


class Noisy:
    """A dataset of the user's own, with draws from torch's global generator."""

    def __len__(self) -> int:
        return 17

    def __getitem__(self, index: int) -> Any:
        return torch.rand(3) + index, index


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "seed": lambda: {"shuffle": True, "seed": 4},
    "seed, own dataset": lambda: {"shuffle": True, "seed": 4},
    "generator": lambda: {"shuffle": True, "generator": generator()},
    "weighted": lambda: {
        "sampler": WeightedRandomSampler(range(1, 18), 17, generator=generator()),
        "seed": 4,
    },
}


def make(name: str, tree: Path, workers: int) -> FastLoader[Any]:
    dataset: Any = Noisy() if "own" in name else FastImageFolder(tree, CROP, threads=2)
    return FastLoader(dataset, 3, num_workers=workers, workers="processes", **OPTIONS[name]())


def _hash(batch: Any) -> str:
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in batch)).hexdigest()


def _train(loader: FastLoader[Any], state: Any, log: Path, progress: int) -> None:
    """Go through the epochs; after each batch, note its hash and the state.  A byte says where this is:
    asking for a batch, having it, having noted it."""
    if state is not None:
        loader.load_state_dict(state)
    noted = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for _ in range(0 if state is None else state["epoch"], EPOCHS):
        os.write(progress, b"?")
        for batch in loader:
            os.write(progress, b"!")
            line = {"hash": _hash(batch), "state": loader.state_dict()}
            os.write(noted, json.dumps(line).encode() + b"\n")
            os.write(progress, b".?")


@pytest.fixture
def run(forked: Callable[[Callable[[], object]], int]) -> Run:
    """Trains in a new process, killed after so many bytes of progress; its exit code."""

    def run(make: Callable[[], FastLoader[Any]], state: Any, log: Path, kill_at: int | None) -> int:
        ours, progress = os.pipe()

        def work() -> None:
            os.close(ours)
            torch.manual_seed(int.from_bytes(os.urandom(4), "little"))  # nothing may come from here
            _train(make(), state, log, progress)
            if kill_at is not None:  # not faster than the test, which kills it
                threading.Event().wait()

        pid = forked(work)
        os.close(progress)
        count = 0
        while (kill_at is None or count < kill_at) and os.read(ours, 1):
            count += 1
        if kill_at is not None:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        while os.read(ours, 4096):  # until its workers have gone as well
            pass
        os.close(ours)
        return code

    return run


def _noted(log: Path) -> tuple[list[str], Any]:
    """The hashes and the last state of lines that are complete."""
    lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
    return [json.loads(line)["hash"] for line in lines], json.loads(lines[-1])["state"] if lines else None


# Also with as many workers as there are cores to be had today.
CASES = [*itertools.product(OPTIONS, [(0,), (2,)]), ("seed", (2, 0, 1))]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "workers"), CASES)
def test_a_run_that_is_killed_again_and_again_goes_on_with_the_same_stream(
    tree: Path, tmp_path: Path, run: Run, name: str, workers: tuple[int, ...]
) -> None:
    made = itertools.cycle([partial(make, name, tree, count) for count in workers])
    whole, log = tmp_path / "whole", tmp_path / "killed"
    assert run(next(made), None, whole, None) == 0
    expected, _ = _noted(whole)
    assert len(expected) == len(set(expected)) == BATCHES * EPOCHS
    rng, kills = random.Random(f"{name} {workers}"), 0
    while (left := BATCHES * EPOCHS - len(_noted(log)[0])) > 2:
        (done, state), point = _noted(log), rng.randrange(1, min(20, 3 * left))
        assert run(next(made), state, log, point) == -signal.SIGKILL
        hashes, _ = _noted(log)
        assert len(hashes) >= len(done) + point // 3 - EPOCHS and hashes == expected[: len(hashes)]
        kills += 1
    assert kills > 1
    assert run(next(made), _noted(log)[1], log, None) == 0
    assert _noted(log)[0] == expected
