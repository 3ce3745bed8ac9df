"""A store that asks again."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from fastpipe.core.types import FetchedObject, StoredObject
from fastpipe.errors import ClosedError, ObjectChangedError, StoreAccessError, StoreBusyError, StoreError
from fastpipe.stores.retrying import Retries, RetryingStore


class Flaky:
    """A store with a plan: each request takes the next entry, and fails with it if it is an error."""

    name = "s3://flaky"

    def __init__(self, plan: Iterator[Exception | None]) -> None:
        self._plan = plan
        self.tries = 0
        self.closed = False

    def _next(self) -> None:
        self.tries += 1
        error = next(self._plan, None)
        if error is not None:
            raise error

    def folders(self, prefix: str) -> list[str]:
        self._next()
        return ["cat"]

    def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        return self.objects_after(prefix, "")

    def objects_after(self, prefix: str, after: str) -> Iterator[Sequence[StoredObject]]:
        for start in range(0, 10, 2):
            page = [StoredObject(f"{prefix}{number}", 1, "v") for number in range(start, start + 2)]
            if page[-1].key > after:
                self._next()
                yield [one for one in page if one.key > after]

    def find(self, key: str) -> StoredObject:
        self._next()
        return StoredObject(key, 1, "v")

    def describe(self) -> str:
        return "flaky"

    def get(self, key: str, version: str = "") -> FetchedObject:
        self._next()
        return FetchedObject(key.encode(), version)

    def get_range(self, key: str, start: int, stop: int, version: str = "") -> bytes:
        self._next()
        return key.encode()[start:stop]

    def close(self) -> None:
        self.closed = True


class Time:
    """A clock that goes on when somebody waits."""

    def __init__(self, per_try: float = 0.0) -> None:
        self.now, self.waits, self.per_try = 1000.0, [], per_try  # type: tuple[float, list[float], float]

    def clock(self) -> float:
        self.now += self.per_try
        return self.now

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        return False


def _busy(count: int | None = None) -> Iterator[Exception | None]:
    number = 0
    while count is None or number < count:
        number += 1
        yield StoreBusyError(f"busy {number}")


def _retrying(
    plan: Iterator[Any], time: Time, draw: Callable[[], float] = lambda: 1.0, **policy: Any
) -> tuple[Any, Flaky]:
    flaky = Flaky(plan)
    return RetryingStore(flaky, Retries(**policy), clock=time.clock, wait=time.wait, draw=draw), flaky


def test_what_works_is_handed_through() -> None:
    time = Time()
    store, flaky = _retrying(iter(()), time)
    assert store.name == "s3://flaky"
    assert store.get("abc", "v") == (b"abc", "v")
    assert store.get_range("abc", 1, 2, "v") == b"b"
    assert store.folders("") == ["cat"]
    assert [one.key for page in store.objects("x") for one in page] == [f"x{number}" for number in range(10)]
    assert time.waits == []
    store.close()
    assert flaky.closed


@pytest.mark.parametrize(
    "ask", [lambda s: s.get("k"), lambda s: s.get_range("k", 0, 1), lambda s: s.folders("")]
)
def test_a_busy_store_is_asked_again(ask: Callable[[Any], object]) -> None:
    time = Time()
    store, flaky = _retrying(_busy(3), time)
    assert ask(store)
    assert flaky.tries == 4
    assert time.waits == [0.1, 0.2, 0.4]


def test_waits_double_up_to_a_cap_and_are_drawn_in_full() -> None:
    time = Time()
    store, _ = _retrying(_busy(), time, draw=lambda: 0.5, tries=9)
    with pytest.raises(StoreBusyError):
        store.get("k")
    assert time.waits == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.5, 2.5]


def test_tries_have_an_end_and_the_error_tells_them() -> None:
    store, flaky = _retrying(_busy(), Time())
    with pytest.raises(StoreBusyError, match=r"busy 8; tried 8× in 11\.3 s"):
        store.get("k")
    assert flaky.tries == 8


def test_time_has_an_end() -> None:
    time = Time()
    store, flaky = _retrying(_busy(), time, tries=1000)
    with pytest.raises(StoreBusyError):
        store.get("k")
    assert 55 <= sum(time.waits) <= 60


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError("x"), StoreAccessError("x"), ObjectChangedError("x"), StoreError("x"), KeyError("x")],
)
def test_what_does_not_help_is_not_tried_again(error: Exception) -> None:
    store, flaky = _retrying(iter([error]), Time())
    with pytest.raises(type(error)):
        store.get("k")
    assert flaky.tries == 1


def test_a_list_goes_on_where_it_was() -> None:
    failing = [None, StoreBusyError("a"), StoreBusyError("b"), None, None, StoreBusyError("c"), None, None]
    store, flaky = _retrying(iter(failing), Time())
    assert [one.key for page in store.objects("x") for one in page] == [f"x{number}" for number in range(10)]
    assert flaky.tries == len(failing)


def test_each_page_of_a_list_has_all_tries() -> None:
    plan = [error for _ in range(5) for error in [*([StoreBusyError("x")] * 7), None]]
    store, _ = _retrying(iter(plan), Time())
    assert sum(len(page) for page in store.objects("x")) == 10


def test_a_list_begins_behind_a_key_where_the_store_can_do_that(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = _retrying(iter([StoreBusyError("x"), None, StoreBusyError("x")]), Time())
    assert store.objects_after is not None
    found = [one.key for page in store.objects_after("x", "x4") for one in page]
    assert found == ["x5", "x6", "x7", "x8", "x9"]
    monkeypatch.setattr(Flaky, "objects_after", None)
    assert store.objects_after is None


def test_a_list_that_cannot_go_on_fails_and_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Flaky.objects_after

    def objects(self: Flaky, prefix: str) -> Iterator[Sequence[StoredObject]]:
        return whole(self, prefix, "")

    monkeypatch.setattr(Flaky, "objects", objects)
    monkeypatch.setattr(Flaky, "objects_after", None)
    store, _ = _retrying(iter([StoreBusyError("first"), None, StoreBusyError("second")]), Time())
    pages = store.objects("x")
    assert len(next(pages)) == 2
    with pytest.raises(StoreError, match="second, in the middle of a list") as caught:
        next(pages)
    assert not isinstance(caught.value, StoreBusyError)


def test_refusals_are_not_asked_again() -> None:
    store, flaky = _retrying(iter([StoreBusyError("x"), FileNotFoundError("y")]), Time())
    with pytest.raises(FileNotFoundError):
        store.get("k")
    assert flaky.tries == 2


def test_the_log_says_at_most_once_a_minute_that_it_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    time = Time()
    store, flaky = _retrying(_busy(5), time)
    for _ in range(9):
        store.get("k")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "s3://flaky" in caplog.text and "busy 1" in caplog.text
    time.now += 100.0
    flaky._plan = _busy(1)
    store.get("k")
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_closing_ends_a_wait_at_once() -> None:
    waits = threading.Event()

    class Announcing(Flaky):
        def _next(self) -> None:
            waits.set()
            super()._next()

    flaky = Announcing(_busy())
    store = RetryingStore(flaky, Retries(base=3600.0, cap=3600.0, seconds=1e6), draw=lambda: 1.0)
    ended: list[BaseException] = []

    def ask() -> None:
        try:
            store.get("k")
        except ClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    waits.wait()
    store.close()
    thread.join()
    assert len(ended) == 1 and "s3://flaky" in str(ended[0])
    with pytest.raises(ClosedError):
        store.get("k")
    assert flaky.tries == 1


def test_a_forked_child_begins_anew(in_child: Callable[[Callable[[], object]], None]) -> None:
    store, _ = _retrying(iter(()), Time())
    store.close()

    def check() -> None:
        assert store.get("k").data == b"k"

    in_child(check)


def test_a_copy_by_pickle_asks_the_same_store_by_the_same_policy() -> None:
    from fastpipe.stores.opening import open_store

    store = RetryingStore(open_store("/data/x")[0], Retries(tries=3))
    again = pickle.loads(pickle.dumps(store))
    assert again.name == store.name == "/data/x/"
    assert repr(again) == repr(store) == "RetryingStore(FolderStore('/data/x/'))"
    assert again._policy == Retries(tries=3)
