"""Fused chains: the same parameters, one resampling, one matrix; and what they differ by."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from augmentations import by_torch, seeded, smooth_images
from torch import Tensor

from fastpipe import augment
from fastpipe.augment.fusing import FusedRun

Ops = list[augment.BatchTransform]


def both(ops: Ops, images: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Without and with fusing."""
    found = [augment.Compose(ops, fuse=fuse)(images, generator=seeded(seed)) for fuse in (False, True)]
    assert found[0].dtype == found[1].dtype and found[0].shape == found[1].shape
    return found[0], found[1]


def in_the_middle(images: Tensor) -> Tensor:
    """Of little contrast, so that no change leaves the range."""
    return images * 0.2 + 0.4


def views() -> Ops:
    return [
        augment.RandomResizedCrop(32), augment.RandomHorizontalFlip(), augment.RandomVerticalFlip(),
        augment.RandomApply([augment.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8), augment.RandomGrayscale(0.2),
        augment.RandomApply(augment.GaussianBlur(7)), augment.ToDtype(), augment.Normalize([0.4], [0.2]),
    ]  # fmt: skip


def test_parameters_are_the_same_and_the_name_says_it() -> None:
    plain, fused = augment.Compose(views()), augment.Compose(views(), fuse=True)
    drawn = [chain.draw((9, 3, 40, 52), generator=seeded()) for chain in (plain, fused)]
    for one, other in zip(*drawn, strict=True):
        assert list(one) == list(other) and np.array_equal(one.table, other.table)
    assert repr(fused) == repr(plain)[:-1] + ", fuse=True)"


@pytest.mark.parametrize("size", [(17, 23), (60, 80), (40, 52)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_crops_and_flips_are_the_same(interpolation: str, size: tuple[int, int]) -> None:
    crop = augment.RandomResizedCrop(size, interpolation=interpolation)
    ops: Ops = [crop, augment.RandomHorizontalFlip(), augment.RandomVerticalFlip()]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        plain, fused = both(ops, smooth_images(dtype))
        assert torch.equal(plain, fused)
    plain, fused = both(ops, smooth_images(torch.uint8))  # of which torch rounds twice
    apart = (plain.float() - fused.float()).abs()
    assert interpolation != "bilinear" or apart.max() <= 1
    assert (apart > 1).float().mean() < 0.01 and apart.mean() < 0.3


def test_two_crops_one_after_the_other_are_one_box() -> None:
    crops: Ops = [augment.RandomResizedCrop(size, (0.5, 1.0)) for size in ((48, 64), (96, 96))]
    plain, fused = both(crops, smooth_images())
    assert (plain[:3] - fused[:3]).abs().mean() < 0.01  # smooth images


@pytest.mark.parametrize("channels", [3, 1])
def test_colours_that_stay_in_the_range_are_the_same(channels: int) -> None:
    images = in_the_middle(smooth_images(channels=channels))
    changes: Ops = [
        augment.ColorJitter(0.3, 0.3, 0.3),
        augment.RandomApply([augment.ColorJitter(contrast=0.3), augment.RandomGrayscale(0.5)]),
        augment.RandomGrayscale(0.3),
    ]
    for order in itertools.permutations(changes):
        plain, fused = both([*order, augment.Normalize([0.4], [0.2])], images, seed=3)
        assert torch.allclose(plain, fused, atol=1e-5 if channels == 3 else 2e-3)


def test_a_third_of_a_turn_is_the_same_hue() -> None:
    for turn in (1 / 3, -1 / 3):
        ops: Ops = [augment.ColorJitter(hue=(turn, turn)), augment.RandomGrayscale(0.2)]
        plain, fused = both(ops, smooth_images())
        assert torch.allclose(plain, fused, atol=1e-5)


def test_colours_are_cut_off_in_the_end() -> None:
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    _, fused = both([augment.ColorJitter(3.0, 3.0, 3.0), augment.Normalize(mean, std)], smooth_images())
    low, high = ((bound - torch.tensor(mean)) / torch.tensor(std) for bound in (0.0, 1.0))
    assert torch.allclose(fused.amin((0, 2, 3)), low) and torch.allclose(fused.amax((0, 2, 3)), high)


@pytest.mark.parametrize("to", [torch.uint8, torch.float32])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_dtypes_are_those_of_the_chain(dtype: torch.dtype, to: torch.dtype) -> None:
    images = smooth_images(dtype)
    images = images if dtype == torch.uint8 else in_the_middle(images)
    ops: Ops = [augment.ColorJitter(0.1, 0.1), augment.GaussianBlur(3), augment.ToDtype(to)]
    plain, fused = both(ops, images)
    unit = 255.0 if to == torch.uint8 else 1.0
    assert fused.dtype == to
    assert (plain.float() - fused.float()).abs().mean() < 0.01 * unit


def test_one_resampling_is_sharper_than_three_and_in_the_same_place() -> None:
    """A pattern that is known everywhere is sampled where three maps after each other take it from."""
    y, x = torch.meshgrid(torch.arange(96.0), torch.arange(96.0), indexing="ij")
    pattern = (0.5 + 0.5 * torch.sin(x / 3) * torch.sin(y / 4)).expand(16, 3, 96, 96).contiguous()
    ops: Ops = [
        augment.RandomRotation(15, "bilinear"), augment.RandomAffine(10, (0.05, 0.05), None, 5, "bilinear"),
        augment.RandomRotation(15, "bilinear"),
    ]  # fmt: skip
    plain, fused = (found[:, :, 28:68, 28:68] for found in both(ops, pattern))
    assert (plain - fused).abs().mean() < 0.03
    assert fused.std() > plain.std()


def test_what_is_reduced_is_averaged() -> None:
    noise = torch.rand(8, 3, 128, 128, generator=seeded())
    ops: Ops = [augment.RandomResizedCrop(32, (0.9, 1.0)), augment.RandomRotation((30, 60), "bilinear")]
    _, fused = both(ops, noise)
    assert fused[:, :, 12:20, 12:20].std() < 0.11  # that of what is sampled is 0.29, or 0.19 if bilinear


@pytest.mark.parametrize("fill", [0.25, (0.1, 0.2, 0.3)])
def test_what_is_outside_is_filled(fill: Any) -> None:
    ops: Ops = [augment.RandomAffine(0, (0.9, 0.9), fill=fill), augment.RandomRotation(10, fill=fill)]
    _, fused = both(ops, torch.ones(16, 3, 40, 52))
    for c, colour in enumerate(torch.tensor(fill).expand(3)):
        assert torch.isclose(fused[:, c].amin(), colour)
        assert torch.isclose(fused[:, c].amax(), torch.tensor(1.0))


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_both_ways_are_the_same(dtype: torch.dtype, rotates: bool, channels: int) -> None:
    ops = views()
    if rotates:
        ops.insert(2, augment.RandomAffine(20, (0.1, 0.1), (0.9, 1.4), 5, fill=0.5))
    chain, images = augment.Compose(ops, fuse=True), smooth_images(dtype, channels)
    parameters = chain.draw(images.shape, generator=seeded())
    found = chain.apply(images, parameters)
    steps = chain._chain.steps
    assert [type(step) for step in steps] == [FusedRun]
    apart = (found - by_torch(steps, images, parameters)).abs()
    assert apart.max() < 2e-4 if not rotates else apart.mean() < 0.02


def test_behind_something_that_cannot_be_fused_a_run_has_the_whole_image() -> None:
    chain, images = augment.Compose(views(), fuse=True), smooth_images()
    wanted = chain(images, generator=seeded())
    later = augment.Compose([augment.RandomErasing(0.0), *views()], fuse=True)
    tables = augment.Compose(views()).draw(images.shape, generator=seeded())
    first = augment.RandomErasing(0.0).draw(images.shape)
    assert torch.equal(later.apply(images, [first, *tables]), wanted)


def test_gradients_flow() -> None:
    chain, images = augment.Compose(views(), fuse=True), smooth_images()
    wanted = chain(images, generator=seeded())
    found = chain(images.requires_grad_(), generator=seeded())
    assert torch.allclose(found, wanted, atol=2e-4)
    found.sum().backward()
    assert images.grad is not None and images.grad.abs().sum() > 0


def test_what_cannot_be_fused_stays_in_its_place() -> None:
    ops: Ops = [
        augment.RandomHorizontalFlip(), augment.ColorJitter(0.4), augment.RandomErasing(0.5, value=0.3),
        augment.ColorJitter(0.4), augment.GaussianBlur(3), augment.RandomHorizontalFlip(),
        augment.RandomResizedCrop(16, interpolation="nearest"),
    ]  # fmt: skip
    steps = augment.Compose(ops, fuse=True)._chain.steps
    assert [type(step).__name__ for step in steps] == [
        "FusedRun", "RandomErasing", "FusedRun", "RandomHorizontalFlip", "RandomResizedCrop",
    ]  # fmt: skip
    plain, fused = both(ops, smooth_images())
    assert torch.allclose(plain, fused, atol=1e-5)


def test_mixing_comes_after_the_run() -> None:
    chain = augment.Compose([*views(), augment.MixUp(num_classes=12)], fuse=True)
    images, labels = chain(smooth_images(), torch.arange(12), generator=seeded())
    assert images.shape == (12, 3, 32, 32) and torch.allclose(labels.sum(1), torch.ones(12))
