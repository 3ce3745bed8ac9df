"""Processes that share decoded chunks read what h5py reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from fastpipe.read.hdf5.chunks import ChunkReader
from fastpipe.read.hdf5.context import ReadContext
from fastpipe.read.hdf5.errors import DamagedError
from fastpipe.read.hdf5.files import OpenFiles, SampleFiles
from fastpipe.read.hdf5.recent import RecentChunks

from fastpipe.cache.window import SharedWindow, WindowSlots
from fastpipe.read.hdf5 import reader

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="run it where files have locks and no names: on Linux"
)

NAMES = ["mels", "labels", "plain", "inside"]
ROWS = (40, 23)


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are shared of whatever size."""
    monkeypatch.setattr(reader, "LEAST_SHARED", 1)


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


@pytest.fixture(params=[1, 3, 30])
def window(request: pytest.FixtureRequest) -> Iterator[SharedWindow]:
    window = SharedWindow(request.param, 8 * 4 * 7 * 4)
    yield window
    window.close()


def opened(files: SampleFiles, window: SharedWindow, turn: float = 0.0) -> OpenFiles:
    return files.open(ReadContext(recent=RecentChunks(0), shared=WindowSlots(window, turn)))


def read(opened: OpenFiles, files: SampleFiles, samples: Any) -> dict[str, Any]:
    found = {
        name: np.full((len(samples), *files.sample_shape(number)), 0x5A, files.layouts[number].dtype)
        for number, name in enumerate(NAMES)
    }
    for task in opened.tasks(samples, np.arange(len(samples)), list(found.values())):
        task.run()
    return found


def check(opened: OpenFiles, files: SampleFiles, values: dict[str, Any], seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(60):
        samples = random.integers(0, files.count, random.integers(1, 30))
        for name, found in read(opened, files, samples).items():
            np.testing.assert_array_equal(found, values[name][samples])


def test_one_process(files: SampleFiles, values: dict[str, Any], window: SharedWindow) -> None:
    check(opened(files, window), files, values, 0)


def test_several_processes(
    files: SampleFiles, values: dict[str, Any], window: SharedWindow, forked: Callable[..., int]
) -> None:
    pids = [
        forked(lambda seed=seed: check(opened(files, window, seed / 4), files, values, seed))  # type: ignore[misc]
        for seed in range(4)
    ]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4


def test_each_chunk_is_decoded_once(
    files: SampleFiles, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is room: of three readers in turn each gets what those before it decoded."""
    decoded: list[int] = []
    into = ChunkReader.decode_into
    monkeypatch.setattr(
        ChunkReader, "decode_into",
        lambda self, made, numbers: (decoded.extend(numbers), into(self, made, numbers))[1],
    )  # fmt: skip
    window = SharedWindow(100, 8 * 4 * 7 * 4)
    every = np.arange(files.count)
    for third in range(3):
        found = read(opened(files, window), files, every[third::3])
        np.testing.assert_array_equal(found["mels"], values["mels"][third::3])
    written = sum(
        int((layout.offsets >= 0).sum()) for file in files.files for layout in file.layouts if layout.filters
    )
    assert len(decoded) == written
    window.close()


def test_a_damaged_chunk_is_told_each_time(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        data = np.arange(12.0)
        found = file.create_dataset("x", data=data, chunks=(4,), compression="gzip", fletcher32=True)
        offset = found.id.get_chunk_info(1).byte_offset
    with open(path, "r+b") as raw:
        raw.seek(offset + 3)
        raw.write(b"\xff\xff")
    window = SharedWindow(5, 32)
    files = SampleFiles([str(path)], ["x"])
    for _ in range(3):
        each = files.open(ReadContext(recent=RecentChunks(0), shared=WindowSlots(window)))
        out = np.zeros(3)
        with pytest.raises(DamagedError, match=r"dataset /x, chunk 1 at \[4:8\]"):
            for task in each.tasks(np.array([0, 5, 9]), np.arange(3), [out]):
                task.run()
        for task in each.tasks(np.array([0, 9]), np.arange(2), [out]):
            task.run()
        assert out[:2].tolist() == [0, 9]
    del each
    window.close()
