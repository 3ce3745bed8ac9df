"""How long a batch's copy to the GPU takes, from memory as it is and from pinned memory.

It is tested with a device that imitates torch's, and was seen to work on an H200.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

from fastpipe.profiling.resizing import leaves

__all__ = ["Copies", "copies_of"]

_ROUNDS = 5


class Copies(NamedTuple):
    """Copies of a batch to the device that a script uses.

    Attributes:
        nbytes: of the batch.
        as_it_is_s: seconds of a copy of the loader's batch.
        pinned_s: seconds of one from pinned memory.
    """

    nbytes: int
    as_it_is_s: float
    pinned_s: float


def copies_of(batch: Any) -> Copies | None:
    """Copy a batch a few times.

    Args:
        batch: of tensors, in tuples, lists and dictionaries.

    Returns:
        What it took; None where CUDA is not in use, or nothing of the batch lies in main memory.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    tensors = [
        one for one in leaves(batch)
        if isinstance(one, torch.Tensor) and one.device.type == "cpu" and one.numel()
    ]  # fmt: skip
    if not tensors:
        return None
    try:
        pinned = [one if one.is_pinned() else one.pin_memory() for one in tensors]
        return Copies(
            sum(one.numel() * one.element_size() for one in tensors),
            _seconds(torch.cuda, lambda: [one.to("cuda") for one in tensors]),
            _seconds(torch.cuda, lambda: [one.to("cuda", non_blocking=True) for one in pinned]),
        )
    except RuntimeError:  # no room for it there, or none that can be pinned
        return None


def _seconds(cuda: Any, copy: Callable[[], object]) -> float:
    """The median of some rounds, after one that does not count."""
    found = []
    for _ in range(1 + _ROUNDS):
        cuda.synchronize()
        begin = perf_counter()
        copy()
        cuda.synchronize()
        found.append(perf_counter() - begin)
    return statistics.median(found[1:])
