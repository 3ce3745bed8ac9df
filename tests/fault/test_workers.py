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
from torch.utils.data import default_collate
from torchvision import transforms as v1

from fastpipe import FastImageFolder, FastLoader
from fastpipe.bench.synthetic import photo_tree
from fastpipe.errors import WorkerError

pytestmark = pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="run it on Linux")

CROP = v1.Compose([v1.RandomResizedCrop(16), v1.ToTensor()])


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_tree(tmp_path_factory.mktemp("tree"), classes=2, per_class=8, sizes=(20, 24))


def seeded(tree: Path, workers: int, **options: Any) -> FastLoader[Any]:
    dataset = FastImageFolder(tree, CROP, threads=2)
    return FastLoader(dataset, 2, seed=3, num_workers=workers, workers="processes", **options)


def same(batches: Any, expected: Any) -> bool:
    pairs = zip(batches, expected, strict=True)
    return all(torch.equal(x[0], y[0]) and torch.equal(x[1], y[1]) for x, y in pairs)


@pytest.fixture(scope="module")
def epochs(tree: Path) -> list[list[Any]]:
    """Three epochs that are made without workers."""
    loader = seeded(tree, 0)
    return [[[part.clone() for part in batch] for batch in loader] for _ in range(3)]


class Files:
    """A dataset of files, as torchvision's are, one of which cannot be read."""

    def __init__(self, error: type[Exception]) -> None:
        self.samples = [(f"/data/{index}.bin", 0) for index in range(16)]
        self._error = error

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        if index == 7:
            self._read()
        return index

    def _read(self) -> None:
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


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("workers", "options"),
    [(1, {}), (2, {"persistent_workers": True, "prefetch_factor": 1}),
     (1, {"persistent_workers": True, "multiprocessing_context": "forkserver"}),
     pytest.param(1, {"persistent_workers": True, "multiprocessing_context": "spawn"}, marks=pytest.mark.slow)],
)  # fmt: skip
def test_batches_that_are_kept_do_not_change(
    tree: Path, epochs: Any, workers: int, options: dict[str, Any]
) -> None:
    loader = seeded(tree, workers, **options)
    kept = [list(loader) for _ in range(3)]
    assert all(map(same, kept, epochs)) and is_unnamed(kept[0][0][0])
    del loader
    gc.collect()
    assert all(map(same, kept, epochs))
    for batch in kept[0]:  # the script's own: it may write to them
        batch[0].fill_(1)
    assert same(kept[1], epochs[1])


def is_unnamed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in a lane's memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return "/memfd:fastpipe" in line
    return False


def test_batches_come_in_unnamed_memory_that_is_used_again(tree: Path) -> None:
    loader, seen = seeded(tree, 2, persistent_workers=True), set()
    for _ in range(4):
        for batch in loader:
            assert is_unnamed(batch[0])
            seen.add(batch[0].data_ptr())
            del batch
    assert len(seen) <= 2 * 4  # of 8 × 4 batches


def as_dict(samples: Any) -> Any:
    images, targets = default_collate(samples)
    return {"images": images, "targets": targets, "name": "a batch", "samples": samples}


def as_views(samples: Any) -> Any:
    images, targets = default_collate(samples)
    return images[:, :1], images.flatten(1)[:, ::3], images.permute(0, 2, 3, 1), targets[:1]


def one_twice(samples: Any) -> Any:
    images, _ = default_collate(samples)
    return images, images, images.view(-1)


def as_arrays(samples: Any) -> Any:
    images, targets = default_collate(samples)
    return images.numpy().copy(), targets.numpy(), np.float32(2)


def as_other_types(samples: Any) -> Any:
    images, targets = default_collate(samples)
    return (
        images.to_sparse(), images > 0.5, images.half(), torch.view_as_complex(images.reshape(-1, 2)),
        torch.empty(0, 3), targets.double(), images.clone().requires_grad_(), torch.tensor(3.0).expand(4, 4),
    )  # fmt: skip


_last: list[Any] = []


def with_the_one_before(samples: Any) -> Any:
    """As some kinds of mixing do: a batch is sent once more, with the next one."""
    images, _ = default_collate(samples)
    before = _last[-1] if _last else images
    _last[:] = [images]
    return images, before


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
@pytest.mark.parametrize(
    "collate", [as_dict, as_views, one_twice, as_arrays, as_other_types, with_the_one_before]
)
def test_a_collate_function_may_return_anything(tree: Path, collate: Callable[[Any], Any]) -> None:
    _last.clear()
    expected = [list(leaves(batch)) for batch in seeded(tree, 0, collate_fn=collate)]
    _last.clear()
    loader = seeded(tree, 1, collate_fn=collate, persistent_workers=True)
    assert [list(leaves(batch)) for batch in loader] == expected
    kept = list(seeded(tree, 1, collate_fn=collate))
    assert [list(leaves(batch)) for batch in kept] == expected


def test_one_memory_in_the_worker_is_one_memory_here(tree: Path) -> None:
    for first, second, flat in seeded(tree, 1, collate_fn=one_twice):
        first[0, 0, 0, 0] = 5
        assert (float(second[0, 0, 0, 0]), float(flat[0])) == (5, 5)
    loader, last = seeded(tree, 1, collate_fn=with_the_one_before, prefetch_factor=4), None
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
