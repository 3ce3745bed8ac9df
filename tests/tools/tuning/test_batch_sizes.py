"""``fastpipe.autotune_batch_size``: what fits, and what is fastest."""

from __future__ import annotations

import json
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from clock import ManualClock
from hypothesis import given
from hypothesis import strategies as st

import fastpipe
from fastpipe.errors import OptionError
from fastpipe.tools import batch_sizes
from fastpipe.tools import steps as device_memory
from fastpipe.tools.batch_sizes import BatchSizes, SizeTrial
from fastpipe.tools.batches import resized, size_of
from fastpipe.tools.steps import DeviceMemory

BATCH = [torch.zeros(4, 3)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock()
    monkeypatch.setattr(batch_sizes, "perf_counter", clock)
    return clock


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MemoryError(),
     RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")],
)  # fmt: skip
def test_the_largest_that_fits_is_found_and_no_larger_one_kept(error: Exception, clock: ManualClock) -> None:
    seen: list[int] = []

    def step(batch: torch.Tensor) -> None:
        seen.append(len(batch))
        if len(batch) > 44:
            raise error
        clock.now += 0.1

    found = fastpipe.autotune_batch_size(step, BATCH, seconds=60)
    assert found.now == 4 and found.largest == 40  # 32 fits, 64 and 48 do not
    assert {one.size: bool(one.why) for one in found.trials} == {
        4: False, 8: False, 16: False, 32: False, 40: False, 48: True, 64: True
    }  # fmt: skip
    assert seen.count(64) == seen.count(48) == 1
    told = json.loads(found.json())
    assert (told["best"], told["largest"], told["accumulation"]) == (found.best, 40, list(found.accumulation))
    assert {one["size"]: one["why"] for one in told["trials"]} == {one.size: one.why for one in found.trials}


def test_smaller_sizes_are_tried_where_the_loaders_does_not_fit() -> None:
    def step(batch: torch.Tensor) -> None:
        if len(batch) > 1:
            raise MemoryError

    found = fastpipe.autotune_batch_size(step, BATCH, target=6, seconds=60)
    assert found.best == found.largest == 1 and found.accumulation == (1, 6)


def test_nothing_fits() -> None:
    def step(batch: torch.Tensor) -> None:
        raise MemoryError

    with pytest.raises(OptionError, match="no batch fits, not even one sample"):
        fastpipe.autotune_batch_size(step, BATCH)


def test_other_errors_are_the_steps() -> None:
    def step(batch: torch.Tensor) -> None:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot"):
        fastpipe.autotune_batch_size(step, BATCH)


def test_the_best_is_the_smallest_that_is_about_as_fast(clock: ManualClock) -> None:
    def step(batch: torch.Tensor) -> None:
        clock.now += max(0.04, 0.005 * len(batch))  # from 8 samples on, as long as they are many

    found = fastpipe.autotune_batch_size(step, [torch.zeros(1)], target=100, seconds=60)
    assert found.best == 8 and found.accumulation == (5, 20)
    assert "would not be faster" in found.notes[0] and found.largest >= 16
    text = str(found)
    assert (
        "batch_size=8" in text
        and "learning rate" in text
        and "100 samples an update: 20 batches of 5" in text
    )


def test_sizes_that_memory_will_not_do_for_are_not_tried(clock: ManualClock) -> None:
    if DeviceMemory(BATCH, None).peak() is None:
        pytest.skip("without /proc memory is unknown; run it on Linux")
    base, seen = DeviceMemory(BATCH, None).peak() or 0, []

    def step(batch: torch.Tensor) -> None:
        seen.append(len(batch))
        np.ones(len(batch) << 22, np.uint8).sum()  # 4 MB a sample
        clock.now += 0.1

    found = fastpipe.autotune_batch_size(step, BATCH, memory_budget=base + (400 << 20), seconds=60)
    assert 32 <= found.largest < 128
    above = [one for one in found.trials if one.why]
    assert above and all("would take" in one.why or "took" in one.why for one in above)
    assert max(seen) < 192  # one that was expected to take twice as much is not begun


def test_the_time_is_kept(clock: ManualClock) -> None:
    def step(batch: torch.Tensor) -> None:
        clock.now += 0.1

    found = fastpipe.autotune_batch_size(step, BATCH, seconds=0.1)
    assert found.best == found.largest == 4 and found.notes == (
        "nothing above 4 was tried: the time was over",
    )


def test_memory_of_a_cuda_device_is_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    cuda = SimpleNamespace(
        is_available=lambda: True, mem_get_info=lambda: (900, 2000), memory_reserved=lambda: 100,
        reset_peak_memory_stats=lambda: told.append("reset"), max_memory_reserved=lambda: 700,
        synchronize=lambda: told.append("synchronize"), empty_cache=lambda: told.append("empty"),
    )  # fmt: skip
    monkeypatch.setattr(torch, "cuda", cuda)
    memory = DeviceMemory({"x": BATCH}, None)
    assert memory.limit == 900 and DeviceMemory(BATCH, 50).limit == 50
    memory.begin()
    memory.synchronize()
    memory.release()
    assert memory.peak() == 700 and told == ["reset", "synchronize", "empty"]
    assert memory.is_shortage(torch.OutOfMemoryError("CUDA out of memory"))
    assert not memory.is_shortage(ValueError("out of memory"))
    assert DeviceMemory([np.zeros(3)], None).limit != memory.limit  # whose arrays are not on a device


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        ([], {}, "the list has no batch"),
        (["text"], {}, "no array is in this str"),
        (BATCH, {"target": 0}, "target must be from 1, got 0"),
        (BATCH, {"largest": -1}, "largest must be from 1"),
        (BATCH, {"seconds": 0}, "seconds must be above 0"),
    ],
)
def test_bad_input_is_told(batches: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        fastpipe.autotune_batch_size(print, batches, **options)


@given(best=st.integers(1, 300), target=st.integers(1, 2000))
def test_accumulated_batches_make_the_target(best: int, target: int) -> None:
    size, steps = BatchSizes(best, best, best, target, (SizeTrial(best, 1.0),), ()).accumulation
    assert size * steps == target and 1 <= size <= best


Pair = namedtuple("Pair", "image label")


@given(count=st.integers(1, 5), size=st.integers(1, 17))
def test_a_resized_batch_has_the_samples_of_the_first(count: int, size: int) -> None:
    image = torch.arange(count * 2).reshape(count, 2)
    batch = {
        "pair": Pair(image, np.arange(count)), "names": [str(at) for at in range(count)], "scale": torch.tensor(2.0),
        "parts": (image, [image.float()]), "split": "train", "nothing": None,
    }  # fmt: skip
    made = resized(batch, size)
    wanted = [at % count for at in range(size)]
    assert size_of(made) == size
    assert type(made["pair"]) is Pair and made["pair"].image.tolist() == image[wanted].tolist()
    assert made["pair"].label.tolist() == wanted and made["names"] == [str(at) for at in wanted]
    assert made["parts"][1][0].tolist() == image[wanted].float().tolist()
    assert made["scale"] is batch["scale"] and made["split"] == "train" and made["nothing"] is None


def test_the_processs_own_memory_is_known_where_there_is_no_device() -> None:
    memory = DeviceMemory([np.zeros(2)], None)
    if memory.peak() is None:
        assert memory.limit is None or memory.limit > 0
        return
    assert memory.limit is not None and memory.limit > (memory.peak() or 0) > 0
    assert device_memory.DeviceMemory([np.zeros(2)], 7).limit == 7
