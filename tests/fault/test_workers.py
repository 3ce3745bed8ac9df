"""Batches of worker processes stay what they are, and errors of the script's code keep their type."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from same import same
from torch.utils.data import default_collate
from torchvision import transforms as v1

from fastpipe import FastImageFolder, FastLoader
from fastpipe.errors import WorkerError

pytestmark = pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="run it on Linux")

CROP = v1.Compose([v1.RandomResizedCrop(16), v1.ToTensor()])


def seeded(tree: Path, workers: int, **options: Any) -> FastLoader[Any]:
    dataset = FastImageFolder(tree, CROP, threads=2)
    return FastLoader(dataset, 2, seed=3, num_workers=workers, workers="processes", **options)


@pytest.fixture(scope="module")
def epochs(tree: Path) -> list[list[Any]]:
    """Three epochs that are made without workers."""
    loader = seeded(tree, 0)
    return [list(loader) for _ in range(3)]


class Files:
    """A dataset of files, as torchvision's are, one of which cannot be read."""

    def __init__(self, error: type[Exception]) -> None:
        self.samples, self._error = [(f"/data/{index}.bin", 0) for index in range(16)], error

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        return self._read() if index == 7 else index

    def _read(self) -> int:
        raise self._error("the disk's own words")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [OSError, KeyError])
def test_an_error_of_the_dataset_keeps_its_type_and_says_where(kind: type[Exception], workers: int) -> None:
    iterator = iter(FastLoader(Files(kind), 2, num_workers=workers, workers="processes"))
    batches = [next(iterator) for _ in range(3)]
    with pytest.raises(kind) as caught:
        next(iterator)
    batches += iterator
    assert len(batches) == 7  # the others come
    assert not isinstance(caught.value, WorkerError)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "the disk's own words" in text and (not workers or "in _read" in text)
    with pytest.raises(kind) as single:
        list(FastLoader(Files(kind), None))
    for error in (text, str(getattr(single.value, "__notes__", ""))):
        assert not hasattr(Exception, "add_note") or "while loading sample 7 from '/data/7.bin'" in error


def is_unnamed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in a lane's memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return "/memfd:fastpipe" in line
    return False


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_batches_come_in_unnamed_memory_that_is_used_again(tree: Path, epochs: Any, method: str) -> None:
    loader, seen = seeded(tree, 2, persistent_workers=True, multiprocessing_context=method), set()
    for _ in range(4):
        for batch in loader:
            assert is_unnamed(batch[0])
            seen.add(batch[0].data_ptr())
            del batch
    assert len(seen) <= 2 * 4  # of 8 × 4 batches
    loader.set_epoch(0)
    assert same([list(loader) for _ in range(3)], epochs), "but not that of those that are kept"


_last: list[Any] = []


def with_the_one_before(images: Any, *_: Any) -> Any:
    """As some kinds of mixing do: a batch is sent once more, with the next one."""
    before = _last[-1] if _last else images
    _last[:] = [images]
    return images, before


# Collate functions: each makes a batch of images, targets and samples.
MAKES: dict[str, Callable[..., Any]] = {
    "dict": lambda images, targets, samples: {"images": images, "targets": targets, "name": "a batch", "samples": samples},
    "views": lambda images, targets, _: (images[:, :1], images.flatten(1)[:, ::3], images.permute(0, 2, 3, 1), targets[:1]),
    "one twice": lambda images, *_: (images, images, images.view(-1)),
    "arrays": lambda images, targets, _: (images.numpy().copy(), targets.numpy(), np.float32(2)),
    "other types": lambda images, targets, _: (
        images.to_sparse(), images > 0.5, images.half(), torch.view_as_complex(images.reshape(-1, 2)),
        torch.empty(0, 3), targets.double(), images.clone().requires_grad_(), torch.tensor(3.0).expand(4, 4),
    ),
    "with the one before": with_the_one_before,
}  # fmt: skip


def collate(what: str) -> Callable[[Any], Any]:
    _last.clear()
    return lambda samples: MAKES[what](*default_collate(samples), samples)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from leaves(list(value.items()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, torch.Tensor):
        yield value.detach().to_dense().resolve_conj().numpy().tobytes()
        yield value.dtype, tuple(value.shape), value.requires_grad, value.layout
    elif isinstance(value, np.ndarray):
        yield value.tobytes(), value.dtype, value.shape
    else:
        yield value


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("what", MAKES)
def test_a_collate_function_may_return_anything(tree: Path, what: str) -> None:
    expected = [list(leaves(batch)) for batch in seeded(tree, 0, collate_fn=collate(what))]
    loader = seeded(tree, 1, collate_fn=collate(what), persistent_workers=True)
    assert [list(leaves(batch)) for batch in loader] == expected
    assert [list(leaves(batch)) for batch in list(seeded(tree, 1, collate_fn=collate(what)))] == expected


def test_one_memory_in_the_worker_is_one_memory_here(tree: Path) -> None:
    for first, second, flat in seeded(tree, 1, collate_fn=collate("one twice")):
        first[0, 0, 0, 0] = 5
        assert (float(second[0, 0, 0, 0]), float(flat[0])) == (5, 5)
    loader, last = seeded(tree, 1, collate_fn=collate("with the one before"), prefetch_factor=4), None
    for _ in range(3):  # a batch that is sent again with the next is not overwritten
        for number, (images, before) in enumerate(loader):
            assert not number or torch.equal(before, last)
            last = images.clone()
            del images, before


def test_many_workers_leave_no_descriptors(tree: Path) -> None:
    loader, counts = seeded(tree, 8), []
    for _ in range(3):
        assert len(list(loader)) == 8
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "QueueFeederThread":  # torch does not wait for those of its queues
                thread.join(60)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1:] == counts[:1] * 2
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("workers", "prefetch_factor"), [(1, 700), (8, 2)])
def test_lanes_take_a_part_of_the_descriptors_only(
    tree: Path, epochs: Any, workers: int, prefetch_factor: int
) -> None:
    before, used = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 200, before[1]))
    try:
        assert same(list(seeded(tree, workers, prefetch_factor=prefetch_factor)), epochs[0])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
