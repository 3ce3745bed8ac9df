"""A run that is killed and goes on from its last state gives the stream that was never interrupted."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import WeightedRandomSampler
from torchvision import transforms as v1

from fastpipe import FastImageFolder, FastLoader, Shard
from fastpipe.bench.synthetic import photo_tree

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="run it on Linux or macOS, where processes fork"
)

CROP = v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()])
Run = Callable[..., int]
EPOCHS = 3
BATCHES = 6  # in an epoch: 17 samples, by threes


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


def _images(tree: Path) -> FastImageFolder:
    return FastImageFolder(tree, CROP, threads=2)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def _weighted(tree: Path, workers: int) -> FastLoader[Any]:
    sampler = WeightedRandomSampler(range(1, 18), 17, generator=_generator())
    return FastLoader(_images(tree), 3, sampler=sampler, num_workers=workers, workers="processes", seed=4)


LOADERS: dict[str, Callable[[Path, int], FastLoader[Any]]] = {
    "seed": lambda tree, n: FastLoader(_images(tree), 3, shuffle=True, num_workers=n, workers="processes", seed=4),
    "seed, own dataset": lambda tree, n: FastLoader(Noisy(), 3, shuffle=True, num_workers=n, workers="processes", seed=4),
    "generator": lambda tree, n: FastLoader(_images(tree), 3, shuffle=True, num_workers=n, workers="processes", generator=_generator()),
    "weighted": _weighted,
}  # fmt: skip


def _hash(batch: Any) -> str:
    found = hashlib.sha256()
    for part in batch:
        found.update(part.numpy().tobytes())
    return found.hexdigest()


def _run(loader: FastLoader[Any], state: Any, log: Path, told: int) -> None:
    """Go through the epochs; after each batch, note its hash and the state.  A byte says where this is:
    asking for a batch, having it, having noted it."""
    if state is not None:
        loader.load_state_dict(state)
    noted = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for _ in range(0 if state is None else state["epoch"], EPOCHS):
        os.write(told, b"?")
        for batch in loader:
            os.write(told, b"!")
            line = {"hash": _hash(batch), "state": loader.state_dict()}
            os.write(noted, json.dumps(line).encode() + b"\n")
            os.write(told, b".?")


@pytest.fixture
def run(forked: Callable[[Callable[[], object]], int]) -> Run:
    return partial(_run_in_child, forked)


def _run_in_child(
    forked: Callable[[Callable[[], object]], int],
    make: Callable[[], FastLoader[Any]],
    state: Any,
    log: Path,
    kill_at: int | None,
) -> int:
    """Run in a new process, killed once it has said so many bytes; its exit code."""
    ours, told = os.pipe()

    def work() -> None:
        os.close(ours)
        torch.manual_seed(int.from_bytes(os.urandom(4), "little"))  # nothing may come from here
        _run(make(), state, log, told)
        if kill_at is not None:  # not faster than who kills it
            threading.Event().wait()

    pid = forked(work)
    os.close(told)
    said = 0
    while kill_at is None or said < kill_at:
        more = len(os.read(ours, 1))
        if not more:
            break
        said += more
    if kill_at is not None:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    while os.read(ours, 4096):  # until its workers have gone as well
        pass
    os.close(ours)
    return code


def _noted(log: Path) -> list[dict[str, Any]]:
    """The lines that are complete."""
    lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
    return [json.loads(line) for line in lines]


def _points(name: str, workers: int) -> list[int]:
    """Bytes after which to kill: asking for a batch, in the middle of one, having noted one."""
    chosen = random.Random(f"{name} {workers}")
    return chosen.sample(range(1, 3 * BATCHES * EPOCHS), 3)


CASES = [(name, 0) for name in LOADERS] + [
    (name, 2) if name.startswith("seed") else pytest.param(name, 2, marks=pytest.mark.slow)
    for name in LOADERS
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "workers"), CASES)
def test_killed_at_random_points(tree: Path, tmp_path: Path, run: Run, name: str, workers: int) -> None:
    def make() -> FastLoader[Any]:
        return LOADERS[name](tree, workers)

    whole = tmp_path / "whole"
    assert run(make, None, whole, None) == 0
    expected = [line["hash"] for line in _noted(whole)]
    assert len(expected) == len(set(expected)) == BATCHES * EPOCHS
    for point in _points(name, workers):
        log = tmp_path / f"killed at {point}"
        assert run(make, None, log, point) == -signal.SIGKILL
        noted = _noted(log)
        assert len(noted) >= point // 3 - EPOCHS
        assert [line["hash"] for line in noted] == expected[: len(noted)]
        state = noted[-1]["state"] if noted else None
        assert run(make, state, log, None) == 0
        assert [line["hash"] for line in _noted(log)] == expected, f"killed at {point}"


@pytest.mark.slow
def test_killed_several_times(tree: Path, tmp_path: Path, run: Run) -> None:
    def make() -> FastLoader[Any]:
        workers = len(_noted(log)) % 3  # as many as there are cores to be had today
        return LOADERS["seed"](tree, workers)

    log = tmp_path / "whole"
    assert run(make, None, log, None) == 0
    expected = [line["hash"] for line in _noted(log)]
    log = tmp_path / "killed"
    code, starts = -signal.SIGKILL, 0
    while code == -signal.SIGKILL:
        noted = _noted(log)
        kill_at = 8 + starts % 3
        code = run(make, noted[-1]["state"] if noted else None, log, kill_at if len(noted) < 16 else None)
        starts += 1
    assert code == 0
    assert starts > 4
    assert [line["hash"] for line in _noted(log)] == expected


def test_the_rest_of_an_epoch_without_any_seed(tree: Path, tmp_path: Path, run: Run) -> None:
    """What comes after it depends on torch's global generator, whose state is the script's to save."""

    def make() -> FastLoader[Any]:
        torch.manual_seed(seeds.pop())
        return FastLoader(_images(tree), 3, shuffle=True, num_workers=1, workers="processes")

    whole, log = tmp_path / "whole", tmp_path / "killed"
    seeds = [5]
    assert run(make, None, whole, None) == 0
    expected = [line["hash"] for line in _noted(whole)][:BATCHES]
    assert run(make, None, log, 10) == -signal.SIGKILL
    noted = _noted(log)
    assert [line["hash"] for line in noted] == expected[: len(noted)]
    assert 3 <= len(noted) < BATCHES
    seeds = [99]
    assert run(make, noted[-1]["state"], log, None) == 0
    assert [line["hash"] for line in _noted(log)][:BATCHES] == expected


# ---- other numbers of ranks ----------------------------------------------------------------------


def _loader(tree: Path, rank: int, world: int, size: int, workers: int) -> FastLoader[Any]:
    return FastLoader(
        _images(tree),
        size,
        shuffle=True,
        seed=6,
        shard=Shard(rank, world),
        num_workers=workers,
        workers="processes",
    )


def _samples(batches: Any) -> list[str]:
    """Each sample by its pixels, which its place in the order has drawn."""
    return [
        _hash((image, target))
        for images, targets in batches
        for image, target in zip(images, targets, strict=True)
    ]


@pytest.mark.few(3)
@pytest.mark.parametrize("taken", [1, 2])
@pytest.mark.parametrize(("world", "size", "workers"), [(3, 2, 0), (1, 6, 0), (1, 5, 2), (2, 1, 1)])
def test_two_ranks_with_workers_go_on_as_others(
    tmp_path: Path, taken: int, world: int, size: int, workers: int
) -> None:
    tree = photo_tree(tmp_path / "tree", classes=3, per_class=8, sizes=(32, 40))
    order = _samples(_loader(tree, 0, 1, 1, 0))
    assert len(set(order)) == 24
    states, begun = [], []
    for rank in range(2):
        loader = _loader(tree, rank, 2, 3, 2)
        iterator = iter(loader)
        begun += _samples([next(iterator) for _ in range(taken)])
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert states[0] == states[1]
    assert Counter(begun) == Counter(order[: 6 * taken])
    rest = []
    for rank in range(world):
        loader = _loader(tree, rank, world, size, workers)
        loader.load_state_dict(states[0])
        mine = _samples(loader)
        assert mine[:size] == order[6 * taken + rank :: world][:size]
        rest += mine
    assert Counter(rest) == Counter(order[6 * taken :])
