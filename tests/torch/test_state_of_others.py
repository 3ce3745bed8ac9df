"""Global state of a process changes as it does under the stock object."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from fastpipe import FastHDF5Dataset, FastImageFolder, FastLoader, FastPatchDataset
from fastpipe.sampling import Grid

pytestmark = pytest.mark.usefixtures("same_generators")

_ROOT = Path(__file__).resolve().parents[2]
KNOWN = transforms.Compose([transforms.Resize(32), transforms.CenterCrop(32), transforms.ToTensor()])


@pytest.mark.slow
def test_every_operation_leaves_all_that_is_global_as_its_counterpart_does(tmp_path: Path) -> None:
    """Operations and what is compared are in ``state_script.py``."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("state_script.py")), str(tmp_path)],
        capture_output=True, text=True, timeout=170, check=False, env={**os.environ, "PYTHONPATH": str(_ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    changed, count = json.loads(done.stdout.splitlines()[-1])
    assert changed == {} and count > 80


def _number(array: Any) -> int:
    return int(np.asarray(array).flat[0])


def _datasets(tree: Path, folder: Path) -> list[Any]:
    """Datasets of 15 samples that draw nothing; each sample is its number, or has it as its target."""
    samples = [(path, n) for n, (path, _) in enumerate(ImageFolder(tree).samples)]
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("x", data=np.arange(15), chunks=(4,), compression="gzip")
    images = partial(FastImageFolder.from_samples, samples)
    rows = partial(FastHDF5Dataset, folder / "x.h5", "x")
    patches = partial(
        FastPatchDataset, np.arange(15).reshape(15, 1), (1, 1), sampling=Grid(), transform=_number
    )
    own = lambda image: KNOWN(image)  # noqa: E731
    return [
        images(KNOWN), images(own), images(KNOWN, loader=lambda path: ImageFolder(tree).loader(path)),
        images(own, thread_safe=True), rows(), rows(transform=_number),
        rows(transform=_number, thread_safe=True, bad_samples="replace"), patches(), patches(thread_safe=True),
    ]  # fmt: skip


def _orders(loader: Any, dataset: Any, workers: int) -> list[list[int]]:
    """The samples of three epochs, with a validation loop and something that is drawn between them."""
    torch.manual_seed(3)
    train, check = (loader(dataset, 4, shuffle, num_workers=workers) for shuffle in (True, False))
    orders = []
    for _ in range(3):
        seen = [batch[1] if isinstance(batch, list) else batch for batch in train]
        orders.append([int(number) for batch in seen for number in batch])
        assert len(list(check)) == 4
        torch.nn.functional.dropout(torch.ones(3))
    return orders


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_replaced_datasets_have_the_stock_orders(workers: int, tree: Path, tmp_path: Path) -> None:
    wanted = _orders(DataLoader, range(15), workers)
    assert sorted(wanted[0]) == list(range(15)) and wanted[0] != wanted[1]
    for dataset, loader in itertools.product(_datasets(tree, tmp_path), (DataLoader, FastLoader)):
        assert _orders(loader, dataset, workers) == wanted, (dataset, loader)
