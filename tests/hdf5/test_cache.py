"""Decoded chunks that are kept: in a store, in memory for a window of samples, and in memory of several processes."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hdf5_kit import layout_of, read, read_natively, reader_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.core.cache_store import EntryStore
from fastpipe.core.file_identity import FileIdentity
from fastpipe.core.native import native
from fastpipe.core.shared_chunks import private_units
from fastpipe.hdf5 import cache as cache_module
from fastpipe.hdf5.cache import CachedChunks, ChunkMemory, SharedChunks, chunk_nbytes
from fastpipe.hdf5.files import SampleFiles
from fastpipe.hdf5.layout import in_blocks, read_layout
from fastpipe.hdf5.opening import DamagedError
from fastpipe.hdf5.reader import RowReader

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="run it on Linux, which has files in memory"
)

Make = Callable[..., EntryStore]
MARKS = 1 << 12
CHUNKS, IN_CHUNK = 12, 4
ROWS, NBYTES = CHUNKS * IN_CHUNK, IN_CHUNK * 40


@pytest.fixture
def path(tmp_path: Path, settled: Callable[[Path], Path]) -> Path:
    """Rows of 10 numbers, in chunks of four."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        rows = np.arange(ROWS, dtype="i4")[:, None] * np.ones(10, "i4")
        file.create_dataset("x", data=rows, chunks=(IN_CHUNK, 10), compression="gzip")
    return settled(tmp_path / "x.h5")


def decoded(reader: RowReader, samples: Any, threads: int = 0) -> int:
    """Reads samples, which must be right, and returns how many chunks are decoded for them."""
    rows = read_natively(reader, samples, threads=threads)
    assert rows.is_made.all()
    np.testing.assert_array_equal(rows.arrays[0], np.asarray(samples)[:, None] * np.ones(10))
    return int(rows.batch.counted[0]) // NBYTES


# ---- in a store -----------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Opens a store; those on disk again over the same files."""
    in_memory = request.param == "memory"

    def open_store(max_bytes: int = 1 << 20) -> EntryStore:
        if in_memory:
            data, log = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("data", "log"))
            os.ftruncate(data, MARKS + max_bytes)
        else:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            data, log = (os.open(tmp_path / name, flags, 0o600) for name in ("data", "log"))
        return EntryStore(data, log, max_bytes, verify=not in_memory, marks=MARKS, is_in_memory=in_memory)

    return open_store


def chunks_of(store: EntryStore, count: int = CHUNKS, size: int = NBYTES, **more: Any) -> CachedChunks:
    identity = FileIdentity(
        more.get("tag", b"a").ljust(16, b"\0"), bytes(40), "x.h5", more.get("settled", True)
    )
    return CachedChunks(store, identity, count, size, is_second_use=more.get("second", False))


def reader_with(path: Path, store: EntryStore, **more: Any) -> tuple[RowReader, CachedChunks]:
    cache = chunks_of(store, **more)
    return reader_of(path, keep=lambda _: cache), cache


def places(cache: CachedChunks, *numbers: int) -> list[int]:
    cache.look()
    return [cache.native.find(number) for number in numbers]


def test_a_batch_keeps_what_it_decodes(make: Make, path: Path) -> None:
    store = make()
    reader, cache = reader_with(path, store)
    assert decoded(reader, [0, 5, 6, 1, 47]) == 3
    assert [place >= 0 for place in places(cache, 0, 1, 2, 11)] == [True, True, False, True]
    assert decoded(reader, [7, 4, 2, 46]) == 0
    assert decoded(reader_with(path, store)[0], range(ROWS)) == 9
    assert decoded(reader, np.arange(ROWS)[::-1]) == 0
    assert decoded(reader_with(path, store, tag=b"b")[0], [0, 4]) == 2  # another file's


def test_a_chunk_is_kept_at_its_second_use_where_that_is_asked_for(make: Make, path: Path) -> None:
    reader, cache = reader_with(path, make(), second=True)
    for use in range(4):
        assert (places(cache, 5)[0] >= 0) is (use >= 2)
        assert decoded(reader, [20]) == (use < 2)


