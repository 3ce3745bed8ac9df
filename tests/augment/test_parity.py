"""Given the same parameters, images are torchvision's: on the processor's way, and on that of other devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2.functional._geometry import _affine_grid

from fastpipe import augment
from fastpipe.augment.base import applied_table
from fastpipe.augment.chains import on_device, on_processor
from fastpipe.core.slots import SlotPool
from fastpipe.errors import AugmentError

CASES: dict[str, augment.BatchTransform] = {
    "flip": augment.RandomHorizontalFlip(),
    "vertical flip": augment.RandomVerticalFlip(),
    "grey": augment.RandomGrayscale(0.5),
    "jitter": augment.ColorJitter(0.8, 0.8, 0.8, 0.2),
    "blur": augment.GaussianBlur((7, 5)),
    "wide blur": augment.GaussianBlur(23),
    "crop": augment.RandomResizedCrop((17, 23)),
    "bicubic crop": augment.RandomResizedCrop((17, 23), interpolation="bicubic"),
    "nearest crop": augment.RandomResizedCrop((17, 23), interpolation="nearest"),
    "larger crop": augment.RandomResizedCrop((60, 57), scale=(0.3, 1.0)),
    "normalise": augment.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]),
    "affine": augment.RandomAffine(40, (0.3, 0.2), (0.6, 1.5), (-20, 20, -10, 10), "bilinear", 0.5),
    "affine without a fill": augment.RandomAffine(40, (0.3, 0.2), (0.6, 1.5), 20, "bilinear", None, (10, 30)),
    "nearest affine": augment.RandomAffine(180, (0.3, 0.2), (0.6, 1.5), 20, fill=1.0),
    "rotation": augment.RandomRotation(90, "bilinear"),
    "nearest rotation": augment.RandomRotation((-20, 60), fill=1),
    "rotation about a corner": augment.RandomRotation(20, center=(0, 0)),
    "erasing": augment.RandomErasing(0.7, value=0.7),
    "policy": augment.RandAugment(3, 20),
    "smooth policy": augment.RandAugment(2, 9, 11, interpolation="bilinear", fill=0.5),
    "trivial policy": augment.TrivialAugmentWide(),
    "smooth trivial policy": augment.TrivialAugmentWide(8, interpolation="bilinear", fill=0.5),
    "sometimes": augment.RandomApply(
        [augment.GaussianBlur(5), augment.RandomRotation(20), augment.GaussianBlur(3)]
    ),
}


class Limit(NamedTuple):
    """How far apart two ways of computing the same may be.

    Attributes:
        largest: what values may differ by, where one beside a step of bytes falls on its other side.
        part: of bytes, those that may differ at all.
    """

    largest: float
    part: float


DTYPES = (torch.uint8, torch.float32, torch.float16, torch.bfloat16)
# Of bytes: levels, and for which part of them.  Those that are not here are equal.
_OF_BYTES = {
    "jitter": Limit(3, 0.0005), "policy": Limit(2, 0.005), "smooth policy": Limit(2, 0.01),
    "trivial policy": Limit(2, 0.005), "smooth trivial policy": Limit(2, 0.01),
    "blur": Limit(1, 0.001), "wide blur": Limit(1, 0.001), "sometimes": Limit(1, 0.001),
    "affine": Limit(1, 0.001), "rotation": Limit(1, 0.001), "affine without a fill": Limit(1, 0.001),
}  # fmt: skip
# Half of the last place of numbers below 2, and what float32 adds.
_OF_FLOATS = {torch.float32: 4e-6, torch.float16: 2.0**-11 + 4e-6, torch.bfloat16: 2.0**-8 + 4e-6}


def assert_near(found: Tensor, wanted: Tensor, case: str, steps: bool = False) -> None:
    dtype = wanted.dtype
    assert found.dtype == dtype and found.shape == wanted.shape
    apart = (found.float() - wanted.float()).abs()
    if dtype == torch.uint8:
        limit = _OF_BYTES.get(case, Limit(0, 0.0))
        # Colours beside a step of bytes fall on either side, without the processor's exact sums, and a policy
        # may go on to invert one of two.
        limit = Limit(255, 0.1) if steps else limit
        assert apart.max() <= limit.largest and (apart > 0).float().mean() <= limit.part
    else:
        # Two roundings of halves, and numbers up to 3 of what is normalised.
        times = (1 if dtype == torch.float32 else 2) * (2 if case == "normalise" else 1)
        assert apart.max() <= _OF_FLOATS[dtype] * times


def on_tensors(op: augment.BatchTransform, images: Tensor, parameters: augment.Parameters) -> Tensor:
    """The way of other devices, here."""
    applied = applied_table([op], parameters.table, tuple(images.shape[1:]))
    return on_device([op], images, torch.from_numpy(applied).float())


_SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]


@pytest.mark.parametrize("seed", _SEEDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("case", CASES)
def test_images_are_torchvisions(
    case: str, channels: int, dtype: torch.dtype, seed: int, make_images: Callable[..., Tensor]
) -> None:
    op, images = CASES[case], make_images(dtype, channels, seed)
    if case == "normalise" and (channels == 1 or dtype == torch.uint8):
        with pytest.raises(AugmentError, match=r"takes floats|takes images of 3 channels"):
            op(images)
        return
    parameters = op.draw(images.shape, generator=torch.Generator().manual_seed(seed))
    wanted = op.reference(images, parameters)
    assert_near(op.apply(images, parameters), wanted, case)
    if "crop" in case and dtype == torch.uint8:
        # On other devices torchvision resizes bytes as floats, which are rounded once.
        wanted = op.reference(images.float(), parameters).round().clamp(0, 255)
        apart = (on_tensors(op, images, parameters).float() - wanted).abs()
        assert apart.max() <= 1 and (apart > 0).float().mean() < 0.001
    else:
        steps = case == "jitter" or "policy" in case
        assert_near(on_tensors(op, images, parameters), wanted, case, steps)


@pytest.mark.parametrize("size", [(1, 9), (2, 33), (6, 11), (1, 67), (67, 1), (8, 9), (224, 224)], ids=str)
def test_the_nearest_pixel_is_torchvisions_also_halfway_between_two(size: tuple[int, int]) -> None:
    """Where the last bit of a coordinate decides, which is another one on processors of other kinds."""
    height, width = size
    image = torch.arange(1.0, 1 + height * width).view(1, 1, height, width)
    ones = np.random.default_rng(0).integers(-3, 4, (40, 6)) * 0.25
    warp = augment.RandomAffine(0).for_masks()
    for matrix in ones + [1, 0, 0.25, 0, 1, 0.25]:
        theta = torch.tensor(matrix, dtype=torch.float32).view(1, 2, 3)
        grid = _affine_grid(theta, w=width, h=height, ow=width, oh=height)
        wanted = torch.nn.functional.grid_sample(image, grid, "nearest", "zeros", align_corners=False)
        assert torch.equal(on_processor([warp], image, matrix[None], SlotPool(0)), wanted)


def test_noise_is_the_same_on_both_ways_and_normal(make_images: Callable[..., Tensor]) -> None:
    op = augment.RandomErasing(1.0, scale=(0.5, 0.5), ratio=(1.0, 1.0), value="random")
    images = torch.full((8, 3, 64, 64), 9.0)
    parameters = op.draw(images.shape, generator=torch.Generator().manual_seed(0))
    found = op.apply(images, parameters)
    assert torch.allclose(found, on_tensors(op, images, parameters), atol=2e-4)
    assert torch.allclose(found, op.reference(images, parameters), atol=2e-4)
    noise = found[found != 9]
    assert 0.48 < len(noise) / images.numel() < 0.52
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02 and abs((noise**4).mean() - 3) < 0.2
    corners = zip(found, parameters["top"].astype(int), parameters["left"].astype(int), strict=True)
    boxes = torch.stack([image[:, top : top + 45, left : left + 45] for image, top, left in corners])
    for dim in range(4):  # samples, channels, rows and columns: neighbours have nothing in common
        assert abs((boxes * boxes.roll(1, dim)).mean()) < 0.03


@pytest.mark.parametrize("case", [case for case in CASES if case != "normalise"])
def test_nan_does_no_harm(case: str, make_images: Callable[..., Tensor]) -> None:
    """It passes through what computes with values; what looks them up in a table makes a number of it."""
    op, images = CASES[case], make_images()
    images[:, :, 18:22, 18:22] = torch.nan
    parameters = op.draw(images.shape, generator=torch.Generator().manual_seed(0))
    found = op.apply(images, parameters)
    assert found.shape == op.reference(images, parameters).shape
    if case in ("jitter", "flip", "vertical flip", "blur", "affine", "rotation", "erasing", "grey"):
        wanted = op.reference(images, parameters)
        assert torch.equal(found.isnan(), wanted.isnan())
