"""Samples of a table: a data frame, a dict of columns, or a list of files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.casting import unheld
from fastpipe.errors import OptionError

__all__ = ["Table", "held", "values_of"]


class Table:
    """Columns of the same length, whatever they came in.

    Args:
        source: a pandas or Polars data frame, a dict of columns, or a list of file names.

    Raises:
        OptionError: it is none of these, or its columns differ in length.
    """

    def __init__(self, source: Any) -> None:
        self._columns: dict[str, Any] = {}
        if isinstance(source, Mapping) or hasattr(source, "columns"):
            names = list(source.keys() if isinstance(source, Mapping) else source.columns)
            self._columns = {str(name): values_of(source[name]) for name in names}
        elif isinstance(source, (Sequence, np.ndarray)) and not isinstance(source, (str, bytes)):
            self._columns = {"files": values_of(source)}
        else:
            raise OptionError(
                "the source must be a folder, a list of files, a data frame or a dict of columns, got "
                f"{type(source).__name__}"
            )
        lengths = {name: len(column) for name, column in self._columns.items()}
        if len(set(lengths.values())) > 1:
            raise OptionError(f"the columns differ in length: {lengths}")
        self._length = next(iter(lengths.values()), 0)
        if not self._length:
            raise OptionError("there are no rows: a dataset needs at least one")

    def __len__(self) -> int:
        return self._length

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    @property
    def names(self) -> list[str]:
        """Of the columns."""
        return list(self._columns)

    def column(self, name: str, what: str) -> npt.NDArray[Any] | list[Any]:
        """A column: N of whatever it holds, as the source has them.

        Args:
            name: of the column.
            what: it is for, as an argument.

        Raises:
            OptionError: there is no such column.
        """
        if name not in self._columns:
            raise OptionError(f"{what} names the column {name!r}, but there are only {self.names}")
        column: npt.NDArray[Any] | list[Any] = self._columns[name]
        return column

    def beside(self, names: Sequence[str], what: str) -> npt.NDArray[Any] | list[Any]:
        """Several columns, as one column of as many values in each row.

        Raises:
            OptionError: they have no common type that holds all of their values.
        """
        columns = [self.column(name, what) for name in names]
        if all(isinstance(column, list) for column in columns):
            return [list(row) for row in zip(*columns, strict=True)]
        arrays = [np.asarray(column) for column in columns]
        kinds = {array.dtype.kind for array in arrays}
        if "U" in kinds and len(kinds) > 1:
            raise OptionError(f"{what}{list(names)!r} are texts and numbers: give columns of one kind")
        dtype = np.result_type(*arrays)
        if dtype.kind == "f":
            both = zip(arrays, names, strict=True)
            arrays = [held(array, dtype, f"{what}{name!r}") for array, name in both]
        return np.stack(arrays, axis=1)

    def paths(self, name: str, folder: str | os.PathLike[str] | None, what: str) -> list[str]:
        """The paths of a column of file names.

        Raises:
            OptionError: there is no such column, or a row of it has no name.
        """
        folder = "" if folder is None else os.fspath(folder)
        paths = []
        column = self.column(name, what)
        for row, value in enumerate(column.tolist() if isinstance(column, np.ndarray) else column):
            if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
                raise OptionError(
                    f"row {row} has no file name in column {name!r}, but {value!r}: leave the row out or "
                    "fill it in"
                )
            paths.append(os.path.join(folder, os.fspath(value)))
        return paths

    def numbers(self, name: Any, dtype: npt.DTypeLike, what: str) -> npt.NDArray[Any]:
        """Numbers of one column, (N,) or (N, K), or of several, (N, K).

        Args:
            name: of the column; or names; or the numbers themselves.
            dtype: a type of floats that holds them.
            what: it is for, as an argument.

        Raises:
            OptionError: they are no numbers, not one for each row, or one that the type cannot hold.
        """
        if isinstance(name, str):
            values = [self.column(name, what)]
        elif isinstance(name, (list, tuple)) and name and all(isinstance(one, str) for one in name):
            values = [self.column(one, what) for one in name]
        else:
            values = [values_of(name)]
        parts = [_real(value, dtype, what) for value in values]
        made = parts[0] if len(parts) == 1 and not isinstance(name, (list, tuple)) else None
        if made is None:
            made = np.stack(parts, axis=1) if len(parts) > 1 else parts[0].reshape(len(parts[0]), -1)
        if len(made) != len(self):
            raise OptionError(f"{what} has {len(made)} rows, the source has {len(self)}")
        return made


def values_of(column: Any) -> npt.NDArray[Any] | list[Any]:
    """Return a column as it is: an array where it has a type of its own, else a list.

    Raises:
        OptionError: it is no sequence.
    """
    if hasattr(column, "to_numpy"):
        column = column.to_numpy()
    if isinstance(column, np.ndarray) and column.ndim:
        return column
    if isinstance(column, (str, bytes, np.ndarray)) or not isinstance(column, Iterable):
        raise OptionError(f"a column must have a value for each row, got {column!r}")
    return list(column)


def _real(values: npt.NDArray[Any] | list[Any], dtype: npt.DTypeLike, what: str) -> npt.NDArray[Any]:
    """Real numbers, (N,), or (N, K) of a column whose elements are sequences.

    Raises:
        OptionError: they are none, or the type cannot hold one of them.
    """
    plain = values.tolist() if isinstance(values, np.ndarray) and values.dtype == object else values
    try:
        array = np.asarray(plain)
    except ValueError as error:
        raise OptionError(f"{what} must be numbers, as many in each row: {error}") from None
    if array.dtype.kind not in "biuf":
        other = next((one for one in plain if not isinstance(one, (int, float))), plain[0])
        raise OptionError(f"{what} must be numbers, as many in each row, got {other!r}")
    return held(array, dtype, what)


def held(values: npt.NDArray[Any], dtype: npt.DTypeLike, what: str) -> npt.NDArray[Any]:
    """Return real numbers, (N, …), in a type of floats: whole numbers exactly, others rounded.

    Raises:
        OptionError: the type cannot hold one of them.
    """
    lost = np.argwhere(unheld(values, np.dtype(dtype)))
    if len(lost):
        value = values[tuple(lost[0])].item()
        raise OptionError(
            f"row {lost[0][0]} of {what} has {value!r}, which {np.dtype(dtype)} cannot hold: make it "
            "smaller, or, where it is an identifier, number the rows"
        )
    return values.astype(dtype)
