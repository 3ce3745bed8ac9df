"""``num_workers="auto"``: what is measured, and what follows from it."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset
from torchvision import transforms as v1

from fastpipe import FastImageFolder, FastLoader
from fastpipe.torch import auto_workers
from fastpipe.torch.auto_workers import choose_workers

STEADY = v1.Compose([v1.CenterCrop(20), v1.ToTensor()])


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_workers, "default_threads", lambda: 4)


@pytest.mark.parametrize(
    ("here", "alone", "batch_size", "expected"),
    [
        (1000, 300, 64, 0),  # 1200 in four workers: not worth it
        (1000, 400, 64, 4),
        (100_000, 100_000, 64, 0),  # a batch takes less than to send it
        (100, 100, 1, 4),
    ],
)
def test_the_choice(here: float, alone: float, batch_size: int, expected: int) -> None:
    chosen, why = auto_workers._judge(here, alone, 4, batch_size)
    assert chosen == expected
    assert f"{here:,.0f} samples/s here" in why


class _Watched:
    """Notes in which process it was used."""

    def __init__(self, cost: int = 0) -> None:
        self.used_in = memoryview(mmap.mmap(-1, 8)).cast("q")  # shared with forked processes
        self.cost = cost

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        self.used_in[0] = os.getpid()
        for _ in range(self.cost):
            pass
        return torch.zeros(1)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time for a process that gets no core for a while."""
    monkeypatch.setattr(auto_workers, "_ALL_S", 30.0)


@pytest.mark.usefixtures("patient")
def test_samples_are_made_in_another_process_which_is_gone() -> None:
    dataset = _Watched(100_000)
    before = torch.get_rng_state()
    chosen, _ = choose_workers(dataset, None, 64)
    assert chosen == 4
    assert dataset.used_in[0] not in (0, os.getpid())
    assert not os.path.exists(f"/proc/{dataset.used_in[0]}")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("patient")
def test_what_costs_nothing_stays_here() -> None:
    assert choose_workers(TensorDataset(torch.zeros(100, 2)), None, 8)[0] == 0


class _Broken:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        raise ValueError("broken")


class _Stuck(_Broken):
    def __getitem__(self, index: int) -> Any:
        threading.Event().wait()


@pytest.mark.parametrize("kind", [_Broken, _Stuck])
def test_nothing_measured(kind: Any) -> None:
    """The error, or the wait, is for the iteration: where torch's loader has it."""
    assert choose_workers(kind(), None, 8) == (4, "no batch and no sample was ready within 0.9 s")


def test_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_workers([], None, 8) == (0, "the dataset has no samples to measure")
    assert choose_workers(iter(()), None, 8)[0] == 0
    monkeypatch.setattr(auto_workers, "default_threads", lambda: 1)
    assert choose_workers([1], None, 8) == (0, "this process may use one core only")


def test_a_loader_reports_what_it_chose(photo_tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fastpipe"):
        loader = FastLoader(
            FastImageFolder(photo_tree, STEADY), 4, num_workers="auto", persistent_workers=True, prefetch_factor=3,
            multiprocessing_context="fork",
        )  # fmt: skip
    assert f"num_workers='auto' is {loader.num_workers}: " in caplog.text
    assert "samples/s here" in repr(loader.plan)
    assert isinstance(loader.num_workers, int)
    expected = FastLoader(FastImageFolder(photo_tree, STEADY), 4)
    for (images, labels), (others, targets) in zip(loader, expected, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, targets)


@pytest.mark.parametrize("workers", [0, 4])
def test_arguments_about_workers_go_with_them(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr(auto_workers, "choose_workers", lambda *_: (workers, "so it is"))
    loader = FastLoader(
        [1, 2, 3], num_workers="auto", persistent_workers=True, prefetch_factor=3, timeout=9,
        multiprocessing_context="fork",
    )  # fmt: skip
    assert loader.num_workers == workers
    assert loader.persistent_workers == (workers > 0)
    assert loader.prefetch_factor == (3 if workers else None)
    assert loader.timeout == (9 if workers else 0)
    assert "(num_workers='auto': so it is)" in repr(loader.plan)


def test_garbage_of_the_parent_is_left_alone() -> None:
    """What may only be freed where its threads are, such as TensorFlow's functions."""
    freed_in = memoryview(mmap.mmap(-1, 8)).cast("q")

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            freed_in[0] = os.getpid()

    class Collecting(_Watched):
        def __getitem__(self, index: int) -> torch.Tensor:
            gc.collect()
            return super().__getitem__(index)

    gc.disable()
    try:
        Garbage()
        choose_workers(Collecting(), None, 8)
        assert freed_in[0] == 0
        loader = FastLoader(
            Collecting(), 8, num_workers=1, workers="processes", multiprocessing_context="fork"
        )
        assert len(list(loader)) == 13
        assert freed_in[0] == 0
        gc.collect()
        assert freed_in[0] == os.getpid()
    finally:
        gc.enable()
