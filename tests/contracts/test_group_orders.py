"""Orders of rows and of patches, by ``Shuffle`` and others: in every loader, on every rank, and resumed."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from resuming import check_goes_on
from streams import BY_PROCESSES
from torch.utils.data import DataLoader, Subset
from trainer_ranks import lightning_module, trainer_of

from fastpipe import Cache, FastHDF5Dataset, FastLoader, FastPatchDataset, Shard, Shuffle, accelerate
from fastpipe.errors import OptionError
from fastpipe.sampling import Uniform

pytestmark = pytest.mark.usefixtures("same_generators")

GROUPS = Shuffle(unit="group")
ORDERS: dict[str, Any] = {
    "in order": False,
    "shuffled": True,
    "groups": GROUPS,
    "window": Shuffle(3, "group"),
}
COUNT, SIZE = 50, 8
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("orders")
    with h5py.File(made / "x.h5", "w") as file:
        file.create_dataset("n", data=np.arange(COUNT), chunks=(6,), compression="gzip")
    zarr.create_array(made / "x.zarr", data=np.arange(13 * 14 * 16).reshape(13, 14, 16), chunks=(4, 4, 8))
    return made


@pytest.fixture(params=["rows", "patches"])
def make(request: pytest.FixtureRequest, folder: Path) -> Make:
    """Makes a dataset whose samples' first elements say which they are."""

    def rows(seed: int | None = 3, **options: Any) -> Any:
        return FastHDF5Dataset(
            folder / "x.h5", "n", **{"seed": seed, "cache": "off", "threads": 2, **options}
        )

    def patches(seed: int | None = 3, **options: Any) -> Any:
        options = {"sampling": Uniform(COUNT), "cache": Cache("ram", 20_000), "threads": 2, **options}
        return FastPatchDataset(folder / "x.zarr", (3, 4, 5), seed=seed, **options)

    return {"rows": rows, "patches": patches}[request.param]


def batches(loader: Any) -> list[list[int]]:
    return [batch.reshape(len(batch), -1)[:, 0].tolist() for batch in loader]


def samples(loader: Any) -> list[int]:
    return sum(batches(loader), [])


def every(dataset: Any, epoch: int) -> Counter[int]:
    """The samples of an epoch of the dataset's seed."""
    if isinstance(dataset, FastHDF5Dataset):
        return Counter(range(COUNT))
    return Counter(np.ravel_multi_index(tuple(dataset.places(epoch)[1].T), (13, 14, 16)).tolist())


@pytest.mark.few(3)
@pytest.mark.parametrize("order", ORDERS)
def test_every_loader_has_the_epochs_of_the_seed(make: Make, order: str) -> None:
    shuffle, dataset = ORDERS[order], make()
    loader = FastLoader(dataset, SIZE, shuffle=shuffle)
    wanted = [batches(loader) for _ in range(3)]
    for epoch, found in enumerate(wanted):
        assert Counter(sum(found, [])) == every(dataset, epoch)
    assert (wanted[0] == wanted[1]) is (order == "in order" and isinstance(dataset, FastHDF5Dataset))
    stock = dataset.batch_sampler(SIZE, shuffle=shuffle)
    others = {
        "threads": FastLoader(make(threads=1), SIZE, shuffle=shuffle),
        "workers": BY_PROCESSES(make(), SIZE, shuffle=shuffle, num_workers=2, persistent_workers=True),
        "loader's seed": FastLoader(make(None), SIZE, shuffle=shuffle, seed=3),
        "accelerated": accelerate(FastLoader(make(), SIZE, shuffle=shuffle)),
        "reference": FastLoader(make(), SIZE, shuffle=shuffle).reference(),
        "stock": DataLoader(dataset, batch_sampler=stock, num_workers=2, persistent_workers=True),
        "batches": FastLoader(make(), batch_sampler=make().batch_sampler(SIZE, shuffle=shuffle)),
    }
    for name, other in others.items():
        assert [batches(other) for _ in range(3)] == wanted, name
    stock.set_epoch(1)
    assert batches(DataLoader(dataset, batch_sampler=stock)) == wanted[1]
    assert stock.state_dict() == {"epoch": 2}
    copy = pickle.loads(pickle.dumps(stock))
    copy.load_state_dict({"epoch": 1})
    assert batches(DataLoader(dataset, batch_sampler=copy)) == wanted[1]
    short = dataset.batch_sampler(SIZE, shuffle=shuffle, drop_last=True)
    assert len(short) == len(list(short)) == COUNT // SIZE
    assert samples(FastLoader(make(), 7, shuffle=shuffle)) == sum(wanted[0], [])


