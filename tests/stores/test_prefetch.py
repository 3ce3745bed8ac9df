"""Objects are fetched in the order in which they will be needed, within bounds, and each is there when taken."""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import threading
from collections import Counter
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


class TestOrder:
    """What is fetched when."""

    def test_an_order_is_fetched_before_it_is_needed(self, make: Any) -> None:
        store, order = Store(), [5, 3, 9, 1, 0, 2, 8]
        prefetcher = make(store, connections=1)
        prefetcher.follow(parts(order, 3))
        assert store.wait_begun(7) == order
        need_and_take(prefetcher, *order)
        assert store.begun == order

    def test_the_pace_bounds_requests_at_a_time(self, make: Any) -> None:
        store = Store(is_open=False)
        make(store, connections=3).follow(parts(range(20)))
        store.wait_begun(3)
        store.open()
        store.wait_begun(20)
        assert store.most == 3

    def test_the_room_bounds_held_bytes(self, make: Any) -> None:
        store = Store()
        prefetcher = make(store, room=5)
        prefetcher.follow(parts(range(100)))
        store.wait_begun(5)
        wait_idle(prefetcher)
        assert sorted(store.begun) == [0, 1, 2, 3, 4] and prefetcher.ahead == 5 * SIZE
        prefetcher.need(rows(0, 1))  # which makes room for two
        store.wait_begun(7)
        wait_idle(prefetcher)
        assert sorted(store.begun) == list(range(7))

    def test_an_object_larger_than_the_room_is_fetched_alone(self, make: Any) -> None:
        store = Store()
        prefetcher = make(store, room=0.1, connections=4)
        prefetcher.follow(parts(range(3)))
        store.wait_begun(1)
        wait_idle(prefetcher)
        assert store.begun == [0]
        for row in range(3):
            need_and_take(prefetcher, row)

    def test_a_batch_comes_first_and_its_rows_are_fetched_once(self, make: Any) -> None:
        store = Store(is_open=False)
        prefetcher = make(store, connections=1)
        prefetcher.follow(parts(range(10)))
        store.wait_begun(1)
        prefetcher.need(rows(90, 91, 0, 7))
        store.open()
        assert store.wait_begun(12)[:5] == [0, 90, 91, 7, 1]
        take(prefetcher, 90, 91, 0, 7)
        wait_idle(prefetcher)
        assert Counter(store.begun) == Counter([*range(10), 90, 91])

    def test_near_rows_are_not_fetched_ahead_but_can_be_taken(self, make: Any) -> None:
        store = Store(near={1, 2})
        prefetcher = make(store)
        prefetcher.follow(parts(range(4)))
        prefetcher.need(rows(0, 1, 2, 3))
        wait_idle(prefetcher)
        assert sorted(store.begun) == [0, 3]
        take(prefetcher, 0, 1, 2, 3)

    def test_a_row_that_is_not_announced_is_fetched_where_it_is_taken(self, make: Any) -> None:
        take(make(Store()), 3)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("fastpipe-fetch")]

    def test_a_row_that_comes_twice_is_there_twice(self, make: Any) -> None:
        store = Store()
        prefetcher = make(store)
        prefetcher.follow(parts([1, 2, 1, 3, 1]))
        for row in (1, 2, 1, 3, 1):
            prefetcher.need(rows(row))
        take(prefetcher, 1, 2, 1, 3, 1)
        assert store.begun.count(1) == 1 and not prefetcher.slots

    @pytest.mark.parametrize(("room", "fetched"), [(4, 4), (3, 5)])
    def test_rows_that_come_again_are_kept_where_they_fit(self, make: Any, room: int, fetched: int) -> None:
        store = Store()
        prefetcher = make(store, room=room, connections=1)
        prefetcher.follow(parts([0, 1, 2, 3] * 2, 8))
        for row in (0, 1, 2, 3):
            need_and_take(prefetcher, row)
        wait_idle(prefetcher)
        assert prefetcher.ahead == room * SIZE
        for row in (0, 1, 2, 3):
            need_and_take(prefetcher, row)
        assert len(store.begun) == fetched

    def test_a_new_order_keeps_rows_that_come_again_and_drops_the_rest(self, make: Any) -> None:
        store = Store()
        prefetcher = make(store, room=6)
        prefetcher.follow(parts(range(10)))
        store.wait_begun(6)
        wait_idle(prefetcher)
        prefetcher.follow(parts([3, 4, 20, 21, 22, 23, 24]))
        store.wait_begun(10)
        wait_idle(prefetcher)
        assert sorted(store.begun[6:]) == [20, 21, 22, 23]
        assert sorted(prefetcher.slots) == [3, 4, 20, 21, 22, 23] and prefetcher.ahead == 6 * SIZE

    def test_batches_that_were_given_up_are_forgotten(self, make: Any) -> None:
        store = Store()
        prefetcher = make(store)
        prefetcher.need(rows(1, 2, 3))
        store.wait_begun(3)
        for _ in range(2):
            prefetcher.follow(parts([7]))
        wait_idle(prefetcher)
        assert sorted(prefetcher.slots) == [7]

    def test_rows_for_other_processes_are_not_held(self, make: Any) -> None:
        store = Store()
        prefetcher = make(store, room=8)
        prefetcher.follow(parts(range(100)), holds=False)
        store.wait_begun(8)
        wait_idle(prefetcher)
        assert not prefetcher.slots and prefetcher.ahead == 0
        assert sorted(store.begun) == list(range(8))  # not further than the room, from what was needed last
        prefetcher.need(rows(0, 1, 2, 3))
        store.wait_begun(12)
        wait_idle(prefetcher)
        assert sorted(set(store.begun)) == list(range(12))

    def test_spilled_rows_are_fetched_and_not_held(self, make: Any) -> None:
        store = Store()
        prefetcher = make(store, room=5, spills=True)
        prefetcher.follow(parts(range(100)))
        store.wait_begun(100)
        wait_idle(prefetcher)
        assert sorted(store.begun) == list(range(100))
        assert prefetcher.ahead == 5 * SIZE == len(prefetcher.slots) * SIZE
        store.near = set(range(100))
        need_and_take(prefetcher, 0, 1, 50, 99)


