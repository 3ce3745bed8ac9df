"""Random chains of transforms: the plan against torchvision's functionals, pixel by pixel."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from array_image import ArrayImage
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as by_hand
from transform_chains import chains

from fastpipe.core.types import Key
from fastpipe.images.plan import Plan, compile_plan
from fastpipe.images.pointwise import rows_of

# ---- images ----------------------------------------------------------------------------------

PICTURES = st.tuples(st.integers(1, 70), st.integers(1, 70), st.integers(0, 3))


def pixels_of(picture: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """Noise, or a photograph's smooth gradients with clipped areas."""
    height, width, seed = picture
    rng = np.random.default_rng(picture)
    if seed < 2:
        return rng.integers(0, 256, (height, width, 3), np.uint8)
    ramp = np.linspace(-60, 320, height)[:, None, None] + np.linspace(-90, 90, width)[None, :, None]
    return np.clip(ramp + rng.normal(0, 9, (height, width, 3)), 0, 255).astype(np.uint8)


# ---- the comparison ----------------------------------------------------------------------------


def outcome(call: Any) -> tuple[str, Any]:
    """What a call gives: a value or an error."""
    try:
        return "value", call()
    except Exception as error:
        return "error", error


def assert_same(made: Any, expected: Any) -> None:
    assert type(made) is type(expected)
    if isinstance(expected, Image.Image):
        assert (made.mode, made.size) == (expected.mode, expected.size)
        assert made.tobytes() == expected.tobytes()
        assert expected.info in (made.info, {})  # padding and grey make torchvision forget it
        return
    assert (made.dtype, tuple(made.shape)) == (expected.dtype, tuple(expected.shape))
    ours, theirs = (value.as_subclass(torch.Tensor).double() for value in (made, expected))
    np.testing.assert_array_equal(ours.numpy(), theirs.numpy())  # NaN equals NaN


def into_memory(plan: Plan, image: ArrayImage, u: list[float]) -> Any:
    """The sample as written into a batch's memory."""
    spec = plan.output
    assert spec is not None
    memory = np.full((1, int(np.prod(spec.shape))), 77, spec.word)
    assert plan.apply(image, u, memory[0]) is None
    batch = plan.over(torch.from_numpy(memory.reshape(-1).view(np.uint8)), (1, *spec.shape))
    layouts = {"channels_last": torch.channels_last}
    assert batch.is_contiguous(memory_format=layouts.get(spec.layout, torch.contiguous_format))
    (row,) = rows_of(batch, plan.kind)
    return row


def check(tv: Any, chain: list[Any], picture: tuple[int, int, int], seed: int) -> set[str]:
    """Compare apply with reference, in both layouts; what happened, in words."""
    try:
        return compare(tv.Compose(chain), pixels_of(picture), seed)
    except RuntimeError as error:
        if "INTERNAL ASSERT" not in str(error):
            raise
        return {"torch fails"}  # its uint8 resize of one row or column does, with some strides


def compare(compose: Any, pixels: npt.NDArray[np.uint8], seed: int) -> set[str]:
    happened = set()
    for layout in ("contiguous", "channels_last"):
        plan = compile_plan(compose, layout=layout)  # type: ignore[arg-type]
        assert not plan.stock
        u = plan.draw(Key(seed, 0, np.arange(1)))[0].tolist()
        kind, expected = outcome(lambda: plan.reference(ArrayImage(pixels).pil(), u))
        ours, made = outcome(lambda: plan.apply(ArrayImage(pixels), u))
        if kind == "error":
            if "INTERNAL ASSERT" in str(expected):
                raise expected
            assert ours == "error", f"torchvision raises {expected!r}"
            assert type(made) is type(expected)
            return {"refused"}
        if ours == "error":
            raise made
        assert_same(made, expected)
        happened.add("equal" if "torchvision" in repr(plan) else "fused completely")
        if plan.output is not None:
            happened.add("in a batch's memory")
            assert_same(into_memory(plan, ArrayImage(pixels), u), made)
    return happened


# torchvision says so when antialias=False has no effect on PIL images.
pytestmark = pytest.mark.filterwarnings("ignore:Anti-alias option is always applied")

CLASSIC = [v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor(),
           v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]  # fmt: skip
MODERN = [v2.ToImage(), v2.RandomResizedCrop(24, antialias=True), v2.RandomHorizontalFlip(),
          v2.ToDtype(torch.float32, scale=True),
          v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]  # fmt: skip
SEED = st.integers(0, 2**32)


CASES = st.sampled_from([v1, v2]).flatmap(lambda tv: st.tuples(st.just(tv), chains(tv)))


@settings(max_examples=500)
@given(case=CASES, picture=PICTURES, seed=SEED)
@example(case=(v1, CLASSIC), picture=(50, 60, 0), seed=0)
@example(case=(v1, [v1.Resize(32), v1.CenterCrop(28), *CLASSIC[2:]]), picture=(50, 60, 0), seed=0)
@example(case=(v1, [v1.RandomCrop(32, 4), *CLASSIC[1:]]), picture=(32, 32, 0), seed=0)
@example(case=(v2, MODERN), picture=(50, 60, 0), seed=0)
@example(case=(v2, [*MODERN[1:3], MODERN[0], *MODERN[3:]]), picture=(50, 60, 0), seed=0)
def test_chains(case: tuple[Any, list[Any]], picture: tuple[int, int, int], seed: int) -> None:
    for word in check(*case, picture, seed):
        event(word)


@pytest.mark.slow
@settings(max_examples=20_000)
@given(case=CASES, picture=PICTURES, seed=SEED)
def test_chains_at_length(case: tuple[Any, list[Any]], picture: tuple[int, int, int], seed: int) -> None:
    for word in check(*case, picture, seed):
        event(word)


