"""The order of an epoch: pinned values, an independent Philox, uniformity."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe.core.order import epoch_order
from fastpipe.errors import OptionError

MASK = 2**64 - 1


def philox_words(count: int, key: tuple[int, int], counter: int) -> list[int]:
    """Philox4x64-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011).

    NumPy counts up before each block of four words.
    """
    words: list[int] = []
    while len(words) < count:
        counter = (counter + 1) % 2**256
        c = [counter >> shift & MASK for shift in (0, 64, 128, 192)]
        k0, k1 = key
        for _ in range(10):
            first, second = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
            c = [second >> 64 ^ c[1] ^ k0, second & MASK, first >> 64 ^ c[3] ^ k1, first & MASK]
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
        words += c
    return words[:count]


@pytest.mark.parametrize(
    ("seed", "epoch", "expected"),
    [
        (0, 0, [7, 3, 6, 4, 2, 5, 1, 0]),
        (0, 1, [3, 5, 6, 1, 4, 2, 7, 0]),
        (-1, 0, [1, 4, 7, 3, 5, 0, 2, 6]),
        (2**64 + 3, 5, [6, 5, 7, 0, 3, 1, 4, 2]),
    ],
)
def test_order_never_changes(seed: int, epoch: int, expected: list[int]) -> None:
    assert epoch_order(8, seed=seed, epoch=epoch).tolist() == expected


@given(st.integers(0, 60), st.integers(), st.integers(0, MASK))
@settings(max_examples=50, deadline=None)
def test_order_is_the_documented_derivation(length: int, seed: int, epoch: int) -> None:
    counter = int.from_bytes(b"fp-order", "little") << 192
    words = philox_words(length, (seed % 2**64, epoch), counter)
    expected = sorted(range(length), key=lambda i: (words[i], i))
    order = epoch_order(length, seed=seed, epoch=epoch)
    assert order.dtype == np.int64
    assert order.tolist() == expected


@given(st.integers(0, 3000), st.integers(), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_order_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(length, seed=seed, epoch=epoch).tolist()) == list(range(length))


def test_seeds_and_epochs_give_different_orders() -> None:
    keys = [(seed, epoch) for seed in (-3, 0, 1, 2, 2**63) for epoch in range(20)]
    orders = {tuple(epoch_order(50, seed=seed, epoch=epoch).tolist()) for seed, epoch in keys}
    assert len(orders) == len(keys)


def test_seed_is_taken_modulo_two_to_the_64() -> None:
    np.testing.assert_array_equal(epoch_order(99, seed=-1, epoch=2), epoch_order(99, seed=2**64 - 1, epoch=2))
    np.testing.assert_array_equal(
        epoch_order(99, seed=5, epoch=2), epoch_order(99, seed=5 + 7 * 2**64, epoch=2)
    )
    np.testing.assert_array_equal(
        epoch_order(99, seed=np.int32(5), epoch=np.int64(2)), epoch_order(99, seed=5, epoch=2)
    )


def test_global_generator_is_left_alone() -> None:
    state = np.random.get_state(legacy=False)["state"]["key"].tobytes()
    epoch_order(100, seed=1, epoch=1)
    assert np.random.get_state(legacy=False)["state"]["key"].tobytes() == state


@pytest.mark.parametrize("vary", ["epoch", "seed"])
def test_all_permutations_are_equally_likely(vary: str) -> None:
    per_cell = 60
    counts = dict.fromkeys(itertools.permutations(range(5)), 0)
    for i in range(per_cell * len(counts)):
        order = epoch_order(5, seed=i, epoch=3) if vary == "seed" else epoch_order(5, seed=3, epoch=i)
        counts[tuple(order.tolist())] += 1
    chi_square = sum((count - per_cell) ** 2 / per_cell for count in counts.values())
    # 119 degrees of freedom: mean 119, standard deviation sqrt(238) = 15.4; four of them each way.
    assert 57 < chi_square < 181


def test_every_sample_is_equally_likely_at_every_position() -> None:
    length, epochs = 40, 4000
    counts = np.zeros((length, length))
    for epoch in range(epochs):
        counts[np.arange(length), epoch_order(length, seed=11, epoch=epoch)] += 1
    expected = epochs / length
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # Rows and columns have fixed sums: the statistic is length / (length - 1) times a
    # chi-square with (length - 1)**2 degrees of freedom.  Four standard deviations each way.
    mean, deviation = length * (length - 1), length / (length - 1) * np.sqrt(2) * (length - 1)
    assert abs(chi_square - mean) < 4 * deviation


@pytest.mark.parametrize("bad", [{"epoch": -1}, {"epoch": 2**64}], ids=["negative epoch", "huge epoch"])
def test_bad_values_are_named(bad: dict[str, int]) -> None:
    (name, value), *_ = bad.items()
    arguments = {"length": 3, "seed": 0, "epoch": 0, **bad}
    with pytest.raises(OptionError, match=rf"{name}=….*got {value}"):
        epoch_order(arguments["length"], seed=arguments["seed"], epoch=arguments["epoch"])


@pytest.mark.parametrize("name", ["seed", "epoch"])
@pytest.mark.parametrize("value", [1.5, np.float64(1), "1", None])
def test_what_is_no_integer_is_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"integers, .*{name}={re.escape(repr(value))}"):
        epoch_order(3, **{"seed": 0, "epoch": 0, name: value})


@pytest.mark.parametrize("length", [1 << 50, 1 << 62])
def test_an_order_that_fits_into_no_memory_is_an_error(length: int) -> None:
    with pytest.raises(OptionError, match=f"{length:,} samples .* sampler="):
        epoch_order(length, seed=0, epoch=0)
