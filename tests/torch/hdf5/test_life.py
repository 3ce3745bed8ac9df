"""Processes, threads, memory and descriptors of ``FastHDF5Dataset``."""

from __future__ import annotations

import functools
import gc
import os
import pickle
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

from fastpipe import FastHDF5Dataset, FastLoader, Shuffle

BY_PROCESSES = functools.partial(FastLoader, workers="processes")

pytestmark = pytest.mark.usefixtures("same_generators")

KEYS = ["mels", "text", "label"]


def labels(loader: Any) -> list[int]:
    return [number for batch in loader for number in batch[-1].tolist()]


def test_paths_of_every_kind(file: Path) -> None:
    for path in (str(file), file, os.fsencode(file), [os.fsencode(file)]):
        assert FastHDF5Dataset(path, KEYS).sample_dims == 1  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not int"):
        FastHDF5Dataset([0], KEYS)  # type: ignore[list-item]


def test_pickled_before_and_after_use(file: Path, same: Any) -> None:
    dataset = FastHDF5Dataset(
        file, KEYS, seed=3, cache="ram", bad_samples="skip", threads=2, transform=np.negative
    )
    before = pickle.dumps(dataset)
    wanted = list(FastLoader(dataset, 8, shuffle=True))
    for data in (before, pickle.dumps(dataset)):
        copy = pickle.loads(data)
        assert repr(copy) == repr(dataset)
        assert same(list(FastLoader(copy, 8, shuffle=True)), wanted)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="run it where processes can fork: not on Windows")
def test_forked_after_use(file: Path, same: Any, in_child: Callable[[Callable[[], object]], None]) -> None:
    dataset = FastHDF5Dataset(file, KEYS, cache="ram", threads=2)
    wanted = list(FastLoader(dataset, 8))
    kept = dataset.__getitems__([5, 6])
    running = iter(FastLoader(dataset, 4))
    next(running)

    def child() -> None:
        assert same(list(FastLoader(dataset, 8)), wanted)
        assert same(list(DataLoader(dataset, 8, num_workers=1)), wanted)
        assert int(kept[1][2]) == 6

    in_child(child)
    assert len(list(running)) == 13
    assert same(list(FastLoader(dataset, 8)), wanted)
    in_child(child)


def test_batches_outlive_the_dataset(file: Path, naive: Any, same: Any) -> None:
    wanted = list(DataLoader(naive(file, KEYS), 8))
    for workers in (0, 1):
        loader = FastLoader(FastHDF5Dataset(file, KEYS), 8, num_workers=workers, workers="processes")
        iterator = iter(loader)
        batches = [next(iterator), next(iterator)]
        del loader, iterator
        gc.collect()
        assert same(batches, wanted[:2])
    samples = FastHDF5Dataset(file, KEYS).__getitems__(range(8))
    gc.collect()
    assert [int(sample[2]) for sample in samples] == list(range(8))


@pytest.mark.parametrize("kind", [DataLoader, BY_PROCESSES])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_are_kept_are_never_overwritten(tmp_path: Path, kind: Any, workers: int) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:  # batches large enough to have slots
        data = np.random.default_rng(0).integers(0, 255, (24, 1 << 17), np.uint8)
        file.create_dataset("x", data=data, chunks=(5, 1 << 17), compression="lzf")
    loader = kind(FastHDF5Dataset(tmp_path / "x.h5", "x"), 4, num_workers=workers)
    kept = [batch for _ in range(3) for batch in loader]
    for number, batch in enumerate(kept):
        first = number % 6 * 4
        assert np.array_equal(batch.numpy(), data[first : first + 4])
    assert len({batch.data_ptr() for batch in kept}) == 18


