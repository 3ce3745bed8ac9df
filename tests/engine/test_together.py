"""Images of a batch that are decoded by one call."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fastpipe.core.batches import decoded_together
from fastpipe.core.pool import ThreadPool
from fastpipe.core.types import Box
from fastpipe.errors import ClosedError

WAIT_S = 60.0


class Image:
    """Remembers what it was given."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.given: Any = None

    def encoded(self) -> bytes:
        return self.name.encode()

    def give(self, box: Box, pixels: Any) -> None:
        self.given = box, pixels


class Decoder:
    """Calls a function."""

    def __init__(self, decode: Callable[[Sequence[Any]], Any]) -> None:
        self.decode = decode

    def describe(self) -> str:
        return ""


def begin(
    pool: ThreadPool | None,
    images: Sequence[Image],
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


@pytest.fixture(params=[0, 1, 3], ids=["here", "1 thread", "3 threads"])
def pool(request: pytest.FixtureRequest) -> Any:
    made = ThreadPool(request.param) if request.param else None
    yield made
    if made:
        made.close()


def wait(jobs: Sequence[Any]) -> None:
    for job in jobs:
        job.wait()


@pytest.mark.parametrize("width", [1, 2, 8])
def test_all_are_decoded_by_one_call_between_opening_and_making(pool: ThreadPool | None, width: int) -> None:
    images, calls, made = [Image("a"), Image("b"), Image("c")], [], []

    def decode(parts: Sequence[Any]) -> list[str]:
        calls.append(list(parts))
        return [blob.decode().upper() for blob, _ in parts]

    jobs = begin(
        pool, images, decode, lambda number: made.append((number, images[number].given)), width=width
    )
    wait(jobs)
    assert calls == [[(b"a", Box(0, 0, 0, 1)), (b"b", Box(0, 0, 1, 1)), (b"c", Box(0, 0, 2, 1))]]
    assert sorted(made) == [(n, (Box(0, 0, n, 1), "ABC"[n])) for n in range(3)]
    assert all(job.done() for job in jobs)


def test_what_is_declined_is_not_given_and_what_cannot_be_opened_is_not_asked_for(
    pool: ThreadPool | None,
) -> None:
    images, made = [Image("a"), Image("b"), Image("c")], []

    def asked(number: int) -> Any:
        return [] if number == 1 else [(images[number], Box(0, 0, 1, 1))]

    wait(begin(pool, images, lambda parts: [None, "C"], made.append, asked))
    assert sorted(made) == [0, 1, 2]
    assert [image.given for image in images] == [None, None, (Box(0, 0, 1, 1), "C")]


def test_nobody_is_asked_for_nothing(pool: ThreadPool | None) -> None:
    made: list[int] = []
    wait(begin(pool, [Image("a")], lambda parts: 1 / 0, made.append, lambda number: []))
    wait(begin(pool, [], lambda parts: 1 / 0, made.append))
    assert made == [0]


def test_an_error_of_the_decoder_is_raised_and_nothing_is_made(pool: ThreadPool | None) -> None:
    made: list[int] = []

    def decode(parts: Sequence[Any]) -> Any:
        raise MemoryError("of the device")

    jobs = begin(pool, [Image("a"), Image("b")], decode, made.append)
    with pytest.raises(MemoryError, match="of the device"):
        wait(jobs)
    assert not made and all(job.done() for job in jobs)


def test_a_batch_that_is_open_goes_before_those_that_are_not() -> None:
    images, order = [Image(name) for name in "abcd"], []
    entered, go_on = threading.Event(), threading.Event()
    pool = ThreadPool(1)

    def decode(parts: Sequence[Any]) -> list[None]:
        entered.set()
        assert go_on.wait(WAIT_S)
        return [None] * len(parts)

    first = begin(pool, images[:2], decode, lambda number: order.append(f"first {number}"))
    assert entered.wait(WAIT_S)
    second = pool.submit(lambda number: order.append("second"), 1)
    go_on.set()
    wait([*first, second])
    assert order == ["first 0", "first 1", "second"]
    pool.close()


def test_a_pool_that_is_closed_meanwhile_ends_it() -> None:
    entered, go_on = threading.Event(), threading.Event()
    pool, made = ThreadPool(1), []

    def decode(parts: Sequence[Any]) -> list[None]:
        entered.set()
        assert go_on.wait(WAIT_S)
        return [None]

    jobs = begin(pool, [Image("a")], decode, made.append)
    assert entered.wait(WAIT_S)
    closing = threading.Thread(target=pool.close)
    closing.start()
    while not pool._queue.closed:
        pass
    go_on.set()
    closing.join()
    with pytest.raises(ClosedError):
        wait(jobs)
    assert not made


def test_what_is_cancelled_before_it_is_open_is_not_decoded() -> None:
    entered, go_on, made = threading.Event(), threading.Event(), []
    pool, images = ThreadPool(1), [Image("a"), Image("b")]

    def asked(number: int) -> Any:
        entered.set()
        assert go_on.wait(WAIT_S)
        return [(images[number], Box(0, 0, 1, 1))]

    jobs = begin(pool, images, lambda parts: made.append(parts), made.append, asked)
    assert entered.wait(WAIT_S)
    for job in jobs:
        job.cancel()
    go_on.set()
    pool.submit(lambda number: None, 1).wait()
    assert not made
    for job in jobs:
        with pytest.raises(ClosedError):
            job.wait()
    pool.close()


def test_an_interrupt_in_the_calling_thread_ends_it() -> None:
    made: list[int] = []

    def asked(number: int) -> Any:
        raise KeyboardInterrupt

    jobs = begin(None, [Image("a"), Image("b")], lambda parts: 1 / 0, made.append, asked)
    with pytest.raises(KeyboardInterrupt):
        wait(jobs)
    assert not made


def test_images_are_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        image = Image("a")
        gone = weakref.ref(image)
        jobs = begin(None, [image], lambda parts: [None], lambda number: None)
        wait(jobs)
        del image, jobs
        assert gone() is None
    finally:
        gc.enable()
