"""Processes that share decoded chunks read what h5py reads."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from fastpipe.core.native import native
from fastpipe.hdf5 import cache as memory_module
from fastpipe.hdf5.cache import ChunkMemory, SharedChunks
from fastpipe.hdf5.files import SampleFiles
from fastpipe.hdf5.opening import DamagedError
from fastpipe.hdf5.reader import RowReader

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="run it where files have locks and no names: on Linux"
)

NAMES = ["mels", "labels", "plain", "inside"]
ROWS = (40, 23)


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are shared of whatever size."""
    monkeypatch.setattr(memory_module, "_LEAST_SHARED", 1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SampleFiles:
    """Chunks of two sizes and of parts of samples, some never written; bytes that need no decoding."""
    folder, random = tmp_path_factory.mktemp("shared"), np.random.default_rng(0)
    paths = [folder / f"{number}.h5" for number in range(len(ROWS))]
    for path, rows in zip(paths, ROWS, strict=True):
        with h5py.File(path, "w") as file:
            mels = file.create_dataset(
                "mels", (rows, 6, 10), "f4", chunks=(8, 4, 7), compression="gzip", fillvalue=3
            )
            mels[: rows - 10] = random.standard_normal((rows - 10, 6, 10))
            labels = random.integers(0, 9, rows)
            file.create_dataset("labels", data=labels, chunks=(5,), compression="lzf", shuffle=True)
            file["plain"] = random.integers(0, 9, (rows, 2))
            creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            creation.set_layout(h5py.h5d.COMPACT)
            space = h5py.h5s.create_simple((rows,))
            compact = h5py.h5d.create(file.id, b"inside", h5py.h5t.NATIVE_INT16, space, creation)
            compact.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(rows, dtype=np.int16))
    return SampleFiles([str(path) for path in paths], NAMES)


@pytest.fixture(scope="module")
def values(files: SampleFiles) -> dict[str, Any]:
    """What h5py reads."""
    found: dict[str, list[Any]] = {name: [] for name in NAMES}
    for one in files.files:
        with h5py.File(one.path, "r") as file:
            for name in NAMES:
                found[name].append(file[name][...])
    return {name: np.concatenate(parts) for name, parts in found.items()}


GROUPS = pytest.mark.parametrize("groups", [1, 30])  # room for one group of samples, or for all


def opened(files: SampleFiles, shared: SharedChunks, turn: float = 0.0, threads: int = 1) -> RowReader:
    memory = ChunkMemory(files, 0, 0, shared)
    return RowReader(files, memory.of, threads=threads, turn=turn)


@pytest.fixture
def check(read_natively: Any, values: dict[str, Any]) -> Callable[..., None]:
    """Compares random samples with what h5py reads."""

    def run(reader: RowReader, seed: int, threads: int = 0) -> None:
        random, count = np.random.default_rng(seed), sum(ROWS)
        for _ in range(60):
            samples = random.integers(0, count, random.integers(1, 30))
            rows = read_natively(reader, samples, threads=threads)
            assert rows.is_made.all()
            for name, found in zip(NAMES, rows.arrays, strict=True):
                np.testing.assert_array_equal(found, values[name][samples])

    return run


@pytest.mark.parametrize("threads", [0, 3])
@GROUPS
def test_one_process(files: SampleFiles, groups: int, check: Callable[..., None], threads: int) -> None:
    shared = SharedChunks(files, 0, groups)
    check(opened(files, shared, threads=3), 0, threads)


