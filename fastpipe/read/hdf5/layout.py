"""Where the bytes of an HDF5 dataset lie, as the HDF5 library says: asked once, then read without it.

The library has one lock for everything, so what goes through it never runs in parallel.  A
dataset whose bytes need more than this package does has a reason instead of a place, and is
read through h5py.
"""

from __future__ import annotations

import math
import os
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe._extras import require
from fastpipe.protocols import ChunkTables
from fastpipe.read.hdf5.filters import FilterStep, why_not
from fastpipe.read.hdf5.geometry import grid_of
from fastpipe.read.hdf5.library import filters_of

__all__ = ["Layout", "in_blocks", "read_layout"]

Int64Array = npt.NDArray[np.int64]

_BLOCK_NBYTES = 1 << 20
_KEEP_FROM_S = 0.05  # chunk tables that are found faster are not worth a file
_COMPACT, _CONTIGUOUS, _CHUNKED, _VIRTUAL = range(4)


class Layout(NamedTuple):
    """A dataset of an HDF5 file.

    Attributes:
        file, name: the file's path, and the dataset's path in it.
        shape, dtype: of the dataset, as h5py has them.
        fill: what is read where nothing was written: a scalar of the dtype, as bytes.
        kind: ``"chunked"``; ``"contiguous"``; ``"compact"``, inside the file's own records;
            ``"h5py"``, where only the library can read it.
        why: the reason of ``"h5py"``, in words; else empty.
        chunk: shape of a chunk; of all data, where there are no chunks.
        filters: what a chunk went through, in the order of writing.
        offsets: int64 (chunks,): where each begins in the file, in C order of the chunks' grid; -1
            for one that was never written.
        sizes: int64 (chunks,): bytes of each in the file.
        masks: uint32 (chunks,): bit i says that filter i was left out.
        inside: all data of the kind ``"compact"``; else empty.
        library_chunk: bytes of a decoded chunk of the kind ``"h5py"``; 0 where it has none.
        shown: what messages call the file, where it is not its path: the URL that it was copied from.
    """

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: bytes
    kind: Literal["chunked", "contiguous", "compact", "h5py"]
    why: str
    chunk: tuple[int, ...]
    filters: tuple[FilterStep, ...]
    offsets: Int64Array
    sizes: Int64Array
    masks: npt.NDArray[np.uint32]
    inside: bytes = b""
    library_chunk: int = 0
    shown: str = ""


def read_layout(
    dataset: Any, tables: ChunkTables | None = None, status: os.stat_result | None = None
) -> Layout:
    """Ask h5py about a dataset.

    Args:
        dataset: an open ``h5py.Dataset`` of at least one dimension.
        tables: where its chunk table is kept, or None.
        status: of the file, from before it was opened.
    """
    properties = dataset.id.get_create_plist()
    file, name = os.fspath(dataset.file.filename), str(dataset.name)
    shape, dtype = tuple(map(int, dataset.shape)), dataset.dtype
    why = _why_only_h5py(dataset, properties)
    chunk = tuple(map(int, dataset.chunks)) if dataset.chunks and not why else shape
    filters = () if why else filters_of(properties)
    why = why or why_not(filters)
    if why:
        none = np.empty(0, np.int64)
        chunk_nbytes = dtype.itemsize * math.prod(dataset.chunks or (0,))
        return Layout(
            file, name, shape, dtype, b"", "h5py", why, shape, (), none, none, none.astype(np.uint32),
            library_chunk=chunk_nbytes,
        )  # fmt: skip
    kinds: dict[int, Literal["chunked", "contiguous", "compact"]]
    kinds = {_COMPACT: "compact", _CONTIGUOUS: "contiguous", _CHUNKED: "chunked"}
    kind = kinds[properties.get_layout()]
    # Into zeros, as an element of several fields may have gaps.
    value = np.zeros((), dtype)
    value[...] = dataset.fillvalue
    fill = value.tobytes()
    if kind != "chunked":
        offsets, sizes, masks = _whole(dataset, kind)
    elif tables is None or status is None:
        offsets, sizes, masks = _chunks(dataset, chunk)
    else:
        offsets, sizes, masks = _kept_chunks(dataset, chunk, tables, status)
    inside = dataset[...].tobytes() if kind == "compact" else b""
    return Layout(file, name, shape, dtype, fill, kind, "", chunk, filters, offsets, sizes, masks, inside)


def _why_only_h5py(dataset: Any, properties: Any) -> str:
    h5t = require("h5py.h5t", extra="hdf5")
    dtype, layout = dataset.dtype, properties.get_layout()
    if layout == _VIRTUAL:
        return "it is a virtual dataset"
    if layout == _CONTIGUOUS and properties.get_external_count():
        return "its bytes lie in external files"
    if dataset.file.driver not in ("sec2", "windows"):
        return f"the file is opened with the driver {dataset.file.driver!r}"
    if dtype.hasobject:
        return f"its elements have no fixed size ({dtype})"
    if dtype.subdtype is not None:
        return f"its elements are arrays ({dtype})"
    if h5t.py_create(dtype, logical=True) != dataset.id.get_type():
        return "its elements are stored in another form than NumPy's"
    return ""


def _chunks(dataset: Any, chunk: tuple[int, ...]) -> tuple[Int64Array, Int64Array, npt.NDArray[np.uint32]]:
    grid = grid_of(dataset.shape, chunk)
    count = math.prod(grid)
    found: list[tuple[Any, ...]] = []
    if count:
        # Tuples as they are, for there may be a million of them; what is made of them is made at once.
        dataset.id.chunk_iter(found.append)
    offsets, sizes = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    masks = np.zeros(count, np.uint32)
    if found:
        corners, found_masks, found_offsets, found_sizes = zip(*found, strict=True)
        places = np.array(corners, np.int64) // np.array(chunk, np.int64)
        numbers = np.ravel_multi_index(tuple(places.T), grid)
        offsets[numbers], sizes[numbers], masks[numbers] = found_offsets, found_sizes, found_masks
    return offsets, sizes, masks


def _kept_chunks(
    dataset: Any, chunk: tuple[int, ...], tables: ChunkTables, status: os.stat_result
) -> tuple[Int64Array, Int64Array, npt.NDArray[np.uint32]]:
    """As ``_chunks``, from where they were kept if they were."""
    count = math.prod(grid_of(dataset.shape, chunk))
    about = f"hdf5 chunks 1, {dataset.name}, {dataset.shape}, {chunk}"
    kinds = [(np.dtype(kind), (count,)) for kind in (np.int64, np.int64, np.uint32)]
    kept = tables.load(status, about)
    if kept is not None and [(array.dtype, array.shape) for array in kept] == kinds:
        offsets, sizes, masks = kept
        return offsets, sizes, masks
    start = perf_counter()
    found = _chunks(dataset, chunk)
    if perf_counter() - start > _KEEP_FROM_S:
        tables.save(status, about, found)
    return found


def _whole(dataset: Any, kind: str) -> tuple[Int64Array, Int64Array, npt.NDArray[np.uint32]]:
    # Without storage the offset that the library gives means nothing.
    is_there = kind == "contiguous" and dataset.id.get_storage_size() > 0
    offset = dataset.id.get_offset() if is_there else None
    nbytes = dataset.dtype.itemsize * math.prod(dataset.shape)
    return (
        np.array([-1 if offset is None else offset], np.int64),
        np.array([nbytes], np.int64),
        np.zeros(1, np.uint32),
    )


def in_blocks(layout: Layout) -> Layout:
    """Contiguous data as if they were chunks of about a megabyte, one after the other; others as they are."""
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
