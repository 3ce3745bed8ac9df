"""A batch of a dataset in the making: its memory, and the user code that is still to run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from fastpipe.engine.batches import PendingBatch, say_where
from fastpipe.engine.slots import SlotPool
from fastpipe.torch.stock import run_keyed, run_seeded
from fastpipe.transform.keys import sample_seed
from fastpipe.transform.plan import Plan
from fastpipe.types import Key

__all__ = ["Batch", "batch_memory", "run_stock_in_thread"]


class Batch:
    """A batch that is being made, and what is needed to finish it.

    Args:
        pending: the batch in the engine.
        runtime: whose threads make it.
        plan: the plan it is made by.
        key: the key of its random parameters.
        is_keyed: whether a loader set the key.
        tensor: (N, C, H, W) over the batch's memory; None where samples are separate values.
        stock_here: whether the plan's stock part is left to the consuming thread.
    """

    def __init__(
        self,
        pending: PendingBatch,
        runtime: object,
        plan: Plan,
        key: Key,
        is_keyed: bool,
        tensor: torch.Tensor | None,
        stock_here: bool,
    ) -> None:
        self.pending, self.plan, self.tensor = pending, plan, tensor
        # The threads must outlive the batch, also when the dataset gets new ones meanwhile.
        self._runtime = runtime
        self.stock_here = stock_here
        self._key, self._is_keyed = key, is_keyed

    def run_stock(self, value: Any, number: int) -> Any:
        """Run the user's transforms in this thread."""
        try:
            if self._is_keyed:
                return run_seeded(self.plan.stock, value, _seed_of(self._key, number))
            for transform in self.plan.stock:  # as in ImageFolder: from whatever the script seeded
                value = transform(value)
            return value
        except Exception as error:
            say_where(error, self.pending.items[number])
            raise


def run_stock_in_thread(plan: Plan, key: Key, value: Any, number: int) -> Any:
    """Run the user's transforms in a decoding thread, on sample ``number`` of a batch."""
    return run_keyed(plan.stock, value, _seed_of(key, number))


def _seed_of(key: Key, number: int) -> int:
    return sample_seed(key.seed, key.epoch, int(key.draws[number]))


def batch_memory(plan: Plan, count: int, slots: SlotPool, is_batch: bool) -> tuple[Any, torch.Tensor | None]:
    """Memory for a batch, as the kernels see it and as the user does; (None, None) where
    samples are separate values."""
    spec = plan.output
    if spec is None or count == 0:
        return None, None
    shape = (count, int(np.prod(spec.shape)))
    if is_batch and get_worker_info() is not None:  # will be sent to the parent: make it where both see it
        size = shape[0] * shape[1] * np.dtype(spec.word).itemsize
        storage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
        shared = torch.empty(0, dtype=torch.uint8).set_(storage)
        return shared.numpy().view(spec.word).reshape(shape), plan.over(shared, (count, *spec.shape))
    memory = slots.take(shape, spec.word) if is_batch else np.empty(shape, spec.word)
    return memory, plan.wrap(memory, (count, *spec.shape))
