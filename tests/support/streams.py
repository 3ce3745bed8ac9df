"""Batches of loaders, as values that tests compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["outcomes", "plain", "stream"]


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
