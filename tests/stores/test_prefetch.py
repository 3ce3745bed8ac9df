"""Objects are fetched in the order in which they will be needed, within bounds, and each is there when taken."""

from __future__ import annotations

import os
import random
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpipe.errors import ClosedError
from fastpipe.stores.prefetch import Pace, Prefetcher

Int64Array = npt.NDArray[np.int64]
SIZE = 10


class Store:
    """Objects of 10 bytes that are their numbers; given once it is open, or at once those that are ``near``."""

    def __init__(self, *, is_open: bool = True, near: set[int] | None = None) -> None:
        self.is_open, self.near = is_open, near or set()
        self.begun: list[int] = []
        self.failing: dict[int, Exception] = {}
        self.changed = threading.Condition()
        self.most = self.now = 0

    def nbytes(self, rows: Int64Array) -> Int64Array:
        return np.full(len(rows), SIZE, np.int64)

    def are_staged(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        return np.array([row in self.near for row in rows.tolist()], np.bool_)

    def fetch(self, row: int, give: Any = None) -> bytes:
        with self.changed:
            self.begun.append(row)
            self.now += 1
            self.most = max(self.most, self.now)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.is_open)
            self.now -= 1
        if row in self.failing:
            raise self.failing[row]
        return content(row)

    def open(self) -> None:
        with self.changed:
            self.is_open = True
            self.changed.notify_all()

    def wait_begun(self, count: int) -> list[int]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= count, 60), self.begun
            return list(self.begun)


class SlowStaging(Store):
    """Gives what is fetched, and has still to stage it then."""

    def fetch(self, row: int, give: Any = None) -> bytes:
        with self.changed:  # before it is given, with which the next one may begin
            self.begun.append(row)
            self.changed.notify_all()
        give(content(row) + b" early")
        with self.changed:
            self.changed.wait_for(lambda: self.is_open)
        return content(row)


def content(row: int) -> bytes:
    return f"{row:010}".encode()


def parts(numbers: Any, size: int = 4) -> Iterator[Int64Array]:
    return (np.array(numbers[at : at + size], np.int64) for at in range(0, len(numbers), size))


class User:
    """A user of a prefetcher that has room for a given number of objects."""

    def __init__(
        self, room: float = 1000, connections: int = 8, *, is_open: bool = True, store: Any = None, spills: bool = False
    ) -> None:  # fmt: skip
        self.store = store or Store(is_open=is_open)
        self.it = Prefetcher(self.store, int(room * SIZE), Pace(connections), spills=spills)

    def follow(self, order: Any, **options: Any) -> None:
        self.it.follow(parts(order), **options)

    def need(self, *numbers: int) -> None:
        self.it.need(np.array(numbers, np.int64))

    def forgo(self, *numbers: int, were_needed: bool) -> None:
        self.it.forgo(np.array(numbers, np.int64), were_needed=were_needed)

    def take(self, *numbers: int) -> None:
        """Take rows, which are what they should be."""
        assert [self.it.take(row) for row in numbers] == [content(row) for row in numbers]

    def wait_idle(self) -> None:
        """Wait until the prefetcher's threads have nothing to do."""
        it, is_busy = self.it, True
        while is_busy:
            threading.Event().wait(0.001)
            with it.changed:
                has_room = not it.ahead or it.ahead + SIZE <= it.read_ahead
                waits = it.urgent or (it.coming and has_room)
                is_busy = bool(it.active or waits or it.is_walking or it._may_walk())

    def see_fetched(self, *numbers: int) -> None:
        """All that was fetched, each row once."""
        self.store.wait_begun(len(numbers))
        self.wait_idle()
        assert sorted(self.store.begun) == sorted(numbers)

    def see_held(self, *numbers: int, ahead: int = 0) -> None:
        """The rows that are held, and how many of them count against the room."""
        self.wait_idle()
        assert sorted(self.it.slots) == sorted(numbers) and self.it.ahead == ahead * SIZE

    def close(self) -> None:
        self.store.open()
        self.it.close()


