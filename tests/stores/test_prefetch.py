"""Objects are fetched in the order in which they will be needed, within bounds, and each is there when taken."""

from __future__ import annotations

import gc
import os
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
_SIZE = 10


class _Store:
    """Objects of 10 bytes that are their numbers; given when they are let go."""

    def __init__(self, *, open: bool = True, near: set[int] | None = None) -> None:
        self.near = near or set()
        self.begun: list[int] = []
        self.failing: dict[int, Exception] = {}
        self._gate = threading.Condition()
        self._is_open = open
        self._allowed: set[int] = set()
        self.most = self.now = 0

    def nbytes(self, rows: Int64Array) -> Int64Array:
        return np.full(len(rows), _SIZE, np.int64)

    def are_staged(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        return np.array([row in self.near for row in rows.tolist()], np.bool_)

    def fetch(self, row: int, give: object = None) -> bytes:
        with self._gate:
            self.begun.append(row)
            self.now += 1
            self.most = max(self.most, self.now)
            self._gate.notify_all()
            while not (self._is_open or row in self._allowed):
                self._gate.wait()
            self.now -= 1
        if row in self.failing:
            raise self.failing[row]
        return content(row)

    def let(self, *rows: int) -> None:
        """Give these; all from now on, if there are none."""
        with self._gate:
            self._allowed.update(rows)
            self._is_open = self._is_open or not rows
            self._gate.notify_all()

    def wait_begun(self, count: int) -> list[int]:
        with self._gate:
            assert self._gate.wait_for(lambda: len(self.begun) >= count, 60), self.begun
            return list(self.begun)


def content(row: int) -> bytes:
    return f"{row:010}".encode()


def rows(*numbers: int) -> Int64Array:
    return np.array(numbers, np.int64)


def parts(numbers: Any, size: int = 4) -> Iterator[Int64Array]:
    numbers = list(numbers)
    return (np.array(numbers[at : at + size], np.int64) for at in range(0, len(numbers), size))


@pytest.fixture
def make() -> Iterator[Callable[..., Prefetcher]]:
    made: list[tuple[Prefetcher, _Store]] = []

    def prefetcher(store: _Store, room: int = 1000, connections: int = 8, **options: Any) -> Prefetcher:
        one = Prefetcher(store, room * _SIZE, Pace(connections), **options)
        made.append((one, store))
        return one

    yield prefetcher
    for one, store in made:
        store.let()
        one.close()


def _idle(prefetcher: Prefetcher) -> None:
    """Wait until its threads have nothing to do."""
    shared = prefetcher

    def is_busy() -> bool:
        with shared.changed:
            has_room = not shared.ahead or shared.ahead + _SIZE <= shared.read_ahead
            waits = shared.urgent or (shared.coming and has_room)
            return bool(shared.active or waits or shared.is_walking or shared._may_walk())

    while is_busy():
        threading.Event().wait(0.001)


def test_an_order_is_fetched_before_anybody_asks(make: Any) -> None:
    store = _Store()
    prefetcher = make(store)
    prefetcher.follow(parts(range(20)))
    assert sorted(store.wait_begun(20)) == list(range(20))
    prefetcher.need(rows(*range(20)))
    assert [prefetcher.take(row) for row in range(20)] == [content(row) for row in range(20)]
    assert len(store.begun) == 20


def test_in_its_order(make: Any) -> None:
    store, order = _Store(), [5, 3, 9, 1, 0, 2, 8]
    make(store, connections=1).follow(parts(order, 3))
    assert store.wait_begun(7) == order


def test_as_many_at_a_time_as_the_pace_allows(make: Any) -> None:
    store = _Store(open=False)
    make(store, connections=3).follow(parts(range(20)))
    store.wait_begun(3)
    store.let()
    store.wait_begun(20)
    assert store.most == 3


def test_no_more_is_held_than_there_is_room(make: Any) -> None:
    store = _Store()
    prefetcher = make(store, room=5)
    prefetcher.follow(parts(range(100)))
    store.wait_begun(5)
    _idle(prefetcher)
    assert sorted(store.begun) == [0, 1, 2, 3, 4]
    assert prefetcher.ahead == 5 * _SIZE
    prefetcher.need(rows(0, 1))  # which makes room for two
    store.wait_begun(7)
    _idle(prefetcher)
    assert sorted(store.begun) == list(range(7))


def test_an_object_larger_than_the_room_is_fetched_alone(make: Any) -> None:
    store = _Store()
    prefetcher = Prefetcher(store, 1, Pace(4))
    prefetcher.follow(parts(range(3)))
    store.wait_begun(1)
    _idle(prefetcher)
    assert store.begun == [0]
    for row in range(3):
        prefetcher.need(rows(row))
        assert prefetcher.take(row) == content(row)
    prefetcher.close()


def test_what_a_batch_needs_comes_first(make: Any) -> None:
    store = _Store(open=False)
    prefetcher = make(store, connections=1)
    prefetcher.follow(parts(range(10)))
    store.wait_begun(1)
    prefetcher.need(rows(90, 91))
    store.let()
    assert store.wait_begun(12)[:4] == [0, 90, 91, 1]


def test_what_is_needed_while_it_is_still_to_come_is_fetched_once(make: Any) -> None:
    store = _Store(open=False)
    prefetcher = make(store, connections=1)
    prefetcher.follow(parts(range(10)))
    store.wait_begun(1)
    prefetcher.need(rows(0, 7, 8))
    store.let()
    assert [prefetcher.take(row) for row in (0, 7, 8)] == [content(row) for row in (0, 7, 8)]
    store.wait_begun(10)
    _idle(prefetcher)
    assert Counter(store.begun) == Counter(range(10))


def test_what_is_near_is_not_fetched_ahead_but_can_be_taken(make: Any) -> None:
    store = _Store(near={1, 2})
    prefetcher = make(store)
    prefetcher.follow(parts(range(4)))
    prefetcher.need(rows(0, 1, 2, 3))
    _idle(prefetcher)
    assert sorted(store.begun) == [0, 3]
    assert [prefetcher.take(row) for row in range(4)] == [content(row) for row in range(4)]


def test_without_any_of_this_a_row_is_fetched_where_it_is_taken(make: Any) -> None:
    store = _Store()
    prefetcher = make(store)
    assert prefetcher.take(3) == content(3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fastpipe-fetch")]


def test_a_row_that_comes_twice_is_there_twice(make: Any) -> None:
    store = _Store()
    prefetcher = make(store)
    prefetcher.follow(parts([1, 2, 1, 3, 1]))
    for row in (1, 2, 1, 3, 1):
        prefetcher.need(rows(row))
    assert [prefetcher.take(row) for row in (1, 2, 1, 3, 1)] == [content(row) for row in (1, 2, 1, 3, 1)]
    assert store.begun.count(1) == 1
    assert not prefetcher.slots


def test_what_comes_again_is_kept_where_it_fits(make: Any) -> None:
    for room, fetched in ((4, 4), (3, 5)):
        store = _Store()
        prefetcher = make(store, room=room, connections=1)
        prefetcher.follow(parts([0, 1, 2, 3] * 2, 8))
        for row in (0, 1, 2, 3):
            prefetcher.need(rows(row))
            assert prefetcher.take(row) == content(row)
        _idle(prefetcher)
        assert prefetcher.ahead == min(4, room) * _SIZE
        for row in (0, 1, 2, 3):
            prefetcher.need(rows(row))
            assert prefetcher.take(row) == content(row)
        assert len(store.begun) == fetched


def test_errors_go_to_who_takes_the_row_and_are_not_kept(make: Any) -> None:
    store = _Store()
    store.failing[2] = FileNotFoundError("2")
    prefetcher = make(store)
    prefetcher.follow(parts(range(4)))
    prefetcher.need(rows(0, 1, 2, 3))
    assert prefetcher.take(0) == content(0)
    with pytest.raises(FileNotFoundError):
        prefetcher.take(2)
    assert prefetcher.take(3) == content(3)
    del store.failing[2]
    assert prefetcher.take(2) == content(2)


def test_a_new_order_keeps_what_comes_again_and_drops_the_rest(make: Any) -> None:
    store = _Store()
    prefetcher = make(store, room=6)
    prefetcher.follow(parts(range(10)))
    store.wait_begun(6)
    _idle(prefetcher)
    prefetcher.follow(parts([3, 4, 20, 21, 22, 23, 24]))
    store.wait_begun(10)
    _idle(prefetcher)
    assert sorted(store.begun[6:]) == [20, 21, 22, 23]
    assert sorted(prefetcher.slots) == [3, 4, 20, 21, 22, 23]
    assert prefetcher.ahead == 6 * _SIZE


def test_batches_that_were_given_up_are_forgotten(make: Any) -> None:
    store = _Store()
    prefetcher = make(store)
    prefetcher.need(rows(1, 2, 3))
    store.wait_begun(3)
    for _ in range(2):
        prefetcher.follow(parts([7]))
    _idle(prefetcher)
    assert sorted(prefetcher.slots) == [7]


def test_for_other_processes_nothing_is_held(make: Any) -> None:
    store = _Store()
    prefetcher = make(store, room=8)
    prefetcher.follow(parts(range(100)), holds=False)
    store.wait_begun(8)
    _idle(prefetcher)
    assert not prefetcher.slots and prefetcher.ahead == 0
    assert sorted(store.begun) == list(range(8))  # not further than the room, from what was needed last
    prefetcher.need(rows(0, 1, 2, 3))
    store.wait_begun(12)
    _idle(prefetcher)
    assert sorted(set(store.begun)) == list(range(12))


def test_what_spills_is_fetched_and_not_held(make: Any) -> None:
    store = _Store()
    prefetcher = make(store, room=5, spills=True)
    prefetcher.follow(parts(range(100)))
    store.wait_begun(100)
    _idle(prefetcher)
    assert sorted(store.begun) == list(range(100))
    assert prefetcher.ahead == 5 * _SIZE == len(prefetcher.slots) * _SIZE
    store.near = set(range(100))
    prefetcher.need(rows(0, 1, 50, 99))
    assert [prefetcher.take(row) for row in (0, 1, 50, 99)] == [content(row) for row in (0, 1, 50, 99)]


def test_who_waits_when_it_is_closed_hears_of_it(make: Any) -> None:
    store = _Store(open=False)
    prefetcher = make(store)
    prefetcher.need(rows(1))
    store.wait_begun(1)
    heard: list[BaseException] = []

    def wait() -> None:
        try:
            prefetcher.take(1)
        except ClosedError as error:
            heard.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not prefetcher.slots[1].waiting:
        threading.Event().wait(0.001)
    closing = threading.Thread(target=prefetcher.close)
    closing.start()
    thread.join()
    store.let()
    closing.join()
    assert len(heard) == 1
    assert prefetcher.take(1) == content(1)  # by who takes it


class _Slow(_Store):
    """Gives what is fetched, and has still to stage it then."""

    def fetch(self, row: int, give: Any = None) -> bytes:
        with self._gate:  # before it is given, with which the next one may begin
            self.begun.append(row)
            self._gate.notify_all()
        give(content(row) + b" early")
        with self._gate:
            while not (self._is_open or row in self._allowed):
                self._gate.wait()
        return content(row)


def test_requests_go_on_while_objects_are_being_staged(make: Any) -> None:
    store = _Slow(open=False)
    make(store, connections=1).follow(parts(range(12)))
    assert store.wait_begun(12) == list(range(12))


def test_what_is_given_early_is_taken_while_it_is_still_being_staged() -> None:
    store = _Slow(open=False)
    prefetcher = Prefetcher(store, 1 << 20, Pace(1))  # requests, of which staging is none
    prefetcher.need(rows(3))
    assert prefetcher.take(3) == content(3) + b" early"
    prefetcher.need(rows(3))  # anew, beside the first that goes on
    assert prefetcher.take(3) == content(3) + b" early"
    assert store.wait_begun(2) == [3, 3] and prefetcher.active + prefetcher.staging == 2
    store.let()
    prefetcher.close()
    assert prefetcher.active + prefetcher.staging == 0


@pytest.mark.skipif(sys.platform != "linux", reason="run it on Linux, where threads have priorities")
def test_threads_that_fetch_leave_processors_to_others() -> None:
    found: list[int] = []

    class Here(_Store):
        def fetch(self, row: int, give: object = None) -> bytes:
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return super().fetch(row, give)

    own = os.getpriority(os.PRIO_PROCESS, 0)
    prefetcher = Prefetcher(Here(), 1 << 20, Pace(2))
    prefetcher.need(np.arange(2))
    for row in range(2):
        prefetcher.take(row)
    prefetcher.close()
    assert found == [min(own + 5, 19)] * 2
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_threads_end_when_its_owner_is_collected() -> None:
    store = _Store()
    owner = type("Owner", (), {})()
    Prefetcher(store, 100, Pace(4), owner=owner).follow(parts(range(50)))
    store.wait_begun(10)
    del owner
    gc.collect()  # ``no_leaks`` waits for the threads


def test_an_order_that_fails_costs_only_what_is_ahead(make: Any, caplog: Any) -> None:
    def order() -> Iterator[Int64Array]:
        yield rows(0, 1)
        raise ValueError("no more")

    store = _Store()
    prefetcher = make(store)
    prefetcher.follow(order())
    prefetcher.need(rows(0, 5))
    assert [prefetcher.take(row) for row in (0, 5)] == [content(0), content(5)]
    assert "no more" in caplog.text


def test_a_forked_child_begins_anew(make: Any, in_child: Callable[[Callable[[], object]], None]) -> None:
    store = _Store()
    prefetcher = make(store)
    prefetcher.follow(parts(range(5)))
    store.wait_begun(5)

    def child() -> None:
        assert not prefetcher.slots
        prefetcher.need(rows(1, 2))
        assert [prefetcher.take(row) for row in (1, 2, 3)] == [content(row) for row in (1, 2, 3)]
        os._exit(0)

    in_child(child)
    prefetcher.need(rows(4))
    assert prefetcher.take(4) == content(4)


@given(
    st.lists(st.integers(0, 30), max_size=60),
    st.lists(st.integers(0, 30), max_size=60),
    st.integers(1, 12),
    st.integers(1, 8),
    st.sets(st.integers(0, 30)),
    st.booleans(),
)
def test_whatever_is_said_to_come_each_row_is_what_it_is(
    said: list[int], taken: list[int], room: int, connections: int, near: set[int], is_needed: bool
) -> None:
    store = _Store(near=near)
    prefetcher = Prefetcher(store, room * _SIZE, Pace(connections))
    try:
        prefetcher.follow(parts(said, 7))
        for batch in parts(taken, 5):
            if is_needed:
                prefetcher.need(batch)
            assert [prefetcher.take(row) for row in batch.tolist()] == [
                content(row) for row in batch.tolist()
            ]
            assert 0 <= prefetcher.ahead <= room * _SIZE
        prefetcher.follow(parts([]))
        prefetcher.follow(parts([]))
        _idle(prefetcher)
        assert not prefetcher.slots and prefetcher.ahead == 0
    finally:
        prefetcher.close()
