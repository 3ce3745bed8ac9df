"""Orders of rows, by windows of chunks."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["batched", "endless_windows", "windows"]


def windows(
    count: int, group: int, window: int, rng: np.random.Generator, *, adjacent: bool = False
) -> Iterator[tuple[list[int], npt.NDArray[np.int64]]]:
    """Once through all rows: some groups of rows at a time, and their rows in random order.

    Yields:
        The groups' numbers, and int64 (R,): the rows.

    >>> for groups, rows in windows(6, 2, 2, np.random.default_rng(0)):
    ...     print(sorted(groups), sorted(rows.tolist()))
    [0, 2] [0, 1, 4, 5]
    [1] [2, 3]
    """
    groups = -(-count // group)
    if adjacent:
        starts = rng.permutation(range(0, groups, window)).tolist()
        parts = [list(range(start, min(start + window, groups))) for start in starts]
    else:
        order = rng.permutation(groups).tolist()
        parts = [order[first : first + window] for first in range(0, groups, window)]
    for part in parts:
        rows = np.concatenate([np.arange(one * group, min((one + 1) * group, count)) for one in part])
        yield part, rng.permutation(rows)


def endless_windows(
    count: int, group: int, window: int, rng: np.random.Generator, *, adjacent: bool = False
) -> Iterator[tuple[list[int], npt.NDArray[np.int64]]]:
    """`windows` again and again."""
    while True:
        yield from windows(count, group, window, rng, adjacent=adjacent)


def batched(
    parts: Iterable[tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.int64]]], batch_size: int
) -> Generator[tuple[npt.NDArray[Any], npt.NDArray[np.int64]], None, None]:
    """Batches of the rows of windows that follow each other; only a window's rest is copied twice.

    >>> one = np.arange(3.0), np.array([2, 1, 0]), np.array([12, 11, 10])
    >>> [batch.tolist() for batch, _ in batched([one, one], 4)]
    [[2.0, 1.0, 0.0, 2.0]]
    """
    rest: tuple[npt.NDArray[Any], npt.NDArray[np.int64]] | None = None
    for values, places, rows in parts:
        first = 0
        if rest is not None:
            first = batch_size - len(rest[0])
            head = np.concatenate([rest[0], values[places[:first]]]), np.concatenate([rest[1], rows[:first]])
            rest = None
            if len(head[0]) < batch_size:
                rest = head
                continue
            yield head
        while first + batch_size <= len(rows):
            chosen = slice(first, first + batch_size)
            yield values[places[chosen]], rows[chosen]
            first += batch_size
        if first < len(rows):
            rest = values[places[first:]], rows[first:]
