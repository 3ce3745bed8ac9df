"""Sources make a loader's batches from fastpipe's datasets, also behind ``Subset`` and ``ConcatDataset``."""

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

MOST_SPARE = 1 << 30  # bytes of batches begun while one sample delays the batch that is due


class SplitError(ValueError):
    """A transform cannot be split; the message gives the reason."""


class StartedBatch(ABC):
    """A batch that is being made.

    Attributes:
        pending: the pending read, or decode, of its samples.
        count: number of requested samples.
        nbytes: size of its memory in bytes; 0 if unknown before it is made.
        kept: numbers of the samples that it contains, once it is finished.
    """

    pending: Any
    count: int
    nbytes: int
    kept: Sequence[int] = ()

    @abstractmethod
    def finish(self) -> Sequence[Any]:
        """Wait for the batch; run the steps that need this thread, in order; return its samples."""

    def jobs(self) -> list[Job]:
        found: list[Job] = self.pending.jobs
        return found

    def is_current(self) -> bool:
        """Return whether its samples are still those of the dataset."""
        return True

    def why_empty(self) -> BadSampleError | None:
        """Return why the finished batch has no sample; None if none was requested."""
        return why_nothing_is_left(self.pending.left_out, self.count)

    def cancel(self) -> None:
        self.pending.cancel()


class MixedBatch(StartedBatch):
    """A batch of several datasets: for each its part, and the places of its samples in the batch."""

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
    """The base of fastpipe's datasets, which make whole batches in threads of this process.

    Each has ``_start_batch``, ``_answers_for_batches`` (no subclass or option makes samples one by one), and
    ``_running``: ``pool`` (None for the calling thread), ``clock`` and ``slots``, memory for large parts.
    """

    def __getitems__(self: Any, indices: Sequence[int]) -> Sequence[Any]:
        """Return the samples at these positions, in order, made in parallel; ``DataLoader`` calls this for
        each batch."""
        if not self._answers_for_batches():
            return [self[index] for index in indices]
        # The script's own batch sampler may give iterators.
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
        # Threads and open files stay here; the copy makes its own when needed.
        return {**self.__dict__, "_runtime": None}


class Source(ABC):
    """The maker of batches of one or several fastpipe datasets behind ``Subset`` and ``ConcatDataset``.

    Attributes:
        bases: these datasets, in the order of the samples.
        by_split: a result of ``split`` for making batches; if bytes are sent, only its first part.
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
        """Begin a batch of one dataset, ``end``; None for an empty batch."""

    @abstractmethod
    def _start_mixed(self, parts: Sequence[Located], key: Key) -> StartedBatch:
        """Begin a batch of several datasets."""

    @abstractmethod
    def describe(self) -> list[str]:
        """Return a description of how batches are made, in lines."""

    @abstractmethod
    def tensors(self, batch_size: int) -> int:
        """Return the number of large tensors in a batch."""

    @property
    @abstractmethod
    def runs_user_code(self) -> bool:
        """True if the script's own functions are called outside of threads."""

    def is_best_here(self, device: Any) -> bool:
        """Return whether only this process can do some of the work: prefetch, or use a device."""
        return bool(self.prefetchers(is_here=True))

    @property
    def runs_python(self) -> bool:
        """True if Python runs for each sample, rather than once for a batch."""
        return True

    @property
    def runs_torchvision(self) -> bool:
        """True if torchvision's own transforms run in threads, which hold the GIL most of that time."""
        return False

    def prefetchers(self, *, is_here: bool) -> Sequence[Prefetcher]:
        """Return the prefetchers for upcoming indices."""
        return ()

    @property
    def spare_nbytes(self) -> int:
        """Bytes of batches that may be begun while one sample delays the batch that is due."""
        return MOST_SPARE

    def ask(self, **changes: Any) -> None:
        """Change how batches are made, if possible: fields of ``BatchRequest``."""
        return

    def make_on(self, device: Any) -> bool:
        """Make batches of bytes on a device; return whether that is possible."""
        return False

    def split(self) -> Any:
        """Return the transform in two parts: the part for decoding, and the rest for augmentation."""
        raise SplitError("its samples have no transform of torchvision's")

    def transform_state(self) -> object:
        """Return a value that changes when the transform, or its output, changes."""
        return None

    def follow_order(self, batches: EpochBatches | None) -> None:
        """Set the order of the samples, if it is a function of the epoch."""
        return

    def made_by(self) -> object:
        """Return the settings of a batch that the script may change before it takes the batch."""
        return self.transform_state(), tuple(warnings.filters), torch.empty(0).device

    def is_done(self, batch: StartedBatch) -> bool:
        """Return whether ``finish`` would not have to wait."""
        return all(job.done() for job in batch.jobs())

    def wait_for_either(self, batch: StartedBatch, last: StartedBatch) -> bool:
        """Wait until a batch is made, or until all work of the batch begun last has been started."""
        job = next((job for job in batch.jobs() if not job.done()), None)
        if job is None:
            return True
        job.wait_for_either(last.jobs()[-1])
        return self.is_done(batch)

    def waited(self, nanoseconds: int) -> None:
        self.clock.add("wait", nanoseconds)

    def expect_batches(self, batches: int) -> None:
        """Keep memory for this many batches that are begun ahead."""
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
        """True if bad samples are left out."""
        return any(base.bad_samples.policy == "skip" for base in self.bases)
