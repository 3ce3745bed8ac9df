"""Plans: what runs where, in which memory, and how a plan follows its transform."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from array_image import ArrayImage
from PIL import Image
from torchvision import transforms as v1
from torchvision.models import EfficientNet_B0_Weights, ResNet18_Weights
from torchvision.transforms import v2

from fastpipe.core.keys import uniforms
from fastpipe.core.types import Key
from fastpipe.images.plan import Plan, TensorSpec, compile_plan

PIXELS = np.random.default_rng(5).integers(0, 256, (50, 60, 3), np.uint8)
NORMALIZE = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def parameters(plan: Plan, seed: int = 0) -> list[float]:
    return plan.draw(Key(seed, 0, np.arange(1)))[0].tolist()  # type: ignore[no-any-return]


def lines(plan: Plan) -> list[str]:
    first, *notes, last = repr(plan).splitlines()
    assert (first, last) == ("Plan(", ")")
    return notes


def full(plan: Plan, image: Any, u: Sequence[float]) -> Any:
    """As the dataset does it: the plan's part, then the rest as it is."""
    value = plan.apply(image, u)
    for transform in plan.stock:
        value = transform(value)
    return value


CLASSIC = [v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(*NORMALIZE)]


def test_the_classic_pipeline_is_fused_and_decodes_once() -> None:
    plan, image = compile_plan(v1.Compose(CLASSIC)), ArrayImage(PIXELS)
    plan.apply(image, parameters(plan))
    assert (image.wholes, len(image.regions)) == (0, 1)
    ways = [line.split("→")[1].strip() for line in lines(plan)]
    assert ways == ["region decode and kernel"] * 2 + ["kernel (fused normalisation)"] * 2
    assert plan.output == TensorSpec((3, 24, 24), "float32", np.float32, "contiguous")
    draws = np.array([7, 3, 7])
    np.testing.assert_array_equal(plan.draw(Key(5, 2, draws)), uniforms(5, 2, draws, 23))
    assert lines(compile_plan(None)) == ["  nothing to do  →  PIL images as Pillow decodes them"]


@pytest.mark.parametrize("position", range(len(CLASSIC) + 1))
def test_an_unknown_transform_leaves_all_behind_it_alone(position: int) -> None:
    def unknown(value: Any) -> Any:
        return value if isinstance(value, torch.Tensor) else value.rotate(90)

    chain = [*CLASSIC[:position], unknown, *CLASSIC[position:]]
    plan = compile_plan(v1.Compose(chain), stock_note=lambda stock: f"left alone, {len(stock)} in all")
    assert plan.stock == tuple(chain[position:])
    assert plan.output is None
    notes = lines(plan)
    assert len(notes) == len(chain)
    assert all(note.endswith(f"left alone, {len(plan.stock)} in all") for note in notes[position:])
    assert all("kernel" in note for note in notes[:position])
    u = parameters(plan)
    assert plan.draws == sum((22, 1, 0, 0)[:position])
    torch.manual_seed(3)
    made = full(plan, ArrayImage(PIXELS), u)
    torch.manual_seed(3)
    expected = plan.reference(Image.fromarray(PIXELS), u)
    assert torch.equal(made, expected)


@pytest.mark.parametrize(
    ("chain", "fused"),
    [
        ([v1.Resize(30), v1.Resize(20), v1.ToTensor()], 1),
        ([v1.ToTensor(), v1.Resize(20)], 1),
        ([v1.ToTensor(), v1.Normalize(*NORMALIZE), v1.RandomResizedCrop(9), v1.RandomHorizontalFlip()], 2),
        ([v2.ToImage(), v2.Resize(20, v2.InterpolationMode.NEAREST), v2.ToDtype(torch.float32)], 1),
        ([v1.PILToTensor(), v1.Resize(20, v1.InterpolationMode.BICUBIC)], 1),
        ([v1.RandomCrop(20, 4, padding_mode="reflect"), v1.ToTensor()], 0),
        ([v2.ToImage(), v2.Grayscale()], 1),
        ([v1.Normalize(*NORMALIZE), v1.ToTensor()], 0),
    ],
)
def test_a_step_that_cannot_be_fused_is_drawn_and_says_why(chain: list[Any], fused: int) -> None:
    plan = compile_plan(v1.Compose(chain))
    notes = lines(plan)
    assert all("kernel" in note for note in notes[:fused])
    assert all("torchvision with drawn parameters, in threads" in note for note in notes[fused:])
    assert len(notes[fused].split("in threads: ")[1]) > 10
    assert plan.output is None


@pytest.mark.parametrize(
    ("number", "is_fused"),
    [(0.3, True), (np.float64(0.3), True), (np.float32(0.3), False), (Fraction(3, 10), False)],
    ids=["float", "float64", "float32", "fraction"],
)
def test_numbers_with_an_arithmetic_of_their_own_are_left_to_torchvision(number: Any, is_fused: bool) -> None:
    for transform in (v1.RandomHorizontalFlip(number), v1.RandomResizedCrop(9, scale=(number, 1.0))):
        plan = compile_plan(v1.Compose([transform, v1.PILToTensor()]))
        assert ("its numbers are not plain ones" in repr(plan)) is not is_fused
        for seed in range(20):
            u = parameters(plan, seed)
            made = full(plan, ArrayImage(PIXELS), u)
            assert torch.equal(made, plan.reference(Image.fromarray(PIXELS), u))


def test_a_transform_alone_is_one_in_a_chain() -> None:
    assert compile_plan(len).stock == (len,)
    for single in (v1.Resize((20, 30)), v1.ToTensor(), v1.Grayscale(1)):
        made, expected = compile_plan(single).apply(ArrayImage(PIXELS), []), single(Image.fromarray(PIXELS))
        assert type(made) is type(expected)
        assert np.array_equal(np.asarray(made), np.asarray(expected))


@pytest.mark.parametrize("size", [(50, 60), (300, 260)], ids=str)
def test_the_transforms_of_weights_are_fused(size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(6).integers(0, 256, (*size, 3), np.uint8)
    for weights in (ResNet18_Weights.IMAGENET1K_V1, EfficientNet_B0_Weights.IMAGENET1K_V1):
        transform = weights.transforms()
        plan = compile_plan(transform)
        assert plan.output is not None
        assert torch.equal(plan.apply(ArrayImage(pixels), []), transform(Image.fromarray(pixels)))
