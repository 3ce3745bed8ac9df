"""Nothing grows: not memory, not objects, not threads, not descriptors."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from generated import environment
from torch.utils.data import DataLoader, Subset
from torchvision import transforms as v1
from zarr.codecs import BloscCodec, ZstdCodec

from fastpipe import FastImageFolder, FastLoader
from fastpipe.bench.synthetic import photo_tree
from fastpipe.core.processes import memory_of_processes

CROP = v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()])
linux = pytest.mark.skipif(
    not os.path.exists("/proc/self/smaps_rollup"), reason="run it on Linux, which tells PSS"
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_tree(tmp_path_factory.mktemp("tree"), classes=2, per_class=8, sizes=(20, 24))


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = photo_tree(tmp_path_factory.mktemp("broken"), classes=2, per_class=8, sizes=(20, 24))
    for number in (0, 3):
        (root / f"class_000/{number:04d}.jpg").write_bytes(b"no picture")
    return root


def bad(policy: Any) -> Callable[[Path, Path], Any]:
    return lambda tree, broken: FastLoader(FastImageFolder(broken, CROP, bad_samples=policy), 3)


LOADERS: dict[str, Callable[[Path, Path], Any]] = {
    "threads, shuffled": lambda tree, _: FastLoader(FastImageFolder(tree, CROP), 3, shuffle=True, seed=1),
    "through Subset": lambda tree, _: FastLoader(Subset(FastImageFolder(tree, CROP), range(12)), 5),
    "stock loader": lambda tree, _: DataLoader(FastImageFolder(tree, CROP), 3),
    "serial transform": lambda tree, _: FastLoader(FastImageFolder(tree, v1.Compose([CROP, lambda x: x])), 3, seed=1),
    "PIL images": lambda tree, _: FastLoader(FastImageFolder(tree), 3, collate_fn=lambda samples: samples[0][1]),
    "no batches": lambda tree, _: FastLoader(FastImageFolder(tree, CROP), None),
    **{f"bad samples, {policy}": bad(policy) for policy in ("raise", "skip", "replace")},
}  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("name", LOADERS)
def test_epochs_leave_no_objects(tree: Path, broken: Path, grown_in_epochs: Any, name: str) -> None:
    assert grown_in_epochs(LOADERS[name](tree, broken)) == {}


@pytest.mark.parametrize("workers", [0, 1])
def test_iterators_that_are_broken_off_leave_nothing(tree: Path, workers: int) -> None:
    loader = FastLoader(FastImageFolder(tree, CROP, threads=2), 2, num_workers=workers, workers="processes")
    next(iter(loader))
    for _ in range(0 if workers else 3):
        list(loader)  # until Python's threads have something to keep, and are there
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for _ in range(3 if workers else 50):
        next(iter(loader))
    for _ in range(0 if workers else 20):  # also with the dataset
        next(iter(FastLoader(FastImageFolder(tree, CROP, threads=3), 2)))
    gc.collect()
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)  # a worker's, which ends; a pool's would not
        assert not thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2


def _bytes() -> int:
    gc.collect()
    taken = memory_of_processes()
    assert taken is not None
    return taken


@pytest.mark.slow
@linux
@pytest.mark.parametrize("kind", [FastLoader, DataLoader])
def test_twenty_thousand_batches_take_no_more_memory_than_a_thousand(tree: Path, kind: Any) -> None:
    loader = kind(FastImageFolder(tree, CROP), 4, sampler=list(range(16)) * 5)
    sizes, batches = [], 0
    for count in (1_000, 20_000):
        while batches < count:
            batches += sum(1 for batch in loader if batch[0].shape == (4, 3, 16, 16))
        sizes.append(_bytes())
    assert sizes[1] - sizes[0] < 4 * 2**20


@pytest.mark.slow
@linux
@pytest.mark.parametrize("workers", [0, 2])
def test_two_hundred_epochs_take_no_more_memory_than_twenty(photos: Path, workers: int) -> None:
    normalize = v1.Normalize([0.5] * 3, [0.2] * 3)
    transform = v1.Compose([v1.RandomResizedCrop(224), v1.RandomHorizontalFlip(), v1.ToTensor(), normalize])
    dataset = FastImageFolder(photos, transform)
    some = Subset(dataset, (list(range(len(dataset))) * 200)[:200])
    loader = FastLoader(
        some, 32, shuffle=True, seed=1, num_workers=workers, workers="processes", persistent_workers=workers > 0
    )  # fmt: skip
    sizes = {}
    for epoch in range(1, 201):
        assert sum(len(labels) for _, labels in loader) == 200
        if epoch in (20, 200):
            sizes[epoch] = _bytes()
    assert sizes[200] == pytest.approx(sizes[20], rel=0.02)
    loader = None  # type: ignore[assignment]  # and with it the workers


# In a process of its own: what pytest and torch keep would be copied as well.
_INDEX = """if True:
    import gc, json, os
    from fastpipe.core.sample_tables import Packed, SampleTableBuilder, TargetTable, pack_paths

    def private_bytes():
        with open("/proc/self/smaps_rollup") as file:
            return sum(1024 * int(line.split()[1]) for line in file if line.startswith("Private_Dirty:"))

    def grown(samples, targets):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            gc.disable()
            before = private_bytes()
            read = sum(len(path) + target for path, target in samples) + sum(targets)
            os.write(writer, f"{private_bytes() - before} {read}".encode())
            os._exit(0)
        os.waitpid(pid, 0)
        return [int(number) for number in os.read(reader, 100).split()]

    builder = SampleTableBuilder("/data/")
    for number in range(200):
        block, lengths = pack_paths(f"{number}/", [f"{name:08}.jpg" for name in range(1000)])
        # As memory of a kept index, and as a folder's own.
        builder.add_packed(Packed(memoryview(block) if number % 2 else block, lengths), number)
    table = builder.build()
    targets = TargetTable(table.targets_array())
    print(json.dumps([grown(table, targets), grown(list(table), list(targets))]))
