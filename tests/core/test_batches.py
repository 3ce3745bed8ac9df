"""Batches whose images are made by a pool's threads, each for itself or decoded by one call."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from fastpipe.core.bad_samples import BadSampleLog, Item
from fastpipe.core.batches import BatchMaker, PendingBatch, decoded_together
from fastpipe.core.clock import StageClock
from fastpipe.core.pool import ThreadPool
from fastpipe.core.types import Box, Size
from fastpipe.errors import BadSampleError, ClosedError
from fastpipe.options import BadSamples

WAIT_S = 60.0


class Image:
    """An image whose pixels are its name's number; 8 cannot be decoded, a decoder of batches cannot have 3."""

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


class Plan:
    """Adds the parameter to the pixels; fails on 7 as a transform does."""

    def part(self, image: Any, parameters: Any) -> Box | None:
        return None if image.value == 2 else Box(0, 0, 1, 1)

    def apply(self, image: Any, parameters: Any, out: Any = None) -> Any:
        value = int(image.region(Box(0, 0, 1, 1))[0, 0, 0])
        if value % 10 == 7:
            raise ZeroDivisionError("a transform's own error")
        if out is None:
            return value + parameters[0]
        out[:] = value + parameters[0]
        return None


class Decoder:
    """Decodes batches by a function; by default all images but 8."""

    def __init__(self, decode: Callable[[Sequence[Any]], Any] | None = None) -> None:
        self.decode = decode or self._decode

    def _decode(self, parts: Sequence[tuple[bytes, Box]]) -> list[Any]:
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


Make = Callable[..., BatchMaker]


