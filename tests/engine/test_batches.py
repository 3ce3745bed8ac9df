from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from fastpipe.core.bad_samples import BadSampleLog, Item
from fastpipe.core.batches import BatchMaker, PendingBatch
from fastpipe.core.clock import StageClock
from fastpipe.core.pool import ThreadPool
from fastpipe.core.types import Box, Size
from fastpipe.errors import BadSampleError, ClosedError, TooManyBadSamplesError
from fastpipe.options import BadSamples

WAIT_S = 60.0


class Image:
    """An image whose pixels are its name's number."""

    size = Size(2, 3)

    def __init__(self, blob: bytes) -> None:
        self.value = int(blob)
        self.given: dict[Box, Any] = {}

    def encoded(self) -> bytes | None:
        return None if self.value == 3 else str(self.value).encode()

    def give(self, box: Box, pixels: Any) -> None:
        self.given[box] = pixels

    def region(self, box: Box) -> Any:
        if box in self.given:
            return self.given[box]
        if self.value % 10 == 8:
            raise ValueError("bits end early")
        return np.full((box.height, box.width, 3), self.value, np.uint8)

    def info(self) -> dict[Any, Any]:
        return {}

    def pil(self) -> Any:
        if self.value % 10 == 8:
            raise ValueError("bits end early")
        return self.value


class Plan:
    """Adds the parameter to the pixels; fails on 7 as a transform does."""

    def part(self, image: Any, parameters: Any) -> Box | None:
        return None if image.value == 2 else Box(0, 0, 1, 1)

    def apply(self, image: Any, parameters: Any, out: Any = None) -> Any:
        value = int(image.region(Box(0, 0, 1, 1))[0, 0, 0])
        if value % 10 == 7:
            raise ZeroDivisionError("a transform's own error")
        result = value + parameters[0]
        if out is None:
            return result
        out[:] = result
        return None


class Decoder:
    """Decodes batches, but what ends early."""

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []

    def decode(self, parts: Sequence[tuple[bytes, Box]]) -> list[Any]:
        self.asked.append([blob for blob, _ in parts])
        return [
            None if blob.endswith(b"8") else np.full((box.height, box.width, 3), int(blob), np.uint8)
            for blob, box in parts
        ]

    def describe(self) -> str:
        return "a decoder of batches"


def _read(path: str) -> bytes:
    if path == "9":
        raise FileNotFoundError(2, "No such file or directory", path)
    return path.encode()


def _open(blob: bytes, path: str) -> Image:
    if blob == b"5":
        raise OSError("cannot identify image file")
    return Image(blob)


@pytest.fixture(params=[0, 1, 3], ids=["here", "1 thread", "3 threads"])
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPool | None]:
    made = ThreadPool(request.param) if request.param else None
    yield made
    if made:
        made.close()


_decoders: list[Any] = [None]


@pytest.fixture(params=[None, Decoder], ids=["each by its thread", "all at once"], autouse=True)
def decoder(request: pytest.FixtureRequest) -> Iterator[Decoder | None]:
    """Who decodes in the makers of a test."""
    _decoders[0] = request.param and request.param()
    yield _decoders[0]
    _decoders[0] = None


def _maker(bad: BadSamples | str = "raise", read: Callable[[str], bytes] = _read) -> BatchMaker:
    options = BadSamples.of(bad)
    return BatchMaker(read, _open, options.policy, BadSampleLog(options), StageClock(), _decoders[0])


def _items(values: Sequence[int]) -> list[Item]:
    return [Item(index, str(value), value % 2) for index, value in enumerate(values)]


def _parameters(count: int) -> Any:
    return np.arange(count, dtype=np.float64).reshape(count, 1) * 100


def _values(batch: PendingBatch) -> list[Any]:
    return [batch.values[n] for n in batch.wait()]


def test_each_sample_gets_its_own_parameters(pool: ThreadPool | None) -> None:
    batch = _maker().start(pool, _items([1, 2, 3]), Plan(), _parameters(3))
    assert _values(batch) == [1, 102, 203]


