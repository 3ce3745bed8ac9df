"""``ChunkCache``: decoded chunks of a file in a store, looked up many at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastpipe.cache.chunks import ChunkCache

from fastpipe.cache import locks
from fastpipe.cache import store as store_module
from fastpipe.cache.identity import FileIdentity
from fastpipe.cache.store import EntryStore

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="run it on Linux, which has files in memory"
)

MARKS = 1 << 12


@pytest.fixture(params=["memory", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., EntryStore]]:
    """Opens a store; those on disk again over the same files."""
    is_in_memory = request.param == "memory"

    def open_store(max_bytes: int = 1 << 20) -> EntryStore:
        if is_in_memory:
            data, log = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("data", "log"))
            os.ftruncate(data, MARKS + max_bytes)
        else:
            data, log = (
                os.open(tmp_path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                for name in ("data", "log")
            )
        return EntryStore(
            data, log, max_bytes, verify=not is_in_memory, marks=MARKS, is_in_memory=is_in_memory
        )  # fmt: skip

    yield open_store


def keep(cache: ChunkCache, number: int, data: Any) -> None:
    cache.keep(np.array([number]), [data])


def chunks_of(
    store: EntryStore, tag: bytes = b"a", count: int = 10, settled: bool = True, second: bool = False
) -> ChunkCache:
    digest = tag.ljust(16, b"\0")
    return ChunkCache(store, FileIdentity(digest, bytes(40), "x.h5", settled), count, is_second_use=second)


def chunk(number: int, size: int = 100) -> Any:
    return np.full(size, number, np.uint8)


def content(cache: ChunkCache, place: int, size: int = 100) -> list[int]:
    if cache.memory is not None:
        return cache.memory[place : place + size].tolist()
    return list(os.pread(cache.descriptor, size, place))


def places(cache: ChunkCache, *numbers: int) -> list[int]:
    return cache.places(np.array(numbers, np.int64)).tolist()


def test_what_is_kept_is_found(make: Any) -> None:
    cache = chunks_of(make())
    assert places(cache, 0, 3, 3) == [-1] * 3
    for number in (3, 9):
        keep(cache, number, chunk(number))
    found = places(cache, 9, 0, 3, 9)
    assert found[1] == -1
    assert found[0] == found[3] >= MARKS
    assert content(cache, found[0]) == [9] * 100
    assert content(cache, found[2]) == [3] * 100
    assert places(cache) == []


def test_other_datasets_and_files_have_their_own(make: Any) -> None:
    store = make()
    one, other, again = chunks_of(store), chunks_of(store, b"b"), chunks_of(store)
    assert places(again, 1) == [-1]
    keep(one, 1, chunk(1))
    assert places(other, 1) == [-1]
    keep(other, 1, chunk(2))
    # What another one kept since is found, though it was looked for before.
    assert content(again, places(again, 1)[0]) == [1] * 100
    assert content(other, places(other, 1)[0]) == [2] * 100


def test_the_second_use(make: Any) -> None:
    store = make()
    for use in range(3):
        cache = chunks_of(store, second=True)
        assert (places(cache, 5)[0] >= 0) is (use == 2)
        keep(cache, 5, chunk(5))
    assert content(cache, places(cache, 5)[0]) == [5] * 100


def test_a_file_that_may_still_change_unseen_is_not_kept(make: Any) -> None:
    cache = chunks_of(make(), settled=False)
    keep(cache, 1, chunk(1))
    assert places(cache, 1) == [-1]


def test_several_are_kept_at_once(make: Any) -> None:
    store = make()
    cache, numbers = chunks_of(store, count=3000), np.arange(0, 3000, 2)
    keep(cache, 4, chunk(4, 30))
    for some in (numbers[:2], numbers[:1000], numbers[900:]):  # with some that are there
        cache.keep(some, [chunk(int(number) % 256, 30) for number in some])
    for one in (cache, chunks_of(store, count=3000)):
        found = places(one, *range(3000))
        assert [place >= 0 for place in found] == [number % 2 == 0 for number in range(3000)]
        for number in range(0, 3000, 178):
            assert content(one, found[number], 30) == [number % 256] * 30


def test_processes_that_keep_the_same_at_once_keep_them_all(
    make: Any, forked: Callable[[Callable[[], object]], int]
) -> None:
    store = make()

    def work() -> None:
        locks._TRIES = 60_000  # whoever has the lock may be kept waiting for a core
        cache = chunks_of(store, count=500)
        for first in range(0, 500, 20):
            numbers = np.arange(first, first + 20)
            cache.keep(numbers, [chunk(int(number) % 256, 50) for number in numbers])

    pids = [forked(work) for _ in range(3)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 3
    found = places(chunks_of(store, count=500), *range(500))
    assert all(content(chunks_of(store, count=500), found[k], 50) == [k % 256] * 50 for k in range(0, 500, 7))


def test_a_full_store_keeps_what_it_has(make: Any) -> None:
    cache = chunks_of(make(5000), count=100)
    for _ in range(2):
        for number in range(100):
            keep(cache, number, chunk(number, 1000))
        found = places(cache, *range(100))
        kept = [number for number in range(100) if found[number] >= 0]
        assert kept == list(range(len(kept)))
        assert len(kept) == 4  # of 1,024 bytes each, with what they are aligned to
    assert all(content(cache, found[number], 1000) == [number] * 1000 for number in kept)


def test_other_processes_find_it(make: Any, in_child: Callable[[Callable[[], object]], None]) -> None:
    store = make()
    cache = chunks_of(store)
    keep(cache, 1, chunk(1))

    def child() -> None:
        assert content(cache, places(cache, 1)[0]) == [1] * 100
        keep(cache, 2, chunk(2))

    in_child(child)
    assert content(cache, places(cache, 2)[0]) == [2] * 100


def test_damage_on_disk_is_a_chunk_that_is_not_there(make: Any, tmp_path: Path) -> None:
    store = make()
    if store.is_in_memory:
        assert chunks_of(store).memory is not None
        return
    cache = chunks_of(store)
    for number in (1, 2):
        keep(cache, number, chunk(number))
    place = places(cache, 1)[0]
    with open(tmp_path / "data", "r+b") as file:
        file.seek(place + 50)
        file.write(b"\xff")
    again = chunks_of(make())
    assert places(again, 1, 2)[0] == -1
    assert content(again, places(again, 2)[0]) == [2] * 100
    keep(again, 1, chunk(1))  # is kept anew
    assert content(again, places(again, 1)[0]) == [1] * 100


def test_looking_again_costs_nothing_while_nothing_is_new(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = make(), []
    cache, real = chunks_of(store), store_module.EntryStore.find

    def find(self: Any, digest: bytes) -> Any:
        asked.append(digest)
        return real(self, digest)

    monkeypatch.setattr(store_module.EntryStore, "find", find)
    keep(chunks_of(store, b"b"), 0, chunk(0))
    asked.clear()
    for _ in range(3):
        places(cache, 4, 5, 4)
    assert len(asked) == 2
    keep(chunks_of(store, b"b"), 1, chunk(1))
    asked.clear()
    places(cache, 4)
    assert len(asked) == 1
