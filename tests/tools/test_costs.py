"""Costs of batches: which of a loader's are counted, copies to a GPU, and batches that are repeated."""

from __future__ import annotations

import select
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from clock import ManualClock
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch
from torch.utils.data import DataLoader

import fastpipe
from fastpipe.tools import costs, diagnosis
from fastpipe.tools.batches import Replay, rebuilt, resized, size_of
from fastpipe.tools.costs import Copies, Epoch, copies_of


def epochs_of(patch: MonkeyPatch, length: int, skipped: int, seconds: float, **options: Any) -> list[Epoch]:
    """Epochs of a loader that begins with a second, then makes a batch in each further one; steps take half."""
    clock, alive, looks, found = ManualClock(0.0), [], [], []

    def begin() -> Iterator[int]:
        clock.now += 1.0
        alive.append(1)
        try:
            for number in range(length):
                clock.now += 1.0
                yield number
        finally:
            alive.pop()

    def look() -> int:
        looks.append(1)
        return len(looks)

    patch.setattr(costs, "perf_counter", clock)
    for epoch in costs.epochs(begin, skipped, seconds, step=lambda _: clock.sleep(0.5), look=look, **options):
        assert bool(alive) == (not epoch.is_over)  # its workers can be looked at
        found.append(epoch)
    assert not alive
    return found


def test_the_first_batches_are_left_out_where_there_is_time(monkeypatch: MonkeyPatch) -> None:
    taken = partial(epochs_of, monkeypatch)
    [epoch] = taken(100, 2, 20.0)
    assert epoch.taken - epoch.batches == 2 and not epoch.is_over
    assert epoch.seconds == 1.5 * epoch.batches > 20 and epoch.waited == 1.0 * epoch.batches
    assert epoch.began == 2  # the look before the first of them
    [epoch] = taken(100, 3, 5.0, limit=100.0)  # some turns of all workers, however short the time is
    assert epoch.taken == 12
    [epoch] = taken(100, 30, 2.0)  # too short to leave some out: all of it, with the start
    assert epoch.taken == epoch.batches < 30 and epoch.seconds == 2.0 + 1.5 * epoch.batches - 1.0
    assert epoch.began == 1

    for counts_start, batches, seconds in ((False, 8, 12.0), (True, 10, 16.0)):
        first, rest = taken(10, 2, 20.0, counts_start=counts_start, limit=100.0)
        assert first.is_over and (first.batches, first.taken, first.seconds) == (batches, 10, seconds)
        assert not rest.is_over and rest.seconds == 1.5 * rest.batches  # enough was seen in the midst of it
    assert [(epoch.batches, epoch.seconds) for epoch in taken(5, 3, 1.0, limit=100.0)] == [(5, 8.5)]
    [epoch] = taken(0, 2, 1.0)
    assert (epoch.batches, epoch.taken, epoch.is_over, epoch.waited) == (0, 0, True, 1.0)
    assert costs.alone(lambda: iter([1]), 0, 1.0) is None, "too few to measure"


