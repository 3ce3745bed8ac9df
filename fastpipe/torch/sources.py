"""What fastpipe makes batches of: image folders and HDF5 datasets, also behind torch's wrappers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import ConcatDataset, Subset
from torchvision.datasets import ImageFolder

from fastpipe.engine.bad import why_nothing_is_left
from fastpipe.engine.clock import StageClock
from fastpipe.engine.pool import Job
from fastpipe.errors import BadSampleError
from fastpipe.torch.batches import Batch, batch_memory
from fastpipe.torch.fetching import Source
from fastpipe.torch.hdf5.dataset import FastHDF5Dataset
from fastpipe.torch.hdf5.source import hdf5_source_of
from fastpipe.torch.image_folder import FastImageFolder
from fastpipe.torch.samples import samples_of
from fastpipe.torch.twin import ImageFolderTwin, why_no_twin
from fastpipe.types import Cache, Key

__all__ = ["FolderSource", "source_of", "why_no_source"]


class FolderSource:
    """Image folders behind a dataset of the user's.

    Attributes:
        bases: the folders, in the order of the samples.
    """

    def __init__(self, root: _Node) -> None:
        self._root = root
        self.bases = root.bases()
        self._sends_bytes = False

    def send_bytes(self) -> None:
        """Leave out the end of a transform, where it only computes floats from bytes: ``Whole.end`` says
        what is still to be done to such a batch."""
        self._sends_bytes = True

    def start(self, indices: Sequence[int], key: Key) -> _Mixed | _Simple:
        """Begin a batch."""
        places = self._root.places(indices)
        bases = self.bases if len(self.bases) == 1 else list(dict.fromkeys(base for base, _ in places))
        if len(bases) == 1:
            return _Simple(bases[0], [index for _, index in places], key, self._sends_bytes)
        return _Mixed(bases, places, key, self._sends_bytes)

    def finish(self, batch: _Mixed | _Simple) -> list[Any]:
        """Wait for a batch and return its samples."""
        return batch.finish()

    def kept(self, batch: _Mixed | _Simple) -> Sequence[int]:
        """The numbers of the samples that a finished batch has."""
        return batch.kept

    def is_done(self, batch: _Mixed | _Simple) -> bool:
        """Whether ``finish`` would not have to wait."""
        return batch.is_done()

    def wait_for_either(self, batch: _Mixed | _Simple, last: _Mixed | _Simple) -> bool:
        """Wait until a batch is made, or nothing of the one begun last is left to begin."""
        job = next((job for job in batch.jobs() if not job.done()), None)
        if job is None:
            return True
        job.wait_for_either(last.jobs()[-1])
        return batch.is_done()

    def nbytes(self, batch: _Mixed | _Simple) -> int:
        """Bytes of a batch's memory; 0 if samples are separate values."""
        return batch.nbytes

    def why_empty(self, batch: _Mixed | _Simple) -> BadSampleError | None:
        """Why a finished batch has no sample; None if none was asked for."""
        return batch.why_empty()

    def cancel(self, batch: _Mixed | _Simple) -> None:
        """Give a batch up."""
        batch.cancel()

    def waited(self, nanoseconds: int) -> None:
        """Hear how long the consumer waited for a batch."""
        self.clock.add("wait", nanoseconds)

    @property
    def clock(self) -> StageClock:
        """Time by stage."""
        return self.bases[0].clock

    @property
    def threads(self) -> int:
        """Decoding threads."""
        return self.bases[0]._thread_count()

    def expect_ahead(self, batches: int) -> None:
        """Keep memory for so many batches that are begun ahead."""
        for base in self.bases:
            base._expect_ahead(batches)

    def tensors(self, batch_size: int) -> int:
        """Large tensors in a batch."""
        return 1

    @property
    def skips(self) -> bool:
        """Whether bad samples are left out."""
        return any(base.bad_samples.policy == "skip" for base in self.bases)

    @property
    def runs_user_code(self) -> bool:
        """Whether functions of the script's are called on the way, other than in threads."""
        return any(
            base.target_transform is not None or not base._stock_threads(base.plan) for base in self.bases
        )

    def describe(self) -> list[str]:
        """The folders' plans."""
        plans = dict.fromkeys(repr(base.plan) for base in self.bases)
        return [line.strip() for plan in plans for line in plan.splitlines()[1:-1]]


