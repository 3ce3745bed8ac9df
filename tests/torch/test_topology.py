"""Where samples are made: one rule for ``FastLoader`` and ``accelerate``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from torchvision.datasets import ImageFolder
from torchvision.transforms import ColorJitter, Compose, RandAugment, RandomResizedCrop, Resize, ToTensor

import fastpipe.torch.loader as loader_module
from fastpipe import FastImageFolder, FastLoader, accelerate
from fastpipe.errors import OptionError
from fastpipe.options import Decode
from fastpipe.torch import describe as advice

PLAIN = Compose([Resize((8, 8)), ToTensor()])


class _Own(Dataset[Any]):
    """The commonest dataset there is."""

    def __init__(self, tree: Path, transform: Any = PLAIN) -> None:
        self.samples, self.transform = ImageFolder(tree).samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        path, target = self.samples[index]
        with Image.open(path) as image:
            return self.transform(image.convert("RGB")), target


class _Where(Dataset[int]):
    """Says in which process a sample is made."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def _own_step(image: Any) -> Any:
    return image


def _own_collate(samples: list[Any]) -> Any:
    return default_collate(samples)


def _init(worker: int) -> None:
    assert get_worker_info() is not None


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


RULE: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "known transform": (lambda tree: FastImageFolder(tree, PLAIN), {}, ""),
    "torchvision's augmentation": (
        lambda tree: FastImageFolder(tree, Compose([RandomResizedCrop(8), RandAugment(), ToTensor()])), {}, "",
    ),
    "ImageFolder": (lambda tree: ImageFolder(tree, Compose([ColorJitter(0.1), PLAIN])), {}, ""),
    "persistent workers": (lambda tree: FastImageFolder(tree, PLAIN), {"persistent_workers": True}, ""),
    "timeout": (lambda tree: FastImageFolder(tree, PLAIN), {"timeout": 60}, ""),
    "threads": (lambda tree: FastImageFolder(tree, Compose([PLAIN, _own_step])), {"workers": "threads"}, ""),
    "processes": (lambda tree: FastImageFolder(tree, PLAIN), {"workers": "processes"}, "workers='processes'"),
    "own transform": (lambda tree: FastImageFolder(tree, Compose([PLAIN, _own_step])), {}, "a transform of"),
    "own target_transform": (
        lambda tree: FastImageFolder(tree, PLAIN, target_transform=_own_step), {}, "a transform of",
    ),
    "own collate_fn": (lambda tree: FastImageFolder(tree, PLAIN), {"collate_fn": _own_collate}, "collate_fn"),
    "own worker_init_fn": (
        lambda tree: FastImageFolder(tree, PLAIN), {"worker_init_fn": _init}, "worker_init_fn",
    ),
    "own dataset": (lambda tree: _Own(tree), {}, "one sample after the other, in 2 worker processes"),
    "tensors": (lambda tree: TensorDataset(torch.arange(4)), {}, "one sample after the other, in 2"),
    "no batches": (lambda tree: FastImageFolder(tree, PLAIN), {"batch_size": None}, "in 2 worker processes"),
}  # fmt: skip


@pytest.mark.parametrize("name", RULE)
def test_threads_do_the_work_of_workers_where_no_code_of_the_script_runs(tree: Path, name: str) -> None:
    make, options, why = RULE[name]
    options = {"batch_size": 4, "num_workers": 2, **options}
    stock = {key: value for key, value in options.items() if key != "workers"}
    same = {key: value for key, value in options.items() if key == "workers"}
    for loader in (
        FastLoader(make(tree), **options),
        accelerate(DataLoader(make(tree), **stock), **same),
    ):
        note = repr(loader.plan)
        assert loader.num_workers == 2  # as the script asked for
        assert why in note
        assert ("threads in this process" in note) is (why == "")
        iterator = iter(loader)
        next(iterator)
        assert bool(getattr(iterator, "_workers", ())) is (why != "")
        del iterator


def test_as_a_dataloader_without_workers(tree: Path) -> None:
    for loader in (FastLoader(_Where(), 4), FastLoader(_Where(), 4, workers="processes")):
        assert {pid for batch in loader for pid in batch.tolist()} == {os.getpid()}
    assert {pid for batch in FastLoader(_Where(), 4, num_workers=2) for pid in batch.tolist()}.isdisjoint(
        {os.getpid()}
    )
    assert list(FastLoader(_Stream(), None, num_workers=1)) == [0, 1, 2]


