from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torchvision import tv_tensors

from fastpipe.torch.samples import BatchSamples
from fastpipe.torch.wrappers import integers


def _batch(count: int = 4, kind: type[torch.Tensor] = torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    tensor = torch.arange(count * 6, dtype=torch.float32).reshape(count, 1, 2, 3)
    return tensor, list(BatchSamples(tensor, kind, list(range(count))))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s[:-1],
        lambda s: s[1:],
        lambda s: s[::-1],
        lambda s: [s[0], s[0], s[2], s[3]],
        lambda s: [*s, s[0]],
        lambda s: [s[0], s[1], s[2], (s[3][0], s[3][1])],
        lambda s: [(s[0][0], s[0][1]), *s[1:]],
        lambda s: s[:2] + _batch()[1][2:],
        lambda s: [s[0], *_batch()[1][1:]],
        lambda s: s[:1],
        lambda s: [copy.copy(one) for one in s],
        lambda s: pickle.loads(pickle.dumps(s)),
        lambda s: [tuple(one) for one in s],
        lambda s: [list(one) for one in s],
    ],
    ids=range(14),
)
def test_other_lists_of_samples_collate_as_plain_tuples(change: Any) -> None:
    tensor, samples = _batch()
    changed = change(samples)
    images, targets = default_collate(changed)
    expected_images, expected_targets = default_collate(
        [type(one)(one) if type(one) is list else tuple(one) for one in changed]
    )
    assert images.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert torch.equal(images, expected_images)
    assert torch.equal(targets, expected_targets)


@pytest.mark.parametrize("kind", [torch.Tensor, tv_tensors.Image])
def test_a_batch_has_the_types_of_collated_tuples(kind: type[torch.Tensor]) -> None:
    _, samples = _batch(kind=kind)
    ours, theirs = default_collate(samples), default_collate([tuple(one) for one in samples])
    assert type(ours) is type(theirs)
    assert [type(part) for part in ours] == [type(part) for part in theirs]
    assert [part.dtype for part in ours] == [part.dtype for part in theirs]
    assert [part.stride() for part in ours] == [part.stride() for part in theirs]


@pytest.mark.parametrize(
    "targets",
    [[1.5, 2.5], ["a", "b"], [{"x": 1}, {"x": 2}], [(1, 2), (3, 4)], [torch.ones(2), torch.zeros(2)]],
)
def test_targets_collate_as_those_of_tuples(targets: list[Any]) -> None:
    tensor = torch.zeros(2, 3, 4, 4)
    samples = BatchSamples(tensor, torch.Tensor, targets)
    theirs = default_collate([tuple(one) for one in samples])
    assert repr(default_collate(samples)[1]) == repr(theirs[1])


def test_alone_a_sample_is_pickled_without_its_batch() -> None:
    samples = BatchSamples(torch.zeros(64, 3, 32, 32), torch.Tensor, list(range(64)))
    data = pickle.dumps(samples[5])
    assert len(data) < 3 * 32 * 32 * 4 * 2
    loaded = pickle.loads(data)
    assert type(loaded) is tuple
    assert loaded[1] == 5


def test_a_deep_copy_is_independent() -> None:
    tensor, samples = _batch()
    copied = copy.deepcopy(samples)
    tensor += 100
    assert float(copied[0][0].sum()) == 15.0
    assert default_collate(copied)[0].data_ptr() != tensor.data_ptr()


def test_a_batch_collates_to_its_memory_once() -> None:
    tensor, _ = _batch()
    samples = BatchSamples(tensor, torch.Tensor, list(range(4)))
    images, targets = default_collate(samples)
    assert images is tensor
    assert torch.equal(targets, torch.arange(4))
    again, _ = default_collate(samples)
    assert again.data_ptr() != tensor.data_ptr()
    assert torch.equal(again, tensor)


@pytest.mark.parametrize(
    "indices",
    [[], [3, -1], [True, 2], [np.uint64(5), 7], np.array([3, 1], np.uint8), np.array([2**63 - 1], np.uint64)],
)
def test_indices_may_be_integers_of_any_type(indices: Any) -> None:
    found = integers(indices)
    assert found.dtype == np.int64
    assert found.tolist() == [int(index) for index in indices]


@pytest.mark.parametrize("index", [2**63, 2**64 - 1, 2**64, -(2**63) - 1])
def test_an_integer_beyond_64_bits_is_refused(index: int) -> None:
    """2**64 - 1 in 64 bits is -1, the last sample."""
    several: list[Any] = [[index], [index, 1], [index, -1], [1, index]]
    if 0 <= index < 2**64:
        several.append(np.array([index], np.uint64))
    for indices in several:
        with pytest.raises(IndexError, match=f"{index}.* beyond the ends of any dataset"):
            integers(indices)


def test_several_indices_for_one_sample_are_refused() -> None:
    assert integers([np.array([3]), np.array([4])]).tolist() == [3, 4]  # as ``list`` takes them
    with pytest.raises(TypeError, match="one index each"):
        integers([(3,), (4,)])
    with pytest.raises(TypeError, match="one index each"):
        integers([[0, 1], [2, 3]])


@pytest.mark.parametrize("index", [1.5, "a", None])
def test_an_index_that_is_no_integer_is_refused(index: Any) -> None:
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        integers([index])
