"""FastImageFolder beside torchvision's ImageFolder, on photographs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
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
    assert len(fast) == len(stock)
    assert fast.classes == stock.classes
    assert fast.class_to_idx == stock.class_to_idx
    assert list(fast.samples) == stock.samples
    assert list(fast.targets) == stock.targets
    assert list(fast.imgs) == stock.imgs
    assert fast.extensions == stock.extensions
    assert fast.loader is stock.loader


@pytest.mark.few(2)
@pytest.mark.parametrize("backend", ["auto", "nvimgcodec", "simplejpeg", "pillow", "dali"])
def test_evaluation_is_the_same_to_the_last_bit(photos: Path, backend: Any) -> None:
    fast, stock = pair(photos, v1.Compose(EVALUATION), decode=Decode(backend=backend))
    indices = some(stock)
    for index, (made, target) in zip(indices, fast.__getitems__(indices), strict=True):
        expected, expected_target = stock[index]
        assert (made - expected).abs().max() == 0
        assert target == expected_target
        assert type(target) is type(expected_target)
        alone, alone_target = fast[index]
        assert torch.equal(alone, expected)
        assert alone_target == expected_target


@pytest.mark.parametrize(
    "transform",
    [
        None,
        v1.ToTensor(),
        v1.Resize(100),
        v1.Compose([v1.Resize((90, 120), v1.InterpolationMode.BICUBIC), v1.PILToTensor()]),
        v1.Compose([v1.CenterCrop(600), v1.Grayscale(1), v1.ToTensor()]),
        v2.Compose([v2.Resize(128), v2.CenterCrop(96), v2.ToImage(), v2.ToDtype(torch.float16, scale=True)]),
        v1.Compose([v1.Resize(64), v1.ColorJitter(), v1.CenterCrop(60), v1.ToTensor()]),
        lambda image: np.asarray(image).mean(),
    ],
    ids=["none", "tensor", "resize", "bicubic", "grey", "v2", "unknown inside", "callable"],
)
def test_other_transforms_are_the_same(photos: Path, transform: Any) -> None:
    fast, stock = pair(photos, transform)
    indices = some(stock)[::4]
    for index, (made, target) in zip(indices, fast.__getitems__(indices), strict=True):
        expected, expected_target = stock[index]
        assert target == expected_target
        assert type(made) is type(expected)
        if isinstance(expected, Image.Image):
            assert (made.mode, made.size) == (expected.mode, expected.size)
            assert made.tobytes() == expected.tobytes()
            if transform is None:
                assert made.info == expected.info
        elif isinstance(expected, torch.Tensor):
            assert made.dtype == expected.dtype
            assert torch.equal(made, expected)
        else:
            assert made == expected


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
    for index, u, (made, _) in zip(indices, fast.plan.draw(key), samples, strict=True):
        expected = fast.plan.reference(bare[index][0], u.tolist())
        assert type(made) is type(expected)
        assert torch.equal(made, expected)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_batches_are_the_same(photos: Path, memory_format: torch.memory_format) -> None:
    fast, stock = pair(photos, v1.Compose(EVALUATION))
    fast = FastImageFolder(photos, v1.Compose(EVALUATION), memory_format=memory_format)
    options: dict[str, Any] = {"batch_size": 7, "sampler": some(stock)}
    for (made, targets), (expected, expected_targets) in zip(
        DataLoader(fast, **options), DataLoader(stock, **options), strict=True
    ):
        assert torch.equal(made, expected)
        assert made.is_contiguous(memory_format=memory_format)
        assert torch.equal(targets, expected_targets)
        assert targets.dtype == expected_targets.dtype


def changed(change: Callable[[FastImageFolder], Any], photos: Path) -> None:
    """After a change of the transform, samples are those of the changed transform."""
    flip, crop = v1.RandomHorizontalFlip(0.0), v1.CenterCrop(60)
    fast, stock = pair(photos, v1.Compose([v1.Resize(64), crop, flip, v1.ToTensor()]))
    assert torch.equal(fast[0][0], stock[0][0])
    change(fast)
    stock.transform, stock.transforms = fast.transform, fast.transforms
    stock.samples = fast.samples
    for made, expected in ((fast[0], stock[0]), (fast.__getitems__([0])[0], stock[0])):
        assert made[0].shape == expected[0].shape
        assert torch.equal(made[0], expected[0])
        assert made[1] == expected[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: setattr(d.transform.transforms[1], "size", (50, 40)),
        lambda d: setattr(d.transform.transforms[2], "p", 1.0),
        lambda d: d.transform.transforms.append(v1.Normalize(*NORMALIZE)),
        lambda d: d.transform.transforms.insert(1, v1.Grayscale(3)),
        lambda d: d.transform.transforms.insert(2, lambda image: image.rotate(90)),
        lambda d: setattr(d.transform.transforms[0], "interpolation", v1.InterpolationMode.NEAREST),
        lambda d: setattr(d, "samples", list(d.samples)[::-1]),
    ],
    ids=["size", "p", "append", "insert", "unknown", "interpolation", "samples"],
)
def test_changes_of_the_script_are_followed(photos: Path, change: Callable[[FastImageFolder], Any]) -> None:
    changed(change, photos)


def test_a_transform_put_in_place_later(photos: Path) -> None:
    fast, stock = pair(photos)
    assert fast[0][0].tobytes() == stock[0][0].tobytes()
    for dataset in (fast, stock):
        dataset.transform = v1.Compose(EVALUATION)
    assert torch.equal(fast[0][0], stock[0][0])


def test_the_repr_of_the_plan_says_where_each_step_runs(photos: Path) -> None:
    transform = v1.Compose([*EVALUATION[:3], v1.RandomErasing(), len])
    text = repr(FastImageFolder(photos, transform).plan)
    notes = {line.split("(")[0].strip(): line for line in text.splitlines()}
    for name in ("Resize", "CenterCrop"):
        assert "region decode and kernel" in notes[name]
    assert "kernel" in notes["ToTensor"]
    assert "one sample after the other" in notes["RandomErasing"]
    assert text.count("one sample after the other") == 2
