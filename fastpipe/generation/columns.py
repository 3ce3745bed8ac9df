"""Columns: the names, types and shapes that the values of all samples must have.

The columns are taken from the first sample, or the user declares them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.casting import unheld
from fastpipe.core.extras import require
from fastpipe.errors import OptionError

_TEXT = "text"
_LARGEST_ROW = 2**32 - 1  # the limit of an HDF5 chunk
_HINT = "return arrays, numbers, strings or bytes"

Columns = Sequence[str] | Mapping[str, Any] | None


class SampleError(ValueError):
    """The user's function returned no valid sample, or a sample that does not have the form of the others."""


@dataclass(frozen=True)
class Column:
    """Describes one value of every sample: name, type and shape.  The values become a dataset of the file."""

    name: str
    dtype: str  # NumPy's text for the dtype of the elements, or "text"
    shape: tuple[int | None, ...] = ()  # the first length is None if it varies between samples
    is_declared: bool = False  # if True, values of other dtypes may be cast to this dtype

    @cached_property
    def is_text(self) -> bool:
        return self.dtype == _TEXT

    @cached_property
    def is_ragged(self) -> bool:
        """True if the length of the values' first dimension varies between samples; also true for text."""
        return self.is_text or (len(self.shape) > 0 and self.shape[0] is None)

    @cached_property
    def element(self) -> np.dtype[Any]:
        """The dtype of the stored elements; uint8 for text."""
        dtype = ast.literal_eval(self.dtype) if self.dtype.startswith("[") else self.dtype
        return np.dtype(np.uint8 if self.is_text else dtype)

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The shape of a value; if its first dimension has a varying length, without this dimension."""
        return tuple(length for length in self.shape if length is not None)

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes of a value.  If the length of values varies, this is the number of bytes of one
        element along the first dimension."""
        return int(np.prod(self.inner, dtype=np.int64)) * self.element.itemsize

    def array(self, value: Any) -> npt.NDArray[Any]:
        """Return a value as an array with the column's dtype and shape; (length, …) if the length varies.

        Raises a SampleError if the value does not fit this column.
        """
        # The usual case comes first, because each microsecond counts at a hundred thousand rows per second.
        if type(value) is np.ndarray and value.dtype == self.element and value.shape == self.shape:
            return value
        if self.is_text:
            if not isinstance(value, str) or "\0" in value:
                text = f"{self.name!r} is {_described(value)}, and text without NUL in other samples"
                raise SampleError(text)
            return np.frombuffer(value.encode(), np.uint8)
        array = _as_array(self.name, value)
        if array.dtype != self.element:
            if not self.is_declared or not np.can_cast(array.dtype, self.element, "same_kind"):
                raise SampleError(
                    f"{self.name!r} is of {array.dtype}, and of {self.element} in other samples. Convert it, "
                    f"or name a type that takes both: columns={{{self.name!r}: (…, {self.shape})}}"
                )
            if (lost := unheld(array, self.element)).any():
                raise SampleError(
                    f"{self.name!r} has {array[lost].flat[0]!r}, which the declared {self.element} cannot "
                    f"hold: declare a larger type in columns={{{self.name!r}: …}}"
                )
            array = array.astype(self.element)
        pairs = list(zip(self.shape, array.shape, strict=False))
        has_all = len(array.shape) == len(self.shape)
        if not has_all or any(want not in (None, got) for want, got in pairs):
            shown = ", ".join("…" if one is None else str(one) for one in self.shape)
            text = f"{self.name!r} has shape {array.shape}, and ({shown}) in other samples."
            if has_all and self.shape and array.shape[1:] == self.shape[1:]:
                text += _as_ragged(self.name, self.dtype, self.shape)
            raise SampleError(text)
        return array

    def stacked(self, values: Any, count: int) -> npt.NDArray[Any]:
        """Return the values of ``count`` samples as an array (count, …); their shape must be fixed."""
        return replace(self, shape=(count, *self.shape)).array(values)


def _as_ragged(name: str, dtype: str, shape: Sequence[int | None]) -> str:
    return f" Where samples differ in length, say so: columns={{{name!r}: ({dtype!r}, {(None, *shape[1:])})}}"


