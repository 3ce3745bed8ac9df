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
    """Counts decodes ÷ chunks: a chunk is decoded once for each batch with one of its samples."""
    geometry = Geometry(lead, chunk, 1, len(lead))
    batches = [np.array(order[first : first + batch_size]) for first in range(0, len(order), batch_size)]
    return sum(len(np.unique(geometry.groups_of(batch))) for batch in batches) / geometry.groups


@settings(max_examples=20)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 7))
def test_the_formula_is_the_mean_over_all_orders(count: int, chunk: int, batch_size: int) -> None:
    chunk, orders = min(chunk, count), itertools.permutations(range(count))
    mean = np.mean([decodes_of(list(order), [count], [chunk], batch_size) for order in orders])
    assert uniform_decodes([count], [chunk], batch_size) == pytest.approx(mean)


@pytest.mark.parametrize(
    ("lead", "chunk", "size"),
    [([1000], [16], 64), ([1000], [300], 64), ([30, 25], [4, 10], 32), ([997], [996], 10), ([500], [1], 7)],
)
def test_the_formula_is_the_mean_over_random_orders(lead: list[int], chunk: list[int], size: int) -> None:
    rng, count = np.random.default_rng(0), math.prod(lead)
    counts = [decodes_of(rng.permutation(count).tolist(), lead, chunk, size) for _ in range(40)]
    spread = np.std(counts) / math.sqrt(len(counts))
    assert uniform_decodes(lead, chunk, size) == pytest.approx(np.mean(counts), abs=5 * spread + 1e-12)
    assert uniform_decodes([0], [4], 64) == 0
    # With far more chunks than samples in a batch, each sample decodes its chunk.
    assert uniform_decodes([10**9], [16], 256) == pytest.approx(16, rel=1e-4)