def test_samples_are_written_into_the_batchs_memory(pool: ThreadPool | None) -> None:
    memory = np.zeros((3, 2, 2), np.int64)
    batch = _maker().start(pool, _items([1, 2, 3]), Plan(), _parameters(3), memory)
    assert batch.wait() == [0, 1, 2]
    assert memory.reshape(3, 4).tolist() == [[1] * 4, [102] * 4, [203] * 4]


def test_finish_runs_where_the_sample_was_made(pool: ThreadPool | None) -> None:
    seen: list[tuple[Any, int, threading.Thread]] = []

    def finish(value: Any, number: int) -> Any:
        seen.append((value, number, threading.current_thread()))
        return -value

    batch = _maker().start(pool, _items([1, 2]), Plan(), _parameters(2), finish=finish)
    assert _values(batch) == [-1, -102]
    assert {(value, number) for value, number, _ in seen} == {(1, 0), (102, 1)}
    assert {thread is threading.main_thread() for *_, thread in seen} == {pool is None}


def test_an_empty_batch(pool: ThreadPool | None) -> None:
    assert _maker().start(pool, [], Plan(), _parameters(0)).wait() == []


def test_stages_are_timed(pool: ThreadPool | None) -> None:
    maker = _maker()
    maker.start(pool, _items([1, 2, 3]), Plan(), _parameters(3)).wait()
    assert set(maker.clock.totals()) == {"read", "decode", "transform"}  # type: ignore[attr-defined]


# ---- raise ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "cause"), [(9, FileNotFoundError), (5, OSError), (8, ValueError)], ids=["read", "open", "decode"]
)
def test_raise_names_the_first_bad_sample(pool: ThreadPool | None, bad: int, cause: type[Exception]) -> None:
    batch = _maker().start(pool, _items([1, bad, 2, bad]), Plan(), _parameters(4))
    with pytest.raises(BadSampleError) as caught:
        batch.wait()
    assert (caught.value.index, caught.value.path) == (1, str(bad))
    assert type(caught.value.__cause__) is cause
    assert repr(str(bad)) in str(caught.value)


@pytest.mark.parametrize("policy", ["raise", "replace", "skip"])
def test_a_transforms_error_keeps_its_type_whatever_the_policy(pool: ThreadPool | None, policy: str) -> None:
    maker = _maker(policy)
    batch = maker.start(pool, _items([1, 7]), Plan(), _parameters(2))
    with pytest.raises(ZeroDivisionError, match="own error") as caught:
        batch.wait()
    assert any(
        "sample 1" in note and "'7'" in note for note in getattr(caught.value, "__notes__", ["sample 1 '7'"])
    )
    assert maker.bad.count == 0


def test_an_error_of_finish_is_one_of_a_transform(pool: ThreadPool | None) -> None:
    def finish(value: Any, number: int) -> Any:
        raise LookupError("in finish")

    batch = _maker("skip").start(pool, _items([1]), Plan(), _parameters(1), finish=finish)
    with pytest.raises(LookupError, match="in finish"):
        batch.wait()


def test_the_first_error_by_position_is_raised_whoever_is_first_in_time() -> None:
    second_failed = threading.Event()

    def read(path: str) -> bytes:
        if path == "5":
            assert second_failed.wait(WAIT_S)
        if path == "9":
            second_failed.set()
        return _read(path)

    pool = ThreadPool(2)
    batch = _maker(read=read).start(pool, _items([5, 9]), Plan(), _parameters(2))
    with pytest.raises(BadSampleError) as caught:
        batch.wait()
    assert caught.value.index == 0
    pool.close()


# ---- skip -----------------------------------------------------------------------------------


def test_skip_says_which_samples_are_there(pool: ThreadPool | None) -> None:
    maker = _maker("skip")
    batch = maker.start(pool, _items([9, 1, 8, 2, 5]), Plan(), _parameters(5))
    assert batch.wait() == [1, 3]
    assert _values(batch) == [101, 302]
    assert maker.bad.count == 3


