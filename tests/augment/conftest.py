"""Fixtures of the augmentations' tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def _no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's compiler counts with tqdm, whose thread would stay."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


@pytest.fixture
def make_images() -> Callable[..., Tensor]:
    """Makes smooth images (12, C, 40, 52): some dark, bright, grey, of one colour, and of noise."""

    def make(dtype: torch.dtype = torch.float32, channels: int = 3, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        small = torch.rand(12, channels, 6, 7, generator=generator)
        images = torch.nn.functional.interpolate(small, (40, 52), mode="bicubic").clamp(0, 1)
        images[1] *= 0.02
        images[2] = 1 - images[2] * 0.02
        images[3] = images[3].mean(0)
        images[4] = images[4, :, :1, :1]
        images[5] = torch.rand(images[5].shape, generator=generator)
        if dtype == torch.uint8:
            return (images * 255).round().to(torch.uint8)
        return images.to(dtype)

    return make
