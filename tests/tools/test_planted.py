"""Bottlenecks that are put there on purpose: the first advice is what helps against each.

They are measured, and so the machine should have nothing else to do.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, RandomResizedCrop, ToTensor

import fastpipe
from fastpipe.tools import Report

SECONDS = 2.0

pytestmark = pytest.mark.slow


def work(amount: int) -> float:
    """Keeps one core busy for about ``amount`` × 0.1 ms."""
    return float(sum(np.sin(np.arange(20_000.0)).sum() for _ in range(amount)))


def python() -> int:
    """Keeps the interpreter busy, for some milliseconds."""
    return sum(number % 7 for number in range(300_000))


def images(folder: Path, transform: Any) -> ImageFolder:
    """A folder whose epoch is long enough to be measured."""
    dataset = ImageFolder(str(folder), transform)
    dataset.samples = dataset.imgs = dataset.samples * 20
    return dataset


def wait(seconds: float) -> None:
    """As for a reply: nothing runs meanwhile."""
    select.select([], [], [], seconds)


class Made(Dataset[Any]):
    """Samples that a function makes."""

    def __init__(self, make: Callable[[], object], length: int = 4000) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.make()
        return torch.tensor([float(index)])


class Files(Dataset[Any]):
    """Samples of files on a disk that answers late."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        wait(0.004)
        return torch.from_numpy(np.load(self.paths[index]))


class Rows(Dataset[Any]):
    """Rows of a file whose chunks hold many more than are wanted."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = h5py.File(self.path, "r")
        return self.file["rows"][index]  # type: ignore[index]


def profiled(loader: Any, step: Callable[[Any], object], **options: Any) -> Report:
    return fastpipe.profile(loader, step, seconds=SECONDS, **options)


def is_nothing(batch: Any) -> None:
    """A step that takes no time."""


def test_slow_disk(tmp_path: Path) -> None:
    for number in range(400):
        np.save(tmp_path / f"{number}.npy", np.zeros(8, np.float32))
    report = profiled(DataLoader(Files(tmp_path), batch_size=4, num_workers=1), is_nothing)
    assert report.stall[0].name == "read"
    assert report.advice[0].what.startswith("num_workers=") and "for storage" in report.advice[0].why


def test_transform_that_holds_the_interpreter(photo_tree: Path) -> None:
    """Threads are no help: only processes are."""
    if fastpipe.tools.diagnosis.available_cpus() < 2:
        pytest.skip("with one core nothing helps; run it where there are two")
    crop = Compose([RandomResizedCrop(32), ToTensor(), lambda image: (python(), image)[1]])
    report = profiled(DataLoader(images(photo_tree, crop), batch_size=4), is_nothing)
    assert report.stall[0].name == "transform"
    assert report.advice[0].what.startswith("num_workers=")


def test_tiny_batch() -> None:
    """A step that takes as long for one sample as for many."""
    report = profiled(
        DataLoader(range(4000), batch_size=1), lambda batch: work(100), try_advice=True
    )  # fmt: skip
    assert not report.is_loader_bound
    assert report.advice[0].what.startswith("batch_size=4 instead of 1")
    assert "learning rate × 4 for SGD" in report.advice[0].what
    tried = report.advice[0].tried_s
    assert tried is not None and tried < report.step_s / 2


def test_tiny_batch_is_no_advice_where_a_step_takes_as_long_for_each_sample() -> None:
    report = profiled(
        DataLoader(range(4000), batch_size=4), lambda batch: work(40 * len(batch)), try_advice=True
    )  # fmt: skip
    assert not report.advice


def test_a_step_that_is_not_made_for_larger_batches_is_reported_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def step(batch: Any) -> None:
        work(100)
        assert len(batch) == 2, "made for two"

    report = profiled(DataLoader(range(4000), batch_size=2), step, try_advice=True)
    assert not report.advice and "your loader is not the problem" in report.verdict
    assert "not tried: a larger batch: AssertionError: made for two" in caplog.text


def test_chunks_that_do_not_fit(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        rows = np.random.default_rng(0).integers(0, 50, (512, 32, 64)).astype(np.float32)
        file.create_dataset("rows", data=rows, chunks=(128, 32, 64), compression="gzip")
    loader = DataLoader(Rows(tmp_path / "x.h5"), batch_size=8, shuffle=True)
    report = profiled(loader, is_nothing)
    assert report.stall[0].name == "read"
    assert "FastHDF5Dataset('x.h5', ['rows'])" in report.advice[0].what


def test_slow_store(photo_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount of a bucket: a file's first byte comes late, however many are asked for."""
    opened = ImageFolder(str(photo_tree)).loader

    def late(path: str) -> Any:
        wait(0.02)
        return opened(path)

    crop = Compose([RandomResizedCrop(32), ToTensor()])
    dataset = images(photo_tree, crop)
    dataset.loader = late
    report = profiled(DataLoader(dataset, batch_size=4, num_workers=1), is_nothing)
    assert report.costs.read_idle_s > 0.5 * report.costs.wall_s
    assert report.advice[0].what.startswith("num_workers=") and "for storage" in report.advice[0].why


def test_too_many_workers() -> None:
    cores = fastpipe.tools.diagnosis.available_cpus()
    loader = DataLoader(Made(lambda: work(30)), batch_size=2, num_workers=6 * cores)
    report = profiled(loader, is_nothing)
    assert report.costs.delay_share > 0.3
    assert not report.advice or f"num_workers={cores} instead of {6 * cores}" in report.advice[0].what


def test_starved_compute(photo_tree: Path) -> None:
    crop = Compose([RandomResizedCrop(96), ToTensor()])
    loader = DataLoader(images(photo_tree, crop), batch_size=8)
    report = profiled(loader, lambda batch: work(5))
    assert report.is_loader_bound and report.stall_share > 0.3
    assert "let fastpipe make the batches of ImageFolder" in report.advice[0].what


def test_compute_bound() -> None:
    report = profiled(DataLoader(range(4000), batch_size=2), lambda batch: work(400))
    assert not report.is_loader_bound and not report.advice
    assert "your loader is not the problem" in report.verdict
