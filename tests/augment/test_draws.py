"""Where random numbers come from, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from fastpipe import augment
from fastpipe.core.types import Key
from fastpipe.errors import AugmentError, OptionError

Make = Callable[..., Tensor]
COUNT = 4000


def test_numbers_of_one_operation_are_not_those_of_another() -> None:
    chain = augment.Compose([augment.RandomHorizontalFlip(), augment.RandomVerticalFlip()])
    one, other = chain.draw((COUNT, 3, 8, 8), key=Key(0, 0, np.arange(COUNT)))
    assert abs((one["is_flipped"] == other["is_flipped"]).mean() - 0.5) < 0.05


def test_numbers_of_batches_are_not_those_that_a_key_gives_to_samples() -> None:
    from fastpipe.core.keys import uniforms

    draws = np.arange(COUNT)
    ours = augment.MixUp(num_classes=2).draw((COUNT, 3, 8, 8), key=Key(0, 0, draws))
    flips = augment.RandomHorizontalFlip().draw((COUNT, 3, 8, 8), key=Key(0, 0, draws))["is_flipped"]
    assert len(ours.table) == COUNT
    assert abs((flips == (uniforms(0, 0, draws, 1)[:, 0] < 0.5)).mean() - 0.5) < 0.05


# ---- what is refused -----------------------------------------------------------------------------


def test_wrong_images_are_refused(make_images: Make) -> None:
    images, op = make_images(), augment.ColorJitter(0.4)
    for given, message in (
        (images[0], r"got shape \(3, 40, 52\): give one image as image\[None\]"),
        (images[None], r"got shape \(1, 12, 3, 40, 52\)"),
        (images[:0], r"empty batch, of shape \(0, 3, 40, 52\)"),
        (images[..., :0], "empty batch"),
        (
            images.movedim(1, -1),
            r"3 or 1 channels, got shape \(12, 40, 52, 3\): it looks like \(N, H, W, C\)",
        ),
        (images[:, :2], "3 or 1 channels"),
        (images.double(), "float64"),
        (images.long(), "int64"),
        (images.numpy(), "takes a tensor .* got ndarray"),
        ([images], "got list"),
    ):
        for call in (op, augment.Compose([op]), augment.RandomApply(op)):
            with pytest.raises(AugmentError, match=message):
                call(given)
    with pytest.raises(AugmentError, match="empty"):
        op.draw((0, 3, 8, 8))


def test_wrong_arguments_are_refused() -> None:
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: augment.RandomHorizontalFlip(1.5), "p= is a probability"),
        (lambda: augment.RandomHorizontalFlip(float("nan")), "p= is a probability"),
        (lambda: augment.RandomGrayscale(-0.1), "p= is a probability"),
        (lambda: augment.RandomApply([], 2.0), "p= is a probability"),
        (lambda: augment.RandomErasing(-1), "p= is a probability"),
        (lambda: augment.RandomErasing(value="noise"), "value= is a number"),  # type: ignore[arg-type]
        (lambda: augment.RandomErasing(scale=(0.5, 2.0)), "scale="),
        (lambda: augment.RandomResizedCrop(0), "size="),
        (lambda: augment.RandomResizedCrop((1, 2, 3)), "size="),
        (lambda: augment.RandomResizedCrop(8, scale=(0.5, 0.1)), "scale="),
        (lambda: augment.RandomResizedCrop(8, ratio=(0, 1)), "ratio="),
        (lambda: augment.RandomResizedCrop(8, interpolation="lanczos"), "interpolation="),
        (lambda: augment.RandomRotation(10, "bicubic"), "interpolation="),
        (lambda: augment.RandomRotation(-10), "degrees="),
        (lambda: augment.RandomRotation((10, -10)), "degrees="),
        (lambda: augment.RandomAffine(0, (0.1, 1.1)), "translate="),
        (lambda: augment.RandomAffine(0, fill="black"), "fill="),
        (lambda: augment.RandomAffine(0, center=(1,)), "center="),
        (lambda: augment.ColorJitter(-1), "brightness="),
        (lambda: augment.ColorJitter(hue=0.6), "hue="),
        (lambda: augment.ColorJitter(contrast=(2, 1)), "contrast="),
        (lambda: augment.GaussianBlur(4), "kernel_size="),
        (lambda: augment.GaussianBlur(3, 0.0), "sigma="),
        (lambda: augment.Normalize([0.5], [0.0]), "std"),
        (lambda: augment.Normalize([0.5, 0.5], [1.0]), "std"),
        (lambda: augment.Normalize([float("nan")], [1.0]), "mean"),
        (lambda: augment.ToDtype(torch.int64), "dtype="),
        (lambda: augment.RandAugment(magnitude=31), "magnitude="),
        (lambda: augment.RandAugment(-1), "num_ops="),
        (lambda: augment.TrivialAugmentWide(1), "num_magnitude_bins="),
        (lambda: augment.TrivialAugmentWide(interpolation="bicubic"), "interpolation="),
        (lambda: augment.Compose([v2.RandomHorizontalFlip()]), "augmentations of batches"),  # type: ignore[list-item]
        (lambda: augment.RandomApply(augment.RandomResizedCrop(8))(torch.zeros(1, 3, 9, 9)), "resizes"),
        (lambda: augment.RandomApply(augment.ToDtype())(torch.zeros(1, 3, 9, 9, dtype=torch.uint8)), "converts"),
        (lambda: augment.GaussianBlur(23)(torch.zeros(1, 3, 9, 90)), "kernel_size|9"),
        (lambda: augment.RandomAffine(0, fill=(1, 2))(torch.zeros(1, 3, 9, 9)), "fill= has 2"),
        (lambda: augment.RandomErasing(value=(1, 2))(torch.zeros(1, 3, 9, 9)), "value= has 2"),
        (lambda: augment.RandomErasing(value="random")(torch.zeros(1, 3, 9, 9, dtype=torch.uint8)), "bytes"),
        (lambda: augment.Normalize([0.5], [0.2])(torch.zeros(1, 3, 9, 9, dtype=torch.uint8)), "got uint8"),
    ]  # fmt: skip
    for number, (make, message) in enumerate(cases):
        with pytest.raises(AugmentError, match=message):
            make()
            pytest.fail(f"case {number}, {message}, was taken")


def test_parameters_of_something_else_are_refused(make_images: Make) -> None:
    images, op = make_images(), augment.RandomGrayscale()
    with pytest.raises(AugmentError, match=r"of 12 samples, got Parameters\(3 samples"):
        op.apply(images, op.draw((3, 3, 8, 8)))
    with pytest.raises(AugmentError, match="is_flipped"):
        op.apply(images, augment.RandomHorizontalFlip().draw(images.shape))
    with pytest.raises(AugmentError, match="1 operations, got 2"):
        augment.Compose([op]).apply(images, [op.draw(images.shape)] * 2)


def test_keys_and_generators_that_do_not_fit_are_refused(make_images: Make) -> None:
    images, op = make_images(), augment.RandomGrayscale()
    with pytest.raises(OptionError, match="3 samples, and the batch 12"):
        op(images, key=Key(0, 0, np.arange(3)))
    with pytest.raises(OptionError, match="not both"):
        op(images, key=Key(0, 0, np.arange(12)), generator=torch.Generator())


def test_torchvisions_names_of_interpolations_are_taken() -> None:
    mode = v2.InterpolationMode
    assert repr(augment.RandomResizedCrop(8, interpolation=mode.BICUBIC)) == repr(
        augment.RandomResizedCrop(8, interpolation="bicubic")
    )
    assert augment.RandomRotation(5, mode.BILINEAR).interpolation == "bilinear"
    assert augment.RandomRotation(5, 2).interpolation == "bilinear"
