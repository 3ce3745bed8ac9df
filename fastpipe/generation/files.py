"""The files of a job: the description of a job, its existing files, and the HDF5 structure around the rows.

A *job* means the rows and files that ``generate`` is to make, perhaps in several calls.

The HDF5 library first creates the structure of a file without data.  The library allocates all chunks at once
and does not fill them.  Chunks of whole rows then follow each other without gaps: row ``r`` of a dataset
begins at byte ``begin + r * row_nbytes`` of the file.  The structure depends only on the datasets, the
library and the attributes.  So several writers can write rows in any order without the library.  At the end
the structure is written around the rows.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.core.files import open_regular, require_regular, sync_folder
from fastpipe.core.growing_folder import LOCK, GrowingFolder, has_empty_lock
from fastpipe.core.machine import available_cpus
from fastpipe.errors import GenerationError, OptionError
from fastpipe.generation.code import changed
from fastpipe.generation.columns import Column, Schema, length_name
from fastpipe.generation.rows import Block, Failure, Policy
from fastpipe.generation.storage import (
    JOURNAL,
    Journal,
    Layout,
    Region,
    Stored,
    bytes_of,
    data_file,
    opened,
    write_all,
)
from fastpipe.generation.workers import FUNCTION

_FORMAT = 1
_ATTRIBUTE = "fastpipe_generation"
_OWN_SUFFIXES = (".data", ".spool", ".h5", ".unfinished", ".part")  # earlier versions made ".part"
_CHUNK_NBYTES = 64 << 10
_LARGEST_CHUNK = 2**32 - 1
_AT_ONCE = 32 << 20
_STRUCTURE, _COMPACT = "structure.h5", ".compact.data"
LEFT_OUT = "left out before"  # reported for rows that failed in an earlier job; the file has no error texts


# ---- jobs, their files and their folder -----------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Describes the rows and files that ``generate`` is to make, perhaps in several calls."""

    function: str  # "module:name"
    code: str  # digest from `code_version`
    parts: Mapping[str, str]  # parts from `code_version`
    seed: int
    rows: int
    schema: Schema
    columns: str  # the argument ``columns=`` as text
    chunk_rows: int | None
    max_bytes: int | None
    policy: Policy
    seeds_globals: bool
    shard_rows: int | None  # largest number of rows in a file; None for one file
    batch_rows: int  # number of rows in a call of ``batch``; 0 if there is no ``batch``
    versions: Mapping[str, str]  # versions of everything that affects the rows
    extends: int = 0  # number of rows in the finished files that the job extends

    def as_json(self) -> dict[str, Any]:
        """Return the job as values for JSON, to be written to the job's journal."""
        values = {name: value for name, value in self.__dict__.items() if name != "schema"}
        return {"format": _FORMAT, **values, "parts": dict(self.parts), "form": self.schema.as_json(),
                "versions": dict(self.versions)}  # fmt: skip

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Job:
        """Create a job from the values of ``as_json``; raise a GenerationError if their format is another."""
        if content.get("format") != _FORMAT:
            raise GenerationError("it was made by another version of fastpipe")
        values = {name: value for name, value in content.items() if name not in ("format", "form")}
        return cls(**{"parts": {}, "extends": 0, **values, "schema": Schema.from_json(content["form"])})

    def attributes(self, rows: range, skipped: Sequence[int], nan_rows: int) -> dict[str, Any]:
        """Return a finished file's HDF5 attributes, for its readers and for a later job that adds rows."""
        # The parts of the function's code are left out because they may be long, and so is ``extends``.
        content = {name: value for name, value in self.as_json().items() if name not in ("parts", "extends")}
        found: dict[str, Any] = {
            "function": self.function,
            "code_version": self.code,
            "seed": str(self.seed),
            "rows": self.rows,
            "first_row": rows.start,
            "last_row": rows.stop,
            "nan_rows": nan_rows,
            "versions": json.dumps(dict(self.versions), sort_keys=True),
            _ATTRIBUTE: json.dumps(content, sort_keys=True),
        }
        if skipped:
            found["skipped"] = np.array(skipped, np.int64)
        return found


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that affect the rows and the file."""
    h5py = require("h5py", extra="generation")
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
    }


def differences(one: Job, wanted: Job) -> list[str]:
    """Describe how the existing job ``one`` differs from the job ``wanted``, besides the number of rows."""
    found = []
    if one.code != wanted.code:
        what = "; ".join(changed(one.parts, wanted.parts)[:4]) if one.parts else ""
        other = "the function is another, or the version of Python or of a package is"
        found.append(f"the function has changed ({what})" if what else other)
    for name, words in (
        ("seed", "seed"), ("seeds_globals", "seed_globals"), ("columns", "columns"),
        ("chunk_rows", "chunk_rows"), ("max_bytes", "max_bytes"), ("policy", "bad_samples"),
    ):  # fmt: skip
        old, new = getattr(one, name), getattr(wanted, name)
        if old != new:
            found.append(f"{words} was {old!r} and is {new!r}")
    return found


def shard_path(out: Path, number: int, count: int) -> Path:
    """Return ``out`` if the job has one file, otherwise ``out`` with the file's ``number`` in the name."""
    return out if count == 1 else out.with_name(f"{out.stem}-{number:05d}{out.suffix}")


