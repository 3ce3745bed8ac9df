"""The queue of a worker that looks ahead: nothing is lost, nothing changes its place, and batches are begun early."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info
from torchvision.transforms import Compose, RandomResizedCrop, ToTensor

from fastpipe import FastImageFolder, FastLoader
from fastpipe.torch import transport as worker_queues
from fastpipe.torch.transport import IndexQueue, WorkerContext, peek_requests

PLAIN = Compose([RandomResizedCrop(8), ToTensor()])


def _filled(count: int) -> IndexQueue:
    made = IndexQueue(multiprocessing.get_context("spawn"))
    for number in range(count):
        made.put(number)
    return made


def test_what_was_looked_at_is_taken_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_queues, "_current", None)
    monkeypatch.setattr(worker_queues, "get_worker_info", lambda: "in a worker")
    assert peek_requests(_never) == []  # not in a worker
    made = _filled(5)
    assert made.get(timeout=5) == 0
    seen: list[Any] = []
    for _ in range(1000):  # they come through a pipe
        seen = peek_requests(_never)
        if len(seen) == 4:
            break
        threading.Event().wait(0.001)
    assert seen == [1, 2, 3, 4]
    made.put(5)
    assert [made.get(timeout=5) for _ in range(5)] == [1, 2, 3, 4, 5]
    with pytest.raises(queue.Empty):
        made.get(timeout=0.01)
    made.close()
    made.join_thread()


def test_a_worker_waits_for_what_it_is_asked_for_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _filled(0)
    monkeypatch.setattr(worker_queues, "_current", made)
    asked = iter([False, False, True])
    assert peek_requests(lambda: next(asked)) == []
    assert next(asked, None) is None

    def put_while_it_waits() -> bool:
        if not looks:
            made.put("next")
        looks.append(None)
        return len(looks) > 10_000

    looks: list[None] = []
    assert peek_requests(put_while_it_waits) == ["next"]
    assert made.get(timeout=5) == "next"
    made.close()
    made.join_thread()


def _never() -> bool:
    return False


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_context_of_each_kind_has_such_queues(method: str) -> None:
    context = WorkerContext(multiprocessing.get_context(method))
    made = context.Queue()
    assert isinstance(made, IndexQueue)
    assert context.Process is multiprocessing.get_context(method).Process
    made.close()


class _Telling(FastImageFolder):
    """Tells, as the second target of each sample, how many batches of its worker's are begun and not handed out."""

    begun = 0

    def _start_batch(self, *args: Any, **options: Any) -> Any:
        _Telling.begun += 1
        batch: Any = super()._start_batch(*args, **options)
        finish = batch.finish

        def told() -> list[Any]:
            worker, count = get_worker_info(), _Telling.begun
            _Telling.begun -= 1
            assert worker is not None
            return [(image, count) for image, _ in finish()]

        batch.finish = told
        return batch


def test_a_worker_with_threads_begins_what_comes_next(tree: Path) -> None:
    dataset = _Telling(tree, PLAIN, threads=2)
    loader = FastLoader(dataset, batch_size=3, num_workers=1, workers="processes", prefetch_factor=4)
    counts = torch.cat([counts for _, counts in loader])
    assert counts.max() > 1
    alone = _Telling(tree, PLAIN, threads=1)
    loader = FastLoader(alone, batch_size=3, num_workers=1, workers="processes", prefetch_factor=4)
    assert torch.cat([counts for _, counts in loader]).max() == 1  # it would be made at once


def test_batches_are_those_of_a_loader_that_does_not(tree: Path) -> None:
    dataset = FastImageFolder(tree, PLAIN, seed=5, threads=2)
    ahead = FastLoader(dataset, 2, shuffle=True, num_workers=1, workers="processes", prefetch_factor=6)
    for (images, labels), (others, same) in zip(ahead, FastLoader(dataset, 2, shuffle=True), strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, same)
    assert isinstance(ahead, DataLoader)
