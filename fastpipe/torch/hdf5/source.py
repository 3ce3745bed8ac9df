"""Batches of HDF5 datasets, also through ``Subset`` and ``ConcatDataset``, begun ahead of their use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Subset

from fastpipe.engine.bad import why_nothing_is_left
from fastpipe.engine.clock import StageClock
from fastpipe.engine.pool import Job
from fastpipe.errors import BadSampleError
from fastpipe.torch.hdf5.batch import HDF5Batch
from fastpipe.torch.hdf5.dataset import FastHDF5Dataset, integers
from fastpipe.types import Key

__all__ = ["HDF5Source", "hdf5_source_of"]

Int64Array = npt.NDArray[np.int64]


class HDF5Source:
    """Makes batches of the one HDF5 dataset, or of several, behind a dataset of the user's.

    Attributes:
        bases: the HDF5 datasets, in the order of the samples.
    """

    def __init__(self, dataset: Any, bases: Sequence[FastHDF5Dataset]) -> None:
        self._dataset = dataset
        self.bases = list(bases)

    def start(self, indices: Sequence[int], key: Key) -> HDF5Batch | _Mixed:
        """Begin a batch."""
        parts = _located(self._dataset, integers(indices))
        if len(parts) == 1:
            base, rows, local = parts[0]
            return base._start_batch(local[np.argsort(rows)], key)
        if not parts:
            return self.bases[0]._start_batch([], key)
        return _Mixed(parts, key)

    def finish(self, batch: HDF5Batch | _Mixed) -> Sequence[Any]:
        """Wait for a batch and return its samples."""
        return batch.finish()

    def kept(self, batch: HDF5Batch | _Mixed) -> Sequence[int]:
        """The numbers of the samples that a finished batch has."""
        return batch.kept

    def is_done(self, batch: HDF5Batch | _Mixed) -> bool:
        """Whether ``finish`` would not have to wait."""
        return all(job.done() for job in batch.jobs())

    def wait_for_either(self, batch: HDF5Batch | _Mixed, last: HDF5Batch | _Mixed) -> bool:
        """Wait until a batch is made, or nothing of the one begun last is left to begin."""
        job = next((job for job in batch.jobs() if not job.done()), None)
        if job is None:
            return True
        job.wait_for_either(last.jobs()[-1])
        return self.is_done(batch)

    def nbytes(self, batch: HDF5Batch | _Mixed) -> int:
        """Bytes of a batch's memory."""
        return batch.nbytes

    def why_empty(self, batch: HDF5Batch | _Mixed) -> BadSampleError | None:
        """Why a finished batch has no sample; None if none was asked for."""
        return batch.why_empty()

    def cancel(self, batch: HDF5Batch | _Mixed) -> None:
        """Give a batch up."""
        batch.cancel()

    def waited(self, nanoseconds: int) -> None:
        """Hear how long the consumer waited for a batch."""
        self.clock.add("wait", nanoseconds)

    def send_bytes(self) -> None:
        """Nothing is left out: what is read is what is sent."""

    @property
    def clock(self) -> StageClock:
        """Time by stage."""
        return self.bases[0].clock

    @property
    def threads(self) -> int:
        """Reading threads."""
        return self.bases[0]._thread_count()

    def tensors(self, batch_size: int) -> int:
        """Large tensors in a batch."""
        return max(base._large_parts(batch_size) for base in self.bases)

    def expect_ahead(self, batches: int) -> None:
        """Keep memory for so many batches that are begun ahead."""
        for base in self.bases:
            base._expect_ahead(batches)

    @property
    def skips(self) -> bool:
        """Whether bad samples are left out."""
        return any(base.bad_samples.policy == "skip" for base in self.bases)

    @property
    def runs_user_code(self) -> bool:
        """Whether functions of the script's are called on the way, other than in threads."""
        return any(base._runs_user_code() for base in self.bases)

    def describe(self) -> list[str]:
        """What is read how."""
        lines = [line for base in self.bases for line in base.plan.lines]
        return list(dict.fromkeys(lines))


