"""Columns of samples: learned from the first row or declared, and enforced for all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.casting import unheld
from fastpipe.core.extras import require
from fastpipe.errors import OptionError

__all__ = ["Column", "Columns", "SampleError", "Schema", "declared"]


_TEXT = "text"
_LARGEST_ROW = 2**32 - 1  # of an HDF5 chunk
_HINT = "return arrays, numbers, strings or bytes"

Columns = Sequence[str] | Mapping[str, Any] | None


class SampleError(ValueError):
    """What a function returned is no sample, or not one like the others."""


@dataclass(frozen=True)
class Column:
    """One value of every sample.

    Attributes:
        name: the dataset's.
        dtype: of its elements as NumPy spells it, or ``"text"``.
        shape: of a sample's value; ``None`` in the place of the first length where it differs.
        is_declared: whether the caller asked for this type: then values of another may be cast to it.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] = ()
    is_declared: bool = False

    @cached_property
    def is_text(self) -> bool:
        """Whether values are strings."""
        return self.dtype == _TEXT

    @cached_property
    def is_ragged(self) -> bool:
        """Whether values have lengths of their own."""
        return self.is_text or (len(self.shape) > 0 and self.shape[0] is None)

    @cached_property
    def element(self) -> np.dtype[Any]:
        """The type of what is stored; bytes for text."""
        return np.dtype(np.uint8) if self.is_text else np.dtype(_dtype(self.dtype))

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The shape of a value, or of each element along the length of a ragged one."""
        return tuple(length for length in self.shape if length is not None)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of a value, or of each element along the length of a ragged one."""
        return int(np.prod(self.inner, dtype=np.int64)) * self.element.itemsize

    def array(self, value: Any) -> npt.NDArray[Any]:
        """Return a value as it is stored: of the column's type; ragged ones (length, …).

        Raises:
            SampleError: it is none of this column's.
        """
        # As most are: of a hundred thousand rows a second each microsecond shows.
        if type(value) is np.ndarray and value.dtype == self.element and value.shape == self.shape:
            return value
        if self.is_text:
            if not isinstance(value, str) or "\0" in value:
                raise SampleError(
                    f"{self.name!r} is {_described(value)}, and text without NUL in other samples"
                )
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
        fits = len(array.shape) == len(self.shape) and all(
            want in (None, got) for want, got in zip(self.shape, array.shape, strict=True)
        )
        if not fits:
            raise SampleError(
                f"{self.name!r} has shape {array.shape}, and {_shown(self.shape)} in other samples."
                + self._as_ragged(array)
            )
        return array

    def stacked(self, values: Any, count: int) -> npt.NDArray[Any]:
        """Return the values of several samples, which are not ragged: (count, …)."""
        return replace(self, shape=(count, *self.shape)).array(values)

    def _as_ragged(self, array: npt.NDArray[Any]) -> str:
        """How to have both shapes, if that is possible."""
        if len(array.shape) != len(self.shape) or not self.shape or array.shape[1:] != self.shape[1:]:
            return ""
        return (
            f" Where samples differ in length, say so: columns={{{self.name!r}: "
            f"({self.dtype!r}, {(None, *self.shape[1:])})}}"
        )


