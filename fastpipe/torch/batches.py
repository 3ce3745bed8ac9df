"""A batch of images in the making: its samples, its memory, and the user code that is still to run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info
from torchvision import tv_tensors

from fastpipe.core.bad_samples import Item, why_nothing_is_left
from fastpipe.core.batches import PendingBatch, say_where
from fastpipe.core.keys import another_of_its_class, sample_seed
from fastpipe.core.pool import Job
from fastpipe.core.sample_tables import PackedPaths, SampleTable, paths_of
from fastpipe.core.slots import KEPT_SLOTS, SlotPool
from fastpipe.core.types import Key
from fastpipe.errors import BadSampleError
from fastpipe.images.batch import RowsOf, Then
from fastpipe.images.plan import Layout, Plan
from fastpipe.torch.randomness import run_keyed, run_seeded
from fastpipe.torch.samples import BatchSamples
from fastpipe.torch.split import SampleSpec, Split
from fastpipe.torch.threads import note
from fastpipe.torch.transport import shared_flat

if TYPE_CHECKING:
    from fastpipe.images.gpu_batches import Turn
    from fastpipe.torch.image_folder import FastImageFolder
    from fastpipe.torch.runtime import Runtime

LAYOUTS: dict[Any, Layout] = {
    torch.contiguous_format: "contiguous",
    torch.channels_last: "channels_last",
}

PLACED = object()  # the value of a sample that is in the batch's memory


def matches_spec(value: Any, like: SampleSpec) -> bool:
    """Whether a sample is such a tensor, in plain memory; strides may differ, since collating makes them
    alike."""
    return (
        type(value) is like.kind
        and value.shape == like.shape
        and value.dtype == like.dtype
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and not value.requires_grad
        and not value.is_conj()
        and not value.is_neg()
    )


class SpecGuess:
    """Predicts, from finished batches, what tensors the samples of a plan will be.

    The first batch whose samples are all alike decides.  After the first sample that differs, each
    sample is a separate value.
    """

    def __init__(self) -> None:
        # Replaced as one: several threads may use a dataset.
        self._known: tuple[object, SampleSpec | None] | None = None

    def of(self, plan: object) -> SampleSpec | None:
        """Return the prediction for the next samples of a plan."""
        known = self._known
        return known[1] if known is not None and known[0] is plan else None

    def learn(self, plan: object, values: Sequence[Any]) -> None:
        """Learn from samples that were separate values."""
        known = self._known
        if known is None or known[0] is not plan:
            like = _like_of(values[0])
        else:
            like = known[1]  # None: they differ
        if like is not None and not all(matches_spec(value, like) for value in values):
            like = None
        self._known = plan, like


def _like_of(value: Any) -> SampleSpec | None:
    if type(value) not in (torch.Tensor, tv_tensors.Image) or value.numel() == 0:
        return None
    return SampleSpec(type(value), tuple(value.shape), value.dtype)


class InThread:
    """Finishes, in a decoding thread, what the engine made of a sample: runs the plan's stock part if that
    may run in threads, and copies the result into the batch's memory if it fits."""

    def __init__(self, plan: Plan, key: Key, like: SampleSpec | None, tensor: torch.Tensor | None) -> None:
        self._plan, self._key = plan, key
        self._like, self._tensor = like, tensor

    def __call__(self, value: Any, number: int) -> Any:
        """Return the sample's value, or ``PLACED`` if it is in the batch's memory."""
        if self._plan.stock:
            value = run_keyed(self._plan.stock, value, partial(_seed_of, self._key, number))
        if self._tensor is None or self._like is None or not matches_spec(value, self._like):
            return value
        self._tensor[number].copy_(value.as_subclass(torch.Tensor))
        return PLACED


