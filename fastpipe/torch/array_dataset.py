"""The base of the datasets of HDF5 files and volumes: samples are rows of arrays, made a batch at a time."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, get_worker_info

from fastpipe.core.array_samples import EpochOrder, Form
from fastpipe.core.batches import say_where
from fastpipe.core.keys import sample_seed
from fastpipe.core.pool import ThreadPool
from fastpipe.core.reads import PendingRead
from fastpipe.core.types import Key
from fastpipe.options import BadSamples, Shard, Shuffle
from fastpipe.torch.randomness import preserved_generators, run_keyed, seed_generators, take_key
from fastpipe.torch.samplers import DatasetBatches, EpochBatches
from fastpipe.torch.samples import LazySamples, Part, SampleRows, Value, copied
from fastpipe.torch.source import MOST_SPARE, BatchedDataset, MixedBatch, Source, StartedBatch
from fastpipe.torch.threads import is_thread_safe, note
from fastpipe.torch.transport import shared_flat
from fastpipe.torch.upcoming import Prefetcher
from fastpipe.torch.wrappers import Located, positions_of


@dataclass
class UserCode:
    """The user's own functions that process the values of a sample.

    Attributes:
        form: whether a sample is a single value, a tuple or a dict, and the names of its values.
        transform: a function or None.  If ``joint`` is true, it is called with all values of the sample.
            Otherwise it is called with the whole sample if the sample is a dict, and with the first value if
            not.
        is_safe: whether several threads may call ``transform`` at once.
        target_transform: a function that is called with the second value, or None.
    """

    form: Form
    transform: Callable[..., Any] | None
    is_safe: bool
    target_transform: Callable[[Any], Any] | None = None
    joint: bool = False

    def __post_init__(self) -> None:
        self._makes_samples = self.transform is not None and (self.joint or self.form.kind == "dict")
        self.is_safe = self.is_safe or self.transform is None or is_thread_safe([self.transform])

    def __bool__(self) -> bool:
        return self.transform is not None or self.target_transform is not None

    @property
    def runs_here(self) -> bool:
        """True if some of the functions may run only in the thread that requests the batches."""
        return self.target_transform is not None or not self.is_safe

    def transformed(self, values: list[Any], seed: Callable[[], int] | None) -> list[Any]:
        """Apply ``transform`` to a sample's values, and return the new values.  The function ``seed`` returns
        a seed for torch's random numbers.  If ``seed`` is None, torch's own generators are used as they
        are."""
        transform = self.transform
        if transform is None:
            return values
        given: Any = values if self.joint else values[0]
        if self._makes_samples and not self.joint:
            given = self.form.sample(values)
        call: Callable[[Any], Any] = (lambda several: transform(*several)) if self.joint else transform
        made = call(given) if seed is None else run_keyed([call], given, seed)
        return [made] if self._makes_samples else [made, *values[1:]]

    def sample(self, values: list[Any]) -> Any:
        if self._makes_samples:
            return values[0]
        if self.target_transform is not None:
            values[1] = self.target_transform(values[1])
        return self.form.sample(values)


class StockSamples(Dataset[Any]):
    """A dataset without fastpipe that has the same samples.  The format's own library, such as h5py, reads
    the values."""

    def __init__(self, rows: Any, code: UserCode) -> None:
        self._rows, self._code = rows, code

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._code.sample(self._code.transformed(self._values(index), None))

    def _values(self, index: int) -> list[Any]:
        found: list[Any] = self._rows.values(index)
        return found


class RowsBatch(StartedBatch):
    """A batch that is being read into memory.  ``parts`` is this memory, one part for each value."""

    def __init__(
        self, pending: PendingRead, parts: Sequence[Part], pool: ThreadPool | None, form: Form,
        code: UserCode, key: Key | None, is_keyed: bool, is_threaded: bool,
    ) -> None:  # fmt: skip
        self.pending: PendingRead = pending
        self.parts, self.count = parts, len(pending.samples)
        self.nbytes = sum(part.nbytes for part in parts)
        # The threads must live as long as the batch, even if the dataset gets new threads in the meantime.
        self._pool, self._form, self._code = pool, form, code
        self._key, self._is_keyed, self._is_threaded = key, is_keyed, is_threaded

    def finish(self) -> Sequence[Any]:
        self.kept = self.pending.wait()
        if self._code:
            return self._transformed()
        parts = self.parts
        if len(self.kept) < self.count:
            kept = list(self.kept)
            parts = [_part_of(part.array[kept], part.tensor is not None) for part in parts]
        if self._form.kind == "value" and parts[0].array.ndim == 1:
            values = list(parts[0].array)  # scalars, which torch collates according to their types
            return list(map(copied, values)) if parts[0].array.dtype.kind == "V" else values
        return SampleRows(self._form, parts)

    def _transformed(self) -> list[Any]:
        made: dict[int, list[Any]] = {}
        failed: dict[int, Exception] = {}

        def make(number: int) -> None:
            row = self.kept[number]
            try:
                # If there is no key, there is no transform either: only ``target_transform`` must run.
                seed = partial(self._seed, row) if self._code.is_safe and self._key is not None else None
                made[row] = self._code.transformed(self._values(row), seed)
            except Exception as error:  # raised below if no earlier sample of the batch has failed
                failed[row] = error

        if self._code.is_safe and self._is_threaded and self._pool is not None:
            self._pool.submit(make, len(self.kept)).wait()
        elif self._code.is_safe:
            for number in range(len(self.kept)):
                make(number)
        samples = []
        with preserved_generators() if self._is_keyed and self._code.runs_here else nullcontext():
            for row in self.kept:
                note(self.pending.item(row).path)
                try:
                    if row in failed:
                        raise failed.pop(row)
                    if self._is_keyed and self._code.runs_here:
                        seed_generators(self._seed(row))
                    values = made.pop(row, None)
                    if values is None:
                        values = self._code.transformed(self._values(row), None)
                    samples.append(self._code.sample(values))
                except Exception as error:
                    failed.clear()  # the tracebacks of these errors refer to this batch and its memory
                    say_where(error, self.pending.item(row))
                    raise
        return samples

    def _values(self, row: int) -> list[Any]:
        # Copy the values, because a transform's result is often a view of its input.
        return [part.own(row) for part in self.parts]

    def _seed(self, row: int) -> int:
        assert self._key is not None
        return sample_seed(self._key.seed, self._key.epoch, int(self._key.draws[row]))


def _part_of(array: npt.NDArray[Any], is_tensor: bool) -> Part:
    return Part(array, torch.from_numpy(array) if is_tensor else None)


# Parts of a batch with fewer bytes, such as labels, get newly allocated memory.  Otherwise a script that
# keeps an epoch's labels would keep slots (reusable memory), and a worker would send them in a whole segment.
_OWN_MEMORY = 1 << 18


class RowsDataset(BatchedDataset, Dataset[Any]):
    """The base class of datasets whose samples are rows of arrays.  A batch is made as a whole.

    Each subclass defines five members.  ``plan`` describes how data are read.  ``_wants_key`` is true if
    samples need random numbers.  ``_reading`` returns the work of reading a batch (``Reading``).  ``_code``
    returns the user's functions for samples.  ``_stock`` returns a dataset without fastpipe that has the same
    samples.
    """

    seed: int | None
    bad_samples: BadSamples
    # Bytes of additional batches that a loader may begin while one sample delays the next batch.
    _spare_nbytes: int = MOST_SPARE
    _form: Form
    _values: list[Value]

    @property
    def _draws_samples(self) -> bool:
        """True if each epoch has new random samples."""
        return False

    def _places_in_files(self) -> npt.NDArray[np.int64] | None:
        """For each sample, return the number of its file or volume, or its index along the first dimension,
        as int64 (N,).  Return None if there is only one file or volume, or if samples are random."""
        return None

    def _prefetcher(self, dataset: Any, *, is_here: bool) -> Prefetcher | None:
        """Return an object that fetches remote data before ``dataset``, the loader's dataset, needs them.
        Return None if this process must not fetch data early, or if all data are local."""
        return None

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index``."""
        # Do not convert an int: it may be of a subclass of int that contains the epoch (``KeyedIndex``).
        number = index if isinstance(index, int) else operator.index(index)
        batch = self._start_batch([number], threaded=False)
        samples = self._only(batch)
        if isinstance(samples, SampleRows):  # return plain types, not those that collate without a copy
            return self._form.sample([part.array[0] for part in batch.parts])
        return samples[0]

    def batch_sampler(
        self, batch_size: int, *, shuffle: bool | Shuffle, drop_last: bool = False, shard: Shard | None = None
    ) -> DatasetBatches:
        """Make a batch sampler for torch's ``DataLoader``.  A :class:`fastpipe.FastLoader` does not need it.

        If the dataset has a ``seed``, the order depends only on this seed and the epoch.  Otherwise each
        epoch's order is drawn from torch's global generator.

        Args:
            batch_size: number of samples in a batch.
            shuffle: whether to shuffle the samples, or a :class:`fastpipe.Shuffle`, which says how.
            drop_last: leave out an incomplete last batch.
            shard: a :class:`fastpipe.Shard`, which selects this rank's part of each epoch.  Default: all
                samples.

        >>> import h5py, os, tempfile
        >>> from fastpipe import FastHDF5Dataset
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = os.path.join(folder.name, "x.h5")
        >>> with h5py.File(path, "w") as file:
        ...     _ = file.create_dataset("x", data=np.arange(12), chunks=(3,), compression="lzf")
        >>> dataset = FastHDF5Dataset(path, "x", seed=0)
        >>> batches = dataset.batch_sampler(6, shuffle=Shuffle(window=2, unit="group"))
        >>> loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches)
        >>> [sorted(batch.tolist()) for batch in loader]
        [[6, 7, 8, 9, 10, 11], [0, 1, 2, 3, 4, 5]]
        >>> folder.cleanup()
        """
        return DatasetBatches(self, batch_size, shuffle, drop_last, shard)

    def _shown(self, lines: Sequence[str], **options: Any) -> str:
        """Return text for ``repr``, made of ``lines`` and of the options that are not None."""
        bad_samples = None if self.bad_samples == BadSamples() else self.bad_samples
        options |= {"Bad samples": bad_samples, "Seed": self.seed}
        given = [f"{name}: {value!r}" for name, value in options.items() if value is not None]
        return "\n    ".join([type(self).__name__, *lines, *given])

    # ---- requests of a loader -------------------------------------------------------------------

    def _answers_for_batches(self) -> bool:
        return type(self).__getitem__ is RowsDataset.__getitem__

    # ---- how a batch is made --------------------------------------------------------------------

    def _start_batch(
        self: Any, indices: Sequence[int] | npt.NDArray[np.int64], key: Key | None = None, *,
        threaded: bool = True, order: EpochOrder | None = None,
    ) -> RowsBatch:  # fmt: skip
        samples, runtime = positions_of(indices, len(self)), self._running()
        is_keyed = key is not None
        if key is None and (self._wants_key or self.bad_samples.policy == "replace"):
            key, is_keyed = take_key(len(samples))
        parts = self._memory(self._values_of(samples), len(samples), runtime, threaded)
        reading = self._reading(
            indices, samples, key, is_keyed, runtime, [part.array for part in parts], order
        )
        if get_worker_info() is not None and len(samples):
            note(f"{reading.where()} and others")
        pending = PendingRead(runtime.threads if threaded else None, reading)
        return RowsBatch(pending, parts, runtime.pool, self._form, self._code(), key, is_keyed, threaded)

    def _values_of(self, samples: npt.NDArray[np.int64]) -> Sequence[Value]:
        """Return the types of the values of ``samples``.  A value whose type is ``object`` and that differs
        between the samples has an array of its own in each."""
        return self._values

    def _memory(self, values: Sequence[Value], count: int, runtime: Any, threaded: bool) -> list[Part]:
        found = []
        for value, slots in zip(values, runtime.slots, strict=True):
            shape, nbytes = (count, *value.shape), count * value.nbytes
            if not threaded or nbytes < _OWN_MEMORY or value.dtype.hasobject:
                array = np.empty(shape, value.dtype)
            elif value.torch_dtype is not None and get_worker_info() is not None:
                # The batch is sent to the parent: use memory that both processes can access.
                array = shared_flat(nbytes).numpy().view(value.dtype).reshape(shape)
            else:
                array = slots.take(shape, value.dtype)
            found.append(_part_of(array, value.torch_dtype is not None))
        return found


