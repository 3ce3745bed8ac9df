"""``num_workers="auto"``: what is measured, and what follows from it."""

from __future__ import annotations

import gc
import logging
import mmap
import multiprocessing.synchronize
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset
from torchvision import transforms as v1

from fastpipe import FastImageFolder, FastLoader
from fastpipe.torch import workers as auto_workers
from fastpipe.torch.workers import choose_workers

STEADY = v1.Compose([v1.CenterCrop(20), v1.ToTensor()])


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_workers, "default_threads", lambda: 4)


@pytest.mark.parametrize(
    ("here", "alone", "batch_size", "expected"),
    [
        (1000, 300, 64, 0),  # 1200 in four workers: not worth it
        (1000, 400, 64, 4),
        (100_000, 100_000, 64, 0),  # a batch takes less than to send it
        (100, 100, 1, 4),
    ],
)
def test_the_choice(here: float, alone: float, batch_size: int, expected: int) -> None:
    chosen, why = auto_workers._judge(here, alone, 4, batch_size)
    assert chosen == expected
    assert f"{here:,.0f} samples/s here" in why


class _Watched:
    """Notes in which process it was used."""

    def __init__(self, cost: int = 0) -> None:
        self.used_in = memoryview(mmap.mmap(-1, 8)).cast("q")  # shared with forked processes
        self.cost = cost

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        self.used_in[0] = os.getpid()
        for _ in range(self.cost):
            pass
        return torch.zeros(1)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time for a process that gets no core for a while."""
    monkeypatch.setattr(auto_workers, "_ALL_S", 30.0)


@pytest.mark.usefixtures("patient")
def test_samples_are_made_in_another_process_which_is_gone() -> None:
    dataset = _Watched(100_000)
    before = torch.get_rng_state()
    chosen, _ = choose_workers(dataset, None, 64)
    assert chosen == 4
    assert dataset.used_in[0] not in (0, os.getpid())
    assert not os.path.exists(f"/proc/{dataset.used_in[0]}")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("patient")
def test_what_costs_nothing_stays_here() -> None:
    assert choose_workers(TensorDataset(torch.zeros(100, 2)), None, 8)[0] == 0


class _Broken:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        raise ValueError("broken")


class _Stuck(_Broken):
    def __getitem__(self, index: int) -> Any:
        threading.Event().wait()


class _Crashes(_Broken):
    def __getitem__(self, index: int) -> Any:
        os._exit(1)


def test_a_sample_that_takes_long_is_for_workers() -> None:
    assert choose_workers(_Stuck(), None, 8) == (4, "no batch and no sample was ready within 0.9 s")


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("kind", [_Broken, _Crashes])
def test_a_dataset_that_works_in_no_other_process_stays_here(kind: Any) -> None:
    chosen, why = choose_workers(kind(), None, 8)
    assert (chosen, why) == (0, "a sample cannot be made, or the dataset not be sent, in another process")


# ---- where no process can be started ---------------------------------------------------------------


class _Costly(_Broken):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1).fill_(sum(range(50_000)))


@pytest.fixture
def costly(patient: None) -> _Costly:
    assert choose_workers(_Costly(), None, 64)[0] == 4  # else the tests below would say nothing
    return _Costly()


def _raise(error: Exception) -> Any:
    raise error


def _daemon(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]


def _frozen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "frozen", True, raising=False)


def _no_semaphores(patch: pytest.MonkeyPatch) -> None:
    lacking = FileNotFoundError(2, "No such file or directory")
    patch.setattr(multiprocessing.synchronize, "Lock", lambda **_: _raise(lacking))


def _no_fork(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "fork", lambda: _raise(BlockingIOError(11, "Resource temporarily unavailable")))


def _no_threads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(threading.Thread, "start", lambda _: _raise(RuntimeError("can't start new thread")))


def _small_shared_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(auto_workers, "room", lambda: (1000, 64 << 20))


@pytest.mark.parametrize(
    ("prevent", "why"),
    [
        (_daemon, "this is a daemonic process, which may have no children"),
        (_frozen, "this is a frozen program, which would be started once more"),
        (_no_semaphores, "semaphores cannot be made here ([Errno 2] No such file or directory)"),
        (_no_fork, "no process can be started ([Errno 11] Resource temporarily unavailable)"),
        (_no_threads, "limits of this system do not allow 4 more processes"),
        (_small_shared_memory, "but their batches do not fit into /dev/shm"),
    ],
)
def test_none_is_chosen_where_none_can_be_started(
    costly: _Costly, monkeypatch: pytest.MonkeyPatch, prevent: Any, why: str
) -> None:
    prevent(monkeypatch)
    chosen, said = choose_workers(costly, None, 64)
    assert (chosen, said.partition("; ")[2] or said) == (0, why)


_SCRIPT = """
import torch
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
    loader = FastLoader(Costly(), 64, num_workers="auto", multiprocessing_context="spawn")
    print(loader.num_workers, sum(len(batch) for batch in loader))
