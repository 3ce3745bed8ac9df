"""Decoded chunks that are kept: in a store, and in memory of one process or of several."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hdf5_kit import flip, layout_of, read, read_natively, reader_of, stored

from fastpipe.core.cache_store import EntryStore
from fastpipe.core.file_identity import FileIdentity
from fastpipe.core.native import native
from fastpipe.core.shared_chunks import private_units
from fastpipe.hdf5 import cache as cache_module
from fastpipe.hdf5.cache import CachedChunks, ChunkMemory, SharedChunks
from fastpipe.hdf5.files import SampleFiles
from fastpipe.hdf5.opening import DamagedError
from fastpipe.hdf5.reader import RowReader

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="run it on Linux, which has files in memory"
)
CHUNKS, IN_CHUNK = 12, 4
ROWS, NBYTES = CHUNKS * IN_CHUNK, IN_CHUNK * 40


@pytest.fixture
def path(tmp_path: Path, settled: Callable[[Path], Path]) -> Path:
    rows = np.arange(ROWS, dtype="i4")[:, None] * np.ones(10, "i4")
    return settled(stored(tmp_path / "x.h5", rows, chunks=(IN_CHUNK, 10), compression="gzip"))


def decoded(reader: RowReader, samples: Any) -> int:
    """Reads samples, which must be right, and returns how many chunks are decoded for them."""
    rows = read_natively(reader, samples)
    assert rows.is_made.all()
    np.testing.assert_array_equal(rows.arrays[0], np.asarray(samples)[:, None] * np.ones(10))
    return int(rows.batch.counted[0]) // NBYTES


def opened(folder: Path) -> EntryStore:
    """A store on disk, also one over the same files again."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    data, log = (os.open(folder / name, flags, 0o600) for name in ("data", "log"))
    return EntryStore(data, log, 1 << 20, verify=True, marks=1 << 12, is_in_memory=False)


def kept_in(store: EntryStore, *, is_settled: bool = True, is_second_use: bool = False) -> CachedChunks:
    identity = FileIdentity(bytes(16), bytes(40), "x.h5", is_settled)
    return CachedChunks(store, identity, CHUNKS, NBYTES, is_second_use=is_second_use)


def place_of(cache: CachedChunks, number: int) -> int:
    cache.look()
    return int(cache.native.find(number))


def test_chunks_of_a_file_that_may_still_change_unseen_are_not_kept(path: Path) -> None:
    cache = kept_in(opened(path.parent), is_settled=False)
    for _ in range(2):
        assert decoded(reader_of(path, keep=lambda _: cache), [5]) == 1
        assert place_of(cache, 1) == -1


def test_kept_chunks_that_are_cut_off_or_damaged_are_decoded_again(path: Path) -> None:
    cache, file = kept_in(opened(path.parent)), path.with_name("data")
    reader = reader_of(path, keep=lambda _: cache)
    assert [decoded(reader, range(ROWS)) for _ in range(2)] == [CHUNKS, 0]
    flip(file, place_of(cache, 1) + 50, 0xFF)
    kept = kept_in(opened(path.parent))
    again = reader_of(path, keep=lambda _: kept)
    assert decoded(again, range(ROWS)) == 1
    os.truncate(file, place_of(kept, 3) + 10)
    assert decoded(again, range(ROWS)) >= 1
    assert decoded(reader_of(path, keep=lambda _: kept_in(opened(path.parent))), range(ROWS)) >= 1


def test_a_batch_that_was_given_up_writes_to_no_other_file(path: Path, no_gc: None) -> None:
    """It may still be decoding, and mark what it has decoded, when the store is gone: then the descriptor's
    number must not be another file's yet."""

    def begun(store: EntryStore) -> Any:
        cache = kept_in(store, is_second_use=True)
        reader = RowReader(SampleFiles([path], ["x"]), keep=lambda _: cache)
        return reader.start(np.arange(ROWS), np.arange(ROWS), [np.zeros((ROWS, 10), "i4")]).batch

    store = opened(path.parent)
    batch, descriptor = begun(store), store.descriptors[0]
    del store
    os.fstat(descriptor)
    native.run_here(batch)
    del batch
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_damaged_chunk_is_declined_each_time(path: Path) -> None:
    flip(path, int(layout_of(path).offsets[1]) + 5, 0xFF)
    units = private_units(CHUNKS, 3, NBYTES)
    reader = reader_of(path, memory=lambda *_: (units, 0))
    for _ in range(3):
        rows = read_natively(reader, [0, 4, 9])
        assert rows.is_made.tolist() == [True, False, True]
        assert rows.statuses[1, :2].tolist() == [2, 6]  # declined: damaged
    assert units.are_there(np.arange(3)).tolist() == [True, False, True]
    assert not units.is_coming(1)
    files = SampleFiles([path], ["x"])
    shared = SharedChunks(files, 0, 5)
    for _ in range(3):
        reader = sharing(files, shared)
        with pytest.raises(DamagedError, match=r"dataset /x, chunk 1 at \[4:8, 0:10\]"):
            read(reader, [0, 5, 9])
        assert read(reader, [0, 9])[:, 0].tolist() == [0, 9]


def sharing(files: SampleFiles, shared: SharedChunks, threads: int = 1) -> RowReader:
    return RowReader(files, ChunkMemory(files, 0, 0, shared).of, threads=threads)


@pytest.mark.parametrize("groups", [1, 30])  # room for one group of samples, or for all
def test_a_child_of_a_process_that_is_reading_waits_for_none_of_its_slots(
    path: Path, groups: int, forked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_LEAST_SHARED", 1)
    files, pids = SampleFiles([path], ["x"]), []
    shared = SharedChunks(files, 0, groups)
    reader = sharing(files, shared, threads=2)

    def check(seed: int) -> None:
        for samples in np.random.default_rng(seed).integers(0, ROWS, (30, 20)):
            decoded(sharing(files, shared), samples)

    for seed in range(4):
        samples = np.random.default_rng(seed).integers(0, ROWS, 2000)
        started = reader.start(samples, np.arange(2000), [np.zeros((2000, 10), "i4")])
        thread = threading.Thread(target=native.run_here, args=(started.batch,))
        thread.start()
        pids.append(forked(lambda seed=seed: check(seed)))
        thread.join()
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