class _Simple:
    """A batch of one folder."""

    def __init__(self, base: FastImageFolder, indices: Sequence[int], key: Key, sends_bytes: bool) -> None:
        self._base, self._batch = base, base._start_batch(indices, key, sends_bytes=sends_bytes)
        self.nbytes = self._batch.nbytes
        self.kept: Sequence[int] = ()

    def jobs(self) -> list[Job]:
        return [self._batch.pending.job]

    def finish(self) -> list[Any]:
        samples = self._base._finish_batch(self._batch)
        self.kept = self._batch.kept
        return samples

    def why_empty(self) -> BadSampleError | None:
        return self._base._why_empty(self._batch)

    def is_done(self) -> bool:
        return self._batch.pending.job.done()

    def cancel(self) -> None:
        self._batch.pending.cancel()


class _Mixed:
    """A batch of several folders; in one memory, where they make the same tensors."""

    def __init__(
        self,
        bases: Sequence[FastImageFolder],
        places: Sequence[tuple[FastImageFolder, int]],
        key: Key,
        sends_bytes: bool,
    ) -> None:
        first, self._count = bases[0], len(places)
        self._tensor: torch.Tensor | None = None
        memory = None
        plans = [base.plan for base in bases]
        ends = {None if plan.end is None else plan.end.affine for plan in (plan.as_bytes() for plan in plans)}
        sends_bytes = sends_bytes and len(ends) == 1
        if sends_bytes:
            plans = [plan.as_bytes() for plan in plans]
        if all(plan.output == plans[0].output and plan.kind is plans[0].kind for plan in plans):
            memory, self._tensor = batch_memory(plans[0], len(places), first._running().slots, True)
        self.nbytes = 0 if self._tensor is None else self._tensor.nbytes
        self._plan = plans[0]
        self._parts: list[tuple[FastImageFolder, list[int], Batch]] = []
        self.kept: Sequence[int] = ()
        for base in bases:
            numbers = [number for number, (owner, _) in enumerate(places) if owner is base]
            indices = [places[number][1] for number in numbers]
            part = Key(key.seed, key.epoch, key.draws[numbers])
            rows = None if memory is None else [memory[number] for number in numbers]
            self._parts.append(
                (base, numbers, base._start_batch(indices, part, rows=rows, sends_bytes=sends_bytes))
            )

    def jobs(self) -> list[Job]:
        return [batch.pending.job for _, _, batch in self._parts]

    def finish(self) -> list[Any]:
        found: dict[int, tuple[Any, Any]] = {}
        for base, numbers, batch in self._parts:
            made = base._finish_batch(batch)  # without images, if they are in the common memory
            found.update(zip((numbers[n] for n in batch.kept), made, strict=True))
        self.kept = sorted(found)
        samples = [found[number] for number in self.kept]
        if self._tensor is None:
            return samples
        tensor = self._tensor if len(samples) == self._count else self._tensor[self.kept]
        return samples_of(tensor, self._plan.rows(tensor), [target for _, target in samples], self._plan.end)

    def why_empty(self) -> BadSampleError | None:
        left_out = {
            numbers[n]: error
            for _, numbers, batch in self._parts
            for n, error in batch.pending.left_out.items()
        }
        return why_nothing_is_left(left_out, self._count)

    def is_done(self) -> bool:
        return all(job.done() for job in self.jobs())

    def cancel(self) -> None:
        for _, _, batch in self._parts:
            batch.pending.cancel()


