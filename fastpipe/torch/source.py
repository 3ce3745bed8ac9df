"""Sources make a loader's batches, of fastpipe's datasets behind ``Subset`` and ``ConcatDataset``."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastpipe.core.bad_samples import why_nothing_is_left
from fastpipe.core.clock import StageClock
from fastpipe.core.pool import Job
from fastpipe.core.slots import KEPT_SLOTS
from fastpipe.core.types import Key
from fastpipe.errors import BadSampleError
from fastpipe.torch.samplers import EpochBatches
from fastpipe.torch.upcoming import Prefetcher
from fastpipe.torch.wrappers import Int64Array, Located, integers, located

MOST_SPARE = 1 << 30  # bytes of batches begun while one sample holds up the one that is due


class SplitError(ValueError):
    """A transform that is not to be split; says why."""


class StartedBatch(ABC):
    """A batch that is being made.

    Attributes:
        pending: what reads, or decodes, its samples.
        count: samples that were asked for.
        nbytes: of its memory; 0 if they are not known before it is made.
        kept: numbers of the samples that it has, once it is finished.
    """

    pending: Any
    count: int
    nbytes: int
    kept: Sequence[int] = ()

    @abstractmethod
    def finish(self) -> Sequence[Any]:
        """Wait for it; run what must run in this thread, in order; return its samples."""

    def jobs(self) -> list[Job]:
        found: list[Job] = self.pending.jobs
        return found

    def is_current(self) -> bool:
        """Whether its samples are still those of the dataset."""
        return True

    def why_empty(self) -> BadSampleError | None:
        """Why it has no sample once it is finished; None if none was asked for."""
        return why_nothing_is_left(self.pending.left_out, self.count)

    def cancel(self) -> None:
        self.pending.cancel()


class MixedBatch(StartedBatch):
    """A batch of several datasets: for each the places of its samples in the batch, and its part."""

    def __init__(self, parts: Sequence[tuple[Int64Array, Any]]) -> None:
        self.parts = parts
        self.count = sum(len(rows) for rows, _ in parts)
        self.nbytes = sum(batch.nbytes for _, batch in parts)

    def is_current(self) -> bool:
        return all(batch.is_current() for _, batch in self.parts)

    def jobs(self) -> list[Job]:
        return [job for _, batch in self.parts for job in batch.jobs()]

    def why_empty(self) -> BadSampleError | None:
        left_out = {
            int(rows[number]): error
            for rows, batch in self.parts
            for number, error in batch.pending.left_out.items()
        }
        return why_nothing_is_left(left_out, self.count)

    def cancel(self) -> None:
        for _, batch in self.parts:
            batch.cancel()


class BatchedDataset:
    """What fastpipe's datasets have in common: they answer for whole batches, by threads of this process.

    Each has ``_start_batch``, ``_answers_for_batches`` (no subclass or option makes samples one by one), and
    ``_running``: ``pool`` (None for the calling thread), ``clock`` and ``slots``, memory for large parts.
    """

    def __getitems__(self: Any, indices: Sequence[int]) -> Sequence[Any]:
        """The samples at some positions, in their order, made side by side; what ``DataLoader`` calls for a
        batch."""
        if not self._answers_for_batches():
            return [self[index] for index in indices]
        # A batch sampler of the script's may give iterators.
        batch = self._start_batch(indices if hasattr(indices, "__len__") else list(indices))
        samples = batch.finish()
        error = None if len(samples) else batch.why_empty()
        if error is not None:  # nothing can be collated from no samples
            raise error
        given: Sequence[Any] = self._handed_out(samples)
        return given

    def _handed_out(self, samples: Sequence[Any]) -> Sequence[Any]:
        return samples

    @staticmethod
    def _only(batch: StartedBatch) -> Sequence[Any]:
        """Finish a batch of one sample."""
        samples = batch.finish()
        if not len(samples):  # not an IndexError, which would silently end a loop over the dataset
            raise batch.why_empty() or AssertionError("one sample was asked for")
        return samples

    @property
    def clock(self: Any) -> StageClock:
        """Time spent in this process, by stage, summed over the threads."""
        clock: StageClock = self._running().clock
        return clock

    def __getstate__(self) -> dict[str, Any]:
        # Threads and open files stay here; the copy has its own when it needs them.
        return {**self.__dict__, "_runtime": None}


class Source(ABC):
    """Makes batches of one dataset of fastpipe's, or of several behind ``Subset`` and ``ConcatDataset``.

    Attributes:
        bases: these datasets, in the order of the samples.
        by_split: what ``split`` gave, to make batches by it; where bytes are sent by the first part of it.
    """

    by_split: Any = None

    def __init__(self, dataset: Any, bases: Sequence[Any]) -> None:
        self._dataset, self.bases = dataset, list(dict.fromkeys(bases))

    def start(self, indices: Sequence[int], key: Key) -> StartedBatch:
        """Begin a batch."""
        parts = located(self._dataset, integers(indices))
        if len(parts) > 1:
            return self._start_mixed(parts, key)
        end, _, local = parts[0] if parts else (None, None, np.empty(0, np.int64))
        return self._start_one(end, local, key)

    @abstractmethod
    def _start_one(self, end: Any, local: Int64Array, key: Key) -> StartedBatch:
        """Begin a batch of one dataset, ``end``: None for an empty batch."""

    @abstractmethod
    def _start_mixed(self, parts: Sequence[Located], key: Key) -> StartedBatch:
        """Begin a batch of several datasets."""

    @abstractmethod
    def describe(self) -> list[str]:
        """What is done how, in lines."""

    @abstractmethod
    def tensors(self, batch_size: int) -> int:
        """Large tensors in a batch."""

    @property
    @abstractmethod
    def runs_user_code(self) -> bool:
        """Whether functions of the script's are called, other than in threads."""

    def is_best_here(self, device: Any) -> bool:
        """Whether this process alone can do some of the work: fetch what comes next, or use a device."""
        return bool(self.prefetchers(is_here=True))

    @property
    def runs_python(self) -> bool:
        """Whether Python runs for each sample, rather than once for a batch."""
        return True

    @property
    def runs_torchvision(self) -> bool:
        """Whether torchvision's own transforms run in threads, which hold Python's lock for most of it."""
        return False

    def prefetchers(self, *, is_here: bool) -> Sequence[Prefetcher]:
        """Return what prepares for the indices to come."""
        return ()

    @property
    def spare_nbytes(self) -> int:
        """Bytes of batches that may be begun while one sample holds up the one that is due."""
        return MOST_SPARE

    def ask(self, **changes: Any) -> None:
        """Have batches made otherwise, where that is possible: fields of ``BatchRequest``."""
        return

    def make_on(self, device: Any) -> bool:
        """Make batches of bytes on a device; return whether that is possible."""
        return False

    def split(self) -> Any:
        """Return the transform in two parts: what decoding does, and the rest for augmentation."""
        raise SplitError("its samples have no transform of torchvision's")

    def transform_state(self) -> object:
        """Return a value that changes when the transform, or what it makes, does."""
        return None

    def follow_order(self, batches: EpochBatches | None) -> None:
        """Learn the order of the samples, if it is a function of the epoch."""
        return

    def made_by(self) -> object:
        """Return what a batch is made by and the script may change before it takes the batch."""
        return self.transform_state(), tuple(warnings.filters), torch.empty(0).device

    def is_done(self, batch: StartedBatch) -> bool:
        """Whether ``finish`` would not have to wait."""
        return all(job.done() for job in batch.jobs())

    def wait_for_either(self, batch: StartedBatch, last: StartedBatch) -> bool:
        """Wait until a batch is made, or nothing of the one begun last is left to begin."""
        job = next((job for job in batch.jobs() if not job.done()), None)
        if job is None:
            return True
        job.wait_for_either(last.jobs()[-1])
        return self.is_done(batch)

    def waited(self, nanoseconds: int) -> None:
        self.clock.add("wait", nanoseconds)

    def expect_batches(self, batches: int) -> None:
        """Keep memory for so many batches that are begun ahead."""
        for slots in (slots for base in self.bases for slots in base._running().slots):
            slots.keep = max(slots.keep, KEPT_SLOTS + batches)

    @property
    def clock(self) -> StageClock:
        clock: StageClock = self.bases[0].clock
        return clock

    @property
    def threads(self) -> int:
        pool = self.bases[0]._running().pool
        return pool.threads if pool else 1

    @property
    def skips(self) -> bool:
        """Whether bad samples are left out."""
        return any(base.bad_samples.policy == "skip" for base in self.bases)
