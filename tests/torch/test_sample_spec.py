"""Samples that user code ends: put side by side by the threads, as long as they are alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from fastpipe import FastImageFolder, FastLoader
from fastpipe.bench.synthetic import photo_tree
from fastpipe.torch.batches import SampleSpec, SpecGuess, matches_spec

PLAIN = torch.zeros(3, 4, 5)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_tree(tmp_path_factory.mktemp("tree"), classes=3, per_class=8, sizes=(52, 64))


def _norm(tv: Any) -> Any:
    return tv.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))


# Chains whose last transforms run as they are, in threads, and give one shape.
CHAINS: dict[str, Callable[[], Any]] = {
    "erasing": lambda: v1.Compose([v1.Resize((40, 44)), v1.ToTensor(), _norm(v1), v1.RandomErasing(1.0)]),
    "erasing in place": lambda: v1.Compose([v1.Resize((40, 44)), v1.ToTensor(), v1.RandomErasing(0.5, inplace=True)]),
    "jitter": lambda: v1.Compose([v1.Resize((40, 44)), v1.ColorJitter(0.4, 0.4), v1.ToTensor(), _norm(v1)]),
    "strided": lambda: v1.Compose([v1.Resize((40, 44)), v1.TrivialAugmentWide(), v1.PILToTensor()]),
    "tv image": lambda: v2.Compose([v2.ToImage(), v2.Resize((40, 44)), v2.ColorJitter(0.4)]),
    "half": lambda: v2.Compose([v2.ToImage(), v2.Resize((40, 44)), v2.RandomInvert(0.5), v2.ToDtype(torch.bfloat16, scale=True)]),
    "another shape": lambda: v1.Compose([v1.Resize((40, 44)), v1.ToTensor(), v1.RandomErasing(1.0), v1.Pad(3)]),
}  # fmt: skip


@pytest.mark.parametrize("chain", CHAINS)
def test_batches_equal_those_made_sample_by_sample(tree: Path, chain: str) -> None:
    """From the second batch on, samples go straight into the batch's memory."""

    def epoch(dataset: FastImageFolder, collate: Any = None) -> list[torch.Tensor]:
        return [images.clone() for images, _ in FastLoader(dataset, 5, shuffle=True, collate_fn=collate)]

    quick = FastImageFolder(str(tree), CHAINS[chain](), seed=4, threads=2)
    batches = epoch(quick)
    assert quick._running().spec.of(quick.plan) is not None
    slow = FastImageFolder(str(tree), CHAINS[chain](), seed=4, threads=2)
    slow._running().spec.learn = lambda plan, values: None  # type: ignore[method-assign]
    expected = epoch(slow)
    assert slow._running().spec.of(slow.plan) is None
    assert len(batches) == len(expected) == 5
    for made, wanted in zip(batches, expected, strict=True):
        assert (made.dtype, made.shape, made.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        assert torch.equal(made, wanted)


@pytest.mark.parametrize("chain", ["jitter", "tv image", "strided"])
def test_the_samples_have_their_type_and_the_batch_is_not_copied(tree: Path, chain: str) -> None:
    dataset = FastImageFolder(str(tree), CHAINS[chain](), threads=2)
    first, second = dataset.__getitems__(range(6)), dataset.__getitems__(range(6))
    address = second[0].whole.tensor.data_ptr()  # type: ignore[attr-defined]
    assert default_collate(second)[0].data_ptr() == address
    for one, other in zip(first, second, strict=True):
        assert type(one[0]) is type(other[0]) in (torch.Tensor, tv_tensors.Image)
        assert one[1] == other[1]
        assert isinstance(other, tuple)


def test_a_stock_loader_with_workers_gets_them_from_shared_memory(tree: Path) -> None:
    dataset = FastImageFolder(str(tree), CHAINS["strided"](), seed=1)
    wanted = [image for image, _ in FastLoader(dataset, 6)]
    loader = FastLoader(dataset, 6, num_workers=1, workers="processes")
    for made, expected in zip((image for image, _ in loader), wanted, strict=True):
        assert torch.equal(made, expected)
    assert all(image.shape == (6, 3, 40, 44) for image, _ in DataLoader(dataset, 6, num_workers=1))


class _Growing:
    """A transform whose shape changes after some samples; it may run in any thread."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, image: Any) -> torch.Tensor:
        self.left -= 1
        side = 8 if self.left >= 0 else 9
        return torch.full((3, side, 8), float(image.getpixel((0, 0))[0]))


def test_a_sample_that_differs_ends_it_and_is_collated_as_ever(tree: Path) -> None:
    dataset = FastImageFolder(str(tree), _Growing(8), thread_safe=True, threads=1)
    loader = FastLoader(dataset, 4, prefetch_batches=0)
    shapes, batches = [], iter(loader)
    shapes += [tuple(next(batches)[0].shape) for _ in range(2)]
    shapes += [tuple(images.shape) for images, _ in batches]
    assert shapes == [(4, 3, 8, 8)] * 2 + [(4, 3, 9, 8)] * 4
    assert dataset._running().spec.of(dataset.plan) is None


def test_a_batch_of_two_shapes_fails_as_in_a_stock_loader(tree: Path) -> None:
    dataset = FastImageFolder(str(tree), _Growing(6), thread_safe=True, threads=1)
    batches = iter(FastLoader(dataset, 4, prefetch_batches=0))
    next(batches)
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        next(batches)
    samples = FastImageFolder(str(tree), _Growing(6), thread_safe=True, threads=1)
    assert [tuple(image.shape) for image, _ in samples.__getitems__(range(4))] == [(3, 8, 8)] * 4
    mixed = samples.__getitems__(range(4))
    assert [tuple(image.shape) for image, _ in mixed] == [(3, 8, 8)] * 2 + [(3, 9, 8)] * 2
    alone = [image[0, 0, 0].item() for image, _ in samples.__getitems__(range(4))]
    assert [image[0, 0, 0].item() for image, _ in mixed] == alone, (
        "placed and separate samples keep their order"
    )


def test_what_the_user_keeps_is_never_overwritten(tree: Path) -> None:
    dataset = FastImageFolder(str(tree), CHAINS["erasing"](), threads=2)
    rng, held = random.Random(0), []
    for _ in range(6):
        for images, _ in FastLoader(dataset, 4, shuffle=True):
            value = rng.choice([images, images[1], images.numpy()[2:], images.flatten(1)[:, ::3]])
            if rng.random() < 0.5:
                held.append((value, torch.as_tensor(value).clone()))
            while len(held) > 4:
                del held[rng.randrange(len(held))]
            assert all(torch.equal(torch.as_tensor(kept), before) for kept, before in held)


# ---- what counts as alike -----------------------------------------------------------------------


def _like(value: torch.Tensor) -> SampleSpec:
    return SampleSpec(type(value), tuple(value.shape), value.dtype)


def test_strides_do_not_matter() -> None:
    assert matches_spec(torch.zeros(5, 4, 3).permute(2, 1, 0), _like(PLAIN))


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3, 4, 6),
        torch.zeros(3, 4, 5, dtype=torch.float64),
        torch.zeros(3, 4, 5, requires_grad=True),
        torch.zeros(3, 4, 5, device="meta"),
        torch.zeros(3, 4, 5).to_sparse(),
        PLAIN.as_subclass(_Subclass),
        tv_tensors.Image(PLAIN),
        PLAIN.numpy(),
        None,
        {"image": PLAIN},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_alike(other: Any) -> None:
    assert not matches_spec(other, _like(PLAIN))
    likeness, plan = SpecGuess(), object()
    likeness.learn(plan, [PLAIN, PLAIN])
    assert likeness.of(plan) == _like(PLAIN)
    assert likeness.of(object()) is None
    likeness.learn(plan, [PLAIN, other])
    assert likeness.of(plan) is None
    likeness.learn(plan, [PLAIN, PLAIN])
    assert likeness.of(plan) is None, "it is not tried again and again"
    another = object()
    likeness.learn(another, [PLAIN])
    assert likeness.of(another) == _like(PLAIN)


def test_lazily_conjugated_and_negated_values_are_left_as_they_are() -> None:
    conjugated = torch.zeros(3, dtype=torch.complex64).conj()
    assert not matches_spec(conjugated, _like(conjugated))
    negated = torch.zeros(3, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    assert not matches_spec(negated, _like(negated))
