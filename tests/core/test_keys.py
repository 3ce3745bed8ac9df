"""Random numbers by keys: pinned, by the documented formula, and uniform and independent along every axis."""

from __future__ import annotations

import numpy as np
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
