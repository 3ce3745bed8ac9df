"""Rows of a block, as the arrays that are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.generation.form import Form

__all__ = ["Block", "Failure", "Filling"]


@dataclass(frozen=True)
class Failure:
    """A row that could not be made.

    Attributes:
        index: its.
        error: type and message.
        trace: the traceback's text.
        is_final: whether no policy goes on without it: others would fail as it did.
    """

    index: int
    error: str
    trace: str = ""
    is_final: bool = False


@dataclass
class Block:
    """Rows one after another.

    Attributes:
        first, last: the first row, and the one behind the last.
        fixed: of each column of one shape its rows, (rows, …).
        lengths: of each ragged column int64 (rows,).
        flat: of each ragged column all values, one behind the other, (sum of lengths, …).
        failed: rows that are left out; zeros, or no length, are in their places.
    """

    first: int
    last: int
    fixed: list[npt.NDArray[Any]]
    lengths: list[npt.NDArray[np.int64]]
    flat: list[npt.NDArray[Any]]
    failed: list[Failure] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Of all values."""
        return sum(one.nbytes for one in (*self.fixed, *self.flat))

    def rows_with_nan(self) -> list[int]:
        """The rows in which a number is NaN."""
        found: set[int] = set()
        for array in self.fixed:
            # A sum is NaN if any number is, or if infinities meet: then each is looked at.
            if array.dtype.kind in "fc" and array.size:
                with np.errstate(all="ignore"):
                    is_clean = not np.isnan(array.sum(dtype=array.dtype))
                if not is_clean:
                    rows = np.isnan(array).reshape(len(array), -1).any(1)
                    found.update((np.flatnonzero(rows) + self.first).tolist())
        for lengths, flat in zip(self.lengths, self.flat, strict=True):
            if flat.dtype.kind in "fc" and flat.size:
                at = np.flatnonzero(np.isnan(flat).reshape(len(flat), -1).any(1))
                rows = np.searchsorted(np.cumsum(lengths), at, side="right")
                found.update((np.unique(rows) + self.first).tolist())
        return sorted(found)


class Filling:
    """A block in the making: rows are copied as they come, so that a function may use its arrays again.

    Args:
        form: of samples.
        first, last: the first row, and the one behind the last.
    """

    def __init__(self, form: Form, first: int, last: int) -> None:
        self._form, self._first, self._count = form, first, 0
        rows = last - first
        self._fixed = [np.empty((rows, *one.inner), one.element) for one in form.fixed]
        self._lengths = [np.zeros(rows, np.int64) for _ in form.ragged]
        self._flat: list[list[npt.NDArray[Any]]] = [[] for _ in form.ragged]
        # Where the values of a column go: which of the fixed or the ragged ones it is.
        counts = {True: 0, False: 0}
        self._places = []
        for column in form.columns:
            self._places.append((column.is_ragged, counts[column.is_ragged]))
            counts[column.is_ragged] += 1
        self.failed: list[Failure] = []

    def add(self, values: Sequence[npt.NDArray[Any]]) -> None:
        """A row, by column."""
        at = self._count
        for value, (is_ragged, place) in zip(values, self._places, strict=True):
            if is_ragged:
                self._flat[place].append(value.copy())
                self._lengths[place][at] = len(value)
            else:
                self._fixed[place][at] = value
        self._count = at + 1

    def add_many(self, values: Sequence[Any], rows: int) -> None:
        """Rows, by column: an array (rows, …), or of a ragged one a list of arrays."""
        at = self._count
        for value, (is_ragged, place) in zip(values, self._places, strict=True):
            if is_ragged:
                self._flat[place] += [one.copy() for one in value]
                self._lengths[place][at : at + rows] = [len(one) for one in value]
            else:
                self._fixed[place][at : at + rows] = value
        self._count = at + rows

    def leave_out(self, failure: Failure) -> None:
        """A row that failed: zeros, and no length, stay in its place."""
        self.failed.append(failure)
        for array in self._fixed:
            array[self._count] = np.zeros((), array.dtype)
        self._count += 1

    def block(self) -> Block:
        """All that was added."""
        count, flat = self._count, []
        for column, values in zip(self._form.ragged, self._flat, strict=True):
            flat.append(np.concatenate([np.zeros((0, *column.inner), column.element), *values]))
        return Block(
            self._first, self._first + count, [one[:count] for one in self._fixed],
            [one[:count] for one in self._lengths], flat, self.failed,
        )  # fmt: skip
