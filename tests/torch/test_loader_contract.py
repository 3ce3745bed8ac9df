"""A stock ``DataLoader`` over ``FastImageFolder``, and ``FastLoader`` with the arguments of ``DataLoader``."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
    default_collate,
    get_worker_info,
    random_split,
)
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from fastpipe import FastImageFolder, FastLoader
from fastpipe.errors import OptionError

BY_PROCESSES = functools.partial(FastLoader, workers="processes")

pytestmark = pytest.mark.usefixtures("same_generators")

STEADY = v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.ToTensor()])
RANDOM = v1.Compose([v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor()])


def same(a: Any, b: Any) -> bool:
    """Equal in values, types, dtypes, strides and devices."""
    if isinstance(a, torch.Tensor):
        return (
            type(a) is type(b) and a.dtype == b.dtype and a.stride() == b.stride() and a.device == b.device
            and a.requires_grad == b.requires_grad and torch.equal(a, b)
        )  # fmt: skip
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(type(a) is type(b) and a == b)


# ---- a stock DataLoader ----------------------------------------------------------------------------

TOPOLOGIES = [
    {},
    {"num_workers": 1, "multiprocessing_context": "fork"},
    {"num_workers": 2, "multiprocessing_context": "fork"},
    {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    {"num_workers": 1, "multiprocessing_context": "forkserver", "persistent_workers": True},
    {"num_workers": 2, "multiprocessing_context": "forkserver"},
    *(
        # Each starts interpreters that import torch, which takes minutes on a busy machine.
        pytest.param(
            {"num_workers": workers, "multiprocessing_context": method, "persistent_workers": persistent},
            marks=pytest.mark.slow,
        )
        for workers in (1, 2) for method in ("spawn", "forkserver") for persistent in (False, True)
    ),
]  # fmt: skip


def _topology(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values()) or "in process"


@pytest.mark.few(3)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=_topology)
def test_batches_are_those_over_image_folder(tree: Path, topology: dict[str, Any]) -> None:
    method = topology.get("multiprocessing_context", "fork")
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"run it where processes can {method}")
    expected = list(DataLoader(ImageFolder(tree, STEADY), batch_size=4))
    for kind in (DataLoader, BY_PROCESSES):
        processes = {"workers": "processes"} if kind is FastLoader else {}
        loader = kind(FastImageFolder(tree, STEADY), batch_size=4, **topology, **processes)
        for _ in range(2):
            batches = list(loader)
            assert [is_in_shared_memory(image) for image, _ in batches] == [bool(topology)] * 4
            assert same(batches, expected)
        del loader, batches


@pytest.mark.parametrize(
    "transform", [STEADY, v1.PILToTensor(), v2.Compose([v2.ToImage(), v2.CenterCrop(32)])], ids=str
)
@pytest.mark.parametrize("workers", [0, 1])
def test_every_kind_of_tensor_collates_as_from_image_folder(tree: Path, transform: Any, workers: int) -> None:
    for kind in (DataLoader, BY_PROCESSES):
        ours = list(kind(FastImageFolder(tree, transform), batch_size=5, num_workers=workers))
        theirs = list(DataLoader(ImageFolder(tree, transform), batch_size=5, num_workers=workers))
        assert same(ours, theirs)


@pytest.mark.parametrize("workers", [0, 1])
def test_no_transform_and_a_collate_function_of_the_users(tree: Path, workers: int) -> None:
    for kind in (DataLoader, BY_PROCESSES):
        ours = kind(FastImageFolder(tree), batch_size=4, num_workers=workers, collate_fn=_sizes)
        theirs = DataLoader(ImageFolder(tree), batch_size=4, num_workers=workers, collate_fn=_sizes)
        assert list(ours) == list(theirs)


def _sizes(samples: list[Any]) -> list[Any]:
    return [(image.size, image.tobytes(), target, type(samples)) for image, target in samples]


def _views(dataset: Any) -> list[Any]:
    return [
        Subset(dataset, [3, 1, 14, 1]),
        Subset(Subset(dataset, [9, 8, 7, 6, 5]), [4, 0]),
        *random_split(dataset, [8, 7], generator=torch.Generator().manual_seed(1)),
        ConcatDataset([dataset, Subset(dataset, [0, 2])]),
    ]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("view", range(5))
def test_views_of_the_dataset(tree: Path, view: int, workers: int) -> None:
    theirs = DataLoader(_views(ImageFolder(tree, STEADY))[view], batch_size=3, num_workers=workers)
    for kind in (DataLoader, BY_PROCESSES):
        ours = kind(_views(FastImageFolder(tree, STEADY))[view], batch_size=3, num_workers=workers)
        assert same(list(ours), list(theirs))


@pytest.mark.parametrize("kind", [DataLoader, BY_PROCESSES])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_augmentation_differs_by_epoch_by_sample_and_by_worker(
    tree: Path, kind: Any, workers: int, persistent: bool
) -> None:
    if persistent and not workers:
        persistent = False
    dataset = Subset(FastImageFolder(tree, RANDOM), [0] * 8)  # the same file, eight times
    loader = kind(dataset, batch_size=2, num_workers=workers, persistent_workers=persistent)
    seen = {image.numpy().tobytes() for _ in range(3) for images, _ in loader for image in images}
    assert len(seen) == 24


def test_manual_seed_makes_a_stock_loader_reproducible(tree: Path) -> None:
    loader = DataLoader(FastImageFolder(tree, RANDOM), batch_size=4, shuffle=True)
    torch.manual_seed(5)
    first, second = list(loader), list(loader)
    torch.manual_seed(5)
    assert same(list(loader), first)
    assert same(list(loader), second)
    assert not same(first, second)


@pytest.mark.parametrize("kind", [DataLoader, BY_PROCESSES])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_are_kept_are_never_overwritten(tree: Path, kind: Any, workers: int) -> None:
    loader = kind(FastImageFolder(tree, RANDOM), batch_size=2, num_workers=workers)
    kept, copies = [], []
    for _ in range(3):
        for images, targets in loader:
            kept.append((images, targets))
            copies.append((images.clone(), targets.clone()))
    assert same(kept, copies)


def _look(samples: list[Any]) -> tuple[Any, bool]:
    images, _ = default_collate(samples)
    return images, is_in_shared_memory(images)


def is_in_shared_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a mapping that several processes share, whoever made it."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access = line.split()[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return access.endswith("s")
    raise AssertionError("no mapping")


@pytest.mark.parametrize("kind", [DataLoader, BY_PROCESSES])
def test_a_worker_decodes_into_the_memory_that_is_sent(tree: Path, kind: Any) -> None:
    expected = [images for images, _ in DataLoader(ImageFolder(tree, STEADY), batch_size=4)]
    loader = kind(FastImageFolder(tree, STEADY), batch_size=4, num_workers=1, collate_fn=_look)
    for number, (images, was_in_shared_memory) in enumerate(loader):
        assert was_in_shared_memory
        assert is_in_shared_memory(images), "nothing was copied on the way"
        assert torch.equal(images, expected[number])


@pytest.mark.parametrize("kind", [DataLoader, BY_PROCESSES])
def test_pin_memory_without_an_accelerator(tree: Path, kind: Any) -> None:
    if torch.accelerator.is_available():
        pytest.skip("run it on a machine without an accelerator")
    loader = kind(FastImageFolder(tree, STEADY), batch_size=4, pin_memory=True)
    assert [images.is_pinned() for images, _ in loader] == [False] * 4


# ---- FastLoader's face ------------------------------------------------------------------------------


def test_the_signature_begins_as_data_loaders() -> None:
    theirs = list(inspect.signature(DataLoader).parameters.values())
    ours = list(inspect.signature(FastLoader).parameters.values())
    for mine, its in zip(ours, theirs, strict=False):
        assert (mine.name, mine.default, mine.kind) == (its.name, its.default, its.kind)
    extra = ours[len(theirs) :]
    assert [parameter.name for parameter in extra] == [
        "seed",
        "shard",
        "device",
        "dtype",
        "augment",
        "cache",
        "workers",
        "prefetch_batches",
    ]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in extra)
    assert issubclass(FastLoader, DataLoader)


def _init(worker_id: int) -> None:
    pass


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"batch_size": 4, "drop_last": True, "generator": torch.Generator(), "pin_memory": True},
        {"batch_size": None},
        {"num_workers": 2, "timeout": 3, "worker_init_fn": _init, "prefetch_factor": 5, "persistent_workers": True,
         "in_order": False, "collate_fn": list},
        {"num_workers": 1, "multiprocessing_context": multiprocessing.get_context("spawn")},
        {"sampler": [2, 1]},
        {"batch_sampler": [[2, 1], [0]]},
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
    assert (ours.seed, ours.prefetch_batches) == (4, 3)


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


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_what_must_not_be_set_later(tree: Path, name: str) -> None:
    loader = FastLoader(FastImageFolder(tree, STEADY))
    with pytest.raises(
        ValueError, match=f"{name} attribute should not be set after FastLoader is initialized"
    ):
        setattr(loader, name, getattr(loader, name))


def test_a_timeout_needs_workers_as_in_data_loader(tree: Path) -> None:
    for kind in (DataLoader, BY_PROCESSES):
        with pytest.raises(AssertionError, match="timeout"):
            iter(kind(FastImageFolder(tree, STEADY), timeout=3))


@pytest.mark.parametrize("value", [-1, 1.5, "many", None])
def test_bad_values_of_prefetch_batches(tree: Path, value: Any) -> None:
    with pytest.raises(OptionError, match="prefetch_batches"):
        FastLoader(FastImageFolder(tree, STEADY), prefetch_batches=value)


@pytest.mark.parametrize("seed", [1.5, "1"])
def test_bad_values_of_seed(tree: Path, seed: Any) -> None:
    with pytest.raises(TypeError):
        FastLoader(FastImageFolder(tree, STEADY), seed=seed)


@pytest.mark.parametrize(("epoch", "error"), [(-1, OptionError), (1.5, TypeError), ("1", TypeError)])
def test_bad_values_of_set_epoch(tree: Path, epoch: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        FastLoader(FastImageFolder(tree, STEADY)).set_epoch(epoch)


@pytest.mark.parametrize("arguments", [{}, {"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {"batch_size": None},
                                       {"sampler": range(7), "batch_size": 2}, {"batch_sampler": [[1], [2, 3]]}], ids=str)  # fmt: skip
def test_lengths(tree: Path, arguments: dict[str, Any]) -> None:
    dataset = FastImageFolder(tree, STEADY)
    ours, theirs = FastLoader(dataset, **arguments), DataLoader(dataset, **arguments)
    assert len(ours) == len(theirs)
    assert len(iter(ours)) == len(iter(theirs))
    assert len(list(ours)) == len(theirs)


# ---- datasets that fastpipe does not know ------------------------------------------------------------


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


class _Letters:
    def __len__(self) -> int:
        return 3

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
