"""``fastpipe.autotune_batch_size``: the batches that fit, and the fastest of them."""

from __future__ import annotations

import json
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
from fastpipe.tools.batch_sizes import BatchSizes, SizeTrial
from fastpipe.tools.steps import DeviceMemory

BATCH = [torch.zeros(4, 3)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock()
    monkeypatch.setattr(batch_sizes, "perf_counter", clock)
    return clock


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MemoryError(),
     RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")],
)  # fmt: skip
def test_the_largest_batch_that_fits_is_found(error: Exception, clock: ManualClock) -> None:
    seen: list[int] = []

    def step(batch: torch.Tensor) -> None:
        seen.append(len(batch))
        if len(batch) > most:
            raise error
        clock.now += 0.1

    most = 44
    found = fastpipe.autotune_batch_size(step, BATCH, seconds=60)
    assert found.now == 4 and found.largest == 40  # 32 fits, 64 and 48 do not
    refused = {one.size for one in found.trials if one.why}
    assert refused == {48, 64} and {one.size for one in found.trials} - refused == {4, 8, 16, 32, 40}
    assert seen.count(64) == seen.count(48) == 1
    content = json.loads(found.json())
    assert (content["best"], content["largest"]) == (found.best, 40)
    assert content["accumulation"] == list(found.accumulation)
    assert [(one["size"], one["why"]) for one in content["trials"]] == [
        (one.size, one.why) for one in found.trials
    ]
    most = 1  # smaller ones are tried where the loader's does not fit
    found = fastpipe.autotune_batch_size(step, BATCH, target=6, seconds=60)
    assert found.best == found.largest == 1 and found.accumulation == (1, 6)
    most = 0
    with pytest.raises(OptionError, match="no batch fits, not even one sample"):
        fastpipe.autotune_batch_size(step, BATCH)
    error = RuntimeError("shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="shapes cannot"):
        fastpipe.autotune_batch_size(step, BATCH)


def test_the_best_is_the_smallest_that_is_about_as_fast(clock: ManualClock) -> None:
    def step(batch: torch.Tensor) -> None:
        clock.now += max(0.04, 0.005 * len(batch))  # from 8 samples on, as long as they are many

    found = fastpipe.autotune_batch_size(step, [torch.zeros(1)], target=100, seconds=60)
    assert found.best == 8 and found.accumulation == (5, 20) and found.largest >= 16
    assert "would not be faster" in found.notes[0]
    for text in ("batch_size=8", "learning rate", "100 samples an update: 20 batches of 5"):
        assert text in str(found)
    found = fastpipe.autotune_batch_size(step, BATCH, seconds=0.1)
    assert found.best == found.largest == 4
    assert found.notes == ("no larger size than 4 was tried: the time limit was reached",)


@pytest.mark.slow
def test_sizes_above_the_memory_budget_are_not_tried(clock: ManualClock) -> None:
    base, seen = DeviceMemory(BATCH, None).peak(), []
    if base is None:
        pytest.skip("without /proc memory is unknown; run it on Linux")

    def step(batch: torch.Tensor) -> None:
        seen.append(len(batch))
        np.ones(len(batch) << 22, np.uint8).sum()  # 4 MB a sample
        clock.now += 0.1

    found = fastpipe.autotune_batch_size(step, BATCH, memory_budget=base + (400 << 20), seconds=60)
    assert 32 <= found.largest < 128
    above = [one for one in found.trials if one.why]
    assert above and all("would take" in one.why or "took" in one.why for one in above)
    assert max(seen) < 192  # one that was expected to take twice as much is not begun


def test_memory_is_that_of_the_cuda_device_or_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = DeviceMemory([np.zeros(2)], None)
    assert memory.peak() is None or (memory.limit or 0) > (memory.peak() or 0) > 0
    calls: list[str] = []
    cuda = SimpleNamespace(
        is_available=lambda: True, mem_get_info=lambda: (900, 2000), memory_reserved=lambda: 100,
        reset_peak_memory_stats=lambda: calls.append("reset"), max_memory_reserved=lambda: 700,
        synchronize=lambda: calls.append("synchronize"), empty_cache=lambda: calls.append("empty"),
    )  # fmt: skip
    monkeypatch.setattr(torch, "cuda", cuda)
    memory = DeviceMemory({"x": BATCH}, None)
    assert memory.limit == 900 and DeviceMemory(BATCH, 50).limit == 50
    memory.begin()
    memory.synchronize()
    memory.release()
    assert memory.peak() == 700 and calls == ["reset", "synchronize", "empty"]
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
def test_wrong_arguments_are_refused(batches: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        fastpipe.autotune_batch_size(print, batches, **options)


@given(best=st.integers(1, 300), target=st.integers(1, 2000))
def test_accumulated_batches_make_the_target(best: int, target: int) -> None:
    size, steps = BatchSizes(best, best, best, target, (SizeTrial(best, 1.0),), ()).accumulation
    assert size * steps == target and 1 <= size <= best
