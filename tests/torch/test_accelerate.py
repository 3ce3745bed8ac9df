"""``accelerate``: a script's own loader, with the same batches; and the way back, ``reference``."""

from __future__ import annotations

import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torchvision import datasets
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import pil_loader

from fastpipe import Cache, FastImageFolder, FastLoader, Shard, accelerate
from fastpipe.bench.synthetic import photo_tree
from fastpipe.errors import BadSampleError, OptionError

STEADY = v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.2] * 3)])
RANDOM = v1.Compose([v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor()])


@pytest.fixture(scope="module")
def other_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_tree(tmp_path_factory.mktemp("other"), classes=3, per_class=2, sizes=(60, 70), seed=5)


def plain(value: Any) -> Any:
    """A batch as something that can be compared."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return (type(value), [plain(item) for item in value]) if isinstance(value, (list, tuple)) else value


def stream(loader: Any, seed: int = 0) -> list[Any]:
    torch.manual_seed(seed)
    return [plain(batch) for batch in loader]


def pair(dataset: Any, transform: Any = STEADY, **options: Any) -> tuple[DataLoader[Any], FastLoader[Any]]:
    if callable(dataset):
        dataset = dataset(transform)
    stock: DataLoader[Any] = DataLoader(dataset, **options)
    return stock, accelerate(stock)


class _Named(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(7))


Sample = namedtuple("Sample", "image name")


def _named(samples: list[Any]) -> Any:
    return Sample(torch.stack([image for image, _ in samples]), [str(target) for _, target in samples])


def _dict(samples: list[Any]) -> Any:
    images, targets = default_collate(samples)
    return {"x": images, "first": images[:1], "y": targets}


OPTIONS: dict[str, dict[str, Any]] = {
    "in order": {"batch_size": 4},
    "shuffled": {"batch_size": 4, "shuffle": True},
    "drop_last": {"batch_size": 4, "shuffle": True, "drop_last": True},
    "generator": {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "list sampler": {"batch_size": 4, "sampler": [3, 14, 14, 0, 7]},
    "weighted": {"batch_size": 4, "sampler": WeightedRandomSampler([1.0, 2.0, 3.0] * 5, 20)},
    "subset": {"batch_size": 4, "sampler": SubsetRandomSampler([1, 2, 3, 9, 13])},
    "batch sampler": {"batch_sampler": BatchSampler(SequentialSampler(range(15)), 4, True)},
    "batches": {"batch_sampler": [[1], [2, 3, 3], [14, 0]]},
    "no batches": {"batch_size": None, "shuffle": True},
    "dicts": {"batch_size": 4, "collate_fn": _dict},
    "named tuples": {"batch_size": 4, "collate_fn": _named, "drop_last": True},
    "workers": {"batch_size": 4, "shuffle": True, "num_workers": 2, "persistent_workers": True},
    "workers and dicts": {"batch_size": 4, "collate_fn": _dict, "num_workers": 1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_same_batches_as_the_loader_given(tree: Path, options: dict[str, Any]) -> None:
    dataset = ImageFolder(tree, STEADY)
    expected = []
    for make in (
        lambda it: it,
        accelerate,
        lambda it: accelerate(it).reference(),
        lambda it: accelerate(accelerate(it)),
    ):
        if "generator" in options:
            options["generator"].manual_seed(5)
        loader = make(DataLoader(dataset, **options))
        expected.append([*stream(loader, 1), *stream(loader, 2)])
        assert len(loader) == len(DataLoader(dataset, **options))
    assert expected[0] == expected[1] == expected[2] == expected[3]


def test_the_loaders_own_objects_are_kept(tree: Path) -> None:
    sampler, generator = WeightedRandomSampler([1.0] * 15, 6), torch.Generator()
    stock: DataLoader[Any] = DataLoader(
        ImageFolder(tree, STEADY), 3, sampler=sampler, collate_fn=_dict, generator=generator, drop_last=True,
        num_workers=2, worker_init_fn=print, prefetch_factor=3, persistent_workers=True, timeout=9,
    )  # fmt: skip
    fast = accelerate(stock)
    assert type(fast) is FastLoader
    for name in ("dataset", "sampler", "collate_fn", "generator", "worker_init_fn"):
        assert getattr(fast, name) is getattr(stock, name)
    for name in (
        "batch_size",
        "drop_last",
        "num_workers",
        "prefetch_factor",
        "persistent_workers",
        "timeout",
    ):
        assert getattr(fast, name) == getattr(stock, name)


DATASETS: dict[str, Any] = {
    "Subset": lambda a, b: Subset(a, [9, 3, 3, -1, 0]),
    "random_split": lambda a, b: random_split(a, [6, 9], torch.Generator().manual_seed(0))[1],
    "ConcatDataset": lambda a, b: ConcatDataset([a, b]),
    "one folder twice": lambda a, b: ConcatDataset([Subset(a, range(4)), a]),
    "all of them": lambda a, b: Subset(
        ConcatDataset([Subset(b, [1, 0]), a, ConcatDataset([b, a])]), [0, 22, 1, -3, 9, 2]
    ),
}


@pytest.mark.parametrize("build", DATASETS.values(), ids=DATASETS)
@pytest.mark.parametrize("workers", [0, 1])
def test_wrapped_folders_are_fast_too(tree: Path, other_tree: Path, build: Any, workers: int) -> None:
    for transforms in ((STEADY, STEADY), (STEADY, v1.Compose([v1.Resize((32, 32)), v1.ToTensor()]))):
        dataset = build(
            *(ImageFolder(root, each) for root, each in zip((tree, other_tree), transforms, strict=True))
        )
        stock, fast = pair(dataset, batch_size=4, num_workers=workers)
        assert fast.plan.is_fast
        assert stream(fast) == stream(stock)


def test_samples_of_different_kinds_in_one_concat(tree: Path, other_tree: Path) -> None:
    """Tensors beside PIL images: nothing to share, and the user's collate_fn gets what it would."""
    mixed = ConcatDataset([ImageFolder(tree, STEADY), ImageFolder(other_tree)])

    def kinds(samples: list[Any]) -> list[Any]:
        return [np.asarray(image).tobytes() for image, _ in samples]

    stock, fast = pair(mixed, batch_size=5, sampler=[14, 15, 16, 0, 20], collate_fn=kinds)
    assert list(fast) == list(stock)