def paths_of(out: Path) -> tuple[Path, ...]:
    """Return the path ``out`` if it exists, otherwise all existing paths of ``out`` with a number."""
    if os.path.lexists(out):
        return (out,)
    found: list[Path] = []
    while os.path.lexists(path := shard_path(out, len(found), 2)):
        found.append(path)
    return tuple(found)


@dataclass(frozen=True)
class Finished:
    """The finished files of a job, in the order of their rows."""

    paths: tuple[Path, ...]
    job: Job
    skipped: tuple[int, ...]  # rows that are in no file
    nan_rows: int  # number of rows with NaN

    @classmethod
    def at(cls, out: Path) -> Finished | None:
        """Return the finished files with the name ``out``; None if there are no such files.

        Raises an OptionError if ``generate`` did not make one of them, or if they belong to different jobs.
        """
        paths = paths_of(out)
        if not paths:
            return None
        heads = [_head(path) for path in paths]
        skipped, at = [], 0
        for path, head in zip(paths, heads, strict=True):
            if head[_ATTRIBUTE] != heads[0][_ATTRIBUTE]:
                raise OptionError(f"{path} belongs to another job than {paths[0]}: move one of them away")
            skipped += [*range(at, head["first_row"]), *head["skipped"]]
            at = head["last_row"]
        job = Job.from_json(json.loads(heads[0][_ATTRIBUTE]))
        skipped += range(at, job.rows)
        return cls(paths, job, tuple(skipped), heads[0]["nan_rows"])


def _head(path: Path) -> dict[str, Any]:
    """Return the attributes of a finished file; raise an OptionError if ``generate`` did not make it."""
    h5py = require("h5py", extra="generation")
    try:
        require_regular(path, os.stat(path))  # HDF5 would wait for a writer of a fifo
        with h5py.File(path, "r") as file:
            numbers = "first_row", "last_row", "nan_rows"
            found: dict[str, Any] = {name: int(file.attrs[name]) for name in numbers}
            found[_ATTRIBUTE] = str(file.attrs[_ATTRIBUTE])
            found["skipped"] = file.attrs.get("skipped", np.zeros(0, np.int64)).tolist()
    except (OSError, KeyError) as error:
        # HDF5's own errors have no errno; a file that is not HDF5 gives EINVAL.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise OptionError(
            f"{path} exists and was not made by fastpipe.generate; name another file, or remove it"
        ) from None
    return found


