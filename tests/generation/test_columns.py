"""What samples are made of, and what is said of those that are otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fastpipe.errors import OptionError
from fastpipe.generation.columns import Column, SampleError, Schema


def _learned(sample: Any, columns: Any = None) -> list[tuple[str, str, tuple]]:
    schema = Schema.learned(sample, columns)
    assert Schema.from_json(schema.as_json()) == schema
    return [(one.name, one.dtype, one.shape) for one in schema.columns]


def test_columns_are_learned_from_a_sample() -> None:
    sample = {"x": np.zeros((2, 3), "f4"), "n": 3, "f": 0.5, "b": True, "t": "é", "raw": b"ab", "z": 1j}
    assert _learned(sample) == [
        ("x", "<f4", (2, 3)), ("n", "<i8", ()), ("f", "<f8", ()), ("b", "|b1", ()), ("t", "text", ()),
        ("raw", "|u1", (None,)), ("z", "<c16", ()),
    ]  # fmt: skip


def test_tuples_and_single_values_have_numbers_or_names_that_are_given() -> None:
    assert [one[0] for one in _learned((np.zeros(2), 1))] == ["0", "1"]
    assert [one[0] for one in _learned((np.zeros(2), 1), ["x", "y"])] == ["x", "y"]
    assert _learned(np.zeros(3, "f4")) == [("0", "<f4", (3,))]
    assert _learned([1, 2]) == [("0", "<i8", (2,))]


def test_tensors_and_structured_arrays_are_arrays() -> None:
    assert _learned({"x": torch.zeros(2, 3)}) == [("x", "<f4", (2, 3))]
    pairs = np.zeros(2, [("at", "<i4"), ("x", "<f4", (3,))])
    schema = Schema.learned({"x": pairs}, None)
    assert schema.columns[0].element == pairs.dtype and Schema.from_json(schema.as_json()) == schema


def test_declared_columns_cast_within_a_kind_and_are_ragged_where_none_is() -> None:
    schema = Schema.learned({"x": np.zeros((4, 2)), "t": "a"}, {"x": ("float32", (None, 2)), "t": str})
    x, t = schema.arrays({"x": np.ones((7, 2)), "t": "héllo"})
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
    ("value", "words"),
    [(None, "'x' is None: return arrays"), ({"a": 1}, "'x' is a dict"), (object(), "'x' is a object"),
     ([[1, 2], [3]], "no array can be made"), (np.array(["a", None]), "no array of numbers"),
     (np.array(["a"]), "which HDF5 has not"), (np.zeros(2, "M8[s]"), "dates as int64"),
     (np.zeros((0, 3)), r"it is empty.*columns=\{'x': \('float64', \(None, 3\)\)\}")],
)  # fmt: skip
def test_what_cannot_be_stored_is_named_with_a_remedy(value: Any, words: str) -> None:
    with pytest.raises(SampleError, match=words):
        Schema.learned({"x": value}, None)


@pytest.mark.parametrize(
    ("sample", "words"),
    [({"x": np.zeros((3, 3), "f4"), "n": 1}, r"shape \(3, 3\), and \(2, 3\).*columns=\{'x': \('<f4', \(None, 3\)\)\}"),
     ({"x": np.zeros((2, 4), "f4"), "n": 1}, r"shape \(2, 4\), and \(2, 3\) in other samples\.$"),
     ({"x": np.zeros((2, 3)), "n": 1}, "'x' is of float64, and of float32 in other samples"),
     ({"x": np.zeros((2, 3), "f4"), "n": 1.5}, "'n' is of float64, and of int64"),
     ({"x": np.zeros((2, 3), "f4")}, r"it has the values \['x'\], and \['x', 'n'\]"),
     ((np.zeros((2, 3), "f4"), 1), "it has the values")],
)  # fmt: skip
def test_a_sample_that_is_not_like_the_others(sample: Any, words: str) -> None:
    schema = Schema.learned({"x": np.zeros((2, 3), "f4"), "n": 1}, None)
    with pytest.raises(SampleError, match=words):
        schema.arrays(sample)


def test_the_order_of_a_dict_does_not_matter() -> None:
    schema = Schema.learned({"x": 1, "y": 2.0}, None)
    assert [one.item() for one in schema.arrays({"y": 3.0, "x": 4})] == [4, 3.0]


@pytest.mark.parametrize(
    ("columns", "words"),
    [("xy", "columns= is names"), (3, "columns= is names"), ({"x": "floaty"}, "columns= has 'floaty' for 'x'"),
     ({"x": ("f4", (2, None))}, "the first may be None"), ({"x": ("f4", (0,))}, "whole numbers from 1"),
     ({"z": "f4"}, r"columns= names \['z'\], and a sample has \['x'\]")],
)  # fmt: skip
def test_columns_that_cannot_be(columns: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Schema.learned({"x": np.zeros(2, "f4")}, columns)


def test_names_that_are_taken_or_none() -> None:
    with pytest.raises(OptionError, match="the lengths of 'x' are stored as 'x_length'"):
        Schema.learned({"x": [1], "x_length": 1}, {"x": ("int64", (None,))})
    for name in ("a/b", "", 3):
        with pytest.raises(SampleError, match="is no name of a dataset"):
            Schema.learned({name: 1}, None)
    with pytest.raises(SampleError, match="has no values"):
        Schema.learned({}, None)


def test_text_with_nul_would_come_back_shorter() -> None:
    with pytest.raises(SampleError, match="text without NUL"):
        Column("t", "text").array("a\0")
