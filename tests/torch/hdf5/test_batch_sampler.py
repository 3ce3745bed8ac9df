"""``batch_sampler`` for stock loaders; and the trainers that make loaders anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fastpipe import FastHDF5Dataset, FastLoader, Shard, Shuffle
from fastpipe.errors import OptionError

pytestmark = pytest.mark.usefixtures("same_generators")

ROWS = 50
GROUPS = Shuffle(window=2, unit="group")
ORDERS: dict[str, Any] = {"in order": False, "shuffled": True, "groups": GROUPS}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batches") / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("n", data=np.arange(ROWS), chunks=(6,), compression="gzip")
    return path


def dataset_of(path: Path, seed: int | None = 3) -> FastHDF5Dataset:
    return FastHDF5Dataset(path, "n", seed=seed, cache="off", threads=2)


def numbers(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_a_stock_loader_has_the_batches_of_fastloader(
    path: Path, order: str, drop_last: bool, workers: int
) -> None:
    dataset = dataset_of(path)
    fast = FastLoader(dataset, 8, shuffle=ORDERS[order], drop_last=drop_last)
    batches = dataset.batch_sampler(8, shuffle=ORDERS[order], drop_last=drop_last)
    stock = DataLoader(dataset, batch_sampler=batches, num_workers=workers, persistent_workers=workers > 0)
    assert len(batches) == len(stock) == len(fast) == (6 if drop_last else 7)
    epochs = [numbers(stock) for _ in range(3)]
    assert epochs == [numbers(fast) for _ in range(3)]
    assert (epochs[0] == epochs[1]) is (order == "in order")
    batches.set_epoch(1)
    assert numbers(stock) == epochs[1]
    assert batches.epoch == 2
    assert all(isinstance(index, int) for batch in batches for index in batch)


def test_a_seed_or_no_shuffling_draws_nothing(path: Path) -> None:
    before = torch.get_rng_state()
    list(dataset_of(path, None).batch_sampler(8, shuffle=False))
    list(dataset_of(path, 3).batch_sampler(8, shuffle=GROUPS))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("order", ["shuffled", "groups"])
def test_its_state_between_epochs_holds_what_the_next_one_is_drawn_from(path: Path, order: str) -> None:
    dataset, found, state = dataset_of(path, None), [], None
    for stop in (None, 1, 2):
        torch.manual_seed(1)
        batches = dataset.batch_sampler(8, shuffle=ORDERS[order])
        if state is not None and stop == 2:
            batches.load_state_dict(json.loads(json.dumps(state)))
        epochs = [numbers(DataLoader(dataset, batch_sampler=batches)) for _ in range(stop or 3)]
        found, state = [*found, epochs], batches.state_dict()
    whole, before, after = found
    assert before + after == whole
    fast = [FastLoader(dataset, batch_sampler=dataset.batch_sampler(8, shuffle=ORDERS[order])) for _ in "12"]
    epochs = []
    for loader in fast:
        torch.manual_seed(1)
        if loader is fast[1]:
            loader.load_state_dict(state)
        for batch in loader:
            epochs.append(batch.tolist())
            state = loader.state_dict() if len(epochs) == 2 else state
    assert epochs[7:] == epochs[2:7]
    assert numbers(fast[0]) != epochs[:7]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("order", ORDERS)
def test_ranks_have_the_batches_of_fastloader(path: Path, order: str, mode: Any) -> None:
    dataset = dataset_of(path)
    for world in (1, 2, 3):
        loaders = [
            FastLoader(dataset, 4, shuffle=ORDERS[order], shard=Shard(rank, world, mode))
            for rank in range(world)
        ]
        samplers = [
            dataset.batch_sampler(4, shuffle=ORDERS[order], shard=Shard(rank, world, mode))
            for rank in range(world)
        ]
        parts = [list(sampler) for sampler in samplers]
        assert parts == [numbers(loader) for loader in loaders]
        assert [len(sampler) for sampler in samplers] == [len(part) for part in parts]
        counts = np.bincount([one for part in parts for batch in part for one in batch], minlength=ROWS)
        assert counts.sum() == (ROWS if mode == "eval" else -(-ROWS // world) * world)
        assert counts.min() == 1


def test_values_that_cannot_work_are_named(path: Path) -> None:
    dataset = dataset_of(path, None)
    with pytest.raises(OptionError, match="batch_size must be a number from 1, got 0"):
        dataset.batch_sampler(0, shuffle=True)
    with pytest.raises(TypeError):
        dataset.batch_sampler(1.5, shuffle=True)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"True, False or a fastpipe\.Shuffle, got 'group'"):
        dataset.batch_sampler(4, shuffle="group")  # type: ignore[arg-type]
    for shuffle in (True, GROUPS):
        with pytest.raises(OptionError, match="needs a dataset with a seed="):
            dataset.batch_sampler(4, shuffle=shuffle, shard=Shard(0, 2))
    assert sum(map(len, dataset.batch_sampler(4, shuffle=False, shard=Shard(0, 2)))) == ROWS // 2


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*LeafSpec.* is deprecated:FutureWarning"
)
def test_lightning_keeps_the_order(path: Path, tmp_path: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch", reason="needs Lightning: pip install lightning")

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.seen = torch.nn.Parameter(torch.zeros(1)), []

        def training_step(self, batch: Any, number: int) -> Any:
            self.seen.append(batch.tolist())
            return self.weight.sum()

        def predict_step(self, batch: Any, number: int) -> Any:
            return batch.tolist()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    def trainer(**options: Any) -> Any:
        return pl.Trainer(
            accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **options,
        )  # fmt: skip

    module = Module()
    trainer(max_epochs=2).fit(module, FastLoader(dataset_of(path), 8, shuffle=GROUPS))
    expected = FastLoader(dataset_of(path), 8, shuffle=GROUPS)
    assert module.seen == [*numbers(expected), *numbers(expected)]
    expected.set_epoch(0)
    # For prediction Lightning makes the loader anew, from its attributes.
    found = trainer().predict(Module(), FastLoader(dataset_of(path), 8, shuffle=GROUPS))
    assert sorted(sum(found, [])) == list(range(ROWS))
