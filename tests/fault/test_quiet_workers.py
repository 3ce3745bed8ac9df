"""Worker processes print nothing, neither as they start nor as they end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

_SCRIPT = """
import logging, sys
import numpy as np
from torch.utils.data import IterableDataset
from torchvision import transforms
import fastpipe
from fastpipe import FastHDF5Dataset, FastImageFolder, FastLoader, FastPatchDataset

class Own:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return np.ones((3, 60, 60)) * index

class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))

def row(index, rng):
    return {"x": rng.random(3)}

def datasets(images):
    yield Own()
    yield Stream()
    yield FastImageFolder(images, transforms.Compose([transforms.CenterCrop(16), transforms.ToTensor()]))
    yield FastHDF5Dataset("rows.h5", "x")
    yield FastPatchDataset(np.zeros((8, 8, 8), np.uint8), (4, 4, 4), seed=0)

if __name__ == "__main__":
    method, images = sys.argv[1:]
    for dataset in datasets(images):
        list(FastLoader(dataset, 2, num_workers=1, workers="processes", multiprocessing_context=method))
    fastpipe.generate(row, 8, "made.h5", seed=0, workers=1, progress=False)
    print("done")
"""


# A started worker takes seconds to import torch.
@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_no_worker_prints_anything(tmp_path: Path, photo_tree: Path, method: str) -> None:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = np.zeros((8, 4))
    (tmp_path / "train.py").write_text(_SCRIPT)
    ran = subprocess.run(
        [sys.executable, "train.py", method, str(photo_tree)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.stdout, ran.stderr) == ("done\n", "")
