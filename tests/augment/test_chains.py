"""Chains of augmentations: Compose, RandomApply, keys and generators, layouts, threads, the compiler."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastpipe import augment
from fastpipe.augment.base import applied_table
from fastpipe.augment.chains import on_device
from fastpipe.augment.motion import MotionTransform
from fastpipe.augment.volumes.base import VolumeTransform
from fastpipe.core.types import Key

Make = Callable[..., Tensor]


def recipe() -> augment.Compose:
    return augment.Compose(
        [
            augment.RandomResizedCrop(32),
            augment.RandomHorizontalFlip(),
            augment.RandomApply([augment.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
            augment.RandomGrayscale(0.2),
            augment.RandomApply(augment.GaussianBlur(7)),
            augment.RandAugment(),
            augment.TrivialAugmentWide(),
            augment.RandomAffine(10, (0.1, 0.1), (0.9, 1.1), 5, "bilinear", 0.5),
            augment.ToDtype(torch.float32),
            augment.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]),
            augment.RandomErasing(0.5, value="random"),
        ]
    )


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_chain_is_its_operations_one_after_the_other(make_images: Make) -> None:
    chain, images = recipe(), make_images(torch.uint8)
    parameters = chain.draw(images.shape, generator=seeded(2))
    step = images
    for op, one in zip(chain.ops, parameters, strict=True):
        step = op.apply(step, one)
    assert torch.equal(chain.apply(images, parameters), step)
    assert torch.equal(chain(images, generator=seeded(2)), step)


def test_a_chain_is_torchvisions(make_images: Make) -> None:
    chain, images = recipe(), make_images(torch.float32)
    parameters = chain.draw(images.shape, generator=seeded(3))
    found, wanted = chain.apply(images, parameters), chain.reference(images, parameters)
    # A policy has steps, beside which floats that differ by rounding fall on either side.
    assert ((found - wanted).abs() > 1e-4).float().mean() < 0.002


def test_a_step_that_is_one_operation_draws_what_it_draws_alone(make_images: Make) -> None:
    jitter, images = augment.ColorJitter(0.4), make_images()
    alone = jitter(images, generator=seeded(1))
    assert torch.equal(augment.Compose([jitter])(images, generator=seeded(1)), alone)


def test_parameters_are_those_of_each_sample_alone(make_images: Make) -> None:
    chain, images = recipe(), make_images()
    whole = chain(images, key=Key(3, 1, np.arange(10, 22)))
    half = chain(images[6:], key=Key(3, 1, np.arange(16, 22)))
    assert torch.equal(whole[6:], half)
    assert not torch.equal(whole, chain(images, key=Key(3, 2, np.arange(10, 22))))
    assert not torch.equal(whole, chain(images, key=Key(4, 1, np.arange(10, 22))))


def test_without_a_key_each_call_is_another_and_the_global_seed_fixes_them(make_images: Make) -> None:
    chain, images = recipe(), make_images()
    torch.manual_seed(0)
    first, second = chain(images), chain(images)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(chain(images), first) and torch.equal(chain(images), second)


def test_a_batch_takes_one_number_of_the_generator(make_images: Make) -> None:
    one, other = seeded(0), seeded(0)
    recipe()(make_images(), generator=one)
    torch.empty((), dtype=torch.int64).random_(generator=other)
    assert torch.equal(one.get_state(), other.get_state())


def test_images_that_were_given_stay_as_they_are(make_images: Make) -> None:
    for dtype in (torch.uint8, torch.float32):
        images = make_images(dtype)
        before = images.clone()
        recipe()(images)
        assert torch.equal(images, before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_layouts_are_kept_and_change_no_result(make_images: Make, dtype: torch.dtype) -> None:
    chain, images = recipe(), make_images(dtype)
    found = chain(images.contiguous(memory_format=torch.channels_last), generator=seeded(0))
    assert found.is_contiguous(memory_format=torch.channels_last) and not found.is_contiguous()
    assert torch.equal(found, chain(images, generator=seeded(0)))
    assert torch.equal(found, chain(images.mT.contiguous().mT, generator=seeded(0)))  # of neither layout
    assert torch.equal(found[::2], chain(images, generator=seeded(0))[::2])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_no_result(make_images: Make, threads: int) -> None:
    images, before = make_images(), torch.get_num_threads()
    wanted = recipe()(images, generator=seeded(0))
    try:
        torch.set_num_threads(threads)
        assert torch.equal(recipe()(images, generator=seeded(0)), wanted)
    finally:
        torch.set_num_threads(before)


def test_a_child_that_was_forked_goes_on(make_images: Make) -> None:
    chain, images = recipe(), make_images()
    wanted = chain(images, generator=seeded(0))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        # Not torch.equal: OpenMP's threads, of which it has some, are not in a child.
        same = np.array_equal(chain(images, generator=seeded(0)).numpy(), wanted.numpy())
        os.write(write, b"1" if same else b"0")
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        assert answer.read() == b"1"
    os.waitpid(pid, 0)


def test_copies_are_the_same_and_work_in_another_process(make_images: Make) -> None:
    chain, images = recipe(), make_images()
    wanted = chain(images, generator=seeded(0))
    chain.ops[0](images)  # which makes a chain of its own
    for other in (copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))):
        assert torch.equal(other(images, generator=seeded(0)), wanted) and repr(other) == repr(chain)


def test_gradients_flow_through_what_can_be_differentiated(make_images: Make) -> None:
    chain = augment.Compose(
        [
            augment.RandomResizedCrop(32),
            augment.RandomHorizontalFlip(),
            augment.ColorJitter(0.4, 0.4, 0.4),
            augment.GaussianBlur(5),
            augment.RandomRotation(10, "bilinear"),
            augment.Normalize([0.5], [0.2]),
        ]
    )
    images = make_images()
    plain = chain(images, generator=seeded(0))
    images.requires_grad_()
    found = chain(images, generator=seeded(0))
    assert torch.allclose(found, plain, atol=1e-4)
    found.sum().backward()
    assert images.grad is not None and images.grad.abs().sum() > 0
    with torch.no_grad():
        assert torch.equal(chain(images, generator=seeded(0)), plain)


def test_random_apply_leaves_the_others_as_they_are(make_images: Make) -> None:
    op, images = augment.RandomApply(augment.GaussianBlur(7, 2.0), 0.5), make_images()
    parameters = op.draw(images.shape, generator=seeded(0))
    applied = parameters["is_applied"] > 0
    found = op.apply(images, parameters)
    assert 0 < applied.sum() < len(images)
    for at, is_applied in enumerate(applied.tolist()):
        assert torch.equal(found[at], images[at]) != is_applied


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_the_compiler_finds_no_graph_break_and_the_same_images(make_images: Make, dtype: torch.dtype) -> None:
    chain, images = recipe(), make_images(dtype)
    compiled = torch.compile(chain, backend="aot_eager", fullgraph=True)
    torch.manual_seed(5)
    wanted = [chain(images), chain(images)]
    torch.manual_seed(5)
    assert torch.equal(compiled(images), wanted[0]) and torch.equal(compiled(images), wanted[1])


def test_two_draws_of_one_graph_are_two(make_images: Make) -> None:
    jitter, images = augment.RandomResizedCrop(16), make_images()

    def both(images: Tensor) -> tuple[Tensor, Tensor]:
        return jitter(images), jitter(images)

    first, second = torch.compile(both, backend="aot_eager", fullgraph=True)(images)
    assert not torch.equal(first, second)


def test_what_other_devices_do_compiles_and_is_the_same(make_images: Make) -> None:
    """Their operations, here: all that is drawn is an input, so that one graph serves every batch."""
    chain, images = recipe(), make_images()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def run(images: Tensor, applied: Tensor) -> Tensor:
        return on_device(chain.ops, images, applied)

    for seed in range(3):
        tables = [one.table for one in chain.draw(images.shape, generator=seeded(seed))]
        whole = np.concatenate(tables, axis=1)
        applied = torch.from_numpy(applied_table(chain.ops, whole, tuple(images.shape[1:]))).float()
        assert torch.allclose(run(images, applied), on_device(chain.ops, images, applied), atol=1e-6)
    assert len(graphs) == 1


def test_threads_keep_nothing_of_a_batch() -> None:
    """Neither of one that was made, nor of one on which an operation failed."""

    class Failing(augment.RandomHorizontalFlip):
        def on_tensors(self, images: Tensor, columns: Any, of_bytes: bool) -> Tensor:
            raise RuntimeError("fails")

    flip = augment.RandomVerticalFlip()
    for ops in ([flip, augment.Normalize([0.5] * 3, [0.5] * 3)], [flip, Failing(1.0)]):
        chain, images = augment.Compose(ops), torch.rand(4, 3, 8, 8)
        given = weakref.ref(images)
        with contextlib.suppress(RuntimeError):
            made = chain(images)
            del made
        del images
        deadline = time.monotonic() + 30
        while given() is not None and time.monotonic() < deadline:  # a thread may just be letting go of it
            gc.collect()
            threading.Event().wait(0.01)
        assert given() is None
        assert len(chain._chain.memory._free) == 1


@pytest.mark.slow
def test_compiled_with_gradients_is_the_same(make_images: Make) -> None:
    chain = augment.Compose([augment.RandomResizedCrop(16), augment.ColorJitter(0.4)])
    images = make_images().requires_grad_()
    torch.manual_seed(5)
    wanted = chain(images)
    torch.manual_seed(5)
    found = torch.compile(chain, backend="aot_eager", fullgraph=True)(images)
    assert torch.allclose(found, wanted, atol=1e-6)
    found.sum().backward()
    assert images.grad is not None


def test_mixed_precision_does_not_touch_it(make_images: Make) -> None:
    chain = augment.Compose([augment.RandomResizedCrop(32), augment.GaussianBlur(5)])
    images = make_images().requires_grad_()
    wanted = chain(images, generator=seeded(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = chain(images, generator=seeded(0))
    assert found.dtype == torch.float32 and torch.equal(found, wanted)


def test_layouts_are_kept_on_other_devices_too(make_images: Make) -> None:
    chain = recipe()
    images = make_images().contiguous(memory_format=torch.channels_last).requires_grad_()
    found = chain(images)
    assert found.is_contiguous(memory_format=torch.channels_last) and not found.is_contiguous()
    assert chain(make_images().requires_grad_()).is_contiguous()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_caller_without_gradients_gets_the_same(make_images: Make, mode: Any) -> None:
    chain = augment.Compose([*recipe().ops, augment.MixUp(num_classes=12)])
    images, labels = make_images(), torch.arange(12)
    wanted = chain(images, labels, generator=seeded(0))
    with mode():
        for given in (images, images.clone(), images.clone().requires_grad_()):
            found = chain(given, labels.clone(), generator=seeded(0))
            assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
            assert not found[0].requires_grad
        masked = augment.SpecAugment(1, 5, 1, 5)(images[:, 0].clone())
    assert masked.shape == images[:, 0].shape


class Halved(augment.BatchTransform):
    """Somebody's own, which knows nothing but torch's operations: some images are half as large and dark."""

    draws = 1
    names = ("factor",)

    def table(self, u: Any, shape: tuple[int, ...]) -> Any:
        return 0.5 + 0.5 * (u < 0.5)

    def shape_after(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[0], shape[1] // 2, shape[2] // 2

    def on_tensors(self, images: Tensor, columns: Any, of_bytes: bool) -> Tensor:
        return images[:, :, ::2, ::2] * columns["factor"].view(-1, 1, 1, 1)


class Swapped(augment.BatchTransform):
    """Somebody's own, which mixes."""

    mixes = True

    def on_tensors(self, images: Tensor, columns: Any, of_bytes: bool) -> Tensor:
        return images.roll(1, 0)


