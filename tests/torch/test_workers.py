"""Where samples are made: threads or worker processes, chosen by a rule or by ``num_workers="auto"``."""

from __future__ import annotations

import gc
import logging
import mmap
import multiprocessing.synchronize
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from dataset_kinds import OwnImages
from streams import BY_PROCESSES, Stream, stream
from torch.utils.data import DataLoader, TensorDataset, default_collate, get_worker_info
from torchvision.datasets import ImageFolder
from torchvision.transforms import ColorJitter, Compose, RandAugment, RandomResizedCrop, Resize, ToTensor

import fastpipe.torch.loader as loader_module
from fastpipe import Decode, FastImageFolder, FastLoader, accelerate
from fastpipe.errors import OptionError
from fastpipe.torch import describe as advice
from fastpipe.torch import workers as auto_workers
from fastpipe.torch.workers import choose_workers

PLAIN = Compose([Resize((8, 8)), ToTensor()])
MUCH = Compose([RandomResizedCrop(8), RandAugment(), ToTensor()])


class _Watched:
    """Notes in which process it was used."""

    def __init__(self, cost: int = 0) -> None:
        self.used_in = memoryview(mmap.mmap(-1, 8)).cast("q")  # shared with forked processes
        self.cost = cost

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        self.used_in[0] = os.getpid()
        return torch.zeros(1).fill_(sum(range(self.cost)))


class _Failing(_Watched):
    def __init__(self, fail: Callable[[], Any]) -> None:
        self.fail = fail

    def __getitem__(self, index: int) -> Any:
        return self.fail()


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_workers, "default_threads", lambda: 4)


