"""What a loader makes batches with: the same for image folders and HDF5 files."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fastpipe.core.bad_samples import why_nothing_is_left
from fastpipe.core.clock import StageClock
from fastpipe.core.pool import Job
from fastpipe.core.types import Key
from fastpipe.errors import BadSampleError
from fastpipe.torch.ahead import Lookout

if TYPE_CHECKING:
    from fastpipe.torch.order_samplers import EpochBatches
    from fastpipe.torch.split import Split

__all__ = ["MOST_SPARE", "MixedBatch", "Source", "SplitError", "StartedBatch"]

MOST_SPARE = 1 << 30  # bytes of batches begun while one sample holds up the one that is due


class SplitError(ValueError):
    """A transform that is not to be split; says why."""


class StartedBatch(Protocol):
    """A batch that is being made."""

    @property
    def nbytes(self) -> int:
        """Bytes of its memory; 0 if they are not known before it is made."""

    @property
    def kept(self) -> Sequence[int]:
        """Which of the samples asked for it has, as their numbers in it, once it is finished."""

    def jobs(self) -> list[Job]:
        """What its threads are doing."""

    def finish(self) -> Sequence[Any]:
        """Wait for it, and return its samples."""

    def why_empty(self) -> BadSampleError | None:
        """Why it has no sample once it is finished; None if none was asked for."""

    def cancel(self) -> None:
        """Give it up."""


class Source(ABC):
    """Makes batches of one dataset of fastpipe's, or of several behind ``Subset`` and ``ConcatDataset``.

    Attributes:
        bases: these datasets, in the order of the samples.
        by_split: what ``split`` gave, to make batches by it; with ``send_bytes`` by the first part of it.
    """

    bases: Sequence[Any]
    by_split: Split | None = None

    @abstractmethod
    def start(self, indices: Sequence[int], key: Key) -> StartedBatch:
        """Begin a batch."""

    @abstractmethod
    def describe(self) -> list[str]:
        """What is done how, in lines."""

    @abstractmethod
    def tensors(self, batch_size: int) -> int:
        """Large tensors in a batch."""

    @property
    @abstractmethod
    def runs_user_code(self) -> bool:
        """Whether functions of the script's are called on the way, other than in threads."""

    def is_best_here(self, device: Any) -> bool:
        """Return whether this process alone can do some of the work: fetch what comes next, or use a device.

        Args:
            device: where the loader hands batches out, or None.
        """
        return self.lookout(is_here=True) is not None

    @property
    def runs_python(self) -> bool:
        """Whether Python runs for each sample, rather than once for a batch."""
        return True

    @property
    def runs_torchvision(self) -> bool:
        """Whether torchvision's own transforms run in threads, which hold Python's lock for most of it."""
        return False

    def lookout(self, *, is_here: bool) -> Lookout | None:
        """Who prepares for what will be asked for; None where there is nothing to prepare.

        Args:
            is_here: whether batches are made in this process.
        """
        return None

    @property
    def spare_nbytes(self) -> int:
        """Bytes of batches that may be begun while one sample holds up the one that is due."""
        return MOST_SPARE

    def send_bytes(self) -> None:
        """Leave out the end of a transform that can be made up for on the device, where there is one."""
        return

    def make_dtype(self, dtype: str) -> None:
        """Make float32 samples of another type, where that costs nothing: a name of torch's."""
        return

    def make_on(self, device: Any) -> bool:
        """Make batches of bytes on a device, where that is possible; whether it is."""
        return False

    def pin(self) -> None:
        """Make batches in page-locked memory, where that is possible: they are copied from it to a GPU."""
        return

    def split(self) -> Split:
        """The transform in two: what decoding does, and the rest for augmentation.

        Raises:
            SplitError: there is none, or it is not to be split.
        """
        raise SplitError("its samples have no transform of torchvision's")

    def transform_state(self) -> object:
        """What differs when the transform, or what it would make, does."""
        return None

    def follow_order(self, batches: EpochBatches | None) -> None:
        """Hear in which order samples will be asked for, where that is a function of the epoch."""
        return

    def made_by(self) -> object:
        """Return what a batch is made by and the script may change before it takes the batch."""
        return self.transform_state(), tuple(warnings.filters), torch.empty(0).device

    def is_current(self, batch: StartedBatch) -> bool:
        """Return whether the samples that a batch was begun with are those that the dataset has now."""
        return True

    def finish(self, batch: StartedBatch) -> Sequence[Any]:
        """Wait for a batch and return its samples."""
        return batch.finish()

    def kept(self, batch: StartedBatch) -> Sequence[int]:
        """The numbers of the samples that a finished batch has."""
        return batch.kept

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

    def nbytes(self, batch: StartedBatch) -> int:
        """Bytes of a batch's memory; 0 if they are not known before it is made."""
        return batch.nbytes

    def why_empty(self, batch: StartedBatch) -> BadSampleError | None:
        """Why a finished batch has no sample; None if none was asked for."""
        return batch.why_empty()

    def cancel(self, batch: StartedBatch) -> None:
        """Give a batch up."""
        batch.cancel()

    def waited(self, nanoseconds: int) -> None:
        """Hear how long the consumer waited for a batch."""
        self.clock.add("wait", nanoseconds)

    def expect_ahead(self, batches: int) -> None:
        """Keep memory for so many batches that are begun ahead."""
        for base in self.bases:
            base._expect_ahead(batches)

    @property
    def clock(self) -> StageClock:
        """Time by stage."""
        clock: StageClock = self.bases[0].clock
        return clock

    @property
    def threads(self) -> int:
        """Threads at work."""
        return int(self.bases[0]._thread_count())

    @property
    def skips(self) -> bool:
        """Whether bad samples are left out."""
        return any(base.bad_samples.policy == "skip" for base in self.bases)


class MixedBatch:
    """What batches of several datasets have in common.

    Attributes:
        parts: the datasets, the places of their samples in the batch, and their parts of it.
        kept: as of ``StartedBatch``.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[Any, npt.NDArray[np.int64], Any]] = []
        self.kept: Sequence[int] = ()

    def jobs(self) -> list[Job]:
        """What the threads are doing."""
        return [job for _, _, batch in self.parts for job in batch.pending.jobs]

    def why_empty(self) -> BadSampleError | None:
        """Why it has no sample once it is finished; None if none was asked for."""
        left_out = {
            int(rows[number]): error
            for _, rows, batch in self.parts
            for number, error in batch.pending.left_out.items()
        }
        return why_nothing_is_left(left_out, sum(len(rows) for _, rows, _ in self.parts))

    def cancel(self) -> None:
        """Give it up."""
        for _, _, batch in self.parts:
            batch.pending.cancel()
