"""``accelerate``: a script's own loader, with the same batches; and the way back, ``reference``."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from streams import OwnSampler, Stream, stream
from torch.utils import data
from torch.utils.data import ConcatDataset, DataLoader, Subset, WeightedRandomSampler
from torchvision import datasets
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import pil_loader

from fastpipe import Cache, FastImageFolder, FastLoader, Shard, accelerate
from fastpipe.errors import OptionError

STEADY = v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.2] * 3)])
RANDOM = v1.Compose([v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor()])


def pair(dataset: Any, **options: Any) -> tuple[DataLoader[Any], FastLoader[Any]]:
    stock: DataLoader[Any] = DataLoader(dataset, **options)
    return stock, accelerate(stock)


def test_all_objects_and_options_are_kept_there_and_back(tree: Path) -> None:
    options: dict[str, Any] = {
        "pin_memory": True, "pin_memory_device": "cuda", "in_order": False, "num_workers": 2, "timeout": 3,
        "drop_last": True, "generator": torch.Generator(), "collate_fn": list, "worker_init_fn": print,
        "prefetch_factor": 3, "persistent_workers": True, "sampler": WeightedRandomSampler([1.0] * 15, 6),
        "batch_size": 3, "dataset": ImageFolder(tree, STEADY),
    }  # fmt: skip
    fast = accelerate(DataLoader(**options))
    assert type(fast) is FastLoader
    for loader in (fast, fast.reference()):
        assert {name: getattr(loader, name) for name in options} == options
    cache = Cache("disk")
    assert accelerate(FastLoader(options["dataset"], 4, cache=cache)).cache is cache


DATASETS: dict[str, Any] = {
    "Subset": lambda a, b: Subset(a, [9, 3, 3, -1, 0]),
    "random_split": lambda a, b: data.random_split(a, [6, 9], torch.Generator().manual_seed(0))[1],
    "one folder twice": lambda a, b: ConcatDataset([Subset(a, range(4)), a]),
    "all of them": lambda a, b: Subset(
        ConcatDataset([Subset(b, [1, 0]), a, ConcatDataset([b, a])]), [0, 22, 1, -3, 9, 2]
    ),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("build", DATASETS.values(), ids=DATASETS)
@pytest.mark.parametrize("workers", [0, 1])
def test_wrapped_folders_are_fast_too(tree: Path, photo_tree: Path, build: Any, workers: int) -> None:
    for transform in (STEADY, v1.Compose([v1.Resize((32, 32)), v1.ToTensor()])):
        dataset = build(ImageFolder(tree, STEADY), ImageFolder(photo_tree, transform))
        stock, fast = pair(dataset, batch_size=4, num_workers=workers)
        assert fast.plan.is_fast and stream(fast) == stream(stock)


def test_samples_of_different_kinds_are_collated_by_the_script(tree: Path, photo_tree: Path) -> None:
    mixed = ConcatDataset([ImageFolder(tree, STEADY), ImageFolder(photo_tree)])  # tensors, and PIL's images
    collate = lambda samples: [repr(np.asarray(image)) for image, _ in samples]  # noqa: E731
    stock, fast = pair(mixed, batch_size=5, sampler=[14, 15, 16, 0, 20], collate_fn=collate)
    assert fast.plan.is_fast and list(fast) == list(stock)


def test_changes_of_the_users_dataset_take_effect(tree: Path) -> None:
    dataset = ImageFolder(tree, STEADY)
    stock, fast = pair(dataset, batch_size=4)
    assert stream(fast) == stream(stock)
    dataset.transform = v1.Compose([v1.Resize((20, 20)), v1.ToTensor()])
    dataset.samples = dataset.samples[::-1]
    dataset.target_transform = lambda target: target * 10
    assert stream(fast) == stream(stock)
    dataset.loader = lambda path: Image.new("RGB", (30, 30))
    assert "loads images with '<lambda>'" in repr(fast.plan)
    assert stream(fast) == stream(stock)


class _Own(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        return index, super().__getitem__(index)[0].mean()


class _OwnBatches(ImageFolder):
    def __getitems__(self, indices: Any) -> Any:
        return [(torch.zeros(1), index) for index in indices]


CODE: dict[str, tuple[Any, str, int]] = {
    "samples": (lambda tree: _Own(tree, STEADY), "_Own has its own __getitem__", 2),
    "batches": (lambda tree: _OwnBatches(tree, STEADY), "_OwnBatches has its own __getitems__", 0),
    "loader": (
        lambda tree: ImageFolder(tree, STEADY, loader=lambda path: Image.new("RGB", (40, 40))), "loads images with", 2
    ),
    "own class": (lambda tree: range(9), "range is neither a dataset of fastpipe's nor an ImageFolder", 0),
    "Subset": (lambda tree: Subset(_Own(tree, STEADY), [1, 2]), "_Own has its own __getitem__", 0),
    "Concat": (lambda tree: ConcatDataset([ImageFolder(tree, STEADY), _Own(tree, STEADY)]), "_Own has its own", 2),
    "FakeData": (lambda tree: datasets.FakeData(9, (3, 8, 8), transform=v1.ToTensor()), "FakeData is neither", 2),
}  # fmt: skip


@pytest.mark.parametrize(("make", "why", "workers"), CODE.values(), ids=CODE)
def test_code_of_the_script_wins(tree: Path, make: Any, why: str, workers: int) -> None:
    dataset = make(tree)
    collate = (lambda samples: str(samples)) if isinstance(dataset, ConcatDataset) else None
    stock, fast = pair(dataset, batch_size=4, shuffle=True, num_workers=workers, collate_fn=collate)
    assert why in repr(fast.plan) and not fast.plan.is_fast
    assert fast.num_workers == workers and stream(fast, 0) == stream(stock, 0)


def test_subclasses_that_load_like_imagefolder_are_fast(tree: Path) -> None:
    found = ["class_002", "class_000"], {"class_002": 0, "class_000": 1}
    own_classes: Any = type("OwnClasses", (ImageFolder,), {"find_classes": lambda self, directory: found})
    for dataset in (own_classes(tree, STEADY), ImageFolder(tree, STEADY, loader=pil_loader)):
        stock, fast = pair(dataset, batch_size=4)
        assert fast.plan.is_fast and stream(fast) == stream(stock)


def test_loaders_with_code_of_their_own_are_refused(tree: Path) -> None:
    for base, name in ((DataLoader, "set_epoch"), (FastLoader, "__iter__")):
        kind = type("Own", (base,), {name: lambda self: iter([])})
        with pytest.raises(OptionError, match=f"Own has its own {name}"):
            accelerate(kind(range(9)))
    with pytest.raises(OptionError, match=r"use FastLoader\(dataset, …\)"):
        accelerate(range(9))  # type: ignore[arg-type]
    stock = DataLoader(ImageFolder(tree, STEADY), 4)
    assert stream(accelerate(type("Renamed", (DataLoader,), {})(stock.dataset, 4))) == stream(stock)


def test_iterable_datasets_pass_through_without_options_that_have_no_effect() -> None:
    stock, fast = pair(Stream(), batch_size=2, drop_last=True)
    assert stream(fast) == stream(stock) == stream(fast.reference())
    for options in ({"device": "cpu"}, {"augment": print}):
        with pytest.raises(OptionError, match=f"{next(iter(options))}= has no effect on an IterableDataset"):
            accelerate(stock, **options)  # type: ignore[arg-type]


def test_a_seed_replaces_a_plain_shuffle_only(tree: Path) -> None:
    dataset = ImageFolder(tree, RANDOM)
    shuffled = accelerate(DataLoader(dataset, 4, shuffle=True), seed=3)
    expected = FastLoader(FastImageFolder(tree, RANDOM), 4, shuffle=True, seed=3)
    assert stream(shuffled, 1) == stream(expected, 2)
    weighted = WeightedRandomSampler([1.0] * 15, 15)
    assert accelerate(DataLoader(dataset, 4, sampler=weighted), seed=3).sampler is weighted
    seeded = DataLoader(FastImageFolder(tree, STEADY, seed=3), 15, shuffle=True)
    assert stream(seeded, 0) == stream(accelerate(seeded), 0), "a dataset's seed leaves the sampler's order"


def test_a_shard_replaces_the_sampler(tree: Path) -> None:
    stock: DataLoader[Any] = DataLoader(ImageFolder(tree, RANDOM), 4, shuffle=True)
    fast = accelerate(stock, seed=3, shard=Shard(1, 2))
    assert isinstance(fast.sampler, data.DistributedSampler) and len(fast) == len(list(fast)) == 2
    with pytest.raises(OptionError, match="shard= and a sampler"):
        accelerate(DataLoader(stock.dataset, sampler=[1]), shard=Shard(0, 2))
    with pytest.raises(OptionError, match="needs a seed"):
        accelerate(stock, shard=Shard(0, 2))


@pytest.mark.parametrize("workers", [0, 2])
def test_image_folders_keep_decoded_images(tree: Path, tmp_path: Path, workers: int) -> None:
    stock = DataLoader(Subset(ImageFolder(tree, STEADY), range(12)), 4, num_workers=workers)
    for _ in range(2):
        loader = accelerate(stock, cache=Cache("disk", dir=tmp_path))
        assert stream(loader) == stream(stock)
        (twin,) = loader._adapted.values()
        kept = twin._running().cache
        assert kept is not None and len(kept.store.entries()) == 12


def test_a_cache_that_would_have_no_effect_is_refused(tree: Path) -> None:
    for dataset in (FastImageFolder(tree, STEADY), list(range(5))):
        for make in (FastLoader, lambda dataset, **options: accelerate(DataLoader(dataset), **options)):
            with pytest.raises(OptionError, match="no effect"):
                make(dataset, cache="ram")


def test_the_plan_says_why(tree: Path) -> None:
    part = data.random_split(ImageFolder(tree, STEADY), [6, 9])[0]
    plan = repr(accelerate(DataLoader(part, 4, shuffle=True), seed=3).plan)
    for words in ("Subset of ImageFolder", "region decode", "shuffled by seed=3", "threads in this process"):
        assert words in plan
    weighted = FastLoader(ImageFolder(tree), 4, sampler=WeightedRandomSampler([1.0], 3), seed=1)
    assert "WeightedRandomSampler's, augmentation by seed=1" in repr(weighted.plan)


@pytest.mark.parametrize(
    ("size", "options"),
    [(4, {}), (None, {"seed": 5}), (4, {"seed": 5, "shard": Shard(1, 2)}), (None, {"seed": 5, "shard": Shard(1, 2)}),
     (4, {"shard": Shard(0, 2, "eval")})],
    ids=str,
)  # fmt: skip
def test_the_reference_has_the_same_samples_in_the_same_order(tree: Path, size: Any, options: Any) -> None:
    fast = FastLoader(FastImageFolder(tree, STEADY), size, shuffle="seed" in options, **options)
    stock = fast.reference()
    assert type(stock) is DataLoader
    assert stock.dataset.samples == list(fast.dataset.samples)
    assert repr(stock.dataset) == repr(ImageFolder(tree, STEADY))
    for epoch in range(2):
        assert stream(stock, epoch) == stream(fast, epoch)
    list(fast)
    assert stream(fast.reference(), 3) == stream(fast, 3), "it begins with the loader's next epoch"


CHANGES: dict[str, Any] = {
    "batch_size": lambda loader: setattr(loader.batch_sampler, "batch_size", 5),
    "drop_last": lambda loader: setattr(loader.batch_sampler, "drop_last", True),
    "sampler": lambda loader: setattr(loader.batch_sampler, "sampler", [3, 1, 7]),
    "batch_sampler": lambda loader: object.__setattr__(loader, "batch_sampler", [[1, 2], [5, 3, 3]]),
    "no batches": lambda loader: object.__setattr__(loader, "batch_sampler", None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "seed": 5}], ids=str)
def test_scripts_may_change_batches_of_a_loader(change: Any, options: dict[str, Any]) -> None:
    fast = FastLoader(range(9), 2, collate_fn=str, **options)
    change(fast)
    plan, stock = repr(fast.plan), fast.reference()
    assert stream(stock, 1) == stream(fast, 1)
    assert plan == repr(fast.plan), "said before the first epoch as well"
    if "seed" not in options:
        own, fast = (kind(range(9), 2, collate_fn=str, **options) for kind in (DataLoader, FastLoader))
        change(own), change(fast)
        assert stream(own, 1) == stream(fast, 1) == stream(accelerate(own), 1)
        assert len(own) == len(fast) == len(accelerate(own))


def _multi_epochs(kind: Any) -> Any:
    """A loader whose batch sampler never ends, as those of timm and YOLO."""

    class MultiEpochs(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            once = self.batch_sampler
            self._DataLoader__initialized = False
            self.batch_sampler = OwnSampler(lambda: (batch for _ in count() for batch in once), len(once))
            self._DataLoader__initialized = True
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler)

        def __iter__(self) -> Any:
            for _ in range(len(self)):
                yield next(self.iterator)

    return MultiEpochs


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_may_have_batches_without_end(tree: Path, workers: int) -> None:
    for dataset in (ImageFolder(tree, STEADY), range(9)):
        found = []
        for kind in (DataLoader, FastLoader):
            torch.manual_seed(0)
            loader = _multi_epochs(kind)(dataset, 4, shuffle=True, num_workers=workers)
            found.append([batch for _ in range(3) for batch in stream(loader)])
            del loader
        assert found[0] == found[1]
