"""Facts about the datasets of an HDF5 file: where their bytes are, and what reading them takes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastpipe.core.extras import require
from fastpipe.hdf5.epochs import uniform_decodes
from fastpipe.hdf5.filters import FilterStep, in_words
from fastpipe.hdf5.geometry import Geometry, grid_of
from fastpipe.hdf5.layout import Layout, read_layout
from fastpipe.hdf5.library import filter_remedy, filters_of, missing_filters
from fastpipe.hdf5.objects import datasets_of, name_of
from fastpipe.hdf5.opening import library_errors, opened
from fastpipe.hdf5.rows import dtype_of

__all__ = ["DatasetFacts", "Epoch", "inspect_file", "storage_of"]

_DEEPEST = 20  # types within types that are written out


@dataclass(frozen=True)
class Epoch:
    """What an epoch reads of a dataset.

    Attributes:
        decodes: of each chunk, in uniform order, on average; 1 where nothing has to be decoded.
        nbytes: decoded or read in uniform order.
        windowed_nbytes: the same with chunks shuffled, then samples within some chunks: each chunk once.
        reads: pieces of the file that a sample is read from.
    """

    decodes: float
    nbytes: int
    windowed_nbytes: int
    reads: int


@dataclass(frozen=True)
class DatasetFacts:
    """One dataset.

    Attributes:
        path: in the file.
        shape: None for a dataset without a dataspace.
        dtype: in words.
        storage: "chunked", "contiguous", "compact", "virtual", "external", or "none".
        chunk: a chunk's shape, or None.
        filters: in words, in the order of writing.
        codes: their numbers.
        missing: filters that neither fastpipe nor the library of this process has, in words.
        remedies: how to have them, in words.
        stored: bytes in the file.
        decoded: bytes in memory; None where elements have no fixed size.
        samples: None where there are fewer dimensions than count samples.
        sample_nbytes: None as ``decoded``, and as ``samples``.
        samples_per_chunk: at most; None without chunks.
        chunk_nbytes: decoded; None without chunks, and as ``decoded``.
        chunks: how many; 0 without.
        parts: chunks that hold one sample.
        reader: "threads", "h5py", or "" where there is nothing to read sample by sample.
        why: the reason for "h5py".
        epoch: None without samples.
    """

    path: str
    shape: tuple[int, ...] | None
    dtype: str
    storage: str
    chunk: tuple[int, ...] | None
    filters: tuple[str, ...]
    codes: tuple[int, ...]
    missing: tuple[str, ...]
    remedies: tuple[str, ...]
    stored: int
    decoded: int | None
    samples: int | None
    sample_nbytes: int | None
    samples_per_chunk: int | None
    chunk_nbytes: int | None
    chunks: int
    parts: int
    reader: str
    why: str
    epoch: Epoch | None


def inspect_file(path: str | os.PathLike[str], sample_dims: int, batch_size: int) -> list[DatasetFacts]:
    """The facts about every dataset in a file; links that lead elsewhere are not followed.

    Args:
        path: the file.
        sample_dims: how many first dimensions count samples.
        batch_size: of the batches of an epoch.

    Raises:
        OSError, HDF5Error: it cannot be read, or is no HDF5 file.
    """
    shown, found = os.fspath(path), []
    with opened(shown) as file:
        for dataset in datasets_of(file, shown):
            with library_errors(f"{shown}, dataset {name_of(dataset)}"):
                found.append(_facts(dataset, sample_dims, batch_size))
    return found


def storage_of(dataset: Any) -> str:
    """How a dataset's data are stored, in a word."""
    h5d = require("h5py.h5d", extra="hdf5")
    if dataset.shape is None:
        return "none"
    properties = dataset.id.get_create_plist()
    kind = properties.get_layout()
    if kind == h5d.CONTIGUOUS and properties.get_external_count():
        return "external"
    words = {h5d.COMPACT: "compact", h5d.CONTIGUOUS: "contiguous", h5d.CHUNKED: "chunked"}
    return words.get(kind, "virtual")