def test_chunks_of_a_file_that_may_still_change_unseen_are_not_kept(make: Make, path: Path) -> None:
    reader, cache = reader_with(path, make(), settled=False)
    for _ in range(2):
        assert decoded(reader, [5]) == 1
        assert places(cache, 1) == [-1]


def test_a_full_store_keeps_what_it_has(make: Make, path: Path) -> None:
    reader, _ = reader_with(path, make(900))
    found = [decoded(reader, range(ROWS)) for _ in range(3)]
    assert 0 < found[2] == found[1] <= found[0] == CHUNKS


def test_chunks_that_are_cut_off_or_damaged_on_disk_are_decoded_again(
    make: Make, path: Path, tmp_path: Path
) -> None:
    store = make()
    if store.is_in_memory:
        pytest.skip("memory is not verified")
    reader, cache = reader_with(path, store)
    assert [decoded(reader, range(ROWS)) for _ in range(2)] == [CHUNKS, 0]
    with open(tmp_path / "data", "r+b") as file:
        file.seek(places(cache, 1)[0] + 50)
        file.write(b"\xff")
    again, kept = reader_with(path, make())
    assert decoded(again, range(ROWS)) == 1
    os.truncate(tmp_path / "data", places(kept, 3)[0] + 10)
    assert decoded(again, range(ROWS)) >= 1
    assert decoded(reader_with(path, make())[0], range(ROWS)) >= 1


@pytest.mark.parametrize("chunks", [None, (700, 100)])
def test_data_that_need_no_decoding_are_kept_as_well(tmp_path: Path, make: Make, chunks: Any) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (5000, 300), np.uint8)  # of more than a block
    with h5py.File(tmp_path / "x.h5", "w") as file:
        layout = in_blocks(read_layout(file.create_dataset("x", data=rows, chunks=chunks)))
    reader, _ = reader_with(
        tmp_path / "x.h5", make(1 << 23), count=len(layout.offsets), size=chunk_nbytes(layout)
    )
    for use in range(2):
        found = read_natively(reader, [4999, 0, 17, 2500, 2500])
        assert found.is_made.all()
        np.testing.assert_array_equal(found.arrays[0], rows[[4999, 0, 17, 2500, 2500]])
        assert (found.batch.counted[0] == 0) is (use == 1)


def test_a_batch_that_was_given_up_writes_to_no_other_file(path: Path, make: Make, no_gc: None) -> None:
    """It may still be decoding, and mark what it has decoded, when the store is gone: then the descriptor's
    number must not be another file's yet."""

    def begun(store: EntryStore) -> Any:
        cache = chunks_of(store, second=True)
        reader = RowReader(SampleFiles([path], ["x"]), keep=lambda _: cache)
        return reader.start(np.arange(ROWS), np.arange(ROWS), [np.zeros((ROWS, 10), "i4")]).batch

    store = make()
    batch, descriptor = begun(store), store.descriptors[0]
    del store
    os.fstat(descriptor)
    native.run_here(batch)
    del batch
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


# ---- in memory, for a window of samples -----------------------------------------------------------


def reader_in_memory(path: Path, slots: int, threads: int = 1) -> tuple[RowReader, Any]:
    units = private_units(CHUNKS, slots, NBYTES)
    return reader_of(path, memory=lambda *_: (units, 0), threads=threads), units


def test_a_chunk_is_remembered_until_all_of_it_was_taken(path: Path) -> None:
    reader, units = reader_in_memory(path, 2)
    assert [decoded(reader, samples) for samples in ([8], [9, 10])] == [1, 0]
    assert units.are_there(np.array([1, 2, 3])).tolist() == [False, True, False]
    # Then both slots are to be had: the one of the chunk that is not used again first.
    assert [decoded(reader, samples) for samples in ([11], [0], [4])] == [0, 1, 1]
    assert units.are_there(np.arange(3)).tolist() == [True, True, False]