def test_what_wrong_indices_raise(tree: Path) -> None:
    for index, kind in ((21, IndexError), (-16, (ValueError, IndexError))):
        for dataset in (ImageFolder(tree, STEADY), ConcatDataset([ImageFolder(tree, STEADY)])):
            for loader in pair(dataset, sampler=[index]):
                with pytest.raises(kind):
                    list(loader)


def test_changes_of_the_users_dataset_show(tree: Path) -> None:
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


# ---- what keeps its own code ------------------------------------------------------------------------


class _Own(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        return index, super().__getitem__(index)[0].mean()


class _OwnBatches(ImageFolder):
    def __getitems__(self, indices: Any) -> Any:
        return [(torch.zeros(1), index) for index in indices]


class _OwnClasses(ImageFolder):
    def find_classes(self, directory: Any) -> Any:
        classes, indices = super().find_classes(directory)
        return classes[::-1], {name: number for number, name in enumerate(classes[::-1])}


class _Squares:
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        return index**2


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda tree: _Own(tree, STEADY), "_Own has its own __getitem__"),
        (lambda tree: _OwnBatches(tree, STEADY), "_OwnBatches has its own __getitems__"),
        (
            lambda tree: ImageFolder(tree, STEADY, loader=lambda path: Image.new("RGB", (40, 40))),
            "loads images with",
        ),
        (lambda tree: _Squares(), "_Squares is no ImageFolder"),
        (lambda tree: Subset(_Own(tree, STEADY), [1, 2]), "_Own has its own __getitem__"),
        (lambda tree: ConcatDataset([ImageFolder(tree, STEADY), _Own(tree, STEADY)]), "_Own has its own"),
        (lambda tree: datasets.FakeData(9, (3, 8, 8), transform=v1.ToTensor()), "FakeData is no ImageFolder"),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_code_of_the_script_wins(tree: Path, make: Any, why: str, workers: int) -> None:
    dataset = make(tree)
    collate = (lambda samples: str(samples)) if isinstance(dataset, ConcatDataset) else None
    stock, fast = pair(dataset, batch_size=4, shuffle=True, num_workers=workers, collate_fn=collate)
    assert why in repr(fast.plan)
    assert not fast.plan.is_fast
    assert fast.num_workers == workers
    assert stream(fast) == stream(stock)


