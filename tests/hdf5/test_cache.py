"""``CachedChunks``: decoded chunks of a file in a store, found by the native core."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from fastpipe.core import locks
from fastpipe.core.cache_store import EntryStore
from fastpipe.core.file_identity import FileIdentity
from fastpipe.core.native import native
from fastpipe.hdf5.cache import CachedChunks, chunk_nbytes
from fastpipe.hdf5.files import SampleFiles
from fastpipe.hdf5.layout import in_blocks, read_layout
from fastpipe.hdf5.reader import RowReader

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


def keep(cache: CachedChunks, number: int, data: Any) -> None:
    cache.keep([number], [data])


class Chunks(CachedChunks):
    """With the store that they are in."""

    def __init__(self, store: EntryStore, *arguments: Any, **options: Any) -> None:
        super().__init__(store, *arguments, **options)
        self.store = store


def chunks_of(
    store: EntryStore,
    tag: bytes = b"a",
    count: int = 10,
    settled: bool = True,
    second: bool = False,
    size: int = 100,
) -> Chunks:
    digest = tag.ljust(16, b"\0")
    return Chunks(store, FileIdentity(digest, bytes(40), "x.h5", settled), count, size, is_second_use=second)


def chunk(number: int, size: int = 100) -> Any:
    return np.full(size, number, np.uint8)


def content(cache: Chunks, place: int, size: int = 100) -> list[int]:
    store = cache.store
    if store.mapped is not None:
        return list(store.mapped[place : place + size].tolist())
    return list(os.pread(store.descriptors[0], size, place))


def places(cache: CachedChunks, *numbers: int) -> list[int]:
    cache.look()
    return [cache.native.find(number) for number in numbers]


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


def test_what_is_looked_for_is_the_digest_that_is_kept(make: Any) -> None:
    store = make()
    cache = chunks_of(store, count=1 << 12)
    for number in (0, 255, 256, 4095):
        assert store.put(cache._digest(number), chunk(number % 256).reshape(1, -1, 1))
        assert content(cache, places(cache, number)[0]) == [number % 256] * 100


def test_an_entry_of_another_size_is_not_taken(make: Any) -> None:
    store = make()
    keep(chunks_of(store, size=60), 1, chunk(1, 60))
    cache = chunks_of(store)
    assert places(cache, 1) == [-1]
    keep(cache, 1, chunk(1))
    assert content(cache, places(cache, 1)[0]) == [1] * 100


def test_several_are_kept_at_once(make: Any) -> None:
    store = make()
    cache, numbers = chunks_of(store, count=3000, size=30), np.arange(0, 3000, 2)
    keep(cache, 4, chunk(4, 30))
    for some in (numbers[:2], numbers[:1000], numbers[900:]):  # with some that are there
        cache.keep(some.tolist(), [chunk(int(number) % 256, 30) for number in some])
    for one in (cache, chunks_of(store, count=3000, size=30)):
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
        cache = chunks_of(store, count=500, size=50)
        for first in range(0, 500, 20):
            numbers = list(range(first, first + 20))
            cache.keep(numbers, [chunk(number % 256, 50) for number in numbers])

    pids = [forked(work) for _ in range(3)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 3
    found = places(chunks_of(store, count=500, size=50), *range(500))
    assert all(
        content(chunks_of(store, count=500, size=50), found[k], 50) == [k % 256] * 50
        for k in range(0, 500, 7)
    )


def test_a_full_store_keeps_what_it_has(make: Any) -> None:
    cache = chunks_of(make(5000), count=100, size=1000)
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
        pytest.skip("a memory of the machine's is not verified")
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


# ---- kept by batches ------------------------------------------------------------------------------


ROWS, IN_CHUNK = 24, 4
NBYTES = IN_CHUNK * 50


@pytest.fixture
def path(tmp_path: Path, settled: Callable[[Path], Path]) -> Path:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        rows = np.arange(ROWS, dtype="u1")[:, None] * np.ones(50, "u1")
        file.create_dataset("x", data=rows, chunks=(IN_CHUNK, 50), compression="gzip")
    return settled(tmp_path / "x.h5")


@pytest.fixture
def reader_with(path: Path, reader_of: Any) -> Callable[..., tuple[RowReader, Chunks]]:
    """A reader that keeps its chunks in a store."""

    def made(store: EntryStore, **options: Any) -> tuple[RowReader, Chunks]:
        cache = chunks_of(store, count=ROWS // IN_CHUNK, size=NBYTES, **options)
        return reader_of(path, keep=lambda _: cache), cache

    return made


@pytest.fixture
def decoded(read_natively: Any) -> Callable[..., int]:
    """How many chunks are decoded for samples, which must be right."""

    def count(reader: RowReader, samples: Any) -> int:
        rows = read_natively(reader, samples)
        assert rows.is_made.all()
        np.testing.assert_array_equal(rows.arrays[0], np.asarray(samples)[:, None] * np.ones(50))
        return int(rows.batch.counted[0]) // NBYTES

    return count


def test_a_batch_keeps_what_it_decodes(make: Any, reader_with: Any, decoded: Any) -> None:
    store = make()
    reader, cache = reader_with(store)
    assert decoded(reader, [0, 5, 6, 1, 23]) == 3
    assert [place >= 0 for place in places(cache, *range(6))] == [True, True, False, False, False, True]
    assert content(cache, places(cache, 1)[0], NBYTES) == np.repeat([4, 5, 6, 7], 50).tolist()
    assert decoded(reader, [7, 4, 2, 22]) == 0
    another, _ = reader_with(store)
    assert decoded(another, range(ROWS)) == 3
    assert decoded(reader, np.arange(ROWS)[::-1]) == 0


def test_the_second_use(make: Any, reader_with: Any, decoded: Any) -> None:
    reader, cache = reader_with(make(), second=True)
    for use in range(4):
        assert (places(cache, 5)[0] >= 0) is (use >= 2)
        assert decoded(reader, [20]) == (use < 2)


def test_a_file_that_may_still_change_unseen_is_not_kept(make: Any, reader_with: Any, decoded: Any) -> None:
    reader, cache = reader_with(make(), settled=False)
    for _ in range(2):
        assert decoded(reader, [5]) == 1
        assert places(cache, 1) == [-1]


def test_a_full_store_is_as_good_as_none(make: Any, reader_with: Any, decoded: Any) -> None:
    reader, _ = reader_with(make(600))
    found = [decoded(reader, range(ROWS)) for _ in range(3)]
    assert 0 < found[2] == found[1] <= found[0] == 6


def test_what_is_cut_off_or_damaged_is_decoded_again(
    make: Any, reader_with: Any, decoded: Any, tmp_path: Path
) -> None:
    store = make()
    if store.is_in_memory:
        pytest.skip("a memory of the machine's is not verified")
    reader, cache = reader_with(store)
    assert decoded(reader, range(ROWS)) == 6
    assert decoded(reader, range(ROWS)) == 0
    with open(tmp_path / "data", "r+b") as file:
        file.seek(places(cache, 1)[0] + 50)
        file.write(b"\xff")
    again, kept = reader_with(make())
    assert decoded(again, range(ROWS)) == 1
    os.truncate(tmp_path / "data", places(kept, 3)[0] + 10)
    assert decoded(again, range(ROWS)) >= 1
    assert decoded(reader_with(make())[0], range(ROWS)) >= 1


@pytest.mark.parametrize("option", ["contiguous", "plain chunks"])
def test_what_needs_no_decoding_is_kept_as_well(
    tmp_path: Path, make: Any, option: str, reader_of: Any, read_natively: Any
) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (5000, 300), np.uint8)  # of more than a block
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=rows, chunks=(700, 100) if option == "plain chunks" else None)
        layout = in_blocks(read_layout(file["x"]))
    store = make(1 << 23)
    cache = chunks_of(store, count=len(layout.offsets), size=chunk_nbytes(layout))
    reader = reader_of(tmp_path / "x.h5", keep=lambda _: cache)
    for use in range(2):
        found = read_natively(reader, [4999, 0, 17, 2500, 2500])
        assert found.is_made.all()
        np.testing.assert_array_equal(found.arrays[0], rows[[4999, 0, 17, 2500, 2500]])
        assert (found.batch.counted[0] == 0) is (use == 1)


def test_a_batch_that_was_given_up_writes_to_no_other_file(path: Path, make: Any, no_gc: None) -> None:
    """It may still be decoding, and mark what it has decoded, when the store is nobody's any more: then the
    descriptor's number must not be another file's yet."""

    def begun(store: EntryStore) -> Any:
        cache = chunks_of(store, count=6, size=NBYTES, second=True)
        reader = RowReader(SampleFiles([path], ["x"]), keep=lambda _: cache)
        return reader.start(np.arange(ROWS), np.arange(ROWS), [np.zeros((ROWS, 50), "u1")]).batch

    store = make()
    batch, descriptor = begun(store), store.descriptors[0]
    del store
    os.fstat(descriptor)
    native.run_here(batch)
    del batch
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
