"""A sample that a script keeps holds its own memory: as much as with a stock loader, not its batch's."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from same import same
from streams import BY_PROCESSES
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, PILToTensor, ToTensor, v2

from fastpipe import FastHDF5Dataset, FastImageFolder, FastLoader, FastPatchDataset, accelerate
from fastpipe.sampling import Grid
from fastpipe.torch.samples import collate_unfinished
from fastpipe.torch.workers import WorkerCollate

KEPT = 2  # which sample of a batch is kept


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, photo_tree: Path) -> Path:
    made = tmp_path_factory.mktemp("kept")
    values = np.random.default_rng(0).random((8, 3, 32, 32), dtype=np.float32)
    with h5py.File(made / "x.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(4, 3, 32, 32), compression="gzip")
        file["y"] = np.arange(8)
        file["both"] = np.zeros(8, [("a", "i4"), ("b", "f8", 64)])
    np.save(made / "v.npy", values[:, 0])
    (made / "images").symlink_to(photo_tree)
    return made


def _images(transform: Any, **options: Any) -> Callable[[Path], Dataset[Any]]:
    return lambda folder: FastImageFolder(folder / "images", transform, **options)


def _rows(key: Any, **options: Any) -> Callable[[Path], Dataset[Any]]:
    return lambda folder: FastHDF5Dataset(folder / "x.h5", key, **options)


def _patches(**options: Any) -> Callable[[Path], Dataset[Any]]:
    return lambda folder: FastPatchDataset(folder / "v.npy", (1, 32, 32), sampling=Grid(), **options)


SIZED = v2.Resize((24, 24))
DATASETS: dict[str, Callable[[Path], Dataset[Any]]] = {
    "images": _images(Compose([SIZED, ToTensor()])),
    "images, bytes": _images(Compose([SIZED, PILToTensor()])),
    "images, channels last": _images(Compose([SIZED, ToTensor()]), memory_format=torch.channels_last),
    "images, kept": _images(Compose([SIZED, ToTensor()]), cache="ram"),
    "images, v2": _images(v2.Compose([v2.ToImage(), SIZED, v2.ToDtype(torch.float16, scale=True)])),
    "images, own transform": _images(Compose([SIZED, ToTensor(), lambda image: image * 2])),
    "images of two folders": lambda folder: ConcatDataset([DATASETS["images"](folder)] * 2),
    "images beside rows": lambda folder: StackDataset(
        DATASETS["images"](folder), FastHDF5Dataset([folder / "x.h5"] * 3, "x")
    ),
    "rows": _rows("x"), "rows and labels": _rows(["x", "y"]), "rows and elements": _rows(["x", "both"]),
    "rows, named": _rows({"a": "x", "b": "both"}), "rows of elements": _rows("both"),
    "rows, own transform": _rows(["x", "y"], transform=torch.from_numpy),
    "rows, kept": _rows(["x", "y"], cache="ram"),
    "rows of two files": lambda folder: ConcatDataset([DATASETS["rows"](folder) for _ in "ab"]),
    "patches": _patches(), "patches, own transform": _patches(transform=torch.from_numpy),
}  # fmt: skip
LOADERS: dict[str, Callable[..., Any]] = {
    "FastLoader": FastLoader, "DataLoader": DataLoader,
    "accelerate": lambda dataset, *args, **named: accelerate(DataLoader(dataset, *args, **named)),
}  # fmt: skip


def _leaves(sample: Any) -> Iterator[Any]:
    if isinstance(sample, dict):
        sample = list(sample.values())
    if isinstance(sample, (tuple, list)):
        for one in sample:
            yield from _leaves(one)
    elif isinstance(sample, (torch.Tensor, np.ndarray, np.void)):
        yield sample


def _held(value: Any) -> int:
    """Bytes of the memory that an array or a tensor keeps."""
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    while isinstance(value.base, (np.ndarray, np.void)):
        value = value.base
    # Under it may be what a pickle was read from; never what a batch lies in.
    return int(value.nbytes if value.base is None else memoryview(value.base).nbytes)


def _first_values(samples: Any) -> list[Any]:
    return [next(_leaves(sample)) for sample in samples]


def _views(samples: Any) -> list[Any]:
    return [value[None] for value in _first_values(samples) if value.shape]


COLLATES = {
    "list": list, "tuple": tuple, "same": lambda samples: samples, "values": _first_values, "views": _views
}  # fmt: skip


def _check(sample: Any) -> None:
    for value in _leaves(sample):
        assert _held(value) <= value.nbytes + 64
    torch.save(sample, file := io.BytesIO())
    nbytes = sum(value.nbytes for value in _leaves(sample))
    assert len(file.getvalue()) < 1.6 * nbytes + 4000  # of arrays torch writes some bytes as two


@pytest.mark.few(12)
@pytest.mark.parametrize("collate", COLLATES)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("dataset", DATASETS)
def test_a_kept_sample_holds_its_own_memory(folder: Path, dataset: str, loader: str, collate: str) -> None:
    made = DATASETS[dataset](folder)
    _check(made[KEPT])
    for _ in range(2):  # the second time more is known of samples
        batches = LOADERS[loader](made, 4, collate_fn=COLLATES[collate])
        for sample in [batch[KEPT] for batch in batches if batch[KEPT:]]:
            _check(sample)


@pytest.mark.parametrize("dataset", DATASETS)
def test_samples_without_batches_hold_their_own_memory(folder: Path, dataset: str) -> None:
    loader = FastLoader(DATASETS[dataset](folder), batch_size=None, collate_fn=COLLATES["same"])
    for _, sample in zip(range(3), loader, strict=False):
        _check(sample)


@pytest.mark.few(1)
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("dataset", ["images", "images, v2", "rows and labels", "patches"])
def test_a_sample_of_a_worker_holds_its_own_memory(folder: Path, dataset: str, context: str) -> None:
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": context}
    for batch in BY_PROCESSES(DATASETS[dataset](folder), 4, collate_fn=list, **options):
        for sample in batch:
            _check(sample)


def test_a_kept_sample_that_was_not_read_holds_its_own_memory(folder: Path) -> None:
    made = DATASETS["images"](folder)
    for loader in (FastLoader(made, 4, collate_fn=list), DataLoader(made, 4, collate_fn=list)):
        kept = [batch[KEPT] for batch in loader if len(batch) > KEPT]
        made.__getitems__([0])  # type: ignore[attr-defined]
        for image in (tuple.__getitem__(sample, 0) for sample in kept):
            assert _held(image) == image.nbytes and image._base is None


@pytest.mark.parametrize("kind", [FastLoader, DataLoader])
def test_a_kept_sample_holds_no_other_target(folder: Path, kind: type[DataLoader[Any]]) -> None:
    made: list[weakref.ref[Any]] = []

    def new_target(_: int) -> Any:
        made.append(weakref.ref(target := {"a set"}))
        return target

    dataset = FastImageFolder(folder / "images", Compose([SIZED, ToTensor()]), new_target)
    kept = [batch[0] for batch in kind(dataset, 4, collate_fn=list)]
    gc.collect()
    assert sum(target() is not None for target in made) == len(kept) < len(made)


@pytest.mark.parametrize(
    "collate",
    [default_collate, WorkerCollate(default_collate), lambda samples: collate_unfinished(samples).batch],
    ids=["stock loader", "worker", "device"],
)
@pytest.mark.parametrize("dataset", ["images", "images, v2", "rows", "rows and labels", "patches"])
def test_samples_that_are_not_kept_are_collated_without_a_copy(
    folder: Path, dataset: str, collate: Any
) -> None:
    samples = DATASETS[dataset](folder).__getitems__(range(4))  # type: ignore[attr-defined]
    whole = samples._parts[0].array if hasattr(samples, "_parts") else samples[0].whole.tensor
    batch = collate(samples)
    images = batch[0] if isinstance(batch, list) else batch
    assert images.data_ptr() == torch.as_tensor(whole).data_ptr()


@pytest.mark.parametrize("loader", LOADERS)
def test_a_filter_before_default_collate_copies_nothing(folder: Path, loader: str) -> None:
    """The recipe that leaves out samples which are None."""
    seen: list[int] = []

    def collate(samples: Any) -> Any:
        samples = [sample for sample in samples if sample is not None]
        seen.append(samples[0].whole.tensor.data_ptr())
        return default_collate(samples)

    for images, _ in LOADERS[loader](DATASETS["images"](folder), 4, collate_fn=collate):
        assert images.data_ptr() == seen.pop()


def _darkened(samples: Any) -> Any:
    for sample in samples:
        next(_leaves(sample))[...] = 0
    return default_collate(samples)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("dataset", ["images", "rows and labels", "rows of two files"])
def test_changes_by_a_collate_function_are_collated(folder: Path, dataset: str, loader: str) -> None:
    for batch in LOADERS[loader](DATASETS[dataset](folder), 4, collate_fn=_darkened):
        assert not next(_leaves(batch)).any()


def test_a_sample_adds_and_multiplies_as_a_tuple_does(folder: Path) -> None:
    transform = Compose([SIZED, ToTensor()])
    ours = FastImageFolder(folder / "images", transform).__getitems__(range(4))
    theirs = [ImageFolder(str(folder / "images"), transform)[number] for number in range(4)]
    for one, other in zip(ours, theirs, strict=True):
        for change in (
            lambda s: s + ("x",), lambda s: ("x",) + s, lambda s: s * 2, lambda s: 2 * s, lambda s: s[:1]
        ):  # fmt: skip
            got = change(one)
            assert same(got, change(other))
            _check(got)