@pytest.mark.parametrize(
    "make",
    [lambda tree: _OwnClasses(tree, STEADY), lambda tree: ImageFolder(tree, STEADY, loader=pil_loader)],
)
def test_subclasses_that_load_like_imagefolder_are_fast(tree: Path, make: Any) -> None:
    stock, fast = pair(make(tree), batch_size=4)
    assert fast.plan.is_fast
    assert stream(fast) == stream(stock)


def test_iterable_datasets_pass_through() -> None:
    stock, fast = pair(_Named(), batch_size=3)
    assert [batch.tolist() for batch in fast] == [batch.tolist() for batch in stock]


# ---- with more than the loader had ------------------------------------------------------------------


def test_a_seed_takes_the_place_of_a_plain_shuffle_only(tree: Path) -> None:
    dataset = ImageFolder(tree, RANDOM)
    shuffled = accelerate(DataLoader(dataset, 4, shuffle=True), seed=3)
    assert stream(shuffled, 1) == stream(
        FastLoader(FastImageFolder(tree, RANDOM), 4, shuffle=True, seed=3), 2
    )
    weighted = WeightedRandomSampler([1.0] * 15, 15)
    assert accelerate(DataLoader(dataset, 4, sampler=weighted), seed=3).sampler is weighted


def test_a_shard(tree: Path) -> None:
    stock: DataLoader[Any] = DataLoader(ImageFolder(tree, RANDOM), 4, shuffle=True)
    fast = accelerate(stock, seed=3, shard=Shard(1, 2))
    assert isinstance(fast.sampler, DistributedSampler)
    assert len(fast) == len(list(fast)) == 2
    with pytest.raises(OptionError, match="shard= and a sampler"):
        accelerate(DataLoader(stock.dataset, sampler=[1]), shard=Shard(0, 2))
    with pytest.raises(OptionError, match="needs a seed"):
        accelerate(stock, shard=Shard(0, 2))


class _Counting(DataLoader[Any]):
    def __iter__(self) -> Any:
        return enumerate(super().__iter__())


class _Renamed(DataLoader[Any]):
    """Adds nothing."""


def test_loaders_that_are_no_plain_ones(tree: Path) -> None:
    dataset = ImageFolder(tree, STEADY)
    with pytest.raises(OptionError, match="_Counting has its own __iter__"):
        accelerate(_Counting(dataset))
    with pytest.raises(OptionError, match=r"use FastLoader\(dataset, …\)"):
        accelerate(dataset)  # type: ignore[arg-type]
    assert stream(accelerate(_Renamed(dataset, 4))) == stream(DataLoader(dataset, 4))


# ---- plan and reference -----------------------------------------------------------------------------


def test_the_plan_says_what_was_done_and_why(tree: Path) -> None:
    text = repr(
        accelerate(
            DataLoader(random_split(ImageFolder(tree, STEADY), [6, 9])[0], 4, shuffle=True), seed=3
        ).plan
    )
    for part in ("Subset of ImageFolder", "region decode", "shuffled by seed=3", "threads in this process"):
        assert part in text
    assert "WeightedRandomSampler's, augmentation by seed=1" in repr(
        FastLoader(ImageFolder(tree), 4, sampler=WeightedRandomSampler([1.0], 3), seed=1).plan
    )


