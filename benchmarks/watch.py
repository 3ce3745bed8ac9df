"""The cost of ``fastpipe.watch``: microseconds a step over the same loop without it.

::

    python benchmarks/watch.py --rounds 9

Loops over batches that are there already, of which watching looks for the number of samples, and over torch's
``DataLoader``, bare and watched, in turn.  Differences are of rounds next to each other.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rounds import rounds_asked
from torch.utils.data import DataLoader

import fastpipe
from fastpipe.tools import epochs

_STEPS = 20_000
_PAIR = [torch.zeros(8, 3), torch.zeros(8)]
_CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "a tensor": (lambda: _Ready(_PAIR[0]), {}),
    "a list of two tensors": (lambda: _Ready(_PAIR), {}),
    "a dictionary of two tensors": (lambda: _Ready({"image": _PAIR[0], "label": _PAIR[1]}), {}),
    "samples=len": (lambda: _Ready(_PAIR), {"samples": len}),
    "with a warning": (lambda: _Ready(_PAIR), {"warn_after": 1.0, "warn_waiting": 1.0}),
    "with a bar": (lambda: _Ready(_PAIR), {"progress": True}),
    "DataLoader, in this process": (lambda: DataLoader(range(_STEPS), batch_size=None), {}),
}


class _Ready:
    """An iterable of batches that cost nothing."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return _STEPS

    def __iter__(self) -> Iterator[Any]:
        return iter([self._batch] * _STEPS)


def main() -> None:
    """Print each case's median and range."""
    rounds = rounds_asked(__doc__, 9, "each case")
    # As in a terminal, but nobody has to see it.
    epochs._BARS = epochs.Bars(Console(file=io.StringIO(), force_terminal=True, width=100))
    print(f"{'':30} {'bare':>8} {'watched':>8} {'more':>8}   (µs a step; of `more` the range)")
    for name, (make, options) in _CASES.items():
        pairs = [
            (_microseconds(make()), _microseconds(fastpipe.watch(make(), **options))) for _ in range(rounds)
        ]
        more = sorted(watched - bare for bare, watched in pairs)
        bare, watched = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        print(
            f"{name:30} {bare:8.2f} {watched:8.2f} {statistics.median(more):8.2f}   "
            f"{more[0]:.2f} to {more[-1]:.2f}"
        )


def _microseconds(loader: Any) -> float:
    begin = perf_counter()
    for _ in loader:
        pass
    return (perf_counter() - begin) / _STEPS * 1e6


if __name__ == "__main__":
    main()