@pytest.mark.parametrize("kind", [DataLoader, BY_PROCESSES])
def test_labels_that_are_kept_do_not_keep_the_rest(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastpipe.torch import hdf5_dataset as module

    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"], file["n"] = np.zeros((40, 1 << 17), np.uint8), np.arange(40)
    arrays: list[Any] = []
    real = module.FastHDF5Dataset._memory

    def memory(self: Any, *arguments: Any) -> Any:
        parts = real(self, *arguments)
        arrays.append(weakref.ref(parts[0].array))
        return parts

    monkeypatch.setattr(module.FastHDF5Dataset, "_memory", memory)
    kept = [batch[1] for batch in kind(FastHDF5Dataset(tmp_path / "x.h5", ["x", "n"]), 4)]
    gc.collect()
    assert torch.cat(kept).tolist() == list(range(40))
    assert len(arrays) == 10
    assert [array() for array in arrays] == [None] * 10


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_is_broken_off(file: Path, workers: int) -> None:
    dataset = FastHDF5Dataset(file, KEYS, threads=2)
    loader = FastLoader(dataset, 2, num_workers=workers, workers="processes")
    next(iter(loader))
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(3 if workers else 30):
        next(iter(loader))
    gc.collect()
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
    assert labels(loader) == list(range(53))


def test_errors_that_were_not_due_yet_leave_nothing(file: Path, tmp_path: Path) -> None:
    """Several batches could not be begun; the first of them ended the loop."""
    path = tmp_path / "x.h5"
    path.write_bytes(file.read_bytes())
    dataset = FastHDF5Dataset(path, KEYS, threads=2)
    refer = weakref.ref(dataset)
    dataset[0]
    os.truncate(path, path.stat().st_size + 1)
    with pytest.raises(OSError, match="has changed"):
        list(FastLoader(dataset, 2))
    dataset._running().pool.close()  # a thread may be inside a task
    del dataset
    gc.collect()
    assert refer() is None


def test_two_threads_use_one_dataset(file: Path, naive: Any, same: Any) -> None:
    dataset = FastHDF5Dataset(file, ["mels", "text", "scaled", "packed", "label"], threads=2)
    oracle = list(DataLoader(naive(file, dataset.keys), 7))
    barrier = threading.Barrier(4)

    def work(number: int) -> bool:
        barrier.wait(60)
        if number % 2:
            return all(same(list(FastLoader(dataset, 7)), oracle) for _ in range(3))
        return all(same(list(DataLoader(dataset, 7)), oracle) for _ in range(3))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [True] * 4


LOADERS: dict[str, Any] = {
    "threads": lambda file: FastLoader(FastHDF5Dataset(file, KEYS), 5),
    "not kept": lambda file: FastLoader(FastHDF5Dataset(file, KEYS, cache="off"), 5, shuffle=True, seed=1),
    "groups": lambda file: FastLoader(FastHDF5Dataset(file, KEYS), 5, shuffle=Shuffle(2, "group")),
    "stock loader": lambda file: DataLoader(FastHDF5Dataset(file, KEYS), 5),
    "Concat": lambda file: FastLoader(ConcatDataset([Subset(FastHDF5Dataset(file, KEYS), range(20))] * 2), 5),
    "transform": lambda file: FastLoader(FastHDF5Dataset(file, KEYS, transform=np.copy), 5),
    "no batches": lambda file: FastLoader(FastHDF5Dataset(file, KEYS), None),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", LOADERS)
def test_nothing_piles_up(file: Path, grown_in_epochs: Any, name: str) -> None:
    loader = LOADERS[name](file)
    list(loader)
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert grown_in_epochs(loader) == {}
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
def test_bad_samples_leave_no_objects(file: Path, tmp_path: Path, grown_in_epochs: Any, policy: Any) -> None:
    path = tmp_path / "x.h5"
    path.write_bytes(file.read_bytes())
    with h5py.File(path) as source:
        info = source["packed"].id.get_chunk_info(2)
    with open(path, "r+b") as target:
        target.seek(info.byte_offset)
        target.write(bytes(20))
    loader = FastLoader(FastHDF5Dataset(path, ["packed", "label"], bad_samples=policy), 5)
    assert grown_in_epochs(loader) == {}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("many")
    for number in range(300):
        with h5py.File(folder / f"{number}.h5", "w", libver="latest") as file:
            file.create_dataset("x", data=np.full((2, 3), number), chunks=(1, 3), compression="lzf")
            file["text"] = [str(number)] * 2
    return [folder / f"{number}.h5" for number in range(300)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("keys", "size"), [(["x"], 16), (["x"], 300), (["x", "text"], 16), (["x", "text"], 150)]
)
def test_more_files_than_descriptors(many: list[Path], keys: list[str], size: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    dataset = FastHDF5Dataset(many, keys, threads=2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        for kind in (FastLoader, DataLoader):
            order = torch.randperm(600).tolist()
            batches = list(kind(dataset, size, sampler=order))
            found = [int(row[0]) for batch in batches for row in batch[0]]
            assert found == [index // 2 for index in order]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    if len(keys) > 1:
        assert [text for batch in batches for text in batch[1]] == [
            str(index // 2).encode() for index in order
        ]


ORPHANS = """
import os, sys
from fastpipe import FastHDF5Dataset, FastLoader

loader = FastLoader(FastHDF5Dataset(sys.argv[1], ["mels", "label"], cache="ram"), 2, num_workers=2, workers="processes")
iterator = iter(loader)
next(iterator)
print(*[worker.pid for worker in iterator._workers], flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="run it on Linux, where workers end with their parent"
)
def test_a_killed_parent_leaves_no_processes(file: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ORPHANS, str(file)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as parent:
        assert parent.stdout is not None
        pids = list(map(int, parent.stdout.readline().split()))
        assert len(pids) == 2
        assert parent.stdout.read() == ""  # the pipe's other end is open for as long as a worker lives
    assert parent.returncode == -9
    for pid in pids:
        path = Path(f"/proc/{pid}/cmdline")
        assert not path.exists() or not path.read_bytes()