class Folder(GrowingFolder):
    """The folder ``OUT.partial`` with the growing files of a job, locked against other processes."""

    def __init__(self, out: Path) -> None:
        super().__init__(out, GenerationError)

    def _check_own(self) -> None:
        there, own = os.listdir(self.folder), self._own()
        is_own = has_empty_lock(self.folder) and (JOURNAL in own or len(own) == len(there))
        if there and not is_own:
            raise OptionError(
                f"{self.folder} does not belong to an unfinished job; move it away, or remove it, and try "
                "again"
            )

    def clear(self) -> None:
        """Remove the files of earlier jobs; keep the lock and the journal, because both are used again."""
        for name in self._own():
            if name not in (JOURNAL, LOCK):
                os.unlink(self.folder / name)

    def tidy(self, blocks: Sequence[Stored]) -> None:
        """Remove data of rows that the journal does not list, to free space on a full disk."""
        ends: dict[str, int] = {}
        for spooled in (spooled for one in blocks for spooled in one.spooled):
            ends[spooled.file] = max(ends.get(spooled.file, 0), spooled.begin + spooled.nbytes)
        for name in os.listdir(self.folder):
            if name.endswith((".unfinished", ".part")) or (name.endswith(".spool") and name not in ends):
                os.unlink(self.folder / name)
            elif name in ends:
                os.truncate(self.folder / name, ends[name])

    def remove(self) -> None:
        """Remove the job's files, then the journal, the lock and the folder; files of other programs stay."""
        names = sorted(self._own(), key=lambda name: (name == LOCK, name == JOURNAL))
        for name in names:  # also the lock: no process may acquire it in a folder that is being removed
            (self.folder / name).unlink(missing_ok=True)
        self.close()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _own(self) -> list[str]:
        """Return the names of those files in the folder that a job has created."""
        own = JOURNAL, LOCK, FUNCTION
        return [one for one in os.listdir(self.folder) if one in own or one.endswith(_OWN_SUFFIXES)]


# ---- the structure of an HDF5 file ------------------------------------------------------------------


@dataclass(frozen=True)
class _Array:
    """Describes a dataset to create in an HDF5 file."""

    name: str
    dtype: Any
    shape: tuple[int, ...]  # the shape of one row
    attributes: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * int(np.dtype(self.dtype).itemsize)


def _fixed_arrays(schema: Schema) -> list[_Array]:
    return [_Array(one.name, one.element, one.inner, {}) for one in schema.fixed]


def _arrays(schema: Schema, widths: Sequence[int]) -> list[_Array]:
    """Describe all datasets of a finished file; ``widths`` has the greatest length of each ragged column."""
    found = _fixed_arrays(schema)
    for column, longest in zip(schema.ragged, widths, strict=True):
        width = max(longest, 1)
        if column.is_text:
            h5py = require("h5py", extra="generation")
            found.append(_Array(column.name, h5py.string_dtype("utf-8", width), (), {}))
        else:
            lengths = length_name(column.name)
            found.append(_Array(column.name, column.element, (width, *column.inner), {"lengths": lengths}))
            found.append(_Array(lengths, np.dtype(np.int64), (), {}))
    return found


def _create(
    path: Path, arrays: Sequence[_Array], rows: int, chunk_rows: int | None, attributes: Mapping[str, Any]
) -> list[Region]:
    """Create an HDF5 file without data; return, for each dataset, the file's region for its rows."""
    h5py = require("h5py", extra="generation")
    # The file has no timestamps, so that equal rows give equal files.
    creation, access = (h5py.h5p.create(kind) for kind in (h5py.h5p.FILE_CREATE, h5py.h5p.FILE_ACCESS))
    creation.set_obj_track_times(False)
    access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
    regions = []
    with h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_TRUNC, creation, access)) as file:
        for array in arrays:
            regions.append(_create_dataset(h5py, file, array, rows, chunk_rows))
        for array in arrays:
            file[array.name].attrs.update(array.attributes)
        file.attrs.update(attributes)
    return regions


def _create_dataset(h5py: Any, file: Any, array: _Array, rows: int, chunk_rows: int | None) -> Region:
    limit = _LARGEST_CHUNK // array.nbytes
    wanted = _CHUNK_NBYTES // array.nbytes if chunk_rows is None else min(chunk_rows, limit)
    chunk = max(1, min(wanted, rows))
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((chunk, *array.shape))
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)
    space = h5py.h5s.create_simple((rows, *array.shape))
    kind = h5py.h5t.py_create(array.dtype, logical=True)
    dataset = h5py.h5d.create(file.id, array.name.encode(), kind, space, properties)

    def offset(row: int) -> int:
        return int(dataset.get_chunk_info_by_coord((row, *(0,) * len(array.shape))).byte_offset)

    region = Region(offset(0), array.nbytes, rows)
    last = (rows - 1) // chunk * chunk
    if offset(last) != region.begin + last * region.row_nbytes:
        raise RuntimeError(f"HDF5 {array.name!r}: chunks do not follow each other; please report this")
    return region


