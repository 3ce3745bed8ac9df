"""A store that asks again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import pytest
from clock import ManualClock

from fastpipe.core.types import FetchedObject, StoredObject
from fastpipe.errors import ClosedError, ObjectChangedError, StoreAccessError, StoreBusyError, StoreError
from fastpipe.stores.retrying import Retries, RetryingStore

BUSY = StoreBusyError("busy")
ALL = [f"x{number}" for number in range(10)]


class Flaky:
    """A store with a plan: each request takes the next entry, and fails with it if it is an error."""

    name = "s3://flaky"
    objects_after: Any

    def __init__(self, plan: Iterable[Exception | None], *, can_begin_after: bool = True) -> None:
        self.plan = iter(plan)
        self.tries = 0
        self.closed = False
        self.objects_after = self.pages if can_begin_after else None

    def next(self) -> None:
        self.tries += 1
        error = next(self.plan, None)
        if error is not None:
            raise error

    def folders(self, prefix: str) -> list[str]:
        self.next()
        return ["cat"]

    def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        return self.pages(prefix, "")

    def pages(self, prefix: str, after: str) -> Iterator[Sequence[StoredObject]]:
        for start in range(0, 10, 2):
            page = [StoredObject(f"{prefix}{number}", 1, "v") for number in range(start, start + 2)]
            if page[-1].key > after:
                self.next()
                yield [one for one in page if one.key > after]

    def find(self, key: str) -> StoredObject:
        self.next()
        return StoredObject(key, 1, "v")

    def get(self, key: str, version: str = "") -> FetchedObject:
        self.next()
        return FetchedObject(key.encode(), version)

    def get_range(self, key: str, start: int, stop: int, version: str = "") -> bytes:
        self.next()
        return key.encode()[start:stop]

    def close(self) -> None:
        self.closed = True


class Time(ManualClock):
    """A clock that goes on when somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.sleep(seconds)
        return False


@pytest.fixture
def time() -> Time:
    return Time()


def retrying(time: Time, *plan: Any, of: Any = None, draw: float = 1.0, **policy: Any) -> tuple[Any, Flaky]:
    flaky: Any = of or Flaky(plan)
    return RetryingStore(flaky, Retries(**policy), clock=time, wait=time.wait, draw=lambda: draw), flaky


def keys_of(pages: Any) -> list[str]:
    return [one.key for page in pages for one in page]


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda store: store.get("abc", "v"), (b"abc", "v")), (lambda store: store.folders(""), ["cat"]),
        (lambda store: store.get_range("abc", 1, 2, "v"), b"b"), (lambda store: store.find("k").key, "k"),
    ],
)  # fmt: skip
def test_a_busy_store_is_asked_again(time: Time, ask: Callable[[Any], object], answer: object) -> None:
    store, flaky = retrying(time, None, BUSY, BUSY, BUSY)
    assert store.name == "s3://flaky"
    assert ask(store) == answer and time.waits == []
    assert ask(store) == answer and time.waits == [0.1, 0.2, 0.4]
    assert flaky.tries == 5


def test_waits_double_up_to_a_cap_and_tries_and_time_have_an_end(time: Time) -> None:
    store, flaky = retrying(time, *repeat(BUSY, 99))
    with pytest.raises(StoreBusyError, match=r"busy; tried 8× in 11\.3 s"):
        store.get("k")
    assert flaky.tries == 8
    time.waits.clear()
    store, _ = retrying(time, *repeat(BUSY, 9), draw=0.5, tries=9)
    with pytest.raises(StoreBusyError):
        store.get("k")
    assert time.waits == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.5, 2.5]
    time.waits.clear()
    store, _ = retrying(time, *repeat(BUSY, 999), tries=1000)
    with pytest.raises(StoreBusyError):
        store.get("k")
    assert 55 <= sum(time.waits) <= 60


def test_other_errors_end_it(time: Time) -> None:
    for kind in (FileNotFoundError, StoreAccessError, ObjectChangedError, StoreError, KeyError):
        store, flaky = retrying(time, BUSY, kind("x"))
        with pytest.raises(kind):
            store.get("k")
        assert flaky.tries == 2


def test_a_list_goes_on_where_it_was_and_each_page_has_all_tries(time: Time) -> None:
    plan = [error for _ in range(5) for error in [*repeat(BUSY, 7), None]]
    store, flaky = retrying(time, *plan)
    assert keys_of(store.objects("x")) == ALL and flaky.tries == len(plan)


def test_a_list_begins_behind_a_key_where_the_store_can_do_that(time: Time) -> None:
    store, _ = retrying(time, BUSY, None, BUSY)
    assert keys_of(store.objects_after("x", "x4")) == ALL[5:]
    store, _ = retrying(time, of=Flaky([BUSY, None, BUSY], can_begin_after=False))
    assert store.objects_after is None
    pages = store.objects("x")
    assert len(next(pages)) == 2
    with pytest.raises(StoreError, match="busy, in the middle of a list") as caught:  # and repeats nothing
        next(pages)
    assert not isinstance(caught.value, StoreBusyError)


def test_the_log_warns_at_most_once_a_minute(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    store, flaky = retrying(time, *repeat(BUSY, 5))
    for _ in range(9):
        store.get("k")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "s3://flaky" in caplog.text and "busy" in caplog.text
    time.now += 100.0
    flaky.plan = iter([BUSY])
    store.get("k")
    assert len(caplog.records) == 2


def test_closing_ends_a_wait_at_once(in_child: Callable[[Callable[[], object]], None]) -> None:
    waits = threading.Event()

    class Announcing(Flaky):
        def next(self) -> None:
            waits.set()
            super().next()

    flaky = Announcing([BUSY])
    store = RetryingStore(flaky, Retries(base=3600.0, cap=3600.0, seconds=1e6), draw=lambda: 1.0)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(store.get, "k")
        waits.wait()
        store.close()
        with pytest.raises(ClosedError, match="s3://flaky"):
            asked.result()
    with pytest.raises(ClosedError):
        store.get("k")
    assert flaky.tries == 1 and flaky.closed
    in_child(lambda: store.get("k"))  # a forked child begins anew
