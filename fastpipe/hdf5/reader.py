"""Read rows of HDF5 files in one process: in the native core if it supports them, and otherwise in Python."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.native import native
from fastpipe.core.reads import ChunkError, Started, Task
from fastpipe.hdf5.cache import CachedChunks, chunk_nbytes
from fastpipe.hdf5.chunks import ChunkReader, data_file
from fastpipe.hdf5.files import SampleFile, SampleFiles
from fastpipe.hdf5.layout import Layout, grid_of, in_blocks
from fastpipe.hdf5.library import OpenFiles, require_filters
from fastpipe.hdf5.opening import DamagedError, library_errors, open_library, raw_name

Int64Array = npt.NDArray[np.int64]

# The size of the library's cache of chunks, for data that only the library can read.  The number of slots
# should be a prime.
_LIBRARY_NBYTES, _LIBRARY_SLOTS = 1 << 23, 10_007
_MOST_KNOWN = 20_000  # the most files, or datasets of their own shape, whose native objects are kept


class _Dataset(NamedTuple):
    chunks: ChunkReader
    kept: CachedChunks | None


class RowReader:
    """A reader of samples of files.  Thread-safe.

    The function ``memory`` takes the index of a file, the index of a dataset and the size of a chunk in
    bytes.  It returns a ``native.UnitMemory`` or None, and the key of the dataset's first chunk in this
    memory.  ``keep`` returns the cache for a layout's decoded chunks, or None.  ``turn``, from 0 to 1, is the
    point in the sequence of a batch's chunks at which this process starts to read.  If the values of ``turn``
    differ, two processes seldom need the same chunk at the same time.
    """

    def __init__(
        self,
        files: SampleFiles,
        memory: Callable[[int, int, int], tuple[Any, int]] = lambda *_: (None, 0),
        keep: Callable[[Layout], CachedChunks | None] = lambda _: None,
        threads: int = 1,
        turn: float = 0.0,
    ) -> None:
        self._files, self._memory, self._keep = files, memory, keep
        self._threads, self._turn = threads, turn
        self._lock = threading.Lock()
        self._opened: dict[int, list[_Dataset | None]] = {}
        self._data_files: dict[str, Any] = {}
        self._library = OpenFiles()

    def start(self, samples: Int64Array, rows: Int64Array, outs: Sequence[npt.NDArray[Any]]) -> Started:
        """Prepare to read ``samples`` into the ``rows`` of a batch, and return this work.

        ``samples`` and ``rows`` are int64 (N,), C-contiguous.  ``outs`` has a C-contiguous array
        (batch, *sample_shape) for each dataset, in the dataset's dtype.  If samples differ in shape or dtype,
        it may be an object array (batch,), in which each sample gets an array of its own.
        """
        statuses = np.zeros((len(outs[0]), 8), np.uint8)
        sources, tasks, kept, most = list[Any](), list[Task](), list[CachedChunks | None](), 0
        for number, places, local in self._files.located(samples):
            which = rows if places is None else rows[places]
            for place, dataset in enumerate(self._datasets(number)):
                file, out = self._files.files[number], outs[place]
                if (values := file.layouts[place].values) is not None:
                    _copy_values(values, local, which, out)
                    continue
                kind = file.kind(place)
                # NumPy would unpack an array without dimensions that is put into an array of objects.
                if dataset is None or (out.dtype.hasobject and not kind[1]):
                    run = partial(self._through_library, number, place, local, which, out)
                    tasks.append(Task(which, run))
                    continue
                found = _sources(dataset.chunks, kind, local, which, out)
                sources += found
                kept += [dataset.kept] * len(found)
                if dataset.kept is not None:
                    most = max(most, dataset.kept.look())
        if not sources:
            return Started(None, statuses, tasks)
        batch = native.row_batch(sources, statuses, self._threads, self._turn, most)
        return Started(batch, statuses, tasks, partial(_keep_chunks, batch, kept) if most else None)

    def read_alone(self, sample: int, row: int, outs: Sequence[npt.NDArray[Any]]) -> None:
        """Read one sample chunk by chunk, so that an error names the damaged chunk."""
        ((number, _, (local,)),) = self._files.located(np.array([sample]))
        file = self._files.files[number]
        for place, dataset in enumerate(self._datasets(number)):
            one = np.array([int(local)]), np.array([row])
            if (values := file.layouts[place].values) is not None:
                _copy_values(values, *one, outs[place])
                continue
            if dataset is None:
                self._through_library(number, place, *one, outs[place])
                continue
            file.check_unchanged()
            try:
                outs[place][row] = _sample(dataset.chunks, file.sample_dims, local)[()]
            except ChunkError as error:
                file.check_unchanged()
                raise DamagedError(str(error)) from None

    def _datasets(self, number: int) -> list[_Dataset | None]:
        """Return a file's datasets; None replaces each dataset that only the HDF5 library can read."""
        found = self._opened.get(number)
        if found is None:
            with self._lock:
                found = self._opened.get(number)
                if found is None:
                    if len(self._opened) >= _MOST_KNOWN:
                        self._opened.clear()  # batches in progress have references of their own
                    found = self._opened[number] = self._new_datasets(number)
        return found

    def _new_datasets(self, number: int) -> list[_Dataset | None]:
        one = self._files.files[number]
        file = self._data_files.get(one.path)
        found: list[_Dataset | None] = []
        for place, layout in enumerate(one.layouts):
            if layout.kind == "h5py":
                found.append(None)
                continue
            if file is None:
                file = self._data_files[one.path] = data_file(one.path, one.state)
            kept = self._keep(layout)
            layout = layout if kept is None else in_blocks(layout)
            memory, first = self._memory(number, place, chunk_nbytes(layout))
            chunks = ChunkReader(
                layout, one.state, one.sample_dims, file=file, memory=memory, first_key=first,
                kept=None if kept is None else kept.native,
            )  # fmt: skip
            found.append(_Dataset(chunks, kept))
        return found

    def _through_library(
        self, number: int, place: int, samples: Int64Array, rows: Int64Array, out: npt.NDArray[Any]
    ) -> None:
        file = self._files.files[number]
        layout = file.layouts[place]
        # In the file's order, samples in one chunk follow each other, and the library decodes the chunk once.
        order = np.argsort(samples, kind="stable")
        lead = layout.shape[: file.sample_dims]
        indices = zip(*np.unravel_index(samples[order], lead), strict=True)
        name: str | None = None
        dataset: Any = None
        for row, place_in in zip(rows[order].tolist(), indices, strict=True):
            index = tuple(map(int, place_in))
            wanted, index = (layout.members[index[0]], index[1:]) if layout.members else (layout.name, index)
            if wanted != name:
                name, dataset = wanted, self._library_dataset(file, layout, wanted)
            with library_errors(f"{file.shown}, dataset {name}", DamagedError, dataset):
                out[row] = dataset[index]

    def _library_dataset(self, file: SampleFile, layout: Layout, name: str) -> Any:
        opened = self._library.file(file.path, partial(_open_with_library, file))
        file.check_unchanged()
        with library_errors(file.shown):
            dataset = opened[raw_name(name)]
            require_filters(dataset, file.shown)
            # A file that a SWMR writer has open may have grown.  Any other difference is an error.
            shape = layout.shape[1:] if layout.members else layout.shape
            is_same = dataset.dtype == layout.dtype and dataset.ndim == len(shape)
            if not is_same or any(map(operator.lt, dataset.shape, shape)):
                raise file.state.changed(file.shown)
        return dataset


