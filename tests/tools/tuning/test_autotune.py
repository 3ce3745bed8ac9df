"""``fastpipe.autotune`` on loaders that are real."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
)
from torchvision.datasets.folder import default_loader
from torchvision.transforms import CenterCrop, Compose, ToTensor

import fastpipe
from fastpipe import FastImageFolder, FastLoader, Shard, Shuffle
from fastpipe.core.processes import memory_of_processes
from fastpipe.errors import OptionError
from fastpipe.tools import costs as taking
from fastpipe.tools import trials as caching
from fastpipe.tools import tuning as searching
from fastpipe.tools.trials import Base, Measured, Settings, folders_behind
from fastpipe.tools.tuning import Search


class Large(Dataset[int]):
    """Whose workers take memory of their own."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.kept = nbytes, None

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> int:
        if self.kept is None and torch.utils.data.get_worker_info() is not None:
            self.kept = bytearray(b"1" * self.nbytes)
        return index


def drawn() -> tuple[Any, ...]:
    return torch.rand(()).item(), random.random(), np.random.rand()


def test_batches_are_the_same_and_nothing_is_drawn() -> None:
    def begun() -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)

    begun()
    expected = [batch.tolist() for batch in DataLoader(range(100), batch_size=8, shuffle=True)], drawn()
    begun()
    loader = DataLoader(range(100), batch_size=8, shuffle=True)
    tuning = fastpipe.autotune(loader, seconds=1)
    assert ([batch.tolist() for batch in tuning.loader], drawn()) == expected


class OwnOrder(Sampler[int]):
    """Draws from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        order = list(range(40))
        self.generator.shuffle(order)
        return iter(order)


class Wrapped(Sampler[int]):
    """A sampler of another one's, as those are that give each process a part."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "order",
    [
        lambda: {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(5)},
        lambda: {
            "batch_sampler": BatchSampler(
                RandomSampler(range(40), generator=torch.Generator().manual_seed(5)), 4, False
            )
        },
        lambda: {"batch_size": 4, "sampler": OwnOrder(random.Random(5))},
        lambda: {"batch_size": 4, "sampler": OwnOrder(np.random.default_rng(5))},
        lambda: {"batch_size": 4, "sampler": OwnOrder(np.random.RandomState(5))},
        lambda: {"batch_sampler": BatchSampler(OwnOrder(random.Random(5)), 4, False)},
        lambda: {"batch_size": 4, "sampler": Wrapped(Wrapped(OwnOrder(random.Random(5))))},
    ],
    ids=[
        "generator",
        "of a batch sampler",
        "Python",
        "NumPy",
        "NumPy's older",
        "behind a batch sampler",
        "behind samplers",
    ],
)
def test_a_generator_of_the_loaders_goes_on(order: Callable[[], Any]) -> None:
    def loader() -> DataLoader[int]:
        return DataLoader(range(40), **order())  # type: ignore[arg-type]

    expected = [batch.tolist() for batch in loader()]
    tuning = fastpipe.autotune(loader(), seconds=1)
    assert [batch.tolist() for batch in tuning.loader] == expected


