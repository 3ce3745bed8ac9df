"""``state_dict``, shards and epochs: the stream goes on exactly, whoever takes it up."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
)
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from fastpipe import BadSamples, FastImageFolder, FastLoader, Shard
from fastpipe.bench.synthetic import photo_tree
from fastpipe.errors import OptionError

pytestmark = pytest.mark.usefixtures("same_generators")

RANDOM = v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()])


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_tree(tmp_path_factory.mktemp("tree"), classes=3, per_class=5, sizes=(32, 40))


class Numbers:
    """A dataset whose samples show the order, and draw from every global generator."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(torch.rand(())), random.random(), float(np.random.random())


def plain(batch: Any) -> Any:
    return [part.tolist() for part in batch] if isinstance(batch, (list, tuple)) else batch.tolist()


def hashed(batch: Any) -> Any:
    return batch[0].numpy().tobytes(), batch[1].tolist()


def stream(loader: Any, look: Any = plain) -> list[Any]:
    return [look(batch) for batch in loader]


def transported(state: Any) -> Any:
    return json.loads(json.dumps(state))


def test_a_state_counts_received_batches_alone(tree: Path) -> None:
    for workers in (0, 2):
        loader = FastLoader(
            FastImageFolder(tree, RANDOM),
            2,
            seed=1,
            num_workers=workers,
            workers="processes",
            prefetch_batches=5,
        )
        iterator = iter(loader)
        for count in range(3):
            assert loader.state_dict()["batches"] == count
            next(iterator)
        del iterator


def test_states_of_the_same_epoch_take_nothing_from_each_other() -> None:
    loader = FastLoader(Numbers(), 4, shuffle=True, seed=2)
    states, batches = [], []
    for batch in loader:
        batches.append(plain(batch))
        states.append(transported(loader.state_dict()))
    for count, state in enumerate(states, 1):
        again = FastLoader(Numbers(), 4, shuffle=True, seed=2)
        again.load_state_dict(state)
        assert again.state_dict() == state, "before it goes on"
        assert stream(again) == batches[count:]
        assert again.state_dict()["epoch"] == 1


def test_set_epoch_starts_that_epoch_instead() -> None:
    def loader() -> FastLoader[Any]:
        return FastLoader(Numbers(), 4, shuffle=True, seed=2)

    first = loader()
    iterator = iter(first)
    head = plain(next(iterator))
    state = first.state_dict()
    same, other = loader(), loader()
    same.load_state_dict(state)
    same.set_epoch(0)  # as a script does at the begin of each epoch
    assert [head, *stream(same)] == stream(loader())
    other.load_state_dict(state)
    other.set_epoch(1)
    expected = loader()
    expected.set_epoch(1)
    assert stream(other) == stream(expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_may_follow_iter(workers: int) -> None:
    """Trainers ask for an iterator, and then set the epoch of the sampler."""
    for persistent in (False, True)[: 1 + (workers > 0)]:
        loader = FastLoader(
            Numbers(), 4, shuffle=True, seed=2, num_workers=workers, workers="processes", persistent_workers=persistent
        )  # fmt: skip
        epochs = [stream(loader) for _ in range(4)]
        for epoch in (3, 1, 1, 2):
            iterator = iter(loader)
            loader.sampler.set_epoch(epoch)  # type: ignore[union-attr]
            assert [plain(batch) for batch in iterator] == epochs[epoch]
        del iterator
        assert stream(loader) == epochs[3], "epochs go on from there"


def test_set_epoch_after_an_error_of_the_first_batch(tree: Path, tmp_path: Path) -> None:
    dataset = FastImageFolder(tree, RANDOM)
    good = dataset.samples[3][0]
    loader = FastLoader(dataset, 4, seed=1)
    loader.set_epoch(2)
    expected = stream(loader, hashed)
    dataset.samples = [
        (str(tmp_path / "none.jpg") if path == good else path, label) for path, label in dataset.samples
    ]
    iterator = iter(FastLoader(dataset, 4, seed=1))
    failing = iter(loader)
    for each in (iterator, failing):
        with pytest.raises(OSError, match=r"none\.jpg"):
            next(each)
    dataset.samples = [
        (good if path.endswith("none.jpg") else path, label) for path, label in dataset.samples
    ]
    loader.set_epoch(2)
    assert [hashed(batch) for batch in failing] == expected


class _Stateless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))

    def __len__(self) -> int:
        return 5


