"""Memory does not grow."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from scripts import ran
from torch.utils.data import DataLoader, Subset
from torchvision import transforms as v1
from zarr.codecs import BloscCodec, ZstdCodec

from fastpipe import FastImageFolder, FastLoader
from fastpipe.core.processes import memory_of_processes

CROP = v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()])
linux = pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="run it on Linux")


LARGE = v1.Compose(
    [v1.RandomResizedCrop(224), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.2] * 3)]
)
WORKERS: Any = {"num_workers": 2, "workers": "processes", "persistent_workers": True}


@pytest.mark.slow
@linux
@pytest.mark.parametrize(
    ("make", "count", "most"),
    [
        (lambda small, _: FastLoader(small, 4), 1000, 4 * 2**20), (lambda small, _: DataLoader(small, 4), 1000, 4 * 2**20),
        (lambda _, large: FastLoader(large, 32, shuffle=True, seed=1), 70, 0.02),
        (lambda _, large: FastLoader(large, 32, shuffle=True, seed=1, **WORKERS), 70, 0.02),
    ],
    ids=["fast", "stock", "fast, large", "fast, large, 2 workers"],
)  # fmt: skip
def test_many_batches_take_no_more_memory_than_some(
    tree: Path, photos: Path, make: Any, count: int, most: float
) -> None:
    small, large = FastImageFolder(tree, CROP), FastImageFolder(photos, LARGE)
    loader = make(Subset(small, list(range(16)) * 5), Subset(large, (list(range(len(large))) * 200)[:200]))
    sizes, batches = [], 0
    for end in (count, 20 * count):
        while batches < end:
            batches += sum(1 for _ in loader)
        gc.collect()
        taken = memory_of_processes()
        assert taken is not None
        sizes.append(taken)
    assert sizes[1] - sizes[0] < (most if most > 1 else most * sizes[0])


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
    done = ran("-c", _INDEX)
    assert done.returncode == 0, done.stderr
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
    loader = DataLoader(NoOp(), 4, **context)
    if path != "none":
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
        done = ran(volumes / "script.py", path, BUDGET, threads, workers, order, timeout=900)
        count, most = json.loads(done.stdout.splitlines()[-1])
        assert count == 240
        found.append(most)
    assert found[1] - found[0] <= BUDGET + MORE
