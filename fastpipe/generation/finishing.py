"""From rows in place to finished HDF5 files: what is left to do when all rows are made."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._cpus import available_cpus
from fastpipe._extras import require
from fastpipe.errors import GenerationError, OptionError
from fastpipe.files.checkpoints import sync_folder
from fastpipe.generation.blocks import Block, Failure
from fastpipe.generation.form import Column, Form, length_name
from fastpipe.generation.job import Job, shard_path
from fastpipe.generation.journal import Journal
from fastpipe.generation.layout import (
    Region,
    arrays_of,
    copy_between,
    create,
    fixed_arrays,
    gaps,
    write_all,
)
from fastpipe.generation.storing import Places, Stored, Stores, bytes_of, data_file

__all__ = ["OldRows", "damaged", "finish", "name_files", "places_of"]

_STRUCTURE = "structure.h5"
_COMPACT = ".compact.data"
_AT_ONCE = 32 << 20


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
        block.failed = [Failure(index, "left out before") for index in missing]
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


def finish(
    job: Job, places: Places, blocks: Sequence[Stored], stores: Stores, say: Callable[[str], None]
) -> None:
    """Put the structure around rows that are all in place; may be done again after it was cut off.

    Args:
        job, places, blocks, stores: what is there.
        say: told what is done.

    Raises:
        OSError: the disk is full, for instance.
    """
    blocks = sorted(blocks, key=lambda one: one.first)
    widths = [
        max((one.spooled[at].longest for one in blocks), default=0) for at in range(len(job.form.ragged))
    ]
    failed = sorted({index for one in blocks for index, _ in one.failed})
    if len(failed) == job.rows:
        raise GenerationError(f"all {job.rows:,} rows failed, the first with {_first_error(blocks)}")
    for number in range(places.shards):
        rows = places.shard(number)
        skipped = [index for index in failed if index in rows]
        if len(skipped) == len(rows):
            raise GenerationError(
                f"all rows of a file failed, {rows.start} to {rows.stop - 1}: {_first_error(blocks)}"
            )
        _finish_file(job, places, number, widths, skipped, blocks, stores)
        say(f"file {number + 1} of {places.shards}")


def _finish_file(
    job: Job, places: Places, number: int, widths: Sequence[int], skipped: list[int],
    blocks: Sequence[Stored], stores: Stores,
) -> None:  # fmt: skip
    """Make one file whole."""
    folder, rows = places.folder, places.shard(number)
    count, scratch = len(rows) - len(skipped), folder / _STRUCTURE
    attributes = {**job.attributes(skipped), "first_row": rows.start, "last_row": rows.stop}
    made, compact = data_file(folder, number).name, f"{number:05d}{_COMPACT}"
    with ExitStack() as stack:
        stack.callback(scratch.unlink, missing_ok=True)
        source = stack.enter_context(stores.file(made))
        regions = create(scratch, arrays_of(job.form, widths), count, job.chunk_rows, attributes)
        target = stack.enter_context(stores.file(compact)) if skipped else source
        fixed = places.regions[number]
        if skipped:
            _copy_kept(source, target, rows, set(skipped), fixed, regions)
        else:  # one of before rows of this file were made again, which then did not fail
            (folder / compact).unlink(missing_ok=True)
        if not skipped and [one.begin for one in regions[: len(fixed)]] != [one.begin for one in fixed]:
            raise RuntimeError("HDF5 puts rows elsewhere than before; please report this")
        _copy_structure(scratch, target, regions)
        _write_ragged(job.form, rows, set(skipped), blocks, stores, target, regions[len(fixed) :])
        os.fsync(target)


def _copy_structure(scratch: Path, target: int, regions: Sequence[Region]) -> None:
    descriptor = os.open(scratch, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        os.ftruncate(target, size)
        for begin, end in gaps(size, regions):
            copy_between(descriptor, target, begin, end - begin, begin)
    finally:
        os.close(descriptor)


def _copy_kept(
    source: int, target: int, rows: range, skipped: set[int], old: Sequence[Region], new: Sequence[Region]
) -> None:
    """Copy the rows that are there, in runs."""
    at, first = 0, rows.start
    for end in (*sorted(skipped), rows.stop):
        for before, after in zip(old, new, strict=False):
            nbytes = before.row_nbytes
            start = before.begin + (first - rows.start) * nbytes
            copy_between(source, target, start, (end - first) * nbytes, after.begin + at * nbytes)
        at, first = at + end - first, end + 1


def _write_ragged(
    form: Form, rows: range, skipped: set[int], blocks: Sequence[Stored], stores: Stores, target: int,
    regions: Sequence[Region],
) -> None:  # fmt: skip
    """Write ragged columns from the spools, each row at the width of the longest."""
    places = iter(regions)
    for number, column in enumerate(form.ragged):
        values, at = next(places), 0
        lengths = None if column.is_text else next(places)
        for stored in blocks:
            if stored.last <= rows.start or stored.first >= rows.stop:
                continue
            count, flat = _spooled(stores, stored, number, column)
            keep = np.array(
                [index in rows and index not in skipped for index in range(stored.first, stored.last)], bool
            )
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
        journal: notes that it has begun.
        old: files of fewer rows.

    Raises:
        OptionError: there is something else of this name meanwhile.
    """
    paths = [shard_path(out, number, places.shards) for number in range(places.shards)]
    if not journal.is_naming:
        taken = [path for path in paths if os.path.lexists(path) and path not in old]
        if taken:
            raise OptionError(f"{taken[0]} has come meanwhile; move it away, and call again")
        journal.name()
    for number, path in enumerate(paths):
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


def _first_error(blocks: Sequence[Stored]) -> str:
    return next((text for one in blocks for _, text in one.failed), "")