class _Mixed:
    """A batch of several datasets."""

    def __init__(self, parts: Sequence[tuple[FastHDF5Dataset, Int64Array, Int64Array]], key: Key) -> None:
        self._parts = [
            (rows, base._start_batch(local, Key(key.seed, key.epoch, key.draws[rows])))
            for base, rows, local in parts
        ]
        self.nbytes = sum(batch.nbytes for _, batch in self._parts)
        self.kept: Sequence[int] = ()

    def jobs(self) -> list[Job]:
        return [batch.pending.job for _, batch in self._parts]

    def finish(self) -> list[Any]:
        found: dict[int, Any] = {}
        for rows, batch in self._parts:
            made = batch.finish()
            found.update(zip(rows[list(batch.kept)].tolist(), made, strict=True))
        self.kept = sorted(found)
        return [found[number] for number in self.kept]

    def why_empty(self) -> BadSampleError | None:
        left_out = {
            int(rows[number]): error
            for rows, batch in self._parts
            for number, error in batch.pending.left_out.items()
        }
        return why_nothing_is_left(left_out, sum(len(rows) for rows, _ in self._parts))

    def cancel(self) -> None:
        for _, batch in self._parts:
            batch.cancel()


def hdf5_source_of(dataset: Any) -> HDF5Source | None:
    """The source behind a dataset, if every object on the way is one whose code is known."""
    bases = _bases(dataset)
    return HDF5Source(dataset, list(dict.fromkeys(bases))) if bases else None


def _bases(dataset: Any) -> list[FastHDF5Dataset]:
    """The HDF5 datasets behind a dataset; empty where there is something else as well."""
    if type(dataset) is Subset:
        return _bases(dataset.dataset)
    if type(dataset) is ConcatDataset:
        found = [_bases(one) for one in dataset.datasets]
        return [base for bases in found for base in bases] if all(found) else []
    is_fast = (
        isinstance(dataset, FastHDF5Dataset)
        and type(dataset).__getitems__ is FastHDF5Dataset.__getitems__
        and dataset._answers_for_batches()
    )
    return [dataset] if is_fast else []


def _located(dataset: Any, indices: Int64Array) -> list[tuple[FastHDF5Dataset, Int64Array, Int64Array]]:
    """The HDF5 datasets that have samples, and of each the rows of the batch and its own indices."""
    if type(dataset) is Subset:
        chosen = dataset.indices
        # A list may be changed at any time: to make an array of all of it for each batch would cost more.
        return _located(dataset.dataset, np.array([chosen[index] for index in indices.tolist()], np.int64))
    if type(dataset) is not ConcatDataset:
        return [(dataset, np.arange(len(indices)), indices)] if len(indices) else []
    ends = np.array(dataset.cumulative_sizes)
    if (indices < -ends[-1]).any():  # as ConcatDataset has it
        raise ValueError("absolute value of index should not exceed dataset length")
    indices = np.where(indices < 0, indices + ends[-1], indices)
    if (indices >= ends[-1]).any():
        raise IndexError(f"sample {indices.max()} of a dataset of {ends[-1]}")
    owners, firsts = np.searchsorted(ends, indices, side="right"), np.concatenate([[0], ends])
    found: dict[int, tuple[FastHDF5Dataset, list[Int64Array], list[Int64Array]]] = {}
    for owner in np.unique(owners).tolist():
        rows = np.flatnonzero(owners == owner)
        for base, inner, local in _located(dataset.datasets[owner], indices[rows] - firsts[owner]):
            entry = found.setdefault(id(base), (base, [], []))
            entry[1].append(rows[inner])
            entry[2].append(local)
    return [(base, np.concatenate(rows), np.concatenate(local)) for base, rows, local in found.values()]
