"""Objects are fetched in the order in which they will be needed, within bounds, and each is there when taken."""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
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
        self.near = near or set()
        self.begun: list[int] = []
        self.failing: dict[int, Exception] = {}
        self.changed = threading.Condition()
        self.is_open = is_open
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


def rows(*numbers: int) -> Int64Array:
    return np.array(numbers, np.int64)


def parts(numbers: Any, size: int = 4) -> Iterator[Int64Array]:
    numbers = list(numbers)
    return (np.array(numbers[at : at + size], np.int64) for at in range(0, len(numbers), size))


def take(prefetcher: Prefetcher, *numbers: int) -> None:
    """Take rows, which are what they should be."""
    assert [prefetcher.take(row) for row in numbers] == [content(row) for row in numbers]


def need_and_take(prefetcher: Prefetcher, *numbers: int) -> None:
    prefetcher.need(rows(*numbers))
    take(prefetcher, *numbers)


@pytest.fixture
def make() -> Iterator[Callable[..., Prefetcher]]:
    made: list[tuple[Prefetcher, Store]] = []

    def prefetcher(store: Store, room: float = 1000, connections: int = 8, **options: Any) -> Prefetcher:
        one = Prefetcher(store, int(room * SIZE), Pace(connections), **options)
        made.append((one, store))
        return one

    yield prefetcher
    for one, store in made:
        store.open()
        one.close()


def wait_idle(prefetcher: Prefetcher) -> None:
    """Wait until its threads have nothing to do."""

    def is_busy() -> bool:
        with prefetcher.changed:
            has_room = not prefetcher.ahead or prefetcher.ahead + SIZE <= prefetcher.read_ahead
            waits = prefetcher.urgent or (prefetcher.coming and has_room)
            return bool(prefetcher.active or waits or prefetcher.is_walking or prefetcher._may_walk())

    while is_busy():
        threading.Event().wait(0.001)


# ---- scenarios: steps of a prefetcher's user, and what has been fetched and is held after them ------


Step = Callable[[Prefetcher, Store], object]


def follow(*orders: Any, **options: Any) -> Step:
    def step(prefetcher: Prefetcher, store: Store) -> None:
        for order in orders:
            prefetcher.follow(parts(order), **options)

    return step


def need(*numbers: int) -> Step:
    return lambda prefetcher, store: prefetcher.need(rows(*numbers))


def taken(*numbers: int) -> Step:
    return lambda prefetcher, store: take(prefetcher, *numbers)


def forgo(*numbers: int, were_needed: bool) -> Step:
    return lambda prefetcher, store: prefetcher.forgo(rows(*numbers), were_needed=were_needed)


def staged(*numbers: int) -> Step:
    return lambda prefetcher, store: store.near.update(numbers)


def under_way(count: int) -> Step:
    return lambda prefetcher, store: store.wait_begun(count)


def opened(prefetcher: Prefetcher, store: Store) -> None:
    store.open()


def fetched(*numbers: int) -> Step:
    """All that was fetched, each row once."""

    def check(prefetcher: Prefetcher, store: Store) -> None:
        store.wait_begun(len(numbers))
        wait_idle(prefetcher)
        assert sorted(store.begun) == sorted(numbers)

    return check


def held(*numbers: int, ahead: int = 0) -> Step:
    """The rows that are held, and how many of them count against the room."""

    def check(prefetcher: Prefetcher, store: Store) -> None:
        wait_idle(prefetcher)
        assert sorted(prefetcher.slots) == sorted(numbers) and prefetcher.ahead == ahead * SIZE

    return check