class _Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: FastLoader(Numbers(), sampler=_Stateless()), "a _Stateless, which has no state_dict"),
        (lambda: FastLoader(Numbers(), batch_sampler=BatchSampler(_Stateless(), 2, False)), "a _Stateless"),
        (lambda: FastLoader(_Endless()), "IterableDataset"),
        (lambda: FastLoader(Numbers(), in_order=False, num_workers=2, workers="processes"), "in_order=False"),
    ],
)
def test_loaders_that_cannot_save_say_so(loader: Any, message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(OptionError, match=message):
            loader().state_dict()


def test_states_that_do_not_fit_are_refused() -> None:
    state = FastLoader(Numbers(), 4, shuffle=True, seed=2).state_dict()
    for loader, message in (
        (FastLoader(Numbers(), 4, shuffle=True, seed=3), "saved with seed=2, the loader has seed=3"),
        (FastLoader(Numbers(24), 4, shuffle=True, seed=2), "of 23 samples, the loader's has 24"),
        (FastLoader(Numbers(), 4, sampler=[1, 2], seed=2), "the same sampler"),
    ):
        with pytest.raises(OptionError, match=message):
            loader.load_state_dict(state)
    loader = FastLoader(Numbers(), 4, shuffle=True, seed=2)
    for wrong, message in (
        ({**state, "version": 9}, "version 9"),
        ({"a": 1}, "takes what state_dict"),
        (None, "None"),
    ):
        with pytest.raises(OptionError, match=message):
            loader.load_state_dict(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("cut", range(1, 4))
def test_a_state_counts_samples_that_were_left_out(tmp_path: Path, cut: int) -> None:
    root = photo_tree(tmp_path / "tree", classes=3, per_class=5, sizes=(32, 40))
    dataset = FastImageFolder(root, RANDOM, bad_samples=BadSamples("skip"))
    for index in (0, 4, 5, 6, 11):
        Path(dataset.samples[index][0]).write_bytes(b"no picture")
    for options in ({"seed": 3, "shuffle": True}, {"sampler": list(range(14, -1, -1)), "seed": 3}):
        loader = FastLoader(dataset, 3, **options)
        iterator = iter(loader)
        for _ in range(cut):
            next(iterator)
        again = FastLoader(dataset, 3, **options)
        again.load_state_dict(transported(loader.state_dict()))
        assert stream(again, hashed) == [hashed(batch) for batch in iterator]


@pytest.mark.parametrize("seed", [3, 2**70 + 1])
def test_one_stream_for_any_threads_workers_and_ranks(tree: Path, seed: int) -> None:
    """FastImageFolder, a plain ImageFolder, code of the script's own: samples by position."""
    serial = v1.Compose([RANDOM, lambda image: image + float(np.random.random()) + random.random()])
    for transform in (RANDOM, serial):
        streams = set()
        for threads, workers, world, kind in (
            (1, 0, 1, FastImageFolder), (3, 0, 1, FastImageFolder), (2, 1, 1, FastImageFolder), (1, 2, 1, ImageFolder),
            (2, 0, 2, FastImageFolder), (1, 2, 3, FastImageFolder), (1, 0, 3, ImageFolder),
        ):  # fmt: skip
            dataset = (
                kind(tree, transform, threads=threads) if kind is FastImageFolder else kind(tree, transform)
            )
            found: dict[int, Any] = {}
            for rank in range(world):
                loader = FastLoader(
                    dataset,
                    2,
                    shuffle=True,
                    seed=seed,
                    num_workers=workers,
                    workers="processes",
                    shard=Shard(rank, world),
                )
                rows = [
                    (image.numpy().tobytes(), int(label))
                    for batch in loader
                    for image, label in zip(*batch, strict=True)
                ]
                found.update({rank + world * at: row for at, row in enumerate(rows)})
            streams.add(tuple(found[position] for position in range(15)))
        assert len(streams) == 1


def test_a_dataset_of_the_scripts_own_is_keyed_by_sample() -> None:
    streams = set()
    for workers, world, wrapped in (
        (0, 1, 0),
        (2, 1, 0),
        (0, 2, 0),
        (1, 3, 0),
        (0, 1, 1),
        (0, 3, 1),
        (2, 2, 2),
    ):
        found = {}
        dataset: Any = Numbers(12)
        for _ in range(wrapped):
            dataset = Subset(dataset, range(12))
        for rank in range(world):
            loader = FastLoader(
                dataset,
                2,
                shuffle=True,
                seed=9,
                num_workers=workers,
                workers="processes",
                shard=Shard(rank, world),
            )
            rows = [tuple(row) for batch in loader for row in zip(*plain(batch), strict=True)]
            found.update({rank + world * at: row for at, row in enumerate(rows)})
        streams.add(tuple(found[position] for position in range(12)))
    assert len(streams) == 1


@given(
    length=st.integers(1, 40), size=st.integers(1, 4), worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    cut=st.integers(0, 6), shuffle=st.booleans(),
)  # fmt: skip
def test_n_ranks_resume_as_m(
    length: int, size: int, worlds: tuple[int, int], cut: int, shuffle: bool
) -> None:
    def ranks(world: int) -> list[FastLoader[Any]]:
        return [
            FastLoader(Numbers(length), size, shuffle=shuffle, seed=5, shard=Shard(rank, world))
            for rank in range(world)
        ]  # fmt: skip

    order = [
        row
        for batch in FastLoader(Numbers(length), 1, shuffle=shuffle, seed=5)
        for row in zip(*plain(batch), strict=True)
    ]
    taken: list[Any] = []
    states = []
    for rank in ranks(worlds[0]):
        iterator = iter(rank)
        for number, batch in enumerate(iterator):
            if number < cut:
                taken += zip(*plain(batch), strict=True)
            if number + 1 == cut:
                states.append(transported(rank.state_dict()))
    if not states:
        return
    assert all(state == states[0] for state in states), "the same for all ranks"
    for rank in ranks(worlds[1]):
        rank.load_state_dict(states[0])
        taken += [row for batch in rank for row in zip(*plain(batch), strict=True)]
    assert {row for row in taken if row in order} == set(order), "each sample with the draws of its position"
    assert len(taken) < length + sum(worlds), "none twice but to fill up a step"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": Shard(0, 2), "sampler": [1, 2]}, "shard= and a sampler"),
        ({"shard": Shard(0, 2), "batch_sampler": [[1]]}, "shard= and a sampler"),
        ({"shard": Shard(0, 2), "shuffle": True}, "needs a seed"),
        ({"shard": (0, 2)}, "must be a fastpipe.Shard"),
        ({"shard": Shard(0, 2, "eval"), "batch_size": None}, "give a batch_size"),
    ],
)
def test_shards_that_cannot_work_are_named(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        FastLoader(Numbers(), **options)


def test_fewer_samples_than_ranks_are_an_error_of_an_evaluation(tree: Path) -> None:
    with pytest.raises(OptionError, match="2 samples are left for 3 ranks"):
        len(FastLoader(Numbers(2), shard=Shard(0, 3, "eval")))
    assert [len(list(FastLoader(Numbers(2), shard=Shard(rank, 3)))) for rank in range(3)] == [1, 1, 1]


def test_skip_is_refused_with_ranks(tree: Path) -> None:
    dataset = FastImageFolder(tree, RANDOM, bad_samples="skip")
    for each in (dataset, Subset(dataset, [1, 2]), ConcatDataset([FastImageFolder(tree), dataset])):
        with pytest.raises(OptionError, match="bad_samples='replace'"):
            FastLoader(each, shard=Shard(0, 2))


def test_the_shown_sampler_is_a_distributed_one() -> None:
    loader = FastLoader(Numbers(10), 2, shuffle=True, seed=1, shard=Shard(1, 3))
    sampler: Any = loader.sampler
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.rank, sampler.num_replicas, len(sampler), sampler.num_valid_samples) == (1, 3, 4, 3)
    sampler.set_epoch(2)
    indices = list(sampler)
    assert [index for batch in stream(loader) for index in batch[0]] == indices
    again = FastLoader(Numbers(10), 2, sampler=sampler, seed=1, shard=Shard(1, 3))  # as trainers make it anew
    again.set_epoch(2)
    assert [index for batch in stream(again) for index in batch[0]] == indices


def test_a_distributed_samplers_epoch_is_the_keys_too() -> None:
    """Resumed by ``sampler.set_epoch`` alone, augmentation goes on as well."""

    def loader() -> Any:
        return FastLoader(Numbers(12), 2, sampler=DistributedSampler(Numbers(12), 2, 0), seed=1)

    whole = loader()
    epochs = []
    for epoch in range(3):
        whole.sampler.set_epoch(epoch)
        epochs.append(stream(whole))
    late = loader()
    late.sampler.set_epoch(2)
    assert stream(late) == epochs[2]
    counting = loader()  # whoever never sets it still gets other augmentation each time
    first, second = stream(counting), stream(counting)
    assert [row[0] for row in first] == [row[0] for row in second]
    assert first != second
    assert isinstance(whole, DataLoader)
