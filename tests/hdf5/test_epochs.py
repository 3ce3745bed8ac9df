"""How often an epoch decodes a chunk: the formula beside counting."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.hdf5.inspect import uniform_decodes
from fastpipe.hdf5.layout import Geometry


def decodes_of(order: list[int], lead: list[int], chunk: list[int], batch_size: int) -> float:
    """Decodes ÷ chunks, counted: a chunk is decoded once for each batch with one of its samples."""
    geometry = Geometry(lead, chunk, 1, len(lead))
    total = 0
    for first in range(0, len(order), batch_size):
        total += len(np.unique(geometry.groups_of(np.array(order[first : first + batch_size]))))
    return total / geometry.groups


@settings(max_examples=20)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 7))
def test_the_mean_over_all_orders(count: int, chunk: int, batch_size: int) -> None:
    chunk = min(chunk, count)
    orders = list(itertools.permutations(range(count)))
    mean = sum(decodes_of(list(order), [count], [chunk], batch_size) for order in orders) / len(orders)
    assert uniform_decodes([count], [chunk], batch_size) == pytest.approx(mean)


@pytest.mark.parametrize(
    ("lead", "chunk", "batch_size"),
    [([1000], [16], 64), ([1000], [300], 64), ([30, 25], [4, 10], 32), ([997], [996], 10), ([500], [1], 7)],
)
def test_many_samples(lead: list[int], chunk: list[int], batch_size: int) -> None:
    rng = np.random.default_rng(0)
    counts = [
        decodes_of(rng.permutation(math.prod(lead)).tolist(), lead, chunk, batch_size) for _ in range(60)
    ]
    spread = np.std(counts) / math.sqrt(len(counts))
    assert uniform_decodes(lead, chunk, batch_size) == pytest.approx(np.mean(counts), abs=5 * spread + 1e-12)


def test_what_it_comes_close_to() -> None:
    # With far more chunks than samples in a batch, each sample decodes its chunk.
    assert uniform_decodes([10**9], [16], 256) == pytest.approx(16, rel=1e-4)
    # A batch that takes everything decodes each chunk once.
    assert uniform_decodes([1000], [16], 1000) == pytest.approx(1)
    assert uniform_decodes([1000], [16], 5000) == pytest.approx(1)
    # Samples with chunks of their own are decoded once, whatever the batches.
    assert uniform_decodes([1000], [1], 64) == pytest.approx(1)
    # One batch of an epoch, beside the formula for draws with replacement.
    groups, batch = 10_000, 256
    once = groups * (1 - (1 - 1 / groups) ** batch)
    per_batch = uniform_decodes([groups * 16], [16], batch) * groups / (groups * 16 / batch)
    assert per_batch == pytest.approx(once, rel=1e-3)
    assert uniform_decodes([0], [4], 64) == 0