ONE, CLOSED = {"connections": 1}, {"connections": 1, "is_open": False}
SCENARIOS: dict[str, tuple[dict[str, Any], list[Step]]] = {
    "an order is fetched before it is needed": (
        {}, [follow(range(20)), fetched(*range(20)), need(*range(20)), taken(*range(20)), fetched(*range(20)), held()],
    ),
    "the room bounds held bytes, and needed rows make room": (
        {"room": 5}, [follow(range(100)), fetched(*range(5)), held(*range(5), ahead=5), need(0, 1), fetched(*range(7))],
    ),
    "an object larger than the room is fetched alone": (
        {"room": 0.1}, [follow(range(3)), fetched(0), need(0), taken(0), fetched(0, 1), need(1, 2), taken(1, 2)],
    ),
    "a row that comes twice is fetched once": (
        {}, [follow([1, 2, 1, 3, 1]), *map(need, (1, 2, 1, 3, 1)), taken(1, 2, 1, 3, 1), fetched(1, 2, 3), held()],
    ),
    "rows that come again are kept where they fit": (
        {"room": 4} | ONE, [follow([0, 1, 2, 3] * 2), need(0, 1, 2, 3), taken(0, 1, 2, 3), held(0, 1, 2, 3, ahead=4),
                            need(0, 1, 2, 3), taken(0, 1, 2, 3), fetched(0, 1, 2, 3)],
    ),
    "a new order keeps rows that come again and drops the rest": (
        {"room": 6}, [follow(range(10)), fetched(*range(6)), follow([3, 4, 20, 21, 22, 23, 24]),
                      fetched(*range(6), 20, 21, 22, 23), held(3, 4, 20, 21, 22, 23, ahead=6)],
    ),
    "batches that were given up are forgotten": ({}, [need(1, 2, 3), under_way(3), follow([7], [7]), held(7, ahead=1)]),
    "rows for other processes are not held": (
        {"room": 8}, [follow(range(100), holds=False), fetched(*range(8)), held()],
    ),
    "spilled rows are fetched and not held": (
        {"room": 5, "spills": True},
        [follow(range(100)), fetched(*range(100)), staged(*range(100)), need(0, 1, 50, 99), taken(0, 1, 50, 99)],
    ),
    "needed rows that are there are dropped": (
        {}, [need(1, 2, 2), taken(1, 2), held(2), forgo(2, were_needed=True), forgo(1, 2, 7, were_needed=True), held()],
    ),
    "needed rows under way are dropped when they come": (
        CLOSED, [need(1, 2), under_way(1), forgo(1, were_needed=True), opened, taken(2), held()],
    ),
    "rows under way that are needed again stay": (
        CLOSED, [need(1), under_way(1), forgo(1, were_needed=True), need(1), opened, taken(1), fetched(1), held()],
    ),
    "rows that only an order has are not fetched": (
        CLOSED, [follow([1, 2, 3, 2]), under_way(1), forgo(2, 3, were_needed=False), opened, need(1, 2), taken(1, 2),
                 fetched(1, 2), held()],
    ),
    "rows that were fetched for an order make room": (
        {"room": 1} | ONE, [follow([1, 2]), fetched(1), held(1, ahead=1), forgo(1, were_needed=False), fetched(1, 2),
                            need(2), taken(2), held()],
    ),
    "rows under way for an order make room": (
        {"room": 1} | CLOSED, [follow([1, 2]), under_way(1), forgo(1, were_needed=False), opened, under_way(2), need(2),
                               taken(2), held()],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_rows_are_fetched_ahead_and_held_as_they_will_be_needed(name: str, make: Any) -> None:
    options, steps = SCENARIOS[name]
    store = Store(is_open=options.get("is_open", True))
    prefetcher = make(store, **{option: value for option, value in options.items() if option != "is_open"})
    for step in steps:
        step(prefetcher, store)


def test_rows_are_fetched_in_order_and_those_of_a_batch_first(make: Any) -> None:
    store = Store(is_open=False)
    prefetcher = make(store, connections=1)
    prefetcher.follow(parts([5, 3, 9, 1, 0, 2, 8], 3))
    store.wait_begun(1)
    prefetcher.need(rows(90, 91, 5, 2))
    store.open()
    assert store.wait_begun(9) == [5, 90, 91, 2, 3, 9, 1, 0, 8]
    take(prefetcher, 90, 91, 5, 2)


def test_the_pace_bounds_requests_at_a_time(make: Any) -> None:
    store = Store(is_open=False)
    make(store, connections=3).follow(parts(range(20)))
    store.wait_begun(3)
    store.open()
    store.wait_begun(20)
    assert store.most == 3


def test_errors_are_raised_where_the_row_is_taken_and_not_kept(make: Any) -> None:
    store = Store()
    store.failing[2] = FileNotFoundError("2")
    prefetcher = make(store)
    prefetcher.follow(parts(range(4)))
    prefetcher.need(rows(0, 1, 2, 3))
    take(prefetcher, 0)
    with pytest.raises(FileNotFoundError):
        prefetcher.take(2)
    take(prefetcher, 3)
    del store.failing[2]
    take(prefetcher, 2)


def test_an_order_that_fails_costs_only_what_is_ahead(make: Any, caplog: Any) -> None:
    def order() -> Iterator[Int64Array]:
        yield rows(0, 1)
        raise ValueError("no more")

    prefetcher = make(Store())
    prefetcher.follow(order())
    need_and_take(prefetcher, 0, 5)
    assert "no more" in caplog.text


def test_closing_is_an_error_for_a_thread_that_waits(make: Any) -> None:
    store, caught = Store(is_open=False), list[BaseException]()
    prefetcher = make(store)
    prefetcher.need(rows(1))
    store.wait_begun(1)

    def wait() -> None:
        try:
            prefetcher.take(1)
        except ClosedError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not prefetcher.slots[1].waiting:
        threading.Event().wait(0.001)
    closing = threading.Thread(target=prefetcher.close)
    closing.start()
    thread.join()
    store.open()
    closing.join()
    assert len(caught) == 1
    take(prefetcher, 1)  # in the thread that takes it


def test_an_object_is_taken_while_it_is_still_being_staged(make: Any) -> None:
    store = SlowStaging(is_open=False)
    prefetcher = make(store, connections=1)  # requests, of which staging is none
    for _ in range(2):  # the second anew, beside the first that goes on
        prefetcher.need(rows(3))
        assert prefetcher.take(3) == content(3) + b" early"
    assert store.wait_begun(2) == [3, 3] and prefetcher.active + prefetcher.staging == 2
    store.open()
    prefetcher.close()
    assert prefetcher.active + prefetcher.staging == 0


@pytest.mark.skipif(sys.platform != "linux", reason="run it on Linux, where threads have priorities")
def test_threads_that_fetch_leave_processors_to_others(make: Any) -> None:
    found: list[int] = []

    class Noting(Store):
        def fetch(self, row: int, give: object = None) -> bytes:
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return super().fetch(row, give)

    own = os.getpriority(os.PRIO_PROCESS, 0)
    need_and_take(make(Noting(), connections=2), 0, 1)
    assert found == [min(own + 5, 19)] * 2
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_threads_end_when_the_owner_is_collected() -> None:
    store = Store()
    owner = type("Owner", (), {})()
    Prefetcher(store, 100, Pace(4), owner=owner).follow(parts(range(50)))
    store.wait_begun(10)
    del owner
    gc.collect()  # ``no_leaks`` waits for the threads


def test_a_forked_child_begins_anew(make: Any, in_child: Any) -> None:
    store = Store()
    prefetcher = make(store)
    prefetcher.follow(parts(range(5)))
    store.wait_begun(5)

    def child() -> None:
        assert not prefetcher.slots
        prefetcher.need(rows(1, 2))
        take(prefetcher, 1, 2, 3)
        os._exit(0)

    in_child(child)
    need_and_take(prefetcher, 4)


@given(
    st.lists(st.integers(0, 30), max_size=60), st.lists(st.integers(0, 30), max_size=60), st.integers(1, 12),
    st.integers(1, 8), st.sets(st.integers(0, 30)), st.booleans(),
)  # fmt: skip
def test_any_rows_are_what_they_are_and_the_room_is_kept(
    said: list[int], taken: list[int], room: int, connections: int, near: set[int], is_needed: bool
) -> None:
    prefetcher = Prefetcher(Store(near=near), room * SIZE, Pace(connections))
    try:
        prefetcher.follow(parts(said, 7))
        for batch in parts(taken, 5):
            if is_needed:
                prefetcher.need(batch)
            take(prefetcher, *batch.tolist())
            assert 0 <= prefetcher.ahead <= room * SIZE
        for _ in range(2):
            prefetcher.follow(parts([]))
        wait_idle(prefetcher)
        assert not prefetcher.slots and prefetcher.ahead == 0
    finally:
        prefetcher.close()


def usual_limit(pace: Pace, latency: float, rate: float, *, used: int | None = None) -> float:
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
    [
        pytest.param(0.03, 1500, None, 40, 96, id="1,500 a second of 30 ms each are 45 under way"),
        pytest.param(0.1, 1e6, None, 128, 128, id="latency alone"),
        pytest.param(0.001, 2000, None, 1, 16, id="nothing is gained"),
        pytest.param(0.03, 1e6, 4, 32, 32, id="no more than is used"),
        pytest.param(1.0, 100, None, 7, 7, id="a given number"),
    ],
)
def test_it_rises_to_what_is_needed(latency: float, rate: float, used: Any, least: int, most: int) -> None:
    pace = Pace(7 if most == 7 else "auto")
    assert least <= usual_limit(pace, latency, rate, used=used) <= most
    assert pace.most == (7 if most == 7 else 128)


def test_it_falls_where_a_network_becomes_slower_and_rises_again() -> None:
    pace = Pace("auto")
    assert usual_limit(pace, 0.03, 1e6) == 128
    assert usual_limit(pace, 0.03, 200) <= 32
    assert usual_limit(pace, 0.03, 1e6) == 128
