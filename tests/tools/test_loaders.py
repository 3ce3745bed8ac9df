"""Loaders that are watched give what they gave, and are seen in every kind of process."""

from __future__ import annotations

import gc
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


class Squares(Dataset[Any]):
    """Of a thread that runs long enough to be seen; draws, so that generators show."""

    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        for _ in range(40):
            torch.arange(2000).double().sin()
        return torch.tensor(index**2), torch.rand(())


class Batches(Squares):
    """Answers for a whole batch."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [(torch.tensor(index), "batch") for index in indices]


class Stream(IterableDataset[int]):
    """Is iterated, a part of it in each worker."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, 20, step))


class Around(IterableDataset[int]):
    """Gives what another one does."""

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


class WriteKind:
    """An init function that writes what kind of dataset a worker has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, worker_id: int) -> None:
        worker = get_worker_info()
        (self.folder / f"{worker_id}").write_text(type(worker.dataset).__name__ if worker else "")


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


def test_stages_and_lines_are_known(tmp_path: Path) -> None:
    init = WriteKind(tmp_path)
    with watch() as watching:
        loader = DataLoader(Squares(256), batch_size=8, num_workers=1, worker_init_fn=init)
        list(loader)
        (known,) = watching.found
        assert known.witness is not None
        costs = costs_of(known.witness.accounts())
    assert {"transform", "collate"} <= set(costs.stages) <= {"transform", "collate", "transfer", "other"}
    assert costs.wall_s > 0 and costs.cpu_s > 0
    functions = {(Path(line.file).name, line.function) for line, _, _ in costs.lines}
    assert any(file == Path(__file__).name and name.endswith("__getitem__") for file, name in functions)
    assert known.made_at is not None and known.made_at.file == __file__
    assert known.made_at.function == known.used_at.function == "test_stages_and_lines_are_known"
    assert known.used_at.line == known.made_at.line + 1
    assert (tmp_path / "0").read_text() == "Squares", "the user's init function sees the user's dataset"


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


def error_of(loader: Any) -> str:  # which keeps nothing of its traceback
    try:
        return str(list(loader))
    except ValueError as error:
        return str(error)


@pytest.mark.slow
def test_an_error_of_a_dataset_is_raised() -> None:
    for workers in (0, 1):
        with watch():
            assert "sample 0" in error_of(DataLoader(Bad(), batch_size=4, num_workers=workers))
    gc.collect()  # torch's worker waits for 5 s, if what its error refers to is collected as garbage


def test_a_subclass_with_an_iterator_of_its_own_is_not_watched() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter(["mine"])

    with watch() as watching:
        assert list(Own(range(4))) == ["mine"]  # type: ignore[arg-type]
    assert not watching.found


def test_loaders_that_a_line_makes_for_each_epoch_are_one_loop() -> None:
    def run(length: int) -> int:
        loader = DataLoader(Squares(length), batch_size=4, num_workers=1)
        return len(list(loader))

    with watch() as watching:
        assert [run(24), run(24), run(24), run(8)] == [6, 6, 6, 2]  # the last one is another loop
        training, other = watching.found
        assert training.witness is not None and other.witness is not None
        assert [costs_of(one.witness.accounts()).batches for one in (training, other)] == [18, 2]
    assert len(training.loop.epoch_starts) == 3


def test_attributes_of_the_dataset_are_reached_through_the_one_that_is_timed() -> None:
    def collate(samples: list[Any]) -> int:
        return len(samples)

    with watch() as watching:
        loader = DataLoader(Squares(6), batch_size=4, collate_fn=collate)
        assert list(loader) == [4, 2]
        view = watching.found[0].view
        assert view.dataset.length == 6 and len(view.dataset) == 6
        assert loader.dataset.__class__ is Squares and loader.collate_fn is collate
        with pytest.raises(AttributeError, match="missing"):
            view.dataset.missing
