"""A batch of a dataset in the making: its memory, and the user code that is still to run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from fastpipe.core.batches import PendingBatch, say_where
from fastpipe.core.keys import sample_seed
from fastpipe.core.slots import KEPT_SLOTS, SlotPool
from fastpipe.core.types import Key
from fastpipe.images.batch import RowsOf, Then
from fastpipe.images.plan import Layout, Plan
from fastpipe.torch.generators import run_keyed, run_seeded
from fastpipe.torch.lane_memory import shared_flat
from fastpipe.torch.likeness import Like, fits
from fastpipe.torch.split import Split
from fastpipe.torch.threads import note

if TYPE_CHECKING:
    from fastpipe.images.gpu_batches import Turn

__all__ = [
    "LAYOUTS", "AugmentInThread", "Batch", "BatchMemory", "InThread", "Making", "Place", "augmented_place",
    "batch_memory", "batch_memory_like", "stock_place", "written_place",
]  # fmt: skip

LAYOUTS: dict[Any, Layout] = {
    torch.contiguous_format: "contiguous",
    torch.channels_last: "channels_last",
}


class InThread:
    """What is left to do in a decoding thread to what the engine made of a sample.

    Runs the plan's stock part, where that may run in threads, and puts the outcome into the
    batch's memory, where there is some and it fits.

    Args:
        plan: the plan.
        key: the key of the batch's random parameters.
        like: what the samples are expected to be, or None.
        tensor: (N, …), for such samples; None without.
    """

    def __init__(self, plan: Plan, key: Key, like: Like | None, tensor: torch.Tensor | None) -> None:
        self._plan, self._key = plan, key
        self._like, self._tensor = like, tensor

    def __call__(self, value: Any, number: int) -> Any:
        """The sample's value; ``PLACED`` if it is in the tensor instead."""
        if self._plan.stock:
            value = run_keyed(self._plan.stock, value, partial(_seed_of, self._key, number))
        if self._tensor is None or self._like is None or not fits(value, self._like):
            return value
        self._tensor[number].copy_(value.as_subclass(torch.Tensor))
        return PLACED


class AugmentInThread:
    """What is left to do in a decoding thread where a transform was split, and the whole of it is done there.

    Args:
        split: the transform.
        batch: a ``native.AugmentBatch``, which says where each sample goes.
    """

    def __init__(self, split: Split, batch: Any) -> None:
        self._chain, self._batch = split.chain, batch

    def __call__(self, value: Any, number: int) -> Any:
        """Put a sample into the batch's memory that the engine has declined."""
        problem = self._batch.change(number, value.as_subclass(torch.Tensor).numpy())
        self._chain.check_change(problem, number)
        return PLACED


PLACED = object()


class Place(NamedTuple):
    """Where the samples of a batch go.

    Attributes:
        memory: of the batch, which the plan writes; or a row of a larger one for each sample.
        tensor: (N, …) over the batch's memory; None where samples are separate values, or in a larger one.
        like: what samples must have been for ``tensor`` to hold them; None where the plan writes all of them
            there.
        finish: what is left to do in the thread that made a sample.
        then: the same of samples that the engine makes, done by it; None where it cannot.
    """

    memory: npt.NDArray[Any] | Sequence[npt.NDArray[Any]] | None = None
    tensor: torch.Tensor | None = None
    like: Like | None = None
    finish: Callable[[Any, int], Any] | None = None
    then: Then | None = None


class Making(NamedTuple):
    """How a loader has its batches of images made.

    Attributes:
        sends_bytes: make bytes, on the device where there is a way to.
        split: the transform in two parts, of which only the first is done with ``sends_bytes``.
        device: for bytes.
        dtype: of 16 bits, for samples that are not bytes and can be of it; else "".
        is_pinned: make batches in page-locked memory.
    """

    sends_bytes: bool = False
    split: Split | None = None
    device: torch.device | None = None
    dtype: str = ""
    is_pinned: bool = False


class BatchMemory:
    """Where the memory of a dataset's batches comes from, in one process.

    Args:
        is_pinned: make batches in page-locked memory, from which a GPU takes them without another copy.
            torch keeps it, and uses it again once copies out of it are done.

    Attributes:
        slots: memory of dropped batches, to be used again; unused of page-locked memory.
    """

    def __init__(self, is_pinned: bool = False) -> None:
        self.slots = SlotPool(KEPT_SLOTS)
        self._is_pinned = is_pinned

    def flat(self, size: int, is_batch: bool = True) -> torch.Tensor:
        """Return uninitialised memory, uint8 (size,), of a batch or of a single sample."""
        if not is_batch:
            return torch.from_numpy(np.empty(size, np.uint8))
        if get_worker_info() is not None:  # will be sent to the parent: make it where both see it
            return shared_flat(size)
        if self._is_pinned:
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        return torch.from_numpy(self.slots.take((size,), np.uint8))


def written_place(
    plan: Plan, count: int, memory: BatchMemory, is_batch: bool, rows: Sequence[npt.NDArray[Any]] | None
) -> Place:
    """The place of samples that the plan writes: these rows, if they are given."""
    return Place(*batch_memory(plan, count, memory, is_batch)) if rows is None else Place(rows)


