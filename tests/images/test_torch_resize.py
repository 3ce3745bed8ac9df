"""What the installed torchvision does with tensors of bytes is asked for, and what it does otherwise is left to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from array_image import ArrayImage
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from fastpipe.images import pillow_rules as module
from fastpipe.images.pillow_rules import torch_filter
from fastpipe.images.plan import Plan, compile_plan

PIXELS = np.random.default_rng(5).integers(0, 256, (70, 90, 3), np.uint8)
CHAIN = [v2.ToImage(), v2.RandomResizedCrop(24, antialias=True), v2.RandomHorizontalFlip()]


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    module._torch_is_equal.cache_clear()
    yield
    module._torch_is_equal.cache_clear()


def _is_equal(plan: Plan, seed: int) -> bool:
    u = np.random.default_rng(seed).random(plan.draws).tolist()
    made, expected = plan.apply(ArrayImage(PIXELS), u), plan.reference(Image.fromarray(PIXELS), u)
    return torch.equal(made, expected)


def test_a_torchvision_that_resizes_floats_does_it_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its own condition: it was another one before 0.22, and looks at the processor.
    monkeypatch.setattr(functional._geometry, "_do_native_uint8_resize_on_cpu", lambda interpolation: False)
    plan = compile_plan(v2.Compose(CHAIN))
    assert "not on a value that is a uint8 tensor" in repr(plan)
    assert all(_is_equal(plan, seed) for seed in range(5))
    assert torch_filter("bilinear", True) is None


@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [True, False])
def test_one_value_is_enough(name: str, antialias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    resize = functional.resize

    def other(image: torch.Tensor, size: list[int], mode: Any, antialias: bool) -> torch.Tensor:
        made = resize(image, size, mode, antialias=antialias)
        made[1, 3, 4] ^= image.shape[1] == 23
        return made

    monkeypatch.setattr(functional, "resize", other)
    assert torch_filter(name, antialias) is None
    monkeypatch.undo()
    module._torch_is_equal.cache_clear()
    found = torch_filter(name, antialias)
    native = functional._geometry._do_native_uint8_resize_on_cpu(v2.InterpolationMode(name))
    assert (found is not None) is native


def test_other_filters_are_torchvisions() -> None:
    assert torch_filter("nearest", True) is None
    assert torch_filter("lanczos", True) is None
