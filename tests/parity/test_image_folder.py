"""FastImageFolder beside torchvision's ImageFolder, on photographs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from same import same
from streams import plain
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from fastpipe import Decode, FastImageFolder
from fastpipe.core.types import Key
from fastpipe.torch.randomness import keyed

NORMALIZE = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
EVALUATION = [v1.Resize(256), v1.CenterCrop(224), v1.ToTensor(), v1.Normalize(*NORMALIZE)]
MOST = 48  # samples compared; a tree of real photographs may be larger


def some(dataset: Any) -> list[int]:
    """Indices spread over the whole dataset."""
    return np.unique(np.linspace(0, len(dataset) - 1, MOST).astype(int)).tolist()  # type: ignore[no-any-return]


def pair(root: Path, transform: Any = None, **options: Any) -> tuple[FastImageFolder, ImageFolder]:
    return FastImageFolder(root, transform, **options), ImageFolder(root, transform)


def test_the_index_is_the_same(photos: Path) -> None:
    fast, stock = pair(photos)
    assert len(fast) == len(stock) and fast.loader is stock.loader
    for name in ("classes", "class_to_idx", "extensions"):
        assert getattr(fast, name) == getattr(stock, name)
    for name in ("samples", "targets", "imgs"):
        assert list(getattr(fast, name)) == getattr(stock, name)


@pytest.mark.few(2)
@pytest.mark.parametrize("backend", ["auto", "nvimgcodec", "simplejpeg", "pillow", "dali"])
def test_evaluation_is_the_same_to_the_last_bit(photos: Path, backend: Any) -> None:
    fast, stock = pair(photos, v1.Compose(EVALUATION), decode=Decode(backend=backend))
    indices = some(stock)
    expected = [stock[index] for index in indices]
    assert same(list(map(tuple, fast.__getitems__(indices))), expected)
    assert same([fast[index] for index in indices], expected)


TRANSFORMS: dict[str, Any] = {
    "none": None,
    "tensor": v1.ToTensor(),
    "resize": v1.Resize(100),
    "bicubic": v1.Compose([v1.Resize((90, 120), v1.InterpolationMode.BICUBIC), v1.PILToTensor()]),
    "grey": v1.Compose([v1.CenterCrop(600), v1.Grayscale(1), v1.ToTensor()]),
    "v2": v2.Compose(
        [v2.Resize(128), v2.CenterCrop(96), v2.ToImage(), v2.ToDtype(torch.float16, scale=True)]
    ),
    "unknown inside": v1.Compose([v1.Resize(64), v1.ColorJitter(), v1.CenterCrop(60), v1.ToTensor()]),
    "callable": lambda image: np.asarray(image).mean(),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_other_transforms_are_the_same(photos: Path, name: str) -> None:
    fast, stock = pair(photos, TRANSFORMS[name])
    indices = some(stock)[::4]
    made, expected = list(map(tuple, fast.__getitems__(indices))), [stock[index] for index in indices]
    assert plain(made) == plain(expected)
    assert [type(image) for image, _ in made] == [type(image) for image, _ in expected]


@pytest.mark.parametrize("tv", [v1, v2], ids=["v1", "v2"])
def test_augmentation_is_torchvision_s_with_the_drawn_parameters(photos: Path, tv: Any) -> None:
    convert = [v1.ToTensor()] if tv is v1 else [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    transform = tv.Compose(
        [tv.RandomResizedCrop(224), tv.RandomHorizontalFlip(), *convert, tv.Normalize(*NORMALIZE)]
    )
    fast = FastImageFolder(photos, transform)
    bare = ImageFolder(photos)
    indices = some(bare)
    key = Key(11, 3, np.arange(len(indices)))
    with keyed(key):
        samples = fast.__getitems__(indices)
    drawn = zip(indices, fast.plan.draw(key).tolist(), strict=True)
    expected = [fast.plan.reference(bare[index][0], u) for index, u in drawn]
    assert plain([made for made, _ in samples]) == plain(expected) and type(samples[0][0]) is type(
        expected[0]
    )


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_batches_are_the_same(photos: Path, memory_format: torch.memory_format) -> None:
    fast, stock = pair(photos, v1.Compose(EVALUATION))
    fast = FastImageFolder(photos, v1.Compose(EVALUATION), memory_format=memory_format)
    options: dict[str, Any] = {"batch_size": 7, "sampler": some(stock)}
    made = list(DataLoader(fast, **options))
    assert all(images.is_contiguous(memory_format=memory_format) for images, _ in made)
    assert same(
        [[images.contiguous(), targets] for images, targets in made], list(DataLoader(stock, **options))
    )


CHANGES: dict[str, Callable[[Any], object]] = {
    "size": lambda d: setattr(d.transform.transforms[1], "size", (50, 40)),
    "p": lambda d: setattr(d.transform.transforms[2], "p", 1.0),
    "append": lambda d: d.transform.transforms.append(v1.Normalize(*NORMALIZE)),
    "insert": lambda d: d.transform.transforms.insert(1, v1.Grayscale(3)),
    "unknown": lambda d: d.transform.transforms.insert(2, lambda image: image.rotate(90)),
    "interpolation": lambda d: setattr(d.transform.transforms[0], "interpolation", v1.InterpolationMode.NEAREST),
    "samples": lambda d: setattr(d, "samples", list(d.samples)[::-1]),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_script_are_followed(photos: Path, change: str) -> None:
    parts = [v1.Resize(64), v1.CenterCrop(60), v1.RandomHorizontalFlip(0.0), v1.ToTensor()]
    fast, stock = pair(photos, v1.Compose(parts))
    assert same(fast[0], stock[0])
    CHANGES[change](fast)
    stock.transform, stock.transforms, stock.samples = fast.transform, fast.transforms, fast.samples
    assert same([fast[0], tuple(fast.__getitems__([0])[0])], [stock[0]] * 2)


def test_a_transform_put_in_place_later(photos: Path) -> None:
    fast, stock = pair(photos)
    assert same(fast[0], stock[0])
    for dataset in (fast, stock):
        dataset.transform = v1.Compose(EVALUATION)
    assert same(fast[0], stock[0])


def test_the_repr_of_the_plan_says_where_each_step_runs(photos: Path) -> None:
    transform = v1.Compose([*EVALUATION[:3], v1.RandomErasing(), len])
    text = repr(FastImageFolder(photos, transform).plan)
    notes = {line.split("(")[0].strip(): line for line in text.splitlines()}
    for name in ("Resize", "CenterCrop"):
        assert "region decode and kernel" in notes[name]
    assert "kernel" in notes["ToTensor"]
    assert "one sample after the other" in notes["RandomErasing"]
    assert text.count("one sample after the other") == 2