class AugmentInThread:
    """Augments, in a decoding thread, samples that the engine has declined."""

    def __init__(self, split: Split, batch: Any) -> None:
        self._chain, self._batch = split.chain, batch

    def __call__(self, value: Any, number: int) -> Any:
        problem = self._batch.change(number, value.as_subclass(torch.Tensor).numpy())
        self._chain.check_change(problem, number)
        return PLACED


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
    like: SampleSpec | None = None
    finish: Callable[[Any, int], Any] | None = None
    then: Then | None = None


@dataclass(frozen=True)
class BatchRequest:
    """How a batch of images is to be made.

    Attributes:
        threaded: threads may make it; else the calling one does, before the batch is returned.
        rows: rows of a larger batch where its samples go; None gives it memory of its own.
        sends_bytes: make bytes, on ``device`` where there is a way to.
        split: the transform in two parts, of which only the first is done with ``sends_bytes``.
        device: for bytes.
        dtype: of 16 bits, for samples that are not bytes and can be of it; else "".
        is_pinned: make it in page-locked memory, from which it is copied to a GPU.
    """

    threaded: bool = True
    rows: RowsOf | None = None
    sends_bytes: bool = False
    split: Split | None = None
    device: torch.device | None = None
    dtype: str = ""
    is_pinned: bool = False

    @property
    def augments_here(self) -> bool:
        """Whether decoding threads do all of a split transform."""
        return self.split is not None and not self.sends_bytes

    @property
    def augments_there(self) -> bool:
        """Whether the second part of a split transform is left to the device."""
        return self.split is not None and self.sends_bytes

    def plan_of(self, plan: Plan) -> Plan:
        """Return the part of a plan that the engine runs."""
        if self.split is not None:
            return self.split.head
        return plan.as_bytes() if self.sends_bytes else plan.of_dtype(self.dtype)


class BatchMemory:
    """Allocates the memory of a dataset's batches in one process, and reuses it."""

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


def place_of(
    request: BatchRequest, plan: Plan, key: Key, count: int, memory: BatchMemory, like: SampleSpec | None,
    stock_threads: bool,
) -> Place:  # fmt: skip
    """Return where the samples of a request go; ``like`` predicts those of user code."""
    if request.split is not None and request.augments_here:
        return _augmented(request.split, key, count, memory, request.rows)
    if plan.output is None and stock_threads:
        tensor = batch_memory_like(like, count, memory) if like is not None and count else None
        return Place(tensor=tensor, like=like, finish=InThread(plan, key, like, tensor))
    if request.rows is not None:
        return Place(request.rows)
    return Place(*batch_memory(plan, count, memory, request.threaded))


def _augmented(split: Split, key: Key, count: int, memory: BatchMemory, rows: RowsOf | None) -> Place:
    shape = (count, *split.shape)
    if rows is None:
        tensor = batch_memory_like(split.like, count, memory)
        batch = split.chain.native_batch(shape, key, tensor)
        return Place(None, tensor, split.like, AugmentInThread(split, batch), Then(batch, PLACED))
    whole: Any = rows.memory
    batch = split.chain.native_batch(shape, key, whole, rows.numbers)
    return Place(finish=AugmentInThread(split, batch), then=Then(batch, PLACED))


