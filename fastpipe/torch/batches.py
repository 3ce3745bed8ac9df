"""Unfinished batches of images: their samples, their memory, and the user's code that must still run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info
from torchvision import tv_tensors

from fastpipe.core.bad_samples import Item
from fastpipe.core.batches import PendingBatch, say_where
from fastpipe.core.keys import another_of_its_class, sample_seed
from fastpipe.core.sample_tables import PackedPaths, RowTable, SampleTable, paths_of
from fastpipe.core.slots import KEPT_SLOTS, SlotPool
from fastpipe.core.types import Key
from fastpipe.images.batch import RowsOf, Then
from fastpipe.images.plan import Plan
from fastpipe.images.pointwise import Layout
from fastpipe.torch.randomness import run_keyed, run_seeded, take_key
from fastpipe.torch.samples import BatchSamples
from fastpipe.torch.source import StartedBatch
from fastpipe.torch.split import SampleSpec, Split
from fastpipe.torch.threads import note
from fastpipe.torch.transport import shared_flat
from fastpipe.torch.wrappers import positions_of

LAYOUTS: dict[Any, Layout] = {torch.contiguous_format: "contiguous", torch.channels_last: "channels_last"}

PLACED = object()  # replaces the value of a sample that was written to the batch's memory


def matches_spec(value: Any, like: SampleSpec) -> bool:
    """Return whether a sample is a plain CPU tensor with the class, shape and dtype in ``like``.  Any strides
    are allowed."""
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
    """A prediction of the class, shape and dtype of the samples that a plan (a compiled transform) makes.

    If all samples of the first finished batch agree in these three, later batches are expected to agree as
    well.  The samples of a later batch are then stored in one tensor.  After a sample that differs, nothing
    is predicted any more for this plan, and each sample has its own memory.
    """

    def __init__(self) -> None:
        # The plan and its spec, None if samples differ.  They are one tuple, because several threads use it.
        self._known: tuple[object, SampleSpec | None] = None, None

    def of(self, plan: object) -> SampleSpec | None:
        known, like = self._known
        return like if known is plan else None

    def learn(self, plan: object, values: Sequence[Any]) -> None:
        """Update the prediction from a batch whose samples were not stored in one tensor."""
        known, like = self._known
        if known is not plan:
            first = values[0]
            is_tensor = type(first) in (torch.Tensor, tv_tensors.Image) and first.numel() > 0
            like = SampleSpec(type(first), tuple(first.shape), first.dtype) if is_tensor else None
        if like is not None and not all(matches_spec(value, like) for value in values):
            like = None
        self._known = plan, like


class Place(NamedTuple):
    """Where the samples of a batch are written, and the work that remains for each sample.

    Attributes:
        memory: where the plan writes samples: an array for the batch, or for each sample an array in a larger
            batch.  None if the plan does not write to memory.
        tensor: a tensor (N, …) for all samples of this batch.  None if each sample has its own memory, or if
            samples are written to a larger batch.
        like: class, shape and dtype of samples that are put into ``tensor``.  None if the plan writes all.
        finish: a function that the decoding thread calls with each sample's value and number, or None.
        then: the same work as ``finish``, as an object that the native engine can execute, or None.
    """

    memory: npt.NDArray[Any] | Sequence[npt.NDArray[Any]] | None = None
    tensor: torch.Tensor | None = None
    like: SampleSpec | None = None
    finish: Callable[[Any, int], Any] | None = None
    then: Then | None = None


@dataclass(frozen=True)
class BatchRequest:
    """The settings with which a batch of images is made.

    Attributes:
        threaded: whether threads make the batch.  If false, the calling thread makes the batch at once.
        rows: the rows of a larger batch to which samples are written.  None if the batch has its own memory.
        sends_bytes: whether images stay uint8, because the device does the later steps.
        split: the transform in two parts, or None.  If ``sends_bytes`` is true, only part one is applied.
        device: the device that decodes the images if it can and ``sends_bytes`` is true, or None.
        dtype: the 16-bit dtype to which float32 samples are rounded if the plan can do this.  "" for none.
        is_pinned: whether to make the batch in page-locked memory, for the copy to a GPU.
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
        """True if the transform is split, and the decoding threads do both of its parts."""
        return self.split is not None and not self.sends_bytes

    def plan_of(self, plan: Plan) -> Plan:
        if self.split is not None:
            return self.split.head
        return plan.as_bytes() if self.sends_bytes else plan.of_dtype(self.dtype)


class BatchMemory:
    """Allocates memory for a dataset's batches in one process.  The memory of old batches is used again."""

    def __init__(self, is_pinned: bool = False) -> None:
        self.slots = SlotPool(KEPT_SLOTS)
        self._is_pinned = is_pinned

    def flat(self, size: int, is_batch: bool = True) -> torch.Tensor:
        """Return uninitialised memory, uint8 (size,), for a batch or for a single sample."""
        if not is_batch:
            return torch.from_numpy(np.empty(size, np.uint8))
        if get_worker_info() is not None:  # the batch is sent to the parent: use memory that both can access
            return shared_flat(size)
        if self._is_pinned:
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        return torch.from_numpy(self.slots.take((size,), np.uint8))