def layout_of(job: Job, folder: Path) -> Layout:
    """Return where each row of a job is to be stored in the growing files in ``folder``."""
    scratch = folder / _STRUCTURE
    layout = Layout(folder, job.rows, job.shard_rows or job.rows, [])
    counts, arrays = [len(layout.shard(number)) for number in range(layout.shards)], _fixed_arrays(job.schema)
    try:
        found = {count: _create(scratch, arrays, count, job.chunk_rows, {}) for count in set(counts)}
    finally:
        scratch.unlink(missing_ok=True)
    return replace(layout, regions=[found[count] for count in counts])


# ---- existing rows ----------------------------------------------------------------------------------


def damaged(blocks: Sequence[Stored], layout: Layout) -> list[Stored]:
    """Return the blocks of rows whose stored data does not match the checksums in the journal."""

    def is_whole(stored: Stored) -> bool:
        try:
            crcs = [0] * len(stored.crcs)
            for number, rows, at in layout.pieces(stored.first, stored.last):
                with opened(data_file(layout.folder, number)) as descriptor:
                    for column, region in enumerate(layout.regions[number]):
                        begin = region.begin + at * region.row_nbytes
                        crcs[column] = _crc(descriptor, begin, len(rows) * region.row_nbytes, crcs[column])
            spooled = []
            for one in stored.spooled:
                with opened(layout.folder / one.file) as descriptor:
                    spooled.append(_crc(descriptor, one.begin, one.nbytes, 0))
        except EOFError:
            return False
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False  # the disk has lost the data; the rows are made again
        return tuple(crcs) == stored.crcs and spooled == [one.crc for one in stored.spooled]

    with ThreadPoolExecutor(available_cpus()) as pool:
        return [one for one, whole in zip(blocks, pool.map(is_whole, blocks), strict=True) if not whole]


def _crc(descriptor: int, begin: int, nbytes: int, crc: int) -> int:
    for data in _pieces(descriptor, begin, nbytes):
        crc = zlib.crc32(data, crc)
    return crc


def _pieces(descriptor: int, begin: int, nbytes: int) -> Iterator[bytes]:
    """Yield the bytes of a range of a file, in pieces of at most 32 MiB."""
    end = begin + nbytes
    while begin < end:
        data = os.pread(descriptor, min(end - begin, _AT_ONCE), begin)
        if not data:
            raise EOFError(f"a file ends {end - begin:,} bytes too early")
        yield data
        begin += len(data)


class OldRows:
    """Reads the rows of finished files, to copy them into the files of a job with more rows."""

    def __init__(self, paths: Sequence[Path], schema: Schema) -> None:
        h5py = require("h5py", extra="generation")
        self._schema = schema
        self._files = [h5py.File(path, "r") for path in paths]
        kept = [_kept(file) for file in self._files]
        self._rows = np.concatenate(kept)  # the row number of each stored sample, file by file
        self._starts = np.cumsum([0, *map(len, kept)])

    def block(self, first: int, last: int) -> Block:
        """Return the block of rows from ``first`` to ``last - 1``, as a worker would make it."""
        at = np.arange(*np.searchsorted(self._rows, (first, last)))
        rows = self._rows[at] - first
        block = Block(first, last, [], [], [])
        for column in self._schema.fixed:
            made = np.zeros((last - first, *column.inner), column.element)
            made[rows] = self._read(column.name, at)
            block.fixed.append(made)
        for column in self._schema.ragged:
            lengths, values = self._ragged(column, at)
            full = np.zeros(last - first, np.int64)
            full[rows] = lengths
            block.lengths.append(full)
            block.flat.append(values)
        missing = sorted(set(range(first, last)) - set(self._rows[at].tolist()))
        block.failed = [Failure(index, LEFT_OUT) for index in missing]
        return block

    def close(self) -> None:
        for file in self._files:
            file.close()

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
        lengths = self._read(length_name(column.name), at)
        rows = [row[:length] for row, length in zip(values, lengths, strict=True)]
        return lengths, np.concatenate([np.zeros((0, *column.inner), column.element), *rows])


