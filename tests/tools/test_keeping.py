"""A cache for all that a dataset decodes, in the place of a smaller one or of none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torchvision.transforms import Compose, Resize, ToTensor

from fastpipe import Cache, FastHDF5Dataset, FastImageFolder, FastLoader
from fastpipe.tools import candidates as keeping
from fastpipe.tools.candidates import of_kept
from fastpipe.tools.loaders import Watched
from fastpipe.tools.loops import Loop
from fastpipe.tools.stacks import Line

LINE = Line("train.py", 3, "main")


def found_for(loader: Any) -> list[Any]:
    return list(of_kept(Watched(loader, LINE, LINE, Loop(1.0, True))))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        values = np.arange(96 * 16, dtype=np.float32).reshape(96, 16)
        file.create_dataset("rows", data=values, chunks=(4, 16), compression="gzip")
    return tmp_path / "x.h5"


def test_images_are_kept_in_a_copy_of_the_dataset(photo_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaders, keep = [], keeping.kept

    def noted(*arguments: Any, **settings: Any) -> Any:
        loaders.append(keep(*arguments, **settings))
        return loaders[-1]

    monkeypatch.setattr(keeping, "kept", noted)
    transform = Compose([Resize((8, 8)), ToTensor()])
    dataset = FastImageFolder(photo_tree, transform, cache="off")
    loader = FastLoader(dataset, 4, shuffle=True)
    (found,) = found_for(loader)
    assert found.what.startswith("cache=Cache(where='ram', max_bytes=")
    assert found.what.endswith(" of the FastImageFolder (train.py:3 main)")
    expected = {image.numpy().tobytes() for image, _ in dataset}
    for _ in range(2):
        images = torch.cat([images for images, _ in found.begin()])
        assert {image.numpy().tobytes() for image in images} == expected
    kept = loaders[0].dataset.dataset
    assert kept is not dataset and kept.cache.where == "ram"
    assert kept._running().cache.describe() != "" and dataset.cache == Cache("off")
    assert dataset._running().cache is None


def test_rows_are_kept_in_a_copy_of_the_dataset(rows: Path) -> None:
    dataset = FastHDF5Dataset(rows, "rows", cache="off")
    (found,) = found_for(FastLoader(dataset, 4))
    assert "FastHDF5Dataset" in found.what
    for _ in range(2):
        first = torch.cat(list(found.begin()))[:, 0]
        assert sorted((first / 16).long().tolist()) == list(range(64))  # of sixteen batches
    assert dataset.cache == Cache("off")


@pytest.mark.parametrize("options", [("auto",), ("ram",), ("disk",), ("ram", 1 << 20)])
def test_where_all_is_kept_anyway_nothing_is_measured(rows: Path, options: Any) -> None:
    assert not found_for(FastLoader(FastHDF5Dataset(rows, "rows", cache=Cache(*options)), 4))


def test_a_cache_that_is_too_small_may_be_larger(rows: Path) -> None:
    assert found_for(FastLoader(FastHDF5Dataset(rows, "rows", cache=Cache("ram", max_bytes=1000)), 4))


def test_without_memory_for_it_nothing_is_measured(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = FastLoader(FastHDF5Dataset(rows, "rows", cache="off"), 4)
    for free in (None, 96 * 64):
        monkeypatch.setattr(keeping, "free_memory", lambda free=free: free)
        assert not found_for(loader)


def test_other_datasets_are_passed_over(rows: Path) -> None:
    dataset = FastHDF5Dataset(rows, "rows", cache="off")
    assert not found_for(FastLoader(torch.utils.data.Subset(dataset, [0, 1]), 2))
    assert not found_for(FastLoader(list(range(8)), 2))
