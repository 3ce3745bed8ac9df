"""The arithmetic of the installed Pillow and torchvision is looked up, and left to them where it is another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from array_image import ArrayImage
from PIL import Image
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from fastpipe.core.types import UInt8Array
from fastpipe.images import kernels
from fastpipe.images import pillow_rules as pillow
from fastpipe.images.pillow_rules import torch_filter
from fastpipe.images.plan import Plan, compile_plan

PIXELS = np.random.default_rng(5).integers(0, 256, (70, 90, 3), np.uint8)
CHAIN = [v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.Grayscale(3), v1.ToTensor()]


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what Pillow is found to do."""
    return lambda *found: monkeypatch.setattr(pillow, "_rules", lambda: pillow._Rules(*found))


def _is_equal(plan: Plan, seed: int) -> bool:
    u = np.random.default_rng(seed).random(plan.draws).tolist()
    made, expected = plan.apply(ArrayImage(PIXELS), u), plan.reference(Image.fromarray(PIXELS), u)
    return torch.equal(made, expected)


def test_a_pillow_that_resizes_in_its_own_way_does_it_itself(rules: Any) -> None:
    rules(None, False, False, True)
    plan = compile_plan(v1.Compose(CHAIN))
    lines = [line for line in repr(plan).splitlines() if "RandomResizedCrop" in line]
    assert lines[0].endswith(
        "torchvision with drawn parameters, in threads: the installed Pillow has an arithmetic of its own here"
    )
    assert all(_is_equal(plan, seed) for seed in range(5))
    assert pillow.pillow_filter(kernels.BILINEAR) is None
    assert pillow.pillow_filter(kernels.NEAREST) == (kernels.NEAREST, 0)


def test_a_pillow_that_turns_grey_in_its_own_way_does_it_itself(rules: Any) -> None:
    before = pillow._rules()
    rules(*before[:-1], False)
    plan = compile_plan(v1.Compose(CHAIN))
    assert "Grayscale(num_output_channels=3)  →  torchvision" in repr(plan)
    assert "RandomResizedCrop(size=(24, 24), scale=(0.08, 1.0), ratio=(0.75, 1.3333…  →  region" in repr(plan)
    assert all(_is_equal(plan, seed) for seed in range(5))


def test_the_results_show_the_weights_or_another_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in (0, kernels.NARROW):
        by_pillow = lambda image, to, mode, flag=flag: pillow.resized(image, to, mode | flag)  # noqa: E731
        monkeypatch.setattr(pillow, "_by_pillow", by_pillow)
        assert pillow._flag() == flag

    def one_other_value(image: UInt8Array, to: tuple[int, int], mode: int) -> UInt8Array:
        made = pillow.resized(image, to, mode).copy()
        made[3, 4, 1] ^= mode == kernels.LANCZOS
        return made

    monkeypatch.setattr(pillow, "_by_pillow", one_other_value)
    assert pillow._flag() is None


@pytest.fixture
def asked_anew() -> Iterator[None]:
    pillow._torch_is_equal.cache_clear()
    yield
    pillow._torch_is_equal.cache_clear()


def test_torchvision_resizing_floats_does_it_alone(monkeypatch: pytest.MonkeyPatch, asked_anew: None) -> None:
    # Its own condition: it was another one before 0.22, and looks at the processor.
    monkeypatch.setattr(functional._geometry, "_do_native_uint8_resize_on_cpu", lambda interpolation: False)
    chain = [v2.ToImage(), v2.RandomResizedCrop(24, antialias=True), v2.RandomHorizontalFlip()]
    plan = compile_plan(v2.Compose(chain))
    assert "not on a value that is a uint8 tensor" in repr(plan)
    assert all(_is_equal(plan, seed) for seed in range(5))
    assert torch_filter("bilinear", True) is None


@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [True, False])
def test_one_value_shows_another_arithmetic_of_torchvision(
    name: str, antialias: bool, monkeypatch: pytest.MonkeyPatch, asked_anew: None
) -> None:
    resize = functional.resize

    def other(image: torch.Tensor, size: list[int], mode: Any, antialias: bool) -> torch.Tensor:
        made = resize(image, size, mode, antialias=antialias)
        made[1, 3, 4] ^= image.shape[1] == 23
        return made

    monkeypatch.setattr(functional, "resize", other)
    assert torch_filter(name, antialias) is None
    monkeypatch.undo()
    pillow._torch_is_equal.cache_clear()
    found = torch_filter(name, antialias)
    native = functional._geometry._do_native_uint8_resize_on_cpu(v2.InterpolationMode(name))
    assert (found is not None) is native
    assert torch_filter("nearest", True) is torch_filter("lanczos", True) is None