def _kept(file: Any) -> npt.NDArray[np.int64]:
    rows = np.arange(file.attrs["first_row"], file.attrs["last_row"])
    return np.setdiff1d(rows, file.attrs.get("skipped", np.zeros(0, np.int64)))


# ---- finished files ---------------------------------------------------------------------------------


def _files_with_rows(layout: Layout, blocks: Sequence[Stored]) -> dict[int, list[int]]:
    """Return the failed rows of each file, by the file's number; leave out files whose rows all failed."""
    failed = sorted(pair for one in blocks for pair in one.failed)
    found, indices = {}, [index for index, _ in failed]
    for number in range(layout.shards):
        rows = layout.shard(number)
        skipped = indices[bisect_left(indices, rows.start) : bisect_left(indices, rows.stop)]
        if len(skipped) < len(rows):
            found[number] = skipped
    if not found:
        raise GenerationError(f"all {layout.rows:,} rows failed, the first with {failed[0][1]}")
    return found


def finish(job: Job, layout: Layout, blocks: Sequence[Stored], say: Callable[[str], None]) -> None:
    """Complete the files: write the HDF5 structure around the rows, which have all been written before.

    The call may be repeated after an interruption.  Raises a GenerationError if all rows failed.
    """
    blocks = sorted(blocks, key=lambda one: one.first)
    firsts, lasts = [one.first for one in blocks], [one.last for one in blocks]
    columns = range(len(job.schema.ragged))
    widths = [max((one.spooled[at].longest for one in blocks), default=0) for at in columns]
    arrays, nan_rows = _arrays(job.schema, widths), sum(one.with_nan for one in blocks)
    for number, skipped in _files_with_rows(layout, blocks).items():
        rows = layout.shard(number)
        some = blocks[bisect_right(lasts, rows.start) : bisect_left(firsts, rows.stop)]
        attributes = job.attributes(rows, skipped, nan_rows)
        _finish_file(job, layout, number, arrays, attributes, skipped, some)
        say(f"file {number + 1} of {layout.shards}")


def _finish_file(
    job: Job, layout: Layout, number: int, arrays: Sequence[_Array], attributes: Mapping[str, Any],
    skipped: Sequence[int], blocks: Sequence[Stored],
) -> None:  # fmt: skip
    folder, rows, fixed = layout.folder, layout.shard(number), layout.regions[number]
    scratch, compact = folder / _STRUCTURE, folder / f"{number:05d}{_COMPACT}"
    with ExitStack() as stack:
        stack.callback(scratch.unlink, missing_ok=True)
        source = target = stack.enter_context(opened(data_file(folder, number)))
        regions = _create(scratch, arrays, len(rows) - len(skipped), job.chunk_rows, attributes)
        if skipped:
            target = stack.enter_context(opened(compact))
            _copy_kept(source, target, rows, skipped, fixed, regions)
        else:  # a compact file may remain from an earlier run in which rows of this file failed
            compact.unlink(missing_ok=True)
            if [one.begin for one in regions[: len(fixed)]] != [one.begin for one in fixed]:
                raise RuntimeError("HDF5 puts rows elsewhere than before; please report this")
        _copy_structure(scratch, target, regions)
        _write_ragged(job.schema, layout, rows, skipped, blocks, target, regions[len(fixed) :])
        os.fsync(target)


def _copy_structure(scratch: Path, target: int, regions: Sequence[Region]) -> None:
    """Copy the file ``scratch``, except its ``regions`` of rows, to the file ``target``."""
    descriptor = open_regular(scratch)
    try:
        at, size = 0, os.fstat(descriptor).st_size
        os.ftruncate(target, size)
        for region in (*sorted(regions, key=lambda one: one.begin), Region(size, 0, 0)):
            _copy(descriptor, target, at, region.begin - at, at)
            at = region.end
    finally:
        os.close(descriptor)


