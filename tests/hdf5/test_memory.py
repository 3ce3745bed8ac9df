"""Decoded chunks that are remembered: until all was taken of them, and never more than there is room for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.core.shared_chunks import private_units
from fastpipe.hdf5 import cache as memory_module
from fastpipe.hdf5.cache import ChunkMemory
from fastpipe.hdf5.files import SampleFiles
from fastpipe.hdf5.reader import RowReader

CHUNKS, IN_CHUNK = 12, 4
NBYTES = IN_CHUNK * 10 * 4


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SampleFiles:
    """Rows of 10 numbers, in chunks of four."""
    path = tmp_path_factory.mktemp("memory") / "x.h5"
    with h5py.File(path, "w") as file:
        rows = np.arange(CHUNKS * IN_CHUNK, dtype="i4")[:, None] * np.ones(10, "i4")
        file.create_dataset("x", data=rows, chunks=(IN_CHUNK, 10), compression="gzip")
    return SampleFiles([path], ["x"])


def reader_with(files: SampleFiles, slots: int, threads: int = 1) -> tuple[RowReader, Any]:
    units = private_units(CHUNKS, slots, NBYTES)
    return RowReader(files, lambda *_: (units, 0), threads=threads), units


@pytest.fixture
def decoded(read_natively: Any) -> Any:
    """How many chunks are decoded for samples, all of which must be right."""

    def count(reader: RowReader, samples: Any, threads: int = 0) -> int:
        rows = read_natively(reader, samples, threads=threads)
        assert rows.is_made.all()
        assert rows.arrays[0][:, 3].tolist() == list(samples)
        made, used = rows.batch.counted
        assert used == NBYTES // IN_CHUNK * len(samples)
        return int(made) // NBYTES

    return count


def test_it_is_remembered_until_all_was_taken(files: SampleFiles, decoded: Any) -> None:
    reader, units = reader_with(files, 2)
    assert decoded(reader, [8]) == 1
    assert decoded(reader, [9, 10]) == 0
    assert units.are_there(np.array([1, 2, 3])).tolist() == [False, True, False]
    assert decoded(reader, [11]) == 0
    # Both slots are now to be had: the one of what will not be used again first.
    assert decoded(reader, [0]) == 1
    assert decoded(reader, [4]) == 1
    assert units.are_there(np.arange(3)).tolist() == [True, True, False]


def test_what_is_taken_as_a_whole_leaves_nothing(files: SampleFiles, decoded: Any) -> None:
    reader, units = reader_with(files, 4)
    for _ in range(2):
        assert decoded(reader, [4, 5, 6, 7]) == 1
        assert decoded(reader, [0, 1, 1, 2, 3, 3]) == 1  # samples twice
    assert not units.are_there(np.arange(CHUNKS)).any()


def test_the_one_not_used_for_longest_goes_first(files: SampleFiles, decoded: Any) -> None:
    reader, _ = reader_with(files, 3)
    assert [decoded(reader, [4 * chunk]) for chunk in (0, 1, 2, 0, 3)] == [1, 1, 1, 0, 1]
    assert [decoded(reader, [4 * chunk + 1]) for chunk in (0, 2, 3)] == [0, 0, 0]
    assert decoded(reader, [5]) == 1


def test_with_one_slot_all_samples_are_right(files: SampleFiles, decoded: Any) -> None:
    reader, _ = reader_with(files, 1, threads=4)
    random = np.random.default_rng(0)
    for _ in range(20):
        decoded(reader, random.integers(0, files.count, 30), threads=4)


@pytest.mark.parametrize("threads", [0, 4])
def test_a_window_of_samples_decodes_each_chunk_once(files: SampleFiles, decoded: Any, threads: int) -> None:
    reader, _ = reader_with(files, CHUNKS, threads=4)
    order = np.random.default_rng(1).permutation(files.count)
    assert sum(decoded(reader, order[first : first + 7], threads) for first in range(0, 48, 7)) == CHUNKS


def test_threads_that_want_the_same_chunks_decode_each_once(files: SampleFiles, decoded: Any) -> None:
    """Batches side by side, each with a sample of each chunk, in orders of their own."""
    for _ in range(30):
        reader, _ = reader_with(files, CHUNKS)
        barrier = threading.Barrier(IN_CHUNK)

        def work(number: int, reader: RowReader = reader, barrier: threading.Barrier = barrier) -> int:
            samples = np.arange(CHUNKS) * IN_CHUNK + number
            barrier.wait(60)
            return int(decoded(reader, np.random.default_rng(number).permutation(samples)))

        with ThreadPoolExecutor(IN_CHUNK) as pool:
            assert sum(pool.map(work, range(IN_CHUNK))) == CHUNKS


@settings(max_examples=60)
@given(
    batches=st.lists(st.lists(st.integers(0, CHUNKS * IN_CHUNK - 1), min_size=1, max_size=9), max_size=12),
    slots=st.integers(1, 5),
)
def test_never_more_than_there_is_room_for_and_always_right(
    files: SampleFiles, decoded: Any, batches: list[list[int]], slots: int
) -> None:
    reader, units = reader_with(files, slots)
    for samples in batches:
        assert decoded(reader, samples) <= len({sample // IN_CHUNK for sample in samples})
        assert units.are_there(np.arange(CHUNKS)).sum() <= slots


def test_a_damaged_chunk_is_declined_each_time(
    tmp_path: Path, files: SampleFiles, reader_of: Any, layout_of: Any, read_natively: Any
) -> None:
    path = tmp_path / "x.h5"
    path.write_bytes(Path(files.files[0].path).read_bytes())
    layout = layout_of(path)
    with open(path, "r+b") as file:
        file.seek(int(layout.offsets[1]) + 5)
        file.write(b"\xff\xff\xff")
    units = private_units(CHUNKS, 3, NBYTES)
    reader = reader_of(path, layout=layout, memory=lambda *_: (units, 0))
    for _ in range(5):
        rows = read_natively(reader, [0, 4, 9])
        assert rows.is_made.tolist() == [True, False, True]
        assert rows.statuses[1, :2].tolist() == [2, 6]  # declined: damaged
    assert units.are_there(np.arange(3)).tolist() == [True, False, True]
    assert not units.is_coming(1)


def test_there_is_memory_for_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chunks that have to be decoded, by their size; of several files and datasets one after the other."""
    monkeypatch.setattr(memory_module, "_LEAST_NBYTES", 0)
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
    found = {
        (number, place, nbytes): memory.of(number, place, nbytes)
        for number in range(2)
        for place in range(3)
        for nbytes in (2048, 4096)
    }
    first = {key: units_first[1] for key, units_first in found.items() if units_first[0] is not None}
    assert first == {(0, 0, 2048): 0, (1, 0, 2048): 20, (0, 1, 4096): 0, (1, 1, 4096): 10}
    assert found[0, 0, 2048][0] is found[1, 0, 2048][0] is not found[0, 1, 4096][0]
    assert found[0, 0, 2048][0].slots == 14
    assert ChunkMemory(files, 0, 0).of(0, 0, 2048)[0].slots == 8
    assert ChunkMemory(files, 0, 1000).of(0, 0, 2048)[0].slots == 40  # all that there are