class Batch:
    """A batch of one folder that is being made.

    Attributes:
        pending: the batch in the engine.
        turn: of the device on which it is made, as far as it is; None for none.
        kept: numbers of the samples that are there, once it is finished.
    """

    def __init__(
        self,
        folder: FastImageFolder,
        runtime: Runtime,
        pending: PendingBatch,
        plan: Plan,
        key: Key,
        is_keyed: bool,
        place: Place,
        *,
        stock_here: bool,
        augments_there: bool,
        turn: Turn | None,
    ) -> None:
        self.pending, self.turn = pending, turn
        # The threads must outlive the batch, also when the dataset gets new ones meanwhile.
        self._folder, self._runtime, self._plan = folder, runtime, plan
        self._key, self._is_keyed = key, is_keyed
        self._tensor, self._like = place.tensor, place.like
        self._stock_here, self._augments_there = stock_here, augments_there
        self.kept: Sequence[int] = ()

    @property
    def nbytes(self) -> int:
        return 0 if self._tensor is None else self._tensor.nbytes

    def jobs(self) -> list[Job]:
        return self.pending.jobs

    def is_current(self) -> bool:
        return self._items.are_still_in(self._folder.samples)

    def finish(self) -> Sequence[Any]:
        samples = self.make()
        if self.turn is not None:
            self.turn.given()
        return samples

    def make(self) -> Sequence[Any]:
        """Finish a part of a larger batch, which is not handed out yet."""
        kept = self.kept = self.pending.wait()
        targets = self._targets(kept)
        whole = self._whole(kept)
        if whole is not None:
            key = self._key._replace(draws=self._key.draws[list(kept)]) if self._augments_there else None
            return BatchSamples(*whole, targets, self._plan.end, key)
        values = self._values(kept)
        if values and not self._stock_here:
            self._runtime.spec.learn(self._plan, values)
        listed = targets.tolist() if isinstance(targets, np.ndarray) else targets
        return list(zip(values, listed, strict=True))

    def why_empty(self) -> BadSampleError | None:
        return why_nothing_is_left(self.pending.left_out, len(self._items))

    def cancel(self) -> None:
        self.pending.cancel()

    def there(self) -> torch.Tensor | None:
        """Return the batch on the device on which it was made; None if it was not made on one."""
        return None if self.pending.there is None else self.pending.there.tensor()

    @property
    def _items(self) -> Items:
        items = self.pending.items
        assert isinstance(items, Items)
        return items

    def _targets(self, kept: Sequence[int]) -> list[Any] | npt.NDArray[np.int64]:
        transform, items = self._folder.target_transform, self._items
        if transform is None:
            return items.targets(kept)
        targets = []
        for item in (items[number] for number in kept):
            try:
                targets.append(transform(item.target))
            except Exception as error:
                say_where(error, item)
                raise
        return targets

    def _whole(self, kept: Sequence[int]) -> tuple[torch.Tensor, type] | None:
        """Return the tensor of these samples and the class of its rows; None if some are separate values."""
        if self._tensor is None:
            return None
        there = self.there()
        if there is not None:
            return there if len(kept) == len(there) else chosen_there(there, kept), self._plan.kind
        if self._like is not None and any(self.pending.values[n] is not PLACED for n in kept):
            return None
        tensor = self._tensor if len(kept) == len(self._tensor) else self._tensor[kept]
        return tensor, self._plan.kind if self._like is None else self._like.kind

    def _values(self, kept: Sequence[int]) -> list[Any]:
        values = [self.pending.values[n] for n in kept]
        if self._tensor is not None and self._like is not None:
            rows = self._like.rows(self._tensor)
            values = [
                rows[n].clone() if value is PLACED else value for n, value in zip(kept, values, strict=True)
            ]
        if self._stock_here:
            values = [self._run_stock(value, n) for n, value in zip(kept, values, strict=True)]
        return values

    def _run_stock(self, value: Any, number: int) -> Any:
        note(self._items[number].path)
        try:
            if self._is_keyed:
                return run_seeded(self._plan.stock, value, _seed_of(self._key, number))
            for transform in self._plan.stock:  # as in ImageFolder: from whatever the script seeded
                value = transform(value)
            return value
        except Exception as error:
            say_where(error, self._items[number])
            raise