def _copy_kept(
    source: int, target: int, rows: range, skipped: Sequence[int], old: Sequence[Region],
    new: Sequence[Region],
) -> None:  # fmt: skip
    """Copy the rows that did not fail, one run of consecutive rows after another."""
    at, first = 0, rows.start
    for end in (*skipped, rows.stop):
        for before, after in zip(old, new, strict=False):
            nbytes = before.row_nbytes
            start = before.begin + (first - rows.start) * nbytes
            _copy(source, target, start, (end - first) * nbytes, after.begin + at * nbytes)
        at, first = at + end - first, end + 1


def _copy(source: int, target: int, start: int, nbytes: int, to: int) -> None:
    for data in _pieces(source, start, nbytes):
        write_all(target, memoryview(data), to)
        to += len(data)


def _write_ragged(
    schema: Schema, layout: Layout, rows: range, skipped: Sequence[int], blocks: Sequence[Stored],
    target: int, regions: Sequence[Region],
) -> None:  # fmt: skip
    """Copy ragged columns from their temporary files (spools); pad each row to the longest row's length."""
    columns_regions = iter(regions)
    for number, column in enumerate(schema.ragged):
        values, at = next(columns_regions), 0
        lengths = None if column.is_text else next(columns_regions)
        for stored in blocks:
            spooled = stored.spooled[number]
            with opened(layout.folder / spooled.file) as descriptor:
                data = os.pread(descriptor, spooled.nbytes, spooled.begin)
            count = np.frombuffer(data, np.int64, stored.last - stored.first)
            flat = np.frombuffer(data, np.uint8, offset=count.nbytes)
            indices = np.arange(stored.first, stored.last)
            keep = (indices >= rows.start) & (indices < rows.stop) & ~np.isin(indices, skipped)
            for padded in _padded(count * column.nbytes, flat, keep, values.row_nbytes):
                write_all(target, bytes_of(padded), values.begin + at * values.row_nbytes)
                at += len(padded)
            if lengths is not None:
                kept = np.ascontiguousarray(count[keep])
                write_all(target, bytes_of(kept), lengths.begin + (at - len(kept)) * lengths.row_nbytes)


def _padded(
    sizes: npt.NDArray[np.int64], flat: npt.NDArray[np.uint8], keep: npt.NDArray[np.bool_], width: int
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield arrays of rows, each row padded with zeros to ``width`` bytes; an array has about 32 MiB.

    ``sizes`` has the number of bytes of each row.  ``flat`` has the rows themselves, one after the other.
    ``keep`` is true for the rows to yield.
    """
    ends = np.cumsum(sizes)
    rows = np.flatnonzero(keep)
    step = max(1, _AT_ONCE // width)
    for first in range(0, len(rows), step):
        some = rows[first : first + step]
        padded = np.zeros((len(some), width), np.uint8)
        for place, row in enumerate(some):
            padded[place, : sizes[row]] = flat[ends[row] - sizes[row] : ends[row]]
        yield padded


def name_files(out: Path, layout: Layout, journal: Journal, old: Sequence[Path]) -> list[Path]:
    """Give finished files their final names, and remove the ``old`` files, which had fewer rows.

    Returns the final paths.  Raises an OptionError if another file has taken one of these names meanwhile.
    """
    numbers = list(_files_with_rows(layout, journal.blocks))
    paths = [shard_path(out, place, len(numbers)) for place in range(len(numbers))]
    if not journal.is_naming:
        taken = [path for path in paths if os.path.lexists(path) and path not in old]
        if taken:
            raise OptionError(f"{taken[0]} was created meanwhile; move it away, and call again")
        journal.name()
    for number, path in zip(numbers, paths, strict=True):
        compact, made = layout.folder / f"{number:05d}{_COMPACT}", data_file(layout.folder, number)
        if compact.exists():
            made.unlink(missing_ok=True)  # first, because a later call would rename a remaining data file
            made = compact
        if made.exists():
            os.replace(made, path)
    for path in old:
        if path not in paths:
            path.unlink(missing_ok=True)
    sync_folder(out.parent)
    return paths
