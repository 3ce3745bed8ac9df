"""How objects get into the stage: once each, whoever writes them, and no thread waits for the disk in vain."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from fastpipe.core.types import FetchedObject
from fastpipe.stores import fetching
from fastpipe.stores.fetching import Fetcher
from fastpipe.stores.prefetch import Pace
from fastpipe.stores.table import StageTable

COUNT = 200


class Source:
    """A store that counts what it gives, and its listing."""

    def __init__(self, users: Any) -> None:
        self.content, self.sizes = users.content, np.full(COUNT, users.SIZE, np.int64)
        self.given: Counter[str] = Counter()

    def __len__(self) -> int:
        return COUNT

    def key(self, row: int) -> str:
        return str(row)

    def version(self, row: int) -> str:
        return ""

    def get(self, key: str, version: str) -> FetchedObject:
        self.given[key] += 1
        return FetchedObject(self.content(int(key)), "")


@pytest.fixture
def table(users: Any) -> StageTable:
    return users.open(limit=1 << 30, rows=COUNT)  # type: ignore[no-any-return]


@pytest.fixture
def source(users: Any) -> Any:
    return Source(users)


def test_a_thread_waits_where_too_much_is_unwritten(table: StageTable, source: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(fetching, "available_cpus", lambda: 1)
    monkeypatch.setattr(fetching, "_MOST_UNWRITTEN", 1)
    fetcher, is_given = Fetcher(source, source, table, Pace("auto")), threading.Event()
    with fetcher._writing:
        fetcher.fetch(0, lambda data: None)
        waiting = threading.Thread(target=fetcher.fetch, args=(1, lambda data: is_given.set()))
        waiting.start()
        is_given.wait()
        assert not table.has(0) and waiting.is_alive()
    waiting.join()
    assert table.has(0) and table.has(1)


@pytest.mark.parametrize("cpus", [1, 4])
def test_many_threads_stage_each_object_once(
    table: StageTable, source: Any, cpus: int, users: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "available_cpus", lambda: cpus)
    fetcher, keep, kept = Fetcher(source, source, table, Pace("auto")), table.keep, Counter[int]()

    def counted(row: int, data: bytes) -> bool:
        kept[row] += 1
        return keep(row, data)

    monkeypatch.setattr(table, "keep", counted)
    rows = [*range(COUNT)] * 2
    random.Random(0).shuffle(rows)
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda row: fetcher.fetch(row, (lambda data: None) if row % 5 else None), rows))
    assert found == [users.content(row) for row in rows]
    assert kept == Counter(range(COUNT)) and source.given == Counter(map(str, range(COUNT)))
    assert not fetcher._unwritten
    assert [table.read(row) for row in range(COUNT)] == [users.content(row) for row in range(COUNT)]


def test_an_object_that_cannot_be_downloaded_stays_unclaimed(table: StageTable, source: Any) -> None:
    def get(key: str, version: str) -> FetchedObject:
        raise FileNotFoundError(key)

    fetcher, source.get = Fetcher(source, source, table, Pace("auto")), get
    with pytest.raises(FileNotFoundError):
        fetcher.fetch(3, lambda data: None)
    with table.claim(3, 0.0) as is_free:
        assert is_free and not fetcher._unwritten