class Louder(augment.BatchTransform):
    """Somebody's own, of spectrograms."""

    ranks = (3, 4)

    def on_tensors(self, images: Tensor, columns: Any, of_bytes: bool) -> Tensor:
        return images * 2


def test_what_a_subclass_does_with_tensors_is_done_on_the_processor(make_images: Make) -> None:
    class Brighter(augment.RandomHorizontalFlip):
        def on_tensors(self, images: Tensor, columns: Any, of_bytes: bool) -> Tensor:
            return images + 1

    images = make_images()
    assert torch.equal(augment.Compose([Brighter(), augment.RandomVerticalFlip(0.0)])(images), images + 1)


class Coarse(Halved):
    """Somebody's own, with names that fastpipe does not keep for itself, and draws that it has inherited."""

    names = ("factor", "unused")

    def __init__(self, step: float) -> None:
        self.step = self.inner = step

    def applied_names_for(self, channels: int) -> tuple[str, ...]:  # type: ignore[override]
        return self.names

    def table(self, u: Any, shape: tuple[int, ...]) -> Any:
        return np.repeat(super().table(u, shape), 2, axis=1)

    def on_tensors(self, images: Tensor, columns: Any, of_bytes: bool) -> Tensor:
        return super().on_tensors(images, columns, of_bytes) // self.step


