"""Locate the bytes of an HDF5 dataset through the HDF5 library once; later reads need no library.

The library has one global lock, so reads through the library never run in parallel.  If a dataset cannot be
read directly, its layout has the kind ``"h5py"`` and the reason in ``why``, and h5py reads the dataset.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.array_cache import FileArrays
from fastpipe.hdf5.filters import BLOSC2, FilterStep, why_not
from fastpipe.hdf5.library import filters_edges, filters_of, h5py, has_blosc2, leaves_out_user_block
from fastpipe.hdf5.opening import DamagedError, library_errors, name_of

Int64Array = npt.NDArray[np.int64]


class Geometry:
    """How a dataset's samples lie in its chunks, like ``SampleGrid`` in fastpipe/native/chunks.h.

    The dataset's first dimensions count samples, in C order.  A *group* consists of the samples that lie in
    the same chunks.  Each of the chunks that contain a sample is a *part* of the sample.  In each of its
    parts, a sample has ``runs`` contiguous pieces.  A group away from the edges has ``group_size`` samples.

    >>> geometry = Geometry((100, 64, 128), (16, 64, 64), 4, 1)
    >>> geometry.groups, geometry.parts, geometry.group_size
    (7, 2, 16)
    """

    def __init__(self, shape: Sequence[int], chunk: Sequence[int], itemsize: int, sample_dims: int) -> None:
        self._lead, sample_shape = tuple(shape[:sample_dims]), tuple(shape[sample_dims:])
        # A chunk side of 0, as in an empty dataset, would cause a division by zero.
        self._lead_chunk, inner_chunk = (
            tuple(max(side, 1) for side in sides) for sides in (chunk[:sample_dims], chunk[sample_dims:])
        )
        self._lead_grid = grid_of(self._lead, self._lead_chunk)
        self.count = math.prod(self._lead)
        self.sample_nbytes = itemsize * math.prod(sample_shape)
        self.chunk_nbytes = math.prod(self._lead_chunk) * math.prod(inner_chunk) * itemsize
        self.group_size = math.prod(map(min, self._lead_chunk, (max(size, 1) for size in self._lead)))
        whole = len(sample_shape)
        while whole and inner_chunk[whole - 1] == sample_shape[whole - 1]:
            whole -= 1
        self.runs = math.prod(map(min, sample_shape[: max(whole - 1, 0)], inner_chunk))
        self.groups, self.parts = math.prod(self._lead_grid), math.prod(grid_of(sample_shape, inner_chunk))

    def groups_of(self, samples: Int64Array) -> Int64Array:
        """Return each sample's group, int64 (N,); ``samples`` must be from 0 to ``count`` - 1."""
        if len(self._lead) == 1:  # the usual case, which is several times as fast as the general case
            return samples // self._lead_chunk[0]
        index = np.unravel_index(samples, self._lead)
        grid = tuple(at // side for at, side in zip(index, self._lead_chunk, strict=True))
        return np.ravel_multi_index(grid, self._lead_grid).astype(np.int64)


def grid_of(shape: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-size // side) for size, side in zip(shape, chunk, strict=True))


Places = tuple[Int64Array, Int64Array, npt.NDArray[np.uint32]]  # offsets, sizes and masks of a layout

_BLOCK_NBYTES = 1 << 20
_KEEP_FROM_S = 0.05  # a chunk table that the library lists in a shorter time is not stored
_NO_FILTERS = 0xFFFFFFFF  # the mask of a chunk for which all filters were skipped
_FARTHEST = np.uint64(1 << 60)  # beyond the end of any file, and small enough for sums that do not overflow
# A file may declare many chunks and contain few.  A table of its chunks is refused if it has more than
# MANY_CHUNKS chunks and more than _SPARSE chunks for each written chunk, as it would take too much memory.
MANY_CHUNKS, _SPARSE = 1 << 20, 64
MOST_NBYTES = 1 << 60  # the native core's limit
_COMPACT, _CONTIGUOUS, _CHUNKED, _VIRTUAL = range(4)


class Layout(NamedTuple):
    """A dataset of an HDF5 file, and the places of its bytes."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: bytes  # value of elements that were never written: a scalar of the dtype
    kind: Literal["chunked", "contiguous", "compact", "h5py"]  # "h5py" if only the library can read the data
    why: str  # the reason for the kind ``"h5py"``, in words
    chunk: tuple[int, ...]  # the shape of a chunk, or the dataset's shape if the dataset has no chunks
    filters: tuple[FilterStep, ...]  # in the order of writing
    offsets: Int64Array  # offset of each chunk in the file, in C order of the grid; -1 if never written
    sizes: Int64Array  # bytes of each chunk in the file
    # Bit i means that filter i was skipped for the chunk.  A dataset may leave the chunks that extend beyond
    # its shape unfiltered; all bits are set for these chunks.
    masks: npt.NDArray[np.uint32]
    inside: bytes = b""  # all data, for the kind ``"compact"``
    library_chunk: int = 0  # bytes of a decoded chunk, for the kind ``"h5py"``
    shown: str = ""  # the file's name in messages, such as a URL; empty for the path
    # The names of the datasets that the first dimension counts, if the layout joins several of them.
    members: Sequence[str] = ()
    values: npt.NDArray[Any] | None = None  # the values themselves, (samples, *sample_shape), of attributes


def read_layout(
    dataset: Any, tables: FileArrays | None = None, status: os.stat_result | None = None, linked_as: str = ""
) -> Layout:
    """Read the layout of a dataset, which must have at least one dimension, through h5py.

    ``tables`` stores the places of the dataset's chunks, with the file's ``status`` as the key.  ``status``
    must be taken before the file is opened.  If the dataset is in another file, to which a link leads,
    ``linked_as`` is the path of the link.
    """
    properties = dataset.id.get_create_plist()
    layout = layout_without_places(dataset, properties, linked_as)
    if layout.kind == "h5py":
        return layout
    if layout.kind != "chunked":
        places: Places | str = whole_place(dataset.id, layout)
    elif tables is None or status is None:
        places = chunk_places(dataset, properties, layout.chunk)
    else:
        places = _cached_chunks(dataset, properties, layout.chunk, tables, status)
    inside = dataset[...].tobytes() if layout.kind == "compact" else b""
    return with_places(layout, properties, places)._replace(inside=inside)


def layout_without_places(dataset: Any, properties: Any, linked_as: str = "") -> Layout:
    """Return the layout of a dataset without the places of its bytes.

    The result is the same for all datasets of a file whose type, shape and creation ``properties`` are equal.
    """
    file, name = os.fspath(dataset.file.filename), linked_as or name_of(dataset)
    shape, dtype, none = tuple(map(int, dataset.shape)), dataset.dtype, np.empty(0, np.int64)
    filters = filters_of(properties)
    # fastpipe would search the bytes of a linked dataset in the file that contains the link.
    why = f"it lies in another file, {file}" if linked_as else _why_only_h5py(dataset, properties, filters)
    layout = Layout(
        file, name, shape, dtype, b"", "h5py", why, shape, (), none, none, none.astype(np.uint32),
        library_chunk=dtype.itemsize * math.prod(dataset.chunks or (0,)),
    )  # fmt: skip
    if why:
        return layout
    kinds: dict[int, Literal["chunked", "contiguous", "compact"]]
    kinds = {_COMPACT: "compact", _CONTIGUOUS: "contiguous", _CHUNKED: "chunked"}
    kind = kinds[properties.get_layout()]
    # The value starts as zeros, because an element with several fields may have gaps between the fields.
    value = np.zeros((), dtype)
    if _is_filled(properties):
        value[...] = dataset.fillvalue
    chunk = tuple(map(int, dataset.chunks)) if kind == "chunked" else shape
    return layout._replace(kind=kind, chunk=chunk, filters=filters, fill=value.tobytes())


def with_places(layout: Layout, properties: Any, places: Places | str) -> Layout:
    """Return a layout with the places of its chunks, or of the kind ``"h5py"`` if ``places`` or the filters
    are a reason for that."""
    why = _why_not_such_places(properties, layout.filters, layout.kind, layout.shape, places)
    if why or isinstance(places, str):
        return layout._replace(kind="h5py", why=why, chunk=layout.shape, filters=())
    offsets, sizes, masks = places
    return layout._replace(offsets=offsets, sizes=sizes, masks=masks, library_chunk=0)


def _why_only_h5py(dataset: Any, properties: Any, filters: Sequence[FilterStep]) -> str:
    """Return why only the HDF5 library can read a dataset, or an empty text if fastpipe supports it."""
    dtype, layout = dataset.dtype, properties.get_layout()
    if dataset.file.swmr_mode:
        return "its file is marked as being written in SWMR mode"
    if layout == _VIRTUAL:
        return "it is a virtual dataset"
    if layout not in (_COMPACT, _CONTIGUOUS, _CHUNKED):
        return f"its layout {layout} is known to the library only"
    if layout == _CONTIGUOUS and properties.get_external_count():
        return "its bytes lie in external files"
    if layout != _CHUNKED and filters:
        return "it has filters and no chunks"
    if dataset.file.driver not in ("sec2", "windows"):
        return f"the file is opened with the driver {dataset.file.driver!r}"
    declared = (math.prod(max(side, 1) for side in sides) for sides in (dataset.shape, dataset.chunks or ()))
    if not dtype.itemsize or dtype.itemsize * max(declared) >= MOST_NBYTES:
        return "it is declared to be larger than any file"
    if dtype.hasobject:
        return f"its elements have no fixed size ({dtype})"
    if dtype.subdtype is not None:
        return f"its elements are arrays ({dtype})"
    if h5py.h5t.py_create(dtype, logical=True) != dataset.id.get_type():
        return "its elements are stored in another form than NumPy's"
    return ""


def _why_not_such_places(
    properties: Any, filters: Sequence[FilterStep], kind: str, shape: tuple[int, ...], places: Places | str
) -> str:
    """Return why a dataset's chunks must be read through the library; the text is empty if fastpipe can read
    them itself."""
    if isinstance(places, str):
        return places
    offsets, _, masks = places
    is_there = offsets >= 0
    has_holes = kind != "compact" and 0 not in shape and not is_there.all()
    if has_holes and not _is_filled(properties):
        return "parts of it were never written, and no fill value is read there"
    # An optional filter may have been skipped for every chunk.
    left_out = np.bitwise_and.reduce(masks[is_there]) if is_there.any() else 0
    steps = [step for number, step in enumerate(filters) if not left_out >> number & 1]
    return why_not(steps, has_blosc2=any(step.code == BLOSC2 for step in steps) and has_blosc2())


def _is_filled(properties: Any) -> bool:
    """Return True if elements that were never written have the fill value."""
    is_defined = properties.fill_value_defined() in (
        h5py.h5d.FILL_VALUE_DEFAULT,
        h5py.h5d.FILL_VALUE_USER_DEFINED,
    )
    return is_defined and properties.get_fill_time() in (h5py.h5d.FILL_TIME_IFSET, h5py.h5d.FILL_TIME_ALLOC)


def chunk_places(dataset: Any, properties: Any, chunk: tuple[int, ...]) -> Places | str:
    """Return where a dataset's chunks are in the file, or a text: why the library must read them."""
    grid = grid_of(dataset.shape, chunk)
    count = math.prod(grid)
    found: list[tuple[Any, ...]] = []
    if count:
        try:
            # The list may get a million tuples, so all tuples are converted together below.
            with library_errors(dataset.file.filename, DamagedError):
                dataset.id.chunk_iter(found.append)
        except DamagedError as error:
            # Lookups through the library may still find some chunks.
            return f"its list of chunks is damaged: {error.__cause__}"
    if count > max(MANY_CHUNKS, _SPARSE * len(found)):
        return f"nearly all of its {count:,} chunks were never written"
    offsets, sizes = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    masks = np.zeros(count, np.uint32)
    if found:
        corners, found_masks, found_offsets, found_sizes = zip(*found, strict=True)
        numbers = _numbers(dataset, _bounded(corners), chunk)
        if numbers is None:
            return "the library does not say for certain which chunk is where"
        offsets[numbers], sizes[numbers] = _bounded(found_offsets), _bounded(found_sizes)
        masks[numbers] = found_masks
        block = dataset.file.userblock_size
        if block and leaves_out_user_block():
            offsets[numbers] += block
        edges = np.flatnonzero(_edges(dataset.shape, chunk) & (offsets >= 0))
        # If one edge chunk is stored in another size than the decoded size, all edge chunks were filtered.
        are_whole = (sizes[edges] == math.prod(chunk) * dataset.dtype.itemsize).all()
        if len(edges) and are_whole and properties.get_nfilters() and not filters_edges(dataset, properties):
            masks[edges] = _NO_FILTERS
    return offsets, sizes, masks


def _bounded(numbers: Sequence[Any]) -> Int64Array:
    """Return addresses, sizes or corners as int64, limited to ``_FARTHEST``.

    A damaged file may contain any unsigned 64-bit number.
    """
    return np.minimum(np.array(numbers, np.uint64), _FARTHEST).astype(np.int64)


def _numbers(dataset: Any, corners: Int64Array, chunk: tuple[int, ...]) -> Int64Array | None:
    """Return the numbers of the chunks at ``corners``; None if the library's corners may be wrong.

    Chunks are numbered in C order of their grid.
    """
    grid = np.array(grid_of(dataset.shape, chunk))
    places, rests = np.divmod(corners, chunk)
    if rests.any() or (places < 0).any() or (places >= grid).any():
        return None
    # HDF5's index "extensible array" swaps the growing dimension to the front.  The library, at least up to
    # version 2.0, ignores the swap when it lists the chunks.  All chunks then seem to have index 0 along the
    # dimensions in front of the growing dimension.
    growing = [axis for axis, size in enumerate(dataset.maxshape) if size is None]
    if len(growing) == 1:
        before = slice(growing[0])
        is_split = any(side > 1 for side in grid_of(dataset.maxshape[before], chunk[before]))
        if is_split and not places[:, before].any():
            return None
    numbers: Int64Array = np.ravel_multi_index(tuple(places.T), tuple(grid)).astype(np.int64)
    # All kinds of index list chunks in ascending order.  In another order the index is damaged: the library
    # then finds different chunks in a lookup than in the list.
    return numbers if (np.diff(numbers) > 0).all() else None


def _edges(shape: Sequence[int], chunk: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Return True for each chunk that extends beyond the shape: bool (chunks,), in C order of their grid."""
    found = np.zeros(grid_of(shape, chunk), np.bool_)
    for axis, (size, side) in enumerate(zip(shape, chunk, strict=True)):
        if size % side:
            np.moveaxis(found, axis, 0)[-1] = True
    return found.reshape(-1)


def _cached_chunks(
    dataset: Any, properties: Any, chunk: tuple[int, ...], tables: FileArrays, status: os.stat_result
) -> Places | str:
    count = math.prod(grid_of(dataset.shape, chunk))
    about = f"hdf5 chunks 2, {name_of(dataset)}, {dataset.shape}, {chunk}"
    kinds = [(np.dtype(kind), (count,)) for kind in (np.int64, np.int64, np.uint32)]
    kept = tables.load(status, about)
    if kept is not None and [(array.dtype, array.shape) for array in kept] == kinds:
        offsets, sizes, masks = kept
        return offsets, sizes, masks
    start = perf_counter()
    found = chunk_places(dataset, properties, chunk)
    if not isinstance(found, str) and perf_counter() - start > _KEEP_FROM_S:
        tables.save(status, about, found)
    return found


def whole_place(dataset: Any, layout: Layout) -> Places:
    """Return the place of a dataset without chunks, which has the shape and dtype of ``layout``.  ``dataset``
    is a ``h5py.h5d.DatasetID``."""
    # The library's offset is meaningless if no storage is allocated.
    is_there = layout.kind == "contiguous" and dataset.get_storage_size() > 0
    offset = dataset.get_offset() if is_there else None
    nbytes = layout.dtype.itemsize * math.prod(layout.shape)
    return (
        np.array([-1], np.int64) if offset is None else _bounded([offset]),
        np.array([nbytes], np.int64),
        np.zeros(1, np.uint32),
    )


def in_blocks(layout: Layout) -> Layout:
    """Return a layout that treats contiguous data as chunks of about 1 MiB; other layouts do not change."""
    if layout.kind != "contiguous" or layout.offsets[0] < 0 or not layout.sizes[0]:
        return layout
    count, inner = layout.shape[0], layout.shape[1:]
    row = layout.dtype.itemsize * math.prod(inner)
    rows = max(1, min(count, _BLOCK_NBYTES // row))
    firsts = np.arange(0, count, rows, dtype=np.int64)
    sizes = np.minimum(rows, count - firsts) * row
    return layout._replace(
        kind="chunked", chunk=(rows, *inner), offsets=layout.offsets[0] + firsts * row, sizes=sizes,
        masks=np.zeros(len(firsts), np.uint32),
    )  # fmt: skip