def test_copies_to_a_gpu_are_timed_from_memory_as_it_is_and_pinned(monkeypatch: MonkeyPatch) -> None:
    """The GPU imitates torch's: it copies a byte in a microsecond, from pinned memory in a tenth of that."""
    clock, pinned = ManualClock(), set[int]()

    def pin(tensor: Any) -> Any:
        copy = tensor.clone()
        pinned.add(copy.data_ptr())
        return copy

    def copy(tensor: Any, device: Any, **options: Any) -> Any:
        is_pinned = tensor.data_ptr() in pinned
        assert (device, options.get("non_blocking", False)) in (("cuda", is_pinned), ("cuda", False))
        clock.now += tensor.numel() * tensor.element_size() * (1e-7 if is_pinned else 1e-6)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in pinned)
    monkeypatch.setattr(costs, "perf_counter", clock)
    image = torch.zeros(100, dtype=torch.uint8)
    found = copies_of({"image": image, "rest": ["a", (torch.zeros(25),)], "none": torch.zeros(0)})
    assert found == Copies(200, pytest.approx(200e-6), pytest.approx(20e-6))
    batch = image.pin_memory()
    count = len(pinned)
    found = copies_of([batch])
    assert found is not None and found.as_it_is_s == pytest.approx(found.pinned_s) and len(pinned) == count
    assert copies_of(["a", 1]) is None

    monkeypatch.setattr(
        torch.Tensor, "pin_memory", Mock(side_effect=RuntimeError("CUDA error: out of memory"))
    )
    assert copies_of(torch.zeros(3)) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert copies_of(torch.zeros(3)) is None


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("pinned", "copy_s", "is_advised"), [(0, 4e-3, True), (1, 4e-3, False), (0, 1e-5, False)]
)
def test_pinning_is_advised_where_it_is_measured_to_be_faster(
    monkeypatch: MonkeyPatch, pinned: bool, copy_s: float, is_advised: bool
) -> None:
    monkeypatch.setattr(diagnosis, "copies_of", lambda batch: Copies(12, copy_s, copy_s / 10))
    loader: Any = DataLoader([torch.zeros(3)] * 4000, batch_size=4)
    loader.pin_memory = pinned
    # In its step a device computes.
    report = fastpipe.profile(loader, lambda batch: select.select([], [], [], 5e-3), seconds=0.3)
    found = [one for one in report.advice if one.what.startswith("pin_memory=True (test_costs.py:")]
    assert bool(found) is is_advised and "is copied to the GPU in" in str(report)
    assert all(one.predicted_s == pytest.approx(report.step_s - 0.9 * copy_s) for one in found)


Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    words: list[str]


class OwnInit(dict):  # type: ignore[type-arg]
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(first=first, second=second)


class Frozen(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        raise KeyError(key)


KINDS: list[Any] = [
    {"x": [1, {"y": 2}]}, UserDict({"x": [1]}), OrderedDict(x=[1]), defaultdict(list, x=[1]), OwnInit([1], 2),
    [[1], (2, [3])], Pair([1], 2), Sample(torch.ones(2), ["a"]), MappingProxyType({"x": 1}), Frozen(x=1),
    list(range(1000)), None, "words", 3,
]  # fmt: skip


def test_a_batch_of_any_kind_is_rebuilt_in_new_containers() -> None:
    for batch in KINDS:
        again = rebuilt(batch)
        assert type(again) is type(batch) and (again == batch or isinstance(batch, Sample))
        if isinstance(batch, (list, dict, UserDict)) and not isinstance(batch, Frozen):
            again.clear()
            assert batch


def test_a_repeated_batch_is_what_it_was_whatever_a_step_does_to_it() -> None:
    with torch.inference_mode():
        uncounted = torch.ones(2)  # torch does not count changes of such a tensor
    batches = Replay(
        {"x": torch.full((3,), 8.0), "kept": torch.ones(2), "more": {"labels": [1, 2]}, "array": np.ones(2),
         "sample": Sample(torch.ones(1), ["a"]), "uncounted": uncounted}
    )  # fmt: skip
    values, kept = [], []
    for _ in range(6):
        batch = next(batches)
        kept.append((batch["kept"], batch["uncounted"]))
        values.append(float(batch.pop("x").div_(2)[0]))
        assert batch["more"].pop("labels").pop() == 2 and batch["sample"].words == ["a"]
        batch["sample"].words.clear()
    assert values == [4, *[2] * 5]  # the first change is seen when it was made
    assert all(one is kept[0][0] and other is uncounted for one, other in kept), "they are not copied"


@given(count=st.integers(1, 5), size=st.integers(1, 17))
def test_a_resized_batch_has_the_samples_of_the_first(count: int, size: int) -> None:
    image = torch.arange(count * 2).reshape(count, 2)
    batch = {
        "pair": Pair(image, np.arange(count)), "names": [str(at) for at in range(count)],
        "scale": torch.tensor(2.0), "parts": (image, [image.float()]), "split": "train", "nothing": None,
    }  # fmt: skip
    made = resized(batch, size)
    wanted = [at % count for at in range(size)]
    assert size_of(made) == size
    assert type(made["pair"]) is Pair and made["pair"].x.tolist() == image[wanted].tolist()
    assert made["pair"].y.tolist() == wanted and made["names"] == [str(at) for at in wanted]
    assert made["parts"][1][0].tolist() == image[wanted].float().tolist()
    assert made["scale"] is batch["scale"] and made["split"] == "train" and made["nothing"] is None
