"""How objects get into the stage: once each, whoever writes them, and no thread waits for the disk in vain."""

from __future__ import annotations

import hashlib
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastpipe.core.types import FetchedObject
from fastpipe.options import Stage
from fastpipe.stores import fetching
from fastpipe.stores.fetching import Fetcher
from fastpipe.stores.prefetch import Pace
from fastpipe.stores.stage import StageFolder
from fastpipe.stores.table import StageTable

_COUNT = 200


def content(row: int) -> bytes:
    return b"%06d" % row


class Listing:
    sizes = np.full(_COUNT, 6, np.int64)

    def __len__(self) -> int:
        return _COUNT

    def key(self, row: int) -> str:
        return str(row)

    def path(self, row: int) -> str:
        return str(row)

    def version(self, row: int) -> str:
        return ""


class Store:
    """Counts what it gives."""

    def __init__(self) -> None:
        self.given: Counter[str] = Counter()

    def get(self, key: str, version: str) -> FetchedObject:
        self.given[key] += 1
        return FetchedObject(content(int(key)), "")


@pytest.fixture
def table(tmp_path: Path) -> Any:
    def name(row: int) -> bytes:
        return hashlib.blake2b(b"%d" % row, digest_size=16).digest()

    table = StageFolder(Stage(tmp_path / "stage")).open_table(bytes(16), Listing.sizes, name)
    yield table
    table.close()


def make(table: StageTable) -> tuple[Fetcher, Store]:
    store: Any = Store()
    return Fetcher(store, Listing(), table, Pace("auto")), store


def test_who_comes_while_another_writes_leaves_it_to_that_one(
    table: StageTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "available_cpus", lambda: 1)
    fetcher, _ = make(table)
    is_at_it, may_go_on = threading.Event(), threading.Event()
    keep, given = table.keep, list[bytes]()

    def slowly(row: int, data: bytes) -> bool:
        is_at_it.set()
        may_go_on.wait()
        return keep(row, data)

    monkeypatch.setattr(table, "keep", slowly)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(fetcher.fetch, 0, given.append)
        is_at_it.wait()
        assert given == [content(0)]  # it need not wait for the disk
        for row in (1, 2):
            assert fetcher.fetch(row, given.append) == content(row)
        assert not any(table.has(row) for row in range(3))
        may_go_on.set()
        assert first.result() == content(0)
    assert [table.read(row) for row in range(3)] == [content(row) for row in range(3)]
    assert given == [content(row) for row in range(3)]
    with table.claim(1, 0.0) as is_free:  # which is let go of by whoever has written
        assert is_free


def test_where_too_much_waits_to_be_written_who_brings_more_waits_too(
    table: StageTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "available_cpus", lambda: 1)
    monkeypatch.setattr(fetching, "_MOST_UNWRITTEN", 1)
    fetcher, _ = make(table)
    with fetcher._writing:
        fetcher.fetch(0, lambda data: None)
        is_given = threading.Event()
        waiting = threading.Thread(target=fetcher.fetch, args=(1, lambda data: is_given.set()))
        waiting.start()
        is_given.wait()
        assert not table.has(0) and waiting.is_alive()
    waiting.join()
    assert table.has(0) and table.has(1)


@pytest.mark.parametrize("cpus", [1, 4])
def test_many_threads_stage_each_object_once(
    table: StageTable, cpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "available_cpus", lambda: cpus)
    fetcher, store = make(table)
    keep, kept = table.keep, Counter[int]()

    def counted(row: int, data: bytes) -> bool:
        kept[row] += 1
        return keep(row, data)

    monkeypatch.setattr(table, "keep", counted)
    rows = [*range(_COUNT)] * 2
    random.Random(0).shuffle(rows)
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda row: fetcher.fetch(row, (lambda data: None) if row % 5 else None), rows))
    assert found == [content(row) for row in rows]
    assert kept == Counter(range(_COUNT)) and store.given == Counter(map(str, range(_COUNT)))
    assert not fetcher._unwritten
    assert [table.read(row) for row in range(_COUNT)] == [content(row) for row in range(_COUNT)]


def test_what_cannot_be_downloaded_is_claimed_by_nobody(table: StageTable) -> None:
    fetcher, store = make(table)

    def get(key: str, version: str) -> FetchedObject:
        raise FileNotFoundError(key)

    store.get = get  # type: ignore[method-assign]
    with pytest.raises(FileNotFoundError):
        fetcher.fetch(3, lambda data: None)
    with table.claim(3, 0.0) as is_free:
        assert is_free and not fetcher._unwritten