class RowsSource(Source):
    """Makes a loader's batches from ``RowsDataset`` objects.  Such an object is the user's dataset itself, or
    is inside the user's ``Subset`` or ``ConcatDataset``."""

    _batches: EpochBatches | None = None

    def _start_one(self, end: Any, local: npt.NDArray[np.int64], key: Key) -> RowsBatch:
        base = self.bases[0] if end is None else end
        order = self._batches.order if self._batches is not None and base is self._dataset else None
        batch: RowsBatch = base._start_batch(local, key, order=order)
        return batch

    def _start_mixed(self, parts: Sequence[Located], key: Key) -> _Mixed:
        begun = []
        for base, rows, local in parts:
            part = Key(key.seed, key.epoch, key.draws[rows])
            begun.append((rows, base._start_batch(local, part)))
        return _Mixed(begun)

    def prefetchers(self, *, is_here: bool) -> Sequence[Prefetcher]:
        found = [base._prefetcher(self._dataset, is_here=is_here) for base in self.bases]
        return [prefetcher for prefetcher in found if prefetcher is not None]

    def follow_order(self, batches: EpochBatches | None) -> None:
        # If several ranks use the data, the order of all ranks differs from the order of this rank.
        self._batches = batches if batches is not None and batches.shard.world == 1 else None

    def made_by(self) -> object:
        return super().made_by() if any(base._code() for base in self.bases) else None

    def tensors(self, batch_size: int) -> int:
        most: int = max(
            sum(batch_size * value.nbytes >= _OWN_MEMORY for value in base._values) for base in self.bases
        )
        return most

    @property
    def runs_user_code(self) -> bool:
        return any(base._code().runs_here for base in self.bases)

    @property
    def spare_nbytes(self) -> int:
        least: int = min(base._spare_nbytes for base in self.bases)
        return least

    def describe(self) -> list[str]:
        return list(dict.fromkeys(line for base in self.bases for line in base.plan.lines))


class _Mixed(MixedBatch):
    """A batch with samples of several datasets."""

    def finish(self) -> Sequence[Any]:
        found, are_rows = dict[int, Any](), True
        for rows, batch in self.parts:
            made = batch.finish()
            if isinstance(made, SampleRows):
                made = made.to_collate()
            else:
                are_rows = False
            found.update(zip(rows[list(batch.kept)].tolist(), made, strict=True))
        self.kept = sorted(found)
        samples = [found[number] for number in self.kept]
        return LazySamples(samples) if are_rows else samples