class _Node(Protocol):
    """A dataset on the way to the folders."""

    def bases(self) -> list[FastImageFolder]:
        """The folders behind it."""

    def places(self, indices: Sequence[int]) -> list[tuple[FastImageFolder, int]]:
        """Which folder's which sample each index is."""


class _Folder:
    def __init__(self, base: FastImageFolder) -> None:
        self._base = base

    def bases(self) -> list[FastImageFolder]:
        return [self._base]

    def places(self, indices: Sequence[int]) -> list[tuple[FastImageFolder, int]]:
        return [(self._base, index) for index in indices]


class _Subset:
    def __init__(self, subset: Subset[Any], child: _Node) -> None:
        self._subset, self._child = subset, child

    def bases(self) -> list[FastImageFolder]:
        return self._child.bases()

    def places(self, indices: Sequence[int]) -> list[tuple[FastImageFolder, int]]:
        chosen = self._subset.indices
        return self._child.places([chosen[index] for index in indices])


class _Concat:
    def __init__(self, concat: ConcatDataset[Any], children: Sequence[_Node]) -> None:
        self._concat, self._children = concat, children

    def bases(self) -> list[FastImageFolder]:
        return list(dict.fromkeys(base for child in self._children for base in child.bases()))

    def places(self, indices: Sequence[int]) -> list[tuple[FastImageFolder, int]]:
        ends, found = self._concat.cumulative_sizes, []
        for index in indices:
            if index < 0:  # as ConcatDataset has it
                if -index > ends[-1]:
                    raise ValueError("absolute value of index should not exceed dataset length")
                index += ends[-1]
            number = bisect_right(ends, index)
            if number == len(ends):
                raise IndexError(f"sample {index} of a dataset of {ends[-1]}")
            found += self._children[number].places([index - (ends[number - 1] if number else 0)])
        return found


def source_of(dataset: Any, twins: dict[int, FastImageFolder], cache: Cache) -> Source | None:
    """The source behind a dataset, if every object on the way is one whose code is known.

    Args:
        dataset: the user's dataset.
        twins: by the ``id`` of a plain ``ImageFolder``, what makes batches of it; more are added.
        cache: where these keep decoded images.
    """
    root = _node_of(dataset, twins, cache)
    return hdf5_source_of(dataset) if root is None else FolderSource(root)


def why_no_source(dataset: Any) -> str:
    """Why ``source_of`` gives None, in words; empty where it does not."""
    if type(dataset) is Subset:
        return why_no_source(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return next(filter(None, map(why_no_source, dataset.datasets)), "")
    if isinstance(dataset, (FastImageFolder, FastHDF5Dataset)):
        is_fast = hdf5_source_of(dataset) is not None or _is_fast(dataset)
        return "" if is_fast else f"{type(dataset).__name__} makes its samples in its own way"
    return why_no_twin(dataset)


def _node_of(dataset: Any, twins: dict[int, FastImageFolder], cache: Cache) -> _Node | None:
    if type(dataset) is Subset:
        child = _node_of(dataset.dataset, twins, cache)
        return None if child is None else _Subset(dataset, child)
    if type(dataset) is ConcatDataset:
        children = [_node_of(item, twins, cache) for item in dataset.datasets]
        known = [child for child in children if child is not None]
        return _Concat(dataset, known) if known and len(known) == len(children) else None
    if isinstance(dataset, FastImageFolder):
        return _Folder(dataset) if _is_fast(dataset) else None
    if isinstance(dataset, ImageFolder) and why_no_twin(dataset) == "":
        # One twin for each folder, so that its subsets share threads and memory.
        twin = twins.get(id(dataset))
        if not isinstance(twin, ImageFolderTwin) or twin.original is not dataset:
            twin = twins[id(dataset)] = ImageFolderTwin(dataset, cache)
        return _Folder(twin)
    return None


def _is_fast(dataset: Any) -> bool:
    return (
        isinstance(dataset, FastImageFolder)
        and type(dataset).__getitems__ is FastImageFolder.__getitems__
        and dataset._answers_for_batches()
    )
