"""What ``FastPatchDataset`` takes of memory is its budget and little more, whatever the volume's size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, ZstdCodec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.path.exists("/proc/self/smaps_rollup"), reason="run it on Linux, which tells PSS"
    ),
]

SHAPE, CHUNK = (512, 640, 1024), (64, 64, 64)  # 640 MiB, decoded
BUDGET, MORE = 128 << 20, 300 << 20

SCRIPT = """
import json, os, sys
from pathlib import Path
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from fastpipe import Cache, FastLoader, FastPatchDataset, Shuffle
from fastpipe.sampling import Uniform

PATCH, COUNT = (96, 96, 96), 240


class NoOp(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return np.zeros(PATCH, np.uint16)


def pss():
    pids = [os.getpid()]
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            pids += map(int, task.read_text().split())
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024


if __name__ == "__main__":
    path, budget, threads, workers, order = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
    context = {"num_workers": workers, **({"multiprocessing_context": "spawn"} if workers else {})}
    if path == "none":
        loader = DataLoader(NoOp(), 4, **context)
    else:
        dataset = FastPatchDataset(
            path, PATCH, sampling=Uniform(COUNT), seed=1, cache=Cache("ram", budget), threads=threads
        )
        shuffle = Shuffle(unit="group") if order == "tour" else True
        loader = FastLoader(dataset, 4, shuffle=shuffle, **context)
    most = count = 0
    for batch in loader:
        most, count = max(most, pss()), count + len(batch)
        del batch
    print(json.dumps([count, most]))
"""


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("memory")
    (folder / "script.py").write_text(SCRIPT)
    found = {}
    random = np.random.default_rng(0)
    some = random.integers(0, 300, (CHUNK[0], *SHAPE[1:])).astype(np.uint16)
    for name, codec in (("whole", ZstdCodec(level=1)), ("parts", BloscCodec(cname="lz4"))):
        array: Any = zarr.create_array(
            folder / f"{name}.zarr", shape=SHAPE, chunks=CHUNK, dtype="u2", compressors=codec
        )
        for first in range(0, SHAPE[0], CHUNK[0]):
            array[first : first + CHUNK[0]] = some + np.uint16(first)
        found[name] = folder / f"{name}.zarr"
    return found


def most_memory(volumes: dict[str, Path], name: str, threads: int, workers: int, order: str) -> int:
    script = next(iter(volumes.values())).parent / "script.py"
    arguments = [str(volumes.get(name, "none")), str(BUDGET), str(threads), str(workers), order]
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=900, check=True
    )
    count, most = json.loads(done.stdout.splitlines()[-1])
    assert count == 240
    return int(most)


@pytest.mark.parametrize("order", ["tour", "shuffled"])
@pytest.mark.parametrize("name", ["whole", "parts"])
@pytest.mark.parametrize(("threads", "workers"), [(1, 0), (2, 0), (4, 0), (2, 2)])
def test_memory_is_the_budget_and_little_more(
    volumes: dict[str, Path], name: str, threads: int, workers: int, order: str
) -> None:
    nothing = most_memory(volumes, "none", 1, workers, order)
    most = most_memory(volumes, name, threads, workers, order)
    print(
        f"{(most - nothing) / 2**20:.0f} MiB more than a dataset that does nothing, budget {BUDGET / 2**20:.0f}"
    )
    assert most - nothing <= BUDGET + MORE
