"""``fastpipe.profile``: what it reports of loaders whose bottleneck is known, and which advice it gives."""

from __future__ import annotations

import linecache
import select
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchvision import transforms
from torchvision.datasets import ImageFolder

import fastpipe
from fastpipe import FastImageFolder, FastLoader
from fastpipe.bench.synthetic import photo_tree as make_tree
from fastpipe.errors import OptionError
from fastpipe.tools import Report, diagnosis
from fastpipe.tools.candidates import candidates
from fastpipe.tools.costs import Alone, LoaderCosts
from fastpipe.tools.loaders import Watched
from fastpipe.tools.loops import Loop
from fastpipe.tools.stacks import Line
from fastpipe.tools.thread_times import Spent


def work(amount: int) -> float:
    """Keeps one core busy for about ``amount`` × 0.1 ms."""
    return float(sum(np.sin(np.arange(20_000.0)).sum() for _ in range(amount)))


def wait(seconds: float) -> None:
    """As for a reply of the network: nothing runs meanwhile."""
    select.select([], [], [], seconds)


class Made(Dataset[Any]):
    def __init__(self, make: Callable[[int], object], length: int = 4000) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.make(index)
        return torch.tensor([float(index)]), 0


def slow(amount: int, length: int = 4000) -> Made:
    return Made(lambda _: work(amount), length)


def profiled(loader: Any, step: Callable[[Any], object] = lambda batch: None, **options: Any) -> Report:
    return fastpipe.profile(loader, step, **{"seconds": 0.5, **options})