def test_skip_everything(pool: ThreadPool | None) -> None:
    assert _maker("skip").start(pool, _items([9, 8, 5]), Plan(), _parameters(3)).wait() == []


def test_the_error_budget_ends_skipping(pool: ThreadPool | None) -> None:
    maker = _maker(BadSamples("skip", max_errors=1))
    assert maker.start(pool, _items([9, 1]), Plan(), _parameters(2)).wait() == [1]
    batch = maker.start(pool, [Item(5, "8", 0)], Plan(), _parameters(1))
    with pytest.raises(TooManyBadSamplesError, match="max_errors=1"):
        batch.wait()


# ---- replace --------------------------------------------------------------------------------


def test_replace_asks_for_others_until_one_is_good(pool: ThreadPool | None) -> None:
    asked: list[tuple[int, int]] = []

    def substitute(number: int, attempt: int) -> Item:
        asked.append((number, attempt))
        return Item(50 + attempt, {1: "9", 2: "8", 3: "4"}[attempt], 0)

    maker = _maker("replace")
    batch = maker.start(pool, _items([1, 5]), Plan(), _parameters(2), substitute=substitute)
    assert _values(batch) == [1, 104]  # with the parameters of the sample that it stands for
    assert asked == [(1, 1), (1, 2), (1, 3)]
    assert maker.bad.count == 3


def test_replace_gives_up_when_there_is_no_other(pool: ThreadPool | None) -> None:
    def substitute(number: int, attempt: int) -> Item | None:
        return Item(50 + attempt, "9", 1) if attempt <= 4 else None

    batch = _maker("replace").start(pool, _items([1, 5]), Plan(), _parameters(2), substitute=substitute)
    with pytest.raises(BadSampleError) as caught:
        batch.wait()
    assert (caught.value.index, caught.value.path) == (1, "5")
    for part in ("sample 1", "'5'", "4 tried", "class 1"):
        assert part in str(caught.value)


# ---- giving up, and letting go --------------------------------------------------------------------


def test_cancel_keeps_samples_from_being_begun() -> None:
    entered, opened, begun = threading.Event(), threading.Event(), []

    def read(path: str) -> bytes:
        begun.append(path)
        entered.set()
        assert opened.wait(WAIT_S)
        return _read(path)

    pool = ThreadPool(1)
    batch = _maker(read=read).start(pool, _items([1, 2, 3]), Plan(), _parameters(3))
    assert entered.wait(WAIT_S)
    batch.cancel()
    with pytest.raises(ClosedError):
        batch.wait()
    opened.set()
    pool.close()
    assert begun == ["1"]


@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
@pytest.mark.parametrize("values", [[1, 2, 3], [1, 9, 8], [7, 7, 1], [9, 5, 8]], ids=str)
def test_a_batch_is_freed_without_the_garbage_collector(
    pool: ThreadPool | None, policy: str, values: list[int]
) -> None:
    gc.collect()
    gc.disable()
    try:
        memory = np.zeros((3, 4), np.int64)
        gone = weakref.ref(memory)
        batch: PendingBatch | None = _maker(policy).start(
            pool, _items(values), Plan(), _parameters(3), memory,
            substitute=lambda number, attempt: Item(50, "4", 0) if attempt < 3 else None,
        )  # fmt: skip
        del memory
        assert batch is not None
        with contextlib.suppress(BadSampleError, ZeroDivisionError):
            batch.wait()
        batch = None
        if pool:  # a thread may still be leaving the batch's last task
            pool.submit(lambda number: None, 8).wait()
            pool.close()
        assert gone() is None
    finally:
        gc.enable()


def test_a_cancelled_batch_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        pool, memory = ThreadPool(1), np.zeros((3, 4), np.int64)
        gone = weakref.ref(memory)
        batch = _maker().start(pool, _items([1, 2, 3]), Plan(), _parameters(3), memory)
        batch.cancel()
        del memory, batch
        pool.close()
        del pool
        assert gone() is None
    finally:
        gc.enable()
