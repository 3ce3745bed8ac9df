"""What a script's own objects see is a function of the batches handed out, and never of timing.

A ``DataLoader`` with as many workers is the reference: at every batch, and after a broken-off epoch, all
generators have the states that it leaves.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from streams import OwnSampler
from torch.utils import data
from torch.utils.data import DataLoader, RandomSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Resize, ToTensor

from fastpipe import FastImageFolder, FastLoader, accelerate
from fastpipe.torch.folder_source import FolderSource

STEADY = Compose([Resize((8, 8)), ToTensor()])
COUNT = 15  # images of `tree`
Sampling = Callable[[torch.Generator], dict[str, Any]]


def _drawing(draw: Callable[[int], int]) -> OwnSampler:
    """Draws each index when it is asked for it, as samplers of balanced classes do."""
    return OwnSampler(lambda: (draw(COUNT) for _ in range(20)), 20)


def _buckets() -> Iterator[list[int]]:
    """Batches whose sizes are drawn."""
    return ([random.randrange(COUNT) for _ in range(random.randint(1, 4))] for _ in range(6))


# Of a sampler's name: its arguments of a loader, given a generator of the script's.
AT_ONCE: dict[str, Sampling] = {
    "shuffle": lambda g: {"shuffle": True},
    "shuffle, generator": lambda g: {"shuffle": True, "generator": g},
    "shuffle, generator, drop_last": lambda g: {"shuffle": True, "generator": g, "drop_last": True},
    "RandomSampler, generator": lambda g: {"sampler": RandomSampler(range(COUNT), generator=g)},
    "BatchSampler": lambda g: {
        "batch_size": 1, "batch_sampler": data.BatchSampler(RandomSampler(range(COUNT), generator=g), 5, False)
    },
    "one by one": lambda g: {"shuffle": True, "generator": g, "batch_size": None},
    "SubsetRandomSampler": lambda g: {"sampler": data.SubsetRandomSampler(range(9), g)},
    "WeightedRandomSampler": lambda g: {"sampler": data.WeightedRandomSampler([1.0] * COUNT, COUNT, generator=g)},
    "in order": lambda g: {},
}  # fmt: skip
LAZY: dict[str, Sampling] = {
    "random": lambda g: {"sampler": _drawing(random.randrange)},
    "numpy": lambda g: {"sampler": _drawing(lambda n: int(np.random.randint(n)))},
    "torch": lambda g: {"sampler": _drawing(lambda n: int(torch.randint(n, ())))},
    "batches": lambda g: {"batch_size": 1, "batch_sampler": OwnSampler(_buckets, 6)},
    "replacement": lambda g: {"sampler": RandomSampler(range(COUNT), True, 70)},
    "replacement, generator": lambda g: {"sampler": RandomSampler(range(COUNT), True, 70, generator=g)},
    "more than all": lambda g: {"sampler": RandomSampler(range(COUNT), num_samples=2 * COUNT)},
}


def trace(make: Callable[[dict[str, Any]], Any], sampler: Any, stop: int, epochs: int = 3) -> list[Any]:
    """Return what a script sees in some epochs, the first of which it leaves after some batches."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    loader, seen = make({"batch_size": 4, **sampler(generator)}), []
    for epoch in range(epochs):
        for number, (images, labels) in enumerate(loader):
            seen.append((images.sum().item(), torch.as_tensor(labels).tolist(), _states(generator)))
            seen.append((random.random(), np.random.rand(), torch.rand(()).item()))  # mixup, dropout …
            if epoch == 0 and number == stop:
                break
        seen.append(_states(generator))
    return seen


def _states(generator: torch.Generator) -> str:
    states = (
        torch.get_rng_state().numpy().tobytes(), generator.get_state().numpy().tobytes(),
        repr(random.getstate()).encode(), repr(np.random.get_state()).encode(),
    )  # fmt: skip
    return hashlib.sha256(b"".join(states)).hexdigest()


def ways(tree: Path, workers: int) -> dict[str, Callable[[dict[str, Any]], Any]]:
    ours, theirs = (kind(tree, STEADY) for kind in (FastImageFolder, ImageFolder))
    return {
        "FastLoader": lambda options: FastLoader(ours, num_workers=workers, **options),
        "accelerate": lambda options: accelerate(DataLoader(theirs, num_workers=workers, **options)),
        "stock loader": lambda options: DataLoader(ours, num_workers=workers, **options),
    }


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("workers", "name", "stop"),
    [*itertools.product([0], AT_ONCE, (0, 1, 2, 99)), *itertools.product((1, 2), AT_ONCE | LAZY, (0, 2, 99))],
)
def test_generators_are_as_a_data_loader_leaves_them(tree: Path, workers: int, name: str, stop: int) -> None:
    sampler, stock = (AT_ONCE | LAZY)[name], ImageFolder(tree, STEADY)
    expected = trace(lambda options: DataLoader(stock, num_workers=workers, **options), sampler, stop)
    for way, make in ways(tree, workers).items():
        assert trace(make, sampler, stop) == expected, way


@pytest.mark.parametrize("name", LAZY)
def test_without_reading_ahead_lazy_samplers_draw_as_without_workers(tree: Path, name: str) -> None:
    expected = trace(lambda options: DataLoader(ImageFolder(tree, STEADY), **options), LAZY[name], 99)
    dataset = FastImageFolder(tree, STEADY)
    fast = trace(lambda options: FastLoader(dataset, prefetch_batches=0, **options), LAZY[name], 99)
    assert fast == expected


