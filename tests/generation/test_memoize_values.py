"""Values that memoize keeps: they come back with type and bits, and no code of a file runs."""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import tracemalloc
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fastpipe import memoize
from fastpipe.generation.store import EntryError, NotStorableError, decode, encode


def _again(value: Any) -> Any:
    return decode([np.frombuffer(bytearray(blob), np.uint8) for blob in encode(value)])


def check_same(one: Any, other: Any) -> None:
    """Types and bits, at any depth."""
    assert type(one) is type(other)
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            check_same(*pair)
    elif isinstance(one, dict):
        check_same([*one, *one.values()], [*other, *other.values()])
    elif isinstance(one, float | complex) and not isinstance(one, np.generic):
        assert struct.pack(">2d", one.real, one.imag) == struct.pack(">2d", other.real, other.imag)
    elif isinstance(one, np.ndarray | np.generic):
        assert (one.dtype, one.dtype.char, one.shape) == (other.dtype, other.dtype.char, other.shape)
        assert one.flags.f_contiguous == other.flags.f_contiguous or not one.flags.forc
        if one.dtype.char in "gG":  # which has bytes that do not count
            assert np.array_equal(one, other, equal_nan=True)
        else:
            assert one.tobytes() == other.tobytes()
        assert not isinstance(other, np.ndarray) or (other.flags.writeable and other.flags.aligned)
    elif hasattr(one, "requires_grad"):  # a tensor
        import torch

        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        assert one.stride() == other.stride()
        parts = [part.detach().contiguous().reshape(-1).view(torch.uint8) for part in (one, other)]
        assert torch.equal(*parts)
    else:
        assert one == other


_numbers = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.complex_numbers()
_surrogates = st.text(st.characters(categories=["Cs", "Ll"]))
_texts = st.text() | _surrogates | st.binary() | st.binary().map(bytearray)
_dtypes = (
    hnp.scalar_dtypes() | hnp.byte_string_dtypes() | hnp.unicode_string_dtypes()
    | hnp.array_dtypes(hnp.scalar_dtypes(), allow_subarrays=True)
)  # fmt: skip
_arrays = hnp.arrays(_dtypes, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
_leaves = (
    _numbers | _texts | _arrays | _arrays.map(lambda array: array.T) | _arrays.map(lambda array: array[()])
)
_hashable = st.recursive(
    _numbers | st.text() | st.binary(), lambda inner: st.tuples(inner, inner), max_leaves=3
)
_values = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_hashable, inner, max_size=3)
        | st.dictionaries(_hashable, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)  # fmt: skip


@given(st.frozensets(_hashable, max_size=5))
def test_sets_come_back(value: frozenset[Any]) -> None:
    for one in (value, set(value)):
        again = _again(one)
        assert type(again) is type(one)
        assert {repr(item) for item in again} == {repr(item) for item in one}


@pytest.mark.parametrize(
    "value",
    [
        2**63, -(2**63), 2**20_000, math.nan, -math.nan, -0.0, 5e-324, struct.unpack(">d", b"\x7f\xf0\0\0\0\0\0\1")[0],
        complex(-0.0, math.nan), "\ud800\udc00", "\ud800", "\U00010000", "", True,
        np.longlong(3), np.longdouble(1) / 3, np.clongdouble(1j), np.datetime64("NaT"), np.datetime64("2001", "25Y"),
        np.str_("ä"), np.bytes_(b"\0a\0"), np.void(b"abc"), np.bool_(True), np.float16(0.1),
        np.zeros((), "m8[ns]"), np.zeros((0, 3)), np.zeros((3, 0), "S0"), np.arange(6, dtype=">u2"),
        np.zeros(3, np.dtype([("a", "i1"), ("b", "f8", (2,)), ("c", [("d", "U3")])], align=True)),
        np.zeros(3, np.dtype({"names": ["x"], "formats": ["i4"], "offsets": [4], "itemsize": 16})),
        np.asfortranarray(np.arange(24).reshape(2, 3, 4)), np.arange(24).reshape(2, 3, 4)[:, ::-1, ::2],
        np.arange(10)[::-1], np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]).view(np.ndarray)["a"],
        {None: 1, True: 2, 2.5: 3, "x": 4, (1, ("y",)): 5, b"z": 6, np.int8(7): 8},
        {1: "one", 1.5: {"nested": [[], (), {}]}},
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_odd_values_come_back(value: Any) -> None:
    check_same(value, _again(value))


class _Text(str):
    pass


_Point = namedtuple("_Point", "x y")
NOT_KEPT: dict[str, tuple[Any, str]] = {
    "object": (object(), "it is a builtins.object"),
    "deep": ({"a": [1, {2: _Text("x")}]}, r"it\['a'\]\[1\]\[2\] is a .*_Text"),
    "namedtuple": (_Point(1, 2), "_Point"),
    "objects": (np.array([None], object), "object"),
    "metadata": (np.zeros(1, np.dtype("i4", metadata={"of": "h5py"})), "array"),
    "masked": (np.ma.masked_array([1]), "MaskedArray"),
    "strings": (np.array(["a"], "T"), "StringDType"),
    "range": ([range(3)], r"it\[0\] is a builtins.range"),
    "function": (lambda: 1, "function"),
}


@pytest.mark.parametrize("kind", NOT_KEPT)
def test_a_value_that_is_not_kept_is_named(kind: str) -> None:
    value, message = NOT_KEPT[kind]
    with pytest.raises(NotStorableError, match=message):
        encode(value)


def test_arrays_of_other_libraries_types_are_not_kept_as_something_else() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs ml_dtypes: pip install ml_dtypes")
    with pytest.raises(NotStorableError, match="bfloat16"):
        encode(np.zeros(2, ml_dtypes.bfloat16))