def test_the_chunk_not_used_for_longest_is_forgotten_first(path: Path) -> None:
    reader, _ = reader_in_memory(path, 3)
    assert [decoded(reader, [4 * chunk]) for chunk in (0, 1, 2, 0, 3)] == [1, 1, 1, 0, 1]
    assert [decoded(reader, [4 * chunk + 1]) for chunk in (0, 2, 3, 1)] == [0, 0, 0, 1]


def test_batches_of_threads_decode_each_chunk_once(path: Path) -> None:
    """Batches side by side, each with a sample of each chunk, in orders of their own; or one after the other."""
    order = np.random.default_rng(1).permutation(ROWS)
    for threads in (0, 4):
        reader, _ = reader_in_memory(path, CHUNKS, 4)
        assert sum(decoded(reader, order[at : at + 7], threads) for at in range(0, ROWS, 7)) == CHUNKS
    for _ in range(15):
        reader, _ = reader_in_memory(path, CHUNKS)
        barrier = threading.Barrier(IN_CHUNK)

        def work(number: int, reader: RowReader = reader, barrier: threading.Barrier = barrier) -> int:
            samples = np.arange(CHUNKS) * IN_CHUNK + number
            barrier.wait(60)
            return decoded(reader, np.random.default_rng(number).permutation(samples))

        with ThreadPoolExecutor(IN_CHUNK) as pool:
            assert sum(pool.map(work, range(IN_CHUNK))) == CHUNKS


@settings(max_examples=40)
@given(
    batches=st.lists(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=9), max_size=12),
    slots=st.integers(1, 5),
    threads=st.sampled_from([0, 0, 4]),
)
def test_never_more_chunks_are_remembered_than_there_is_room_for(
    path: Path, batches: list[list[int]], slots: int, threads: int
) -> None:
    reader, units = reader_in_memory(path, slots, 4)
    for samples in batches:
        assert decoded(reader, samples, threads) <= len(samples)
        assert units.are_there(np.arange(CHUNKS)).sum() <= slots


def test_a_damaged_chunk_is_declined_each_time(path: Path) -> None:
    layout = layout_of(path)
    with open(path, "r+b") as file:
        file.seek(int(layout.offsets[1]) + 5)
        file.write(b"\xff\xff\xff")
    units = private_units(CHUNKS, 3, NBYTES)
    reader = reader_of(path, layout=layout, memory=lambda *_: (units, 0))
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


def test_memory_is_enough_for_a_window_of_all_files_and_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_LEAST_NBYTES", 0)
    paths = [tmp_path / f"{number}.h5" for number in range(2)]
    for number, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.ones((40, 64, 2)), chunks=(4, 32, 2), compression="gzip")
            file.create_dataset("y", data=np.ones((40, 128)), chunks=(8, 64), compression="lzf")
            file.create_dataset("plain", data=np.ones((40, 128)), chunks=(4 + number, 128))
    files = SampleFiles(paths, ["x", "y", "plain"])
    # A group has two chunks of x, of 2048 bytes, and for half of the groups two of y, of 4096.
    memory = ChunkMemory(files, 0, 7)
    assert memory.nbytes == 14 * 2048 + 14 * 4096
    keys = [(number, place, nbytes) for number in (0, 1) for place in (0, 1, 2) for nbytes in (2048, 4096)]
    found = {key: memory.of(*key) for key in keys}
    first = {key: units_first[1] for key, units_first in found.items() if units_first[0] is not None}
    assert first == {(0, 0, 2048): 0, (1, 0, 2048): 20, (0, 1, 4096): 0, (1, 1, 4096): 10}
    assert found[0, 0, 2048][0] is found[1, 0, 2048][0] is not found[0, 1, 4096][0]
    slots = [ChunkMemory(files, 0, groups).of(0, 0, 2048)[0].slots for groups in (7, 0, 1000)]
    assert slots == [14, 8, 40]  # at most all that there are