@pytest.mark.parametrize(
    "options", [{}, {"seed": 5}, {"seed": 5, "shard": Shard(1, 2)}, {"shard": Shard(0, 2, "eval")}]
)
@pytest.mark.parametrize("size", [4, None])
def test_the_reference_has_the_same_samples_in_the_same_order(tree: Path, options: Any, size: Any) -> None:
    if size is None and "shard" in options and options["shard"].mode == "eval":
        return  # refused, see below
    fast = FastLoader(FastImageFolder(tree, STEADY), size, shuffle="seed" in options, **options)
    stock = fast.reference()
    assert type(stock) is DataLoader
    assert type(stock.dataset) is ImageFolder
    assert stock.dataset.samples == list(fast.dataset.samples)
    assert repr(stock.dataset) == repr(ImageFolder(tree, STEADY))
    for epoch in range(2):
        assert stream(stock, epoch) == stream(fast, epoch)
    list(fast)
    assert stream(fast.reference(), 3) == stream(fast, 3), "it begins with the loader's next epoch"


def _other_batches(loader: Any) -> None:
    object.__setattr__(loader, "batch_sampler", [[1, 2], [5, 3, 3]])


CHANGES: dict[str, Any] = {
    "batch_size": lambda loader: setattr(loader.batch_sampler, "batch_size", 5),
    "drop_last": lambda loader: setattr(loader.batch_sampler, "drop_last", True),
    "sampler": lambda loader: setattr(loader.batch_sampler, "sampler", [3, 1, 7]),
    "batch_sampler": _other_batches,
    "no batches": lambda loader: object.__setattr__(loader, "batch_sampler", None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "seed": 5}], ids=str)
def test_the_reference_and_the_plan_know_of_changed_batches(change: Any, options: Any) -> None:
    fast = FastLoader(_Squares(), 2, collate_fn=str, **options)
    change(fast)
    plan, stock = repr(fast.plan), fast.reference()
    assert stream(stock, 1) == stream(fast, 1)
    assert plan == repr(fast.plan), "said before the first epoch as well"


def test_the_reference_of_an_iterable_dataset() -> None:
    fast = FastLoader(_Named(), 3, drop_last=True)
    assert stream(fast.reference()) == stream(fast)


def test_the_reference_has_all_options(tree: Path) -> None:
    options: dict[str, Any] = {
        "pin_memory": True, "pin_memory_device": "cuda", "in_order": False, "num_workers": 2, "timeout": 3,
        "drop_last": True, "generator": torch.Generator(), "collate_fn": _dict, "worker_init_fn": print,
        "prefetch_factor": 3, "persistent_workers": True,
    }  # fmt: skip
    stock = FastLoader(ImageFolder(tree, STEADY), 4, **options).reference()
    assert {name: getattr(stock, name) for name in options} == options


def test_bad_files_are_named(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "broken.jpg").write_bytes(b"nothing")
    for workers in (0, 1):
        try:
            list(FastLoader(ImageFolder(tmp_path, STEADY), num_workers=workers, workers="processes"))
        except BadSampleError as error:  # which is gone behind the block, and the workers with it
            assert re.search(r"sample 0 could not be read.*broken\.jpg", str(error))
        else:
            raise AssertionError("no error")


# ---- scripts that change a loader behind its back --------------------------------------------------


