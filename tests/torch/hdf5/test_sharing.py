"""Worker processes decode the chunks of a window together."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from failure import raising
from same import same

from fastpipe import FastHDF5Dataset, FastLoader, Shuffle
from fastpipe.hdf5 import cache as memory
from fastpipe.hdf5.samples import Runtime

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="run it where files have locks and no names: on Linux"
)

ROWS, CHUNK = 480, 8  # chunks of 70 kB: small ones are not shared, and decoded many at a time
ORDER = Shuffle(6, "group")
NO_MEMORY = raising(OSError("this system has none"))
BY_PROCESSES = functools.partial(FastLoader, shuffle=ORDER, num_workers=2, workers="processes")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharing") / "x.h5"
    with h5py.File(path, "w") as file:
        data = np.random.default_rng(0).integers(0, 99, (ROWS, 2200)).astype("f4")
        file.create_dataset("x", data=data, chunks=(CHUNK, 2200), compression="gzip")
        file.create_dataset("y", data=np.arange(ROWS), chunks=(100,), compression="lzf")
    return path


def dataset_of(path: Path, keys: Any = ("x", "y")) -> FastHDF5Dataset:
    return FastHDF5Dataset(path, keys, seed=5, cache="off")


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_worker_processes_make_the_same_batches(path: Path, method: str) -> None:
    wanted = list(FastLoader(dataset_of(path), 16, shuffle=ORDER))
    assert same(list(BY_PROCESSES(dataset_of(path), 16, multiprocessing_context=method)), wanted)


@pytest.fixture
def decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many chunks were decoded, in this process and those forked from it."""
    log, heard = tmp_path / "decoded", Runtime.heard

    def counted(self: Runtime, batch: Any) -> None:
        with open(log, "a") as file:
            file.write("." * (batch.counted[0] // (CHUNK * 2200 * 4)))
        heard(self, batch)

    monkeypatch.setattr(Runtime, "heard", counted)
    return lambda: log.stat().st_size


@pytest.mark.parametrize("is_shared", [True, False])
def test_each_chunk_is_decoded_by_one_worker(
    path: Path, decoded: Callable[[], int], is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_shared:  # which shows that the count tells
        monkeypatch.setattr(memory, "UnitFile", NO_MEMORY)
    order = Shuffle(20, "group")  # ten batches: four workers are seldom farther apart
    list(BY_PROCESSES(dataset_of(path, "x"), 16, shuffle=order, num_workers=4))
    chunks = ROWS // CHUNK
    if is_shared:
        # More than each once where one worker is in a window when another has gone on by far.
        assert chunks <= decoded() <= 1.5 * chunks
    else:
        assert decoded() >= 2.5 * chunks


def test_without_such_memory_each_decodes_for_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = list(FastLoader(dataset_of(path), 16, shuffle=ORDER))
    monkeypatch.setattr(memory, "UnitFile", NO_MEMORY)
    with caplog.at_level(logging.INFO, "fastpipe.cache"):
        assert same(list(BY_PROCESSES(dataset_of(path), 16)), wanted)
    assert "worker processes decode their chunks each for itself: this system has none" in caplog.text


def test_a_killed_worker_spoils_nothing(path: Path) -> None:
    dataset = dataset_of(path)
    wanted = list(FastLoader(dataset, 16, shuffle=ORDER))
    loader: Any = BY_PROCESSES(dataset, 16)
    loader.set_epoch(0)
    found = iter(loader)
    next(found)
    pid = found._workers[1].pid
    with pytest.raises(RuntimeError, match="worker"):
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its signal has been sent by now
        threading.Event().wait(60)
    del found
    loader.set_epoch(0)
    assert same(list(loader), wanted)
