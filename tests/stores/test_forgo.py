"""What nobody will take is not held, and is not fetched where that has not begun."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fastpipe.stores.prefetch import Pace, Prefetcher

Int64Array = npt.NDArray[np.int64]


class _Store:
    """Objects of 10 bytes, given once ``gate`` is set."""

    def __init__(self) -> None:
        self.gate, self.changed, self.begun = threading.Event(), threading.Condition(), list[int]()

    def nbytes(self, rows: Int64Array) -> Int64Array:
        return np.full(len(rows), 10, np.int64)

    def are_staged(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        return np.zeros(len(rows), np.bool_)

    def fetch(self, row: int, give: object = None) -> bytes:
        with self.changed:
            self.begun.append(row)
            self.changed.notify_all()
        assert self.gate.wait(60)
        return bytes([row]) * 10

    def wait_begun(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= count, 60)


@pytest.fixture
def store() -> _Store:
    return _Store()


@pytest.fixture
def make(store: _Store) -> Iterator[Callable[..., Prefetcher]]:
    made = []

    def prefetcher(read_ahead: int = 1000, threads: int = 1) -> Prefetcher:
        made.append(Prefetcher(store, read_ahead, Pace(threads)))
        return made[-1]

    yield prefetcher
    store.gate.set()
    for one in made:
        one.close()


def _rows(*rows: int) -> Int64Array:
    return np.array(rows, np.int64)


def _order(*rows: int) -> Iterator[Int64Array]:
    return iter([_rows(*rows)])


def _slots(prefetcher: Prefetcher) -> set[int]:
    return set(prefetcher.slots)


def test_what_was_needed_and_is_there_goes(make: Any, store: _Store) -> None:
    prefetcher = make()
    store.gate.set()
    prefetcher.need(_rows(1, 2, 2))
    assert prefetcher.take(1) == b"\1" * 10
    assert prefetcher.take(2) == b"\2" * 10  # which is needed once more
    assert _slots(prefetcher) == {2}
    prefetcher.forgo(_rows(2), were_needed=True)
    prefetcher.forgo(_rows(1, 2, 7), were_needed=True)  # nobody has these
    assert _slots(prefetcher) == set() and prefetcher.ahead == 0


def test_what_was_needed_and_is_under_way_goes_when_it_comes(make: Any, store: _Store) -> None:
    prefetcher = make()
    prefetcher.need(_rows(1, 2))
    store.wait_begun(1)
    prefetcher.forgo(_rows(1), were_needed=True)
    store.gate.set()
    assert prefetcher.take(2) == b"\2" * 10
    assert _slots(prefetcher) == set()


def test_what_is_under_way_and_needed_again_stays(make: Any, store: _Store) -> None:
    prefetcher = make()
    prefetcher.need(_rows(1))
    store.wait_begun(1)
    prefetcher.forgo(_rows(1), were_needed=True)
    prefetcher.need(_rows(1))
    store.gate.set()
    assert prefetcher.take(1) == b"\1" * 10
    assert store.begun == [1] and _slots(prefetcher) == set()


def test_what_only_an_order_has_is_not_fetched(make: Any, store: _Store) -> None:
    prefetcher = make()
    prefetcher.follow(_order(1, 2, 3, 2))
    store.wait_begun(1)
    prefetcher.forgo(_rows(2, 3), were_needed=False)  # 2 comes once more
    store.gate.set()
    prefetcher.need(_rows(1, 2))
    assert (prefetcher.take(1), prefetcher.take(2)) == (b"\1" * 10, b"\2" * 10)
    assert sorted(store.begun) == [1, 2] and prefetcher.ahead == 0


@pytest.mark.parametrize("is_there", [False, True])
def test_what_was_fetched_for_an_order_makes_room(is_there: bool, make: Any, store: _Store) -> None:
    prefetcher = make(read_ahead=10)
    if is_there:
        store.gate.set()
    prefetcher.follow(_order(1, 2))
    store.wait_begun(1)
    assert prefetcher.ahead == 10 and 2 not in store.begun
    prefetcher.forgo(_rows(1), were_needed=False)
    store.gate.set()
    store.wait_begun(2)
    prefetcher.need(_rows(2))
    assert prefetcher.take(2) == b"\2" * 10
    assert _slots(prefetcher) == set() and prefetcher.ahead == 0