@pytest.mark.parametrize("file", ["<ipython-input-3-0a1b2c>", "/cells/23.py"])
def test_loaders_that_a_cell_makes_for_each_epoch_are_one(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thread of its own for each, a notebook's epochs would be slower and slower."""
    cell = "def run(make, epochs):\n    for _ in range(epochs):\n        for batch in make(): pass\n"
    if file.startswith("/"):  # as IPython notes it
        monkeypatch.setitem(linecache.cache, file, (len(cell), None, cell.splitlines(True), file))
    scope: dict[str, Any] = {}
    exec(compile(cell, file, "exec"), scope)
    before = threading.active_count()
    with fastpipe.profile() as profiling:
        scope["run"](lambda: DataLoader(slow(1, 40), batch_size=4), 12)
        assert threading.active_count() <= before + 2
    report = profiling.report
    assert report.steps > 80 and report.loader is not None and report.loader.used_at.endswith(":3 run")


def test_a_slow_loader_is_reported_with_its_stages_and_its_line() -> None:
    report = profiled(DataLoader(slow(8), batch_size=4), lambda batch: work(1))
    assert report.is_loader_bound
    assert report.verdict.startswith("stall ") and report.stall[0].name == "transform"
    assert report.instant_s is not None and report.instant_s < report.step_s / 2
    assert sum(part.seconds for part in report.stall) == pytest.approx(report.lost_s)
    assert report.base_s == pytest.approx(report.step_s - report.lost_s)
    assert report.costs.lines[0][0].function.startswith("work")
    assert report.loader is not None and report.loader.kind == "DataLoader over Made"
    assert [case.name for case in report.cases] == [
        "with data ready", "without decoding", "with files in memory", "as it is"
    ]  # fmt: skip


def test_a_slow_step_is_not_the_loaders_fault_and_without_one_the_loader_alone_is_measured() -> None:
    report = profiled([torch.ones(3)] * 4000, lambda batch: work(200))
    assert not report.is_loader_bound and not report.advice and report.steps >= 5
    assert "your loader is not the problem" in report.verdict
    report = fastpipe.profile(DataLoader(slow(1), batch_size=4), seconds=0.2)
    assert report.instant_s is None and report.alone is not None and report.alone.batch_s > 0


def test_more_workers_are_advised_and_tried_where_the_loader_waits_for_storage() -> None:
    seen: list[Any] = []
    loader = DataLoader(Made(lambda _: wait(0.005)), batch_size=4, num_workers=1)
    report = profiled(loader, seen.append, try_advice=True)
    assert report.stall[0].name == "read"
    working = sum(spent.cpu for stage, spent in report.costs.stages.items() if stage != "transfer") / 1e9
    assert report.costs.read_idle_s > 4 * working > 0
    in_memory = report.costs.without_waiting().wall_s
    assert in_memory == pytest.approx(report.costs.wall_s - report.costs.read_idle_s)
    cases = {case.name: case.seconds for case in report.cases}
    assert cases["with files in memory"] < cases["as it is"]
    first = report.advice[0]
    assert first.what.startswith("num_workers=") and "for storage" in first.why
    assert first.predicted_s is not None and first.predicted_s < report.step_s
    assert first.tried_s is not None
    assert "tried:" in str(report) and {len(batch[0]) for batch in seen} == {4}


@pytest.mark.slow
def test_more_batches_ahead_are_advised_where_some_take_longer() -> None:
    uneven = Made(lambda index: wait(0.08 if index % 12 == 11 else 0.0005))
    loader = DataLoader(uneven, batch_size=1, num_workers=2)
    report = profiled(loader, lambda batch: wait(0.01), seconds=1.5, try_advice=True)
    first = next(one for one in report.advice if one.what.startswith("prefetch_factor"))
    assert first.what.startswith("prefetch_factor=8 instead of 2 (test_diagnosis.py:")
    assert "some batches take longer than the prefetched ones last" in first.why
    assert first.tried_s is not None and first.tried_s < report.step_s


@pytest.mark.slow
def test_fewer_workers_are_advised_where_there_are_more_than_cores() -> None:
    cores = diagnosis.available_cpus()
    report = profiled(DataLoader(slow(30), batch_size=2, num_workers=6 * cores), seconds=2)
    assert report.costs.delay_share > 0.3
    assert not report.advice or f"num_workers={cores} instead of {6 * cores}" in report.advice[0].what


@pytest.fixture
def unshared_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process that makes batches has a core of its own, whatever else runs on this machine: the time of a
    batch is its CPU time, divided by the number of these processes."""
    measure = diagnosis.alone

    def measured(begin: Callable[[], Any], skipped: int, seconds: float) -> Alone | None:
        processes = 1

        def begin_and_count() -> Any:
            nonlocal processes
            batches = begin()
            processes = max(1, len(getattr(batches, "_workers", ())))
            return batches

        found = measure(begin_and_count, skipped, seconds)
        return found and replace(found, batch_s=(found.cpu_s or 0.0) / processes)

    monkeypatch.setattr(diagnosis, "alone", measured)


@pytest.mark.slow
@pytest.mark.usefixtures("unshared_cores")
def test_processes_are_advised_for_a_transform_that_holds_the_interpreter(photo_tree: Path) -> None:
    if diagnosis.available_cpus() < 2:
        pytest.skip("with one core nothing helps; run it where there are two")

    def python(image: Any) -> Any:
        sum(number % 7 for number in range(300_000))
        return image

    crop = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor(), python])
    dataset = ImageFolder(str(photo_tree), crop)
    dataset.samples = dataset.imgs = dataset.samples * 20
    report = profiled(DataLoader(dataset, batch_size=4), seconds=2)
    assert report.stall[0].name == "transform" and report.advice[0].what.startswith("num_workers=")


@pytest.mark.slow
@pytest.mark.parametrize("each", [0, 40], ids=["as long for many samples", "longer for more samples"])
def test_a_larger_batch_is_advised_where_a_step_takes_as_long(each: int) -> None:
    report = profiled(
        DataLoader(range(4000), batch_size=1 if not each else 4),  # type: ignore[arg-type]
        lambda batch: work(each * len(batch) or 100), seconds=2, try_advice=True,
    )  # fmt: skip
    assert not report.is_loader_bound and bool(report.advice) == (not each)
    for first in report.advice[:1]:
        assert first.what.startswith("batch_size=4 instead of 1")
        assert "learning rate × 4 for SGD" in first.what
        assert first.predicted_s is not None


@pytest.mark.slow
def test_a_step_that_takes_no_larger_batch_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def step(batch: Any) -> None:
        wait(0.03)
        assert len(batch) == 2, "made for two"

    report = profiled(DataLoader(range(4000), batch_size=2), step, try_advice=True)  # type: ignore[arg-type]
    assert not report.advice and "your loader is not the problem" in report.verdict
    assert "not tried: a larger batch: AssertionError: made for two" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("without_least_gain")
def test_fastpipe_is_tried_and_measured_in_the_place_of_a_loader_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of large images a small part, which fastpipe makes many times as fast."""
    make_tree(tmp_path, classes=2, per_class=4, sizes=(1400, 1410))
    transform = transforms.Compose([transforms.RandomResizedCrop(64, (0.01, 0.02)), transforms.ToTensor()])
    large: Any = DataLoader(ImageFolder(str(tmp_path), transform), batch_size=4, shuffle=True)
    report = profiled(large, try_advice=True)
    ours = [one for one in report.advice if "let fastpipe make the batches of ImageFolder" in one.what]
    assert ours and all(one.predicted_s is not None for one in ours)
    assert any(one.tried_s is not None for one in ours)
    measured: list[type] = []

    def known(begin: Any, skipped: int, seconds: float) -> Alone:  # tests beside this one take the cores
        next(begin())
        measured.append(type(begin.__self__))
        return Alone(*((0.001, 0.002) if measured[-1] is FastLoader else (0.5, 1.0)), batches=9)

    monkeypatch.setattr(diagnosis, "alone", known)
    report = profiled(large)
    assert report.stall[0].name == "decode" and set(measured) == {DataLoader, FastLoader}
    first = report.advice[0]
    assert "fastpipe" in first.what and "decode" in first.why
    assert first.predicted_s is not None and first.predicted_s < report.step_s

    monkeypatch.setattr(FastLoader, "__iter__", Mock(side_effect=RuntimeError("no such thing")))
    report = profiled(large)
    assert report.is_loader_bound and not [one for one in report.advice if "fastpipe" in one.what]
    assert "not measured: let fastpipe make the batches" in caplog.text and "no such thing" in caplog.text


def test_the_loader_behind_a_watched_one_is_profiled_and_no_worker_is_left() -> None:
    loader = DataLoader(slow(2, 400), batch_size=4, num_workers=1, persistent_workers=True)
    watched = fastpipe.watch(loader)
    report = profiled(watched)
    assert report.loader is not None and report.loader.kind == "DataLoader over Made"
    assert "transform" in report.costs.stages and report.costs.makers == 1
    assert watched.epochs == [] and loader._iterator is None


def test_a_fast_loader_has_the_stages_of_its_clock(photo_tree: Path) -> None:
    transform = transforms.Compose([transforms.RandomResizedCrop(96), transforms.ToTensor()])
    loader = FastLoader(FastImageFolder(photo_tree, transform, cache="off"), batch_size=4, shuffle=True)
    report = profiled(loader)
    assert {"read", "decode", "transform"} <= set(report.costs.stages)
    assert report.loader is not None and report.loader.kind == "FastLoader over FastImageFolder"


def candidates_of(loader: Any, cores: int, uneven: str = "") -> list[Any]:
    line, costs = Line("train.py", 3, "main"), LoaderCosts({"transform": Spent(9, 9, 0)}, batches=1)
    return candidates(Watched(loader, line, line, Loop(1.0, True)), costs, cores=cores, uneven=uneven)


def test_uneven_batches_are_advised_to_be_made_ahead_or_by_fastpipe(photo_tree: Path) -> None:
    loader = DataLoader(ImageFolder(photo_tree, transforms.ToTensor()), num_workers=2)
    fast, ahead = candidates_of(loader, 2, "some batches take longer")
    assert fast.what.startswith("let fastpipe make the batches of ImageFolder")
    assert (ahead.what, ahead.why) == (
        "prefetch_factor=8 instead of 2 (train.py:3 main)",
        "some batches take longer",
    )


@pytest.mark.parametrize(("workers", "others"), [(0, [2]), (1, [2, 0]), (2, [0])])
def test_other_workers_of_a_fast_loader_make_its_batches(photo_tree: Path, workers: int, others: Any) -> None:
    resize = transforms.Compose([transforms.Resize((8, 8)), transforms.ToTensor()])
    dataset = FastImageFolder(photo_tree, resize)
    loader = FastLoader(dataset, 4, shuffle=True, seed=1, num_workers=workers, workers="processes")
    found = candidates_of(loader, 2)
    ways = {2: "num_workers=2 and workers='processes'", 0: "workers='threads'"}
    assert [one.what for one in found] == [f"{ways[other]} (train.py:3 main)" for other in others]
    expected = list(loader)
    for one in found:
        pairs = zip(one.begin(), expected, strict=True)
        assert all(torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True))