@pytest.fixture
def patient(four_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time for a process that gets no core for a while."""
    monkeypatch.setattr(auto_workers, "_ALL_S", 30.0)


@pytest.mark.usefixtures("patient")
def test_samples_are_measured_in_another_process_which_is_gone() -> None:
    dataset = _Watched(100_000)
    before = torch.get_rng_state()
    assert choose_workers(dataset, None, 64)[0] == 4
    assert dataset.used_in[0] not in (0, os.getpid())
    assert not os.path.exists(f"/proc/{dataset.used_in[0]}")
    assert torch.equal(torch.get_rng_state(), before)
    assert choose_workers(TensorDataset(torch.zeros(100, 2)), None, 8)[0] == 0, "faster than it is sent"


@pytest.mark.usefixtures("four_cores")
def test_a_sample_that_takes_long_is_for_workers() -> None:
    stuck = _Failing(threading.Event().wait)
    assert choose_workers(stuck, None, 8) == (4, "no batch and no sample was ready within 0.9 s")


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("fail", [lambda: 1 / 0, lambda: os._exit(1)], ids=["error", "crash"])
def test_a_dataset_that_works_in_no_other_process_stays_here(fail: Any) -> None:
    why = "a sample cannot be made, or the dataset not be sent, in another process"
    assert choose_workers(_Failing(fail), None, 8) == (0, why)


def test_nothing_to_measure_needs_no_workers(four_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_workers([], None, 8) == (0, "the dataset has no samples to measure")
    assert choose_workers(iter(()), None, 8)[0] == 0
    monkeypatch.setattr(auto_workers, "default_threads", lambda: 1)
    assert choose_workers([1], None, 8) == (0, "this process may use one core only")


# What cannot be started, and what is changed for that: an object, an attribute of it, and its value.
PREVENTED: dict[str, tuple[Any, str, Any]] = {
    "this is a frozen program, which would be started once more": (sys, "frozen", True),
    "semaphores cannot be made here ([Errno 2] No such file or directory)": (
        multiprocessing.synchronize, "Lock", MagicMock(side_effect=FileNotFoundError(2, "No such file or directory"))
    ),
    "no process can be started ([Errno 11] Resource temporarily unavailable)": (
        os, "fork", MagicMock(side_effect=BlockingIOError(11, "Resource temporarily unavailable"))
    ),
    "limits of this system do not allow 4 more processes": (
        threading.Thread, "start", MagicMock(side_effect=RuntimeError("can't start new thread"))
    ),
}  # fmt: skip


@pytest.mark.usefixtures("patient")
def test_no_workers_are_chosen_where_none_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    costly = _Watched(50_000)
    assert choose_workers(costly, None, 64)[0] == 4
    for why, change in PREVENTED.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*change, raising=False)
            chosen, reason = choose_workers(costly, None, 64)
        assert (chosen, reason.partition("; ")[2] or reason) == (0, why)
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert choose_workers(costly, None, 64) == (0, "this is a daemonic process, which may have no children")


SCRIPT = """
import multiprocessing, torch
from fastpipe import FastLoader
from fastpipe.torch import workers as auto_workers
auto_workers.default_threads = lambda: 2
auto_workers._ALL_S = 30

class Costly:
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return torch.zeros(1).fill_(sum(range(50_000)))

def main():
    FastLoader([1], num_workers="auto")
    print(multiprocessing.get_start_method(allow_none=True))
    loader = FastLoader(Costly(), 64, num_workers="auto", multiprocessing_context="spawn")
    print(loader.num_workers, sum(len(batch) for batch in loader))
"""
GUARD = 'if __name__ == "__main__":\n    main()\n'


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("arguments", "text", "workers"),
    [
        pytest.param(["train.py"], SCRIPT + GUARD, 2, id="script"),
        # It would be run once more by each worker.
        pytest.param(["train.py"], SCRIPT + "main()\n", 0, id="script without a guard", marks=pytest.mark.slow),
        # No worker could find the class.
        pytest.param(["-c", SCRIPT + GUARD], "", 0, id="-c"),
        pytest.param(["-"], SCRIPT + "main()\n", 0, id="standard input", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_started_workers_are_chosen_only_where_they_can_have_the_dataset(
    tmp_path: Path, arguments: list[str], text: str, workers: int
) -> None:
    """And the script's start method stays open."""
    (tmp_path / "train.py").write_text(text)
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, cwd=tmp_path, input=text, capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines() == ["None", f"{workers} 16"], ran.stderr


@pytest.mark.usefixtures("patient")
def test_a_loader_reports_its_choice(photo_tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fastpipe")
    dataset = FastImageFolder(photo_tree, PLAIN)
    options: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "fork"}
    loader = FastLoader(dataset, 4, num_workers="auto", **options)
    assert f"num_workers='auto' is {loader.num_workers}: " in caplog.text
    assert "samples/s here" in repr(loader.plan)
    assert stream(loader) == stream(FastLoader(dataset, 4))


@pytest.mark.parametrize("workers", [0, 4])
def test_options_of_workers_are_dropped_with_them(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr("fastpipe.torch.loader.choose_workers", lambda *_: (workers, "so it is"))
    options = {"persistent_workers": True, "prefetch_factor": 3, "timeout": 9}
    loader = FastLoader([1, 2, 3], num_workers="auto", multiprocessing_context="fork", **options)  # type: ignore[arg-type]
    dropped = {"persistent_workers": False, "prefetch_factor": None, "timeout": 0}
    assert {name: getattr(loader, name) for name in options} == (options if workers else dropped)
    assert loader.num_workers == workers
    assert "(num_workers='auto': so it is)" in repr(loader.plan)


def test_garbage_of_the_parent_is_left_to_it(no_gc: None, four_cores: None) -> None:
    """Some objects may only be freed where their threads are, such as TensorFlow's functions."""
    freed_in = memoryview(mmap.mmap(-1, 8)).cast("q")

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            freed_in[0] = os.getpid()

    class Collecting(_Watched):
        def __getitem__(self, index: int) -> torch.Tensor:
            gc.collect()
            return super().__getitem__(index)

    Garbage()
    choose_workers(Collecting(), None, 8)
    assert len(list(BY_PROCESSES(Collecting(), 8, num_workers=1, multiprocessing_context="fork"))) == 13
    assert freed_in[0] == 0
    gc.collect()
    assert freed_in[0] == os.getpid()


def _own(tree: Path) -> OwnImages:
    return OwnImages(ImageFolder(tree).samples, PLAIN)


def _same(value: Any) -> Any:
    return value


def _own_collate(samples: list[Any]) -> Any:
    return default_collate(samples)


OWN = Compose([PLAIN, _same])


def _folder(transform: Any, **options: Any) -> Callable[[Path], Any]:
    return lambda tree: FastImageFolder(tree, transform, **options)


RULE: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "known transform": (_folder(PLAIN), {}, ""),
    "torchvision's augmentation": (_folder(MUCH), {}, ""),
    "ImageFolder": (lambda tree: ImageFolder(tree, Compose([ColorJitter(0.1), PLAIN])), {}, ""),
    "options of workers": (_folder(PLAIN), {"persistent_workers": True, "timeout": 60}, ""),
    "threads": (_folder(OWN), {"workers": "threads"}, ""),
    "processes": (_folder(PLAIN), {"workers": "processes"}, "workers='processes'"),
    "own transform": (_folder(OWN), {}, "a transform of"),
    "own target_transform": (_folder(PLAIN, target_transform=_same), {}, "a transform of"),
    "own collate_fn": (_folder(PLAIN), {"collate_fn": _own_collate}, "collate_fn"),
    "own worker_init_fn": (_folder(PLAIN), {"worker_init_fn": _same}, "worker_init_fn"),
    "own dataset": (_own, {}, "one sample after the other, in 2 worker processes"),
    "tensors": (lambda tree: TensorDataset(torch.arange(4)), {}, "one sample after the other, in 2"),
    "no batches": (_folder(PLAIN), {"batch_size": None}, "in 2 worker processes"),
}


@pytest.mark.parametrize("name", RULE)
def test_threads_do_the_work_of_workers_where_no_code_of_the_script_runs(tree: Path, name: str) -> None:
    make, options, why = RULE[name]
    options = {"batch_size": 4, "num_workers": 2, **options}
    loader = FastLoader(make(tree), **options)
    workers = {"workers": options.pop("workers")} if "workers" in options else {}
    accelerated = accelerate(DataLoader(make(tree), **options), **workers)
    for made in (loader, accelerated):
        plan = repr(made.plan)
        assert made.num_workers == 2, "as the script asked for"
        assert why in plan and ("threads in this process" in plan) is (why == "")
    iterator = iter(loader)
    next(iterator)
    assert bool(getattr(iterator, "_workers", ())) is (why != "")


def test_more_workers_than_the_lock_of_one_process_allows_stay_processes(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "default_threads", lambda: 16)
    plain, much = FastImageFolder(tree, PLAIN), FastImageFolder(tree, MUCH)
    by_pillow = FastImageFolder(tree, PLAIN, decode=Decode("pillow"))
    for dataset, workers, processes in (
        (plain, 16, 0), (by_pillow, 8, 0), (by_pillow, 12, 12), (much, 2, 0), (much, 3, 3)
    ):  # fmt: skip
        loader = FastLoader(dataset, 4, num_workers=workers)
        assert loader.num_processes == processes
        assert (f"{processes} worker processes" if processes else "threads in this") in repr(loader.plan)
    assert FastLoader(much, 4, num_workers=3, augment="split").num_processes == 0
    monkeypatch.setattr(loader_module, "default_threads", lambda: 2)
    assert FastLoader(by_pillow, 4, num_workers=12).num_processes == 0


def test_options_that_cannot_work_are_refused_at_once(tree: Path) -> None:
    folder = FastImageFolder(tree)
    for dataset, options, why in (
        (
            _own(tree),
            {"num_workers": 2},
            r"no batches of this OwnImages .*nor an ImageFolder.*leave workers= out",
        ),
        (folder, {"num_workers": 2, "worker_init_fn": _same}, "would never call worker_init_fn"),
        (folder, {"num_workers": 2, "batch_size": None}, "give the loader a batch_size"),
        (folder, {"num_workers": "auto"}, "chooses by measuring: leave workers='threads' out"),
        (folder, {"workers": "thread"}, "got 'thread'"),
    ):
        with pytest.raises(OptionError, match=why):
            FastLoader(dataset, **{"workers": "threads", **options})


class _Counting(FastImageFolder):
    """The target of each sample is the number of its worker's batches that have begun and are not finished."""

    begun = 0

    def _start_batch(self, *args: Any, **options: Any) -> Any:
        _Counting.begun += 1
        batch: Any = super()._start_batch(*args, **options)
        finish = batch.finish

        def counted() -> list[Any]:
            count, _Counting.begun = _Counting.begun, _Counting.begun - 1
            assert get_worker_info() is not None
            return [(image, count) for image, _ in finish()]

        batch.finish = counted
        return batch


def test_a_worker_with_threads_begins_the_next_batches(tree: Path) -> None:
    options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 4}
    for threads, is_ahead in ((2, True), (1, False)):  # with one thread it would be made at once
        loader = BY_PROCESSES(_Counting(tree, PLAIN, threads=threads), 3, **options)
        assert (max(int(counts.max()) for _, counts in loader) > 1) == is_ahead
    dataset = FastImageFolder(tree, Compose([RandomResizedCrop(8), ToTensor()]), seed=5, threads=2)
    ahead = BY_PROCESSES(dataset, 2, shuffle=True, **options)
    assert stream(ahead) == stream(FastLoader(dataset, 2, shuffle=True))


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[Any], list[str]]:
    """Runs two epochs of a loader, and returns the warnings."""

    def run(loader: Any) -> list[str]:
        caplog.clear()
        list(loader), list(loader)
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    return run


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any wait is long."""
    for name in ("_WAITED_S", "_WAITED_SHARE", "_EACH_S"):
        monkeypatch.setattr(advice, name, 0.0)
    monkeypatch.setattr(advice, "default_threads", lambda: 4)


@pytest.mark.usefixtures("impatient")
def test_a_warning_names_num_workers_where_batches_wait_for_own_code(tree: Path, warned: Any) -> None:
    known, own, stock = FastImageFolder(tree, PLAIN), FastImageFolder(tree, OWN), ImageFolder(tree, OWN)
    for make, what in (
        (lambda workers: FastLoader(_own(tree), 4, num_workers=workers), "OwnImages's code"),
        (lambda workers: FastLoader(own, 4, num_workers=workers), "a transform of"),
        (lambda workers: accelerate(DataLoader(stock, 4, num_workers=workers)), "a transform of"),
        (lambda workers: FastLoader(known, 4, num_workers=workers, collate_fn=_own_collate), "the script's collate_fn"),
    ):  # fmt: skip
        (text,) = warned(make(0))
        assert what in text and "num_workers=4" in text
        assert warned(make(2)) == []
    tensors = TensorDataset(torch.arange(8))
    (text,) = warned(FastLoader(tensors, 4, collate_fn=_own_collate))
    assert "the script's collate_fn" in text
    (text,) = warned(FastLoader(Stream(), 2))
    assert "Stream's code" in text and "get_worker_info" in text
    threads = FastLoader(own, 4, num_workers=2, workers="threads")
    for loader in (FastLoader(known, 4), FastLoader(tensors, 4), threads):
        assert warned(loader) == []


def test_a_loop_that_does_not_wait_gets_no_warning(tree: Path, warned: Any) -> None:
    assert warned(FastLoader(_own(tree), 4)) == warned(FastLoader(FastImageFolder(tree, OWN), 4)) == []


@pytest.mark.usefixtures("impatient")
def test_warnings_name_from_samples_and_augment(tree: Path, warned: Any, monkeypatch: Any) -> None:
    dataset = _own(tree)
    (text,) = warned(FastLoader(dataset, 4))
    assert "OwnImages's code" in text and "num_workers=4" in text
    assert "FastImageFolder.from_samples([(file, target), …], transform)" in text
    swapped = FastImageFolder.from_samples(dataset.table, dataset.transform)
    assert stream(FastLoader(swapped, 4)) == stream(DataLoader(dataset, 4))
    monkeypatch.setattr(advice, "_TRANSFORM_SHARE", 0.0)
    (text,) = warned(FastLoader(FastImageFolder(tree, MUCH), 4, num_workers=2))
    assert "augment='auto'" in text
    assert warned(FastLoader(FastImageFolder(tree, MUCH), 4, augment="split")) == []