@GROUPS
def test_several_processes(
    files: SampleFiles, groups: int, check: Callable[..., None], forked: Callable[..., int]
) -> None:
    shared = SharedChunks(files, 0, groups)

    def work(seed: int) -> None:
        check(opened(files, shared, seed / 4, threads=2), seed, 2 * (seed % 2))

    pids = [forked(lambda seed=seed: work(seed)) for seed in range(4)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4


@GROUPS
def test_a_child_of_a_process_that_is_reading(
    files: SampleFiles, groups: int, check: Callable[..., None], forked: Callable[..., int]
) -> None:
    """Forked while threads of the parent hold slots: neither waits for the other's."""
    shared = SharedChunks(files, 0, groups)
    reader, pids = opened(files, shared, threads=2), []
    for seed in range(6):
        outs = [
            np.zeros((200, *files.sample_shape(place)), layout.dtype)
            for place, layout in enumerate(files.layouts)
        ]
        samples = np.random.default_rng(seed).integers(0, files.count, 200)
        started = reader.start(samples, np.arange(200), outs)
        thread = threading.Thread(target=native.run_here, args=(started.batch,))
        thread.start()
        pids.append(forked(lambda seed=seed: check(opened(files, shared), seed)))
        thread.join()
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 6


@GROUPS
def test_processes_that_are_killed(
    files: SampleFiles, groups: int, check: Callable[..., None], forked: Callable[..., int]
) -> None:
    shared = SharedChunks(files, 0, groups)
    ready, go = os.pipe()

    def work(seed: int) -> None:
        reader = opened(files, shared, seed / 4)
        check(reader, seed)
        os.write(go, b"!")
        while True:
            check(reader, seed)

    pids = [forked(lambda seed=seed: work(seed)) for seed in range(3)]
    for _ in pids:
        os.read(ready, 1)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        check(opened(files, shared), pid)
        os.waitpid(pid, 0)
    check(opened(files, shared), 7)
    os.close(ready)
    os.close(go)


def test_each_chunk_is_decoded_once(
    files: SampleFiles, values: dict[str, Any], read_natively: Any, in_child: Any
) -> None:
    """Where there is room: of three readers in turn each gets what those before it decoded."""
    shared, every, decoded = SharedChunks(files, 0, 100), np.arange(files.count), []

    def work(third: int) -> None:
        rows = read_natively(opened(files, shared), every[third::3])
        np.testing.assert_array_equal(rows.arrays[0], values["mels"][third::3])
        decoded.append(rows.batch.counted[0])

    in_child(lambda: work(0))
    for third in (1, 2, 0):
        work(third)
    assert decoded[1:] == [0, 0]
    alone = read_natively(RowReader(files), every).batch.counted[0]
    assert decoded[0] < alone / 2  # chunks of which the child had none


def test_small_chunks_are_not_shared(files: SampleFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_LEAST_SHARED", 8 * 4 * 7 * 4)
    found = SharedChunks(files, 0, 3)
    assert [nbytes for nbytes, _ in found.opened()] == [8 * 4 * 7 * 4]


@GROUPS
def test_a_copy_is_of_the_same_memory(files: SampleFiles, groups: int, check: Callable[..., None]) -> None:
    shared = SharedChunks(files, 0, groups)
    copy = pickle.loads(pickle.dumps(shared))
    ours, its = (dict(one.opened()) for one in (shared, copy))
    assert ours.keys() == its.keys()
    assert all(ours[nbytes] is its[nbytes] for nbytes in ours)
    check(opened(files, copy), 3)


def test_without_memory_each_process_decodes_for_itself(
    files: SampleFiles, check: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("no room")

    monkeypatch.setattr(memory_module, "UnitFile", fail)
    check(opened(files, SharedChunks(files, 0, 3)), 1)


def test_a_damaged_chunk_is_said_each_time(tmp_path: Path, read: Any, read_natively: Any) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        data = np.arange(12.0)
        found = file.create_dataset("x", data=data, chunks=(4,), compression="gzip", fletcher32=True)
        offset = found.id.get_chunk_info(1).byte_offset
    with open(path, "r+b") as raw:
        raw.seek(offset + 3)
        raw.write(b"\xff\xff")
    files = SampleFiles([str(path)], ["x"])
    shared = SharedChunks(files, 0, 5)
    for _ in range(3):
        reader = opened(files, shared)
        assert read_natively(reader, [0, 5, 9]).is_made.tolist() == [True, False, True]
        with pytest.raises(DamagedError, match=r"dataset /x, chunk 1 at \[4:8\]"):
            read(reader, [0, 5, 9])
        assert read(reader, [0, 9]).tolist() == [0, 9]
