"""torchvision's transforms as augmentations of batches: the same arguments, and the same images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from augmentations import smooth_images
from torch import Tensor, nn
from torchvision import transforms as v1
from torchvision.transforms import v2

from fastpipe import augment
from fastpipe.errors import AugmentError

MODES = v2.InterpolationMode

# Those whose arguments are the same, and others.
SAME: list[tuple[str, tuple[Any, ...]]] = [
    ("RandomHorizontalFlip", (0.3,)), ("RandomVerticalFlip", (0.3,)), ("RandomGrayscale", (0.3,)),
    ("RandomResizedCrop", (32,)), ("ColorJitter", (0.4, (0.3, 1.2), 0, 0.1)), ("GaussianBlur", (23, (0.2, 1.0))),
    ("GaussianBlur", ((3, 5),)), ("RandomAffine", (10,)), ("RandomAffine", (0, None, None, 7)), ("RandAugment", ()),
    ("TrivialAugmentWide", ()), ("Normalize", ([0.1, 0.2], [0.3, 0.4])),
    ("RandomErasing", (0.3, (0.1, 0.2), (0.5, 1.5), 0.7)),
    ("RandomResizedCrop", ((8, 9), (0.2, 0.5), (1.0, 2.0), MODES.BICUBIC)),
    ("RandomAffine", ((5, 9), (0.1, 0.2), (0.5, 2.0), (1, 2, 3, 4), MODES.BILINEAR, 0.5, (3, 4))),
    ("RandAugment", (3, 12, 16, MODES.BILINEAR, 7.0)), ("TrivialAugmentWide", (16, MODES.BILINEAR, 7.0)),
]  # fmt: skip
PAIRS: list[tuple[Callable[[Any], Any], augment.BatchTransform]] = [
    *[(lambda v, name=name, given=given: getattr(v, name)(*given), getattr(augment, name)(*given)) for name, given in SAME],
    (lambda v: v.RandomRotation(20, MODES.BILINEAR, center=(1, 2), fill=(0.1, 0.2, 0.3)),
     augment.RandomRotation(20, 2, (0.1, 0.2, 0.3), (1, 2))),  # Pillow's number of "bilinear"
    (lambda v: v.RandomErasing(value="random"), augment.RandomErasing(value="random")),
    (lambda v: v.ConvertImageDtype(torch.float16), augment.ToDtype(torch.float16)),
    (lambda v: v.ToTensor(), augment.ToDtype(torch.float32)),
    (lambda v: v.RandomApply([v.ColorJitter(0.4), v.GaussianBlur(3)], 0.3),
     augment.RandomApply([augment.ColorJitter(0.4), augment.GaussianBlur(3)], 0.3)),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The transform `ToTensor")
@pytest.mark.parametrize(("make", "wanted"), PAIRS, ids=[type(wanted).__name__ for _, wanted in PAIRS])
def test_arguments_are_the_same(make: Callable[[Any], Any], wanted: augment.BatchTransform) -> None:
    for module in (v1, v2):
        assert repr(augment.from_torchvision(make(module)).ops) == repr((wanted,))


def test_transforms_of_v2_alone_are_translated_and_nested_chains_become_one() -> None:
    found = augment.from_torchvision(
        v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.MixUp(alpha=0.3, num_classes=9), v2.CutMix()])
    )
    wanted = [augment.ToDtype(), augment.MixUp(alpha=0.3, num_classes=9), augment.CutMix()]
    assert repr(found) == repr(augment.Compose(wanted))
    nested = [v2.PILToTensor(), nn.Sequential(v2.RandomHorizontalFlip(), v2.ToImage()), v2.Identity()]
    ours = augment.from_torchvision(v2.Compose(nested), fuse=True)
    assert [type(op) for op in ours.ops] == [augment.RandomHorizontalFlip] and ours.fuse
    assert ours(smooth_images()).shape == smooth_images().shape


class Flip(v2.RandomHorizontalFlip):  # type: ignore[misc]  # somebody's own
    pass


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (Flip(), "Flip: it belongs in the dataset's transform"),
        (lambda image: image, "function: it belongs"),
        (v2.Compose([v2.RandomHorizontalFlip(), v2.RandomPerspective()]), "RandomPerspective"),
        (v2.RandomResizedCrop(8, antialias=False), "antialias=False"),
        (v2.RandomRotation(8, expand=True), "expand=True"),
        (v2.RandomAffine(8, fill={Tensor: 1}), "one fill"),
        (v2.ToDtype(torch.float32), "scale=True"),
        (nn.Identity(), "Identity: it belongs"),
    ],
)
def test_a_transform_without_an_augmentation_is_named(transform: Any, message: str) -> None:
    with pytest.raises(AugmentError, match=message):
        augment.from_torchvision(transform)
