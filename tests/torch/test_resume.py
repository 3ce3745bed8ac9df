"""``state_dict``, shards and epochs of ``FastLoader``: the stream goes on exactly, in whichever process."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from streams import BY_PROCESSES, OwnSampler, Stream
from torch.utils.data import BatchSampler, ConcatDataset, DistributedSampler, Subset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from fastpipe import BadSamples, FastImageFolder, FastLoader, Shard
from fastpipe.bench.synthetic import photo_tree
from fastpipe.errors import OptionError

pytestmark = pytest.mark.usefixtures("same_generators")

RANDOM = v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()])


class Numbers:
    """A dataset whose samples show the order, and draw from every global generator."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(torch.rand(())), random.random(), float(np.random.random())


def rows(loader: Any) -> list[tuple[Any, ...]]:
    """The samples of an epoch."""
    return [
        tuple(value.item() if value.ndim == 0 else value.numpy().tobytes() for value in row)
        for batch in loader for row in zip(*batch, strict=True)
    ]  # fmt: skip


def shuffled(length: int = 23, size: int = 4, **options: Any) -> FastLoader[Any]:
    return FastLoader(Numbers(length), size, **{"shuffle": True, "seed": 2, **options})


def transported(state: Any) -> Any:
    return json.loads(json.dumps(state))


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, True)])
def test_set_epoch_may_follow_iter_as_in_trainers(workers: int, persistent: bool) -> None:
    loader = shuffled(num_workers=workers, workers="processes", persistent_workers=persistent)
    epochs = [rows(loader) for _ in range(4)]
    for epoch in (3, 1, 1, 2):
        iterator = iter(loader)
        loader.sampler.set_epoch(epoch)  # type: ignore[union-attr]
        assert rows(iterator) == epochs[epoch]
    del iterator
    assert rows(loader) == epochs[3], "epochs go on from there"