def test_an_operation_of_ones_own_has_its_attributes_and_inherits_its_draws(make_images: Make) -> None:
    op: Any = Coarse(8.0)
    assert (op.draws, Halved.draws) == (1, 1)
    images = make_images()
    found = augment.Compose([augment.RandomApply(augment.RandomGrayscale(0.3)), op])(images)
    assert found.shape == (*images.shape[:2], images.shape[2] // 2, images.shape[3] // 2)
    assert found.max() <= 255 / 8


def test_an_operation_without_what_changes_samples_is_not_made() -> None:
    class Unfinished(augment.BatchTransform):
        draws = 1

    with pytest.raises(TypeError, match="on_tensors"):
        Unfinished()  # type: ignore[abstract]
    for kind, missing in ((VolumeTransform, "on_canvas"), (MotionTransform, "onto")):
        with pytest.raises(TypeError, match=missing):
            kind()


def test_an_operation_of_ones_own_needs_torchs_operations_only(make_images: Make) -> None:
    images = make_images()
    op = Halved()
    parameters = op.draw(images.shape, generator=seeded(0))
    factors = torch.from_numpy(parameters["factor"]).float()
    assert torch.equal(op.apply(images, parameters), op.on_tensors(images, {"factor": factors}, False))
    labels = torch.rand(12, 3)
    changed, _ = augment.Compose([op, Swapped(), augment.RandomHorizontalFlip(1.0)])(
        images, labels, generator=seeded(0)
    )
    wanted = op.apply(images, augment.Compose([op]).draw(images.shape, generator=seeded(0))[0])
    assert torch.equal(changed[1:].flip(-1), wanted[:-1]) and torch.equal(changed[0].flip(-1), wanted[-1])
    assert torch.equal(Louder()(images[:, 0]), images[:, 0] * 2)
