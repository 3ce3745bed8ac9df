"""The base class of sources, which make a loader's batches from fastpipe's datasets, also inside ``Subset``
and ``ConcatDataset``."""

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

MOST_SPARE = 1 << 30  # bytes of additional batches that may be begun while one sample delays the next batch


class SplitError(ValueError):
    """Raised if a transform cannot be split into two parts.  The message is the reason."""


class StartedBatch(ABC):
    """A batch that is being made.

    Attributes:
        pending: the unfinished work of reading or decoding the samples.
        count: number of requested samples.
        nbytes: number of bytes of the batch's memory; 0 if this is not known before the batch is made.
        kept: the numbers of the requested samples that the finished batch has.  Bad samples may be missing.
    """

    pending: Any
    count: int
    nbytes: int
    kept: Sequence[int] = ()

    @abstractmethod
    def finish(self) -> Sequence[Any]:
        """Wait for the batch, run the steps that must run in this thread, and return the samples."""

    def jobs(self) -> list[Job]:
        found: list[Job] = self.pending.jobs
        return found

    def is_current(self) -> bool:
        """Return whether the dataset still has the same samples as when the batch was begun."""
        return True

    def why_empty(self) -> BadSampleError | None:
        """Return why the finished batch has no samples; None if no samples were requested."""
        return why_nothing_is_left(self.pending.left_out, self.count)

    def cancel(self) -> None:
        self.pending.cancel()


class MixedBatch(StartedBatch):
    """A batch of samples from several datasets.  ``parts`` contains a pair for each dataset: the positions of
    its samples in the whole batch, and a batch of these samples."""

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
    """The base class of fastpipe's datasets, which make whole batches in threads of this process.

    Each subclass has three methods.  ``_start_batch`` begins a batch.  ``_answers_for_batches`` returns
    whether the dataset makes whole batches, that is, no subclass or option makes samples one by one.
    ``_running`` returns an object that belongs to this process.  It has the attributes ``pool`` (the threads;
    None if the calling thread does the work), ``clock``, and ``slots`` (memory for large parts of batches).
    """

    def __getitems__(self: Any, indices: Sequence[int]) -> Sequence[Any]:
        """Return the samples at these indices, in order.  They are made in parallel.  ``DataLoader`` calls
        this method for each batch."""
        if not self._answers_for_batches():
            return [self[index] for index in indices]
        # The script's own batch sampler may yield iterators without a length.
        batch = self._start_batch(indices if hasattr(indices, "__len__") else list(indices))
        samples = batch.finish()
        error = None if len(samples) else batch.why_empty()
        if error is not None:  # an empty batch cannot be collated
            raise error
        given: Sequence[Any] = self._handed_out(samples)
        return given

    def _handed_out(self, samples: Sequence[Any]) -> Sequence[Any]:
        return samples

    @staticmethod
    def _only(batch: StartedBatch) -> Sequence[Any]:
        """Finish a batch of one sample, and return the samples."""
        samples = batch.finish()
        if not len(samples):  # an IndexError would silently end a loop over the dataset
            raise batch.why_empty() or AssertionError("one sample was asked for")
        return samples

    @property
    def clock(self: Any) -> StageClock:
        """Time spent in each stage of making batches in this process, summed over the threads."""
        clock: StageClock = self._running().clock
        return clock

    def __getstate__(self) -> dict[str, Any]:
        # A copy gets neither threads nor open files; it makes its own when needed.
        return {**self.__dict__, "_runtime": None}


