"""``fastpipe.autotune``: the best of settings whose costs are known, and loaders that are real."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import data
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.datasets.folder import default_loader
from torchvision.transforms import CenterCrop, Compose, ToTensor

import fastpipe
from fastpipe import Cache, Decode, FastImageFolder, FastLoader, Shard, Shuffle
from fastpipe.core.processes import memory_of_processes
from fastpipe.errors import OptionError
from fastpipe.tools import costs, trials, tuning
from fastpipe.tools.trials import Base, Measured, OverBudgetError, Settings, Trial, folders_behind
from fastpipe.tools.tuning import Search

CROP = Compose([CenterCrop(32), ToTensor()])
Costs = Callable[[Settings], float]
Any_loader: Any = DataLoader


class Folder:  # stands for a dataset of fastpipe's
    def __init__(self, threads: Any = "auto") -> None:
        self.threads = threads

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 100


def searched(
    patch: pytest.MonkeyPatch, costs: Costs, *, loader: Any = None, folders: list[Any] | None = None,
    budget: int | None = None, seconds: float = 1e6, step: Any = None, wait: float = 1.0,
    memory: Callable[[Settings], int] = lambda settings: 1,
) -> tuple[Search, Trial]:  # fmt: skip
    """A search in which no loader is measured, but every cost is known."""
    base = Base(loader if loader is not None else Any_loader(range(100), batch_size=4))
    base.folders, base.is_threaded = folders or [], bool(folders)
    patch.setattr(base, "made", lambda settings, for_trial: settings)

    def measure(settings: Settings, *rest: Any) -> Measured:
        if budget is not None and memory(settings) > budget:
            raise OverBudgetError(f"took {memory(settings)} B, and may take {budget}")
        return Measured(costs(settings), wait * costs(settings), memory(settings))

    patch.setattr(tuning, "measure", measure)
    patch.setattr(tuning, "warm_up", lambda settings: None)
    search = Search(base, step, 4, budget, seconds)
    return search, search.run()


def of_workers(*by: float) -> Costs:
    return lambda settings: dict(enumerate(by)).get(settings.workers, 9.0)


@pytest.mark.parametrize(
    ("costs", "options", "workers"),
    [
        pytest.param(of_workers(4, 5, 2.5, 1, 1.5), {}, 3, id="none of the first, but beside the best"),
        pytest.param(lambda one: 8.0 / min(max(one.workers, 0.5), 16), {}, 16, id="as many as help"),
        pytest.param(lambda one: 1.0 if one.workers else 1.02, {"num_workers": 4}, 4, id="not for noise"),
        pytest.param(of_workers(1.0, 1.1, 8.0, 9.0, 9.0), {}, 0, id="none"),
    ],
)  # fmt: skip
def test_the_fastest_number_of_workers_is_found(
    monkeypatch: pytest.MonkeyPatch, costs: Costs, options: dict[str, Any], workers: int
) -> None:
    search, best = searched(monkeypatch, costs, loader=Any_loader(range(100), batch_size=4, **options))
    assert best.settings.workers == workers
    if not workers:  # hopeless settings are measured once
        times = {trial.settings.workers: len(trial.measured) for trial in search.trials}
        assert times[2] == times[4] == 1 < times[1]


@pytest.mark.parametrize(("own", "best"), [("auto", 32), (3, 3)])
def test_threads_of_a_dataset_are_tuned_unless_the_script_sets_them(
    monkeypatch: pytest.MonkeyPatch, own: Any, best: int
) -> None:
    folder, by_threads = Folder(own), {32: 1.0, 16: 1.5, 8: 1.75}
    search, found = searched(monkeypatch, lambda one: by_threads.get(one.threads, 2.0), folders=[folder])
    assert found.settings.threads == best and folder.threads == own
    assert own == "auto" or {trial.settings.threads for trial in search.trials} == {3}


def test_a_stream_keeps_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Numbers(data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(100))

    search, best = searched(monkeypatch, lambda settings: 1.0, loader=DataLoader(Numbers()))
    assert best.settings.workers == 0 and len(search.trials) == 1
    assert search.notes == ["num_workers=0 is kept: the samples of a Numbers may depend on it"]


def test_settings_beyond_the_budget_are_neither_chosen_nor_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    search, best = searched(
        monkeypatch, lambda one: 10.0 / (1 + one.workers), budget=250, memory=lambda one: 100 * one.workers
    )
    assert best.settings.workers == 2
    refused = {trial.settings.workers: trial.why for trial in search.trials if trial.why}
    assert "may take" in refused[4] and "would take" in refused[4]
    assert all(not trial.measured for trial in search.trials if trial.settings.workers > 2)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"step": print, "wait": 0.01}, "with a stall of 1.0%, steps hardly wait for data"),
        ({"seconds": 1e-9}, "the time limit was reached"),
    ],
)  # fmt: skip
def test_the_search_ends_when_a_step_has_its_data_or_time_is_over(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], why: str
) -> None:
    search, best = searched(monkeypatch, lambda settings: 1.0, **options)
    assert best.settings.workers == 0 and best.measured
    assert search.notes == [f"ended before worker processes: {why}"]


def test_settings_that_fail_are_left_out_but_the_scripts_must_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(settings: Settings) -> float:
        if settings.workers >= fails_from:
            raise ValueError("cannot be pickled")
        return 1.0

    fails_from = 1
    search, best = searched(monkeypatch, costs)
    assert best.settings.workers == 0
    reasons = {trial.why for trial in search.trials if trial.settings.workers}
    assert reasons == {"ValueError: cannot be pickled"}
    fails_from = 0
    with pytest.raises(ValueError, match="cannot be pickled"):
        searched(monkeypatch, costs)


@st.composite
def valleys(draw: st.DrawFn, count: int) -> list[float]:
    """Costs that fall to the smallest one, and rise from there, by more than noise each time."""
    steps = draw(st.lists(st.floats(1.15, 2), min_size=count, max_size=count))
    lowest = draw(st.integers(0, count - 1))
    return [math.prod(steps[min(at, lowest) : max(at, lowest)]) for at in range(count)]


@settings(max_examples=40)
@given(of_workers=valleys(5), of_ahead=valleys(5), of_threads=valleys(5))
def test_the_best_of_all_is_found_where_settings_do_not_depend_on_each_other(
    of_workers: list[float], of_ahead: list[float], of_threads: list[float]
) -> None:
    workers = dict(zip((0, 1, 2, 4, 8), of_workers, strict=True))
    aheads, threads = (dict(zip((1, 2, 4, 8, 16), some, strict=True)) for some in (of_ahead, of_threads))

    def costs(settings: Settings) -> float:
        ahead = 2 if settings.ahead == "auto" else settings.ahead
        each = max(1, 4 // max(1, settings.workers)) if settings.threads == "auto" else settings.threads
        return workers.get(settings.workers, 99.0) * aheads[ahead] * threads.get(each, 99.0)

    with pytest.MonkeyPatch.context() as patch:
        _, best = searched(patch, lambda one: costs(replace(one, threads=4)), folders=[Folder()])
        assert best.batch_s == min(of_workers) * min(of_ahead) * threads[4]
    with pytest.MonkeyPatch.context() as patch:
        _, best = searched(patch, lambda one: costs(replace(one, workers=0)), folders=[Folder()])
        assert best.batch_s == pytest.approx(workers[0] * min(of_ahead) * min(of_threads))


class OwnOrder(Sampler[int]):  # draws from a generator of its own
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        order = list(range(40))
        self.generator.shuffle(order)
        return iter(order)


class Wrapped(OwnOrder):  # a sampler of another one's, as those are that give each process a part
    def __iter__(self) -> Iterator[int]:
        return iter(self.generator)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "generator": lambda: {"batch_size": 4, "shuffle": True, "generator": seeded()},
    "batch sampler": lambda: {
        "batch_sampler": data.BatchSampler(data.RandomSampler(range(40), generator=seeded()), 4, False)},
    "Python": lambda: {"batch_size": 4, "sampler": OwnOrder(random.Random(5))},
    "NumPy": lambda: {"batch_size": 4, "sampler": OwnOrder(np.random.default_rng(5))},
    "NumPy's older": lambda: {"batch_size": 4, "sampler": OwnOrder(np.random.RandomState(5))},
    "behind batches": lambda: {"batch_sampler": data.BatchSampler(OwnOrder(random.Random(5)), 4, False)},
    "behind samplers": lambda: {"batch_size": 4, "sampler": Wrapped(Wrapped(OwnOrder(random.Random(5))))},
}  # fmt: skip
LOADERS: dict[str, Callable[[], Any]] = {
    "global": lambda: Any_loader(range(40), 4, shuffle=True),
    "a rank's": lambda: FastLoader(list(range(24)), 4, shuffle=True, seed=1, shard=Shard(1, 2)),
    **{name: lambda order=order: Any_loader(range(40), **order()) for name, order in ORDERS.items()},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_batches_are_the_same_and_no_generator_has_drawn(make: Any, same_generators: None) -> None:
    def run(tune: bool) -> Any:
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        loader = make()
        loader = fastpipe.autotune(loader, seconds=1).loader if tune else loader
        batches = [batch.tolist() for batch in loader]
        return batches, torch.rand(()).item(), random.random(), np.random.rand()

    assert run(True) == run(False)


def test_workers_that_never_answer_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithThreads(Folder, Dataset[int]):  # whose threads are not there in a forked worker
        pool = ThreadPoolExecutor(2)

        def __getitem__(self, index: int) -> int:
            return sum(self.pool.map(int, [index, 1]))

    monkeypatch.setattr(costs, "_PATIENCE_S", 1.0)
    with WithThreads.pool:
        found = fastpipe.autotune(DataLoader(WithThreads(), batch_size=8), seconds=2)
        assert found.loader.num_workers == 0 and "timed out" in str(found)


def test_a_fast_loader_keeps_its_other_options(photo_tree: Path) -> None:
    dataset = FastImageFolder(photo_tree, CROP, cache="off")
    loader: Any = FastLoader(dataset, 4, shuffle=Shuffle(), seed=7, drop_last=True)
    expected = [labels.tolist() for _, labels in loader]
    found = fastpipe.autotune(loader, seconds=2)
    assert isinstance(found.loader, FastLoader) and found.loader.dataset is dataset
    assert [labels.tolist() for _, labels in found.loader] == expected
    assert found.config.startswith("FastLoader(…, num_workers=")
    decoders = {trial.settings.backend for trial in found.trials}
    assert decoders >= {"auto", "simplejpeg", "pillow"} or "time limit was reached" in found.notes[-1]


def test_settings_of_a_dataset_are_set_for_a_trial_only(photo_tree: Path) -> None:
    dataset = FastImageFolder(photo_tree, CROP, cache="off")
    base = Base(DataLoader(dataset, 4))
    dataset.decode = Decode(gpu_share=0.5)
    changed = Settings(0, threads=3, backend="pillow")
    with base.dataset_with(changed):
        assert (dataset.threads, dataset.decode.backend) == (3, "pillow")
        list(base.made(changed))
    assert (dataset.threads, dataset.decode) == ("auto", Decode(gpu_share=0.5))
    assert changed.of_dataset(base.settings) == {"threads": 3, "decode": Decode(backend="pillow")}


def test_a_cache_that_holds_everything_is_taken_where_the_budget_allows(
    photo_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = FastImageFolder(photo_tree, CROP)
    expected, loader = [dataset[at][0] for at in range(len(dataset))], DataLoader(dataset, 4)
    nbytes = trials.decoded_bytes(dataset)
    sizes = [default_loader(path).size for path, _ in dataset.samples]
    assert nbytes == pytest.approx(3.15 * sum(width * height for width, height in sizes), rel=0.01)

    def best(budget: int | None) -> tuple[Any, str]:
        search = Search(Base(loader), None, 1, budget, 1e6)
        monkeypatch.setattr(search, "_each_s", 0.05)
        before = search._trial(Base(loader).settings)
        search._measure(before)
        return search._cache(before), " ".join(search.notes)

    found, notes = best(None)
    assert found.settings.cache == Cache() and "cache='auto' keeps all" in notes
    monkeypatch.setattr(trials, "free_memory", lambda: nbytes)  # more than a quarter of it
    found, notes = best(nbytes // 2)
    assert found.settings.cache == Cache() and "no cache holds all" in notes
    measured: list[Any] = []

    def fast(*arguments: Any) -> Measured:
        measured.append(trials.measure_kept(*arguments))
        return Measured(1e-9, 0.0, 0)  # whatever it was

    monkeypatch.setattr(tuning, "measure_kept", fast)
    found, notes = best(4 * nbytes)
    assert measured[0].batch_s > 0 and dataset.cache == Cache()
    assert found.settings.cache == Cache("ram", max_bytes=nbytes) and found.memory >= nbytes
    assert "from the second epoch on" in notes
    base = Base(loader)
    base.set(found.settings)
    made = [image for images, _ in base.made(found.settings) for image in images]
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))


def test_decoded_sizes_and_datasets_behind_wrappers_are_known(tmp_path: Path, photo_tree: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["rows"], file["labels"] = np.zeros((10, 3, 4), np.float32), np.zeros(10, np.int16)
    rows = fastpipe.FastHDF5Dataset(tmp_path / "x.h5", ["rows", "labels"])
    assert trials.decoded_bytes(rows) == 10 * (48 + 2) and trials.decoded_bytes(range(3)) is None
    one, other = (FastImageFolder(photo_tree) for _ in range(2))
    both: Any = data.ConcatDataset(
        [data.Subset(one, [0]), data.Subset(data.Subset(other, [0, 1]), [0]), range(3)]
    )
    assert folders_behind(both) == [one, other]


def test_a_dataset_gets_a_loader_that_shuffles_and_the_result_is_text_and_json() -> None:
    class Broken(Folder, Dataset[int]):
        def __getitem__(self, index: int) -> int:
            raise KeyError("no such sample")

    found = fastpipe.autotune(list(range(50)), batch_size=10, seconds=0.5)
    assert sorted(torch.cat(list(found.loader)).tolist()) == list(range(50))
    assert found.config.startswith("FastLoader(dataset, batch_size=10, shuffle=True, num_workers=")
    with pytest.raises(KeyError, match="no such sample"):
        fastpipe.autotune(DataLoader(Broken()), seconds=0.5)
    found = fastpipe.autotune(Any_loader(range(640), batch_size=64), seconds=2)
    text, content = str(found), found.as_json()
    assert (found.config in text) == (found.best is not found.before) and repr(found) == text
    assert "no workers" in text and "1 worker" in text
    assert content["config"] == found.config and sum(one["is_best"] for one in content["trials"]) == 1
    assert content["trials"][0]["measured"][0]["batch_s"] > 0


def test_a_step_that_has_its_data_keeps_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "measure", lambda *_: Measured(0.1, 0.001, 0))
    found = fastpipe.autotune(Any_loader(range(100), batch_size=2), step=len, seconds=1)
    assert len(found.trials) == 1 and found.best is found.before and found.gain == 1.0
    assert found.notes[0].startswith("ended before worker processes: with a stall of")


class Large(Folder, Dataset[int]):  # whose workers take memory of their own
    kept: Any = None

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> int:
        if self.kept is None and data.get_worker_info() is not None:
            self.kept = bytearray(b"1" * (100 << 20))
        return index


@pytest.mark.slow
def test_workers_beyond_the_memory_budget_are_not_chosen() -> None:
    if memory_of_processes() is None:
        pytest.skip("without /proc memory is unknown; run it on Linux")
    budget = 60 << 20
    found = fastpipe.autotune(DataLoader(Large(), batch_size=100), memory_budget=budget, seconds=4)
    why = {trial.settings.workers: trial.why for trial in found.trials}
    assert found.best.settings.workers == 0 and "may take" in why[1]
    assert found.best.memory is not None and found.best.memory <= budget
    loader = DataLoader(Large(), batch_size=100, num_workers=1)
    with pytest.raises(OptionError, match=r"may take 10; give it a larger memory_budget"):
        fastpipe.autotune(loader, memory_budget=10 << 20, seconds=2)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("train",), {"batch_size": 3}, "autotune takes a loader, got the path 'train'"),
        ((range(3),), {}, r"a dataset \(range\) needs its batch_size="),
        ((Any_loader(range(3)),), {"batch_size": 3}, r"is for a dataset; a DataLoader has its own"),
        ((iter([1]),), {}, r"takes a DataLoader, a FastLoader or a dataset .*, got a list_iterator"),
        ((Any_loader(range(3)),), {"seconds": 0}, "seconds must be above 0, got 0"),
        ((Any_loader(range(3)),), {"memory_budget": -1}, "memory_budget must be a number of bytes"),
        ((Any_loader([]),), {}, "has no batch"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        fastpipe.autotune(*arguments, **options)
