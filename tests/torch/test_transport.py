"""Batches of the script's own datasets, sent by worker processes through memory that is used again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from same import same
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from fastpipe import FastLoader


class Mixed(Dataset[Any]):
    """Samples with values of every kind, some of them large."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        big = torch.full((3, 40, 50), float(index))
        return {
            "big": big, "turned": big.permute(2, 0, 1), "image": tv_tensors.Image(big),
            "bytes": torch.full((300, 300), index, dtype=torch.uint8), "half": big.to(torch.bfloat16),
            "array": np.full((64, 64), index, np.int16), "small": torch.tensor([index]), "empty": torch.empty(0),
            "number": index, "text": f"{index}", "pair": (big[:1], [index * 1.5]),
        }  # fmt: skip


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (Mixed()[index] for index in range(5))


def as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def own_stack(samples: list[Any]) -> Any:
    big = torch.stack([sample["big"] for sample in samples])
    return big, big[1:], [sample["turned"] for sample in samples], big.new_zeros(3)


def through_collate(samples: list[Any]) -> Any:
    return default_collate(samples), len(samples)


@pytest.mark.parametrize(
    ("collate", "context"),
    [
        (None, "fork"),
        (as_they_are, "fork"),
        (own_stack, "fork"),
        (through_collate, "fork"),
        (own_stack, "spawn"),
    ],
)
def test_batches_equal_those_of_a_data_loader(collate: Any, context: str) -> None:
    options: dict[str, Any] = {"num_workers": 2, "collate_fn": collate, "multiprocessing_context": context}
    expected = list(DataLoader(Mixed(), 4, **options))
    assert same(list(FastLoader(Mixed(), 4, **options)), expected)  # all batches are kept


def test_batches_of_a_stream_equal_those_of_a_data_loader() -> None:
    assert same(list(FastLoader(Stream(), 2, num_workers=1)), list(DataLoader(Stream(), 2, num_workers=1)))


def test_a_batch_that_is_kept_or_changed_is_never_written_again() -> None:
    loader = FastLoader(Mixed(), 2, num_workers=1, persistent_workers=True)
    kept = []
    for _ in range(3):
        for number, batch in enumerate(loader):
            batch["bytes"] += 1
            if number % 3 == 0:
                kept.append((2 * number, batch["bytes"][0], batch["big"]))
    for first, image, big in kept:
        assert torch.equal(image, torch.full((300, 300), first + 1, dtype=torch.uint8))
        assert big[0, 0, 0, 0] == first


def test_views_of_one_tensor_share_it_as_with_a_data_loader() -> None:
    def shared(loader: Callable[..., Any]) -> list[bool]:
        return [
            big.untyped_storage().data_ptr() == rest.untyped_storage().data_ptr()
            for big, rest, *_ in loader(Mixed(), 4, num_workers=1, collate_fn=own_stack)
        ]

    assert shared(FastLoader) == shared(DataLoader)


class Gradients(Mixed):
    def __getitem__(self, index: int) -> Any:
        return torch.ones(99, 99, requires_grad=True)


class Uneven(Mixed):
    def __getitem__(self, index: int) -> Any:
        return torch.ones(99, 99 + index)


@pytest.mark.parametrize("dataset", [Gradients(), Uneven()])
def test_errors_of_stacking_are_torchs(dataset: Any) -> None:
    messages = []
    for loader in (DataLoader, FastLoader):
        with pytest.raises(RuntimeError) as caught:
            list(loader(dataset, 4, num_workers=1))
        messages.append(str(caught.value).splitlines()[-1])
    assert messages[0] == messages[1]


# ---- images whose first transform is the script's own --------------------------------------------------


class TwoViews:
    def __init__(self, base: Callable[[Any], Any]) -> None:
        self.base = base

    def __call__(self, image: Any) -> list[Any]:
        return [self.base(image), self.base(image)]


_VIEW = v2.Compose([v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), v2.ToImage()])


@pytest.mark.parametrize("wrapped", [False, True])
def test_views_are_those_of_a_data_loader_with_its_random_numbers(tree: Path, wrapped: bool) -> None:
    dataset: Any = ImageFolder(str(tree), TwoViews(_VIEW))
    if wrapped:
        dataset = torch.utils.data.Subset(dataset, [4, 0, 3])

    def batches(loader: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(5)
        return list(loader(dataset, 2, shuffle=True, num_workers=2))

    assert same(batches(FastLoader), batches(DataLoader))
    plan = FastLoader(dataset, 2, num_workers=2).plan
    assert not plan.is_fast and "its transform is the script's own" in repr(plan)


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2, "workers": "threads"}, {"seed": 1},
                                     {"num_workers": 2, "cache": "ram"}, {"num_workers": 2, "seed": 1}])  # fmt: skip
def test_views_are_made_by_fastpipe_where_threads_or_a_seed_or_a_cache_are_wanted(
    tree: Path, options: Any
) -> None:
    loader = FastLoader(ImageFolder(str(tree), TwoViews(_VIEW)), 2, **options)
    assert loader.plan.is_fast
    assert [len(views) for views, _ in loader] == [2] * len(loader)
