"""Which values a type holds, against Python's own numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fastpipe.core.casting import unheld

_WHOLE = ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
_FLOATS = ["f2", "f4", "f8"]
_EDGES = [
    edge
    for bits in (1, 7, 8, 11, 15, 16, 24, 31, 32, 53, 63, 64)
    for edge in (2**bits, 2**bits - 1, -(2**bits))
]


@given(st.data(), st.sampled_from(_WHOLE), st.sampled_from([*_WHOLE, *_FLOATS, "c8"]))
def test_whole_numbers_are_held_where_they_stay_what_they_are(data: Any, kind: str, to: str) -> None:
    dtype = np.dtype(kind)
    least, most = (0, 1) if kind == "b1" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    edges = [one for one in [*_EDGES, 0, most, least, most - 1] if least <= one <= most]
    values = np.array(data.draw(st.lists(st.sampled_from(edges) | st.integers(least, most))), dtype)
    found = unheld(values, np.dtype(to))
    assert found.shape == values.shape
    for value, is_lost in zip(values.tolist(), found.tolist(), strict=True):
        value = int(value) if isinstance(value, bool) else value
        if to in _WHOLE:
            low, high = (0, 1) if to == "b1" else (np.iinfo(to).min, np.iinfo(to).max)
            assert is_lost == (not low <= value <= high)
        else:
            with np.errstate(over="ignore"):
                made = np.array(value, kind).astype(to).real.item()
            assert is_lost == (math.isinf(made) or int(made) != value)


@given(arrays(np.float64, st.integers(0, 9)), st.sampled_from(_FLOATS))
def test_floats_are_held_rounded_and_finite(values: Any, to: str) -> None:
    with np.errstate(over="ignore"):
        made = values.astype(to)
    found = unheld(values, np.dtype(to))
    for before, after, is_lost in zip(values.tolist(), made.tolist(), found.tolist(), strict=True):
        assert is_lost == (math.isinf(after) and not math.isinf(before))


@pytest.mark.parametrize(
    ("values", "to", "lost"),
    [
        ([1.0, 2.0], "i8", [True, True]),
        ([1j], "f8", [True]),
        ([1.5], "c16", [False]),
        (["abc", "abcd"], "U3", [False, True]),
        ([b"abc", b"abcd"], "S3", [False, True]),
        (["1"], "i8", [True]),
        (np.array(["2020"], "M8[D]"), "i8", [True]),
        ([2**70], "f8", [True]),
    ],
)
def test_other_kinds_are_held_by_types_of_their_own_only(values: Any, to: str, lost: list[bool]) -> None:
    assert unheld(np.asarray(values), np.dtype(to)).tolist() == lost
