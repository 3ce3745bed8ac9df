"""Chains of images: draws, gradients, torch.compile, and operations of a script's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from augmentations import CHAINS, DTYPES, by_torch, seeded, smooth_images
from torch import Tensor

from fastpipe import augment
from fastpipe.augment.base import Augmentation, applied_table
from fastpipe.augment.chains import BatchTransform, Columns, on_device
from fastpipe.augment.motion import MotionTransform
from fastpipe.augment.volumes.base import VolumeTransform
from fastpipe.core.keys import uniforms
from fastpipe.core.types import Key
from fastpipe.errors import AugmentError

SMOOTH: list[Augmentation] = [
    augment.RandomResizedCrop(32), augment.RandomHorizontalFlip(), augment.ColorJitter(0.4, 0.4, 0.4),
    augment.GaussianBlur(5), augment.RandomRotation(10, "bilinear"), augment.Normalize([0.5], [0.2]),
]  # fmt: skip


def test_an_operation_in_a_chain_of_one_draws_what_it_draws_alone_and_not_what_a_key_gives() -> None:
    jitter, images = augment.ColorJitter(0.4), smooth_images()
    alone = jitter(images, generator=seeded(1))
    assert torch.equal(augment.Compose([jitter])(images, generator=seeded(1)), alone)
    draws = np.arange(4000)
    flips = augment.RandomHorizontalFlip().draw((4000, 3, 8, 8), key=Key(0, 0, draws))["is_flipped"]
    assert abs((flips == (uniforms(0, 0, draws, 1)[:, 0] < 0.5)).mean() - 0.5) < 0.05


def test_random_apply_leaves_the_others_as_they_are() -> None:
    op, images = augment.RandomApply(augment.GaussianBlur(7, 2.0), 0.5), smooth_images()
    parameters = op.draw(images.shape, generator=seeded())
    applied = parameters["is_applied"] > 0
    found = op.apply(images, parameters)
    assert 0 < applied.sum() < len(images)
    assert [torch.equal(one, image) for one, image in zip(found, images, strict=True)] == (~applied).tolist()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_flow_through_operations_that_can_be_differentiated(layout: torch.memory_format) -> None:
    chain, images = augment.Compose(SMOOTH), smooth_images().contiguous(memory_format=layout)
    plain = chain(images, generator=seeded())
    images.requires_grad_()
    found = chain(images, generator=seeded())
    assert torch.allclose(found, plain, atol=1e-4) and found.is_contiguous(memory_format=layout)
    found.sum().backward()
    assert images.grad is not None and images.grad.abs().sum() > 0
    with torch.no_grad():
        assert torch.equal(chain(images, generator=seeded()), plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which is for the model
        again = chain(images, generator=seeded())
    assert again.dtype == torch.float32 and torch.equal(again, found)


def test_two_draws_of_one_compiled_graph_are_two() -> None:
    crop, images = augment.RandomResizedCrop(16), smooth_images()

    def both(images: Tensor) -> tuple[Tensor, Tensor]:
        return crop(images), crop(images)

    first, second = torch.compile(both, backend="aot_eager", fullgraph=True)(images)
    assert not torch.equal(first, second)


@pytest.mark.slow
def test_one_compiled_graph_of_other_devices_serves_every_batch() -> None:
    """All that is drawn is an input of theirs."""
    chain, images = CHAINS["DeiT"], smooth_images()
    ops, graphs = chain.ops[:-1], list[Any]()

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def run(images: Tensor, applied: Tensor) -> Tensor:
        return on_device(ops, images, applied)

    for seed in range(3):
        drawn = augment.Compose(ops).draw(images.shape, generator=seeded(seed))
        table = np.concatenate([one.table for one in drawn], axis=1)
        applied = torch.from_numpy(applied_table(ops, table, tuple(images.shape[1:]))).float()
        assert torch.allclose(run(images, applied), on_device(ops, images, applied), atol=1e-5)
    assert len(graphs) == 1


# ---- operations of a script's own ----------------------------------------------------------------


class Own(BatchTransform):  # does with images what a function does, and knows nothing but torch's operations
    def __init__(self, change: Any) -> None:
        self.change = change

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        changed: Tensor = self.change(images)
        return changed


class Inverted(BatchTransform):
    draws = 1
    names = ("least",)

    def table(self, u: Any, shape: Any) -> Any:
        return u * 0.5

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        bound = 255.0 if of_bytes else 1.0
        assert images.dtype == torch.float32
        return torch.where(images >= columns["least"].view(-1, 1, 1, 1) * bound, bound - images, images)


FLIP, CROP, BLUR = augment.RandomHorizontalFlip(), augment.RandomResizedCrop(24), augment.GaussianBlur(3)
OWN_CHAINS: dict[str, list[Augmentation]] = {
    "alone": [Inverted()], "first": [Inverted(), CROP, FLIP], "last": [CROP, FLIP, Inverted()],
    "between": [CROP, Inverted(), BLUR], "twice": [Inverted(), Inverted(), FLIP],
    "inside": [
        FLIP, augment.RandomApply([Inverted(), FLIP, augment.RandomApply([Inverted(), BLUR], 0.7)], 0.6), CROP,
    ],
    "before mixing": [Inverted(), augment.CutMix(num_classes=2), Inverted()],
    "to floats": [Inverted(), augment.ToDtype(torch.float32), Inverted(), augment.RandomGrayscale(0.5)],
    "nested": [augment.RandomApply([FLIP, augment.RandomApply([BLUR, FLIP], 0.5)], 0.5), Inverted()],
}  # fmt: skip


@pytest.mark.few(30)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("case", OWN_CHAINS)
def test_own_operations_may_be_anywhere_in_a_chain(case: str, fuse: bool, dtype: torch.dtype) -> None:
    chain, images = augment.Compose(OWN_CHAINS[case], fuse=fuse), smooth_images(dtype)
    parameters = chain.draw(images.shape, generator=seeded())
    found, wanted = chain.apply(images, parameters), by_torch(chain._chain.steps, images, parameters)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    apart = (found.float() - wanted.float()).abs() / (255 if found.dtype == torch.uint8 else 1)
    # Resized bytes are rounded once there, and those beside a threshold are inverted or not.
    assert (apart > 0.01).float().mean() < (0.01 if dtype == torch.uint8 else 0.002)
    if not fuse and dtype in (torch.uint8, torch.float32):
        step = images
        for op, one in zip(chain.ops, parameters, strict=True):
            step = op.apply(step, one)
        assert torch.equal(step, found)


class Coarse(BatchTransform):  # half as large and dark, with names that fastpipe does not keep for itself
    draws = 1
    names = ("factor",)

    def table(self, u: Any, shape: tuple[int, ...]) -> Any:
        return 0.5 + 0.5 * (u < 0.5)

    def shape_after(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[0], shape[1] // 2, shape[2] // 2

    def on_tensors(self, images: Tensor, columns: Any, of_bytes: bool) -> Tensor:
        halved: Tensor = images[:, :, ::2, ::2] * columns["factor"].view(-1, 1, 1, 1)
        return halved


class Coarser(Coarse):  # inherits draws
    names = ("factor", "unused")  # type: ignore[assignment]

    def __init__(self, step: float) -> None:
        self.step = self.inner = step

    def table(self, u: Any, shape: tuple[int, ...]) -> Any:
        return np.repeat(super().table(u, shape), 2, axis=1)

    def on_tensors(self, images: Tensor, columns: Any, of_bytes: bool) -> Tensor:
        halved: Tensor = super().on_tensors(images, columns, of_bytes) // self.step
        return halved


def test_an_own_operation_resizes_mixes_and_inherits() -> None:
    images, op = smooth_images(), Coarse()
    parameters = op.draw(images.shape, generator=seeded())
    factors = torch.from_numpy(parameters["factor"]).float()
    halved = op.apply(images, parameters)
    assert torch.equal(halved, op.on_tensors(images, {"factor": factors}, False))
    mixing = Own(lambda images: images.roll(1, 0))
    mixing.mixes = True
    chain = augment.Compose([op, mixing, augment.RandomHorizontalFlip(1.0)])
    changed, _ = chain(images, torch.rand(12, 3), generator=seeded())
    wanted = op.apply(images, augment.Compose([op]).draw(images.shape, generator=seeded())[0])
    assert torch.equal(changed.flip(-1), wanted.roll(1, 0))
    coarser: Any = Coarser(8.0)
    assert (coarser.draws, Coarse.draws) == (1, 1)
    found = augment.Compose([augment.RandomApply(augment.RandomGrayscale(0.3)), coarser])(images)
    assert found.shape == (12, 3, 20, 26) and found.max() <= 255 / 8


def test_on_tensors_of_a_subclass_replaces_the_kernels_and_mixed_precision_is_for_the_model() -> None:
    class Brighter(augment.RandomHorizontalFlip):
        def on_tensors(self, images: Tensor, columns: Any, of_bytes: bool) -> Tensor:
            return images + 1

    images = smooth_images()
    assert torch.equal(augment.Compose([Brighter(), augment.RandomVerticalFlip(0.0)])(images), images + 1)
    turned = Own(lambda images: images @ torch.eye(images.shape[-1]).flip(0))  # else in bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        found = augment.Compose([turned, augment.RandomVerticalFlip(1.0)])(images)
    assert torch.equal(found, images.flip(-1, -2))


def test_an_unfinished_or_misshapen_operation_is_an_error() -> None:
    class Unfinished(augment.BatchTransform):
        draws = 1

    kinds: Any = {Unfinished: "on_tensors", VolumeTransform: "on_canvas", MotionTransform: "onto"}
    for kind, missing in kinds.items():
        with pytest.raises(TypeError, match=missing):
            kind()
    chain = augment.Compose([Own(lambda images: images[:, :, 1:]), augment.RandomHorizontalFlip()])
    with pytest.raises(AugmentError, match="the kernels take memory of the shape"):
        chain(smooth_images())
