"""A run that is killed and goes on from its last state gives the stream of one that was not interrupted."""

from __future__ import annotations

import hashlib
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

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="run it on Linux or macOS, where processes fork"
)

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


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "seed": lambda: {"shuffle": True, "seed": 4},
    "seed, own dataset": lambda: {"shuffle": True, "seed": 4},
    "generator": lambda: {"shuffle": True, "generator": _generator()},
    "weighted": lambda: {
        "sampler": WeightedRandomSampler(range(1, 18), 17, generator=_generator()),
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


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_that_is_killed_goes_on_with_the_same_stream(
    tree: Path, tmp_path: Path, run: Run, name: str, workers: int
) -> None:
    this, whole = partial(make, name, tree, workers), tmp_path / "whole"
    assert run(this, None, whole, None) == 0
    expected, _ = _noted(whole)
    assert len(expected) == len(set(expected)) == BATCHES * EPOCHS
    for point in random.Random(f"{name} {workers}").sample(range(1, 3 * BATCHES * EPOCHS), 3):
        log = tmp_path / f"killed at {point}"
        assert run(this, None, log, point) == -signal.SIGKILL
        hashes, state = _noted(log)
        assert len(hashes) >= point // 3 - EPOCHS and hashes == expected[: len(hashes)]
        assert run(this, state, log, None) == 0
        assert _noted(log)[0] == expected, f"killed at {point}"


@pytest.mark.slow
def test_a_run_may_be_killed_several_times(tree: Path, tmp_path: Path, run: Run) -> None:
    log, code, starts = tmp_path / "killed", -signal.SIGKILL, 0
    assert run(partial(make, "seed", tree, 0), None, tmp_path / "whole", None) == 0
    while code == -signal.SIGKILL:
        hashes, state = _noted(log)
        workers = len(hashes) % 3  # as many as there are cores to be had today
        kill_at = 8 + starts % 3 if len(hashes) < 16 else None
        code, starts = run(partial(make, "seed", tree, workers), state, log, kill_at), starts + 1
    assert code == 0 and starts > 4
    assert _noted(log)[0] == _noted(tmp_path / "whole")[0]


def test_the_rest_of_an_epoch_is_the_same_without_any_seed(tree: Path, tmp_path: Path, run: Run) -> None:
    """What comes after it depends on torch's global generator, whose state is the script's to save."""

    def unseeded(seed: int) -> FastLoader[Any]:
        torch.manual_seed(seed)
        dataset = FastImageFolder(tree, CROP, threads=2)
        return FastLoader(dataset, 3, shuffle=True, num_workers=1, workers="processes")

    whole, log = tmp_path / "whole", tmp_path / "killed"
    assert run(partial(unseeded, 5), None, whole, None) == 0
    expected = _noted(whole)[0][:BATCHES]
    assert run(partial(unseeded, 5), None, log, 10) == -signal.SIGKILL
    hashes, state = _noted(log)
    assert hashes == expected[: len(hashes)] and 3 <= len(hashes) < BATCHES
    assert run(partial(unseeded, 99), state, log, None) == 0
    assert _noted(log)[0][:BATCHES] == expected