# ---- in memory of several processes ---------------------------------------------------------------

NAMES = ["mels", "labels", "plain", "inside"]
COUNTS = (40, 23)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SampleFiles:
    """Chunks of two sizes and of parts of samples, some never written; bytes that need no decoding."""
    monkeypatch.setattr(cache_module, "_LEAST_SHARED", 1)
    random = np.random.default_rng(0)
    paths = [tmp_path / f"{number}.h5" for number in range(len(COUNTS))]
    for path, rows in zip(paths, COUNTS, strict=True):
        with h5py.File(path, "w") as file:
            options = {"chunks": (8, 4, 7), "compression": "gzip", "fillvalue": 3}
            mels = file.create_dataset("mels", (rows, 6, 10), "f4", **options)
            mels[: rows - 10] = random.standard_normal((rows - 10, 6, 10))
            labels = random.integers(0, 9, rows)
            file.create_dataset("labels", data=labels, chunks=(5,), compression="lzf", shuffle=True)
            file["plain"] = random.integers(0, 9, (rows, 2))
            creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            creation.set_layout(h5py.h5d.COMPACT)
            space = h5py.h5s.create_simple((rows,))
            h5py.h5d.create(file.id, b"inside", h5py.h5t.NATIVE_INT16, space, creation)
            file["inside"][...] = np.arange(rows)
    return SampleFiles([str(path) for path in paths], NAMES)


GROUPS = pytest.mark.parametrize("groups", [1, 30])  # room for one group of samples, or for all


def sharing(files: SampleFiles, shared: SharedChunks, turn: float = 0.0, threads: int = 1) -> RowReader:
    return RowReader(files, ChunkMemory(files, 0, 0, shared).of, threads=threads, turn=turn)


@pytest.fixture
def check(files: SampleFiles) -> Callable[..., None]:
    """Compares random samples with what h5py reads."""
    values: list[Any] = []
    for name in NAMES:
        parts = []
        for one in files.files:
            with h5py.File(one.path, "r") as file:
                parts.append(file[name][...])
        values.append(np.concatenate(parts))

    def run(reader: RowReader, seed: int, threads: int = 0) -> None:
        random = np.random.default_rng(seed)
        for _ in range(30):
            samples = random.integers(0, sum(COUNTS), random.integers(1, 30))
            rows = read_natively(reader, samples, threads=threads)
            assert rows.is_made.all()
            for expected, found in zip(values, rows.arrays, strict=True):
                np.testing.assert_array_equal(found, expected[samples])

    return run


@GROUPS
def test_processes_and_threads_share_chunks(files: SampleFiles, groups: int, check: Any, forked: Any) -> None:
    shared = SharedChunks(files, 0, groups)

    def work(seed: int) -> None:
        check(sharing(files, shared, seed / 4, threads=2), seed, 2 * (seed % 2))

    pids = [forked(lambda seed=seed: work(seed)) for seed in range(4)]
    work(2)
    work(3)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    copy = pickle.loads(pickle.dumps(shared))  # is of the same memory
    assert all(copied is own for (_, copied), (_, own) in zip(copy.opened(), shared.opened(), strict=True))
    check(sharing(files, copy), 6)


@GROUPS
def test_a_child_of_a_process_that_is_reading_waits_for_none_of_its_slots(
    files: SampleFiles, groups: int, check: Any, forked: Any
) -> None:
    shared = SharedChunks(files, 0, groups)
    reader, pids = sharing(files, shared, threads=2), []
    for seed in range(4):
        outs = [
            np.zeros((200, *files.sample_shape(n)), layout.dtype) for n, layout in enumerate(files.layouts)
        ]
        samples = np.random.default_rng(seed).integers(0, files.count, 200)
        started = reader.start(samples, np.arange(200), outs)
        thread = threading.Thread(target=native.run_here, args=(started.batch,))
        thread.start()
        pids.append(forked(lambda seed=seed: check(sharing(files, shared), seed)))
        thread.join()
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
