"""Samples of a table: a data frame, a dict of columns, or a list of files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.errors import OptionError

__all__ = ["Table"]


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
            self._columns = {str(name): _array(source[name]) for name in names}
        elif isinstance(source, (Sequence, np.ndarray)) and not isinstance(source, (str, bytes)):
            self._columns = {"files": _array(source)}
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

    def column(self, name: str, what: str) -> npt.NDArray[Any]:
        """A column: (N,) of whatever it holds.

        Args:
            name: of the column.
            what: it is for, as an argument.

        Raises:
            OptionError: there is no such column.
        """
        if name not in self._columns:
            raise OptionError(f"{what} names the column {name!r}, but there are only {self.names}")
        column: npt.NDArray[Any] = self._columns[name]
        return column

    def paths(self, name: str, folder: str | os.PathLike[str] | None, what: str) -> list[str]:
        """The paths of a column of file names.

        Raises:
            OptionError: there is no such column, or a row of it has no name.
        """
        folder = "" if folder is None else os.fspath(folder)
        paths = []
        for row, value in enumerate(self.column(name, what).tolist()):
            if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
                raise OptionError(
                    f"row {row} has no file name in column {name!r}, but {value!r}: leave the row out or "
                    "fill it in"
                )
            paths.append(os.path.join(folder, os.fspath(value)))
        return paths

    def numbers(self, name: Any, what: str) -> npt.NDArray[np.float64]:
        """Numbers of one column, (N,) or (N, K), or of several, (N, K).

        Args:
            name: of the column; or names; or the numbers themselves.
            what: it is for, as an argument.

        Raises:
            OptionError: they are no numbers, or not one for each row.
        """
        if isinstance(name, str):
            values = [self.column(name, what)]
        elif isinstance(name, (list, tuple)) and name and all(isinstance(one, str) for one in name):
            values = [self.column(one, what) for one in name]
        else:
            values = [_array(name)]
        try:
            parts = [_plain(value) for value in values]
        except (TypeError, ValueError) as error:
            raise OptionError(f"{what}={name!r} must be numbers: {error}") from None
        made = parts[0] if len(parts) == 1 and not isinstance(name, (list, tuple)) else None
        if made is None:
            made = np.stack(parts, axis=1) if len(parts) > 1 else parts[0].reshape(len(parts[0]), -1)
        if len(made) != len(self):
            raise OptionError(f"{what} has {len(made)} rows, the source has {len(self)}")
        return made


def _array(column: Any) -> npt.NDArray[Any]:
    """A column as an array (N,): of objects, where its elements are sequences."""
    if isinstance(column, np.ndarray):
        return column
    if hasattr(column, "to_numpy"):
        array: npt.NDArray[Any] = column.to_numpy()
        return array
    values = list(column)
    if values and isinstance(values[0], (str, os.PathLike, list, tuple)):
        made: npt.NDArray[Any] = np.empty(len(values), object)
        made[:] = values if isinstance(values[0], (str, os.PathLike)) else None
        if made[0] is None:
            for n, value in enumerate(values):
                made[n] = value
        return made
    return np.asarray(values)


def _plain(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Numbers as float64; of a column whose elements are sequences too."""
    if values.dtype == object:
        return np.asarray(values.tolist(), np.float64)
    return values.astype(np.float64)
