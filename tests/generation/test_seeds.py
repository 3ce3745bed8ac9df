"""A row's random numbers are NumPy's, whoever makes them."""

from __future__ import annotations

import pickle
import random
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastpipe.generation import rows as seeds
from fastpipe.generation.rows import globals_seeded, row_generator, row_generators

_SEEDS = st.one_of(st.integers(0, 2**32), st.integers(0, 2**300))
_INDICES = st.lists(st.one_of(st.integers(0, 2**20), st.integers(2**31, 2**63 - 1)), min_size=1, max_size=40)


@given(_SEEDS, _INDICES)
def test_rows_of_a_block_are_those_of_default_rng(seed: int, indices: list[int]) -> None:
    for index, rng in zip(indices, row_generators(seed, indices), strict=True):
        own = np.random.default_rng([seed, index])
        assert rng.bit_generator.state == own.bit_generator.state
        assert rng.integers(2**63) == own.integers(2**63)


def test_a_generator_can_spawn_and_be_pickled_as_numpys_can() -> None:
    rng, own = row_generators(3, range(20))[11], np.random.default_rng([3, 11])
    assert rng.spawn(2)[1].random() == own.spawn(2)[1].random()
    assert rng.spawn(1)[0].random() == own.spawn(1)[0].random()  # it counts them
    assert pickle.loads(pickle.dumps(rng)).random() == own.random()
    state = rng.bit_generator.seed_seq.generate_state(3)
    assert (state == np.random.SeedSequence([3, 11]).generate_state(3)).all()


def test_numpys_own_hashes_are_taken_if_its_algorithm_is_another_one() -> None:
    with mock.patch.object(seeds, "_MULT_A", 12345):
        rows = row_generators(5, range(30))
    assert [one.random() for one in rows] == [np.random.default_rng([5, at]).random() for at in range(30)]


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [("uniform", (-1, 2), {"size": (2, 3)}), ("normal", (), {}), ("integers", (100,), {"size": 4}),
     ("permutation", (5,), {}), ("choice", (10, 3), {"replace": False}), ("random", (), {"dtype": "float32"})],
)  # fmt: skip
def test_a_batch_draws_for_each_row_what_that_draws_alone(name: str, args: tuple, kwargs: dict) -> None:
    rows = row_generators(1, range(10, 20))
    for _ in range(2):  # and again where they are by then
        drawn = getattr(rows, name)(*args, **kwargs)
        assert len(drawn) == 10
    for at, index in enumerate(range(10, 20)):
        own = np.random.default_rng([1, index])
        getattr(own, name)(*args, **kwargs)
        alone = getattr(own, name)(*args, **kwargs)
        assert drawn[at].dtype == np.asarray(alone).dtype and np.array_equal(drawn[at], alone)


def test_a_batch_has_no_method_that_a_generator_has_not() -> None:
    with pytest.raises(AttributeError, match="no method 'gauss'"):
        row_generators(0, [1]).gauss(0, 1)


def test_another_attempt_draws_other_numbers() -> None:
    assert row_generator(0, 7).random() == np.random.default_rng([0, 7]).random()
    assert row_generator(0, 7, 1).random() == np.random.default_rng([0, 7, 1]).random()


def test_global_generators_are_seeded_and_put_back() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(1).item()

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    found = []
    for index in (3, 3, 4):
        with globals_seeded(0, index):
            found.append(drawn())
    assert found[0] == found[1] and not set(found[0]) & set(found[2])
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
