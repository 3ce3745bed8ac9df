"""A stock ``DataLoader`` over ``FastImageFolder``, and ``FastLoader`` with the arguments of ``DataLoader``."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dataset_kinds import RANDOM, STEADY
from same import same
from streams import BY_PROCESSES
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate, get_worker_info
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from fastpipe import FastImageFolder, FastLoader
from fastpipe.errors import OptionError

pytestmark = pytest.mark.usefixtures("same_generators")


def _pixels(samples: list[Any]) -> list[Any]:
    return [(image.size, image.tobytes(), target, type(samples)) for image, target in samples]


@pytest.mark.parametrize(
    "transform", [v1.PILToTensor(), v2.Compose([v2.ToImage(), v2.CenterCrop(32)]), None], ids=str
)
@pytest.mark.parametrize("workers", [0, 1])
def test_every_kind_of_image_collates_as_from_image_folder(tree: Path, transform: Any, workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 5, "num_workers": workers}
    if transform is None:
        options["collate_fn"] = _pixels
    theirs = list(DataLoader(ImageFolder(tree, transform), **options))
    for kind in (DataLoader, BY_PROCESSES):
        assert same(list(kind(FastImageFolder(tree, transform), **options)), theirs)


@pytest.mark.parametrize("kind", [DataLoader, BY_PROCESSES])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, True)])
def test_augmentation_differs_each_time(tree: Path, kind: Any, workers: int, persistent: bool) -> None:
    dataset = Subset(FastImageFolder(tree, RANDOM), [0] * 8)  # the same file, eight times
    loader = kind(dataset, batch_size=2, num_workers=workers, persistent_workers=persistent)
    seen = {image.numpy().tobytes() for _ in range(3) for images, _ in loader for image in images}
    assert len(seen) == 24


def _look(samples: list[Any]) -> tuple[Any, bool]:
    images, _ = default_collate(samples)
    return images, is_in_shared_memory(images)


def is_in_shared_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a mapping that several processes share."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access = line.split()[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return access.endswith("s")
    raise AssertionError("no mapping")


@pytest.mark.parametrize("kind", [DataLoader, BY_PROCESSES])
def test_a_worker_decodes_into_the_memory_that_it_sends(tree: Path, kind: Any) -> None:
    expected = [images for images, _ in DataLoader(ImageFolder(tree, STEADY), batch_size=4)]
    loader = kind(FastImageFolder(tree, STEADY), batch_size=4, num_workers=1, collate_fn=_look)
    for number, (images, was_in_shared_memory) in enumerate(loader):
        assert was_in_shared_memory
        assert is_in_shared_memory(images), "nothing was copied on the way"
        assert torch.equal(images, expected[number])


@pytest.mark.parametrize("kind", [DataLoader, BY_PROCESSES])
def test_pin_memory_does_nothing_without_an_accelerator(tree: Path, kind: Any) -> None:
    if torch.accelerator.is_available():
        pytest.skip("run it on a machine without an accelerator")
    loader = kind(FastImageFolder(tree, STEADY), batch_size=4, pin_memory=True)
    assert [images.is_pinned() for images, _ in loader] == [False] * 4


@pytest.mark.parametrize(("ours", "theirs"), [(FastLoader, DataLoader), (FastImageFolder, ImageFolder)])
def test_signatures_begin_as_those_of_the_replaced_classes(ours: Any, theirs: Any) -> None:
    mine, its = (list(inspect.signature(each).parameters.values()) for each in (ours, theirs))
    for one, other in zip(mine, its, strict=False):
        assert (one.name, one.default, one.kind) == (other.name, other.default, other.kind)
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in mine[len(its) :])
    assert issubclass(ours, theirs)


@pytest.mark.parametrize(
    "arguments",
    [
        {}, {"batch_size": None}, {"sampler": [2, 1]}, {"batch_sampler": [[2, 1], [0]]},
        {"batch_size": 4, "drop_last": True, "generator": torch.Generator(), "pin_memory": True},
        {"num_workers": 2, "timeout": 3, "worker_init_fn": print, "prefetch_factor": 5, "persistent_workers": True,
         "in_order": False, "collate_fn": list},
        {"num_workers": 1, "multiprocessing_context": multiprocessing.get_context("spawn")},
    ],
    ids=lambda arguments: "-".join(arguments) or "defaults",
)  # fmt: skip
def test_every_argument_is_an_attribute(tree: Path, arguments: dict[str, Any]) -> None:
    dataset = FastImageFolder(tree, STEADY)
    ours = FastLoader(dataset, **arguments, seed=4, prefetch_batches=3)
    theirs = DataLoader(dataset, **arguments)
    for name in inspect.signature(DataLoader).parameters:
        if name in ("shuffle", "sampler", "batch_sampler") and name not in arguments:
            continue  # not kept by DataLoader either, or an object made anew
        assert getattr(ours, name) == getattr(theirs, name), name
        if name in arguments:
            assert getattr(ours, name) is arguments[name], name
    assert type(ours.sampler) is type(theirs.sampler)
    assert type(ours.batch_sampler) is type(theirs.batch_sampler)
    assert len(ours) == len(theirs) and (ours.seed, ours.prefetch_batches) == (4, 3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": -1}, {"timeout": -1}, {"prefetch_factor": 2}, {"persistent_workers": True},
        {"shuffle": True, "sampler": [1]}, {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_size": None, "drop_last": True}, {"batch_size": 0}, {"batch_size": -2},
        {"multiprocessing_context": "fork"}, {"num_workers": 1, "multiprocessing_context": "none"},
        {"num_workers": 1, "multiprocessing_context": 5}, {"num_workers": 1, "prefetch_factor": -2},
    ],
    ids=str,
)  # fmt: skip
def test_errors_of_construction_are_data_loaders(tree: Path, arguments: dict[str, Any]) -> None:
    dataset = FastImageFolder(tree, STEADY)
    with pytest.raises((ValueError, TypeError)) as theirs:
        DataLoader(dataset, **arguments)
    with pytest.raises(type(theirs.value)) as ours:
        FastLoader(dataset, **arguments)
    assert str(ours.value) == str(theirs.value)


def test_attributes_that_must_not_be_set_later_are_refused(tree: Path) -> None:
    loader = FastLoader(FastImageFolder(tree, STEADY))
    for name in ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"):
        with pytest.raises(ValueError, match=f"{name} attribute should .* after FastLoader is initialized"):
            setattr(loader, name, getattr(loader, name))


def test_options_that_cannot_work_are_named(tree: Path) -> None:
    dataset: Any = FastImageFolder(tree, STEADY)
    for kind in (DataLoader, BY_PROCESSES):
        with pytest.raises(AssertionError, match="timeout"):
            iter(kind(dataset, timeout=3))
    for value in (-1, 1.5, "many", None):
        with pytest.raises(OptionError, match="prefetch_batches"):
            FastLoader(dataset, prefetch_batches=value)
    for seed in (1.5, "1"):
        with pytest.raises(TypeError):
            FastLoader(dataset, seed=seed)  # type: ignore[arg-type]
    for epoch, error in ((-1, OptionError), (1.5, TypeError), ("1", TypeError)):
        with pytest.raises(error):
            FastLoader(dataset).set_epoch(epoch)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="list"):
        FastLoader([1, 2]).clock


class _Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((2,), float(index)), "name": f"row {index}"}


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from range(first, 20, step)


class _Batches(_Rows):
    def __getitems__(self, indices: Any) -> Any:
        return [(type(indices).__name__, index) for index in indices]


class _Letters(_Rows):
    def __getitem__(self, key: str) -> str:
        return key * 2


UNKNOWN: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "list": (lambda: list(range(10)), {"batch_size": 3}),
    "shuffled list": (lambda: list(range(10)), {"batch_size": 3, "shuffle": True}),
    "dictionaries": (_Rows, {"batch_size": 4, "shuffle": True, "drop_last": True}),
    "iterable": (_Stream, {"batch_size": 3}),
    "iterable without batches": (_Stream, {"batch_size": None}),
    "getitems": (_Batches, {"batch_size": 4}),
    "getitems, tuples of indices": (_Batches, {"batch_sampler": [(0, 1), (2, 3, 4)]}),
    "getitems, arrays of indices": (_Batches, {"batch_sampler": [np.array([0, 1]), np.array([4])]}),
    "strings": (_Letters, {"sampler": ["ab", "c"], "batch_size": None}),
    "batches of strings": (_Letters, {"sampler": ["ab", "c", "d"], "batch_size": 2}),
    "tensor": (lambda: torch.arange(12).reshape(6, 2), {"batch_size": 4}),
    "no batches": (lambda: torch.arange(6), {"batch_size": None, "shuffle": True}),
    "batches as samples": (lambda: torch.arange(6), {"batch_size": None, "sampler": [[0, 1], [5]]}),
}


@pytest.mark.few(10)
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_datasets_behave_as_in_data_loader(name: str, workers: int, seed: int | None) -> None:
    make, arguments = UNKNOWN[name]
    if seed is not None and arguments.get("shuffle"):
        arguments = {**arguments, "shuffle": False}
    torch.manual_seed(3)
    theirs = list(DataLoader(make(), num_workers=workers, **arguments))
    after = torch.get_rng_state()
    torch.manual_seed(3)
    ours = list(FastLoader(make(), num_workers=workers, workers="processes", seed=seed, **arguments))
    assert same(ours, theirs)
    if seed is None:
        assert torch.equal(torch.get_rng_state(), after)
