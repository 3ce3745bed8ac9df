"""Loaders that are watched give what they gave, and are seen in every kind of process."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from fastpipe.tools.candidates import knows_workers
from fastpipe.tools.costs import costs_of
from fastpipe.tools.loaders import Watch
from fastpipe.tools.loops import Loop, WatchedIterator


class Squares(Dataset[Any]):  # of a thread that runs long enough to be seen; draws, so that generators show
    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        for _ in range(40):
            torch.arange(2000).double().sin()
        return torch.tensor(index**2), torch.rand(())


class Batches(Squares):  # answers for a whole batch
    def __getitems__(self, indices: list[int]) -> Any:
        return [(torch.tensor(index), "batch") for index in indices]


class Stream(IterableDataset[int]):  # is iterated, a part of it in each worker
    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, 20, step))


class Around(IterableDataset[int]):  # gives what another one does
    inner: Any = None
    other: Any = None

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)


def test_a_stream_around_another_knows_its_workers_if_that_does() -> None:
    outer, inner = Around(), Around()
    outer.inner, inner.inner = inner, outer
    assert not knows_workers(outer), "each of them has the other"
    inner.other = Stream()
    assert knows_workers(outer) and knows_workers(Stream())


def watch() -> Watch:
    return Watch(lambda _: Loop(float("inf"), is_replayed=False))


def epochs(loader: Any) -> str:
    torch.manual_seed(7)
    return repr([list(loader), list(loader), torch.rand(())])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "kind",
    [
        {}, {"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 1, "multiprocessing_context": "spawn"},
        {"num_workers": 1, "multiprocessing_context": "forkserver", "persistent_workers": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dataset", [Squares, Batches, Stream])
def test_batches_and_draws_are_the_same_and_all_are_counted(dataset: Any, kind: dict[str, Any]) -> None:
    options = {"batch_size": 4, **({} if dataset is Stream else {"shuffle": True}), **kind}
    expected = epochs(DataLoader(dataset(), **options))
    with watch() as watching:
        loader = DataLoader(dataset(), **options)
        assert epochs(loader) == expected
        (known,) = watching.found
        assert known.loader is loader and known.witness is not None
        known.witness.close()
        samples = 2 * (20 if dataset is Stream else 24)
        costs = costs_of(known.witness.accounts())
        for _ in range(600):  # workers that stay report from time to time, the others when they end
            if costs.samples == samples:
                break
            threading.Event().wait(0.05)
            costs = costs_of(known.witness.accounts())
    assert costs.samples == samples and 4 * costs.batches >= samples
    assert costs.makers == kind.get("num_workers", 0)


def test_afterwards_no_loader_is_watched_and_no_file_is_left() -> None:
    begin, init = DataLoader.__iter__, DataLoader.__init__
    before = set(os.listdir(tempfile.gettempdir()))
    with watch() as watching:
        loader = DataLoader(Squares(), batch_size=4, num_workers=1, persistent_workers=True)
        with watching.paused():
            assert list(DataLoader(range(3), batch_size=None)) == [0, 1, 2]  # type: ignore[arg-type]
        assert not watching.found
        iterator: Any = iter(loader)
        assert isinstance(iterator, WatchedIterator) and len(watching.found) == 1
        assert len(iterator) == 6 and iterator._num_yielded == 0, "the attributes of the loader's own"
        del iterator
    assert DataLoader.__iter__ is begin and DataLoader.__init__ is init
    assert set(os.listdir(tempfile.gettempdir())) == before
    assert len(list(loader)) == 6 and not isinstance(iter(loader), WatchedIterator)


class Bad(Squares):
    def __getitem__(self, index: int) -> Any:
        raise ValueError(f"sample {index}")


def test_errors_and_attributes_of_the_dataset_are_reached_through_the_one_that_is_timed(
    tmp_path: Path,
) -> None:
    def collate(samples: list[Any]) -> int:
        return len(samples)

    def init(worker_id: int) -> None:
        worker = get_worker_info()
        (tmp_path / "kind").write_text(type(worker.dataset).__name__ if worker else "")

    with watch() as watching:
        loader = DataLoader(Squares(6), batch_size=4, collate_fn=collate)
        assert list(loader) == [4, 2]
        view = watching.found[0].view
        assert view.dataset.length == 6 and len(view.dataset) == 6
        assert loader.dataset.__class__ is Squares and loader.collate_fn is collate
        with pytest.raises(AttributeError, match="missing"):
            view.dataset.missing
        list(DataLoader(Squares(8), batch_size=8, num_workers=1, worker_init_fn=init))
        assert (tmp_path / "kind").read_text() == "Squares", (
            "the user's init function sees the user's dataset"
        )
        with pytest.raises(ValueError, match="sample 0"):
            list(DataLoader(Bad(), batch_size=4))