@pytest.fixture(params=[None, Decoder], ids=["each by its thread", "all at once"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makers of batches, without or with a decoder of batches."""

    def maker(bad: BadSamples | str = "raise", read: Callable[[str], bytes] = _read) -> BatchMaker:
        options = BadSamples.of(bad)
        decoder = request.param and request.param()
        return BatchMaker(read, _open, options.policy, BadSampleLog(options), StageClock(), decoder)

    return maker


def _start(
    maker: BatchMaker, pool: ThreadPool | None, values: Sequence[int], *more: Any, **options: Any
) -> Any:
    items = [Item(index, str(value), value % 2) for index, value in enumerate(values)]
    parameters = np.arange(len(values), dtype=np.float64).reshape(-1, 1) * 100
    return maker.start(pool, items, Plan(), parameters, *more, **options)


def _values(batch: PendingBatch) -> list[Any]:
    return [batch.values[n] for n in batch.wait()]


def test_each_sample_gets_its_own_parameters_and_place(pool: ThreadPool | None, make: Make) -> None:
    maker, memory = make(), np.zeros((3, 2, 2), np.int64)
    assert _values(_start(maker, pool, [1, 2, 3])) == [1, 102, 203]
    assert set(maker.clock.totals()) == {"read", "decode", "transform"}
    assert _start(maker, pool, [1, 2, 3], memory).wait() == [0, 1, 2]
    assert memory.reshape(3, 4).tolist() == [[1] * 4, [102] * 4, [203] * 4]
    assert _start(maker, pool, []).wait() == []


def test_finish_runs_in_the_sample_s_thread_and_its_error_is_a_transform_s(
    pool: ThreadPool | None, make: Make
) -> None:
    seen: list[tuple[Any, int, threading.Thread]] = []

    def finish(value: Any, number: int) -> Any:
        seen.append((value, number, threading.current_thread()))
        if value == 202:
            raise LookupError("in finish")
        return -value

    assert _values(_start(make(), pool, [1, 2], finish=finish)) == [-1, -102]
    assert {(value, number) for value, number, _ in seen} == {(1, 0), (102, 1)}
    assert {thread is threading.main_thread() for *_, thread in seen} == {pool is None}
    with pytest.raises(LookupError, match="in finish"):
        _start(make("skip"), pool, [1, 1, 2], finish=finish).wait()


def test_the_first_error_by_position_is_raised(make: Make) -> None:
    second_failed = threading.Event()

    def read(path: str) -> bytes:
        if path == "5":
            assert second_failed.wait(WAIT_S)
        if path == "9":
            second_failed.set()
        return _read(path)

    pool = ThreadPool(2)
    with pytest.raises(BadSampleError) as caught:
        _start(make(read=read), pool, [5, 9]).wait()
    assert caught.value.index == 0
    pool.close()


def test_replace_asks_for_others_until_one_is_good(pool: ThreadPool | None, make: Make) -> None:
    asked: list[tuple[int, int]] = []

    def substitute(number: int, attempt: int) -> Item:
        asked.append((number, attempt))
        return Item(50 + attempt, {1: "9", 2: "8", 3: "4"}[attempt], 0)

    maker = make("replace")
    # With the parameters of the sample that it replaces.
    assert _values(_start(maker, pool, [1, 5], substitute=substitute)) == [1, 104]
    assert asked == [(1, 1), (1, 2), (1, 3)]
    assert maker.bad.count == 3


def test_cancel_keeps_samples_from_being_begun(make: Make) -> None:
    entered, opened, begun = threading.Event(), threading.Event(), list[str]()

    def read(path: str) -> bytes:
        begun.append(path)
        entered.set()
        assert opened.wait(WAIT_S)
        return _read(path)

    pool = ThreadPool(1)
    batch = _start(make(read=read), pool, [1, 2, 3])
    assert entered.wait(WAIT_S)
    batch.cancel()
    with pytest.raises(ClosedError):
        batch.wait()
    opened.set()
    pool.close()
    assert begun == ["1"]


@pytest.mark.few(8)
@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("end", ["raise", "skip", "replace", "cancel"])
def test_a_batch_is_freed_without_the_garbage_collector(
    pool: ThreadPool | None, make: Make, end: str
) -> None:
    for values in ([1, 2, 3], [1, 9, 8], [7, 7, 1], [9, 5, 8])[: 1 if end == "cancel" else 4]:
        memory = np.zeros((3, 4), np.int64)
        gone = weakref.ref(memory)
        batch: PendingBatch | None = _start(
            make("raise" if end == "cancel" else end), pool, values, memory,
            substitute=lambda number, attempt: Item(50, "4", 0) if attempt < 3 else None,
        )  # fmt: skip
        del memory
        assert batch is not None
        with contextlib.suppress(BadSampleError, ZeroDivisionError):
            batch.cancel() if end == "cancel" else batch.wait()
        batch = None
        if pool:  # a thread may still be leaving the batch's last task
            threads = len(pool._running)
            meet = threading.Barrier(threads, timeout=WAIT_S)
            pool.submit(lambda number, meet=meet: meet.wait() and None, threads).wait()  # type: ignore[misc]
        assert gone() is None


# Images of a batch that are decoded by one call.


class Part:
    """Remembers the pixels that it was given."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.given: Any = None

    def encoded(self) -> bytes:
        return self.name.encode()

    def give(self, box: Box, pixels: Any) -> None:
        self.given = box, pixels


def _begin(
    pool: ThreadPool | None,
    images: Sequence[Part],
    decode: Callable[[Sequence[Any]], Any],
    make: Callable[[int], None],
    asked: Callable[[int], Any] | None = None,
    width: int = 1,
) -> Any:
    ask: Any = asked or (lambda number: [(images[number], Box(0, 0, number, 1))])

    def asked_of(numbers: Sequence[int]) -> Any:
        assert 1 <= len(numbers) <= width
        return [ask(number) for number in numbers]

    return decoded_together(
        pool, Decoder(decode), len(images), asked_of, make, lambda nanoseconds: None, width=width
    )


def _wait(jobs: Sequence[Any]) -> None:
    for job in jobs:
        job.wait()


@pytest.mark.parametrize("width", [1, 2, 8])
def test_one_call_decodes_all_between_opening_and_making(pool: ThreadPool | None, width: int) -> None:
    images, calls, made = [Part("a"), Part("b"), Part("c")], list[Any](), list[Any]()

    def decode(parts: Sequence[Any]) -> list[str]:
        calls.append(list(parts))
        return [blob.decode().upper() for blob, _ in parts]

    jobs = _begin(pool, images, decode, lambda n: made.append((n, images[n].given)), width=width)
    _wait(jobs)
    assert calls == [[(b"a", Box(0, 0, 0, 1)), (b"b", Box(0, 0, 1, 1)), (b"c", Box(0, 0, 2, 1))]]
    assert sorted(made) == [(n, (Box(0, 0, n, 1), "ABC"[n])) for n in range(3)]
    assert all(job.done() for job in jobs)


@pytest.mark.parametrize("where", ["decoder", "asked"])
def test_an_error_is_raised_and_nothing_is_made(pool: ThreadPool | None, where: str) -> None:
    made: list[int] = []

    def fail(_: Any) -> Any:
        raise KeyboardInterrupt if where == "asked" else MemoryError("of the device")

    images = [Part("a"), Part("b")]
    jobs = _begin(pool, images, fail, made.append, fail if where == "asked" else None)
    with pytest.raises(KeyboardInterrupt if where == "asked" else MemoryError):
        _wait(jobs)
    assert not made
