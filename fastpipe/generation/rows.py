"""Make rows with the user's function.  Each row has its own random generator."""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt
from numpy.random.bit_generator import ISpawnableSeedSequence

from fastpipe.generation.columns import SampleError, Schema

# ---- the random numbers of a row depend only on the seed and the index ------------------------------
#
# Row ``i`` draws from ``np.random.default_rng([seed, i])``, so that NumPy is enough to make the row again.
# Creating a generator takes 18 µs, mostly for NumPy's hash of the two numbers.  Here the hashes of many rows
# are computed at once, by the algorithm of ``np.random.SeedSequence`` (M. E. O'Neill, "Developing a seed_seq
# Alternative", 2015).  For each block the first hash is compared with NumPy's own.

_GLOBALS = threading.RLock()  # threads, including those of an executor, share the global generators
_FEW = 8  # fewer generators than this are created one by one, which is then faster
_POOL, _MASK = 4, 0xFFFFFFFF
_INIT_A, _MULT_A, _INIT_B, _MULT_B = 0x43B0D7E5, 0x931E8875, 0x8B51F9DD, 0x58F38DED
_MIX_L, _MIX_R, _SHIFT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715), np.uint32(16)


def row_generator(seed: int, index: int, attempt: int = 0) -> np.random.Generator:
    """Return the random generator of row ``index``; each ``attempt`` to make the row gets other numbers."""
    return np.random.default_rng([seed, index, attempt] if attempt else [seed, index])


def row_generators(seed: int, indices: Sequence[int]) -> RowGenerators:
    """Return the random generators of several rows, faster than by calls of ``row_generator``.

    >>> rows = row_generators(7, range(3))
    >>> rows[2].random() == np.random.default_rng([7, 2]).random()
    True
    """
    words = _hashed(seed, indices) if len(indices) >= _FEW and max(seed, *indices) <= _MASK else None
    if words is None:
        return RowGenerators(row_generator(seed, int(index)) for index in indices)
    return RowGenerators(
        np.random.Generator(np.random.PCG64(_Hashed([seed, int(index)], own)))  # type: ignore[arg-type]
        for index, own in zip(indices, words, strict=True)
    )


class RowGenerators(Sequence[np.random.Generator]):
    """The random generators of a batch's rows: a sequence that has the methods of ``np.random.Generator``.

    For B rows, ``rng.uniform(0, 1, size=3)`` returns an array (B, 3).  Row ``k`` of the array equals the
    result of ``rng[k].uniform(0, 1, size=3)``.  Every method passes the same arguments to the generators of
    all rows.

    >>> rows = row_generators(0, [4, 5])
    >>> rows.normal(size=3).shape, rows.integers(10).shape, len(rows)
    ((2, 3), (2,), 2)
    """

    def __init__(self, rows: Iterator[np.random.Generator]) -> None:
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> np.random.Generator: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[np.random.Generator]: ...
    def __getitem__(self, row: int | slice) -> Any:
        return self._rows[row]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not callable(getattr(np.random.Generator, name, None)):
            raise AttributeError(f"a np.random.Generator has no method {name!r}")

        def draw(*args: Any, **kwargs: Any) -> npt.NDArray[Any]:
            return np.stack([getattr(row, name)(*args, **kwargs) for row in self._rows])

        return draw


@contextmanager
def globals_seeded(seed: int, index: int, attempt: int = 0) -> Iterator[None]:
    """Seed the global generators of ``random``, ``np.random`` and torch for a row; restore them afterwards.

    torch is seeded only if it is loaded.  A lock lets one thread at a time into the ``with`` block.
    """
    torch = sys.modules.get("torch")
    first, second = row_generator(seed, index, attempt).integers(2**32, size=2).tolist()
    with _GLOBALS:
        states = random.getstate(), np.random.get_state(), torch and torch.get_rng_state()
        random.seed(first << 32 | second)
        np.random.seed(first)
        if torch is not None:
            torch.manual_seed(first << 31 | second >> 1)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            if torch is not None:
                torch.set_rng_state(states[2])