def test_a_value_may_hold_itself_and_be_nested_up_to_a_depth() -> None:
    value: list[Any] = []
    value.append([value])
    again = _again(value)
    assert again[0][0] is again
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(NotStorableError, match="too deep"):
        encode(value)
    while value:  # freed level by level
        value = value[0]


class _Described:
    """Is written as something is described that is no value of Python's."""

    def __init__(self, *words: Any) -> None:
        self.words = words


def _forged(*words: Any) -> Any:
    """What is read of a description, beside a blob of 24 bytes."""

    class Writer(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return value.words if isinstance(value, _Described) else None

    file = io.BytesIO()
    Writer(file, protocol=5).dump([_Described(*words)])
    return decode([np.frombuffer(file.getvalue(), np.uint8), np.zeros(24, np.uint8)])


def test_a_description_that_does_not_fit_asks_for_no_memory() -> None:
    assert _forged("array", "<f8", (3,), False, 1)[0].tolist() == [0, 0, 0]
    for shape in ((2**40,), (4,), (-3,), (3, 2**50)):
        with pytest.raises(ValueError, match="bytes"):
            _forged("array", "<f8", shape, False, 1)
    with pytest.raises(ValueError, match="object"):
        _forged("array", "|O", (3,), False, 1)
    for kind in ("loaded", "_init__", "tensors"):
        with pytest.raises(ValueError, match="kind"):
            _forged(kind)


@pytest.mark.parametrize("value", [os.getcwd, Path, complex, Path("x"), range(3), OrderedDict()])
def test_no_name_of_a_class_or_function_is_followed(value: Any) -> None:
    for protocol in range(6):
        with pytest.raises(EntryError, match="needs pickle"):
            decode([np.frombuffer(pickle.dumps([value], protocol), np.uint8)])


@pytest.mark.parametrize(
    "steps",
    [
        b"\x80\x05K\x01r\xff\xff\xff\x0f.", b"K\x01p200000000\n.", b"\x80\x05\x96" + struct.pack("<Q", 1 << 32) + b"x.",
        b"\x80\x05\x8e" + struct.pack("<Q", 1 << 32) + b"x.", b"\x80\x02\x82\x01.", b"(i__main__\nA\n.",
        b"\x80\x05K\x01)R.", b"\x80\x05K\x01}b.", b"\x80\x05\x97.",
    ],
    ids=["LONG_BINPUT", "PUT", "BYTEARRAY8", "BINBYTES8", "EXT1", "INST", "REDUCE", "BUILD", "NEXT_BUFFER"],
)  # fmt: skip
def test_a_forged_notation_runs_nothing_and_asks_for_no_memory(steps: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((EntryError, EOFError, pickle.UnpicklingError)):
            decode([np.frombuffer(steps, np.uint8)])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_tensors_come_back() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[torch]'")
    value = {
        "bfloat16": torch.linspace(-1, 1, 7, dtype=torch.bfloat16), "view": torch.arange(1000)[10:20:3],
        "fortran": torch.arange(6.0).reshape(2, 3).T, "nan": torch.tensor([float("nan"), -0.0]),
        "parameter": torch.nn.Parameter(torch.ones(2)), "grad": torch.ones(2, requires_grad=True),
        "none": torch.zeros((0, 2)), "zero-d": torch.tensor(5, dtype=torch.int8),
        "complex": torch.tensor([1j]), "number": 3,
    }  # fmt: skip
    again = _again(value)
    check_same({**value, "view": value["view"].clone()}, again)
    assert again["view"].untyped_storage().nbytes() < 1000, "not all that it is a view of"
    shared = torch.zeros(10_000)
    assert sum(map(len, encode([shared] * 5))) < 2 * shared.nbytes
    one, *others = _again([shared] * 5)
    assert all(one.data_ptr() == other.data_ptr() for other in others)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(torch.bfloat16)
    state = {"model": model.state_dict(), "epoch": 3}
    again = _again(state)
    check_same(state, again)
    assert again["model"]._metadata == state["model"]._metadata
    with pytest.raises(NotStorableError, match="state_dict"):
        encode(model)


@settings(max_examples=60)
@given(_values)
def test_any_value_comes_back(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "kept-values"
    kept = memoize(lambda: value, dir=folder)
    kept.clear()
    check_same(value, kept())
    (entry,) = folder.iterdir()
    made = entry.stat().st_ino
    check_same(value, memoize(lambda: value, dir=folder)())
    assert entry.stat().st_ino == made, "it was not computed again"


def test_an_array_keeps_little_more_memory_than_its_own(tmp_path: Path) -> None:
    def make() -> Any:
        return {"images": np.arange(1 << 19), "odd": np.arange(7, dtype=np.uint8), "labels": np.arange(5)}

    kept = memoize(make, dir=tmp_path / "kept")
    made, again = kept(), kept()
    check_same(made, again)
    for array in again.values():  # a small one does not keep the memory of all
        assert array.base is None or array.base.nbytes < 2 * array.nbytes
    again["images"][0] = 5
    assert kept()["images"][0] == 0


@pytest.mark.parametrize("extra", [None, range(3)], ids=["plain", "pickled"])
def test_only_one_copy_is_in_memory(tmp_path: Path, extra: Any) -> None:
    def make() -> list[Any]:
        return [extra, *(np.full(1 << 18, at) for at in range(8))]

    kept = memoize(make, dir=tmp_path / "kept", pickle=True)
    made = kept()[1:]
    tracemalloc.start()
    try:
        again = kept()[1:]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    check_same(made, again)
    nbytes = sum(array.nbytes for array in again)
    assert nbytes < peak < 1.25 * nbytes
