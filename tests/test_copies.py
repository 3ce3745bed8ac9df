"""Every public object survives being copied: by pickle of each protocol, torch.save, copy, cloudpickle."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, random_split
from torchvision import datasets
from torchvision import transforms as v1

import fastpipe
import fastpipe.options
import fastpipe.torch
from fastpipe import (
    BadSamples,
    Cache,
    Decode,
    FastHDF5Dataset,
    FastImageFolder,
    FastLoader,
    FastPatchDataset,
    Shard,
    Shuffle,
    Stage,
    Subset,
    accelerate,
    augment,
    errors,
    generation,
    sampling,
    tools,
)

CROP = v1.Compose([v1.RandomResizedCrop(16), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.5] * 3)])
VOLUME = np.arange(12**3, dtype=np.uint16).reshape(12, 12, 12)


class Files(NamedTuple):
    """Data of the objects."""

    images: Path
    rows: Path
    folder: Path


@pytest.fixture(scope="module")
def files(photo_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("copies")
    with h5py.File(folder / "rows.h5", "w") as file:
        file.create_dataset("x", data=np.arange(240.0).reshape(24, 10), chunks=(4, 10), compression="gzip")
        file["y"] = np.arange(24)
    return Files(photo_tree, folder / "rows.h5", folder)


# ---- all public objects ----------------------------------------------------------------------------


def row(index: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.random(3)}


def doubled(value: int) -> int:
    return 2 * value


def folder(files: Files, **options: Any) -> FastImageFolder:
    return FastImageFolder(files.images, CROP, threads=2, **options)


DATASETS: dict[str, Callable[[Files], Any]] = {
    "FastImageFolder": folder,
    "FastImageFolder channels last": lambda f: folder(
        f, memory_format=torch.channels_last, cache="ram", classes=Subset(1), bad_samples="skip", seed=3
    ),
    "FastImageFolder disk cache": lambda f: folder(f, cache=Cache("disk", dir=f.folder / "cache")),
    "FastImageFolder staged": lambda f: FastImageFolder(f"file://{f.images}", CROP, stage=f.folder / "stage"),
    "FastImageFolder remote": lambda f: FastImageFolder(f"file://{f.images}", CROP),
    "from_samples": lambda f: FastImageFolder.from_samples([(path, {"age": 1}) for path in sorted(f.images.rglob("*.jpg"))], CROP),
    "FastHDF5Dataset": lambda f: FastHDF5Dataset(f.rows, ["x", "y"], threads=2),
    "FastHDF5Dataset cached": lambda f: FastHDF5Dataset([f.rows], {"a": "x"}, cache="ram", seed=2),
    "FastPatchDataset": lambda f: FastPatchDataset(VOLUME, (4, 4, 4), seed=0),
    "FastPatchDataset grid": lambda f: FastPatchDataset(
        VOLUME, (4, 4, 4), sampling=sampling.Grid(), labels=(VOLUME > 9).astype(np.uint8)
    ),
    "random_split": lambda f: random_split(folder(f), [0.5, 0.5])[0],
    "ConcatDataset": lambda f: ConcatDataset([folder(f)] * 2),
    "StackDataset": lambda f: StackDataset(folder(f), folder(f)),
}  # fmt: skip
LOADERS: dict[str, Callable[[Files], Any]] = {
    "FastLoader": lambda f: FastLoader(folder(f), 2),
    "FastLoader seed": lambda f: FastLoader(folder(f), 2, shuffle=True, seed=3),
    "FastLoader shuffle": lambda f: FastLoader(folder(f), 2, shuffle=True),
    "FastLoader shard": lambda f: FastLoader(folder(f), 2, shuffle=True, seed=3, shard=Shard(0, 2)),
    "FastLoader groups": lambda f: FastLoader(
        FastHDF5Dataset(f.rows, "x"), 4, shuffle=Shuffle(window=2, unit="group"), seed=1
    ),
    "FastLoader workers": lambda f: FastLoader(
        folder(f), 2, num_workers=1, workers="processes", persistent_workers=True, seed=1
    ),
    "FastLoader ImageFolder": lambda f: FastLoader(datasets.ImageFolder(f.images, CROP), 2),
    "FastLoader list": lambda f: FastLoader(list(range(8)), 2),
    "FastLoader device": lambda f: FastLoader(
        folder(f), 2, device="cpu", dtype=torch.bfloat16, augment=augment.RandomHorizontalFlip(), seed=1
    ),
    "FastLoader split": lambda f: FastLoader(
        FastImageFolder(f.images, v1.Compose([v1.Resize((16, 16)), v1.ColorJitter(0.3), v1.ToTensor()])),
        2, augment="split", seed=1,
    ),
    "accelerate": lambda f: accelerate(DataLoader(datasets.ImageFolder(f.images, CROP), 2)),
    "watch": lambda f: fastpipe.watch(DataLoader(datasets.ImageFolder(f.images, CROP), 2)),
}  # fmt: skip
OTHERS: dict[str, Callable[[Files], Any]] = {
    "BadSamples": lambda f: BadSamples("skip", max_errors=3), "Cache": lambda f: Cache("ram"),
    "Decode": lambda f: Decode(exif=True), "Shard": lambda f: Shard(0, 2), "Subset": lambda f: Subset(2),
    "Shuffle": lambda f: Shuffle(window=3, unit="group"), "Stage": lambda f: Stage(f.folder / "other"),
    "Uniform": lambda f: sampling.Uniform(5), "Foreground": lambda f: sampling.Foreground(5),
    "Grid": lambda f: sampling.Grid(2), "Positions": lambda f: sampling.Positions([(1, 2, 3)]),
    "EpochTimer": lambda f: fastpipe.torch.EpochTimer(),
    "group_batches": lambda f: fastpipe.group_batches(range(8), 2, groups=[0] * 4 + [1] * 4),
    "batch_sampler": lambda f: FastHDF5Dataset(f.rows, "x").batch_sampler(4, shuffle=True),
    "FastImageFolder.plan": lambda f: folder(f).plan, "FastLoader.plan": lambda f: FastLoader(folder(f)).plan,
    "FastHDF5Dataset.plan": lambda f: FastHDF5Dataset(f.rows, "x").plan,
    "FastPatchDataset.plan": lambda f: FastPatchDataset(VOLUME, (4, 4, 4), seed=0).plan,
    "memoize": lambda f: fastpipe.memoize(doubled, dir=f.folder / "memo"),
    "generate": lambda f: fastpipe.generate(row, 4, f.folder / "made.h5", seed=0, workers=0),
    "probe": lambda f: generation.probe(row, 4, f.folder / "probed.h5", seed=0, workers=0),
    "profile": lambda f: fastpipe.profile(DataLoader(range(64), 4), lambda batch: None, seconds=0.05),
}  # fmt: skip
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ColorJitter": (0.3,), "Compose": ([augment.RandomHorizontalFlip(), augment.ColorJitter(0.3)],),
    "GaussianBlur": (3,), "MotionMirror": ([(0, 1)],), "Normalize": ([0.5], [0.5]), "RandomAffine": (10,),
    "RandomApply": (augment.GaussianBlur(3),), "RandomResizedCrop": (8,), "RandomRotation": (10,),
    "SpecAugment": (1, 2, 1, 2), "TimeShift": (3,),
}  # fmt: skip


def _made(name: str) -> Any:
    return getattr(augment, name)(*_ARGUMENTS.get(name, ()))


_KINDS = [name for name in augment.__all__ if inspect.isclass(getattr(augment, name))]
AUGMENTATIONS: dict[str, Callable[[], Any]] = {
    **{
        name: functools.partial(_made, name)
        for name in _KINDS
        if name not in ("Augmentation", "BatchTransform")
    },
    "Parameters": lambda: augment.ColorJitter(0.3).draw((2, 3, 8, 8)),
    "nnunet_default": lambda: augment.nnunet_default((8, 8, 8)),
}

_OF_IMAGES = {
    "ColorJitter",
    "Compose",
    "RandomApply",
    "RandomErasing",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
}

# Functions, types, bases and modules, of which there is nothing to copy; and what other tests make.
_NOT_OBJECTS = {
    "fastpipe": {"autotune", "autotune_batch_size", "errors", "sampling", "segment_reduce", "stitch"},
    "fastpipe.torch": {"prepare", "segment_reduce", "stitch"}, "fastpipe.options": set(),
    "fastpipe.augment": {"Augmentation", "BatchTransform", "from_torchvision", "preview"},
    "fastpipe.sampling": {"Sampling"}, "fastpipe.generation": {"Generated", "ProbeReport"},
    "fastpipe.tools": {
        "Advice", "BatchSizes", "EpochTimes", "Profiling", "Report", "Tuning", "WatchedLoader", "autotune",
        "autotune_batch_size",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "module", [fastpipe, fastpipe.torch, fastpipe.options, augment, sampling, generation, tools]
)
def test_every_public_object_is_among_these(module: Any) -> None:
    known = {*DATASETS, *LOADERS, *OTHERS, *AUGMENTATIONS}
    missing = set(module.__all__) - known - _NOT_OBJECTS[module.__name__]
    assert not missing, "a new public name: say above how it is made, or that there is nothing to copy"


# ---- the ways ----------------------------------------------------------------------------------------


def saved_by_torch(value: Any) -> Any:
    """As a Lightning module saves its hyperparameters."""
    file = io.BytesIO()
    torch.save({"hyper_parameters": {"value": value}}, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)["hyper_parameters"]["value"]


WAYS: dict[str, Callable[[Any], Any]] = {
    **{
        f"protocol {number}": lambda value, number=number: pickle.loads(pickle.dumps(value, number))
        for number in range(pickle.HIGHEST_PROTOCOL + 1)
    },
    "torch.save": saved_by_torch, "copy": copy.copy, "deepcopy": copy.deepcopy,
    "cloudpickle": lambda value: pickle.loads(cloudpickle.dumps(value)),
}  # fmt: skip


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return np.array_equal(one, other)


def samples(dataset: Any) -> Any:
    torch.manual_seed(5)
    return [dataset[index] for index in range(3)]


def batches(loader: Any) -> Any:
    torch.manual_seed(5)
    iterator = iter(loader)
    return [next(iterator), next(iterator)]


def drawn(sampler: Any) -> Any:
    torch.manual_seed(5)
    return list(sampler)


@pytest.fixture(autouse=True)
def released(same_generators: None) -> Iterator[None]:
    yield
    gc.collect()


@pytest.mark.few(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DATASETS)
def test_a_copied_dataset_gives_the_same_samples(files: Files, name: str, way: str) -> None:
    made = DATASETS[name](files)
    fresh = WAYS[way](made)
    assert (type(fresh), len(fresh), repr(fresh)) == (type(made), len(made), repr(made)) or " at 0x" in repr(
        made
    )
    first = samples(made)
    used = WAYS[way](made)
    assert equal(samples(fresh), first)
    assert equal(samples(used), first)
    if hasattr(made, "close"):
        made.close()
        assert equal(samples(WAYS[way](made)), first)


@pytest.mark.few(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOADERS)
def test_a_copied_loader_gives_the_same_batches(files: Files, name: str, way: str) -> None:
    made = LOADERS[name](files)
    fresh = WAYS[way](made)
    assert type(fresh) is type(made)
    first = batches(made)
    used = WAYS[way](made)
    assert equal(batches(fresh), first)
    assert equal(batches(used), batches(made))  # of the next epoch


@pytest.mark.few(10)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OTHERS)
def test_copied_options_plans_and_results_are_equal(files: Files, name: str, way: str) -> None:
    made = OTHERS[name](files)
    made_again = WAYS[way](made)
    assert type(made_again) is type(made)
    assert " at 0x" in repr(made) or repr(made_again) == repr(made)
    if name in ("group_batches", "batch_sampler"):
        assert equal(drawn(made_again), drawn(made))
    if name == "memoize":
        assert made_again(4) == made(4) == 8


@pytest.mark.few(12)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_a_copied_augmentation_is_equal(name: str, way: str) -> None:
    made = AUGMENTATIONS[name]()
    made_again = WAYS[way](made)
    assert type(made_again) is type(made)
    assert repr(made_again) == repr(made)
    if name in _OF_IMAGES:
        images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        results = [one(images, generator=torch.Generator().manual_seed(1)) for one in (made, made_again)]
        assert equal(*results)


@pytest.mark.few(36)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", errors.__all__)
def test_a_copied_error_is_equal(name: str, way: str) -> None:
    error = getattr(errors, name)("what, where, remedy")
    error.index = 3
    error.__notes__ = ["while loading sample 3"]
    again = WAYS[way](error)
    assert (type(again), str(again), again.args) == (type(error), str(error), error.args)
    assert vars(again) == vars(error)


# ---- what has no copy --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_says_that_it_has_no_copy(files: Files, workers: int, way: str) -> None:
    for dataset in (folder(files), list(range(8))):
        iterator = iter(FastLoader(dataset, 2, num_workers=workers))
        with pytest.raises(
            NotImplementedError, match=r"iterator of a FastLoader cannot be copied.*state_dict"
        ):
            WAYS[way](iterator)


@pytest.mark.parametrize("way", WAYS)
def test_a_running_profile_says_that_it_has_no_copy(way: str) -> None:
    with pytest.raises(TypeError, match=r"a Profiling watches .*loaders of this process.*copy its report"):
        WAYS[way](fastpipe.profile())


def test_a_copied_loader_shares_no_workers_and_no_descriptors(files: Files) -> None:
    loader = LOADERS["FastLoader workers"](files)
    batches(loader)
    before = set(os.listdir("/proc/self/fd"))
    again = copy.copy(loader)
    assert again._iterator is None
    assert again.dataset is loader.dataset
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_shallow_copy_keeps_the_scripts_own_sampler() -> None:
    sampler = [3, 1, 2]
    assert copy.copy(FastLoader(list(range(8)), sampler=sampler)).sampler is sampler