def _place_of(
    request: BatchRequest, plan: Plan, key: Key, count: int, memory: BatchMemory, like: SampleSpec | None,
    stock_threads: bool,
) -> Place:  # fmt: skip
    """Return where a batch's samples are written.  ``like`` is their expected class, shape and dtype, or
    None."""
    if request.split is not None and request.augments_here:
        return _augmented(request.split, key, count, memory, request.rows)
    if plan.output is None and stock_threads:
        tensor = batch_memory_like(like, count, memory) if like is not None and count else None

        def finish(value: Any, number: int) -> Any:
            if plan.stock:
                value = run_keyed(plan.stock, value, partial(_seed_of, key, number))
            if tensor is None or like is None or not matches_spec(value, like):
                return value
            tensor[number].copy_(value.as_subclass(torch.Tensor))
            return PLACED

        return Place(tensor=tensor, like=like, finish=finish)
    if request.rows is not None:
        return Place(request.rows)
    return Place(*batch_memory(plan, count, memory, request.threaded))


def _augmented(split: Split, key: Key, count: int, memory: BatchMemory, rows: RowsOf | None) -> Place:
    shape = (count, *split.shape)
    tensor = batch_memory_like(split.like, count, memory) if rows is None else None
    whole: Any = tensor if rows is None else rows.memory
    batch = split.chain.native_batch(shape, key, whole, *([] if rows is None else [rows.numbers]))

    def finish(value: Any, number: int) -> Any:  # for samples that the native engine cannot make
        problem = batch.change(number, value.as_subclass(torch.Tensor).numpy())
        split.chain.check_change(problem, number)
        return PLACED

    return Place(None, tensor, None if rows is not None else split.like, finish, Then(batch, PLACED))


class Batch(StartedBatch):
    """An unfinished batch of images from one dataset.  If a device may decode some of the images, ``turn`` is
    the batch's ``gpu_batches.Turn``.  Otherwise ``turn`` is None."""

    pending: PendingBatch

    def __init__(
        self, folder: Any, indices: Sequence[int] | npt.NDArray[np.int64], key: Key | None,
        request: BatchRequest,
    ) -> None:  # fmt: skip
        samples, runtime, remote = folder.samples, folder._running(), folder._remote
        items = self._items = Items(samples, positions_of(indices, len(samples)))
        self.count, self._is_keyed = len(items), key is not None
        if key is None:
            key, self._is_keyed = take_key(self.count)
        plan = request.plan_of(folder.plan)
        memory = runtime.pinned_memory if request.is_pinned else runtime.memory
        like = runtime.spec.of(plan) if request.threaded else None
        place = _place_of(request, plan, key, self.count, memory, like, folder._stock_threads(plan))
        substitute = None
        self._substitutes: dict[int, Item] = {}  # by the numbers of the bad samples
        if folder.bad_samples.policy == "replace":
            substitute = partial(_substitute_of, samples, items, key, self._substitutes)
        parameters, objects = plan.draw(key), items.positions[:0]
        if remote is not None:
            objects = folder._rows(items.positions)
            if request.threaded:  # requested as late as possible, because this wakes many threads
                remote.reader().need(objects)
        maker = None
        if request.device and request.sends_bytes and plan.writes_bytes:
            maker = runtime.maker_on(request.device)
        turn = self.turn = None if maker is None else maker.turn()
        # The threads must live as long as the batch, even if the dataset gets new threads in the meantime.
        self._folder, self._runtime, self._plan, self._key = folder, runtime, plan, key
        self._tensor, self._like = place.tensor, place.like
        self.nbytes = 0 if self._tensor is None else self._tensor.nbytes
        self._stock_here = bool(plan.stock) and place.finish is None
        self._augments_there = request.split is not None and request.sends_bytes
        self.pending = runtime.begin(
            items, plan, parameters, place, substitute, turn if turn is not None and turn.is_there else None,
            request.threaded, objects,
        )  # fmt: skip

    def is_current(self) -> bool:
        return self._items.are_still_in(self._folder.samples)

    def finish(self) -> Sequence[Any]:
        samples = self.make()
        if self.turn is not None:
            self.turn.given()
        return samples

    def make(self) -> Sequence[Any]:
        """Wait for the batch, and return its samples, but do not record that the batch was delivered."""
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

    def there(self) -> torch.Tensor | None:
        return None if self.pending.there is None else self.pending.there.tensor()

    def _targets(self, kept: Sequence[int]) -> list[Any] | npt.NDArray[np.int64]:
        transform = self._folder.target_transform
        if transform is None:
            found = self._items.targets(kept)
            if isinstance(found, list):  # class indices, in an array, are equal to those of the substitutes
                for place, number in enumerate(kept) if self._substitutes else ():
                    found[place] = self._item(number).target
            return found
        targets = []
        for item in map(self._item, kept):
            try:
                targets.append(transform(item.target))
            except Exception as error:
                say_where(error, item)
                raise
        return targets

    def _item(self, number: int) -> Item:
        """Return the item whose image a sample has: its own, or the substitute for a bad image."""
        item: Item = self._substitutes.get(number) or self._items[number]
        return item

    def _whole(self, kept: Sequence[int]) -> tuple[torch.Tensor, type] | None:
        """Return one tensor with the samples ``kept``, and the class of the images.  Return None if some of
        these samples are not in one tensor."""
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
        note(self._item(number).path)
        try:
            if self._is_keyed:
                return run_seeded(self._plan.stock, value, _seed_of(self._key, number))
            for transform in self._plan.stock:  # as in ImageFolder, these use the script's random generators
                value = transform(value)
            return value
        except Exception as error:
            say_where(error, self._item(number))
            raise