@dataclass(frozen=True)
class Schema:
    """The columns of all samples (names, types and shapes of the values), in the order of the file."""

    columns: tuple[Column, ...]
    is_dict: bool  # True if samples are dicts, False if tuples

    @classmethod
    def learned(cls, sample: Any, wanted: Columns) -> Schema:
        """Return the schema of a sample, which is a dict, a tuple, or a single value.

        ``wanted`` is the user's argument ``columns=``.  Raises a SampleError if the sample cannot be stored,
        and an OptionError if the sample lacks a column of ``wanted``.
        """
        known = declared(wanted)
        named, is_dict = _named(sample, list(known))
        if unknown := [name for name in known if name not in named]:
            raise OptionError(f"columns= names {unknown}, and a sample has {list(named)}")
        if not named:
            raise SampleError("a sample has no values")
        columns = []
        for name, value in named.items():
            if not isinstance(name, str) or not name or "/" in name or name == ".":
                raise SampleError(f"{name!r} is not a valid dataset name: pass a string without '/'")
            columns.append(known.get(name) or _column(name, value))
        schema = cls(tuple(columns), is_dict)
        for column in columns:
            lengths = length_name(column.name)
            if column.is_ragged and not column.is_text and lengths in named:
                raise OptionError(
                    f"the lengths of {column.name!r} are stored as {lengths!r}, which is a column of its "
                    "own: give that another name"
                )
            column.array(named[column.name])
        return schema

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Schema:
        """Return the schema from the values that ``as_json`` returned."""
        columns = (Column(**{**one, "shape": tuple(one["shape"])}) for one in content["columns"])
        return cls(tuple(columns), bool(content["is_dict"]))

    def as_json(self) -> dict[str, Any]:
        """Return the schema as JSON-compatible values."""
        return {"columns": [asdict(one) for one in self.columns], "is_dict": self.is_dict}

    @cached_property
    def fixed(self) -> list[Column]:
        """Columns whose values have the same shape in all samples."""
        return [one for one in self.columns if not one.is_ragged]

    @cached_property
    def ragged(self) -> list[Column]:
        """Columns whose values may differ in length between samples."""
        return [one for one in self.columns if one.is_ragged]

    @cached_property
    def _names(self) -> list[str]:
        return [one.name for one in self.columns]

    def arrays(self, sample: Any) -> list[npt.NDArray[Any]]:
        """Return a sample's values as arrays to store; raise a SampleError if the sample does not fit."""
        return [one.array(value) for one, value in zip(self.columns, self.values(sample), strict=True)]

    def values(self, sample: Any) -> list[Any]:
        """Return the values of a sample, or of a batch, in the order of the columns."""
        names = self._names
        if type(sample) is dict and self.is_dict and len(sample) == len(names):  # the usual case
            try:
                return [sample[name] for name in names]
            except KeyError:
                pass
        named, is_dict = _named(sample, names)
        if is_dict != self.is_dict or named.keys() != set(names):
            raise SampleError(f"it has the values {list(named)}, and {names} in other samples")
        return [named[name] for name in names]

    def row_nbytes(self, sample: Any) -> int:
        """Return about how many bytes ``sample`` takes in the file."""
        return sum(max(one.nbytes, 1) for one in self.arrays(sample))


def length_name(name: str) -> str:
    """Return the name of the dataset with the lengths of a column whose values vary in length."""
    return f"{name}_length"


def declared(wanted: Columns) -> dict[str, Column | None]:
    """Parse the argument ``columns=``: return each name with its column, or with None if it has no type.

    Raises an OptionError if ``columns=`` cannot be parsed.
    """
    if wanted is None:
        return {}
    if isinstance(wanted, str) or not isinstance(wanted, (Mapping, Sequence)):
        raise OptionError(f"columns must be names, or a mapping of names to types, got {wanted!r}")
    specs = wanted if isinstance(wanted, Mapping) else dict.fromkeys(wanted)
    return {str(name): spec if spec is None else _declared(str(name), spec) for name, spec in specs.items()}


def _declared(name: str, spec: Any) -> Column:
    kind, shape = spec if isinstance(spec, tuple) and len(spec) == 2 else (spec, ())
    if kind is str:
        return Column(name, _TEXT, is_declared=True)
    try:
        dtype, lengths = np.dtype(kind), tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        if any(one is not None and (int(one) != one or one < 1) for one in lengths) or None in lengths[1:]:
            raise ValueError("lengths are whole numbers from 1; the first may be None")
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"columns= has {spec!r} for {name!r}: {error}. Give str, a type such as 'float32', or a type and "
            "a shape such as ('float32', (None, 25, 3))"
        ) from None
    return _checked(name, dtype, lengths, is_declared=True)


def _column(name: str, value: Any) -> Column:
    """Return the column (name, type and shape) for a value of the first sample."""
    if isinstance(value, str):
        return Column(name, _TEXT)
    array = _as_array(name, value)
    if isinstance(value, bytes):
        return Column(name, "|u1", (None,))
    if 0 in array.shape:
        how = _as_ragged(name, array.dtype.name, array.shape)
        raise SampleError(f"{name!r} has shape {array.shape}: it is empty.{how}")
    return _checked(name, array.dtype, array.shape)


def _checked(
    name: str, dtype: np.dtype[Any], shape: tuple[int | None, ...], *, is_declared: bool = False
) -> Column:
    """Return a column; raise a SampleError if HDF5 does not support its dtype, or if values are too large."""
    h5py = require("h5py", extra="generation")
    try:
        h5py.h5t.py_create(dtype, logical=True)
    except (TypeError, ValueError):
        raise SampleError(
            f"{name!r} is of {dtype}, which HDF5 does not support: {_HINT}; dates as int64, arrays of "
            "strings as "
            "fixed-length bytes ('S16')"
        ) from None
    column = Column(name, dtype.str if dtype.names is None else repr(dtype.descr), shape, is_declared)
    if column.nbytes > _LARGEST_ROW:
        raise SampleError(f"{name!r} has {column.nbytes:,} bytes; a value may have 4 GiB at most")
    return column


def _as_array(name: str, value: Any) -> npt.NDArray[Any]:
    """Return a value as a contiguous array of numbers; raise a SampleError if that is impossible."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value, np.uint8)
    if value is None or isinstance(value, (str, Mapping, set)):
        raise SampleError(f"{name!r} is {_described(value)}: {_HINT}")
    try:
        array = np.asarray(value)
    except Exception as error:
        text = f"{name!r} is {_described(value)}, of which no array can be made: {error}"
        raise SampleError(text) from error
    if array.dtype.hasobject:
        raise SampleError(f"{name!r} is {_described(value)}, which is not an array of numbers: {_HINT}")
    return np.ascontiguousarray(array).reshape(array.shape)


def _named(sample: Any, names: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Return a sample's values by name, and whether the sample is a dict."""
    if isinstance(sample, Mapping):
        return dict(sample), True
    values = list(sample) if isinstance(sample, tuple) else [sample]
    if names and len(names) != len(values):
        raise SampleError(f"it has {len(values)} values, and columns are {list(names)}")
    return dict(zip(names or map(str, range(len(values))), values, strict=True)), False


def _described(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