class Numbers(IterableDataset[Any]):  # gives the same in each worker
    def __iter__(self) -> Any:
        return iter(range(8))


class Shared(IterableDataset[Any]):  # of which each worker gives its share
    def __iter__(self) -> Any:
        worker = get_worker_info()
        return iter(range(8) if worker is None else range(worker.id, 8, worker.num_workers))


@pytest.mark.parametrize(
    ("kind", "workers", "others"),
    [(Numbers, 0, [1]), (Numbers, 1, []), (Shared, 0, [1, 4]), (Shared, 1, [4]), (Shared, 4, [])],
)
def test_a_stream_gets_only_workers_that_it_can_have(kind: Any, workers: int, others: list[int]) -> None:
    found = candidates_of(DataLoader(kind(), batch_size=2, num_workers=workers), 4)
    names = [f"num_workers={one} instead of {workers} (train.py:3 main)" for one in others]
    assert [one.what for one in found] == names
    for one in found:
        assert sorted(number for batch in one.begin() for number in batch.tolist()) == list(range(8))
    fast = candidates_of(FastLoader(kind(), batch_size=2), 4)
    assert not [one for one in fast if "num_workers" in one.what]


def test_a_loop_within_a_profile_gets_its_own_batches() -> None:
    got: list[float] = []
    with fastpipe.profile() as profiling:
        for indices, _ in DataLoader(slow(20, 40), batch_size=4, num_workers=1):
            got += indices.flatten().tolist()
            work(1)
    assert got == list(range(40))
    report = profiling.report
    assert report.steps + 2 == 9 and report.instant_s is None and not report.advice
    assert report.wait_s > 0 and report.busy_s > 0 and "transform" in report.costs.stages
    with fastpipe.profile() as profiling:
        assert list(profiling.watch([1, 2, 3, 4, 5, 6])) == [1, 2, 3, 4, 5, 6]
    assert profiling.report.loader is not None and profiling.report.loader.kind == "list"


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_loader_with_an_iterator_of_its_own_is_profiled_once(is_lazy: bool) -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (batch for batch in super().__iter__()) if is_lazy else super().__iter__()

    seen: list[int] = []
    report = profiled(Own(range(400), batch_size=4), seen.append, seconds=0.2)  # type: ignore[arg-type]
    assert report.steps > 5 and report.instant_s is not None and report.steps + 2 <= len(seen)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((iter([1]), len), {}, "iterated once only"),
        (([], len), {}, "the list has no batch"),
        ((DataLoader([], batch_size=2), len), {}, "the DataLoader has no batch"),
        (([1], len), {"seconds": 0}, "seconds must be above 0, got 0"),
        ((None, len), {}, "needs a loader"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        fastpipe.profile(*arguments, **options)