@dataclass(frozen=True)
class Schema:
    """The columns of all samples.

    Attributes:
        columns: in the order of the file.
        is_dict: whether samples are dicts; else tuples.
    """

    columns: tuple[Column, ...]
    is_dict: bool

    @classmethod
    def learned(cls, sample: Any, wanted: Columns) -> Schema:
        """Return the schema of a sample.

        Args:
            sample: a dict, a tuple, or a single value.
            wanted: names of a tuple's values; or for some names the type, or a type and a shape.

        Raises:
            SampleError: it cannot be stored.
            OptionError: it lacks a column that was declared.
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
                raise SampleError(f"{name!r} is no name of a dataset: give a string without '/'")
            columns.append(known.get(name) or _column(name, value))
        schema = cls(tuple(columns), is_dict)
        schema._check_lengths()
        for column in columns:
            column.array(named[column.name])
        return schema

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Schema:
        """As `as_json` gives it."""
        columns = (Column(**{**one, "shape": tuple(one["shape"])}) for one in content["columns"])
        return cls(tuple(columns), bool(content["is_dict"]))

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {"columns": [asdict(one) for one in self.columns], "is_dict": self.is_dict}

    @cached_property
    def fixed(self) -> list[Column]:
        """The columns whose values have all one shape."""
        return [one for one in self.columns if not one.is_ragged]

    @cached_property
    def ragged(self) -> list[Column]:
        """The columns whose values have lengths of their own."""
        return [one for one in self.columns if one.is_ragged]

    def arrays(self, sample: Any) -> list[npt.NDArray[Any]]:
        """Return a sample's values as they are stored, in the order of columns.

        Raises:
            SampleError: it is not of this schema.
        """
        if type(sample) is dict and sample.keys() == self._names:
            return [column.array(sample[column.name]) for column in self.columns]
        values = self.values(sample)
        return [column.array(value) for column, value in zip(self.columns, values, strict=True)]

    def values(self, sample: Any) -> list[Any]:
        """Return a sample's values, or a batch's, in the order of columns."""
        names = [one.name for one in self.columns]
        named, is_dict = _named(sample, names)
        if is_dict != self.is_dict or named.keys() != set(names):
            raise SampleError(f"it has the values {list(named)}, and {names} in other samples")
        return [named[name] for name in names]

    @cached_property
    def _names(self) -> set[str]:
        return {one.name for one in self.columns} if self.is_dict else set()

    def row_nbytes(self, sample: Any) -> int:
        """Return about how many bytes of the file one sample needs."""
        return sum(max(one.nbytes, 1) for one in self.arrays(sample))

    def _check_lengths(self) -> None:
        names = {one.name for one in self.columns}
        for column in self.ragged:
            if not column.is_text and length_name(column.name) in names:
                raise OptionError(
                    f"the lengths of {column.name!r} are stored as {length_name(column.name)!r}, "
                    "which is a column of its own: give that another name"
                )


def length_name(name: str) -> str:
    """Return the name of the dataset with the lengths of a ragged column."""
    return f"{name}_length"


def declared(wanted: Columns) -> dict[str, Column | None]:
    """Return the columns that ``columns=`` describes, by name; None where only the name is given.

    Raises:
        OptionError: it cannot be understood.
    """
    if wanted is None:
        return {}
    if isinstance(wanted, str) or not isinstance(wanted, (Mapping, Sequence)):
        raise OptionError(f"columns= is names, or a mapping of names to types, got {wanted!r}")
    if not isinstance(wanted, Mapping):
        return dict.fromkeys(map(str, wanted))
    return {str(name): _declared_column(str(name), spec) for name, spec in wanted.items()}


def _declared_column(name: str, spec: Any) -> Column | None:
    if spec is None:
        return None
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
    return _checked(Column(name, _spelled(dtype), lengths, is_declared=True))


def _column(name: str, value: Any) -> Column:
    """The column of a value."""
    if isinstance(value, str):
        return Column(name, _TEXT)
    array = _as_array(name, value)
    if isinstance(value, bytes):
        return Column(name, "|u1", (None,))
    if 0 in array.shape:
        raise SampleError(
            f"{name!r} has shape {array.shape}: it is empty. Where samples differ in length, say so: "
            f"columns={{{name!r}: ({array.dtype.name!r}, {(None, *array.shape[1:])})}}"
        )
    return _checked(Column(name, _spelled(array.dtype), array.shape))


def _checked(column: Column) -> Column:
    """Raise an error for a column that HDF5 cannot have."""
    h5py = require("h5py", extra="generation")
    try:
        h5py.h5t.py_create(column.element, logical=True)
    except (TypeError, ValueError):
        raise SampleError(
            f"{column.name!r} is of {column.element}, which HDF5 has not: {_HINT}; dates as int64, "
            "arrays of strings as fixed-length bytes ('S16')"
        ) from None
    if column.nbytes > _LARGEST_ROW:
        raise SampleError(f"{column.name!r} has {column.nbytes:,} bytes; a value may have 4 GiB at most")
    return column


def _as_array(name: str, value: Any) -> npt.NDArray[Any]:
    """A value as an array of numbers."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value, np.uint8)
    if value is None or isinstance(value, (str, Mapping, set)):
        raise SampleError(f"{name!r} is {_described(value)}: {_HINT}")
    try:
        array = np.asarray(value)
    except Exception as error:
        raise SampleError(
            f"{name!r} is {_described(value)}, of which no array can be made: {error}"
        ) from error
    if array.dtype.hasobject:
        raise SampleError(f"{name!r} is {_described(value)}, which is no array of numbers: {_HINT}")
    return np.ascontiguousarray(array).reshape(array.shape)


def _named(sample: Any, names: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """A sample's values by name, and whether it is a dict."""
    if isinstance(sample, Mapping):
        return dict(sample), True
    values = list(sample) if isinstance(sample, tuple) else [sample]
    if names and len(names) != len(values):
        raise SampleError(f"it has {len(values)} values, and columns are {list(names)}")
    return dict(zip(names or map(str, range(len(values))), values, strict=True)), False


def _spelled(dtype: np.dtype[Any]) -> str:
    """A type as text that gives it again."""
    return dtype.str if dtype.names is None else repr(dtype.descr)


def _dtype(text: str) -> Any:
    """As of `_spelled`."""
    import ast  # only structured types need it

    return ast.literal_eval(text) if text.startswith("[") else text


def _described(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _shown(shape: tuple[int | None, ...]) -> str:
    return f"({', '.join('…' if one is None else str(one) for one in shape)})"
