"""A small /dev/shm, as it is in a container unless it was started with more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripts import on_small_disk, ran

from fastpipe.errors import SharedMemoryError
from fastpipe.torch.workers import WorkerCollate

_REMEDY = r"docker run --shm-size.*smaller batches.*prefetch_factor.*fewer workers.*num_workers=0"

# With 4 MiB: each way of making batches, one after the other in one process, as importing torch takes seconds.
_SCRIPT = """
import json, os, sys
import numpy as np
import torch
from torchvision import transforms
from fastpipe import FastImageFolder, FastLoader
from fastpipe.errors import SharedMemoryError

class Numbers:
    def __init__(self, size, make=torch.full):
        self.size, self.make = size, make
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return {"value": self.make((self.size,), index), "more": (np.zeros(3), "text")}

def as_list(samples):
    return [torch.full_like(sample["value"], float(sample["value"][0])) for sample in samples]

def outcome(batches):
    try:
        return [first_of(batch) for batch in batches]
    except Exception as error:
        return type(error).__name__ + ": " + str(error)

def first_of(batch):
    batch = batch["value"] if isinstance(batch, dict) else batch[0]
    return float(batch.flatten()[0])

LARGE = 2_000_000
found = {"room": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize}
found["small"] = outcome(FastLoader(Numbers(1000), 2, num_workers=2))
found["tensors"] = outcome(FastLoader(Numbers(LARGE), 2, num_workers=2))
found["arrays"] = outcome(FastLoader(Numbers(LARGE, np.full), 2, num_workers=1))
found["collate_fn"] = outcome(FastLoader(Numbers(LARGE), 2, num_workers=2, collate_fn=as_list))
found["no batches"] = outcome(FastLoader(Numbers(LARGE), None, num_workers=1))
found["no workers"] = outcome(FastLoader(Numbers(LARGE), 2))

crop = transforms.Compose([transforms.Resize((600, 600)), transforms.ToTensor()])
dataset = FastImageFolder(sys.argv[1], crop, threads=1)
expected = list(FastLoader(dataset, 2))
for workers in (1, 2):
    kept = list(FastLoader(dataset, 2, num_workers=workers))
    found[f"images, {workers} workers"] = all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(kept, expected, strict=True))
del kept
with open("/dev/shm/filler", "wb") as filler:
    space = os.statvfs("/dev/shm")
    filler.write(bytes((space.f_bavail - 16) * space.f_frsize))  # a worker's semaphores take some pages
    filler.flush()
    batches = list(FastLoader(dataset, 2, num_workers=1))
    found["images, nothing left"] = all(torch.equal(a[0], b[0]) for a, b in zip(batches, expected, strict=True))
    found["nothing left"] = outcome(FastLoader(Numbers(30_000), 2, num_workers=1))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tree: Path) -> dict[str, Any]:
    """What the script found, in a mount namespace of its own with a small /dev/shm."""
    command = on_small_disk("/dev/shm", "4m")
    done = ran("-c", _SCRIPT, tree, command=command)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["room"] == 4 << 20
    return answer


def test_batches_need_no_room_in_dev_shm(found: dict[str, Any]) -> None:
    for name in ("small", "tensors", "arrays", "nothing left", "collate_fn", "no workers"):
        assert found[name] == [0, 2, 4, 6]
    assert found["no batches"] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert all(found[f"images, {how}"] is True for how in ("1 workers", "2 workers", "nothing left"))


def test_an_error_of_torch_about_shared_memory_becomes_a_clear_one() -> None:
    def failing(samples: list[str]) -> Any:
        raise RuntimeError(samples[0])

    text = "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)"
    with pytest.raises(SharedMemoryError, match=_REMEDY) as caught:
        WorkerCollate(failing)([text])
    assert "No space left" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="equal size") as kept:
        WorkerCollate(failing)(["stack expects each tensor to be equal size"])
    assert type(kept.value) is RuntimeError