def stock_place(plan: Plan, key: Key, like: Like | None, count: int, memory: BatchMemory) -> Place:
    """The place of samples that end in torchvision's or user code, run in threads: of what is known to be
    alike, together."""
    tensor = batch_memory_like(like, count, memory) if like is not None and count else None
    return Place(tensor=tensor, like=like, finish=InThread(plan, key, like, tensor))


def augmented_place(split: Split, key: Key, count: int, memory: BatchMemory, rows: RowsOf | None) -> Place:
    """The place of samples that are augmented by the threads that decode them: these rows, if given."""
    shape = (count, *split.shape)
    if rows is None:
        tensor = batch_memory_like(split.like, count, memory)
        batch = split.chain.native_batch(shape, key, tensor)
        return Place(None, tensor, split.like, AugmentInThread(split, batch), Then(batch, PLACED))
    whole: Any = rows.memory
    batch = split.chain.native_batch(shape, key, whole, rows.numbers)
    return Place(finish=AugmentInThread(split, batch), then=Then(batch, PLACED))


class Batch:
    """A batch that is being made, and what is needed to finish it.

    Args:
        pending: the batch in the engine.
        runtime: whose threads make it.
        plan: the plan it is made by.
        key: the key of its random parameters.
        is_keyed: whether a loader set the key.
        place: where its samples go.
        stock_here: whether the plan's stock part is left to the consuming thread.
        augment_there: whether augmentations of the samples are left to the device.
        turn: of the device on which it is made, as far as it is; None for none.
    """

    def __init__(
        self,
        pending: PendingBatch,
        runtime: object,
        plan: Plan,
        key: Key,
        is_keyed: bool,
        place: Place,
        stock_here: bool,
        augment_there: bool = False,
        turn: Turn | None = None,
    ) -> None:
        self.pending, self.plan = pending, plan
        self.turn = turn
        # The threads must outlive the batch, also when the dataset gets new ones meanwhile.
        self._runtime = runtime
        self.stock_here = stock_here
        self.kept: Sequence[int] = ()  # numbers of the samples that are there, once it is finished
        self._key, self._is_keyed = key, is_keyed
        self._tensor, self._like = place.tensor, place.like
        self._augment_there = augment_there

    @property
    def nbytes(self) -> int:
        """Bytes of the batch's memory; 0 if samples are separate values."""
        return 0 if self._tensor is None else self._tensor.nbytes

    def there(self) -> torch.Tensor | None:
        """All of it, on the device on which it was made; None where it was not."""
        return None if self.pending.there is None else self.pending.there.tensor()

    def whole(self, kept: Sequence[int]) -> tuple[torch.Tensor, type] | None:
        """The tensor of these samples, and the class of its rows as a dataset gives them; None where some of
        the samples are separate values."""
        if self._tensor is None:
            return None
        there = self.there()
        if there is not None:
            if len(kept) < len(there):
                from fastpipe.core.transfer import uploaded

                there = there[uploaded(torch.tensor(kept, dtype=torch.int64, device="cpu"), there.device)]
            return there, self.plan.kind
        if self._like is not None and any(self.pending.values[n] is not PLACED for n in kept):
            return None
        tensor = self._tensor if len(kept) == len(self._tensor) else self._tensor[kept]
        return tensor, self.plan.kind if self._like is None else self._like.kind

    def key_of_rest(self, kept: Sequence[int]) -> Key | None:
        """The key of augmentations that are still to be done to these samples; None for none."""
        return self._key._replace(draws=self._key.draws[list(kept)]) if self._augment_there else None

    def values(self, kept: Sequence[int]) -> list[Any]:
        """These samples as separate values."""
        values = [self.pending.values[n] for n in kept]
        if self._tensor is not None and self._like is not None:
            rows = self._like.rows(self._tensor)
            values = [
                rows[n].clone() if value is PLACED else value for n, value in zip(kept, values, strict=True)
            ]
        if self.stock_here:
            values = [self._run_stock(value, n) for n, value in zip(kept, values, strict=True)]
        return values

    def _run_stock(self, value: Any, number: int) -> Any:
        """Run the user's transforms in this thread."""
        note(self.pending.items[number].path)
        try:
            if self._is_keyed:
                return run_seeded(self.plan.stock, value, _seed_of(self._key, number))
            for transform in self.plan.stock:  # as in ImageFolder: from whatever the script seeded
                value = transform(value)
            return value
        except Exception as error:
            say_where(error, self.pending.items[number])
            raise


def _seed_of(key: Key, number: int) -> int:
    return sample_seed(key.seed, key.epoch, int(key.draws[number]))


def batch_memory(
    plan: Plan, count: int, memory: BatchMemory, is_batch: bool = True
) -> tuple[npt.NDArray[Any] | None, torch.Tensor | None]:
    """Memory for a batch that the plan writes, as the kernels see it and as the user does;
    (None, None) where samples are separate values."""
    spec = plan.output
    if spec is None or count == 0:
        return None, None
    shape = (count, math.prod(spec.shape))
    flat = memory.flat(math.prod(shape) * np.dtype(spec.word).itemsize, is_batch)
    return flat.numpy().view(spec.word).reshape(shape), plan.over(flat, (count, *spec.shape))


def batch_memory_like(like: Like, count: int, memory: BatchMemory) -> torch.Tensor:
    """Memory for a batch of such samples."""
    with torch.inference_mode(False):  # threads write to it, which are in no mode of the caller's
        return memory.flat(count * like.nbytes).view(like.dtype).view(count, *like.shape)
