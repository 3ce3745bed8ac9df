"""Samples of a batch, which lie in its memory as long as they are alike; and the indices that ask for them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streams import outcomes, plain
from torch.utils.data import DataLoader, default_collate
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from fastpipe import FastImageFolder, FastLoader
from fastpipe.torch.batches import SampleSpec, SpecGuess, matches_spec
from fastpipe.torch.samples import BatchSamples
from fastpipe.torch.wrappers import integers


def _batch() -> tuple[torch.Tensor, BatchSamples]:
    tensor = torch.arange(24.0).reshape(4, 1, 2, 3)
    return tensor, BatchSamples(tensor, torch.Tensor, list(range(4)))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s[:-1], lambda s: s[1:], lambda s: s[::-1], lambda s: s[:1], lambda s: [*s, s[0]],
        lambda s: [s[0], s[0], s[2], s[3]], lambda s: [s[0], s[1], s[2], (s[3][0], s[3][1])],
        lambda s: [(s[0][0], s[0][1]), *s[1:]], lambda s: s[:2] + list(_batch()[1])[2:],
        lambda s: [s[0], *list(_batch()[1])[1:]], lambda s: [copy.copy(one) for one in s],
        lambda s: pickle.loads(pickle.dumps(s)), lambda s: list(map(tuple, s)), lambda s: list(map(list, s)),
    ],
)  # fmt: skip
def test_other_lists_of_samples_collate_as_plain_tuples(change: Any) -> None:
    tensor, samples = _batch()
    changed = change(list(samples))
    images, targets = default_collate(changed)
    expected = default_collate([one if type(one) is list else tuple(one) for one in changed])
    assert images.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert torch.equal(images, expected[0]) and torch.equal(targets, expected[1])


def test_a_batch_collates_to_its_memory_once_and_copies_have_their_own() -> None:
    tensor, samples = _batch()
    copied = copy.deepcopy(list(samples))
    images, targets = default_collate(samples)
    assert images is tensor and torch.equal(targets, torch.arange(4))
    again, _ = default_collate(samples)
    assert again.data_ptr() != tensor.data_ptr() and torch.equal(again, tensor)
    tensor += 100
    assert float(copied[0][0].sum()) == 15.0
    assert default_collate(copied)[0].data_ptr() != tensor.data_ptr()
    large = BatchSamples(torch.zeros(64, 3, 32, 32), torch.Tensor, list(range(64)))
    data = pickle.dumps(large[5])
    assert len(data) < 3 * 32 * 32 * 4 * 2, "without its batch"
    assert type(pickle.loads(data)) is tuple and pickle.loads(data)[1] == 5


def test_indices_are_integers_of_any_type_within_64_bits() -> None:
    assert integers([np.array([3]), np.array([4])]).tolist() == [3, 4]  # as ``list`` takes them
    arrays = np.array([3, 1], np.uint8), np.array([2**63 - 1], np.uint64)
    for indices in ([], [3, -1], [True, 2], [np.uint64(5), 7], *arrays):
        found = integers(indices)
        assert found.dtype == np.int64
        assert found.tolist() == [int(index) for index in indices]
    for index in (2**63, 2**64 - 1, 2**64, -(2**63) - 1):  # 2**64 - 1 in 64 bits is -1, the last sample
        as_array = [np.array([index], np.uint64)] if 0 <= index < 2**64 else []
        for several in ([index], [index, 1], [index, -1], [1, index], *as_array):
            with pytest.raises(IndexError, match=f"{index}.* beyond the ends of any dataset"):
                integers(several)
    for pairs in ([(3,), (4,)], [[0, 1], [2, 3]]):
        with pytest.raises(TypeError, match="one index each"):
            integers(pairs)
    for index in (1.5, "a", None):
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            integers([index])


SIDES = v1.Resize((40, 44))
NORMALIZE = v1.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
# Chains whose last transforms run as they are, in threads, and give one shape.
CHAINS: dict[str, Any] = {
    "erasing": v1.Compose([SIDES, v1.ToTensor(), NORMALIZE, v1.RandomErasing(1.0)]),
    "erasing in place": v1.Compose([SIDES, v1.ToTensor(), v1.RandomErasing(0.5, inplace=True)]),
    "jitter": v1.Compose([SIDES, v1.ColorJitter(0.4, 0.4), v1.ToTensor(), NORMALIZE]),
    "strided": v1.Compose([SIDES, v1.TrivialAugmentWide(), v1.PILToTensor()]),
    "tv image": v2.Compose([v2.ToImage(), v2.Resize((40, 44)), v2.ColorJitter(0.4)]),
    "half": v2.Compose(
        [v2.ToImage(), v2.Resize((40, 44)), v2.RandomInvert(0.5), v2.ToDtype(torch.bfloat16, scale=True)]
    ),
    "another shape": v1.Compose([SIDES, v1.ToTensor(), v1.RandomErasing(1.0), v1.Pad(3)]),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_batches_equal_those_made_sample_by_sample(photo_tree: Path, chain: str) -> None:
    """From the second batch on, samples go straight into the batch's memory, which nobody else gets."""
    quick, slow = (FastImageFolder(photo_tree, CHAINS[chain], seed=4, threads=2) for _ in range(2))
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
def test_samples_keep_their_type_and_the_batch_is_not_copied(photo_tree: Path, chain: str) -> None:
    dataset = FastImageFolder(photo_tree, CHAINS[chain], threads=2)
    first, second = dataset.__getitems__(range(6)), dataset.__getitems__(range(6))
    assert default_collate(second)[0].data_ptr() == second[0].whole.tensor.data_ptr()  # type: ignore[attr-defined]
    for one, other in zip(first, second, strict=True):
        assert type(one[0]) is type(other[0]) in (torch.Tensor, tv_tensors.Image)
        assert one[1] == other[1] and isinstance(other, tuple)


