"""Sources make a loader's batches, of fastpipe's datasets behind ``Subset`` and ``ConcatDataset``."""

from __future__ import annotations

import operator
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, Subset

from fastpipe.core.bad_samples import why_nothing_is_left
from fastpipe.core.clock import StageClock
from fastpipe.core.pool import Job
from fastpipe.core.types import Key
from fastpipe.errors import BadSampleError

if TYPE_CHECKING:
    from fastpipe.torch.indices import Prefetcher
    from fastpipe.torch.samplers import EpochBatches
    from fastpipe.torch.split import Split


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
        """Numbers of the samples that it has, once it is finished."""

    def jobs(self) -> list[Job]:
        """What its threads are doing."""

    def is_current(self) -> bool:
        """Whether its samples are still those of the dataset."""

    def finish(self) -> Sequence[Any]:
        """Wait for it; run what must run in this thread, in order; return its samples."""

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
        """Whether functions of the script's are called, other than in threads."""

    def is_best_here(self, device: Any) -> bool:
        """Whether this process alone can do some of the work: fetch what comes next, or use a device."""
        return self.prefetcher(is_here=True) is not None

    @property
    def runs_python(self) -> bool:
        """Whether Python runs for each sample, rather than once for a batch."""
        return True

    @property
    def runs_torchvision(self) -> bool:
        """Whether torchvision's own transforms run in threads, which hold Python's lock for most of it."""
        return False

    def prefetcher(self, *, is_here: bool) -> Prefetcher | None:
        """Return what prepares for the indices to come; None if there is nothing to prepare."""
        return None

    @property
    def spare_nbytes(self) -> int:
        """Bytes of batches that may be begun while one sample holds up the one that is due."""
        return MOST_SPARE

    def send_bytes(self) -> None:
        """Leave out the end of a transform that the device can do instead."""
        return

    def make_dtype(self, dtype: str) -> None:
        """Make float32 samples of another type, where that costs nothing: a name of torch's."""
        return

    def make_on(self, device: Any) -> bool:
        """Make batches of bytes on a device; return whether that is possible."""
        return False

    def pin(self) -> None:
        """Make batches in page-locked memory, if possible: they are copied from it to a GPU."""
        return

    def split(self) -> Split:
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
        """Count the time that the consumer waited for a batch."""
        self.clock.add("wait", nanoseconds)

    def expect_batches(self, batches: int) -> None:
        """Keep memory for so many batches that are begun ahead."""
        for base in self.bases:
            base._expect_batches(batches)

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
    """

    def __init__(self) -> None:
        self.parts: list[tuple[Any, npt.NDArray[np.int64], Any]] = []
        self.kept: Sequence[int] = ()

    def is_current(self) -> bool:
        return all(batch.is_current() for _, _, batch in self.parts)

    def jobs(self) -> list[Job]:
        return [job for _, _, batch in self.parts for job in batch.jobs()]

    def why_empty(self) -> BadSampleError | None:
        left_out = {
            int(rows[number]): error
            for _, rows, batch in self.parts
            for number, error in batch.pending.left_out.items()
        }
        return why_nothing_is_left(left_out, sum(len(rows) for _, rows, _ in self.parts))

    def cancel(self) -> None:
        for _, _, batch in self.parts:
            batch.cancel()


# What is behind torch's ``Subset`` and ``ConcatDataset``: which datasets, and whose a sample is.

Int64Array = npt.NDArray[np.int64]

_LARGEST = np.iinfo(np.int64).max


def ends_of(dataset: Any) -> list[Any]:
    """Return the datasets at the end, in the order of the samples, repeated as they come."""
    if type(dataset) is Subset:
        return ends_of(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return [end for one in dataset.datasets for end in ends_of(one)]
    return [dataset]


def is_rows(dataset: Any) -> bool:
    """Whether a dataset is one of rows of arrays, without importing their module."""
    module = sys.modules.get("fastpipe.torch.array_dataset")
    return module is not None and isinstance(dataset, module.RowsDataset)


def is_fast_folder(dataset: Any) -> bool:
    """Whether a dataset is a ``FastImageFolder``, without importing it."""
    module = sys.modules.get("fastpipe.torch.image_folder")
    return module is not None and isinstance(dataset, module.FastImageFolder)


def is_folder(dataset: Any) -> bool:
    """Whether a dataset is an ``ImageFolder``, without importing torchvision."""
    kind = getattr(sys.modules.get("torchvision.datasets"), "ImageFolder", None)
    return kind is not None and isinstance(dataset, kind)


def integers(indices: Sequence[int] | Int64Array) -> Int64Array:
    """Indices as int64 (N,)."""
    if isinstance(indices, np.ndarray) and indices.dtype == np.int64 and indices.ndim == 1:
        return indices.copy()  # a sampler may write the next ones into the same array
    asked = np.asarray(indices)
    if asked.size and asked.dtype.kind not in "iu":
        asked = np.array([operator.index(index) for index in indices], object)
    is_nested = asked.ndim > 1 and not all(hasattr(index, "__index__") for index in indices)  # tuples, lists
    if is_nested or asked.size != len(indices):
        raise TypeError(f"samples have one index each, got {indices!r}")
    if asked.dtype.kind in "uO" and asked.size and not -_LARGEST <= asked.min() <= asked.max() <= _LARGEST:
        raise IndexError(f"samples {asked.min()} to {asked.max()}, beyond the ends of any dataset")
    return asked.astype(np.int64).reshape(-1)


def located(dataset: Any, indices: Int64Array) -> list[tuple[Any, Int64Array, Int64Array]]:
    """For each dataset at the end that has some of the samples, int64 (N,): it, their places among the
    indices, and their indices in it.  Raises what ``Subset`` and ``ConcatDataset`` raise."""
    if type(dataset) is Subset:
        chosen = dataset.indices
        # A list may be changed at any time: to make an array of all of it for each batch would cost more.
        return located(dataset.dataset, integers([chosen[index] for index in indices.tolist()]))
    if type(dataset) is not ConcatDataset:
        return [(dataset, np.arange(len(indices)), indices)] if len(indices) else []
    ends = np.array(dataset.cumulative_sizes)
    if (indices < -ends[-1]).any():  # as ConcatDataset has it
        raise ValueError("absolute value of index should not exceed dataset length")
    indices = np.where(indices < 0, indices + ends[-1], indices)
    if (indices >= ends[-1]).any():
        raise IndexError(f"sample {indices.max()} of a dataset of {ends[-1]}")
    owners, firsts = np.searchsorted(ends, indices, side="right"), np.concatenate([[0], ends])
    found: dict[int, tuple[Any, list[Int64Array], list[Int64Array]]] = {}
    for owner in np.unique(owners).tolist():
        rows = np.flatnonzero(owners == owner)
        for end, inner, local in located(dataset.datasets[owner], indices[rows] - firsts[owner]):
            entry = found.setdefault(id(end), (end, [], []))
            entry[1].append(rows[inner])
            entry[2].append(local)
    made = []
    for end, parts, locals_ in found.values():
        places, inside = np.concatenate(parts), np.concatenate(locals_)
        order = np.argsort(places)
        made.append((end, places[order], inside[order]))
    return made


def numbers_of(dataset: Any, of: Callable[[Any], Int64Array]) -> Int64Array:
    """Return a number for each sample, int64 (N,); ``of`` gives those of a dataset at the end, from 0."""
    if type(dataset) is Subset:
        return numbers_of(dataset.dataset, of)[integers(dataset.indices)]
    if type(dataset) is ConcatDataset:
        first, found = 0, []
        for one in dataset.datasets:
            numbers = numbers_of(one, of)
            found.append(numbers + first)
            first += int(numbers.max(initial=-1)) + 1
        return np.concatenate(found)
    return np.asarray(of(dataset), np.int64)


# What fastpipe makes batches of: image folders and datasets of rows, also behind torch's wrappers.
#
# Each kind's modules are imported where there is a dataset of it: rows of arrays need no torchvision.