"""


@linux
def test_a_forked_worker_reads_every_path_without_copying_memory() -> None:
    command = [sys.executable, "-c", _INDEX]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment(), check=True)
    (table, table_read), (plain, plain_read) = json.loads(done.stdout)
    assert table_read == plain_read
    assert plain > 16 * 2**20  # a list of tuples is copied as its reference counts are written
    assert table < 2**20


SHAPE, CHUNK = (512, 640, 1024), (64, 64, 64)  # 640 MiB, decoded
BUDGET, MORE = 128 << 20, 300 << 20
_PATCHES = """
import json, sys
import numpy as np
from torch.utils.data import DataLoader
from fastpipe import Cache, FastLoader, FastPatchDataset, Shuffle
from fastpipe.core.processes import memory_of_processes
from fastpipe.sampling import Uniform

class NoOp:
    def __len__(self):
        return 240
    def __getitem__(self, index):
        return np.zeros((96, 96, 96), np.uint16)

if __name__ == "__main__":
    path, budget, threads, workers, order = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
    context = {"num_workers": workers, **({"multiprocessing_context": "spawn"} if workers else {})}
    if path == "none":
        loader = DataLoader(NoOp(), 4, **context)
    else:
        dataset = FastPatchDataset(path, (96, 96, 96), sampling=Uniform(240), seed=1, cache=Cache("ram", budget), threads=threads)
        loader = FastLoader(dataset, 4, shuffle=Shuffle(unit="group") if order == "tour" else True, **context)
    most = count = 0
    for batch in loader:
        most, count = max(most, memory_of_processes()), count + len(batch)
        del batch
    print(json.dumps([count, most]))
"""


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    (folder / "script.py").write_text(_PATCHES)
    some = np.random.default_rng(0).integers(0, 300, (CHUNK[0], *SHAPE[1:])).astype(np.uint16)
    for name, codec in (("whole", ZstdCodec(level=1)), ("parts", BloscCodec(cname="lz4"))):
        array: Any = zarr.create_array(
            folder / name, shape=SHAPE, chunks=CHUNK, dtype="u2", compressors=codec
        )
        for first in range(0, SHAPE[0], CHUNK[0]):
            array[first : first + CHUNK[0]] = some + np.uint16(first)
    return folder


@pytest.mark.slow
@linux
@pytest.mark.parametrize("order", ["tour", "shuffled"])
@pytest.mark.parametrize("name", ["whole", "parts"])
@pytest.mark.parametrize(("threads", "workers"), [(1, 0), (2, 0), (4, 0), (2, 2)])
def test_patches_take_their_budget_and_little_more(
    volumes: Path, name: str, threads: int, workers: int, order: str
) -> None:
    found = []
    for path in ("none", str(volumes / name)):
        arguments = [path, str(BUDGET), str(threads), str(workers), order]
        done = subprocess.run(
            [sys.executable, str(volumes / "script.py"), *arguments], capture_output=True, text=True,
            env=environment(), timeout=900, check=True,
        )  # fmt: skip
        count, most = json.loads(done.stdout.splitlines()[-1])
        assert count == 240
        found.append(most)
    assert found[1] - found[0] <= BUDGET + MORE