def _keep_chunks(batch: Any, kept: Sequence[CachedChunks | None]) -> None:
    found: dict[int, tuple[list[int], list[npt.NDArray[np.uint8]]]] = {}
    for source, number, chunk in batch.take_chunks():
        numbers, chunks = found.setdefault(source, ([], []))
        numbers.append(number)
        chunks.append(chunk)
    for source, (numbers, chunks) in found.items():
        where = kept[source]
        assert where is not None
        where.keep(numbers, chunks)


def _copy_values(
    values: npt.NDArray[Any], samples: Int64Array, rows: Int64Array, out: npt.NDArray[Any]
) -> None:
    if not values.dtype.hasobject and not out.dtype.hasobject:
        out[rows] = values[samples]
        return
    for sample, row in zip(samples.tolist(), rows.tolist(), strict=True):
        value = values[sample]
        out[row] = value.copy() if isinstance(value, np.ndarray) else value  # the script may change arrays


def _sources(
    chunks: ChunkReader, kind: tuple[np.dtype[Any], tuple[int, ...]], samples: Int64Array, rows: Int64Array,
    out: npt.NDArray[Any],
) -> list[tuple[Any, ...]]:  # fmt: skip
    """Return the parts of a batch that the native core reads: a dataset, samples, their rows, memory, and the
    row with which the memory begins."""
    dtype, shape = kind
    if not out.dtype.hasobject:
        return [(chunks.dataset, samples, rows, out.reshape(-1).view(np.uint8), 0)]
    found = []
    for place, row in enumerate(rows.tolist()):
        out[row] = one = np.empty(shape, dtype)
        memory = one.reshape(-1).view(np.uint8)
        found.append((chunks.dataset, samples[place : place + 1], rows[place : place + 1], memory, row))
    return found


def _sample(chunks: ChunkReader, sample_dims: int, sample: int) -> npt.NDArray[Any]:
    given = chunks.layout
    # Contiguous data are read in blocks, which avoids reading the whole dataset.
    reader = chunks if given.kind != "contiguous" else chunks.in_blocks()
    layout = reader.layout
    shape, chunk = layout.shape, [max(side, 1) for side in layout.chunk]
    lead = [int(at) for at in np.unravel_index(sample, shape[:sample_dims])]
    out = np.empty(shape[sample_dims:], layout.dtype)
    grid = grid_of(shape, chunk)
    fill = np.frombuffer(layout.fill, layout.dtype).reshape(())
    for inner in np.ndindex(*grid[sample_dims:]):
        place = [*(at // side for at, side in zip(lead, chunk)), *inner]  # noqa: B905 - of the first ones
        number = int(np.ravel_multi_index(place, grid))
        corner = [at * side for at, side in zip(inner, chunk[sample_dims:], strict=True)]
        sizes = [
            min(side, size - at)
            for at, side, size in zip(corner, chunk[sample_dims:], shape[sample_dims:], strict=True)
        ]
        # The ellipsis makes the index return an array even if a sample has no dimensions.
        box: Any = (*(slice(at, at + size) for at, size in zip(corner, sizes, strict=True)), ...)
        inside: Any = (*(at % side for at, side in zip(lead, chunk)), *map(slice, sizes), ...)  # noqa: B905
        if layout.kind != "compact" and layout.offsets[number] < 0:
            out[box] = fill
            continue
        decoded = reader.decode_alone(number).view(layout.dtype).reshape(chunk)
        out[box] = decoded[inside]
    return out


def _open_with_library(file: SampleFile) -> Any:
    # Rows are read in the file's order, so the cache needs room for the current chunk and the next chunk.
    largest = max(layout.library_chunk for layout in file.layouts)
    room = max(_LIBRARY_NBYTES, 2 * largest)
    return open_library(file.path, file.shown, rdcc_nbytes=room, rdcc_nslots=_LIBRARY_SLOTS, rdcc_w0=1.0)
