"""torchvision's transforms as augmentations of batches: the same arguments, and the same images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision import transforms as v1
from torchvision.transforms import v2

from fastpipe import augment
from fastpipe.errors import AugmentError

Make = Callable[..., Tensor]
_BILINEAR = v2.InterpolationMode.BILINEAR

PAIRS: list[tuple[Callable[[Any], Any], augment.BatchTransform]] = [
    (lambda v: v.RandomHorizontalFlip(0.3), augment.RandomHorizontalFlip(0.3)),
    (lambda v: v.RandomVerticalFlip(0.3), augment.RandomVerticalFlip(0.3)),
    (lambda v: v.RandomGrayscale(0.3), augment.RandomGrayscale(0.3)),
    (lambda v: v.RandomResizedCrop(32), augment.RandomResizedCrop(32)),
    (
        lambda v: v.RandomResizedCrop((8, 9), (0.2, 0.5), (1.0, 2.0), v2.InterpolationMode.BICUBIC),
        augment.RandomResizedCrop((8, 9), (0.2, 0.5), (1.0, 2.0), "bicubic"),
    ),
    (lambda v: v.ColorJitter(0.4, (0.3, 1.2), 0, 0.1), augment.ColorJitter(0.4, (0.3, 1.2), 0, 0.1)),
    (lambda v: v.GaussianBlur(23, (0.2, 1.0)), augment.GaussianBlur(23, (0.2, 1.0))),
    (lambda v: v.GaussianBlur((3, 5)), augment.GaussianBlur((3, 5))),
    (lambda v: v.RandomAffine(10), augment.RandomAffine(10)),
    (
        lambda v: v.RandomAffine((5, 9), (0.1, 0.2), (0.5, 2.0), (1, 2, 3, 4), _BILINEAR, 0.5, (3, 4)),
        augment.RandomAffine((5, 9), (0.1, 0.2), (0.5, 2.0), (1, 2, 3, 4), "bilinear", 0.5, (3, 4)),
    ),
    (lambda v: v.RandomAffine(0, shear=7), augment.RandomAffine(0, shear=7)),
    (
        lambda v: v.RandomRotation(20, _BILINEAR, center=(1, 2), fill=(0.1, 0.2, 0.3)),
        augment.RandomRotation(20, "bilinear", (0.1, 0.2, 0.3), (1, 2)),
    ),
    (lambda v: v.RandAugment(3, 12, 16, _BILINEAR, 7), augment.RandAugment(3, 12, 16, "bilinear", 7.0)),
    (lambda v: v.RandAugment(), augment.RandAugment()),
    (lambda v: v.TrivialAugmentWide(16, _BILINEAR, 7), augment.TrivialAugmentWide(16, "bilinear", 7.0)),
    (lambda v: v.TrivialAugmentWide(), augment.TrivialAugmentWide()),
    (lambda v: v.Normalize([0.1, 0.2], [0.3, 0.4]), augment.Normalize([0.1, 0.2], [0.3, 0.4])),
    (lambda v: v.RandomErasing(0.3, (0.1, 0.2), (0.5, 1.5), 0.7),
     augment.RandomErasing(0.3, (0.1, 0.2), (0.5, 1.5), 0.7)),
    (lambda v: v.RandomErasing(value="random"), augment.RandomErasing(value="random")),
    (lambda v: v.ConvertImageDtype(torch.float16), augment.ToDtype(torch.float16)),
    (lambda v: v.ToTensor(), augment.ToDtype(torch.float32)),
    (
        lambda v: v.RandomApply([v.ColorJitter(0.4), v.GaussianBlur(3)], 0.3),
        augment.RandomApply([augment.ColorJitter(0.4), augment.GaussianBlur(3)], 0.3),
    ),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The transform `ToTensor")
@pytest.mark.parametrize("module", [v1, v2], ids=["v1", "v2"])
@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_arguments_are_the_same(number: int, module: Any) -> None:
    make, wanted = PAIRS[number]
    assert repr(augment.from_torchvision(make(module)).ops) == repr((wanted,))


def test_those_of_v2_alone() -> None:
    found = augment.from_torchvision(
        v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.MixUp(alpha=0.3, num_classes=9), v2.CutMix()])
    )
    wanted = [augment.ToDtype(), augment.MixUp(alpha=0.3, num_classes=9), augment.CutMix()]
    assert repr(found) == repr(augment.Compose(wanted))


def test_nested_chains_become_one(make_images: Make) -> None:
    ours = augment.from_torchvision(
        v2.Compose([v2.PILToTensor(), nn.Sequential(v2.RandomHorizontalFlip(), v2.ToImage()), v2.Identity()]),
        fuse=True,
    )
    assert [type(op) for op in ours.ops] == [augment.RandomHorizontalFlip] and ours.fuse
    assert ours(make_images()).shape == make_images().shape


class Flip(v2.RandomHorizontalFlip):
    """Somebody's own."""


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
def test_what_has_no_augmentation_is_named(transform: Any, message: str) -> None:
    with pytest.raises(AugmentError, match=message):
        augment.from_torchvision(transform)
