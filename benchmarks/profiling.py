"""The cost of profiling: microseconds a step over the same loop without it.

::

    python benchmarks/profiling.py --rounds 9

Loops over batches that are there already, and over torch's ``DataLoader`` of a dataset that returns a number,
bare and within ``with fastpipe.profile():``, in turn.  Differences are of rounds next to each other.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

from rounds import rounds_asked
from torch.utils.data import DataLoader

import fastpipe

_STEPS = 20_000
_CASES: dict[str, Callable[[], Any]] = {
    "batches that are there": lambda: _Ready(),
    "DataLoader, in this process": lambda: DataLoader(range(_STEPS), batch_size=None),
    "DataLoader, one worker": lambda: DataLoader(range(_STEPS), batch_size=8, num_workers=1),
}


class _Ready:
    """An iterable of batches that cost nothing."""

    def __iter__(self) -> Any:
        return iter(range(_STEPS))


def main() -> None:
    """Print each case's median and range."""
    rounds = rounds_asked(__doc__, 9, "each case")
    print(f"{'':28} {'bare':>8} {'profiled':>8} {'more':>8}   (µs a step; of `more` the range)")
    for name, make in _CASES.items():
        pairs = [(_microseconds(make(), False), _microseconds(make(), True)) for _ in range(rounds)]
        more = sorted(with_it - bare for bare, with_it in pairs)
        bare, with_it = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        print(
            f"{name:28} {bare:8.2f} {with_it:8.2f} {statistics.median(more):8.2f}   "
            f"{more[0]:.2f} to {more[-1]:.2f}"
        )


def _microseconds(loader: Any, is_profiled: bool) -> float:
    """Return the time of a step of an empty loop, without the first, in which workers start."""
    with fastpipe.profile() if is_profiled else contextlib.nullcontext() as profiling:
        watched = loader if profiling is None or isinstance(loader, DataLoader) else profiling.watch(loader)
        count, begin = 0, perf_counter()
        for _ in watched:
            if not count:
                begin = perf_counter()
            count += 1
        seconds = perf_counter() - begin
    return seconds / (count - 1) * 1e6


if __name__ == "__main__":
    main()
