"""From rows in place to finished HDF5 files: what is left to do when all rows are made."""

from __future__ import annotations

import errno
import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.core.files import open_regular, sync_folder
from fastpipe.core.machine import available_cpus
from fastpipe.errors import GenerationError, OptionError
from fastpipe.generation.blocks import Block, Failure
from fastpipe.generation.form import Column, Form, length_name
from fastpipe.generation.job import Job, shard_path
from fastpipe.generation.journal import Journal
from fastpipe.generation.layout import (
    Array,
    Region,
    arrays_of,
    copy_between,
    create,
    fixed_arrays,
    gaps,
)
from fastpipe.generation.storing import Places, Stored, Stores, bytes_of, data_file
from fastpipe.hdf5.checkpoints import write_all

__all__ = ["LEFT_OUT", "OldRows", "damaged", "files_with_rows", "finish", "name_files", "places_of"]

_STRUCTURE = "structure.h5"
_COMPACT = ".compact.data"
_AT_ONCE = 32 << 20
LEFT_OUT = "left out before"  # of a row that failed when a file was made, which keeps no more of it


def places_of(job: Job, folder: Path) -> Places:
    """Where the rows of a job go; of files that are alike it is found out once."""
    scratch = folder / _STRUCTURE
    found: dict[int, list[Region]] = {}
    regions = []
    places = Places(folder, job.rows, job.shard_rows or job.rows, [])
    try:
        for number in range(places.shards):
            count = len(places.shard(number))
            if count not in found:
                found[count] = create(scratch, fixed_arrays(job.form), count, job.chunk_rows, {})
            regions.append(found[count])
    finally:
        scratch.unlink(missing_ok=True)
    return replace(places, regions=regions)


def damaged(blocks: Sequence[Stored], places: Places, stores: Stores) -> list[Stored]:
    """Blocks whose data is not what was noted.

    Args:
        blocks: noted ones.
        places, stores: where they are.
    """

    def is_whole(stored: Stored) -> bool:
        try:
            crcs = [0] * len(stored.crcs)
            for number, rows, at in places.pieces(stored.first, stored.last):
                with stores.file(data_file(places.folder, number).name) as descriptor:
                    for column, region in enumerate(places.regions[number]):
                        begin = region.begin + at * region.row_nbytes
                        crcs[column] = _crc(descriptor, begin, len(rows) * region.row_nbytes, crcs[column])
            spooled = []
            for one in stored.spooled:
                with stores.file(one.file) as descriptor:
                    spooled.append(_crc(descriptor, one.begin, one.nbytes, 0))
        except EOFError:
            return False
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False  # the disk has lost it; to be made again is what can be done
        return tuple(crcs) == stored.crcs and spooled == [one.crc for one in stored.spooled]

    with ThreadPoolExecutor(available_cpus()) as pool:
        return [one for one, whole in zip(blocks, pool.map(is_whole, blocks), strict=True) if not whole]


def _crc(descriptor: int, begin: int, nbytes: int, crc: int) -> int:
    end = begin + nbytes
    while begin < end:
        data = os.pread(descriptor, min(end - begin, _AT_ONCE), begin)
        if not data:
            raise EOFError
        begin, crc = begin + len(data), zlib.crc32(data, crc)
    return crc