"""
_GUARD = 'if __name__ == "__main__":\n    main()\n'


@pytest.mark.parametrize(
    ("arguments", "text", "expected"),
    [
        (["train.py"], _SCRIPT + _GUARD, "2 16"),
        (["train.py"], _SCRIPT + "main()\n", "0 16"),  # would be run once more by each worker
        (["-c", _SCRIPT + _GUARD], "", "0 16"),  # no worker could find the class
        (["-"], _SCRIPT + "main()\n", "0 16"),
    ],
    ids=["script", "script without a guard", "-c", "standard input"],
)
def test_started_workers_are_chosen_only_where_they_can_have_the_dataset(
    tmp_path: Path, arguments: list[str], text: str, expected: str
) -> None:
    (tmp_path / "train.py").write_text(text)
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, input=text, capture_output=True, text=True, check=False
    )
    assert ran.stdout.splitlines() == [expected], ran.stderr


def test_the_scripts_start_method_stays_open() -> None:
    code = "import multiprocessing; from fastpipe import FastLoader; FastLoader([1], num_workers='auto'); "
    code += "print(multiprocessing.get_start_method(allow_none=True))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "None\n"


def test_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_workers([], None, 8) == (0, "the dataset has no samples to measure")
    assert choose_workers(iter(()), None, 8)[0] == 0
    monkeypatch.setattr(auto_workers, "default_threads", lambda: 1)
    assert choose_workers([1], None, 8) == (0, "this process may use one core only")


def test_a_loader_reports_what_it_chose(photo_tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fastpipe"):
        loader = FastLoader(
            FastImageFolder(photo_tree, STEADY), 4, num_workers="auto", persistent_workers=True, prefetch_factor=3,
            multiprocessing_context="fork",
        )  # fmt: skip
    assert f"num_workers='auto' is {loader.num_workers}: " in caplog.text
    assert "samples/s here" in repr(loader.plan)
    assert isinstance(loader.num_workers, int)
    expected = FastLoader(FastImageFolder(photo_tree, STEADY), 4)
    for (images, labels), (others, targets) in zip(loader, expected, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, targets)


@pytest.mark.parametrize("workers", [0, 4])
def test_arguments_about_workers_go_with_them(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr("fastpipe.torch.loader.choose_workers", lambda *_: (workers, "so it is"))
    loader = FastLoader(
        [1, 2, 3], num_workers="auto", persistent_workers=True, prefetch_factor=3, timeout=9,
        multiprocessing_context="fork",
    )  # fmt: skip
    assert loader.num_workers == workers
    assert loader.persistent_workers == (workers > 0)
    assert loader.prefetch_factor == (3 if workers else None)
    assert loader.timeout == (9 if workers else 0)
    assert "(num_workers='auto': so it is)" in repr(loader.plan)


def test_garbage_of_the_parent_is_left_alone() -> None:
    """What may only be freed where its threads are, such as TensorFlow's functions."""
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

    gc.disable()
    try:
        Garbage()
        choose_workers(Collecting(), None, 8)
        assert freed_in[0] == 0
        loader = FastLoader(
            Collecting(), 8, num_workers=1, workers="processes", multiprocessing_context="fork"
        )
        assert len(list(loader)) == 13
        assert freed_in[0] == 0
        gc.collect()
        assert freed_in[0] == os.getpid()
    finally:
        gc.enable()
