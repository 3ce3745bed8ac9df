"""Edges of the native kernels, and what their binding refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from augmentations import CHAINS, by_torch, seeded, smooth_images
from torchvision.transforms.v2.functional._geometry import _affine_grid

from fastpipe import augment
from fastpipe.augment.chains import on_processor
from fastpipe.augment.steps import Step
from fastpipe.core.native import native
from fastpipe.core.slots import SlotPool


def test_bytes_of_floats_outside_of_the_range_are_torchs() -> None:
    op = augment.ToDtype(torch.uint8)
    images = torch.tensor([-3.0, -0.1, -0.001, 0, 1, 1.001, 1.1, 7, 1e6]).view(1, 1, 3, 3)
    parameters = op.draw(images.shape)
    assert torch.equal(op.apply(images, parameters), op.reference(images, parameters))


@pytest.mark.parametrize("fill", [-1.0, (-1.0, 300.0, 7.0)])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_a_fill_that_is_no_byte_is_one_before_the_next_change(fill: Any, interpolation: str) -> None:
    chain = augment.Compose([
        augment.RandomRotation(45, interpolation, fill), augment.RandomErasing(1.0, value=fill),
        augment.RandomResizedCrop(24, interpolation="bicubic"), augment.ColorJitter(0.4),
    ])  # fmt: skip
    images = smooth_images(torch.uint8)
    parameters = chain.draw(images.shape, generator=seeded())
    step = images
    for op, one in zip(chain.ops, parameters, strict=True):
        step = op.apply(step, one)
    assert torch.equal(chain.apply(images, parameters), step)
    assert ((step.int() - chain.reference(images, parameters).int()).abs() > 1).float().mean() < 0.01


@pytest.mark.parametrize("shape", [(1, 3, 1, 1), (2, 3, 1, 3000), (2, 3, 3000, 1), (1, 3, 700, 900)], ids=str)
def test_sides_of_one_pixel_and_of_thousands_are_the_references(shape: tuple[int, ...]) -> None:
    images, chain = torch.rand(shape, generator=seeded()), augment.Compose(CHAINS["DeiT"].ops[:-1])
    parameters = chain.draw(shape, generator=seeded(1))
    found, wanted = chain.apply(images, parameters), chain.reference(images, parameters)
    assert ((found - wanted).abs() > 1e-3).float().mean() < 0.01


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


def test_noise_that_erases_is_the_same_by_torch_and_has_no_pattern() -> None:
    op = augment.RandomErasing(1.0, scale=(0.5, 0.5), ratio=(1.0, 1.0), value="random")
    images = torch.full((8, 3, 64, 64), 9.0)
    parameters = op.draw(images.shape, generator=seeded())
    found = op.apply(images, parameters)
    assert torch.allclose(found, by_torch([op], images, parameters), atol=2e-4)
    assert torch.allclose(found, op.reference(images, parameters), atol=2e-4)
    noise = found[found != 9]
    assert 0.48 < len(noise) / images.numel() < 0.52
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02 and abs((noise**4).mean() - 3) < 0.2
    corners = zip(found, parameters["top"].astype(int), parameters["left"].astype(int), strict=True)
    boxes = torch.stack([image[:, top : top + 45, left : left + 45] for image, top, left in corners])
    for dim in range(4):  # samples, channels, rows and columns: neighbours have nothing in common
        assert abs((boxes * boxes.roll(1, dim)).mean()) < 0.03


# ---- the binding ---------------------------------------------------------------------------------


def test_arrays_of_images_that_do_not_fit_are_errors() -> None:
    def plan(*steps: Step, columns: int = 1) -> Any:
        return native.AugmentPlan(list(steps), columns)

    def images(*shape: int, dtype: Any = np.float32) -> Any:
        return np.zeros(shape, dtype)

    flip, rows = plan(Step("flip", 0, (0,))), np.zeros((2, 1))
    good: Sequence[Any] = (flip, rows, images(2, 3, 4, 5), "float32", images(2, 3, 4, 5), "float32")
    native.run_here(native.augment_batch(*good))
    readonly = images(2, 3, 4, 5)
    readonly.flags.writeable = False
    wrong: list[tuple[int, Any]] = [
        (0, plan(Step("flip", 1, (0,)))), (0, plan(Step("flip", 0))), (0, plan(Step("crop", 0, (4, 5, 1)))),
        (1, np.zeros((3, 1))), (1, np.zeros((2, 2))), (1, np.zeros((2, 1), np.float32)), (1, np.zeros(2)),
        (1, np.zeros((4, 1))[::2]), (2, images(3, 3, 4, 5)), (2, images(2, 3, 4)),
        (2, images(2, 3, 4, 5, dtype=np.float64)), (2, images(2, 3, 4, 0)), (3, "float64"), (3, "uint8"),
        (4, images(2, 3, 4, 4)), (4, images(3, 3, 4, 5)), (4, readonly), (5, "uint8"), (5, "float16"),
    ]  # fmt: skip
    for at, value in wrong:
        arguments: list[Any] = [*good[:at], value, *good[at + 1 :]]
        with pytest.raises((ValueError, TypeError)):
            native.augment_batch(*arguments)
    with pytest.raises(ValueError, match="a kind of step"):
        plan(Step("turn", 0))
    for places in ([0, 2], [-1, 0], [0]):
        arguments = [*good, (0, 0, 0), np.array(places, np.int64)]
        with pytest.raises(ValueError, match="place"):
            native.augment_batch(*arguments)


def test_images_of_a_batch_may_be_given_one_by_one() -> None:
    flip, rows = native.AugmentPlan([Step("flip", 0, (0,))], 1), np.array([[1.0], [0.0]])
    out, places = np.zeros((3, 1, 1, 2), np.float32), np.array([2, 0], np.int64)
    batch = native.augment_batch(flip, rows, None, "float32", out, "float32", (1, 1, 2), places)
    image = np.array([[[1.0, 2.0]]], np.float32)
    assert batch.change(0, image) == 0 and batch.change(1, image) == 0
    assert out[:, 0, 0].tolist() == [[1, 2], [0, 0], [2, 1]]
    for number, given in ((2, image), (-1, image), (0, image[:, :, :1]), (0, image.astype(np.float64))):
        with pytest.raises(ValueError, match=r"."):
            batch.change(number, given)
    mixing, images = native.AugmentPlan([Step("mix_up", 0)], 1), np.zeros((2, 1, 1, 2), np.float32)
    with pytest.raises(ValueError, match="at once"):
        native.augment_batch(mixing, np.zeros((2, 1)), None, "float32", images, "float32", (1, 1, 2))
    batch = native.augment_batch(mixing, np.zeros((2, 1)), images, "float32", images.copy(), "float32")
    with pytest.raises(ValueError, match="at once"):
        batch.change(0, images[0])


def test_arrays_of_motion_that_do_not_fit_are_errors() -> None:
    def call(**other: Any) -> None:
        values = np.zeros((2, 3, 4, 3), np.float32)
        arrays = {
            "source": values, "source_type": 0, "out": np.empty_like(values), "out_type": 0,
            "speeds": np.ones(2), "scales": np.ones((2, 3)), "shifts": np.zeros((2, 3)),
            "order": np.zeros((2, 4), np.int64), "lengths": np.ones(2, np.int64),
            "new_lengths": np.zeros(2, np.int64), "threads": 1,
        }  # fmt: skip
        native.change_motion(**{**arrays, **other})

    call()
    small, empty = np.zeros((2, 3, 4, 2), np.float32), np.zeros((2, 0, 4, 3), np.float32)
    wrong: list[dict[str, Any]] = [
        {"source_type": 3}, {"source_type": -1}, {"source_type": 1}, {"out_type": 2}, {"out": small},
        {"source": empty, "out": empty}, {"source": np.zeros((2, 3, 4, 3))}, {"speeds": np.ones(3)},
        {"scales": np.ones((2, 2))}, {"shifts": np.ones((1, 3))}, {"order": np.full((2, 4), 4)},
        {"order": np.full((2, 4), -1)}, {"order": np.zeros((2, 3), np.int64)},
        {"lengths": np.ones(3, np.int64)}, {"new_lengths": np.zeros(1, np.int64)},
    ]  # fmt: skip
    for other in wrong:
        with pytest.raises(ValueError, match=r"."):
            call(**other)
    for other in ({"speeds": np.ones(2, np.float32)}, {"order": np.zeros((2, 8), np.int64)[:, ::2]}):
        with pytest.raises(TypeError):
            call(**other)
