"""Rows made by the user's function."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np

from fastpipe.generation.blocks import Block, Failure, Filling
from fastpipe.generation.form import Form, SampleError
from fastpipe.generation.seeds import RowGenerators, globals_seeded, row_generator, row_generators

__all__ = ["FAILURES", "Maker", "Policy"]

Policy = Literal["raise", "skip", "retry"]

_ATTEMPTS = 10  # of a row that is tried again
FAILURES = (Exception, SystemExit)  # of a row, rather than of what makes it
_AS_IT_IS: AbstractContextManager[None] = nullcontext()


class Maker:
    """Makes rows.

    Args:
        function: ``function(index, rng)``, perhaps with an attribute ``batch``.
        seed: of all rows.
        form: of samples.
        batch_rows: rows of a call of ``batch``; 0 where there is none.  A call always has the same rows,
            however blocks are cut: in other company a row may come out with other last bits.
        policy: what happens to a row that raises.
        seeds_globals: whether global generators are seeded for each row.
    """

    def __init__(
        self, function: Callable[..., Any], seed: int, form: Form, *,
        batch_rows: int = 0, policy: Policy = "raise", seeds_globals: bool = False,
    ) -> None:  # fmt: skip
        self._function, self._seed, self._form = function, seed, form
        self._batch, self._batch_rows = getattr(function, "batch", None), batch_rows
        self._policy, self._seeds_globals = policy, seeds_globals

    def block(self, first: int, last: int) -> tuple[Block, Failure | None]:
        """Make rows.

        Args:
            first: row; of a function with ``batch`` one at which a call begins.
            last: the row behind the last.

        Returns:
            They; and what ended it, but under ``"skip"``, with the rows before.
        """
        filling = Filling(self._form, first, last)
        for failure in self._fill(filling, first, last):
            if self._policy != "skip" or failure.is_final:
                return filling.block(), failure
            filling.leave_out(failure)
        return filling.block(), None

    def sample(self, index: int, attempt: int = 0) -> Any:
        """What the function returns for a row."""
        with self._seeded(index, attempt):
            return self._function(index, row_generator(self._seed, index, attempt))

    def batch(self, indices: Sequence[int], attempt: int = 0) -> list[Any]:
        """What ``batch`` returns for rows, by column: an array, or of a ragged one a list of arrays.

        Raises:
            SampleError: it is not of the form.
        """
        assert self._batch is not None
        rngs = (
            RowGenerators(row_generator(self._seed, index, attempt) for index in indices)
            if attempt
            else row_generators(self._seed, indices)
        )
        with self._seeded(indices[0], attempt):
            values = self._form.values(self._batch(np.asarray(indices, np.int64), rngs))
        count = len(indices)
        found: list[Any] = []
        for column, value in zip(self._form.columns, values, strict=True):
            if not column.is_ragged:
                found.append(column.stacked(value, count))
                continue
            if len(value) != count:
                raise SampleError(f"{column.name!r} of a batch of {count} has {len(value)} values")
            found.append([column.array(str(one) if column.is_text else one) for one in value])
        return found

    def _fill(self, filling: Filling, first: int, last: int) -> Iterator[Failure]:
        """Make rows one after another; those that fail come out, and are to be left out."""
        if not self._batch_rows:
            for index, rng in zip(
                range(first, last), row_generators(self._seed, range(first, last)), strict=True
            ):
                try:
                    with self._seeded(index, 0):
                        filling.add(self._form.arrays(self._function(index, rng)))
                except FAILURES as error:
                    yield from self._again(filling, index, error, self._row)
            return
        for begin in range(first, last, self._batch_rows):
            indices = range(begin, min(begin + self._batch_rows, last))
            try:
                filling.add_many(self.batch(indices), len(indices))
            except FAILURES as error:
                yield from self._one_by_one(filling, indices, error)

    def _one_by_one(self, filling: Filling, indices: range, error: BaseException) -> Iterator[Failure]:
        """The rows of a batch that raised; which of them is it?  Under ``"raise"`` none of them is kept: they
        are made again with it, in the company that they always have."""
        is_found = False
        for index in indices:
            try:
                values = self._batch_of_one(index)
            except FAILURES as own:
                is_found = True
                yield from self._again(filling, index, own, self._batch_of_one)
                continue
            if self._policy != "raise":
                filling.add(values)
        if not is_found:
            text = f"{_text(error)} (in a batch with rows up to {indices[-1]}; alone none of them fails)"
            yield Failure(indices[0], text, _trace(error), is_final=True)

    def _again(
        self, filling: Filling, index: int, error: BaseException, make: Callable[[int, int], list[Any]]
    ) -> Iterator[Failure]:
        """Try a row again, if it is to be; else it has failed."""
        for attempt in range(1, _ATTEMPTS) if self._policy == "retry" else ():
            try:
                filling.add(make(index, attempt))
                return
            except FAILURES as another:
                error = another
        # Without memory, or a module, all rows from here on would be left out.
        is_of_machine = isinstance(error, (MemoryError, ImportError))
        yield Failure(index, _text(error), _trace(error), is_of_machine)

    def _row(self, index: int, attempt: int = 0) -> list[Any]:
        return self._form.arrays(self.sample(index, attempt))

    def _batch_of_one(self, index: int, attempt: int = 0) -> list[Any]:
        return [one[0] for one in self.batch([index], attempt)]

    def _seeded(self, index: int, attempt: int) -> AbstractContextManager[None]:
        return globals_seeded(self._seed, index, attempt) if self._seeds_globals else _AS_IT_IS


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))
