"""The order of the batches in a loader's epochs, and the user's progress in an epoch."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from fastpipe.errors import OptionError
from fastpipe.options import Shard
from fastpipe.torch.samplers import (
    DRAWN,
    EpochBatches,
    GroupSampler,
    OrderRef,
    ShardSampler,
    ShuffleSampler,
    innermost,
)

# ---- progress in an epoch ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ResumePoint:
    """The point at which the next iteration over the loader continues.

    Attributes:
        epoch: number of the epoch.
        begun: number of earlier epochs with the same base seed.
        batches: number of batches that the user has received.
        taken, offset: what these batches contain of the sampler's batches of indices: the first ``taken``
            batches, and ``offset`` samples of the next one.
        position: position of the next batch in the epoch's order, if this order depends only on the epoch.
        base_seed: seed of the samples' random numbers if the loader has no seed.
        generator: state of the sampler's generator at the start of the epoch.
        asked: number of requests to the sampler, including requests ahead and the request after the sampler's
            last item.  None if the number is unknown.
        now: state of the sampler's generator when this point was saved.
        seeds: state of the loader's generator when this point was saved.  None unless the generator is used
            only to draw base seeds.
    """

    epoch: int
    begun: int = 0
    batches: int = 0
    taken: int = 0
    offset: int = 0
    position: int = 0
    base_seed: int | None = None
    generator: torch.Tensor | None = None
    asked: int | None = None
    now: torch.Tensor | None = None
    seeds: torch.Tensor | None = None

    @property
    def is_within(self) -> bool:
        """True if the epoch has started.  The random numbers at its start were then already drawn."""
        is_begun = self.base_seed is not None or self.generator is not None
        return is_begun or bool(self.batches or self.taken or self.offset or self.position)


# A function that returns the number of requests to a sampler's iterator, and the state of the generator.
Look = Callable[[torch.Generator | None], tuple[int, torch.Tensor | None]]


def _known(asked: int, generator: torch.Generator | None) -> tuple[int, torch.Tensor | None]:
    return asked, None if generator is None else generator.get_state()


class CountingSampler(Iterator[Any]):
    """An iterator over a sampler that counts the requests to the sampler.  Thread-safe."""

    def __init__(self, sampler: Iterator[Any], generator: torch.Generator | None) -> None:
        self._sampler, self._generator = sampler, generator
        self._asked = 0
        self._left: torch.Tensor | None = None  # the generator's state after the last request
        self._is_shared = False
        self._lock = threading.Lock()

    def __next__(self) -> Any:
        with self._lock:
            self._asked += 1
            if self._generator is None:
                return next(self._sampler)
            found = self._generator.get_state()
            try:
                return next(self._sampler)
            finally:
                left, self._left = self._left, self._generator.get_state()
                if left is not None and not torch.equal(found, self._left):  # this request used the generator
                    self._is_shared = self._is_shared or not torch.equal(left, found)

    def look(self, generator: torch.Generator | None) -> tuple[int, torch.Tensor | None]:
        """Return the number of requests, and the current state of ``generator``."""
        with self._lock:
            if self._is_shared:
                raise OptionError(
                    "the sampler draws more and more of its epoch from a generator that something else has "
                    "drawn from in this epoch, so that its draws cannot be made again: give the sampler a "
                    "generator of its own"
                )
            return _known(self._asked, generator)


@dataclass(eq=False)
class Progress:
    """The user's progress in an epoch.

    Attributes:
        point: the point at which this iteration began.
        generator, sampler: states of the sampler's generator and of the user's sampler when the epoch began.
        asked: function that returns how many times the sampler's iterator was called, and the state of its
            generator; None if no sampler decides the order.
        received: number of batches received since ``point``.
        taken, offset: as in ``ResumePoint``, but counted since ``point``.  ``taken`` is None if each batch
            contains exactly one of the sampler's batches of indices.
        is_over: whether the iterator is exhausted.
        is_stale: whether ``set_epoch`` chose another epoch before the first batch of this epoch.
        held: None, except if a wrapper (for example the Accelerate wrapper) has requested more batches than
            it has passed to the user.  Then (received, taken, offset), counted for the batches that the user
            has.
    """

    point: ResumePoint
    generator: torch.Tensor | None
    sampler: Any
    asked: Look | None
    received: int = 0
    taken: int | None = None
    offset: int = 0
    is_over: bool = False
    is_stale: bool = False
    held: tuple[int, int | None, int] | None = None
    base_seed: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy does not continue the iterator, but keeps the iterator's position.
        return {**self.__dict__, "asked": self.asked and partial(_known, self.asked(None)[0])}

    def hold(self) -> None:
        """From now on, do not count new batches as received by the user.  The next call counts the batches
        received until then."""
        self.held = (self.received, self.taken, self.offset)


# ---- epochs ------------------------------------------------------------------------------------------

_WHOLE = Shard(0, 1)

WORKER_OPTIONS = (
    "num_workers", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
    "persistent_workers",
)  # fmt: skip


class EpochOrder:
    """The order of a loader's batches in each epoch, and how far the user has got.

    This object must not refer to the loader.  With persistent workers, the loader refers to its iterator, and
    the iterator refers to this object.  Deleting the loader must end the workers at once, and a cycle of
    references would delay this until garbage collection.  ``waiting`` is a reference to the ``IndexBatches``
    of an iterator from which no batch was requested yet.
    """

    def __init__(self, loader: DataLoader[Any], shard: Shard | None, seed: Callable[[], int | None]) -> None:
        self.next_epoch = 0
        self.progress: Progress | None = None
        self.waiting: weakref.ref[Any] | None = None
        self.look_at(loader)
        self._resume: ResumePoint | None = None
        self._is_asked = False  # whether an iterator was made at the resume point
        self._is_new = True  # no epoch has begun yet, and no state was loaded
        self._told = 0  # the epoch number of the script's ``DistributedSampler`` when the last epoch began
        self._seed = seed
        self._shard = shard or _WHOLE
        self._attach()

    def look_at(self, loader: DataLoader[Any]) -> None:
        """Use the loader's current samplers, because some scripts replace them."""
        self.sampler, self.index_sampler = loader.sampler, loader._index_sampler
        self._generator = loader.generator
        self.is_batched = bool(loader._auto_collation)

    @property
    def _is_default(self) -> bool:
        return not self.is_batched or _are_torchs(self.index_sampler, self.sampler)

    def __len__(self) -> int:
        ours = self.ours() if isinstance(self.sampler, ShardSampler) else None
        return len(self.index_sampler) if ours is None else len(ours)

    def _attach(self) -> None:
        """Make the sampler's ``set_epoch``, which trainers call, also call this object's ``set_epoch``."""
        sampler: Any = self.sampler
        if isinstance(sampler, ShardSampler):
            if self._is_default:  # otherwise a trainer's own batch sampler uses the sampler
                sampler.order = OrderRef(self)
        elif isinstance(sampler, ShuffleSampler):
            sampler.order = OrderRef(self)
        elif is_default(sampler):
            sampler.set_epoch = OrderRef(self).set_epoch
        if hasattr(sampler, "set_epoch") and self.is_batched and self._is_default:
            # Hugging Face's Trainer calls ``set_epoch`` only of the object that yields the index batches.
            self.index_sampler.set_epoch = sampler.set_epoch

    def __getstate__(self) -> dict[str, Any]:
        # A copy does not get the iterators and their requests.
        return {**self.__dict__, "waiting": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch.  The epoch starts from its beginning, unless this epoch is
        resumed."""
        progress, point = self.progress, self.pending
        if self._is_new and epoch and self.generator is not None and self.ours() is None:
            self._is_new = False
            warnings.warn(
                f"this run begins with epoch {epoch}, but the loader has no seed, and its generator may be "
                "in the state of a first epoch, so that the same order would be repeated: give the loader "
                "a seed=, or resume with its state_dict()",
                stacklevel=3,
            )
        if progress is not None and not progress.is_over and not progress.received:
            if progress.point.epoch == epoch:
                return  # an iterator of this epoch exists already, and has yielded no batch yet
            progress.is_stale, self.progress = True, None
        else:
            self.progress = None  # the epoch was interrupted, or is over
        self.next_epoch = epoch
        if point is not None and point.epoch != epoch:
            is_fresh = point.generator is None and not point.batches  # the point's base seed stays in use
            kept = (point.begun, point.base_seed) if is_fresh else (0, None)
            self._resume = ResumePoint(epoch, kept[0], base_seed=kept[1], now=point.now, seeds=point.seeds)

    @property
    def pending(self) -> ResumePoint | None:
        """The point at which the next epoch resumes; None if the epoch starts from its beginning.

        The point stays until a batch was received, because trainers may make several iterators before that.
        """
        progress = self.progress
        is_resumed = progress is not None and progress.point is self._resume
        if progress is not None and is_resumed and (progress.received or progress.is_over):
            self._resume = None
        return self._resume

    def pass_epoch(self) -> int:
        epoch = self.next_epoch
        self.progress, self._resume = None, None
        self.next_epoch, self._is_new = epoch + 1, False
        return epoch

    def resume_at(self, point: ResumePoint) -> None:
        """Resume the next epoch at ``point``, and restore the generators."""
        self.next_epoch, self.progress, self._resume = point.epoch, None, point
        self._told, self._is_asked, self._is_new = self._told_epoch(), True, False
        self.draw_again()
        self._is_asked = False

    def draw_again(self) -> None:
        """Undo the random draws of an earlier iterator that was not used.  This is called before a new
        iterator draws random numbers."""
        point = self.pending
        if point is None:
            return
        generators = (self.generator, point.now), (self.seeds, point.seeds)
        if self._is_asked:
            for generator, state in generators:
                if generator is not None and state is not None:
                    generator.set_state(state)
        else:  # save the current states, because the script may have set the generators after loading a state
            now, seeds = (one if one is None or it is None else it.get_state() for it, one in generators)
            self._resume, self._is_asked = replace(point, now=now, seeds=seeds), True

    @property
    def seeds(self) -> torch.Generator | None:
        """The loader's own generator if it is used only to draw base seeds, else None."""
        generator = self._generator
        if not isinstance(generator, torch.Generator) or generator is torch.default_generator:
            return None
        if self.ours() is None:
            return None if generator is self.generator else generator
        return generator if self._seed() is None else None

    def skip(self, batches: int, is_refilled: bool) -> None:
        """Skip the first batches of the next epoch.  If this epoch is resumed, ``batches`` also counts from
        the epoch's start."""
        point, ours = self.pending, self.ours()
        if batches < 0:
            raise OptionError(f"a number of batches to skip must be from 0, got {batches}")
        if batches == (0 if point is None else point.batches):
            return
        is_drawn = ours is None and self.generator is not None
        if batches and (is_refilled or (is_drawn and (point is None or point.generator is None))):
            raise OptionError(
                f"cannot tell which samples are in the first {batches} batches of this epoch, "
                + ("since bad_samples='skip' fills batches up" if is_refilled else "whose order is drawn")
                + ": load the loader's state, and skip as many batches as it says"
                + ("" if is_refilled else "; or give the loader a seed=")
            )
        point = point or ResumePoint(self.next_epoch)
        if point.asked is not None and point.asked < batches:  # more index batches than were drawn so far
            point = replace(point, asked=None, now=None)
        position = 0 if ours is None or not batches else ours.steps().end(batches)
        self._resume = replace(point, batches=batches, taken=batches, offset=0, position=position)

    @property
    def generator(self) -> torch.Generator | None:
        """The generator from which torch's own sampler draws the order; None if no generator is used."""
        sampler = innermost(self.index_sampler)
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
        return torch.default_generator if type(sampler) in DRAWN else None

    def here(self) -> ResumePoint:
        progress = self.progress
        assert progress is not None
        point, ours = progress.point, self.ours()
        received, taken, offset = progress.held or (progress.received, progress.taken, progress.offset)
        taken = point.taken + (received if taken is None else taken)
        position = 0
        if ours is not None:
            position = ours.steps(point.position).end(taken - point.taken) + offset
        asked, now = (None, None) if progress.asked is None else progress.asked(self.generator)
        return ResumePoint(
            point.epoch, point.begun, point.batches + received, taken, offset, position,
            progress.base_seed, progress.generator, asked, now,
        )  # fmt: skip

    def between(self, base_seed: int | None, begun: int) -> ResumePoint:
        generator = None if self.ours() is not None else self.generator
        now = None if generator is None else generator.get_state()
        return ResumePoint(self.next_epoch, begun, base_seed=base_seed, now=now)

    def begin(self, begun: int, sampler_state: Any, asked: Look | None) -> Progress:
        point, self.waiting = self.pending, None
        told = self._told_epoch()
        if told != self._told:  # the script has set this epoch
            point, self._resume, self.next_epoch, self._told = None, None, told, told
        generator = self.generator
        if point is None:
            point = ResumePoint(self.next_epoch, begun)
        self.next_epoch, self._is_new = point.epoch + 1, False
        state = point.generator
        if state is None and generator is not None:
            state = generator.get_state()
        self.progress = Progress(point, state, sampler_state, asked)
        return self.progress

    def _told_epoch(self) -> int:
        """Return the epoch number of the script's or trainer's ``DistributedSampler``; 0 without one."""
        batches = getattr(self.index_sampler, "sampler", None)
        for sampler in (self.sampler, batches):
            if isinstance(sampler, DistributedSampler) and not isinstance(sampler, ShardSampler):
                return sampler.epoch
        return 0

    def shard(self) -> tuple[int, int]:
        """Return the rank and the number of ranks from a ``DistributedSampler`` or a similar sampler."""
        batches = getattr(self.index_sampler, "sampler", None)
        for sampler in (self.sampler, self.index_sampler, batches):
            rank, ranks = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
            if isinstance(rank, int) and isinstance(ranks, int):
                return rank, ranks
        return 0, 1

    def ours(self) -> EpochBatches | None:
        """Return the batches of each epoch if they depend only on the epoch.  Return None if the user's
        sampler or a generator decides which samples they contain."""
        sampler, seed = self.sampler, self._seed()
        is_shuffled = type(sampler) is data.RandomSampler and is_default(sampler)  # a loader made the sampler
        arrangement = getattr(sampler, "arrangement", None)
        if not self._is_default:
            return None
        if isinstance(sampler, ShardSampler):
            count, shuffles = len(sampler.dataset), sampler.shuffle  # type: ignore[arg-type]
        elif type(sampler) is data.SequentialSampler:
            count, shuffles = len(sampler), False
        elif seed is not None and (type(sampler) in (GroupSampler, ShuffleSampler) or is_shuffled):
            count, shuffles = len(sampler), True  # type: ignore[arg-type]
        else:
            return None
        batches: Any = self.index_sampler
        size, drop_last = (batches.batch_size, batches.drop_last) if self.is_batched else (1, False)
        return EpochBatches(
            count, size, drop_last, seed if shuffles else None, self._shard, arrangement if shuffles else None
        )


def batching_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments of ``DataLoader`` that define which samples form which batch.

    The arguments follow from the loader's current samplers, which some scripts replace or change.
    """
    if isinstance(loader.dataset, data.IterableDataset):
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    batches: Any = loader._index_sampler
    if not loader._auto_collation:
        return {"batch_size": None, "drop_last": False, "sampler": loader.sampler}
    if not _are_torchs(batches, loader.sampler):
        return {"batch_sampler": batches}
    # Convert to the types that torch requires: a script may have set values of other types, which also work.
    size, drop_last = int(batches.batch_size), bool(batches.drop_last)
    return {"batch_size": size, "drop_last": drop_last, "sampler": loader.sampler}


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    names = (
        *WORKER_OPTIONS, "dataset", "collate_fn", "pin_memory", "pin_memory_device", "generator", "in_order"
    )  # fmt: skip
    return {name: getattr(loader, name) for name in names if hasattr(loader, name)}


def _are_torchs(batches: Any, sampler: Any) -> bool:
    """Return whether ``batches`` is the batch sampler that ``DataLoader`` itself makes from ``sampler``."""
    return type(batches) is BatchSampler and batches.sampler is sampler


def mark_default(sampler: Any) -> None:
    """Mark a sampler that a loader made for ``shuffle=``.  The mark stays if a trainer uses the sampler
    elsewhere."""
    sampler._fastpipe_is_default = True


def is_default(sampler: Any) -> bool:
    return getattr(sampler, "_fastpipe_is_default", False)
