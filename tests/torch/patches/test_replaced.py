"""Patches in the place of bad ones, what is written down of these, and stock loaders with the same patches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, Subset

from fastpipe import BadSamples, FastLoader, FastPatchDataset, Shuffle
from fastpipe.sampling import Grid, Positions, Uniform

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")


@pytest.fixture
def half_nan() -> Any:
    array = np.arange(24 * 4, dtype=np.float32).reshape(24, 4)
    array[12:] = np.nan
    return array


@pytest.mark.parametrize("good", [1, 2, 5])
def test_another_patch_is_found_if_there_is_one(good: int) -> None:
    array = np.full((12, 4), np.nan, np.float32)
    array[:good] = np.arange(good)[:, None]
    for seed in range(30):
        dataset = FastPatchDataset(
            array, (1, 4), sampling=Grid(), nan="error", bad_samples="replace", seed=seed, threads=1
        )
        patches = torch.cat(list(FastLoader(dataset, 4))).numpy()
        assert patches[:good, 0, 0].tolist() == list(range(good)), "those are themselves"
        assert set(patches[:, 0, 0].tolist()) <= set(range(good))


def test_what_is_written_down_is_where_it_was(half_nan: Any, tmp_path: Path) -> None:
    """Random patches of one index are others in each epoch, and each bad one is named once by its own."""
    log = tmp_path / "bad.jsonl"
    bad = BadSamples("replace", log=str(log))
    dataset = FastPatchDataset(
        half_nan, (4, 4), sampling=Uniform(8), nan="error", bad_samples=bad, seed=0, threads=1
    )
    loader = FastLoader(dataset, 4)
    expected = set()
    for epoch in range(4):
        for index, start in enumerate(dataset.places(epoch)[1][:, 0].tolist()):
            if start + 4 > 12:
                expected.add((index, start))
        for batch in loader:
            assert not np.isnan(batch.numpy()).any()
    written = [json.loads(line) for line in log.read_text().splitlines()]
    found = {(line["index"], int(line["path"].rpartition("at (")[2].split(",")[0])) for line in written}
    assert expected <= found
    assert len(found) == len(written), "once each"
    assert all(start + 4 > 12 for _, start in found)


@pytest.mark.few(3)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["subset", "concat", "sampler", "batch sampler", "shuffled", "tour"])
def test_a_stock_loader_has_the_same_patches(kind: str, workers: int) -> None:
    array = np.arange(30 * 30, dtype=np.int32).reshape(30, 30)
    dataset = FastPatchDataset(array, (3, 3), sampling=Uniform(14), seed=4)
    source: Any = dataset
    options: dict[str, Any] = {"batch_size": 3}
    if kind == "subset":
        source = Subset(dataset, [3, 9, 2, 0, 3])
    elif kind == "concat":
        source = ConcatDataset(
            [dataset, FastPatchDataset(array, (3, 3), sampling=Positions([[1, 2]]), seed=4)]
        )
    elif kind == "sampler":
        options["sampler"] = [3, 1, 2, 0, 13]
    elif kind == "batch sampler":
        options = {"batch_sampler": BatchSampler([5, 1, 1, 7], 3, False)}
    else:
        options["shuffle"] = Shuffle(unit="group") if kind == "tour" else True
    loader = FastLoader(source, num_workers=workers, workers="processes", **options)
    reference = loader.reference()
    for _ in range(2):
        assert_same(list(loader), list(reference))
    loader.set_epoch(7)
    assert_same(list(loader), list(FastLoader(source, **options).reference()), different=True)
    loader.set_epoch(7)
    reference = loader.reference()
    assert_same(list(loader), list(reference))


def assert_same(found: list[Any], expected: list[Any], *, different: bool = False) -> None:
    assert [batch.shape for batch in found] == [batch.shape for batch in expected]
    assert all(map(torch.equal, found, expected)) != different
