"""Memory of a process and those below it, while it goes through a loader."""

from __future__ import annotations

from typing import Any

from fastpipe.bench.runner import touch
from fastpipe.core.processes import memory_of_processes

__all__ = ["Nothing", "memory_entry", "most_bytes"]


_EPOCHS = 2
_LOOKS = 10


class Nothing:
    """Samples that cost nothing.

    Args:
        length: how many.
        sample: each of them.
    """

    def __init__(self, length: int, sample: Any) -> None:
        self._length, self._sample = length, sample

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._sample


def most_bytes(loader: Any) -> int:
    """The most of ten looks in each of two epochs of a loader: PSS of this process and its workers."""
    most, between = 0, max(1, len(loader) // _LOOKS)
    for _ in range(_EPOCHS):
        for number, batch in enumerate(loader, 1):
            touch(batch, any_number=True)
            if number % between == 0:
                most = max(most, memory_of_processes(of_files=True) or 0)
    return most


def memory_entry(used: float, nothing: float, stock: float, budget: int) -> dict[str, float]:
    """Return the result for the JSON file.

    Args:
        used: MB while loading.
        nothing: where the same loader loads nothing.
        stock: where torch's loader does.
        budget: bytes that may be kept.
    """
    return {
        "budget_mb": round(budget / 1e6, 1),
        "mb": round(used, 1),
        "nothing_mb": round(nothing, 1),
        "stock_mb": round(stock, 1),
        "above_mb": round(used - nothing, 1),
    }
