"""A row's own random numbers: a function of (seed, index) and of nothing else.

Row ``i`` draws from ``np.random.default_rng([seed, i])``, so that NumPy alone can make it again.  Making one
takes 18 µs, most of which NumPy hashes the two numbers.  Here the hashes of many rows are computed at once,
by the algorithm of ``np.random.SeedSequence`` (M. E. O'Neill, "Developing a seed_seq Alternative", 2015), and
compared with NumPy's own for each block.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from numpy.random.bit_generator import ISpawnableSeedSequence

__all__ = ["RowGenerators", "globals_seeded", "row_generator", "row_generators"]

UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]

_GLOBALS = threading.RLock()  # threads, also those of an executor, share the global generators
_FEW = 8  # so many are made sooner one by one
_POOL = 4
_INIT_A, _MULT_A, _INIT_B, _MULT_B = 0x43B0D7E5, 0x931E8875, 0x8B51F9DD, 0x58F38DED
_MIX_L, _MIX_R = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_SHIFT, _MASK = np.uint32(16), 0xFFFFFFFF


def row_generator(seed: int, index: int, attempt: int = 0) -> np.random.Generator:
    """Return the generator of a row; another attempt draws other numbers."""
    return np.random.default_rng([seed, index, attempt] if attempt else [seed, index])


def row_generators(seed: int, indices: Sequence[int]) -> RowGenerators:
    """Return the generators of rows, a block at a time.

    >>> rows = row_generators(7, range(3))
    >>> rows[2].random() == np.random.default_rng([7, 2]).random()
    True
    """
    if len(indices) < _FEW:
        return RowGenerators(row_generator(seed, int(index)) for index in indices)
    return RowGenerators(
        np.random.Generator(np.random.PCG64(_Hashed(seed, index, words)))  # type: ignore[arg-type]
        for index, words in zip(indices, _hashed(seed, indices), strict=True)
    )


class RowGenerators(Sequence[np.random.Generator]):
    """The generators of a batch's rows; and a ``np.random.Generator`` whose results have one row for each.

    ``rng.uniform(0, 1, size=3)`` is an array (B, 3), whose row ``k`` is what the generator of row ``k`` alone
    would draw.  Every method of ``np.random.Generator`` is there; arguments are the same for all rows.

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
    """Seed ``random``, ``np.random`` and, where it is loaded, torch for a row; restore them afterwards.

    Threads wait for each other.
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
    """A row's ``SeedSequence``, of which the words for a PCG64 are known; the rest is NumPy's own."""

    __slots__ = ("_index", "_own", "_seed", "_words")

    def __init__(self, seed: int, index: int, words: UInt64Array) -> None:
        self._seed, self._index, self._words = seed, index, words
        self._own: np.random.SeedSequence | None = None

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        if n_words == _POOL and dtype is np.uint64:
            return self._words
        return self._real().generate_state(n_words, dtype)

    def spawn(self, n_children: int) -> list[np.random.SeedSequence]:  # type: ignore[override]
        return self._real().spawn(n_children)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hashed, (self._seed, self._index, self._words)

    def _real(self) -> np.random.SeedSequence:
        if self._own is None:
            self._own = np.random.SeedSequence([self._seed, int(self._index)])
        return self._own


def _hashed(seed: int, indices: Sequence[int]) -> UInt64Array:
    """What ``SeedSequence([seed, i]).generate_state(4, np.uint64)`` is for each ``i``: (B, 4)."""
    rows = np.asarray(indices, np.uint64)
    words = np.empty((len(rows), _POOL), np.uint64)
    start = [seed & _MASK]  # in words of 32 bits, the lowest first
    while seed >> 32 * len(start):
        start.append(seed >> 32 * len(start) & _MASK)
    for is_long in (False, True):
        some = np.flatnonzero((rows > _MASK) == is_long)
        if len(some):
            low = (rows[some] & np.uint64(_MASK)).astype(np.uint32)
            high = [(rows[some] >> np.uint64(32)).astype(np.uint32)] if is_long else []
            words[some] = _state(
                _pool([*(np.full(len(some), word, np.uint32) for word in start), low, *high])
            )
    # Should NumPy's algorithm ever become another one.
    first = np.random.SeedSequence([seed, int(rows[0])]).generate_state(_POOL, np.uint64)
    if not np.array_equal(first, words[0]):
        own = (np.random.SeedSequence([seed, int(row)]) for row in rows)
        words[:] = [one.generate_state(_POOL, np.uint64) for one in own]
    return words


class _Hash:
    """One hash after another, each with a constant of its own."""

    def __init__(self, constant: int, factor: int) -> None:
        self._constant, self._factor = constant, factor

    def __call__(self, value: UInt32Array) -> UInt32Array:
        value = value ^ np.uint32(self._constant)
        self._constant = self._constant * self._factor & _MASK
        value = value * np.uint32(self._constant)
        return value ^ (value >> _SHIFT)


def _pool(entropy: list[UInt32Array]) -> list[UInt32Array]:
    """The mixed entropy of each row."""
    hashed = _Hash(_INIT_A, _MULT_A)

    def mixed(one: UInt32Array, other: UInt32Array) -> UInt32Array:
        result: UInt32Array = _MIX_L * one - _MIX_R * other
        return result ^ (result >> _SHIFT)

    zero = np.zeros_like(entropy[0])
    pool = [hashed(entropy[at] if at < len(entropy) else zero) for at in range(_POOL)]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = mixed(pool[target], hashed(pool[source]))
    for more in entropy[_POOL:]:
        for target in range(_POOL):
            pool[target] = mixed(pool[target], hashed(more))
    return pool


def _state(pool: list[UInt32Array]) -> UInt64Array:
    """Four words of 64 bits for each row: (B, 4)."""
    hashed = _Hash(_INIT_B, _MULT_B)
    words = np.stack([hashed(pool[at % _POOL]) for at in range(2 * _POOL)], axis=1)
    return words.astype("<u4").view("<u8").astype(np.uint64)
