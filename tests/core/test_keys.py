"""Random numbers by keys: pinned, by the documented formula, and uniform and independent along every axis."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpipe.core import keys
from fastpipe.core.keys import sample_seed, uniforms

_any_int = st.integers(-(2**70), 2**70)
_draw = st.integers(-(2**63), 2**63 - 1)


def _by_the_formula(seed: int, epoch: int, draw: int, slot: int) -> int:
    """The module's formula, in Python integers, written a second time."""

    def mix(z: int) -> int:
        z %= 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    golden = 0x9E3779B97F4A7C15
    state = mix(mix(mix(seed + golden) + (epoch + 1) * golden) + (draw + 1) * golden)
    return mix(state + (slot + 1) * golden)


def test_values_are_pinned() -> None:
    got = uniforms(0, 0, np.array([5, -6]), 2)
    expected = [[0.07734948579115541, 0.13160460809500285], [0.24725125010691507, 0.16846673551253388]]
    assert got.tolist() == expected
    assert sample_seed(0, 0, 5) == 12172697821060964012
    assert sample_seed(-1, 3, 7) == 4219687468675153818
    # The published generator SplitMix64's first outputs for the seed 1234567.
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    steps = [(1234567 + (i + 1) * 0x9E3779B97F4A7C15) % 2**64 for i in range(4)]
    assert keys._mix_array(np.array(steps, np.uint64)).tolist() == outputs


@given(_any_int, _any_int, st.lists(_draw, max_size=8), st.integers(0, 9))
def test_values_follow_the_formula(seed: int, epoch: int, draws: list[int], count: int) -> None:
    """Each row by its own key only; seed and epoch modulo 2 ** 64."""
    with np.errstate(all="raise"):
        batch = uniforms(seed, epoch, np.array(draws, np.int64), count)
    assert batch.shape == (len(draws), count) and batch.dtype == np.float64
    for row, draw in zip(batch, draws, strict=True):
        numbers = [_by_the_formula(seed, epoch, draw, j) for j in range(count)]
        assert row.tolist() == [(number >> 11) / 2**53 for number in numbers]
        wrapped = sample_seed(seed % 2**64, epoch % 2**64, draw)
        assert sample_seed(seed, epoch, draw) == wrapped == _by_the_formula(seed, epoch, draw, 2**32)


def _ks(values: np.ndarray) -> float:
    """Kolmogorov's statistic times √n: above 1.95 with probability 0.001."""
    ordered = np.sort(values.ravel())
    n = ordered.size
    gap = max((np.arange(1, n + 1) / n - ordered).max(), (ordered - np.arange(n) / n).max())
    return float(gap * np.sqrt(n))


@pytest.mark.parametrize("seed", [0, 1, 42, -1, 2**63])
def test_numbers_are_uniform_along_every_axis(seed: int) -> None:
    table = np.stack([uniforms(seed, epoch, np.arange(500), 20) for epoch in range(4)])
    for line in (table, table[0, 0], table[0, :, 0], table[:, 0, 0], table[0, :, 19], table[3, 499]):
        assert _ks(line) < 1.95
    counts = np.bincount((table * 64).astype(int).ravel(), minlength=64)
    expected = table.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 4 * np.sqrt(2 * 63)


@pytest.mark.parametrize("seed", [0, 7])
def test_neighbours_are_not_correlated(seed: int) -> None:
    epochs = np.stack([uniforms(seed + s, e, np.arange(4000), 6) for s in (0, 1) for e in (0, 1)])
    base = epochs[0] - 0.5
    pairs = {
        "next draw": (base[:-1], base[1:]), "next slot": (base[:, :-1], base[:, 1:]),
        "next epoch": (base, epochs[1] - 0.5), "next seed": (base, epochs[2] - 0.5),
        "draw+1 against slot+1": (base[1:, :-1], base[:-1, 1:]),
    }  # fmt: skip
    for name, (one, other) in pairs.items():
        correlation = (one * other).mean() * 12
        assert abs(correlation) < 4 / np.sqrt(one.size), name
    # Streams of one counter would overlap: a draw's second number would be the next draw's first.
    assert np.unique(epochs).size == epochs.size


def test_seeds_do_not_collide_and_are_not_among_the_numbers() -> None:
    seeds = [sample_seed(s, e, d) for s in (0, 1, -1, 2**40) for e in range(5) for d in range(2000)]
    seeds += [sample_seed(*key) for key in itertools.permutations((101, 102, 103))]
    assert len(set(seeds)) == len(seeds)
    numbers = uniforms(0, 0, np.arange(200), 64)
    own = np.array([(seed >> 11) * 2.0**-53 for seed in seeds[:200]])
    assert not np.isin(own, numbers).any()
    assert abs(np.corrcoef(own, numbers[:, 0])[0, 1]) < 0.3
    base = [sample_seed(s, e, d) for s, e, d in np.ndindex(4, 4, 4)]
    for offset in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        moved = [sample_seed(s + offset[0], e + offset[1], d + offset[2]) for s, e, d in np.ndindex(4, 4, 4)]
        flipped = np.mean([(a ^ b).bit_count() for a, b in zip(base, moved, strict=True)])
        assert 30 < flipped < 34, "a low bit flips half of all bits"
