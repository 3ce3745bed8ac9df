"""Copies of a batch to a GPU, by a device that imitates torch's: none of this has seen a GPU."""

from __future__ import annotations

import select
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import fastpipe
from fastpipe.tools import costs as copying
from fastpipe.tools import diagnosis
from fastpipe.tools.costs import Copies, copies_of


class Bus:
    """Copies one byte in a microsecond, from pinned memory in a tenth of that; its clock stands else."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pinned: set[int] = set()
        self.asked: list[Any] = []

    def pin(self, tensor: Any) -> Any:
        copy = tensor.clone()
        self.pinned.add(copy.data_ptr())
        return copy

    def copy(self, tensor: Any, device: Any, **options: Any) -> Any:
        assert device == "cuda"
        is_pinned = tensor.data_ptr() in self.pinned
        self.asked.append((is_pinned, options))
        self.now += tensor.numel() * tensor.element_size() * (1e-7 if is_pinned else 1e-6)
        return tensor


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Bus:
    bus = Bus()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.Tensor, "to", lambda *args, **options: bus.copy(*args, **options))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: bus.pin(tensor))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in bus.pinned)
    monkeypatch.setattr(copying, "perf_counter", lambda: bus.now)
    return bus


def test_copies_are_timed_from_memory_as_it_is_and_pinned(bus: Bus) -> None:
    batch = {
        "image": torch.zeros(100, dtype=torch.uint8),
        "rest": ["a", (torch.zeros(25),)],
        "none": torch.zeros(0),
    }
    found = copies_of(batch)
    assert found == Copies(200, pytest.approx(200e-6), pytest.approx(20e-6))  # type: ignore[arg-type]
    assert {(is_pinned, tuple(options)) for is_pinned, options in bus.asked} == {
        (False, ()), (True, ("non_blocking",))
    }  # fmt: skip


def test_what_is_pinned_already_is_not_copied_to_be_so(bus: Bus) -> None:
    batch = bus.pin(torch.zeros(100, dtype=torch.uint8))
    count = len(bus.pinned)
    found = copies_of([batch])
    assert found is not None and found.as_it_is_s == pytest.approx(found.pinned_s)
    assert len(bus.pinned) == count


def test_without_a_gpu_or_tensors_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert copies_of(torch.zeros(3)) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert copies_of(["a", 1]) is None


def test_memory_that_cannot_be_pinned_is_not_measured(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensor: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", fail)
    assert copies_of(torch.zeros(3)) is None


class Zeros(Dataset[Any]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3)


@pytest.mark.parametrize(
    ("pinned", "copy_s", "is_told"), [(False, 4e-3, True), (True, 4e-3, False), (False, 1e-5, False)]
)
def test_pinning_is_advised_where_it_is_measured_to_bring_something(
    monkeypatch: pytest.MonkeyPatch, pinned: bool, copy_s: float, is_told: bool
) -> None:
    monkeypatch.setattr(diagnosis, "copies_of", lambda batch: Copies(12, copy_s, copy_s / 10))
    loader: Any = DataLoader(Zeros(), batch_size=4)
    loader.pin_memory = pinned

    def step(batch: Any) -> None:
        select.select([], [], [], 5e-3)  # a device computes meanwhile

    report = fastpipe.profile(loader, step, seconds=0.3)
    found = [one for one in report.advice if one.what.startswith("pin_memory=True (test_copying.py:")]
    assert bool(found) is is_told and "is copied to the GPU in" in str(report)
    assert all(one.predicted_s == pytest.approx(report.step_s - 0.9 * copy_s) for one in found)