@pytest.mark.few(2)
@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["random", "shuffle, generator", "batches"])
def test_batches_on_their_way_to_a_device_draw_nothing_early(tree: Path, name: str, workers: int) -> None:
    dataset, sampler = FastImageFolder(tree, STEADY), (AT_ONCE | LAZY)[name]
    noise: dict[str, Any] = {"augment": lambda images, labels: (images + torch.rand(()), labels)}
    for more, kind in itertools.product(({}, noise, {"collate_fn": _drawing_collate}), ("auto", "processes")):
        fixed: dict[str, Any] = {"num_workers": workers, "workers": kind, **more}
        here, there = (
            trace(lambda options: FastLoader(dataset, device=device, **options, **fixed), sampler, 2)
            for device in (None, "cpu")
        )
        assert here == there


def _drawing_collate(samples: list[Any]) -> Any:
    images, labels = data.default_collate(samples)
    return images + random.random(), labels


@contextmanager
def busy() -> Iterator[None]:
    """Another thread wants Python's lock all the time."""
    is_over = threading.Event()

    def turn() -> None:
        while not is_over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [*LAZY, "shuffle, generator"])
def test_equal_seeds_give_equal_runs_under_load(tree: Path, name: str, monkeypatch: Any) -> None:
    start, turns = FolderSource.start, itertools.count()

    def slowed(*arguments: Any) -> Any:
        sum(range(20_000 * (next(turns) % 3)))  # so that threads get ahead, or do not
        return start(*arguments)

    monkeypatch.setattr(FolderSource, "start", slowed)
    dataset, sampler = FastImageFolder(tree, STEADY), (AT_ONCE | LAZY)[name]
    outcomes: set[str] = set()
    for run in range(9):
        with busy() if run % 3 == 0 else nullcontext():
            outcomes.add(repr(trace(lambda options: FastLoader(dataset, **options), sampler, 1, epochs=2)))
    assert len(outcomes) == 1


def test_a_batch_has_the_transform_and_dtype_of_the_time_it_is_taken(tree: Path) -> None:
    def batches(loader: Any) -> list[Any]:
        found, iterator = [], iter(loader)
        for dtype, size in ((torch.float32, 8), (torch.float64, 8), (torch.float32, 8), (torch.float32, 6)):
            torch.set_default_dtype(dtype)
            loader.dataset.transform = Compose([Resize((size, size)), ToTensor()])
            found.append(next(iterator)[0])
        return found

    try:
        found = batches(FastLoader(FastImageFolder(tree), 3)), batches(DataLoader(ImageFolder(tree), 3))
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_batch_has_the_samples_that_the_dataset_has_when_it_is_taken(tree: Path) -> None:
    def batches(kind: Any, folder: Any) -> list[Any]:
        dataset = folder(tree, STEADY)
        found, iterator = [], iter(kind(dataset, 3))
        for number in range(4):
            found.append([part.tolist() for part in next(iterator)])
            path, _ = dataset.samples[0]
            dataset.samples[3 * number + 4] = path, 7  # of the next batch
        return found

    expected = batches(DataLoader, ImageFolder)
    assert [7 in labels for _, labels in expected] == [False, True, True, True]
    for kind in (FastLoader, DataLoader):
        assert batches(kind, FastImageFolder) == expected
    assert batches(lambda dataset, size: accelerate(DataLoader(dataset, size)), ImageFolder) == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_that_begin_in_inference_mode_can_be_trained_on(tree: Path, workers: int) -> None:
    for make in ways(tree, workers).values():
        iterator = iter(make({"batch_size": 4}))
        with torch.inference_mode():
            next(iterator)
        for images, _ in iterator:
            (torch.nn.Conv2d(3, 1, 3)(images).sum() + images.requires_grad_().sum()).backward()
            assert images.grad is not None


def test_a_batch_has_the_modes_of_the_thread_that_takes_it(tree: Path) -> None:
    def batches(loader: Any) -> list[Any]:
        found, iterator = [next(iter(loader))], iter(loader)
        next(iterator)
        with torch.device("meta"), torch.no_grad(), torch.autocast("cpu"):
            found.append(next(iterator))
        return [*found, *iterator]

    expected = batches(DataLoader(ImageFolder(tree, STEADY), 4))
    for make in ways(tree, 0).values():
        for (ours, labels), (theirs, numbers) in zip(batches(make({"batch_size": 4})), expected, strict=True):
            assert labels.device == numbers.device and not ours.requires_grad
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_batch_has_pillows_limits_of_the_time_it_is_taken(tree: Path, monkeypatch: Any) -> None:
    def outcomes(loader: Any) -> list[Any]:
        found, iterator = [], iter(loader)
        for limit, action in (
            (None, "error"), (2500, "ignore"), (None, "error"), (2500, "error"), (250, "ignore")
        ):  # fmt: skip
            monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
            with warnings.catch_warnings():
                warnings.simplefilter(action, Image.DecompressionBombWarning)  # type: ignore[arg-type]
                try:
                    found.append(next(iterator)[1].tolist())
                except Exception as error:
                    found.append("Bomb" in f"{error!r} {error.__cause__!r}")
        return found

    expected = outcomes(DataLoader(ImageFolder(tree, STEADY), 2))
    assert expected == [[0, 0], [0, 0], [0, 1], True, True]
    for make in ways(tree, 0).values():
        assert outcomes(make({"batch_size": 2})) == expected