class _Repeating:
    """A batch sampler that never ends, as timm's and YOLO's loaders put one into their place."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Any:
        while True:
            yield from iter(self.sampler)


def _multi_epochs(kind: Any) -> Any:
    class MultiEpochs(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._DataLoader__initialized = False
            self.batch_sampler = _Repeating(self.batch_sampler)
            self._DataLoader__initialized = True
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Any:
            for _ in range(len(self)):
                yield next(self.iterator)

    return MultiEpochs


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_whose_batches_never_end(tree: Path, workers: int) -> None:
    for dataset in (ImageFolder(tree, STEADY), _Squares()):
        streams = []
        for kind in (DataLoader, FastLoader):
            torch.manual_seed(0)
            loader = _multi_epochs(kind)(dataset, 4, shuffle=True, num_workers=workers)
            streams.append([plain(batch) for _ in range(3) for batch in loader])
            del loader
        assert streams[0] == streams[1]


def test_a_batch_sampler_that_was_changed(tree: Path) -> None:
    for name, value in (("batch_size", 5), ("drop_last", True), ("sampler", [3, 1])):
        for make in (lambda it: it, accelerate, lambda it: FastLoader(it.dataset, it.batch_size)):
            stock: DataLoader[Any] = DataLoader(_Squares(), 2)
            setattr(stock.batch_sampler, name, value)
            made = make(stock)
            if type(made) is FastLoader and made.batch_sampler is not stock.batch_sampler:
                setattr(made.batch_sampler, name, value)
            assert len(made) == len(stock)
            assert [batch.tolist() for batch in made] == [batch.tolist() for batch in stock]


class _WithEpoch(DataLoader[Any]):
    def set_epoch(self, epoch: int) -> None:
        self.dataset.epoch = epoch  # type: ignore[attr-defined]


def test_what_a_subclass_adds_is_not_lost_without_a_word(tree: Path) -> None:
    with pytest.raises(OptionError, match="_WithEpoch has its own set_epoch"):
        accelerate(_WithEpoch(_Squares()))

    class Own(FastLoader[Any]):
        def __iter__(self) -> Any:
            return iter([])

    with pytest.raises(OptionError, match="Own has its own __iter__"):
        accelerate(Own(_Squares()))


def test_a_datasets_seed_leaves_the_order_of_a_sampler(tree: Path) -> None:
    dataset = FastImageFolder(tree, STEADY, seed=3)
    drawn = []
    for make in (lambda it: it, accelerate):
        torch.manual_seed(0)
        drawn.append([label.tolist() for _, label in make(DataLoader(dataset, 15, shuffle=True))])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"augment": print}])
def test_what_has_no_effect_on_iterables_is_refused(options: Any) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(options))}= has no effect on an IterableDataset"):
        accelerate(DataLoader(_Named()), **options)


# ---- cache= ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_image_folders_keep_what_was_decoded(tree: Path, tmp_path: Path, workers: int) -> None:
    cache = Cache("disk", dir=tmp_path)
    stock = DataLoader(Subset(ImageFolder(tree, STEADY), range(12)), 4, num_workers=workers)
    loader = accelerate(stock, cache=cache)
    assert loader.cache is cache
    assert stream(loader) == stream(stock)
    (twin,) = loader._adapted.values()
    kept = twin._running().cache
    assert kept is not None
    assert len(kept.store.entries()) == 12
    again = accelerate(stock, cache=cache)
    assert stream(again) == stream(stock)
    assert len(again._source().bases[0]._running().cache.store.entries()) == 12  # type: ignore[union-attr]


def test_a_fast_loader_keeps_its_cache_when_it_is_accelerated(tree: Path, tmp_path: Path) -> None:
    cache = Cache("disk", dir=tmp_path)
    loader = accelerate(FastLoader(ImageFolder(tree, STEADY), 4, cache=cache))
    assert loader.cache is cache


@pytest.mark.parametrize("make", [lambda tree: FastImageFolder(tree, STEADY), lambda tree: list(range(5))])
def test_a_cache_that_would_have_no_effect_is_refused(tree: Path, make: Any) -> None:
    with pytest.raises(OptionError, match="no effect"):
        FastLoader(make(tree), 4, cache="ram")
    with pytest.raises(OptionError, match="no effect"):
        accelerate(DataLoader(make(tree), 4), cache="ram")