def chosen_there(tensor: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    from fastpipe.core.transfer import uploaded

    return tensor[uploaded(torch.tensor(numbers, dtype=torch.int64, device="cpu"), tensor.device)]


def _seed_of(key: Key, number: int) -> int:
    return sample_seed(key.seed, key.epoch, int(key.draws[number]))


def batch_memory(
    plan: Plan, count: int, memory: BatchMemory, is_batch: bool = True
) -> tuple[npt.NDArray[Any] | None, torch.Tensor | None]:
    """Return the memory of a batch twice: as an array for the kernels, and as a tensor.  Return (None, None)
    if the batch is empty, or if the plan makes a separate object for each sample."""
    spec = plan.output
    if spec is None or count == 0:
        return None, None
    shape = (count, math.prod(spec.shape))
    flat = memory.flat(math.prod(shape) * np.dtype(spec.word).itemsize, is_batch)
    return flat.numpy().view(spec.word).reshape(shape), plan.over(flat, (count, *spec.shape))


def batch_memory_like(like: SampleSpec, count: int, memory: BatchMemory) -> torch.Tensor:
    with torch.inference_mode(False):  # threads write to the memory outside of the caller's inference mode
        return memory.flat(count * like.nbytes).view(like.dtype).view(count, *like.shape)


class Items(Sequence[Item]):
    """Some samples of a dataset, as a sequence of ``Item`` objects.

    The attribute ``samples`` is a table (flat arrays) of all samples that the dataset had when this object
    was created.  Each ``Item`` is then created when it is accessed.  If the dataset has no table, ``samples``
    is a list of pairs (path, target), one for each item.
    """

    def __init__(self, samples: Any, positions: npt.NDArray[np.int64]) -> None:
        self.positions = positions
        self.samples: Any = samples.frozen if isinstance(samples, SampleTable) else None
        self._numbers = positions.tolist()
        self._items: list[Item] | None = None
        if self.samples is None:
            self._items = [_item_of(samples, position) for position in self._numbers]
            self.samples = [(item.path, item.target) for item in self._items]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        if self._items is not None:
            return self._items[number]
        position = self._numbers[number]
        return Item(position, self.samples.path(position), self.samples.targets.item(position))

    def targets(self, numbers: Sequence[int]) -> list[Any] | npt.NDArray[np.int64]:
        """Return the targets of the items with these numbers.  If ``samples`` is a table, the result is an
        array of class indices, int64.  Otherwise it is a list."""
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
        if self._items is None:
            return isinstance(samples, SampleTable) and samples.frozen is self.samples
        try:
            return all(item == _item_of(samples, item.index) for item in self._items)
        except Exception:  # the dataset has fewer samples now, or targets that cannot be compared
            return False


def _item_of(samples: Any, position: int) -> Item:
    if isinstance(samples, SampleTable):
        return Item(position, samples.path(position), samples.target(position))
    path, target = samples[position]
    return Item(position, os.fspath(path), target)


def _substitute_of(
    samples: Any, items: Sequence[Item], key: Key, chosen: dict[int, Item], number: int, attempt: int
) -> Item | None:
    """Return another sample of a bad sample's class, and store it in ``chosen``.  Return None if the class
    has no other sample.  The bad sample's key (seed, epoch, position) and ``attempt`` decide which sample it
    is.  If targets are neither integers nor strings, all samples count as one class."""
    item = items[number]
    if isinstance(samples, SampleTable) and samples.is_flat:
        targets = samples.targets_array()
    else:
        values = samples.targets() if isinstance(samples, RowTable) else [sample[1] for sample in samples]
        targets = np.zeros(len(values), np.int64)
        if all(isinstance(target, (int, np.integer, str)) for target in values):
            # An array of objects: in a typed array, 1 and "1", or two large integers, could become equal.
            targets = np.array(list(values), object)
    seed = _seed_of(key, number)
    other = another_of_its_class(targets, targets[item.index], item.index, seed, attempt)
    if other is None:
        return None
    chosen[number] = _item_of(samples, other)
    return chosen[number]
