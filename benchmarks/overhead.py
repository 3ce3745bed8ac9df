"""The cost of a loader beside the work of the dataset: microseconds a batch over one that does nothing.

::

    python benchmarks/overhead.py --rounds 9

torch's ``DataLoader`` and ``FastLoader``, in turn, over a dataset that returns the same number each
time.  Ratios are of rounds next to each other, so that a busy neighbour meets both.
"""

from __future__ import annotations

import statistics
from time import perf_counter
from typing import Any

from rounds import rounds_asked
from torch.utils.data import DataLoader

from fastpipe import FastLoader

_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "in this process, batches of 1": (20_000, {"batch_size": 1}),
    "in this process, batches of 64": (64_000, {"batch_size": 64}),
    "in this process, shuffled": (64_000, {"batch_size": 64, "shuffle": True}),
    "in this process, no batches": (20_000, {"batch_size": None}),
    "one worker process": (64_000, {"batch_size": 64, "num_workers": 1, "persistent_workers": True}),
    "two worker processes": (64_000, {"batch_size": 64, "num_workers": 2, "persistent_workers": True}),
}


class Nothing:
    """A dataset whose samples cost nothing."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return 0


def main() -> None:
    """Print each case's median and range, and the ratio of the two loaders."""
    rounds = rounds_asked(__doc__, 9, "each case")
    print(f"{'':32} {'DataLoader':>12} {'FastLoader':>12} {'ratio':>6}  (µs a batch)")
    for name, (length, options) in _CASES.items():
        loaders: list[DataLoader[Any]] = [
            kind(Nothing(length), **options) for kind in (DataLoader, FastLoader)
        ]
        for loader in loaders:
            _microseconds(loader)
        pairs = [[_microseconds(loader) for loader in loaders] for _ in range(rounds)]
        stock, fast = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        ratios = sorted(pair[1] / pair[0] for pair in pairs)
        middle = statistics.median(ratios)
        print(f"{name:32} {stock:12.1f} {fast:12.1f} {middle:6.2f}  ({ratios[0]:.2f} to {ratios[-1]:.2f})")


def _microseconds(loader: Any) -> float:
    start = perf_counter()
    count = sum(1 for _ in loader)
    return (perf_counter() - start) / count * 1e6


if __name__ == "__main__":
    main()
