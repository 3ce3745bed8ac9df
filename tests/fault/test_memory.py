"""Nothing grows: not memory, not objects, not threads, not descriptors."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset
from torchvision import transforms as v1

from fastpipe import FastImageFolder, FastLoader
from fastpipe.bench.synthetic import photo_tree
from fastpipe.core.processes import memory_of_processes

CROP = v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()])


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_tree(tmp_path_factory.mktemp("tree"), classes=2, per_class=8, sizes=(20, 24))


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    root = photo_tree(tmp_path / "tree", classes=2, per_class=8, sizes=(20, 24))
    for number in (0, 3):
        (root / f"class_000/{number:04d}.jpg").write_bytes(b"no picture")
    return root


def _plain(image: Any) -> Any:
    return image


def _first(samples: list[Any]) -> Any:
    return samples[0][1]


Make = Callable[[Path], Any]
LOADERS: dict[str, Make] = {
    "threads": lambda tree: FastLoader(FastImageFolder(tree, CROP), 3),
    "threads, shuffled": lambda tree: FastLoader(FastImageFolder(tree, CROP), 3, shuffle=True, seed=1),
    "through Subset": lambda tree: FastLoader(Subset(FastImageFolder(tree, CROP), range(12)), 5),
    "stock loader": lambda tree: DataLoader(FastImageFolder(tree, CROP), 3),
    "serial transform": lambda tree: FastLoader(FastImageFolder(tree, v1.Compose([CROP, _plain])), 3, seed=1),
    "PIL images": lambda tree: FastLoader(FastImageFolder(tree), 3, collate_fn=_first),
    "no batches": lambda tree: FastLoader(FastImageFolder(tree, CROP), None),
}


@pytest.mark.parametrize("name", LOADERS)
def test_no_objects_pile_up(tree: Path, grown_in_epochs: Any, name: str) -> None:
    assert grown_in_epochs(LOADERS[name](tree)) == {}


@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
def test_bad_samples_leave_no_objects(broken: Path, grown_in_epochs: Any, policy: Any) -> None:
    loader = FastLoader(FastImageFolder(broken, CROP, bad_samples=policy), 3)
    assert grown_in_epochs(loader) == {}


@pytest.mark.parametrize("workers", [0, 1])
def test_iterators_that_are_broken_off_leave_nothing(tree: Path, workers: int) -> None:
    dataset = FastImageFolder(tree, CROP, threads=2)
    loader = FastLoader(dataset, 2, num_workers=workers, workers="processes")
    next(iter(loader))
    for _ in range(0 if workers else 3):
        list(loader)  # until Python's threads have something to keep, and are there
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for _ in range(5 if workers else 50):
        next(iter(loader))
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)  # a worker's, which ends; a pool's would not
        assert not thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2


def test_datasets_that_are_dropped_leave_no_threads(tree: Path) -> None:
    before = set(threading.enumerate())
    for _ in range(20):
        next(iter(FastLoader(FastImageFolder(tree, CROP, threads=3), 2)))
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def _bytes() -> int:
    taken = memory_of_processes()
    assert taken is not None
    return taken


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="run it on Linux, which tells PSS")
@pytest.mark.parametrize("name", ["threads", "stock loader"])
def test_twenty_thousand_batches_take_no_more_memory_than_a_thousand(tree: Path, name: str) -> None:
    dataset = FastImageFolder(tree, CROP)
    order = list(range(16)) * 5
    loader: Any = (FastLoader if name == "threads" else DataLoader)(dataset, 4, sampler=order)
    kept = torch.zeros(0)
    batches = 0
    while batches < 1_000:
        for batch in loader:
            kept = batch[0]
            batches += 1
    gc.collect()
    before = _bytes()
    while batches < 20_000:
        for batch in loader:
            kept = batch[0]
            batches += 1
    gc.collect()
    assert kept.shape == (4, 3, 16, 16)
    assert _bytes() - before < 4 * 2**20


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="run it on Linux, which tells PSS")
@pytest.mark.parametrize("workers", [0, 2])
def test_two_hundred_epochs_of_two_hundred_photos(photos: Path, workers: int) -> None:
    """The training of a small data set, epoch after epoch: memory after 20 epochs is that after 200."""
    transform = v1.Compose(
        [
            v1.RandomResizedCrop(224),
            v1.RandomHorizontalFlip(),
            v1.ToTensor(),
            v1.Normalize([0.5] * 3, [0.2] * 3),
        ]
    )
    dataset = FastImageFolder(photos, transform)
    indices = (list(range(len(dataset))) * 200)[:200]
    loader = FastLoader(
        Subset(dataset, indices), 32, shuffle=True, seed=1, num_workers=workers, workers="processes", persistent_workers=workers > 0
    )  # fmt: skip
    sizes = {}
    for epoch in range(1, 201):
        assert sum(len(labels) for _, labels in loader) == 200
        if epoch in (20, 200):
            gc.collect()
            sizes[epoch] = _bytes()
    print(f"{sizes[20] / 2**20:.1f} MiB after 20 epochs, {sizes[200] / 2**20:.1f} MiB after 200")
    assert sizes[200] == pytest.approx(sizes[20], rel=0.02)
    loader = None  # type: ignore[assignment]  # and with it the workers