@pytest.mark.parametrize("order", ["shuffled", "groups", "window"])
def test_without_a_seed_torchs_generator_decides(make: Make, order: str) -> None:
    dataset, shuffle = make(None), ORDERS[order]
    stock = DataLoader(dataset, batch_sampler=dataset.batch_sampler(SIZE, shuffle=shuffle))
    for loader in (FastLoader(dataset, SIZE, shuffle=shuffle), stock):
        streams = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            streams.append([samples(loader) for _ in range(2)])
        assert streams[0] == streams[1] != streams[2] and streams[0][0] != streams[0][1]
    own = FastLoader(dataset, SIZE, shuffle=shuffle, generator=torch.Generator().manual_seed(3))
    before, first = torch.get_rng_state(), samples(own)
    assert isinstance(dataset, FastPatchDataset) or torch.equal(torch.get_rng_state(), before)
    own.generator.manual_seed(3)
    assert isinstance(dataset, FastPatchDataset) or samples(own) == first


@pytest.mark.few(4)
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("order", ORDERS)
def test_ranks_share_an_epoch(make: Make, order: str, mode: Any) -> None:
    for world, epoch in ((2, 0), (3, 1)):
        parts = []
        for rank in range(world):
            dataset, shard = make(), Shard(rank, world, mode)
            loader = FastLoader(dataset, 4, shuffle=ORDERS[order], shard=shard)
            stock = dataset.batch_sampler(4, shuffle=ORDERS[order], shard=shard)
            for each in (loader, stock):
                each.set_epoch(epoch)
            parts.append(batches(loader))
            assert batches(DataLoader(dataset, batch_sampler=stock)) == parts[-1]
            assert len(stock) == len(loader) == len(parts[-1])
        found, wanted = Counter(sum(sum(parts, []), [])), every(make(), epoch)
        assert not wanted - found
        assert (found - wanted).total() == (0 if mode == "eval" else -COUNT % world)


@pytest.mark.few(5)
@pytest.mark.parametrize("how", ["batches", "no batches", "batch sampler", "subset", "workers"])
@pytest.mark.parametrize("seed", [None, 6])
@pytest.mark.parametrize("order", ["in order", "groups", "window"])
def test_an_epoch_goes_on_at_every_batch(make: Make, order: str, seed: int | None, how: str) -> None:
    def begun(shuffle: Any = ORDERS[order]) -> FastLoader[Any]:
        dataset: Any = make(seed)
        if how == "batch sampler":
            return FastLoader(dataset, batch_sampler=dataset.batch_sampler(SIZE, shuffle=shuffle))
        given = Subset(dataset, range(5, COUNT)) if how == "subset" else dataset
        size = None if how == "no batches" else SIZE
        return BY_PROCESSES(given, size, shuffle=shuffle, num_workers=how == "workers")

    def seen(batch: Any) -> list[int]:
        return batches([np.asarray(batch)[None] if how == "no batches" else batch])[0]

    torch.manual_seed(7)
    cuts = slice(None, None, 30 if how == "no batches" else 3)
    state = check_goes_on(begun, seen, is_seeded=seed is not None, cuts=cuts)
    if order != "in order":
        with pytest.raises(OptionError, match="make the loader with the same shuffle="):
            begun(Shuffle(4, "group")).load_state_dict(state)


@pytest.mark.parametrize("order", ["shuffled", "groups"])
def test_the_state_between_epochs_of_a_batch_sampler_decides_the_next(make: Make, order: str) -> None:
    dataset, found, state = make(None), [], None
    for stop in (None, 1, 2):
        torch.manual_seed(1)
        stock = dataset.batch_sampler(SIZE, shuffle=ORDERS[order])
        if state is not None and stop == 2:
            stock.load_state_dict(json.loads(json.dumps(state)))
        epochs = [list(map(int, sum(stock, []))) for _ in range(stop or 3)]
        found, state = [*found, epochs], stock.state_dict()
    whole, before, after = found
    assert before + after == whole


