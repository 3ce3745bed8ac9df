"""What the budget of ``FastPatchDataset`` is used for: epochs again, many shapes, files that are rewritten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch.utils.data import DataLoader, Dataset

from fastpipe import Cache, FastLoader, FastPatchDataset, Shuffle
from fastpipe.sampling import Grid, Uniform
from fastpipe.volumes import units

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

GROUPS = Shuffle(unit="group")


def amplification_of(dataset: FastPatchDataset, loader: Any) -> float:
    before = dataset._running().counts.nbytes
    for _ in loader:
        pass
    decoded, used = np.subtract(dataset._running().counts.nbytes, before)
    return float(decoded / used)


@pytest.fixture
def scroll(tmp_path: Path) -> str:
    path = str(tmp_path / "x.zarr")
    array = np.random.default_rng(0).integers(0, 9, (48, 64, 64), np.uint8)
    zarr.create_array(path, data=array, chunks=(8, 8, 8))
    return path


@pytest.mark.parametrize("again", ["the same loader", "a new loader"])
def test_an_epoch_that_comes_again_decodes_no_more_than_before(scroll: str, again: str) -> None:
    dataset = FastPatchDataset(
        scroll, (12, 12, 12), sampling=Uniform(400), seed=0, cache=Cache("ram", max_bytes=40_000), threads=1
    )
    loader = FastLoader(dataset, 4, GROUPS)
    first = amplification_of(dataset, loader)
    for _ in range(2):
        loader = loader if again == "the same loader" else FastLoader(dataset, 4, GROUPS)
        loader.set_epoch(0)
        assert amplification_of(dataset, loader) <= 1.1 * first


def test_volumes_of_many_shapes_share_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volumes = [f"{tmp_path}/{side}.zarr" for side in range(16, 28)]
    for side, volume in enumerate(volumes, 16):
        zarr.create_array(volume, data=np.full((48, 48, 48), side, "u1"), chunks=(8, 8, side))
    found = []
    for most_sizes in (units._MOST_SIZES, 100):  # then each shape has a part of its own
        monkeypatch.setattr(units, "_MOST_SIZES", most_sizes)
        cache = Cache("ram", max_bytes=300_000)
        dataset = FastPatchDataset(
            volumes, (12, 12, 12), sampling=Uniform(300), seed=0, cache=cache, threads=1
        )
        found.append(amplification_of(dataset, FastLoader(dataset, 4, GROUPS)))
    assert found[0] < 0.9 * found[1]


def test_ranks_do_not_share_what_was_in_files_that_were_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    path = str(tmp_path / "x.zarr")

    def dataset_of(value: int) -> FastPatchDataset:
        array = np.full((16, 16), value, np.uint8)
        zarr.create_array(path, data=array, chunks=(8, 8), fill_value=9, overwrite=True)
        return FastPatchDataset(path, (16, 16), sampling=Grid(), cache=Cache("ram", max_bytes=1 << 20))

    old = dataset_of(1)
    assert set(old[0].ravel().tolist()) == {1}
    new = dataset_of(2)
    assert set(new[0].ravel().tolist()) == {2}


def test_ranks_that_cannot_meet_have_one_budget_together(
    scroll: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def alone(*_: Any) -> Any:
        raise OSError("no space left for a note")

    def slots_of() -> int:
        dataset = FastPatchDataset(scroll, (12, 12, 12), cache=Cache("ram", max_bytes=40_000))
        assert dataset[0].shape == (12, 12, 12)
        return sum(memory.slots for memory in dataset._remembered._memories.values() if memory is not None)

    whole = slots_of()
    monkeypatch.setattr(units, "joined_memory", alone)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with caplog.at_level("WARNING", "fastpipe"):
        assert 0 < slots_of() <= whole // 8
    assert "8 ranks" in caplog.text and "no space left for a note" in caplog.text


class Wrapper(Dataset[Any]):
    """A dataset of the script's around fastpipe's."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def test_a_wrapped_dataset_has_the_patches_of_its_batch_sampler(scroll: str) -> None:
    dataset = FastPatchDataset(scroll, (4, 4, 4), sampling=Uniform(40), seed=5)
    expected = [batch.clone() for batch in FastLoader(dataset, 4, GROUPS)]
    batches = dataset.batch_sampler(4, shuffle=GROUPS)
    found = list(DataLoader(Wrapper(dataset), batch_sampler=batches))
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)