def test_more_workers_than_the_lock_of_one_process_allows_stay_processes(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "default_threads", lambda: 16)
    dataset = FastImageFolder(tree, PLAIN)
    assert "threads in this process" in repr(FastLoader(dataset, 4, num_workers=16).plan)
    by_pillow = FastImageFolder(tree, PLAIN, decode=Decode("pillow"))
    assert "threads in this process" in repr(FastLoader(by_pillow, 4, num_workers=8).plan)
    assert "12 worker processes" in repr(FastLoader(by_pillow, 4, num_workers=12).plan)
    much = FastImageFolder(tree, Compose([RandomResizedCrop(8), RandAugment(), ToTensor()]))
    assert "threads in this process" in repr(FastLoader(much, 4, num_workers=2).plan)
    assert "3 worker processes" in repr(FastLoader(much, 4, num_workers=3).plan)
    split = FastLoader(much, 4, num_workers=3, augment="split")
    assert split.num_processes == 0
    assert not hasattr(iter(split), "_workers")
    monkeypatch.setattr(loader_module, "default_threads", lambda: 2)
    assert "threads in this process" in repr(FastLoader(dataset, 4, num_workers=12).plan)


def test_threads_that_cannot_work_are_refused_at_once(tree: Path) -> None:
    with pytest.raises(OptionError, match=r"no batches of this _Own .*is no ImageFolder.*leave workers= out"):
        FastLoader(_Own(tree), 4, num_workers=2, workers="threads")
    with pytest.raises(OptionError, match="would never call worker_init_fn"):
        FastLoader(FastImageFolder(tree), num_workers=2, worker_init_fn=_init, workers="threads")
    with pytest.raises(OptionError, match="give the loader a batch_size"):
        FastLoader(FastImageFolder(tree), None, num_workers=2, workers="threads")
    with pytest.raises(OptionError, match="chooses by measuring: leave workers='threads' out"):
        FastLoader(FastImageFolder(tree), num_workers="auto", workers="threads")
    with pytest.raises(OptionError, match="got 'thread'"):
        FastLoader(FastImageFolder(tree), workers="thread")  # type: ignore[arg-type]


# ---- what the user is told --------------------------------------------------------------------------


def told(caplog: pytest.LogCaptureFixture, loader: Any, epochs: int = 2) -> list[str]:
    caplog.clear()
    for _ in range(epochs):
        for _ in loader:
            pass
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any wait is long."""
    monkeypatch.setattr(advice, "_WAITED_S", 0.0)
    monkeypatch.setattr(advice, "_WAITED_SHARE", 0.0)
    monkeypatch.setattr(advice, "_EACH_S", 0.0)
    monkeypatch.setattr(advice, "default_threads", lambda: 4)


@pytest.mark.usefixtures("impatient")
def test_own_code_that_batches_wait_for_names_num_workers_once(
    tree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = Compose([PLAIN, _own_step])
    for make, what in (
        (lambda workers: FastLoader(_Where(), 4, num_workers=workers), "_Where's code"),
        (lambda workers: FastLoader(FastImageFolder(tree, own), 4, num_workers=workers), "a transform of"),
        (
            lambda workers: accelerate(DataLoader(ImageFolder(tree, own), 4, num_workers=workers)),
            "a transform",
        ),
        (
            lambda workers: FastLoader(
                FastImageFolder(tree, PLAIN), 4, num_workers=workers, collate_fn=_own_collate
            ),
            "the script's collate_fn",
        ),
    ):
        (text,) = told(caplog, make(0))
        assert what in text
        assert "num_workers=4" in text
        assert told(caplog, make(2)) == []
    assert told(caplog, FastLoader(FastImageFolder(tree, PLAIN), 4)) == []
    assert told(caplog, FastLoader(TensorDataset(torch.arange(8)), 4)) == []
    (text,) = told(caplog, FastLoader(TensorDataset(torch.arange(8)), 4, collate_fn=_own_collate))
    assert "the script's collate_fn" in text
    (text,) = told(caplog, FastLoader(_Stream(), 2))
    assert "_Stream's code" in text
    assert "get_worker_info" in text
    threads = FastLoader(FastImageFolder(tree, own), 4, num_workers=2, workers="threads")
    assert told(caplog, threads) == []


def test_a_loop_that_does_not_wait_is_told_nothing(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, FastLoader(_Where(), 4)) == []
    assert told(caplog, FastLoader(FastImageFolder(tree, Compose([PLAIN, _own_step])), 4)) == []


@pytest.mark.usefixtures("impatient")
def test_a_dataset_of_the_scripts_is_told_of_from_samples(
    tree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = _Own(tree)
    (text,) = told(caplog, FastLoader(dataset, 4))
    assert "_Own's code" in text and "num_workers=4" in text
    assert "FastImageFolder.from_samples([(file, target), …], transform)" in text
    swapped = FastImageFolder.from_samples(dataset.samples, dataset.transform)
    for ours, theirs in zip(FastLoader(swapped, 4), DataLoader(dataset, 4), strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


@pytest.mark.usefixtures("impatient")
def test_torchvisions_transforms_that_take_long_are_told_of_augment(
    tree: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "_TRANSFORM_SHARE", 0.0)
    much = Compose([RandomResizedCrop(8), RandAugment(), ToTensor()])
    (text,) = told(caplog, FastLoader(FastImageFolder(tree, much), 4, num_workers=2))
    assert "augment='auto'" in text
    assert told(caplog, FastLoader(FastImageFolder(tree, much), 4, augment="split")) == []