def chosen_there(tensor: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    from fastpipe.core.transfer import uploaded

    return tensor[uploaded(torch.tensor(numbers, dtype=torch.int64, device="cpu"), tensor.device)]


def _seed_of(key: Key, number: int) -> int:
    return sample_seed(key.seed, key.epoch, int(key.draws[number]))


def batch_memory(
    plan: Plan, count: int, memory: BatchMemory, is_batch: bool = True
) -> tuple[npt.NDArray[Any] | None, torch.Tensor | None]:
    """Return memory that the plan writes, for kernels and as a tensor; (None, None) for separate values."""
    spec = plan.output
    if spec is None or count == 0:
        return None, None
    shape = (count, math.prod(spec.shape))
    flat = memory.flat(math.prod(shape) * np.dtype(spec.word).itemsize, is_batch)
    return flat.numpy().view(spec.word).reshape(shape), plan.over(flat, (count, *spec.shape))


def batch_memory_like(like: SampleSpec, count: int, memory: BatchMemory) -> torch.Tensor:
    with torch.inference_mode(False):  # threads write to it, which are in no mode of the caller's
        return memory.flat(count * like.nbytes).view(like.dtype).view(count, *like.shape)


class Items(Sequence[Item]):
    """Some samples as items of work, each made when it is used.

    Attributes:
        positions: int64 (N,).
        samples: those of the dataset when this was made: flat arrays, or a list of (path, target).
    """

    def __init__(self, samples: Any, positions: npt.NDArray[np.int64]) -> None:
        self.positions = positions
        self.samples: Any = samples.frozen if isinstance(samples, SampleTable) else None
        self._numbers = positions.tolist()
        self._items: list[Item] | None = None
        if self.samples is None:
            self._items = [item_of(samples, position) for position in self._numbers]
            self.samples = [(item.path, item.target) for item in self._items]

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, number: int) -> Item: ...
    @overload
    def __getitem__(self, number: slice) -> list[Item]: ...
    def __getitem__(self, number: int | slice) -> Item | list[Item]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        if self._items is not None:
            return self._items[number]
        position = self._numbers[number]
        return Item(position, self.samples.path(position), self.samples.targets.item(position))

    def targets(self, numbers: Sequence[int]) -> list[Any] | npt.NDArray[np.int64]:
        """Return the targets of some of them; class indices of a table as an array."""
        if self._items is not None:
            return [self._items[number].target for number in numbers]
        positions = self.positions if len(numbers) == len(self) else self.positions[numbers]
        found: npt.NDArray[np.int64] = self.samples.targets[positions]
        return found

    def paths(self) -> list[str]:
        if self._items is not None:
            return [item.path for item in self._items]
        return [self.samples.path(position) for position in self._numbers]

    def packed_paths(self) -> PackedPaths:
        if self._items is not None:
            return paths_of(self.samples, np.arange(len(self)))
        return paths_of(self.samples, self.positions)

    def are_still_in(self, samples: Any) -> bool:
        """Whether these are still the samples of a dataset."""
        if self._items is None:
            return isinstance(samples, SampleTable) and samples.frozen is self.samples
        try:
            return all(item == item_of(samples, item.index) for item in self._items)
        except Exception:  # fewer samples, or targets that do not compare
            return False


def item_of(samples: Any, position: int) -> Item:
    """Return a sample of a table, or of a list that the script has set instead."""
    if isinstance(samples, SampleTable):
        return Item(position, samples.path(position), samples.target(position))
    path, target = samples[position]
    return Item(position, os.fspath(path), target)


def substitute_of(samples: Any, items: Sequence[Item], key: Key, number: int, attempt: int) -> Item | None:
    """Return another sample of the same class, drawn by the replaced one's key; None if there is none."""
    item = items[number]
    seed = sample_seed(key.seed, key.epoch, int(key.draws[number]))
    classes = _classes_of(samples)
    other = another_of_its_class(classes, classes[item.index], item.index, seed, attempt)
    return None if other is None else item_of(samples, other)


def _classes_of(samples: Any) -> npt.NDArray[Any]:
    """Return each sample's class: its target, or one for all if targets are neither integers nor texts."""
    if isinstance(samples, SampleTable) and samples.is_flat:
        return samples.targets_array()
    targets = [sample[1] for sample in samples]
    if not all(isinstance(target, (int, np.integer, str)) for target in targets):
        return np.zeros(len(targets), np.int64)
    # Objects: in an array of their own type, 1 and "1", or two integers beyond int64, may be the same.
    return np.array(targets, object)
