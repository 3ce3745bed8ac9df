"""What becomes of each dataset of a file that is packed anew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastpipe.core.extras import require
from fastpipe.core.text import in_bytes
from fastpipe.errors import HDF5Error, OptionError
from fastpipe.hdf5.advice import SMALL_NBYTES
from fastpipe.hdf5.codecs import Codec
from fastpipe.hdf5.inspecting import storage_of
from fastpipe.hdf5.library import filters_of
from fastpipe.hdf5.objects import dataset_named, datasets_of, lies_in, name_of
from fastpipe.hdf5.rows import has_references, is_plain

__all__ = ["MEMORY_NBYTES", "Options", "Target", "make_plan"]

MEMORY_NBYTES = 64 << 20
_STEP_NBYTES = 16 << 20  # rows that are read, and written, at once
_AUTO_NBYTES = 64 << 10
_MOST_NBYTES = 1 << 50  # of a dataset: more than a copy could ever hold, and than could be read back
_LARGEST_CHUNK = 1 << 30  # the format ends at 4 GiB


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        chunk_rows: samples of a chunk; None chooses.
        codec: of the chunks.
        shuffle: None chooses.
        datasets: to pack anew; none of them stands for all above a small size.
        sample_dims: how many first dimensions count samples.
    """

    chunk_rows: int | None
    codec: Codec
    shuffle: bool | None
    datasets: tuple[str, ...]
    sample_dims: int

    def content(self) -> dict[str, Any]:
        """For a note, which is compared later."""
        return {**asdict(self), "datasets": sorted(self.datasets)}


@dataclass(frozen=True)
class Target:
    """A dataset that is written row by row.

    Attributes:
        name: its path.
        chunk: of its copy; None for a contiguous one.
        rows: how many there are, along the first dimension.
        step: how many are read and written at once.
        row_nbytes: decoded, as far as elements have a fixed size.
    """

    name: str
    chunk: tuple[int, ...] | None
    rows: int
    step: int
    row_nbytes: int


def make_plan(file: Any, options: Options) -> list[Target]:
    """Which datasets of an open file are written row by row, and how; all others are copied as they are.

    Raises:
        OptionError: a dataset that was named cannot be.
        HDF5Error: a dataset declares more than can be copied.
    """
    found = datasets_of(file, file.filename)
    for dataset in found:
        nbytes = math.prod(dataset.shape or ()) * dataset.id.get_type().get_size()
        if nbytes >= _MOST_NBYTES:
            raise HDF5Error(
                f"{file.filename}, dataset {name_of(dataset)} declares a shape of {dataset.shape}, "
                f"{in_bytes(nbytes)}, which is more than can be copied"
            )
    named = {_named(file, name, found) for name in options.datasets}
    return [_target(dataset, options) for dataset in found if _is_chosen(dataset, named)]


def _named(file: Any, name: str, found: Sequence[Any]) -> str:
    about = require("h5py.h5o", extra="hdf5").get_info
    item = dataset_named(file, name, file.filename)
    if item is None:
        raise OptionError(f"{file.filename} has no dataset {name!r}; `fastpipe inspect` lists those it has")
    if not item.shape:
        raise OptionError(f"{name!r} is a single value: it has no rows that could be chunked")
    if has_references(item.id.get_type()):
        raise OptionError(f"{name!r} has references, which are copied as they are; name other datasets")
    if not lies_in(item, file):
        raise OptionError(f"{name!r} is a link to another file, which stays a link; name other datasets")
    # A dataset of several names is written under the one that it is found by.
    address = about(item.id).addr
    return next(name_of(one) for one in found if about(one.id).addr == address)


def _is_chosen(dataset: Any, named: set[str]) -> bool:
    if not dataset.shape or has_references(dataset.id.get_type()):
        return False
    # A copy that lies elsewhere would not find the other files: so their data come into it.
    if storage_of(dataset) in ("virtual", "external"):
        return True
    if named:
        return name_of(dataset) in named
    nbytes = math.prod(dataset.shape) * dataset.id.get_type().get_size()
    return bool(max(nbytes, dataset.id.get_storage_size()) >= SMALL_NBYTES)


def _target(dataset: Any, options: Options) -> Target:
    shape, size = tuple(map(int, dataset.shape)), dataset.id.get_type().get_size()
    chunk = _chunk(dataset, shape, size, options)
    row_nbytes = size * math.prod(shape[1:])
    old = tuple(map(int, dataset.chunks)) if dataset.chunks else ()
    step = _step(row_nbytes, (chunk or (1,))[0], old, size, math.prod(chunk or ()) * size)
    return Target(name_of(dataset), chunk, shape[0], step, row_nbytes)


def _chunk(dataset: Any, shape: tuple[int, ...], size: int, options: Options) -> tuple[int, ...] | None:
    has_filters = storage_of(dataset) == "chunked" and filters_of(dataset.id.get_create_plist())
    codec = options.codec.name
    will_have = codec != "none" and (has_filters if codec == "keep" else is_plain(dataset.id.get_type()))
    if options.chunk_rows is None and not will_have and dataset.maxshape == dataset.shape:
        return None
    dims = min(options.sample_dims, len(shape))
    own = tuple(max(side, 1) for side in shape[dims:])
    rows = options.chunk_rows or -(-_AUTO_NBYTES // (size * math.prod(own)))
    # A chunk may be longer than the dimension only where that can grow.
    rows = max(1, min(rows, shape[dims - 1]))
    return _below_limit((*(1 for _ in shape[: dims - 1]), rows, *own), size)


def _below_limit(chunk: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Halve the longest of the first dimensions that are left until the chunk can be made."""
    sides = list(chunk)
    for axis in range(len(sides)):
        while sides[axis] > 1 and math.prod(sides) * size > _LARGEST_CHUNK:
            sides[axis] = -(-sides[axis] // 2)
    return tuple(sides)


def _step(row_nbytes: int, rows: int, old: Sequence[int], size: int, new_nbytes: int) -> int:
    """Rows for one step: whole chunks of the new dataset, and of the old one where memory is enough.

    Args:
        row_nbytes: of a row of the dataset.
        rows: of a new chunk.
        old: the old chunk, or ().
        size: of an element.
        new_nbytes: of a new chunk.
    """
    row_nbytes = max(row_nbytes, 1)
    limit = max(MEMORY_NBYTES // 2, math.prod(old) * size if old else 0, new_nbytes)
    unit = math.lcm(rows, old[0]) if old else rows
    if unit * row_nbytes > limit:
        unit = rows
    return (
        max(1, max(_STEP_NBYTES, limit if old and old[0] * row_nbytes > limit else 0) // (unit * row_nbytes))
        * unit
    )