def test_workers_put_them_into_shared_memory(photo_tree: Path) -> None:
    dataset = FastImageFolder(photo_tree, CHAINS["strided"], seed=1)
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


def test_samples_that_become_different_are_collated_as_by_a_stock_loader(photo_tree: Path) -> None:
    def growing(calls: int) -> FastImageFolder:
        return FastImageFolder(photo_tree, _Growing(calls), thread_safe=True, threads=1)

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


def test_only_plain_tensors_of_one_shape_and_dtype_are_alike() -> None:
    usual, conjugated = torch.zeros(3, 4, 5), torch.zeros(3, dtype=torch.complex64).conj()
    for value, other in (
        (usual, torch.zeros(3, 4, 6)), (usual, usual.double()), (usual, torch.zeros(3, 4, 5, requires_grad=True)),
        (usual, torch.zeros(3, 4, 5, device="meta")), (usual, usual.to_sparse()), (usual, usual.as_subclass(_Subclass)),
        (usual, tv_tensors.Image(usual)), (usual, usual.numpy()), (usual, None), (conjugated, conjugated),
        (conjugated.imag, conjugated.imag),
    ):  # fmt: skip
        assert not matches_spec(other, SampleSpec(type(value), tuple(value.shape), value.dtype))
    spec = SampleSpec(torch.Tensor, (3, 4, 5), torch.float32)
    assert matches_spec(torch.zeros(5, 4, 3).permute(2, 1, 0), spec), "strides do not matter"
    guess, plan, another = SpecGuess(), object(), object()
    guess.learn(plan, [usual, usual])
    assert (guess.of(plan), guess.of(another)) == (spec, None)
    for values in ([usual, None], [usual, usual]):
        guess.learn(plan, values)
        assert guess.of(plan) is None, "it is not tried again and again"
    guess.learn(another, [usual])
    assert guess.of(another) == spec
