"""``fastpipe.profile``: what it says of loaders whose bottleneck is known."""

from __future__ import annotations

import html.parser
import json
import linecache
import select
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from fastpipe.tools.report import LoaderNote
from fastpipe.tools.stacks import Line
from fastpipe.tools.thread_times import Spent

SECONDS = 0.6


def work(amount: int) -> float:
    """Keeps one core busy for about ``amount`` × 0.1 ms."""
    return float(sum(np.sin(np.arange(20_000.0)).sum() for _ in range(amount)))


class Slow(Dataset[Any]):
    """Samples that cost work."""

    def __init__(self, amount: int, length: int = 4000) -> None:
        self.amount, self.length = amount, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]), work(self.amount)


class Remote(Slow):
    """Samples that come from far away: their file answers late."""

    def __getitem__(self, index: int) -> Any:
        select.select([], [], [], 0.005)  # what a reply of the network is waited for by
        return torch.tensor([float(index)]), 0


_CELL = """
def run(make, epochs):
    for _ in range(epochs):
        for batch in make():
            pass
"""


@pytest.mark.parametrize("file", ["<stdin>", "<ipython-input-3-0a1b2c>", "/cells/23.py"])
def test_loaders_that_a_cell_makes_for_each_epoch_are_one(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own thread that looks, a notebook's epochs would be slower and slower."""
    if file.startswith("/"):  # as IPython notes it
        monkeypatch.setitem(linecache.cache, file, (len(_CELL), None, _CELL.splitlines(True), file))
    scope: dict[str, Any] = {}
    exec(compile(_CELL, file, "exec"), scope)
    before = threading.active_count()
    with fastpipe.profile() as profiling:
        scope["run"](lambda: DataLoader(Slow(5, 40), batch_size=4), 12)
        assert threading.active_count() <= before + 2
    report = profiling.report
    assert report.steps > 80 and report.loader is not None
    assert report.loader.used_at.endswith(":4 run")


def test_a_loader_that_is_slow_is_told_with_its_stages_and_its_line() -> None:
    report = fastpipe.profile(DataLoader(Slow(8), batch_size=4), lambda batch: work(1), seconds=SECONDS)
    assert report.stall_share > 0.5 and report.is_loader_bound
    assert report.verdict.startswith("stall ") and report.stall[0].name == "transform"
    assert report.instant_s is not None and report.instant_s < report.step_s / 2
    assert sum(part.seconds for part in report.stall) == pytest.approx(report.lost_s)
    assert report.base_s == pytest.approx(report.step_s - report.lost_s)
    functions = [line.function for line, _, _ in report.costs.lines]
    assert functions[0].startswith("work")
    assert report.loader is not None and report.loader.kind == "DataLoader over Slow"
    names = [case.name for case in report.cases]
    assert names == ["with data at once", "without decoding", "with files in memory", "as it is"]


def test_a_step_that_is_slow_is_told_not_to_be_the_loaders_fault() -> None:
    loader = DataLoader(range(4000), batch_size=4)
    report = fastpipe.profile(loader, lambda batch: work(200), seconds=SECONDS)
    assert not report.is_loader_bound and not report.advice
    assert "your loader is not the problem" in report.verdict


def test_waiting_for_storage_is_told_from_work_and_more_workers_are_the_remedy() -> None:
    loader = DataLoader(Remote(0), batch_size=4, num_workers=1)
    report = fastpipe.profile(loader, lambda batch: None, seconds=SECONDS)
    assert report.stall[0].name == "read"
    working = sum(spent.cpu for stage, spent in report.costs.stages.items() if stage != "transfer") / 1e9
    assert report.costs.read_idle_s > 4 * working > 0
    in_memory = report.costs.without_waiting().wall_s
    assert in_memory == pytest.approx(report.costs.wall_s - report.costs.read_idle_s)
    cases = {case.name: case.seconds for case in report.cases}
    assert cases["with files in memory"] < cases["as it is"]
    assert report.advice[0].what.startswith("num_workers=")
    predicted = report.advice[0].predicted_s
    assert predicted is not None and predicted < report.step_s


def test_advice_is_tried_on_the_users_own_step() -> None:
    seen: list[int] = []
    loader = DataLoader(Remote(0), batch_size=4, num_workers=1)
    report = fastpipe.profile(
        loader, lambda batch: seen.append(len(batch[0])), seconds=SECONDS, try_advice=True
    )
    tried = report.advice[0].tried_s
    assert tried is not None and tried < report.step_s
    assert "tried:" in str(report) and set(seen) == {4}


@pytest.fixture
def folder(photo_tree: Path) -> ImageFolder:
    transform = transforms.Compose([transforms.RandomResizedCrop(96), transforms.ToTensor()])
    return ImageFolder(str(photo_tree), transform)


class Uneven(Slow):
    """One of twelve samples comes late."""

    def __getitem__(self, index: int) -> Any:
        select.select([], [], [], 0.08 if index % 12 == 11 else 0.0005)
        return torch.tensor([float(index)]), 0


@pytest.mark.slow
def test_for_batches_that_take_unequally_long_more_are_made_ahead() -> None:
    loader = DataLoader(Uneven(0), batch_size=1, num_workers=2)
    report = fastpipe.profile(
        loader, lambda batch: select.select([], [], [], 0.01 * len(batch[0])), seconds=1.5, try_advice=True
    )
    first = report.advice[0]
    assert first.what.startswith("prefetch_factor=8 instead of 2 (test_profile.py:")
    assert "some batches take longer than those ahead last" in first.why
    assert first.tried_s is not None and first.tried_s < report.step_s


@pytest.fixture
def large(tmp_path: Path) -> DataLoader[Any]:
    """Of large images a small part, which fastpipe makes many times as fast."""
    make_tree(tmp_path, classes=2, per_class=8, sizes=(1400, 1410))
    transform = transforms.Compose([transforms.RandomResizedCrop(64, (0.01, 0.02)), transforms.ToTensor()])
    return DataLoader(ImageFolder(str(tmp_path), transform), batch_size=4, shuffle=True)


def test_a_folder_of_images_is_measured_with_fastpipe_in_the_loaders_place(
    large: DataLoader[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[type] = []

    def known(begin: Any, skipped: int, seconds: float) -> Alone:  # tests beside this one take the cores
        next(begin())
        measured.append(type(begin.__self__))
        return Alone(*((0.001, 0.002) if measured[-1] is FastLoader else (0.5, 1.0)), batches=9)

    monkeypatch.setattr(diagnosis, "alone", known)
    report = fastpipe.profile(large, lambda batch: None, seconds=SECONDS)
    assert report.stall[0].name == "decode" and set(measured) == {DataLoader, FastLoader}
    first = report.advice[0]
    assert "fastpipe" in first.what and "decode" in first.why
    assert first.predicted_s is not None and first.predicted_s < report.step_s


@pytest.mark.usefixtures("whatever_it_gains")
def test_fastpipe_in_the_loaders_place_is_tried(large: DataLoader[Any]) -> None:
    report = fastpipe.profile(large, lambda batch: None, seconds=SECONDS, try_advice=True)
    ours = [one for one in report.advice if "let fastpipe make the batches" in one.what]
    assert ours and all(one.predicted_s is not None for one in ours)
    assert any(one.tried_s is not None for one in ours)


def test_of_a_loader_that_is_watched_the_loader_is_profiled() -> None:
    watched = fastpipe.watch(DataLoader(Slow(8), batch_size=4))
    report = fastpipe.profile(watched, lambda batch: None, seconds=SECONDS)
    assert report.loader is not None and report.loader.kind == "DataLoader over Slow"
    assert "transform" in report.costs.stages and watched.epochs == []


@pytest.mark.parametrize(("delay_s", "lost_s"), [(None, 0.030), (0.005, 0.030), (0.035, 0.045), (9.0, 0.050)])
def test_a_step_that_others_slow_down_has_lost_what_they_take_or_what_its_threads_wait_for_cores(
    delay_s: float | None, lost_s: float
) -> None:
    report = Report(
        LoaderNote("x", workers=2, ahead=4), 100, 0.070, 0.010, 0.060, instant_s=0.010, step_delay_s=delay_s,
        alone=Alone(0.020, 0.040, 100), cores=2,
    )  # fmt: skip
    assert report.lost_s == pytest.approx(lost_s)
    assert report.base_s == pytest.approx(0.070 - lost_s)
    assert replace(report, instant_s=0.055).lost_s == pytest.approx(0.015)  # that it is slower, at most


def test_what_other_processes_take_of_a_steps_cores_is_not_the_loaders() -> None:
    report = Report(
        LoaderNote("x", ahead=2), 100, 0.070, 0.0, 0.070, instant_s=0.050, step_delay_s=0.030,
        alone=Alone(0.0001, 0.0001, 100), cores=2,
    )  # fmt: skip
    assert report.lost_s == pytest.approx(0.0001) and not report.is_loader_bound


def test_a_candidate_that_fails_is_left_out_and_told(
    folder: ImageFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(self: Any) -> Any:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(FastLoader, "__iter__", failing)
    report = fastpipe.profile(DataLoader(folder, batch_size=4), lambda batch: None, seconds=SECONDS)
    assert report.is_loader_bound and not [one for one in report.advice if "fastpipe" in one.what]
    assert "not measured: let fastpipe make the batches" in caplog.text and "no such thing" in caplog.text


def test_workers_that_persist_are_looked_at_and_none_are_left() -> None:
    loader = DataLoader(Slow(2, 400), batch_size=4, num_workers=1, persistent_workers=True)
    report = fastpipe.profile(loader, lambda batch: None, seconds=SECONDS)
    assert "transform" in report.costs.stages and report.costs.makers == 1
    assert loader._iterator is None


def test_a_fast_loaders_stages_are_those_of_its_clock(photo_tree: Path) -> None:
    transform = transforms.Compose([transforms.RandomResizedCrop(96), transforms.ToTensor()])
    loader = FastLoader(FastImageFolder(photo_tree, transform, cache="off"), batch_size=4, shuffle=True)
    report = fastpipe.profile(loader, lambda batch: None, seconds=SECONDS)
    assert {"read", "decode", "transform"} <= set(report.costs.stages)
    assert report.loader is not None and report.loader.kind == "FastLoader over FastImageFolder"


@pytest.mark.parametrize(("workers", "wanted"), [(0, [2]), (1, [2, 0]), (2, [0])])
def test_processes_and_threads_in_the_place_of_a_fast_loaders_are_measured(
    photo_tree: Path, workers: int, wanted: list[int]
) -> None:
    dataset = FastImageFolder(
        photo_tree, transforms.Compose([transforms.Resize((8, 8)), transforms.ToTensor()])
    )
    loader = FastLoader(dataset, 4, shuffle=True, seed=1, num_workers=workers, workers="processes")
    line = Line("train.py", 3, "main")
    found = candidates(Watched(loader, line, line, Loop(1.0, True)), LoaderCosts(), cores=2)
    ways = {2: "num_workers=2 and workers='processes'", 0: "workers='threads'"}
    told = [f"{ways[other]} (train.py:3 main)" for other in wanted]
    assert [one.what for one in found] == told
    expected = list(loader)
    for one in found:
        pairs = list(zip(one.begin(), expected, strict=True))
        assert len(pairs) == 6 and all(
            torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True)
        )


class Numbers(IterableDataset[Any]):
    """A stream that gives the same in each worker."""

    def __iter__(self) -> Any:
        return iter(range(8))


class Shared(IterableDataset[Any]):
    """A stream of which each worker gives its share."""

    def __iter__(self) -> Any:
        worker = get_worker_info()
        return iter(range(8) if worker is None else range(worker.id, 8, worker.num_workers))


@pytest.mark.parametrize(
    ("dataset", "workers", "wanted"),
    [(Numbers(), 0, [1]), (Numbers(), 1, []), (Shared(), 0, [1, 4]), (Shared(), 1, [4]), (Shared(), 4, [])],
    ids=lambda one: type(one).__name__ if isinstance(one, IterableDataset) else str(one),
)
def test_a_stream_gets_workers_that_it_can_have(dataset: Any, workers: int, wanted: list[int]) -> None:
    line, costs = Line("train.py", 3, "main"), LoaderCosts({"transform": Spent(9, 9, 0)}, batches=1)
    watched = Watched(DataLoader(dataset, batch_size=2, num_workers=workers), line, line, Loop(1.0, True))
    found = candidates(watched, costs, cores=4)
    told = [f"num_workers={one} instead of {workers} (train.py:3 main)" for one in wanted]
    assert [one.what for one in found] == told
    for one in found:
        assert sorted(number for batch in one.begin() for number in batch.tolist()) == list(range(8))
    fast = Watched(FastLoader(dataset, batch_size=2), line, line, Loop(1.0, True))
    assert not [one for one in candidates(fast, costs, cores=4) if "num_workers" in one.what]


def test_a_script_with_its_own_loop_is_watched_and_gets_its_own_batches() -> None:
    loader = DataLoader(Slow(20, 40), batch_size=4, num_workers=1)
    wanted = [index for batch in DataLoader(range(40), batch_size=4) for index in batch.tolist()]
    got: list[float] = []
    with fastpipe.profile() as profiling:
        for indices, _ in loader:
            got += indices.flatten().tolist()
            work(1)
    assert got == wanted
    report = profiling.report
    assert report.steps + 2 == 9 and report.instant_s is None and not report.advice
    assert report.wait_s > 0 and report.busy_s > 0 and "transform" in report.costs.stages


def test_any_iterable_is_watched_where_it_is_wrapped() -> None:
    with fastpipe.profile() as profiling:
        assert list(profiling.watch([1, 2, 3, 4, 5, 6])) == [1, 2, 3, 4, 5, 6]
    assert profiling.report.loader is not None and profiling.report.loader.kind == "list"


def test_an_iterable_that_is_no_loader_is_profiled() -> None:
    report = fastpipe.profile([torch.ones(3)] * 50, lambda batch: work(20), seconds=0.2)
    assert not report.is_loader_bound and report.steps >= 5


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_loader_that_iterates_in_its_own_way_is_profiled_once(is_lazy: bool) -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (batch for batch in super().__iter__()) if is_lazy else super().__iter__()

    seen: list[int] = []
    report = fastpipe.profile(Own(range(400), batch_size=4), lambda batch: seen.append(1), seconds=0.2)
    assert report.steps > 5 and report.instant_s is not None
    assert report.steps + 2 <= len(seen)


def test_without_a_step_the_loader_alone_is_looked_at() -> None:
    report = fastpipe.profile(DataLoader(Slow(1), batch_size=4), seconds=0.3)
    assert report.instant_s is None and report.alone is not None and report.alone.batch_s > 0


def test_a_report_is_text_json_a_page_and_a_trace() -> None:
    report = fastpipe.profile(
        DataLoader(Slow(2), batch_size=4, num_workers=1), lambda batch: None, seconds=SECONDS
    )
    assert repr(report) == str(report) and report.verdict in str(report)
    assert max(map(len, str(report).splitlines())) < 200
    content = json.loads(report.json())
    assert content["format"] == 1 and content["verdict"] == report.verdict
    assert content["step_s"] == report.step_s and content["costs"]["stages"]["transform"]["wall_s"] > 0
    trace = json.loads(report.trace())["traceEvents"]
    names = {event["name"] for event in trace}
    assert {"wait for the batch", "step", "fetch", "collate", "thread_name"} <= names
    assert all(event["dur"] >= 0 for event in trace if event["ph"] == "X")
    checker = Balanced()
    checker.feed(report.html())
    assert not checker.open and checker.count > 20
    assert "http://" not in report.html() and "<script" not in report.html()


class Balanced(html.parser.HTMLParser):
    """Counts elements, and which are not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count = 0

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.count += 1
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        self.count += 1


def test_a_report_of_nothing_says_so() -> None:
    with fastpipe.profile() as profiling:
        pass
    assert str(profiling.report) == "no loader was iterated" and isinstance(profiling.report, Report)
    assert "no loader was iterated" in profiling.report.html()


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
def test_what_cannot_be_profiled_is_refused(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        fastpipe.profile(*arguments, **options)


def test_an_error_of_the_step_is_its_own() -> None:
    def step(batch: Any) -> None:
        raise RuntimeError("the loss is nan")

    with pytest.raises(RuntimeError, match="the loss is nan"):
        fastpipe.profile(DataLoader(range(8)), step)
    assert DataLoader.__iter__.__module__ == "torch.utils.data.dataloader"