class TestForgo:
    """Rows that will not be taken are not held, and not fetched where that has not begun."""

    @pytest.fixture
    def store(self) -> Store:
        return Store(is_open=False)

    def test_needed_rows_that_are_there_are_dropped(self, make: Any) -> None:
        prefetcher = make(Store())
        prefetcher.need(rows(1, 2, 2))
        take(prefetcher, 1, 2)  # of which 2 is needed once more
        assert set(prefetcher.slots) == {2}
        prefetcher.forgo(rows(2), were_needed=True)
        prefetcher.forgo(rows(1, 2, 7), were_needed=True)  # of which none is there
        assert not prefetcher.slots and prefetcher.ahead == 0

    def test_needed_rows_under_way_are_dropped_when_they_come(self, make: Any, store: Store) -> None:
        prefetcher = make(store, connections=1)
        prefetcher.need(rows(1, 2))
        store.wait_begun(1)
        prefetcher.forgo(rows(1), were_needed=True)
        store.open()
        take(prefetcher, 2)
        assert not prefetcher.slots

    def test_rows_under_way_that_are_needed_again_stay(self, make: Any, store: Store) -> None:
        prefetcher = make(store, connections=1)
        prefetcher.need(rows(1))
        store.wait_begun(1)
        prefetcher.forgo(rows(1), were_needed=True)
        prefetcher.need(rows(1))
        store.open()
        take(prefetcher, 1)
        assert store.begun == [1] and not prefetcher.slots

    def test_rows_that_only_an_order_has_are_not_fetched(self, make: Any, store: Store) -> None:
        prefetcher = make(store, connections=1)
        prefetcher.follow(parts([1, 2, 3, 2]))
        store.wait_begun(1)
        prefetcher.forgo(rows(2, 3), were_needed=False)  # 2 comes once more
        store.open()
        need_and_take(prefetcher, 1, 2)
        assert sorted(store.begun) == [1, 2] and prefetcher.ahead == 0

    @pytest.mark.parametrize("is_there", [False, True])
    def test_rows_that_were_fetched_for_an_order_make_room(self, is_there: bool, make: Any) -> None:
        store = Store(is_open=is_there)
        prefetcher = make(store, room=1, connections=1)
        prefetcher.follow(parts([1, 2]))
        store.wait_begun(1)
        assert prefetcher.ahead == SIZE and 2 not in store.begun
        prefetcher.forgo(rows(1), were_needed=False)
        store.open()
        store.wait_begun(2)
        need_and_take(prefetcher, 2)
        assert not prefetcher.slots and prefetcher.ahead == 0


