"""What datasets have in common whose samples are rows of arrays, made a batch at a time."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, get_worker_info

from fastpipe.core.array_samples import Form, Reading
from fastpipe.core.clock import StageClock
from fastpipe.core.pool import ThreadPool
from fastpipe.core.reads import PendingRead, ReadThreads
from fastpipe.core.slots import KEPT_SLOTS, SlotPool
from fastpipe.core.types import Key
from fastpipe.options import BadSamples, Shard, Shuffle
from fastpipe.torch.ahead import Lookout
from fastpipe.torch.batch_sampler import DatasetBatches
from fastpipe.torch.keys import take_key
from fastpipe.torch.lane_memory import shared_flat
from fastpipe.torch.rows.batch import Code, RowsBatch
from fastpipe.torch.rows.samples import Part, SampleRows, Value
from fastpipe.torch.source import MOST_SPARE
from fastpipe.torch.threads import note
from fastpipe.torch.views import integers

__all__ = ["RowsDataset", "RowsRuntime", "is_fast_rows"]

# Parts of a batch below this have memory of their own: who keeps the labels of an epoch would else keep
# slots, and who sends them from a worker a segment.
_OWN_MEMORY = 1 << 18


class RowsRuntime(Protocol):
    """What such a dataset needs in one process, and must not take to another.

    Attributes:
        pool, threads: those that read, and transform; None for the calling one.
        clock: time by stage.
        slots: for each value of a sample, memory of its rows.
    """

    pool: ThreadPool | None
    threads: ReadThreads | None
    clock: StageClock
    slots: list[SlotPool]


class RowsDataset(Dataset[Any]):
    """Makes batches whose samples are rows of arrays.

    Attributes:
        seed, bad_samples: the dataset's options.
    """

    seed: int | None
    bad_samples: BadSamples
    # Bytes of batches that a loader may begin while one sample holds up the one that is due.
    _spare_nbytes: int = MOST_SPARE
    _form: Form
    _values: list[Value]
    _runtime: Any

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def _wants_key(self) -> bool:
        """Whether something is drawn for samples."""

    @abstractmethod
    def _reading(
        self, indices: Any, samples: npt.NDArray[np.int64], key: Key | None, is_keyed: bool, runtime: Any,
        arrays: list[npt.NDArray[Any]],
    ) -> Reading:  # fmt: skip
        """How a batch is read; as of `BatchReader`."""

    @abstractmethod
    def _running(self) -> RowsRuntime:
        """What this process has, made when first needed."""

    @abstractmethod
    def _code(self) -> Code:
        """What the script does to samples."""

    @abstractmethod
    def _stock(self) -> Dataset[Any]:
        """The same samples without fastpipe."""

    @property
    def _draws_samples(self) -> bool:
        """Whether which samples there are is drawn for each epoch."""
        return False

    def _places_in_files(self) -> npt.NDArray[np.int64] | None:
        """The file, or the like, of each sample: int64 (N,); None where there is but one."""
        return None

    def _lookout(self, dataset: Any, *, is_here: bool) -> Lookout | None:
        """Who has something fetched before it is asked for; None where all is near.

        Args:
            dataset: the loader's, behind which this one is.
            is_here: whether batches are made in this process.
        """
        return None

    @property
    @abstractmethod
    def plan(self) -> Any:
        """What is read how; ``print`` it."""

    def __getitem__(self, index: int) -> Any:
        """Sample ``index``."""
        # As it is, where it is a number: it may say of which epoch it is.
        number = index if isinstance(index, int) else operator.index(index)
        batch = self._start_batch([number], threaded=False)
        samples = batch.finish()
        if not len(samples):  # not an IndexError, which would silently end a loop over the dataset
            raise batch.why_empty() or AssertionError("one sample was asked for")
        if isinstance(samples, SampleRows):  # whose own samples are of types that collate without a copy
            return self._form.sample([part.array[0] for part in batch.parts])
        return samples[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Several samples, read side by side; what ``DataLoader`` calls for a batch.

        Args:
            indices: positions in the dataset.

        Returns:
            The samples in the order of the indices.
        """
        if not self._answers_for_batches():
            return [self[index] for index in indices]
        batch = self._start_batch(indices)
        samples = batch.finish()
        error = None if len(samples) else batch.why_empty()
        if error is not None:  # nothing can be collated from no samples
            raise error
        return samples

    def batch_sampler(
        self, batch_size: int, *, shuffle: bool | Shuffle, drop_last: bool = False, shard: Shard | None = None
    ) -> DatasetBatches:
        """Batches of indices for a stock ``DataLoader``, which a :class:`fastpipe.FastLoader` makes itself.

        With the dataset's ``seed`` the order is a function of seed and epoch; without one each epoch's
        is drawn from torch's global generator.

        Args:
            batch_size: samples in a batch.
            shuffle: False, True or a :class:`fastpipe.Shuffle`.
            drop_last: leave out an incomplete last batch.
            shard: this rank's part.

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

    @property
    def clock(self) -> StageClock:
        """Time spent in this process, by stage, summed over the threads."""
        return self._running().clock

    def __getstate__(self) -> dict[str, Any]:
        # Threads and open files stay here; the copy has its own when it needs them.
        return {**self.__dict__, "_runtime": None}

    # ---- what a loader asks ---------------------------------------------------------------------

    def _expect_ahead(self, batches: int) -> None:
        """Keep memory for so many batches that a loader begins ahead of the one that is due."""
        for slots in self._running().slots:
            slots.keep = max(slots.keep, KEPT_SLOTS + batches)

    def _expect_order(self, key: Key, order: Callable[[int], npt.NDArray[np.int64]]) -> None:
        """Hear in which order the samples of an epoch will be asked for.

        Args:
            key: of a batch of it.
            order: of an epoch's number gives the samples' indices, int64 (N,).
        """
        return

    def _thread_count(self) -> int:
        pool = self._running().pool
        return pool.threads if pool else 1

    def _runs_user_code(self) -> bool:
        """Whether functions of the script's are called in the consumer's thread."""
        return self._code().runs_here

    def _answers_for_batches(self) -> bool:
        """Whether no subclass says that samples are made one by one."""
        return type(self).__getitem__ is RowsDataset.__getitem__

    def _large_parts(self, count: int) -> int:
        """How many of a batch's arrays are so large that they are sent in memory of their own."""
        return sum(count * value.nbytes >= _OWN_MEMORY for value in self._values)

    # ---- how a batch is made --------------------------------------------------------------------

    def _start_batch(
        self, indices: Sequence[int] | npt.NDArray[np.int64], key: Key | None = None, *, threaded: bool = True
    ) -> RowsBatch:
        """Begin a batch without waiting for it."""
        samples, runtime = self._positions(indices), self._running()
        is_keyed = key is not None
        if key is None and (self._wants_key or self.bad_samples.policy == "replace"):
            key, is_keyed = take_key(len(samples))
        parts = self._memory(len(samples), runtime, threaded)
        reading = self._reading(indices, samples, key, is_keyed, runtime, [part.array for part in parts])
        if get_worker_info() is not None and len(samples):
            note(f"{reading.where()} and others")
        pending = PendingRead(
            runtime.threads if threaded else None, reading.start, reading.read_alone, reading.samples,
            reading.policy, reading.substitute, reading.heard,
        )  # fmt: skip
        return RowsBatch(pending, parts, runtime.pool, self._form, self._code(), key, is_keyed, threaded)

    def _positions(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Positions in the dataset: int64 (N,)."""
        positions = integers(indices)
        length = len(self)
        if (positions.view(np.uint64) < length).all():  # where those below 0 are large
            return positions
        wrong = (positions < -length) | (positions >= length)
        if wrong.any():
            raise IndexError(f"sample {positions[wrong][0]} of a dataset of {length}")
        return np.where(positions < 0, positions + length, positions)

    def _memory(self, count: int, runtime: RowsRuntime, threaded: bool) -> list[Part]:
        """The batch's arrays."""
        found = []
        for value, slots in zip(self._values, runtime.slots, strict=True):
            shape, nbytes = (count, *value.shape), count * value.nbytes
            if not threaded or nbytes < _OWN_MEMORY or value.dtype.hasobject:
                array = np.empty(shape, value.dtype)
            elif value.torch_dtype is not None and get_worker_info() is not None:
                # Will be sent to the parent: make it where both see it.
                array = shared_flat(nbytes).numpy().view(value.dtype).reshape(shape)
            else:
                array = slots.take(shape, value.dtype)
            found.append(Part(array, None if value.torch_dtype is None else torch.from_numpy(array)))
        return found


def is_fast_rows(dataset: Any) -> TypeGuard[RowsDataset]:
    """Whether a dataset is one whose batches fastpipe makes, and no subclass in its own way."""
    return (
        isinstance(dataset, RowsDataset)
        and type(dataset).__getitems__ is RowsDataset.__getitems__
        and dataset._answers_for_batches()
    )
