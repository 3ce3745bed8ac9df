"""Rows that the user's function makes, in blocks of arrays."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastpipe.generation.columns import SampleError, Schema
from fastpipe.generation.seeds import RowGenerators, globals_seeded, row_generator, row_generators

Policy = Literal["raise", "skip", "retry"]

_ATTEMPTS = 10  # of a row that is tried again
FAILURES = (Exception, SystemExit)  # of a row, rather than of what makes it
_AS_IT_IS: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Failure:
    """A row that could not be made."""

    index: int
    error: str  # type and message
    trace: str = ""  # of the traceback
    is_final: bool = False  # no policy goes on without it: others would fail as it did

    @classmethod
    def of(cls, index: int, error: BaseException, note: str = "", *, is_final: bool = False) -> Failure:
        """Describe an error."""
        # Without memory, or a module, all rows from here on would be left out.
        is_final = is_final or isinstance(error, (MemoryError, ImportError))
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(index, f"{type(error).__name__}: {error}{note}", trace, is_final)


@dataclass
class Block:
    """Consecutive rows, as the arrays that are written."""

    first: int
    last: int  # the row behind the last one
    fixed: list[npt.NDArray[Any]]  # for each column of one shape its rows, (rows, …)
    lengths: list[npt.NDArray[np.int64]]  # for each ragged column (rows,)
    flat: list[npt.NDArray[Any]]  # and all values, one behind the other, (sum of lengths, …)
    failed: list[Failure] = field(default_factory=list)  # rows left out: zeros, or no length, in their places

    @property
    def nbytes(self) -> int:
        """Of all values."""
        return sum(one.nbytes for one in (*self.fixed, *self.flat))

    def rows_with_nan(self) -> list[int]:
        """The rows in which a number is NaN."""
        found: set[int] = set()
        for array in self.fixed:
            found.update(_with_nan(array))
        for lengths, flat in zip(self.lengths, self.flat, strict=True):
            found.update(np.searchsorted(np.cumsum(lengths), _with_nan(flat), side="right").tolist())
        return sorted(self.first + row for row in found)


def _with_nan(array: npt.NDArray[Any]) -> list[int]:
    if array.dtype.kind not in "fc" or not array.size:
        return []
    found: list[int] = np.flatnonzero(np.isnan(array).reshape(len(array), -1).any(1)).tolist()
    return found


class _BlockBuilder:
    """A block in the making: rows are copied as they come, so that a function may use its arrays again."""

    def __init__(self, schema: Schema, first: int, last: int) -> None:
        self._schema, self._first, self._count = schema, first, 0
        rows = last - first
        self._fixed = {one.name: np.empty((rows, *one.inner), one.element) for one in schema.fixed}
        self._lengths = {one.name: np.zeros(rows, np.int64) for one in schema.ragged}
        self._flat: dict[str, list[npt.NDArray[Any]]] = {one.name: [] for one in schema.ragged}
        self._failed: list[Failure] = []

    def add(self, values: Sequence[npt.NDArray[Any]]) -> None:
        """Add a row, by column."""
        at = self._count
        for value, column in zip(values, self._schema.columns, strict=True):
            if column.is_ragged:
                self._flat[column.name].append(value.copy())
                self._lengths[column.name][at] = len(value)
            else:
                self._fixed[column.name][at] = value
        self._count = at + 1

    def add_many(self, values: Sequence[Any], rows: int) -> None:
        """Add rows, by column: an array (rows, …), or of a ragged one a list of arrays."""
        at, end = self._count, self._count + rows
        for value, column in zip(values, self._schema.columns, strict=True):
            if column.is_ragged:
                self._flat[column.name] += [one.copy() for one in value]
                self._lengths[column.name][at:end] = [len(one) for one in value]
            else:
                self._fixed[column.name][at:end] = value
        self._count = end

    def leave_out(self, failure: Failure) -> None:
        """Leave zeros, and no length, in the place of a row that failed."""
        self._failed.append(failure)
        for array in self._fixed.values():
            array[self._count] = np.zeros((), array.dtype)
        self._count += 1

    def block(self) -> Block:
        """All that was added."""
        count = self._count
        flat = [
            np.concatenate([np.zeros((0, *one.inner), one.element), *self._flat[one.name]])
            for one in self._schema.ragged
        ]
        return Block(
            self._first, self._first + count, [one[:count] for one in self._fixed.values()],
            [one[:count] for one in self._lengths.values()], flat, self._failed,
        )  # fmt: skip


@dataclass(frozen=True)
class Task:
    """All about rows that does not change from block to block."""

    function: Callable[..., Any]  # function(index, rng), perhaps with an attribute ``batch``
    seed: int
    schema: Schema
    # Of a call of ``batch``; 0 without.  A call always has the same rows, however blocks are cut: in other
    # company a row may come out with other last bits.
    batch_rows: int = 0
    policy: Policy = "raise"
    seeds_globals: bool = False


class Maker:
    """Makes rows of a task."""

    def __init__(self, task: Task) -> None:
        self._task, self._schema, self._seed = task, task.schema, task.seed

    def block(self, first: int, last: int) -> tuple[Block, Failure | None]:
        """Make rows, from one at which a call of ``batch`` begins.

        Returns:
            The rows; and what ended it, but under ``"skip"``, with the rows before.
        """
        builder = _BlockBuilder(self._schema, first, last)
        for failure in self._fill(builder, first, last):
            if self._task.policy != "skip" or failure.is_final:
                return builder.block(), failure
            builder.leave_out(failure)
        return builder.block(), None

    def sample(self, index: int, attempt: int = 0) -> Any:
        """Return what the function returns for a row."""
        with self._seeded(index, attempt):
            return self._task.function(index, row_generator(self._seed, index, attempt))

    def batch(self, indices: Sequence[int], attempt: int = 0) -> list[Any]:
        """Return what ``batch`` returns for rows, by column: an array, or of a ragged one a list of arrays.

        Raises a SampleError where it is not of the schema.
        """
        rngs = (
            RowGenerators(row_generator(self._seed, index, attempt) for index in indices)
            if attempt
            else row_generators(self._seed, indices)
        )
        function: Any = self._task.function
        with self._seeded(indices[0], attempt):
            values = self._schema.values(function.batch(np.asarray(indices, np.int64), rngs))
        count = len(indices)
        found: list[Any] = []
        for column, value in zip(self._schema.columns, values, strict=True):
            if not column.is_ragged:
                found.append(column.stacked(value, count))
                continue
            if len(value) != count:
                raise SampleError(f"{column.name!r} of a batch of {count} has {len(value)} values")
            found.append([column.array(str(one) if column.is_text else one) for one in value])
        return found

    def _fill(self, builder: _BlockBuilder, first: int, last: int) -> Iterator[Failure]:
        """Make rows one after another; those that fail come out, and are to be left out."""
        if not self._task.batch_rows:
            function, rows = self._task.function, range(first, last)
            for index, rng in zip(rows, row_generators(self._seed, rows), strict=True):
                try:
                    with self._seeded(index, 0):
                        builder.add(self._schema.arrays(function(index, rng)))
                except FAILURES as error:
                    yield from self._again(builder, index, error, self._row)
            return
        for begin in range(first, last, self._task.batch_rows):
            indices = range(begin, min(begin + self._task.batch_rows, last))
            try:
                builder.add_many(self.batch(indices), len(indices))
            except FAILURES as error:
                yield from self._one_by_one(builder, indices, error)

    def _one_by_one(self, builder: _BlockBuilder, indices: range, error: BaseException) -> Iterator[Failure]:
        """Make the rows of a batch that raised, to find which of them it is.

        Under ``"raise"`` none of them is kept: they are made again in the company that they always have.
        """
        is_found = False
        for index in indices:
            try:
                values = self._batch_of_one(index)
            except FAILURES as own:
                is_found = True
                yield from self._again(builder, index, own, self._batch_of_one)
                continue
            if self._task.policy != "raise":
                builder.add(values)
        if not is_found:
            note = f" (in a batch with rows up to {indices[-1]}; alone none of them fails)"
            yield Failure.of(indices[0], error, note, is_final=True)

    def _again(
        self, builder: _BlockBuilder, index: int, error: BaseException, make: Callable[[int, int], list[Any]]
    ) -> Iterator[Failure]:
        """Try a row again, if it is to be; else it has failed."""
        for attempt in range(1, _ATTEMPTS) if self._task.policy == "retry" else ():
            try:
                builder.add(make(index, attempt))
                return
            except FAILURES as another:
                error = another
        yield Failure.of(index, error)

    def _row(self, index: int, attempt: int = 0) -> list[Any]:
        return self._schema.arrays(self.sample(index, attempt))

    def _batch_of_one(self, index: int, attempt: int = 0) -> list[Any]:
        return [one[0] for one in self.batch([index], attempt)]

    def _seeded(self, index: int, attempt: int) -> AbstractContextManager[None]:
        return globals_seeded(self._seed, index, attempt) if self._task.seeds_globals else _AS_IT_IS