class OldRows:
    """The rows of finished files, as blocks.

    Args:
        paths: the files.
        form: of their samples.
    """

    def __init__(self, paths: Sequence[Path], form: Form) -> None:
        h5py = require("h5py", extra="generation")
        self._form = form
        self._files = [h5py.File(path, "r") for path in paths]
        # The row of each sample that is there, file by file.
        self._rows = np.concatenate([self._kept(file) for file in self._files])
        counts = [len(self._kept(file)) for file in self._files]
        self._starts = np.cumsum([0, *counts])

    def block(self, first: int, last: int) -> Block:
        """Rows as they would be made."""
        at = np.arange(*np.searchsorted(self._rows, (first, last)))
        rows = self._rows[at] - first
        fixed, lengths, flat = [], [], []
        for column in self._form.columns:
            if not column.is_ragged:
                made = np.zeros((last - first, *column.inner), column.element)
                made[rows] = self._read(column.name, at)
                fixed.append(made)
                continue
            count, values = self._ragged(column, at)
            full = np.zeros(last - first, np.int64)
            full[rows] = count
            lengths.append(full)
            flat.append(values)
        missing = sorted(set(range(first, last)) - set(self._rows[at].tolist()))
        block = Block(first, last, fixed, lengths, flat)
        block.failed = [Failure(index, LEFT_OUT) for index in missing]
        return block

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def _kept(self, file: Any) -> npt.NDArray[np.int64]:
        first, last = file.attrs["first_row"], file.attrs["last_row"]
        skipped = file.attrs.get("skipped", np.zeros(0, np.int64))
        return np.setdiff1d(np.arange(first, last), skipped)

    def _read(self, name: str, at: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        parts = []
        for file, start, stop in zip(self._files, self._starts, self._starts[1:], strict=False):
            some = at[(at >= start) & (at < stop)] - start
            if len(some):
                parts.append(file[name][some[0] : some[-1] + 1])
        return np.concatenate(parts) if parts else self._files[0][name][:0]

    def _ragged(
        self, column: Column, at: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        values = self._read(column.name, at)
        if column.is_text:
            texts = [bytes(one) for one in values]
            return np.array([len(one) for one in texts], np.int64), np.frombuffer(b"".join(texts), np.uint8)
        count = self._read(length_name(column.name), at)
        rows = [row[:length] for row, length in zip(values, count, strict=True)]
        return count, np.concatenate([np.zeros((0, *column.inner), column.element), *rows])


def files_with_rows(places: Places, blocks: Sequence[Stored]) -> dict[int, list[int]]:
    """Of each file that has any rows, by its number, the rows that it has not as they failed.

    Raises:
        GenerationError: no file has any.
    """
    failed = sorted(pair for one in blocks for pair in one.failed)
    found, indices = {}, [index for index, _ in failed]
    for number in range(places.shards):
        rows = places.shard(number)
        skipped = indices[bisect_left(indices, rows.start) : bisect_left(indices, rows.stop)]
        if len(skipped) < len(rows):
            found[number] = skipped
    if not found:
        raise GenerationError(f"all {places.rows:,} rows failed, the first with {failed[0][1]}")
    return found


def finish(
    job: Job, places: Places, blocks: Sequence[Stored], stores: Stores, say: Callable[[str], None]
) -> None:
    """Put the structure around rows that are all in place; may be done again after it was cut off.

    Args:
        job, places, blocks, stores: what is there.
        say: told what is done.

    Raises:
        GenerationError: all rows failed.
        OSError: the disk is full, for instance.
    """
    blocks = sorted(blocks, key=lambda one: one.first)
    firsts, lasts = [one.first for one in blocks], [one.last for one in blocks]
    widths = [
        max((one.spooled[at].longest for one in blocks), default=0) for at in range(len(job.form.ragged))
    ]
    arrays, nan_rows = arrays_of(job.form, widths), sum(one.with_nan for one in blocks)
    for number, skipped in files_with_rows(places, blocks).items():
        rows = places.shard(number)
        some = blocks[bisect_right(lasts, rows.start) : bisect_left(firsts, rows.stop)]
        attributes = job.attributes(rows, skipped, nan_rows)
        _finish_file(job, places, number, arrays, attributes, skipped, some, stores)
        say(f"file {number + 1} of {places.shards}")


def _finish_file(
    job: Job, places: Places, number: int, arrays: Sequence[Array], attributes: Mapping[str, Any],
    skipped: Sequence[int], blocks: Sequence[Stored], stores: Stores,
) -> None:  # fmt: skip
    """Make one file whole."""
    folder, rows, fixed = places.folder, places.shard(number), places.regions[number]
    scratch, compact = folder / _STRUCTURE, f"{number:05d}{_COMPACT}"
    with ExitStack() as stack:
        stack.callback(scratch.unlink, missing_ok=True)
        source = target = stack.enter_context(stores.file(data_file(folder, number).name))
        regions = create(scratch, arrays, len(rows) - len(skipped), job.chunk_rows, attributes)
        if skipped:
            target = stack.enter_context(stores.file(compact))
            _copy_kept(source, target, rows, skipped, fixed, regions)
        else:  # one of before rows of this file were made again, which then did not fail
            (folder / compact).unlink(missing_ok=True)
            if [one.begin for one in regions[: len(fixed)]] != [one.begin for one in fixed]:
                raise RuntimeError("HDF5 puts rows elsewhere than before; please report this")
        _copy_structure(scratch, target, regions)
        _write_ragged(job.form, rows, skipped, blocks, stores, target, regions[len(fixed) :])
        os.fsync(target)


def _copy_structure(scratch: Path, target: int, regions: Sequence[Region]) -> None:
    descriptor = open_regular(scratch)
    try:
        size = os.fstat(descriptor).st_size
        os.ftruncate(target, size)
        for begin, end in gaps(size, regions):
            copy_between(descriptor, target, begin, end - begin, begin)
    finally:
        os.close(descriptor)


def _copy_kept(
    source: int, target: int, rows: range, skipped: Sequence[int], old: Sequence[Region],
    new: Sequence[Region],
) -> None:  # fmt: skip
    """Copy the rows that are there, in runs."""
    at, first = 0, rows.start
    for end in (*skipped, rows.stop):
        for before, after in zip(old, new, strict=False):
            nbytes = before.row_nbytes
            start = before.begin + (first - rows.start) * nbytes
            copy_between(source, target, start, (end - first) * nbytes, after.begin + at * nbytes)
        at, first = at + end - first, end + 1


def _write_ragged(
    form: Form, rows: range, skipped: Sequence[int], blocks: Sequence[Stored], stores: Stores, target: int,
    regions: Sequence[Region],
) -> None:  # fmt: skip
    """Write ragged columns from the spools, each row at the width of the longest."""
    places = iter(regions)
    for number, column in enumerate(form.ragged):
        values, at = next(places), 0
        lengths = None if column.is_text else next(places)
        for stored in blocks:
            count, flat = _spooled(stores, stored, number, column)
            indices = np.arange(stored.first, stored.last)
            keep = (indices >= rows.start) & (indices < rows.stop) & ~np.isin(indices, skipped)
            for padded in _padded(count, flat, keep, values.row_nbytes, column):
                write_all(target, bytes_of(padded), values.begin + at * values.row_nbytes)
                at += len(padded)
            if lengths is not None:
                kept = np.ascontiguousarray(count[keep])
                write_all(target, bytes_of(kept), lengths.begin + (at - len(kept)) * lengths.row_nbytes)


def _spooled(
    stores: Stores, stored: Stored, number: int, column: Column
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Lengths of a block's rows, and the bytes of their values."""
    spooled, rows = stored.spooled[number], stored.last - stored.first
    with stores.file(spooled.file) as descriptor:
        data = os.pread(descriptor, spooled.nbytes, spooled.begin)
    count = np.frombuffer(data, np.int64, rows)
    return count, np.frombuffer(data, np.uint8, offset=rows * 8)


def _padded(
    count: npt.NDArray[np.int64],
    flat: npt.NDArray[np.uint8],
    keep: npt.NDArray[np.bool_],
    width: int,
    column: Column,
) -> Iterator[npt.NDArray[np.uint8]]:  # fmt: skip
    """Rows of one width in bytes, zeros behind; so many at a time that they do not fill memory."""
    ends = np.cumsum(count) * column.nbytes
    begins = ends - count * column.nbytes
    rows = np.flatnonzero(keep)
    step = max(1, _AT_ONCE // width)
    for first in range(0, len(rows), step):
        some = rows[first : first + step]
        padded = np.zeros((len(some), width), np.uint8)
        for place, row in enumerate(some):
            padded[place, : ends[row] - begins[row]] = flat[begins[row] : ends[row]]
        yield padded


def name_files(out: Path, places: Places, journal: Journal, old: Sequence[Path]) -> list[Path]:
    """Give finished files their names, at once and for good; and remove those that they take the place of.

    Args:
        out: the name.
        places: which files.
        journal: what is in them; notes that it has begun.
        old: files of fewer rows.

    Raises:
        OptionError: there is something else of this name meanwhile.
    """
    numbers = list(files_with_rows(places, journal.blocks))
    paths = [shard_path(out, place, len(numbers)) for place in range(len(numbers))]
    if not journal.is_naming:
        taken = [path for path in paths if os.path.lexists(path) and path not in old]
        if taken:
            raise OptionError(f"{taken[0]} has come meanwhile; move it away, and call again")
        journal.name()
    for number, path in zip(numbers, paths, strict=True):
        compact, made = places.folder / f"{number:05d}{_COMPACT}", data_file(places.folder, number)
        if compact.exists():
            made.unlink(missing_ok=True)  # first: what is there afterwards has no name yet
            made = compact
        if made.exists():
            os.replace(made, path)
    for path in old:
        if path not in paths:
            path.unlink(missing_ok=True)
    sync_folder(out.parent)
    return paths
