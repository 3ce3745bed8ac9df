"""Every public object survives being copied: by pickle of each protocol, torch.save, copy, cloudpickle."""

from __future__ import annotations

import copy
import gc
import io
import itertools
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
from augmentations import CHAINS, OPS, seeded
from same import same
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, random_split
from torchvision import datasets
from torchvision import transforms as v1

import fastpipe
import fastpipe.options
import fastpipe.tools
import fastpipe.torch
from fastpipe import FastHDF5Dataset, FastImageFolder, FastLoader, FastPatchDataset, augment, generation

CROP = v1.Compose([v1.RandomResizedCrop(16), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.5] * 3)])
VOLUME = np.arange(12**3, dtype=np.uint16).reshape(12, 12, 12)


class Files(NamedTuple):
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


def row(index: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.random(3)}


def doubled(value: int) -> int:
    return 2 * value


def folder(files: Files, **options: Any) -> FastImageFolder:
    return FastImageFolder(files.images, CROP, threads=2, **options)


DATASETS: dict[str, Callable[[Files], Any]] = {
    "FastImageFolder": folder,
    "FastImageFolder channels last": lambda f: folder(
        f, memory_format=torch.channels_last, cache="ram", classes=fastpipe.Subset(1), bad_samples="skip", seed=3
    ),
    "FastImageFolder disk cache": lambda f: folder(f, cache=fastpipe.Cache("disk", dir=f.folder / "cache")),
    "FastImageFolder staged": lambda f: FastImageFolder(f"file://{f.images}", CROP, stage=f.folder / "stage"),
    "FastImageFolder remote": lambda f: FastImageFolder(f"file://{f.images}", CROP),
    "from_samples": lambda f: FastImageFolder.from_samples(
        [(path, {"age": 1}) for path in sorted(f.images.rglob("*.jpg"))], CROP
    ),
    "from_samples, table": lambda f: FastImageFolder.from_samples(
        [{"file": path, "x": 0.5, "name": "n"} for path in sorted(f.images.rglob("*.jpg"))], CROP,
        image="file", target={"age": "x", "name": "name"},
    ),
    "FastHDF5Dataset": lambda f: FastHDF5Dataset(f.rows, ["x", "y"], threads=2),
    "FastHDF5Dataset cached": lambda f: FastHDF5Dataset([f.rows], {"a": "x"}, cache="ram", seed=2),
    "FastPatchDataset": lambda f: FastPatchDataset(VOLUME, (4, 4, 4), seed=0),
    "FastPatchDataset grid": lambda f: FastPatchDataset(
        VOLUME, (4, 4, 4), sampling=fastpipe.sampling.Grid(), labels=(VOLUME > 9).astype(np.uint8)
    ),
    "random_split": lambda f: random_split(folder(f), [0.5, 0.5])[0],
    "ConcatDataset": lambda f: ConcatDataset([folder(f)] * 2),
    "StackDataset": lambda f: StackDataset(folder(f), folder(f)),
}  # fmt: skip
LOADERS: dict[str, Callable[[Files], Any]] = {
    "FastLoader": lambda f: FastLoader(folder(f), 2),
    "FastLoader seed": lambda f: FastLoader(folder(f), 2, shuffle=True, seed=3),
    "FastLoader shuffle": lambda f: FastLoader(folder(f), 2, shuffle=True),
    "FastLoader shard": lambda f: FastLoader(folder(f), 2, shuffle=True, seed=3, shard=fastpipe.Shard(0, 2)),
    "FastLoader groups": lambda f: FastLoader(
        FastHDF5Dataset(f.rows, "x"), 4, shuffle=fastpipe.Shuffle(window=2, unit="group"), seed=1
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
    "accelerate": lambda f: fastpipe.accelerate(DataLoader(datasets.ImageFolder(f.images, CROP), 2)),
    "watch": lambda f: fastpipe.watch(DataLoader(datasets.ImageFolder(f.images, CROP), 2)),
}  # fmt: skip
OTHERS: dict[str, Callable[[Files], Any]] = {
    "BadSamples": lambda f: fastpipe.BadSamples("skip", max_errors=3), "Cache": lambda f: fastpipe.Cache("ram"),
    "Decode": lambda f: fastpipe.Decode(exif=True), "Shard": lambda f: fastpipe.Shard(0, 2),
    "Subset": lambda f: fastpipe.Subset(2), "Stage": lambda f: fastpipe.Stage(f.folder / "other"),
    "Shuffle": lambda f: fastpipe.Shuffle(window=3, unit="group"),
    "ZScore": lambda f: fastpipe.ZScore(nonzero=True), "Rescale": lambda f: fastpipe.Rescale((-1, 1), (1, 99)),
    "Uniform": lambda f: fastpipe.sampling.Uniform(5), "Foreground": lambda f: fastpipe.sampling.Foreground(5),
    "Grid": lambda f: fastpipe.sampling.Grid(2), "Positions": lambda f: fastpipe.sampling.Positions([(1, 2, 3)]),
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
# Of each type the first.
AUGMENTATIONS: dict[str, Any] = {type(op).__name__: op for op in reversed(OPS.values())} | {
    "Compose": CHAINS["SimCLR"], "nnunet_default": CHAINS["nnU-Net"],
    "Parameters": augment.ColorJitter(0.3).draw((2, 3, 8, 8)),
}  # fmt: skip
_OF_IMAGES = {
    "ColorJitter", "Compose", "RandomApply", "RandomErasing", "RandomHorizontalFlip", "RandomResizedCrop",
}  # fmt: skip

# Functions, types, bases and modules, of which there is nothing to copy; and what other tests make.
_NOT_OBJECTS = {
    "fastpipe": {"autotune", "autotune_batch_size", "errors", "sampling", "segment_reduce", "stitch"},
    "fastpipe.torch": {"accelerate_trainer", "prepare", "segment_reduce", "stitch"}, "fastpipe.options": set(),
    "fastpipe.augment": {"Augmentation", "BatchTransform", "from_torchvision", "preview"},
    "fastpipe.sampling": {"Sampling"}, "fastpipe.generation": {"Generated", "ProbeReport"},
    "fastpipe.tools": {
        "Advice", "BatchSizes", "EpochTimes", "Profiling", "Report", "Tuning", "WatchedLoader", "autotune",
        "autotune_batch_size",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "module",
    [fastpipe, fastpipe.torch, fastpipe.options, augment, fastpipe.sampling, generation, fastpipe.tools],
)
def test_every_public_object_is_among_these(module: Any) -> None:
    known = {*DATASETS, *LOADERS, *OTHERS, *AUGMENTATIONS}
    missing = set(module.__all__) - known - _NOT_OBJECTS[module.__name__]
    assert not missing, "a new public name: say above how it is made, or that there is nothing to copy"


def saved_by_torch(value: Any) -> Any:
    """As a Lightning module saves its hyperparameters."""
    file = io.BytesIO()
    torch.save({"hyper_parameters": {"value": value}}, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)["hyper_parameters"]["value"]


WAYS: dict[str, Callable[[Any], Any]] = {
    **{f"protocol {number}": lambda value, number=number: pickle.loads(pickle.dumps(value, number))
       for number in range(pickle.HIGHEST_PROTOCOL + 1)},
    "torch.save": saved_by_torch, "copy": copy.copy, "deepcopy": copy.deepcopy,
    "cloudpickle": lambda value: pickle.loads(cloudpickle.dumps(value)),
}  # fmt: skip


def samples(dataset: Any) -> Any:
    torch.manual_seed(5)
    return [dataset[index] for index in range(3)]


def batches(loader: Any, count: int | None = 2) -> Any:
    torch.manual_seed(5)
    return list(itertools.islice(loader, count))


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
    assert (type(fresh), len(fresh)) == (type(made), len(made))
    assert " at 0x" in repr(made) or repr(fresh) == repr(made)
    first = samples(made)
    used = WAYS[way](made)
    assert same(samples(fresh), first) and same(samples(used), first)
    if hasattr(made, "close"):
        made.close()
        assert same(samples(WAYS[way](made)), first)


@pytest.mark.few(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOADERS)
def test_a_copied_loader_gives_the_same_batches(files: Files, name: str, way: str) -> None:
    made = LOADERS[name](files)
    fresh = WAYS[way](made)
    assert type(fresh) is type(made)
    first = batches(made)
    used = WAYS[way](made)
    assert same(batches(fresh), first)
    assert same(batches(used), batches(made))  # of the next epoch


@pytest.mark.few(10)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OTHERS)
def test_copied_options_plans_and_results_are_equal(files: Files, name: str, way: str) -> None:
    made = OTHERS[name](files)
    made_again = WAYS[way](made)
    assert type(made_again) is type(made)
    assert " at 0x" in repr(made) or repr(made_again) == repr(made)
    if name in ("group_batches", "batch_sampler"):
        assert same(batches(made_again, None), batches(made, None))
    if name == "memoize":
        assert made_again(4) == made(4) == 8


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_a_copied_augmentation_is_equal(name: str) -> None:
    made = AUGMENTATIONS[name]
    images = torch.rand(2, 3, 40, 40, generator=seeded())
    for way, copied in WAYS.items():
        made_again = copied(made)
        assert type(made_again) is type(made) and repr(made_again) == repr(made), way
        if name in _OF_IMAGES:
            assert same(made(images, generator=seeded(1)), made_again(images, generator=seeded(1))), way


@pytest.mark.parametrize("name", fastpipe.errors.__all__)
def test_a_copied_error_is_equal(name: str) -> None:
    error = getattr(fastpipe.errors, name)("what, where, remedy")
    error.index, error.__notes__ = 3, ["while loading sample 3"]
    for way, copied in WAYS.items():
        again = copied(error)
        assert (type(again), str(again), again.args) == (type(error), str(error), error.args), way
        assert vars(again) == vars(error), way


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_says_that_it_has_no_copy(files: Files, workers: int, way: str) -> None:
    for dataset in (folder(files), list(range(8))):
        iterator = iter(FastLoader(dataset, 2, num_workers=workers))
        words = r"iterator of a FastLoader cannot be copied.*state_dict"
        with pytest.raises(NotImplementedError, match=words):
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
    assert again._iterator is None and again.dataset is loader.dataset
    assert set(os.listdir("/proc/self/fd")) <= before  # others may have closed theirs


def test_a_shallow_copy_keeps_the_scripts_own_sampler() -> None:
    sampler = [3, 1, 2]
    assert copy.copy(FastLoader(list(range(8)), sampler=sampler)).sampler is sampler
