"""Volumes are what NumPy and SciPy make of them with the same parameters, by kernels and by torch's operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastpipe import augment
from fastpipe.augment.base import applied_table
from fastpipe.augment.volumes.base import on_volumes
from fastpipe.core.slots import SlotPool

pytest.importorskip("scipy", reason="the reference is SciPy's: pip install scipy")

CASES: dict[str, augment.Augmentation] = {
    "flip": augment.RandomFlip3D(),
    "flip of width": augment.RandomFlip3D(2, p=0.7),
    "turn": augment.RandomRotate90(p=0.8),
    "turn about height": augment.RandomRotate90((0, 2), p=0.8),
    "rotation": augment.RandomAffine3D(30),
    "rotation of planes": augment.RandomAffine3D(((-180, 180), 0, 0)),
    "scale": augment.RandomAffine3D(0, (0.7, 1.4)),
    "scale of planes": augment.RandomAffine3D(0, (0.7, 1.4), scale_axes=(1, 2)),
    "shift": augment.RandomAffine3D(0, translate=(0.2, 0.3, 0.1), fill=0.5),
    "affine": augment.RandomAffine3D(30, (0.7, 1.4), 0.1, p_rotation=0.5, p_scale=0.5),
    "affine, spaced": augment.RandomAffine3D(40, (0.7, 1.4), spacing=(3.0, 1.0, 0.5), fill=-1.0),
    "affine, cut": augment.RandomAffine3D(30, (0.7, 1.4), size=(7, 10, 11), p_rotation=0.5, p_scale=0.5),
    "affine, edge": augment.RandomAffine3D(60, (0.7, 1.6), 0.3, fill="edge"),
    "elastic": augment.RandomElastic3D((3, 4, 5), 1.5, 0.7),
    "elastic, turned": augment.RandomElastic3D(3, (0.5, 1.0, 2.0), 0.7, 30, (0.7, 1.4), 0.1, fill=0.5, p_scale=0.5),
    "elastic, cut": augment.RandomElastic3D(2, 1.0, size=(7, 10, 11), fill="edge", degrees=20),
    "noise": augment.GaussianNoise3D((0.0, 0.5)),
    "blur": augment.GaussianBlur3D((0.3, 2.5), p_channel=0.8),
    "blur of planes": augment.GaussianBlur3D(1.0, axes=(1, 2)),
    "wide blur": augment.GaussianBlur3D(9.0),
    "brightness": augment.Brightness3D((0.5, 1.5), p_channel=0.7),
    "contrast": augment.Contrast3D((0.5, 2.0)),
    "contrast, beyond": augment.Contrast3D((0.5, 2.0), keep_range=False, p_channel=0.5),
    "gamma": augment.Gamma3D((0.5, 2.0)),
    "gamma, inverted": augment.Gamma3D((0.5, 2.0), inverted=True, p_channel=0.7),
    "gamma alone": augment.Gamma3D((0.5, 2.0), keep_stats=False),
    "low resolution": augment.LowResolution3D((0.3, 1.0), p_channel=0.8),
    "low resolution of planes": augment.LowResolution3D((0.5, 1.0), axes=(1, 2)),
    "some": augment.RandomApply([augment.Gamma3D(), augment.RandomFlip3D()], 0.5),
}  # fmt: skip
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture
def make_volumes() -> Callable[..., Tensor]:
    """Makes volumes (6, C, 12, 15, 15), or (6, C, 15, 15, 15): smooth, noisy, and of one value."""

    def make(dtype: torch.dtype = torch.float32, channels: int = 1, is_cube: bool = False) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        size = (15 if is_cube else 12, 15, 15)
        small = torch.randn(6, channels, 4, 5, 5, generator=generator)
        volumes = torch.nn.functional.interpolate(small, size, mode="trilinear")
        volumes[1] = torch.randn(volumes[1].shape, generator=generator)
        volumes[2] = 0.25
        volumes[3] = volumes[3] * 100 + 1000
        return volumes.to(dtype)

    return make


def by_torch(ops: Any, volumes: Tensor, parameters: augment.Parameters) -> Tensor:
    """The way of devices, here."""
    applied = applied_table(ops, parameters.table, tuple(volumes.shape[1:]))
    return on_volumes(ops, volumes, applied, SlotPool(0), is_host=False)


@pytest.mark.few(48)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_volumes_are_scipys(
    case: str, channels: int, dtype: torch.dtype, make_volumes: Callable[..., Tensor]
) -> None:
    op, volumes = CASES[case], make_volumes(dtype, channels, is_cube="turn" in case)
    kept = volumes.clone()
    for seed in range(3):
        parameters = op.draw(volumes.shape, generator=torch.Generator().manual_seed(seed))
        wanted = op.reference(volumes, parameters)
        for found in (op.apply(volumes, parameters), by_torch([op], volumes, parameters)):
            assert found.dtype == dtype and found.shape == wanted.shape and found.is_contiguous()
            extent = (
                (volumes.amax((1, 2, 3, 4)) - volumes.amin((1, 2, 3, 4))).clamp(min=1).view(-1, 1, 1, 1, 1)
            )
            size = volumes.abs().amax((1, 2, 3, 4)).clamp(min=1).view(-1, 1, 1, 1, 1)
            apart = (found.double() - wanted.double()).abs() / (size if dtype != torch.float32 else extent)
            assert apart.max() < 4 * TOLERANCE[dtype], f"{apart.amax((1, 2, 3, 4))}"
    assert torch.equal(volumes, kept)
