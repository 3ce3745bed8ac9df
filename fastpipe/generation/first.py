"""The first row: what samples are made of, and about how long one takes."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastpipe.errors import GenerationError, MissingDependencyError, OptionError
from fastpipe.generation.asked import Asked
from fastpipe.generation.form import Form, SampleError
from fastpipe.generation.limits import OneThreadEach
from fastpipe.generation.making import FAILURES, Maker

__all__ = ["First", "first_row"]

_TRIED = 100  # rows, for one that does not fail
_BATCH_NBYTES, _MOST_BATCH_ROWS = 4 << 20, 256
_BATCH_ROW_S = 1e-3  # where nothing is known
_TIMED, _TIMED_S = 9, 0.002  # rows, and seconds from which on there are enough of them
_TOLERANCE = 1e-5  # relative, between a row and the same of a batch


@dataclass(frozen=True)
class First:
    """What the first row tells.

    Attributes:
        form: of samples.
        row_nbytes: about how large one is in the file.
        row_s: about how long one takes.
        batch_rows: rows of a call of ``batch``; 0 without.
    """

    form: Form
    row_nbytes: int
    row_s: float
    batch_rows: int


def first_row(asked: Asked) -> First:
    """Make the first row that can be made.

    Raises:
        GenerationError: none can.
        OptionError: the columns asked for are not there; or rows of ``batch`` are others.
    """
    empty = Form((), is_dict=True)
    maker = Maker(asked.function, asked.seed, empty, policy=asked.policy, seeds_globals=asked.seeds_globals)
    with OneThreadEach():
        for index in range(min(_TRIED, asked.rows)):
            begun = time.perf_counter()
            try:
                sample = maker.sample(index)
                form = Form.learned(sample, asked.columns)
            except (OptionError, MissingDependencyError):
                raise
            except FAILURES as error:
                if asked.policy == "raise" or isinstance(error, (MemoryError, ImportError)):
                    raise GenerationError(
                        f"row {index} failed: {type(error).__name__}: {error}", index=index
                    ) from error
                continue
            row_s = time.perf_counter() - begun
            row_nbytes = form.row_nbytes(sample)
            batch_rows = 0
            if callable(getattr(asked.function, "batch", None)):
                batch_rows = max(1, min(_BATCH_NBYTES // row_nbytes, _MOST_BATCH_ROWS))
                alone = [one.copy() for one in form.arrays(sample)]  # the function may use its arrays again
                row_s = _check_batch(asked, form, index, alone, batch_rows)
            else:
                row_s = min(row_s, _next_row_s(maker, range(index + 1, asked.rows)))
            return First(form, row_nbytes, row_s, batch_rows)
    raise GenerationError(
        f"all of the first {min(_TRIED, asked.rows)} rows failed: make one alone to see why"
    )


def _next_row_s(maker: Maker, rows: range) -> float:
    """About how long a row takes that is not the first, which may import, compile or load things."""
    took: list[float] = []
    while rows and len(took) < min(_TIMED, len(rows)) and sum(took) < _TIMED_S:
        begun = time.perf_counter()
        try:
            maker.sample(rows[len(took)])
        except FAILURES:  # which is told when it is made
            break
        took.append(time.perf_counter() - begun)
    return statistics.median(took) if took else math.inf


def _check_batch(asked: Asked, form: Form, index: int, first: list[Any], batch_rows: int) -> float:
    """See whether ``batch`` makes the same rows; about how long one takes so."""
    maker = Maker(asked.function, asked.seed, form, batch_rows=batch_rows, seeds_globals=asked.seeds_globals)
    rows = range(index, min(index + batch_rows, asked.rows))
    try:
        made = maker.batch(rows)  # once for what it compiles or loads
        begun = time.perf_counter()
        made = maker.batch(rows)
        row_s = (time.perf_counter() - begun) / len(rows)
    except SampleError as error:
        raise OptionError(f"fn.batch of rows {rows.start} to {rows.stop - 1}: {error}") from error
    except FAILURES:
        return _BATCH_ROW_S  # which of the rows it is, and what then, is found out when they are made
    if asked.seeds_globals:  # one seed for a batch: no row of it is what it is alone
        return row_s
    for at, alone in ((0, first), (len(rows) - 1, form.arrays(maker.sample(rows[-1])))):
        for column, values, value in zip(form.columns, made, alone, strict=True):
            one = np.asarray(values[at])
            if one.shape != value.shape or not _equal(one, value):
                raise OptionError(
                    f"fn.batch makes other rows than fn: {column.name!r} of row {rows[at]} differs. Draw "
                    "numbers with the methods of the rng that batch is given, in the order of fn's"
                )
    return row_s


def _equal(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    if one.dtype.kind in "fc":
        return np.allclose(one, other, _TOLERANCE, _TOLERANCE, equal_nan=True)
    return bool(np.array_equal(one, other))
