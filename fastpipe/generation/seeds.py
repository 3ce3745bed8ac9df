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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from numpy.random.bit_generator import ISpawnableSeedSequence

_GLOBALS = threading.RLock()  # threads, also those of an executor, share the global generators
_FEW = 8  # so many are made sooner one by one
_POOL, _MASK = 4, 0xFFFFFFFF
_INIT_A, _MULT_A, _INIT_B, _MULT_B = 0x43B0D7E5, 0x931E8875, 0x8B51F9DD, 0x58F38DED
_MIX_L, _MIX_R, _SHIFT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715), np.uint32(16)


def row_generator(seed: int, index: int, attempt: int = 0) -> np.random.Generator:
    """Return the generator of a row; another attempt draws other numbers."""
    return np.random.default_rng([seed, index, attempt] if attempt else [seed, index])


def row_generators(seed: int, indices: Sequence[int]) -> RowGenerators:
    """Return the generators of rows, a block at a time.

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
    """What ``SeedSequence([seed, i]).generate_state(4, np.uint64)`` is for each ``i``: (B, 4).

    None should NumPy's algorithm ever become another one.
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
    """One hash after another, each with a constant of its own."""

    def hashed(value: Any) -> npt.NDArray[np.uint32]:
        nonlocal constant
        value = value ^ np.uint32(constant)
        constant = constant * factor & _MASK
        value = value * np.uint32(constant)
        return value ^ (value >> _SHIFT)  # type: ignore[no-any-return]

    return hashed