class TestThreads:
    """Errors, closing, staging beside requests, processes."""

    def test_errors_are_raised_where_the_row_is_taken_and_not_kept(self, make: Any) -> None:
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

    def test_an_order_that_fails_costs_only_what_is_ahead(self, make: Any, caplog: Any) -> None:
        def order() -> Iterator[Int64Array]:
            yield rows(0, 1)
            raise ValueError("no more")

        prefetcher = make(Store())
        prefetcher.follow(order())
        need_and_take(prefetcher, 0, 5)
        assert "no more" in caplog.text

    def test_closing_is_an_error_for_a_thread_that_waits(self, make: Any) -> None:
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

    def test_requests_go_on_while_objects_are_being_staged(self, make: Any) -> None:
        store = SlowStaging(is_open=False)
        make(store, connections=1).follow(parts(range(12)))
        assert store.wait_begun(12) == list(range(12))

    def test_an_object_is_taken_while_it_is_still_being_staged(self, make: Any) -> None:
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
    def test_threads_that_fetch_leave_processors_to_others(self, make: Any) -> None:
        found: list[int] = []

        class Noting(Store):
            def fetch(self, row: int, give: object = None) -> bytes:
                found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
                return super().fetch(row, give)

        own = os.getpriority(os.PRIO_PROCESS, 0)
        need_and_take(make(Noting(), connections=2), 0, 1)
        assert found == [min(own + 5, 19)] * 2
        assert os.getpriority(os.PRIO_PROCESS, 0) == own

    def test_threads_end_when_the_owner_is_collected(self) -> None:
        store = Store()
        owner = type("Owner", (), {})()
        Prefetcher(store, 100, Pace(4), owner=owner).follow(parts(range(50)))
        store.wait_begun(10)
        del owner
        gc.collect()  # ``no_leaks`` waits for the threads

    def test_a_forked_child_begins_anew(self, make: Any, in_child: Any) -> None:
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


class TestPace:
    """As many requests as latency and bandwidth need, by a simulated store."""

    def limit(self, pace: Pace, latency: float, rate: float, *, used: int | None = None) -> float:
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
        ],
    )
    def test_it_rises_to_what_is_needed(
        self, latency: float, rate: float, used: Any, least: int, most: int
    ) -> None:
        pace = Pace("auto")
        assert least <= self.limit(pace, latency, rate, used=used) <= most and pace.most == 128

    def test_it_falls_where_a_network_becomes_slower_and_rises_again(self) -> None:
        pace = Pace("auto")
        assert self.limit(pace, 0.03, 1e6) == 128
        assert self.limit(pace, 0.03, 200) <= 32
        assert self.limit(pace, 0.03, 1e6) == 128

    def test_a_given_number_stays(self) -> None:
        for latency in (0.001, 1.0):
            pace = Pace(7)
            assert self.limit(pace, latency, 100) == pace.most == 7