class _Hashed(ISpawnableSeedSequence):
    """The ``SeedSequence`` of a row.

    ``words`` is the state of the row's PCG64, which has been computed before.  NumPy's own ``SeedSequence``
    computes everything else.
    """

    def __init__(self, entropy: list[int], words: npt.NDArray[np.uint64]) -> None:
        self._entropy, self._words = entropy, words

    @cached_property
    def _own(self) -> np.random.SeedSequence:
        return np.random.SeedSequence(self._entropy)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        is_known = n_words == _POOL and dtype is np.uint64
        return self._words if is_known else self._own.generate_state(n_words, dtype)

    def spawn(self, n_children: int) -> list[np.random.SeedSequence]:  # type: ignore[override]
        return self._own.spawn(n_children)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hashed, (self._entropy, self._words)


def _hashed(seed: int, indices: Sequence[int]) -> npt.NDArray[np.uint64] | None:
    """Return ``SeedSequence([seed, i]).generate_state(4, np.uint64)`` for each ``i``: uint64 (B, 4).

    Return None if the installed NumPy uses another algorithm.
    """
    rows = np.asarray(indices, np.uint32)
    hashed, zero = _hash(_INIT_A, _MULT_A), np.zeros_like(rows)
    pool = [hashed(one) for one in (np.full_like(rows, seed), rows, zero, zero)]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                mixed = _MIX_L * pool[target] - _MIX_R * hashed(pool[source])
                pool[target] = mixed ^ (mixed >> _SHIFT)
    hashed = _hash(_INIT_B, _MULT_B)
    state = np.stack([hashed(pool[at % _POOL]) for at in range(2 * _POOL)], axis=1)
    words = state.astype("<u4").view("<u8").astype(np.uint64)
    first = np.random.SeedSequence([seed, int(rows[0])]).generate_state(_POOL, np.uint64)
    return words if np.array_equal(first, words[0]) else None


def _hash(constant: int, factor: int) -> Callable[[Any], npt.NDArray[np.uint32]]:
    """Return a function that hashes arrays; each call uses the next constant."""

    def hashed(value: Any) -> npt.NDArray[np.uint32]:
        nonlocal constant
        value = value ^ np.uint32(constant)
        constant = constant * factor & _MASK
        value = value * np.uint32(constant)
        return value ^ (value >> _SHIFT)  # type: ignore[no-any-return]

    return hashed


# ---- blocks of the rows that the user's function makes ----------------------------------------------

Policy = Literal["raise", "skip", "retry"]

_ATTEMPTS = 10  # attempts for a row under the policy ``"retry"``
FAILURES = (Exception, SystemExit)  # errors of a row; other errors end the worker
_AS_IT_IS: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Failure:
    """A row that could not be made, and why."""

    index: int
    error: str  # type and message
    trace: str = ""  # the traceback, as text
    is_final: bool = False  # True if generation stops under any policy: other rows would fail, too

    @classmethod
    def of(cls, index: int, error: BaseException, note: str = "", *, is_final: bool = False) -> Failure:
        """Describe the failure of row ``index``: the text of ``error``, with ``note`` at the end."""
        # If memory or a module is missing, all later rows would fail, too, and would be left out.
        is_final = is_final or isinstance(error, (MemoryError, ImportError))
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(index, f"{type(error).__name__}: {error}{note}", trace, is_final)