class WithThreads(Dataset[int]):
    """Whose threads are not there in a forked worker."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(2)

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> int:
        return sum(self.pool.map(int, [index, 1]))


def test_workers_that_never_answer_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking, "_PATIENCE_S", 1.0)
    dataset = WithThreads()
    with dataset.pool:
        tuning = fastpipe.autotune(DataLoader(dataset, batch_size=8), seconds=2)
        assert tuning.loader.num_workers == 0
        assert "timed out" in str(tuning)


def test_a_fast_loader_keeps_all_else(photo_tree: Path) -> None:
    dataset = FastImageFolder(photo_tree, Compose([CenterCrop(32), ToTensor()]), cache="off")
    loader: Any = FastLoader(dataset, 4, shuffle=Shuffle(), seed=7, drop_last=True)
    expected = [labels.tolist() for _, labels in loader]
    tuning = fastpipe.autotune(loader, seconds=2)
    assert isinstance(tuning.loader, FastLoader) and tuning.loader.dataset is dataset
    assert [labels.tolist() for _, labels in tuning.loader] == expected
    assert tuning.config.startswith("FastLoader(…, num_workers=")
    decoders = {trial.settings.backend for trial in tuning.trials}
    assert decoders >= {"auto", "simplejpeg", "pillow"} or "time was over" in tuning.notes[-1]


def test_a_ranks_part_stays_its_part() -> None:
    loader: Any = FastLoader(list(range(24)), 4, shuffle=True, seed=1, shard=Shard(1, 2))
    expected = [batch.tolist() for batch in loader]
    tuning = fastpipe.autotune(loader, seconds=1)
    assert [batch.tolist() for batch in tuning.loader] == expected


def test_settings_of_a_dataset_that_are_best_are_set_on_it(photo_tree: Path) -> None:
    dataset = FastImageFolder(photo_tree, Compose([CenterCrop(32), ToTensor()]), cache="off")
    base = Base(DataLoader(dataset, 4))
    dataset.decode = fastpipe.Decode(gpu_share=0.5)
    changed = Settings(0, threads=3, backend="pillow")
    with base.dataset_with(changed):
        assert (dataset.threads, dataset.decode.backend) == (3, "pillow")
        list(base.made(changed))
    assert (dataset.threads, dataset.decode) == ("auto", fastpipe.Decode(gpu_share=0.5))
    assert changed.of_dataset(base.settings) == {"threads": 3, "decode": fastpipe.Decode(backend="pillow")}


def test_a_cache_that_holds_all_is_taken_where_the_budget_allows(
    photo_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = FastImageFolder(photo_tree, Compose([CenterCrop(32), ToTensor()]))
    expected = [dataset[at][0] for at in range(len(dataset))]
    nbytes = caching.decoded_bytes(dataset)
    sizes = [default_loader(path).size for path, _ in dataset.samples]
    assert nbytes == pytest.approx(3.15 * sum(width * height for width, height in sizes), rel=0.01)
    loader = DataLoader(dataset, 4)

    def best(budget: int | None) -> tuple[Any, str]:
        search = Search(Base(loader), None, 1, budget, 1e6)
        monkeypatch.setattr(search, "_each_s", 0.05)
        before = search._trial(Base(loader).settings)
        search._measure(before)
        found = search._cache(before)
        return found, " ".join(search.notes)

    found, notes = best(None)
    assert found.settings.cache == fastpipe.Cache() and "cache='auto' keeps all" in notes
    monkeypatch.setattr(caching, "free_memory", lambda: nbytes)  # more than a quarter of it
    found, notes = best(nbytes // 2)
    assert found.settings.cache == fastpipe.Cache() and "no cache holds all" in notes
    measured: list[Any] = []

    def fast(*arguments: Any) -> Measured:
        measured.append(caching.measure_kept(*arguments))
        return Measured(1e-9, 0.0, 0)  # whatever it was

    monkeypatch.setattr(searching, "measure_kept", fast)
    found, notes = best(4 * nbytes)
    assert measured[0].batch_s > 0
    assert found.settings.cache == fastpipe.Cache("ram", max_bytes=nbytes)
    assert "from the second epoch on" in notes and found.memory >= nbytes
    assert dataset.cache == fastpipe.Cache()
    base = Base(loader)
    base.set(found.settings)
    made = [image for images, _ in base.made(found.settings) for image in images]
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))


def test_what_an_hdf5_file_decodes_to_is_known(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["rows"], file["labels"] = np.zeros((10, 3, 4), np.float32), np.zeros(10, np.int16)
    dataset = fastpipe.FastHDF5Dataset(tmp_path / "x.h5", ["rows", "labels"])
    assert caching.decoded_bytes(dataset) == 10 * (48 + 2)
    assert caching.decoded_bytes(range(3)) is None


def test_datasets_behind_torchs_own_wrappers_are_found(photo_tree: Path) -> None:
    one, other = (FastImageFolder(photo_tree) for _ in range(2))
    both: Any = ConcatDataset([Subset(one, [0]), Subset(Subset(other, [0, 1]), [0]), range(3)])
    assert folders_behind(both) == [one, other]


def test_a_dataset_gets_a_loader_that_shuffles() -> None:
    tuning = fastpipe.autotune(list(range(50)), batch_size=10, seconds=0.5)
    assert sorted(torch.cat(list(tuning.loader)).tolist()) == list(range(50))
    assert tuning.config.startswith("FastLoader(dataset, batch_size=10, shuffle=True, num_workers=")


def test_a_step_that_has_its_data_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(loader: Any, step: Any, *_: Any) -> Measured:
        step(next(iter(loader)))
        return Measured(0.1, 0.0015, 0)

    monkeypatch.setattr(searching, "measure", busy)
    tuning = fastpipe.autotune(DataLoader(range(640), batch_size=64), step=len, seconds=20)
    assert len(tuning.trials) == 1 and tuning.best is tuning.before and tuning.gain == 1.0
    assert tuning.notes[0].startswith("ended before worker processes: with a stall of")


def test_what_is_done_with_the_first_sample_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Dataset[int]):
        calls = 0

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            Counting.calls += 1
            return index

    calls: list[int] = []

    def measured(*_: Any) -> Measured:
        calls.append(Counting.calls)
        return Measured(0.1, 0.001, 0)

    monkeypatch.setattr(searching, "measure", measured)
    fastpipe.autotune(DataLoader(Counting(), batch_size=2), step=len, seconds=1)
    assert calls == [2]  # the samples of one batch


def test_workers_beyond_the_budget_are_not_chosen() -> None:
    budget = 60 << 20
    loader = DataLoader(Large(100 << 20), batch_size=100)
    tuning = fastpipe.autotune(loader, memory_budget=budget, seconds=8)
    assert tuning.best.settings.workers == 0
    why = {trial.settings.workers: trial.why for trial in tuning.trials}
    assert "may take" in why[1] and tuning.best.memory is not None and tuning.best.memory <= budget


def test_a_budget_below_what_it_takes_as_it_is_is_an_error() -> None:
    if memory_of_processes() is None:
        pytest.skip("without /proc memory is unknown; run it on Linux")
    loader = DataLoader(Large(100 << 20), batch_size=100, num_workers=1)
    with pytest.raises(OptionError, match=r"may take 10; give it a larger memory_budget"):
        fastpipe.autotune(loader, memory_budget=10 << 20, seconds=2)


def test_what_is_iterated_stays_as_it_is() -> None:
    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(100))

    tuning = fastpipe.autotune(DataLoader(Numbers(), batch_size=10), seconds=20)
    assert tuning.best.settings.workers == 0 and len(list(tuning.loader)) == 10
    assert "may depend on it" in str(tuning)


def test_what_a_loader_raises_is_seen() -> None:
    class Broken(Dataset[int]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            raise KeyError("no such sample")

    with pytest.raises(KeyError, match="no such sample"):
        fastpipe.autotune(DataLoader(Broken()), seconds=0.5)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((range(3),), {}, r"a dataset \(range\) needs its batch_size="),
        ((DataLoader(range(3)),), {"batch_size": 3}, r"is for a dataset; a DataLoader has its own"),
        ((iter([1]),), {}, r"takes a DataLoader, a FastLoader or a dataset .*, got a list_iterator"),
        ((DataLoader(range(3)),), {"seconds": 0}, "seconds must be above 0, got 0"),
        ((DataLoader(range(3)),), {"memory_budget": -1}, "memory_budget must be a number of bytes"),
        ((DataLoader([]),), {}, "has no batch"),
    ],
)  # fmt: skip
def test_bad_input_is_told(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        fastpipe.autotune(*arguments, **options)


def test_what_is_printed_and_its_json() -> None:
    tuning = fastpipe.autotune(DataLoader(range(640), batch_size=64), seconds=4)
    text = str(tuning)
    assert tuning.config in text and "num_workers=1" in text and repr(tuning) == text
    content = tuning.as_json()
    assert content["config"] == tuning.config
    assert sum(one["is_best"] for one in content["trials"]) == 1
    assert content["trials"][0]["measured"][0]["batch_s"] > 0