class Source(ABC):
    """Makes a loader's batches from fastpipe's datasets, which may be inside ``Subset`` or ``ConcatDataset``.

    Attributes:
        bases: the innermost fastpipe datasets, in the order of their samples.
        by_split: the transform in two parts (the result of ``split``) if batches are made with it, else None.
            If batches are sent to the device as bytes, only the first part is applied here.
    """

    by_split: Any = None

    def __init__(self, dataset: Any, bases: Sequence[Any]) -> None:
        self._dataset, self.bases = dataset, list(dict.fromkeys(bases))

    def start(self, indices: Sequence[int], key: Key) -> StartedBatch:
        """Begin to make a batch of the samples with these indices."""
        parts = located(self._dataset, integers(indices))
        if len(parts) > 1:
            return self._start_mixed(parts, key)
        end, _, local = parts[0] if parts else (None, None, np.empty(0, np.int64))
        return self._start_one(end, local, key)

    @abstractmethod
    def _start_one(self, end: Any, local: Int64Array, key: Key) -> StartedBatch:
        """Begin a batch of one dataset, ``end``.  ``end`` is None if the batch is empty."""

    @abstractmethod
    def _start_mixed(self, parts: Sequence[Located], key: Key) -> StartedBatch:
        """Begin a batch of several datasets."""

    @abstractmethod
    def describe(self) -> list[str]:
        """Return lines of text that describe how batches are made."""

    @abstractmethod
    def tensors(self, batch_size: int) -> int:
        """Return the number of large tensors in a batch."""

    @property
    @abstractmethod
    def runs_user_code(self) -> bool:
        """True if some of the user's functions may run only in the thread that requests the batches."""

    def is_best_here(self, device: Any) -> bool:
        """Return whether some work, such as prefetching or using a device, must be done in this process."""
        return bool(self.prefetchers(is_here=True))

    @property
    def runs_python(self) -> bool:
        """True if Python code runs for each sample, rather than only once for each batch."""
        return True

    @property
    def leaves_images(self) -> bool:
        """True if the script's own transforms receive the images, as PIL images."""
        return False

    @property
    def is_torchvisions(self) -> bool:
        """True if all datasets are torchvision's own."""
        return False

    @property
    def runs_torchvision(self) -> bool:
        """True if torchvision's own transforms run in threads.  These hold the GIL most of the time."""
        return False

    def prefetchers(self, *, is_here: bool) -> Sequence[Prefetcher]:
        """Return the objects that fetch remote data early.  ``is_here`` is whether this process makes the
        batches."""
        return ()

    @property
    def spare_nbytes(self) -> int:
        """Number of bytes of additional batches that may be begun while one sample delays the next batch."""
        return MOST_SPARE

    def ask(self, **changes: Any) -> None:
        """Change the settings with which batches are made.  ``changes`` are fields of ``BatchRequest``.  Some
        sources ignore them."""
        return

    def make_on(self, device: Any) -> bool:
        """Make batches of bytes on a device from now on, if this is possible.  Return whether it is
        possible."""
        return False

    def split(self) -> Any:
        """Return the transform in two parts: decoding steps and augmentation.  Raise a ``SplitError`` if the
        transform cannot be split."""
        raise SplitError("its samples have no transform of torchvision's")

    def transform_state(self) -> object:
        """Return a value that changes when the transform or its output changes."""
        return None

    def follow_order(self, batches: EpochBatches | None) -> None:
        """Receive the order of the samples.  ``batches`` is None if the order does not depend only on the
        epoch."""
        return

    def made_by(self) -> object:
        """Return those settings that a batch depends on and that the script may change while a batch is
        made."""
        return self.transform_state(), tuple(warnings.filters), torch.empty(0).device

    def is_done(self, batch: StartedBatch) -> bool:
        """Return whether the batch's ``finish`` would return without waiting."""
        return all(job.done() for job in batch.jobs())

    def wait_for_either(self, batch: StartedBatch, last: StartedBatch) -> bool:
        """Wait until ``batch`` is made, or until threads have started all work of ``last``.  ``last`` is the
        batch that was begun last.  Return whether ``batch`` is made."""
        job = next((job for job in batch.jobs() if not job.done()), None)
        if job is None:
            return True
        job.wait_for_either(last.jobs()[-1])
        return self.is_done(batch)

    def waited(self, nanoseconds: int) -> None:
        self.clock.add("wait", nanoseconds)

    def expect_batches(self, batches: int) -> None:
        """Keep reusable memory for this number of batches that are begun ahead."""
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
        """True if bad samples are left out of batches."""
        return any(base.bad_samples.policy == "skip" for base in self.bases)
