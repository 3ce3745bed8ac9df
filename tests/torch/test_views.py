from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastpipe.torch.wrappers import integers


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