def _facts(dataset: Any, sample_dims: int, batch_size: int) -> DatasetFacts:
    steps = filters_of(dataset.id.get_create_plist())
    shape = None if dataset.shape is None else tuple(map(int, dataset.shape))
    dtype = dtype_of(dataset)
    storage = storage_of(dataset)
    chunk = tuple(map(int, dataset.chunks)) if storage == "chunked" else None
    has_samples = shape is not None and len(shape) >= sample_dims
    layout = read_layout(dataset) if shape and dtype is not None else None
    itemsize = 0 if dtype is None or dtype.hasobject else dtype.itemsize
    sized = dtype is not None and not dtype.hasobject
    geometry = Geometry(shape, chunk or shape, itemsize, sample_dims) if shape and has_samples else None
    chunk_nbytes = math.prod(chunk) * itemsize if chunk and sized else None
    lacking = _unreadable(dataset, layout)
    return DatasetFacts(
        path=name_of(dataset),
        shape=shape,
        dtype=_dtype_in_words(dtype),
        storage=storage,
        chunk=chunk,
        filters=tuple(map(in_words, steps)),
        codes=tuple(step.code for step in steps),
        missing=tuple(map(in_words, lacking)),
        remedies=tuple(dict.fromkeys(map(filter_remedy, lacking))),
        stored=int(dataset.id.get_storage_size()),
        decoded=math.prod(shape) * itemsize if shape is not None and sized else None,
        samples=geometry.count if geometry else None,
        sample_nbytes=geometry.sample_nbytes if geometry and sized else None,
        samples_per_chunk=_samples_per_chunk(shape, chunk, sample_dims) if geometry and chunk else None,
        chunk_nbytes=chunk_nbytes,
        chunks=math.prod(grid_of(shape, chunk)) if shape and chunk else 0,
        parts=geometry.parts if geometry and chunk else 1,
        reader="" if not shape else "h5py" if layout is None or layout.kind == "h5py" else "threads",
        why=layout.why if layout else "its type has no equivalent in NumPy" if shape else "",
        epoch=_epoch(geometry, shape, chunk, bool(steps), sample_dims, batch_size) if geometry else None,
    )


def _unreadable(dataset: Any, layout: Layout | None) -> list[FilterStep]:
    return [] if layout is not None and layout.kind != "h5py" else missing_filters(dataset)


def _samples_per_chunk(shape: Sequence[int] | None, chunk: Sequence[int], sample_dims: int) -> int:
    return math.prod(
        min(side, size) for side, size in zip(chunk[:sample_dims], (shape or ())[:sample_dims], strict=True)
    )


def _epoch(
    geometry: Geometry,
    shape: tuple[int, ...] | None,
    chunk: tuple[int, ...] | None,
    is_filtered: bool,
    sample_dims: int,
    batch_size: int,
) -> Epoch | None:
    if not geometry.count or shape is None:
        return None
    if chunk is None or not is_filtered:
        nbytes = geometry.count * geometry.sample_nbytes
        return Epoch(1.0, nbytes, nbytes, geometry.runs * geometry.parts)
    decodes = uniform_decodes(shape[:sample_dims], chunk[:sample_dims], batch_size)
    once = geometry.groups * geometry.parts * geometry.chunk_nbytes
    return Epoch(decodes, round(decodes * once), once, geometry.parts)


def _dtype_in_words(dtype: Any, depth: int = 0) -> str:
    if dtype is None or depth > _DEEPEST:
        return "?" if dtype is None else "…"
    h5py = require("h5py", extra="hdf5")
    text = h5py.check_string_dtype(dtype)
    if text is not None:
        return "string" if text.length is None else f"string of {text.length} bytes"
    if (element := h5py.check_vlen_dtype(dtype)) is not None:
        return f"lists of {_dtype_in_words(element, depth + 1)}"
    if (reference := h5py.check_ref_dtype(dtype)) is not None:
        return "region reference" if reference is h5py.RegionReference else "object reference"
    if h5py.check_enum_dtype(dtype) is not None:
        return f"enum of {dtype}"
    if dtype.names:
        fields = (f"{name}: {_dtype_in_words(dtype[name], depth + 1)}" for name in dtype.names)
        return f"({', '.join(fields)})"
    return str(dtype)