ODD: list[tuple[Any, list[Any]]] = [
    (v1, [v1.PILToTensor(), v1.RandomCrop(38, 3, fill=(1, 2, 3))]),
    (v2, [v2.PILToTensor(), v2.RandomCrop(38, 3, fill=(1, 2, 3))]), (v1, [v1.RandomCrop(38, 3, fill=300)]),
    (v1, [v1.RandomCrop(38, 3, fill=0.5)]), (v2, [v2.ToImage(), v2.RandomCrop(38, 3, fill=[7.0, 2.0, 3.0])]),
    (v1, [v1.RandomCrop(20, (-3, 2, 4, -1))]), (v2, [v2.ToImage(), v2.RandomCrop(20, (-3, 2, 4, -1))]),
    (v1, [v1.RandomCrop(38, 3, pad_if_needed=True, padding_mode="reflect")]),
    (v1, [v1.ToTensor(), v1.Normalize([0.5], [0.5]), v1.CenterCrop(60)]),
    (v1, [v1.Grayscale(1), v1.Grayscale(3)]),
    (v1, [v1.Grayscale(3), v1.RandomCrop(60, 20, fill=(1, 2, 3)), v1.ToTensor()]),
    *((tv, [before, tv.RandomCrop(9, padding, fill=(0, 0, 0))])
      for tv in (v1, v2) for before in (tv.Grayscale(1), tv.Grayscale(3), v1.ToTensor(), tv.PILToTensor())
      for padding in (None, 0, 3)),
    (v2, [v2.ToImage(), v2.Grayscale(3), v2.Resize(9)]), (v2, [v2.ToImage(), v2.ToDtype(torch.bool)]),
    (v2, [v2.ToImage(), v2.ToDtype(torch.uint16)]),
    (v2, [v2.ToImage(), v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True)]),
    (v1, [v1.PILToTensor(), v1.Resize((20, 20), InterpolationMode.BICUBIC)]),
    (v1, [v1.Resize((9, 9), max_size=12), v1.ToTensor()]), (v2, [v2.ToImage(), v2.Resize((0, 5))]),
    (v1, [v1.Resize(4, max_size=5), v1.CenterCrop(6)]), (v1, [v1.Normalize([0.5], [0.5])]),
    (v1, [v1.ToTensor(), v1.ToTensor()]), (v1, [v1.ToTensor(), v1.Normalize([0.5, 0.5], [0.5, 0.5])]),
    (v1, [v1.ToTensor(), v1.Normalize([0.5], [0.0])]),
    (v2, [v2.ToDtype(torch.float32, scale=True), v2.ToImage()]),
]  # fmt: skip


@pytest.mark.parametrize(("tv", "chain"), ODD, ids=lambda value: str(value)[:90])
@pytest.mark.parametrize("picture", [(33, 41, 0), (1, 90, 0)], ids=str)
def test_odd_chains(tv: Any, chain: list[Any], picture: tuple[int, int, int]) -> None:
    for seed in range(3):
        assert check(tv, chain, picture, seed)


# ---- the reference is torchvision ----------------------------------------------------------------


@settings(max_examples=200)
@given(case=CASES, picture=PICTURES)
def test_the_reference_of_a_chain_without_randomness_is_the_chain(
    case: tuple[Any, list[Any]], picture: tuple[int, int, int]
) -> None:
    tv, chain = case
    compose = tv.Compose([
        item for item in chain
        if type(item).__name__ not in ("RandomCrop", "RandomResizedCrop") and getattr(item, "p", 1.0) in (0.0, 1.0)
    ] or [tv.CenterCrop(9)])  # fmt: skip
    image, plan = Image.fromarray(pixels_of(picture)), compile_plan(compose)
    u = plan.draw(Key(0, 0, np.arange(1)))[0].tolist()
    kind, expected = outcome(lambda: compose(image))
    ours, made = outcome(lambda: plan.reference(image, u))
    assert ours == kind
    if kind == "error":
        assert type(made) is type(expected)
    else:
        assert_same(made, expected)


@pytest.mark.parametrize("tv", [v1, v2], ids=["v1", "v2"])
def test_the_reference_uses_the_drawn_numbers(tv: Any) -> None:
    """By hand: which box, and which functional, these uniform numbers stand for."""
    image = Image.fromarray(pixels_of((80, 100, 0)))
    scale, ratio = (0.25, 0.25), (1.0, 1.0)  # a square of a quarter of the area: 45 pixels (√2000)
    u = [0.5] * 20 + [0.5, 0.25]
    side = round(2000**0.5)
    top, left = int(0.5 * (80 - side + 1)), int(0.25 * (100 - side + 1))
    crop = tv.RandomResizedCrop((20, 30), scale, ratio, InterpolationMode.BICUBIC)
    expected = by_hand.resized_crop(image, top, left, side, side, [20, 30], InterpolationMode.BICUBIC)
    assert_same(compile_plan(crop).reference(image, u), expected)

    chain = tv.Compose([tv.RandomCrop(64), tv.RandomHorizontalFlip(0.5), tv.RandomVerticalFlip(0.5)])
    plan = compile_plan(chain)
    assert plan.draws == 4
    cut = by_hand.crop(image, int(0.1 * 17), int(0.9 * 37), 64, 64)
    assert_same(plan.reference(image, [0.1, 0.9, 0.49, 0.5]), by_hand.horizontal_flip(cut))
    assert_same(plan.reference(image, [0.1, 0.9, 0.5, 0.49]), by_hand.vertical_flip(cut))