def test_other_ranks_and_workers_go_on(make: Make) -> None:
    """Three ranks go on where two were."""

    def loaders(world: int, workers: int) -> list[FastLoader[Any]]:
        return [
            BY_PROCESSES(make(), 12 // world, shuffle=ORDERS["window"], num_workers=workers, shard=Shard(rank, world, "eval"))
            for rank in range(world)
        ]  # fmt: skip

    whole = batches(loaders(1, 0)[0])
    (before, _), after = loaders(2, 0), loaders(3, 1)
    iterator = iter(before)
    next(iterator)
    for loader in after:
        loader.load_state_dict(before.state_dict())
    assert sorted(sum(map(samples, after), [])) == sorted(sum(whole[1:], []))


def test_states_of_other_orders_are_refused(make: Make) -> None:
    states = {}
    for name, shuffle in ORDERS.items():
        loader = FastLoader(make(), SIZE, shuffle=shuffle)
        next(iter(loader))
        states[name] = loader.state_dict()
    for name, state in states.items():
        for other, shuffle in ORDERS.items():
            again = FastLoader(make(), SIZE, shuffle=shuffle)
            if name == other:
                again.load_state_dict(state)
            elif {name, other} != {"in order", "shuffled"}:  # of which a loader only knows that it has a seed
                with pytest.raises(OptionError, match="this state was saved with the order"):
                    again.load_state_dict(state)
    with pytest.raises(OptionError, match="this state belongs to a dataset of 50 samples"):
        FastLoader(Subset(make(), range(20)), SIZE, shuffle=GROUPS).load_state_dict(states["groups"])


def test_a_state_of_other_groups_is_refused(folder: Path, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("n", data=np.arange(COUNT), chunks=(7,), compression="gzip")
    np.save(tmp_path / "x.npy", np.zeros((20, 20, 20), "i8"))
    paths = (folder / "x.zarr", tmp_path / "x.npy")
    for one, other in (
        (FastHDF5Dataset(folder / "x.h5", "n"), FastHDF5Dataset(tmp_path / "x.h5", "n")),
        [FastPatchDataset(path, (3, 4, 5), sampling=Uniform(9)) for path in paths],
    ):
        state = FastLoader(one, 4, shuffle=ORDERS["window"], seed=1).state_dict()
        with pytest.raises(OptionError, match="this state was saved with"):
            FastLoader(other, 4, shuffle=ORDERS["window"], seed=1).load_state_dict(state)


def test_batch_samplers_that_cannot_work_are_named(make: Make) -> None:
    dataset = make(None)
    with pytest.raises(OptionError, match="batch_size must be a number from 1, got 0"):
        dataset.batch_sampler(0, shuffle=True)
    with pytest.raises(OptionError, match=r"True, False or a fastpipe\.Shuffle, got 'group'"):
        dataset.batch_sampler(4, shuffle="group")
    with pytest.raises(TypeError):
        dataset.batch_sampler(1.5, shuffle=True)
    for shuffle in (True, GROUPS):
        with pytest.raises(OptionError, match="needs a dataset with a seed="):
            dataset.batch_sampler(4, shuffle=shuffle, shard=Shard(0, 2))
        with pytest.raises(OptionError, match="needs a seed="):
            FastLoader(dataset, 4, shuffle=shuffle, shard=Shard(0, 2))
    for options in ({"sampler": [1]}, {"batch_sampler": [[1]]}):
        with pytest.raises(OptionError, match="and a sampler both define the order"):
            FastLoader(dataset, shuffle=GROUPS, **options)


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*LeafSpec.* is deprecated", "ignore:.*no `val_dataloader`"
)
def test_lightning_keeps_the_order(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch", reason="needs Lightning: pip install lightning")
    loaders = [FastLoader(FastHDF5Dataset(folder / "x.h5", "n", seed=3), SIZE, shuffle=GROUPS) for _ in "123"]
    module, trainer = lightning_module(torch.Tensor.tolist), trainer_of(tmp_path)
    trainer.fit(module, loaders[0])
    assert module.seen == [*batches(loaders[1]), *batches(loaders[1])]
    # For prediction Lightning makes the loader anew, from its attributes.
    found = trainer_of(tmp_path).predict(lightning_module(torch.Tensor.tolist), loaders[2])
    assert sorted(sum(found, [])) == list(range(COUNT))
