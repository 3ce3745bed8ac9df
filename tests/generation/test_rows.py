"""Rows: the columns that are learned from a sample, and the random numbers of each row."""

from __future__ import annotations

import pickle
import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastpipe.errors import OptionError
from fastpipe.generation import rows as rows_module
from fastpipe.generation.columns import SampleError, Schema
from fastpipe.generation.rows import globals_seeded, row_generators


@pytest.mark.parametrize(
    ("sample", "columns", "learned"),
    [
        ({"x": np.zeros((2, 3), "f4"), "n": 3, "f": 0.5, "b": True, "t": "é", "raw": b"ab", "z": 1j}, None,
         [("x", "<f4", (2, 3)), ("n", "<i8", ()), ("f", "<f8", ()), ("b", "|b1", ()), ("t", "text", ()),
          ("raw", "|u1", (None,)), ("z", "<c16", ())]),
        ((np.zeros(2), 1), None, [("0", "<f8", (2,)), ("1", "<i8", ())]),
        ((np.zeros(2), 1), ["x", "y"], [("x", "<f8", (2,)), ("y", "<i8", ())]),
        (np.zeros(3, "f4"), None, [("0", "<f4", (3,))]), ([1, 2], None, [("0", "<i8", (2,))]),
        ({"x": torch.zeros(2, 3)}, None, [("x", "<f4", (2, 3))]),
    ],
)  # fmt: skip
def test_columns_are_learned_from_a_sample(sample: Any, columns: Any, learned: Any) -> None:
    schema = Schema.learned(sample, columns)
    assert [(one.name, one.dtype, one.shape) for one in schema.columns] == learned
    assert Schema.from_json(schema.as_json()) == schema


def test_elements_of_structured_arrays_are_kept() -> None:
    pairs = np.zeros(2, [("at", "<i4"), ("x", "<f4", (3,))])
    schema = Schema.learned({"x": pairs}, None)
    assert schema.columns[0].element == pairs.dtype and Schema.from_json(schema.as_json()) == schema


def test_declared_columns_cast_within_a_kind_and_may_be_ragged() -> None:
    schema = Schema.learned({"x": np.zeros((4, 2)), "t": "a"}, {"x": ("float32", (None, 2)), "t": str})
    x, t = schema.arrays({"t": "héllo", "x": np.ones((7, 2))})
    assert x.dtype == np.float32 and x.shape == (7, 2) and bytes(t) == "héllo".encode()
    with pytest.raises(SampleError, match="'x' is of complex128"):
        schema.arrays({"x": np.ones((7, 2), complex), "t": ""})


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [("int8", 300, "'x' has np.int64.300., which the declared int8 cannot hold"),
     ("float32", 2**24 + 1, "has np.int64.16777217., which the declared float32"),
     ("float16", 1e5, "has np.float64.100000.0., which the declared float16"),
     ("complex64", 1e300, "which the declared complex64 cannot hold"),
     ("S3", np.bytes_(b"four"), r"has np.bytes_.b'four'., which the declared \|S3"),
     ("int64", np.uint64(2**63), "which the declared int64|is of uint64")],
)  # fmt: skip
def test_a_value_that_its_declared_type_cannot_hold_is_an_error(kind: str, value: Any, words: str) -> None:
    with pytest.raises(SampleError, match=words):
        Schema.learned({"x": np.asarray(value)}, {"x": kind})


@pytest.mark.parametrize(
    ("sample", "words"),
    [({"x": None}, "'x' is None: return arrays"), ({"x": {"a": 1}}, "'x' is a dict"),
     ({"x": object()}, "'x' is a object"), ({"x": [[1, 2], [3]]}, "no array can be made"),
     ({"x": np.array(["a", None])}, "not an array of numbers"), ({"x": np.array(["a"])}, "which HDF5 does not support"),
     ({"x": np.zeros(2, "M8[s]")}, "dates as int64"), ({}, "has no values"),
     ({"x": np.zeros((0, 3))}, r"it is empty.*columns=\{'x': \('float64', \(None, 3\)\)\}"),
     ({"a/b": 1}, "is not a valid dataset name"), ({"": 1}, "is not a valid dataset name"), ({3: 1}, "is not a valid dataset name"),
     ({"t": "a\0"}, "text without NUL")],
)  # fmt: skip
def test_a_sample_that_cannot_be_stored_is_named_with_a_remedy(sample: Any, words: str) -> None:
    with pytest.raises(SampleError, match=words):
        Schema.learned(sample, None).arrays(sample)


@pytest.mark.parametrize(
    ("sample", "words"),
    [({"x": np.zeros((3, 3), "f4"), "n": 1}, r"shape \(3, 3\), and \(2, 3\).*columns=\{'x': \('<f4', \(None, 3\)\)\}"),
     ({"x": np.zeros((2, 4), "f4"), "n": 1}, r"shape \(2, 4\), and \(2, 3\) in other samples\.$"),
     ({"x": np.zeros((2, 3)), "n": 1}, "'x' is of float64, and of float32 in other samples"),
     ({"x": np.zeros((2, 3), "f4"), "n": 1.5}, "'n' is of float64, and of int64"),
     ({"x": np.zeros((2, 3), "f4")}, r"it has the values \['x'\], and \['x', 'n'\]"),
     ((np.zeros((2, 3), "f4"), 1), "it has the values")],
)  # fmt: skip
def test_a_sample_that_is_not_like_the_others_is_an_error(sample: Any, words: str) -> None:
    schema = Schema.learned({"x": np.zeros((2, 3), "f4"), "n": 1}, None)
    with pytest.raises(SampleError, match=words):
        schema.arrays(sample)


@pytest.mark.parametrize(
    ("columns", "words"),
    [("xy", "columns must be names"), (3, "columns must be names"), ({"x": "floaty"}, "columns= has 'floaty' for 'x'"),
     ({"x": ("f4", (2, None))}, "the first may be None"), ({"x": ("f4", (0,))}, "whole numbers from 1"),
     ({"z": "f4"}, r"columns= names \['z'\], and a sample has \['x', 'x_length'\]"),
     ({"x": ("f4", (None,))}, "the lengths of 'x' are stored as 'x_length'")],
)  # fmt: skip
def test_columns_that_cannot_be_are_refused(columns: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Schema.learned({"x": np.zeros(2, "f4"), "x_length": 1}, columns)


_SEEDS = st.one_of(st.integers(0, 2**32), st.integers(0, 2**300))
_INDICES = st.lists(st.one_of(st.integers(0, 2**20), st.integers(2**31, 2**63 - 1)), min_size=1, max_size=40)


@given(_SEEDS, _INDICES)
def test_generators_of_a_block_are_those_of_default_rng(seed: int, indices: list[int]) -> None:
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


def test_numpy_makes_the_generators_if_its_algorithm_is_another() -> None:
    with mock.patch.object(rows_module, "_MULT_A", 12345):
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
    with pytest.raises(AttributeError, match="no method 'gauss'"):
        rows.gauss(0, 1)


def test_global_generators_are_seeded_and_restored() -> None:
    def states() -> Any:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before, found = states(), []
    for index in (3, 3, 4):
        with globals_seeded(0, index):
            found.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert found[0] == found[1] and not set(found[0]) & set(found[2])
    assert states() == before