@pytest.fixture
def make() -> Iterator[Callable[..., User]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(closing(User(**options)))


ONE, CLOSED = {"connections": 1}, {"connections": 1, "is_open": False}
SCENARIOS: dict[str, tuple[dict[str, Any], Callable[[User], object]]] = {
    "an order is fetched before it is needed": ({}, lambda u: (
        u.follow(range(20)), u.see_fetched(*range(20)), u.need(*range(20)), u.take(*range(20)),
        u.see_fetched(*range(20)), u.see_held(),
    )),
    "the room bounds held bytes, and needed rows make room": ({"room": 5}, lambda u: (
        u.follow(range(100)), u.see_fetched(*range(5)), u.see_held(*range(5), ahead=5), u.need(0, 1),
        u.see_fetched(*range(7)),
    )),
    "an object larger than the room is fetched alone": ({"room": 0.1}, lambda u: (
        u.follow(range(3)), u.see_fetched(0), u.need(0), u.take(0), u.see_fetched(0, 1), u.need(1, 2), u.take(1, 2),
    )),
    "a row that comes twice is fetched once": ({}, lambda u: (
        u.follow([1, 2, 1, 3, 1]), [u.need(row) for row in (1, 2, 1, 3, 1)], u.take(1, 2, 1, 3, 1),
        u.see_fetched(1, 2, 3), u.see_held(),
    )),
    "rows that come again are kept where they fit": ({"room": 4} | ONE, lambda u: (
        u.follow([0, 1, 2, 3] * 2), u.need(0, 1, 2, 3), u.take(0, 1, 2, 3), u.see_held(0, 1, 2, 3, ahead=4),
        u.need(0, 1, 2, 3), u.take(0, 1, 2, 3), u.see_fetched(0, 1, 2, 3),
    )),
    "a new order keeps rows that come again and drops the rest": ({"room": 6}, lambda u: (
        u.follow(range(10)), u.see_fetched(*range(6)), u.follow([3, 4, 20, 21, 22, 23, 24]),
        u.see_fetched(*range(6), 20, 21, 22, 23), u.see_held(3, 4, 20, 21, 22, 23, ahead=6),
    )),
    "batches that were given up are forgotten": ({}, lambda u: (
        u.need(1, 2, 3), u.store.wait_begun(3), u.follow([7]), u.follow([7]), u.see_held(7, ahead=1),
    )),
    "rows for other processes are not held": ({"room": 8}, lambda u: (
        u.follow(range(100), holds=False), u.see_fetched(*range(8)), u.see_held(),
    )),
    "spilled rows are fetched and not held": ({"room": 5, "spills": True}, lambda u: (
        u.follow(range(100)), u.see_fetched(*range(100)), u.store.near.update(range(100)), u.need(0, 1, 50, 99),
        u.take(0, 1, 50, 99),
    )),
    "needed rows that are there are dropped": ({}, lambda u: (
        u.need(1, 2, 2), u.take(1, 2), u.see_held(2), u.forgo(2, were_needed=True),
        u.forgo(1, 2, 7, were_needed=True), u.see_held(),
    )),
    "needed rows under way are dropped when they come": (CLOSED, lambda u: (
        u.need(1, 2), u.store.wait_begun(1), u.forgo(1, were_needed=True), u.store.open(), u.take(2), u.see_held(),
    )),
    "rows under way that are needed again stay": (CLOSED, lambda u: (
        u.need(1), u.store.wait_begun(1), u.forgo(1, were_needed=True), u.need(1), u.store.open(), u.take(1),
        u.see_fetched(1), u.see_held(),
    )),
    "rows that only an order has are not fetched": (CLOSED, lambda u: (
        u.follow([1, 2, 3, 2]), u.store.wait_begun(1), u.forgo(2, 3, were_needed=False), u.store.open(),
        u.need(1, 2), u.take(1, 2), u.see_fetched(1, 2), u.see_held(),
    )),
    "rows that were fetched for an order make room": ({"room": 1} | ONE, lambda u: (
        u.follow([1, 2]), u.see_fetched(1), u.see_held(1, ahead=1), u.forgo(1, were_needed=False),
        u.see_fetched(1, 2), u.need(2), u.take(2), u.see_held(),
    )),
    "rows under way for an order make room": ({"room": 1} | CLOSED, lambda u: (
        u.follow([1, 2]), u.store.wait_begun(1), u.forgo(1, were_needed=False), u.store.open(),
        u.store.wait_begun(2), u.need(2), u.take(2), u.see_held(),
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_rows_are_fetched_ahead_and_held_as_they_will_be_needed(name: str, make: Any) -> None:
    options, run = SCENARIOS[name]
    run(make(**options))


def test_rows_are_fetched_in_order_and_those_of_a_batch_first(make: Any) -> None:
    user = make(**CLOSED)
    user.it.follow(parts([5, 3, 9, 1, 0, 2, 8], 3))
    user.store.wait_begun(1)
    user.need(90, 91, 5, 2)
    user.store.open()
    assert user.store.wait_begun(9) == [5, 90, 91, 2, 3, 9, 1, 0, 8]
    user.take(90, 91, 5, 2)


def test_the_pace_bounds_requests_at_a_time(make: Any) -> None:
    user = make(is_open=False, connections=3)
    user.follow(range(20))
    user.store.wait_begun(3)
    user.store.open()
    user.store.wait_begun(20)
    assert user.store.most == 3


def test_errors_are_raised_where_the_row_is_taken_and_not_kept(make: Any) -> None:
    user = make()
    user.store.failing[2] = FileNotFoundError("2")
    user.follow(range(4))
    user.need(0, 1, 2, 3)
    user.take(0)
    with pytest.raises(FileNotFoundError):
        user.it.take(2)
    user.take(3)
    del user.store.failing[2]
    user.take(2)


def test_an_order_that_fails_costs_only_what_is_ahead(make: Any, caplog: Any) -> None:
    def order() -> Iterator[Int64Array]:
        yield np.array([0, 1])
        raise ValueError("no more")

    user = make()
    user.it.follow(order())
    user.need(0, 5)
    user.take(0, 5)
    assert "no more" in caplog.text


def test_closing_is_an_error_for_a_thread_that_waits(make: Any) -> None:
    user = make(is_open=False)
    user.need(1)
    user.store.wait_begun(1)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(user.it.take, 1)
        while not user.it.slots[1].waiting:
            threading.Event().wait(0.001)
        ended = pool.submit(user.it.close)
        assert isinstance(waiting.exception(60), ClosedError)
        user.store.open()
        ended.result(60)
    user.take(1)  # in the thread that takes it


def test_an_object_is_taken_while_it_is_still_being_staged(make: Any) -> None:
    user = make(store=SlowStaging(is_open=False), connections=1)  # requests, of which staging is none
    for _ in range(2):  # the second anew, beside the first that goes on
        user.need(3)
        assert user.it.take(3) == content(3) + b" early"
    assert user.store.wait_begun(2) == [3, 3] and user.it.active + user.it.staging == 2
    user.close()
    assert user.it.active + user.it.staging == 0


@pytest.mark.skipif(sys.platform != "linux", reason="run it on Linux, where threads have priorities")
def test_threads_that_fetch_leave_processors_to_others(make: Any) -> None:
    found: list[int] = []

    class Noting(Store):
        def fetch(self, row: int, give: object = None) -> bytes:
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return super().fetch(row, give)

    own, user = os.getpriority(os.PRIO_PROCESS, 0), make(store=Noting(), connections=2)
    user.need(0, 1)
    user.take(0, 1)
    assert found == [min(own + 5, 19)] * 2
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


@given(
    st.lists(st.integers(0, 30), max_size=60), st.lists(st.integers(0, 30), max_size=60), st.integers(1, 12),
    st.integers(1, 8), st.sets(st.integers(0, 30)), st.booleans(),
)  # fmt: skip
def test_any_rows_are_what_they_are_and_the_room_is_kept(
    said: list[int], taken: list[int], room: int, connections: int, near: set[int], is_needed: bool
) -> None:
    with closing(User(room, connections, store=Store(near=near))) as user:
        user.it.follow(parts(said, 7))
        for batch in parts(taken, 5):
            if is_needed:
                user.it.need(batch)
            user.take(*batch.tolist())
            assert 0 <= user.it.ahead <= room * SIZE
        for _ in range(2):
            user.follow([])
        user.see_held()


def usual_limit(pace: Pace, latency: float, rate: float, used: int | None = None) -> float:
    """The usual limit for a store of this latency that gives at most so many objects a second; of which
    ``used`` requests are made at a time, if they are not as many as there may be."""
    generator, limits = random.Random(0), []
    for _ in range(6000):
        busy = min(pace.limit, used or pace.limit)
        pace.note(max(latency * generator.uniform(0.7, 1.3), busy / rate), busy)
        limits.append(pace.limit)
    return statistics.median(limits[3000:])


@pytest.mark.parametrize(
    ("latency", "rate", "used", "least", "most"),
    [(0.03, 1500, None, 40, 96), (0.1, 1e6, None, 128, 128), (0.001, 2000, None, 1, 16), (0.03, 1e6, 4, 32, 32)],
    ids=["45 of 30 ms give 1,500 a second", "latency alone", "nothing is gained", "no more than is used"],
)  # fmt: skip
def test_it_rises_to_what_is_needed(latency: float, rate: float, used: Any, least: int, most: int) -> None:
    pace, fixed = Pace("auto"), Pace(7)
    assert least <= usual_limit(pace, latency, rate, used) <= most and pace.most == 128
    assert usual_limit(fixed, latency, rate, used) == fixed.most == 7


def test_it_falls_where_a_network_becomes_slower_and_rises_again() -> None:
    pace = Pace("auto")
    assert usual_limit(pace, 0.03, 1e6) == 128
    assert usual_limit(pace, 0.03, 200) <= 32
    assert usual_limit(pace, 0.03, 1e6) == 128
