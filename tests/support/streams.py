"""Batches of loaders, as values that tests compare; and a script's own samplers and streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler

from fastpipe import FastLoader

BY_PROCESSES = partial(FastLoader, workers="processes")


class OwnSampler(Sampler[Any]):
    """A sampler of a script's: in each epoch it gives what ``make`` returns."""

    def __init__(self, make: Callable[[], Iterable[Any]], count: int) -> None:
        self._make, self._count = make, count

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())

    def __len__(self) -> int:
        return self._count


class Rounds(Sampler[int]):
    """A sampler of a script's for 11 samples, with the methods that torchdata asks for."""

    def __init__(self) -> None:
        self._rounds = 0

    def __iter__(self) -> Iterator[int]:
        self._rounds += 1
        yield from ((self._rounds * 3 + number) % 11 for number in range(11))

    def __len__(self) -> int:
        return 11

    def state_dict(self) -> dict[str, int]:
        return {"rounds": self._rounds}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._rounds = state["rounds"]


class Stream(IterableDataset[int]):
    """The numbers 0, 1 and 2."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def plain(value: Any) -> Any:
    """Return a batch as values that are equal if types, dtypes, shapes and bits are.

    >>> plain((torch.zeros(2), "a")) == plain((torch.zeros(2), "a")) != plain([torch.zeros(2), "a"])
    True
    """
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.cpu().numpy().tobytes()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return (type(value), *map(plain, value)) if isinstance(value, (list, tuple)) else value


def stream(loader: Iterable[Any], seed: int | None = None) -> list[Any]:
    """Return the ``plain`` batches of an epoch; with a seed, torch's global generator begins at it."""
    if seed is not None:
        torch.manual_seed(seed)
    return [plain(batch) for batch in loader]


def outcomes(loader: Iterable[Any], look: Callable[[Any], Any] = plain) -> list[Any]:
    """Return what ``look`` makes of each batch, and errors in the place of batches, until the epoch ends.

    Errors have no traceback, which would keep iterators and worker processes.

    >>> outcomes(["1", "x"], int)
    [1, ValueError("invalid literal for int() with base 10: 'x'")]
    """
    found: list[Any] = []
    batches = iter(loader)
    while True:
        try:
            found.append(look(next(batches)))
        except StopIteration:
            return found
        except Exception as error:
            error.__cause__ = error.__context__ = None
            found.append(error.with_traceback(None))