def test_set_epoch_may_follow_an_error_of_the_first_batch(tree: Path, tmp_path: Path) -> None:
    dataset = FastImageFolder(tree, RANDOM)
    loader = FastLoader(dataset, 4, seed=1)
    loader.set_epoch(2)
    expected, good = rows(loader), dataset.samples[3]
    dataset.samples[3] = str(tmp_path / "none.jpg"), good[1]
    failing = iter(loader)
    with pytest.raises(OSError, match=r"none\.jpg"):
        next(failing)
    dataset.samples[3] = good
    loader.set_epoch(2)
    assert rows(failing) == expected


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda own: FastLoader(Numbers(), sampler=own), "a OwnSampler, which has no state_dict"),
        (lambda own: FastLoader(Numbers(), batch_sampler=BatchSampler(own, 2, False)), "a OwnSampler"),
        (lambda own: FastLoader(Stream()), "IterableDataset"),
        (lambda own: BY_PROCESSES(Numbers(), in_order=False, num_workers=2), "in_order=False"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_loaders_that_cannot_save_say_so(loader: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        loader(OwnSampler(lambda: range(5), 5)).state_dict()


def test_states_that_do_not_fit_are_refused() -> None:
    state = shuffled().state_dict()
    assert len(json.dumps(state)) < 120
    for loader, wrong, message in (
        (shuffled(seed=3), state, "saved with seed=2, the loader has seed=3"),
        (shuffled(24), state, "of 23 samples, the loader's has 24"),
        (shuffled(shuffle=False, sampler=[1, 2]), state, "the same sampler"),
        (shuffled(), {**state, "version": 9}, "version 9"),
        (shuffled(), {"a": 1}, "takes the result of state_dict"),
        (shuffled(), None, "None"),
    ):
        with pytest.raises(OptionError, match=message):
            loader.load_state_dict(wrong)


@pytest.mark.parametrize("cut", range(1, 4))
def test_a_state_counts_samples_that_were_left_out(tmp_path: Path, cut: int) -> None:
    root = photo_tree(tmp_path / "tree", classes=3, per_class=5, sizes=(32, 40))
    dataset = FastImageFolder(root, RANDOM, bad_samples=BadSamples("skip"))
    for index in (0, 4, 5, 6, 11):
        Path(dataset.samples[index][0]).write_bytes(b"no picture")
    for options in ({"seed": 3, "shuffle": True}, {"sampler": list(range(14, -1, -1)), "seed": 3}):
        loader, again = (FastLoader(dataset, 3, **options) for _ in range(2))
        iterator = iter(loader)
        for _ in range(cut):
            next(iterator)
        again.load_state_dict(transported(loader.state_dict()))
        assert rows(again) == rows(iterator)


SERIAL = v1.Compose([RANDOM, lambda image: image + float(np.random.random()) + random.random()])


@pytest.mark.parametrize("transform", [RANDOM, SERIAL, None], ids=["random", "serial", "own dataset"])
def test_samples_are_the_same_on_any_threads_workers_and_ranks(tree: Path, transform: Any) -> None:
    """Also of a plain ``ImageFolder``, and of ``Subset``."""
    every = range(15)
    datasets: list[Any] = [Numbers(15), Subset(Numbers(15), every), Subset(Subset(Numbers(15), every), every)]
    if transform is not None:
        datasets = [FastImageFolder(tree, transform, threads=threads) for threads in (1, 3)]
        datasets.append(ImageFolder(tree, transform))
    streams = []
    for number, (workers, world) in enumerate([(0, 1), (0, 3), (2, 2), (1, 1), (2, 3), (0, 2)]):
        found = {}
        for rank in range(world):
            options: dict[str, Any] = {"shuffle": True, "seed": 2**70 + 1, "shard": Shard(rank, world)}
            part = rows(BY_PROCESSES(datasets[number % 3], 2, num_workers=workers, **options))
            found |= {rank + world * at: row for at, row in enumerate(part)}
        streams.append([found[place] for place in range(15)])
    assert all(stream == streams[0] for stream in streams)


@given(
    length=st.integers(1, 40), size=st.integers(1, 4), worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    cut=st.integers(0, 6), shuffle=st.booleans(),
)  # fmt: skip
def test_n_ranks_resume_as_m(length: int, size: int, worlds: Any, cut: int, shuffle: bool) -> None:
    def ranks(world: int) -> list[FastLoader[Any]]:
        shards = [Shard(rank, world) for rank in range(world)]
        return [shuffled(length, size, shuffle=shuffle, shard=shard) for shard in shards]

    order = rows(shuffled(length, 1, shuffle=shuffle))
    taken, states = [], []
    for rank in ranks(worlds[0]):
        for number, batch in enumerate(rank, 1):
            taken += rows([batch]) if number <= cut else []
            if number == cut:
                states.append(transported(rank.state_dict()))
    if not states:
        return
    assert all(state == states[0] for state in states), "the same for all ranks"
    for rank in ranks(worlds[1]):
        rank.load_state_dict(states[0])
        taken += rows(rank)
    assert {row for row in taken if row in order} == set(order), "each sample with the draws of its position"
    assert len(taken) < length + sum(worlds), "none twice but to fill up a step"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": Shard(0, 2), "sampler": [1, 2]}, "shard= and a sampler"),
        ({"shard": Shard(0, 2), "batch_sampler": [[1]]}, "shard= and a sampler"),
        ({"shard": (0, 2)}, "must be a fastpipe.Shard"),
        ({"shard": Shard(0, 2, "eval"), "batch_size": None}, "give a batch_size"),
        ({"shard": Shard(0, 24, "eval")}, "23 samples are left for 24 ranks"),
    ],
)
def test_shards_that_cannot_work_are_named(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        len(FastLoader(Numbers(), **options))


def test_skip_is_refused_with_ranks(tree: Path) -> None:
    dataset = FastImageFolder(tree, RANDOM, bad_samples="skip")
    for each in (dataset, Subset(dataset, [1, 2]), ConcatDataset([FastImageFolder(tree), dataset])):
        with pytest.raises(OptionError, match="bad_samples='replace'"):
            FastLoader(each, shard=Shard(0, 2))


def test_the_shown_sampler_is_a_distributed_one() -> None:
    loader = shuffled(10, 2, shard=Shard(1, 3))
    sampler: Any = loader.sampler
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.rank, sampler.num_replicas, len(sampler), sampler.num_valid_samples) == (1, 3, 4, 3)
    sampler.set_epoch(2)
    indices = list(sampler)
    assert [row[0] for row in rows(loader)] == indices
    again = FastLoader(Numbers(10), 2, sampler=sampler, seed=2, shard=Shard(1, 3))  # as trainers make it anew
    again.set_epoch(2)
    assert [row[0] for row in rows(again)] == indices


def test_the_epoch_of_a_distributed_sampler_decides_the_draws() -> None:
    """Resumed by ``sampler.set_epoch`` alone, augmentation goes on as well; also after a state was loaded."""

    def loader() -> Any:
        return FastLoader(Numbers(12), 2, sampler=DistributedSampler(Numbers(12), 2, 0), seed=1)

    whole = loader()
    epochs, states = [], []
    for epoch in range(3):
        whole.sampler.set_epoch(epoch)
        iterator = iter(whole)
        head = rows([next(iterator)])
        states.append(transported(whole.state_dict()))
        epochs.append(head + rows(iterator))
    for epoch, expected in ((1, epochs[1][2:]), (2, epochs[2])):
        late = loader()
        late.load_state_dict(states[1])
        late.sampler.set_epoch(epoch)
        assert rows(late) == expected
    counting = loader()  # a script that never sets it still gets other augmentation each time
    first, second = rows(counting), rows(counting)
    assert [row[0] for row in first] == [row[0] for row in second] and first != second
