"""Samples that user code ends: put side by side by the threads, as long as they are alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from streams import outcomes, plain
from torch.utils.data import DataLoader, default_collate
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from fastpipe import FastImageFolder, FastLoader
from fastpipe.bench.synthetic import photo_tree
from fastpipe.torch.batches import SampleSpec, SpecGuess, matches_spec

PLAIN = torch.zeros(3, 4, 5)
SIDES = v1.Resize((40, 44))
NORMALIZE = v1.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
# Chains whose last transforms run as they are, in threads, and give one shape.
CHAINS: dict[str, Callable[[], Any]] = {
    "erasing": lambda: v1.Compose([SIDES, v1.ToTensor(), NORMALIZE, v1.RandomErasing(1.0)]),
    "erasing in place": lambda: v1.Compose([SIDES, v1.ToTensor(), v1.RandomErasing(0.5, inplace=True)]),
    "jitter": lambda: v1.Compose([SIDES, v1.ColorJitter(0.4, 0.4), v1.ToTensor(), NORMALIZE]),
    "strided": lambda: v1.Compose([SIDES, v1.TrivialAugmentWide(), v1.PILToTensor()]),
    "tv image": lambda: v2.Compose([v2.ToImage(), v2.Resize((40, 44)), v2.ColorJitter(0.4)]),
    "half": lambda: v2.Compose(
        [v2.ToImage(), v2.Resize((40, 44)), v2.RandomInvert(0.5), v2.ToDtype(torch.bfloat16, scale=True)]
    ),
    "another shape": lambda: v1.Compose([SIDES, v1.ToTensor(), v1.RandomErasing(1.0), v1.Pad(3)]),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_tree(tmp_path_factory.mktemp("tree"), classes=3, per_class=8, sizes=(52, 64))


@pytest.mark.parametrize("chain", CHAINS)
def test_batches_equal_those_made_sample_by_sample(tree: Path, chain: str) -> None:
    """From the second batch on, samples go straight into the batch's memory, which nobody else gets."""
    quick, slow = (FastImageFolder(tree, CHAINS[chain](), seed=4, threads=2) for _ in range(2))
    slow._running().spec.learn = lambda plan, values: None  # type: ignore[method-assign]
    batches, expected = (
        [images for images, _ in FastLoader(each, 5, shuffle=True)] for each in (quick, slow)
    )
    assert quick._running().spec.of(quick.plan) is not None
    assert slow._running().spec.of(slow.plan) is None
    for made, wanted in zip(batches, expected, strict=True):
        assert (made.dtype, made.shape, made.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        assert torch.equal(made, wanted)


@pytest.mark.parametrize("chain", ["jitter", "tv image", "strided"])
def test_samples_keep_their_type_and_the_batch_is_not_copied(tree: Path, chain: str) -> None:
    dataset = FastImageFolder(tree, CHAINS[chain](), threads=2)
    first, second = dataset.__getitems__(range(6)), dataset.__getitems__(range(6))
    address = second[0].whole.tensor.data_ptr()  # type: ignore[attr-defined]
    assert default_collate(second)[0].data_ptr() == address
    for one, other in zip(first, second, strict=True):
        assert type(one[0]) is type(other[0]) in (torch.Tensor, tv_tensors.Image)
        assert one[1] == other[1] and isinstance(other, tuple)


def test_workers_put_them_into_shared_memory(tree: Path) -> None:
    dataset = FastImageFolder(tree, CHAINS["strided"](), seed=1)
    here, there = (
        [plain(image) for image, _ in FastLoader(dataset, 6, num_workers=workers, workers="processes")]
        for workers in (0, 1)
    )
    assert here == there
    assert all(image.shape == (6, 3, 40, 44) for image, _ in DataLoader(dataset, 6, num_workers=1))


class _Growing:
    """A transform whose shape changes after some samples; it may run in any thread."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, image: Any) -> torch.Tensor:
        self.left -= 1
        return torch.full((3, 8 if self.left >= 0 else 9, 8), float(image.getpixel((0, 0))[0]))


def test_samples_that_become_different_are_collated_as_by_a_stock_loader(tree: Path) -> None:
    def growing(calls: int) -> FastImageFolder:
        return FastImageFolder(tree, _Growing(calls), thread_safe=True, threads=1)

    dataset = growing(8)
    shapes = [tuple(images.shape) for images, _ in FastLoader(dataset, 4, prefetch_batches=0)]
    assert shapes == [(4, 3, 8, 8)] * 2 + [(4, 3, 9, 8)] * 4
    assert dataset._running().spec.of(dataset.plan) is None
    found = outcomes(FastLoader(growing(6), 4, prefetch_batches=0), len)
    assert found[0] == 2 and isinstance(found[1], RuntimeError)
    assert "stack expects each tensor to be equal size" in str(found[1])
    samples = growing(6)
    epochs = [samples.__getitems__(range(4)) for _ in range(3)]
    sides = [[image.shape[1] for image, _ in epoch] for epoch in epochs]
    assert sides == [[8] * 4, [8, 8, 9, 9], [9] * 4]
    values = [[image[0, 0, 0].item() for image, _ in epoch] for epoch in epochs]
    assert values[0] == values[1] == values[2], "placed and separate samples keep their order"


class _Subclass(torch.Tensor):
    pass


CONJUGATED = torch.zeros(3, dtype=torch.complex64).conj()
UNLIKE = [
    (PLAIN, torch.zeros(3, 4, 6)),
    (PLAIN, torch.zeros(3, 4, 5, dtype=torch.float64)),
    (PLAIN, torch.zeros(3, 4, 5, requires_grad=True)),
    (PLAIN, torch.zeros(3, 4, 5, device="meta")),
    (PLAIN, PLAIN.to_sparse()),
    (PLAIN, PLAIN.as_subclass(_Subclass)),
    (PLAIN, tv_tensors.Image(PLAIN)),
    (PLAIN, PLAIN.numpy()),
    (PLAIN, None),
    (CONJUGATED, CONJUGATED),
    (CONJUGATED.imag, CONJUGATED.imag),
]


def test_only_plain_tensors_of_one_shape_and_dtype_are_alike() -> None:
    for value, other in UNLIKE:
        assert not matches_spec(other, SampleSpec(type(value), tuple(value.shape), value.dtype))
    spec = SampleSpec(torch.Tensor, (3, 4, 5), torch.float32)
    assert matches_spec(torch.zeros(5, 4, 3).permute(2, 1, 0), spec), "strides do not matter"
    guess, plan, another = SpecGuess(), object(), object()
    guess.learn(plan, [PLAIN, PLAIN])
    assert (guess.of(plan), guess.of(another)) == (spec, None)
    for values in ([PLAIN, None], [PLAIN, PLAIN]):
        guess.learn(plan, values)
        assert guess.of(plan) is None, "it is not tried again and again"
    guess.learn(another, [PLAIN])
    assert guess.of(another) == spec