@dataclass
class Block:
    """Consecutive rows, as the arrays to be written."""

    first: int
    last: int  # index after the last row
    fixed: list[npt.NDArray[Any]]  # the rows of each column of fixed shape, (rows, …)
    lengths: list[npt.NDArray[np.int64]]  # the lengths of the rows in each ragged column, (rows,)
    flat: list[npt.NDArray[Any]]  # the concatenated values of each ragged column, (sum of lengths, …)
    failed: list[Failure] = field(default_factory=list)  # rows that are left out: zeros, and length 0

    @property
    def nbytes(self) -> int:
        """Number of bytes of all values."""
        return sum(one.nbytes for one in (*self.fixed, *self.flat))

    def rows_with_nan(self) -> list[int]:
        """Return the indices of the rows in which a number is NaN."""
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
    """Collects rows for a block.  Each row is copied, so the user's function may reuse its arrays."""

    def __init__(self, schema: Schema, first: int, last: int) -> None:
        self._schema, self._first, self._count = schema, first, 0
        rows = last - first
        self._fixed = {one.name: np.empty((rows, *one.inner), one.element) for one in schema.fixed}
        self._lengths = {one.name: np.zeros(rows, np.int64) for one in schema.ragged}
        self._flat: dict[str, list[npt.NDArray[Any]]] = {one.name: [] for one in schema.ragged}
        self._failed: list[Failure] = []

    def add(self, values: Sequence[npt.NDArray[Any]]) -> None:
        """Add a row; ``values`` has an array for each column."""
        at = self._count
        for value, column in zip(values, self._schema.columns, strict=True):
            if column.is_ragged:
                self._flat[column.name].append(value.copy())
                self._lengths[column.name][at] = len(value)
            else:
                self._fixed[column.name][at] = value
        self._count = at + 1

    def add_many(self, values: Sequence[Any], rows: int) -> None:
        """Add rows; ``values`` has, per column, an array (rows, …), or a list of arrays if lengths vary."""
        at, end = self._count, self._count + rows
        for value, column in zip(values, self._schema.columns, strict=True):
            if column.is_ragged:
                self._flat[column.name] += [one.copy() for one in value]
                self._lengths[column.name][at:end] = [len(one) for one in value]
            else:
                self._fixed[column.name][at:end] = value
        self._count = end

    def leave_out(self, failure: Failure) -> None:
        """Add a failed row: zeros in columns of fixed shape, and length 0 in columns of varying length."""
        self._failed.append(failure)
        for array in self._fixed.values():
            array[self._count] = np.zeros((), array.dtype)
        self._count += 1

    def block(self) -> Block:
        """Return the block of all added rows."""
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
    """The user's function, and the options with which workers make all rows."""

    function: Callable[..., Any]  # function(index, rng), perhaps with an attribute ``batch``
    seed: int
    schema: Schema
    # Number of rows in a call of ``batch``; 0 if there is no ``batch``.  The division into blocks does not
    # change which rows a call gets, because a row's last bits may depend on the other rows of the call.
    batch_rows: int = 0
    policy: Policy = "raise"
    seeds_globals: bool = False


class Maker:
    """Makes rows with the user's function and the options of a task."""

    def __init__(self, task: Task) -> None:
        self._task, self._schema, self._seed = task, task.schema, task.seed

    def block(self, first: int, last: int) -> tuple[Block, Failure | None]:
        """Make the rows from ``first`` to ``last - 1``.

        If the function has an attribute ``batch``, one of its calls must begin with row ``first``.

        Returns:
            The rows, and the failure that ended the block early.  The failure is None if nothing did so.
            With ``bad_samples="skip"`` a failed row is left out and usually does not end the block.
        """
        builder = _BlockBuilder(self._schema, first, last)
        for failure in self._fill(builder, first, last):
            if self._task.policy != "skip" or failure.is_final:
                return builder.block(), failure
            builder.leave_out(failure)
        return builder.block(), None

    def sample(self, index: int, attempt: int = 0) -> Any:
        """Return the result of the user's function for row ``index``."""
        with self._seeded(index, attempt):
            return self._task.function(index, row_generator(self._seed, index, attempt))

    def batch(self, indices: Sequence[int], attempt: int = 0) -> list[Any]:
        """Call ``batch``; return an array (B, …) for each column, or a list of arrays if lengths vary.

        Raises a SampleError if the results do not fit the schema.
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
        """Add rows to ``builder``; yield a failure for each row that could not be made."""
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
        """Make the rows of a failed batch one by one, to find the row that fails.

        With ``bad_samples="raise"`` none of these rows is kept: a later run makes them in a batch again.
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
        """Retry a failed row if ``bad_samples`` is ``"retry"``; yield a failure if the row still fails."""
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
