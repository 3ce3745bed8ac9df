"""A job's files: what is there of it, the folder in which it grows, and the HDF5 files that are made of it.

A finished file depends on nothing but its rows, the job and the library: rows are written in order, chunks
are allocated at once, so that they follow each other, and no times are noted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from fastpipe.generation.storage import JOURNAL, Journal, Stored
from fastpipe.generation.workers import FUNCTION

_FORMAT = 1
_ATTRIBUTE = "fastpipe_generation"
_OWN_SUFFIXES = (".data", ".spool", ".h5", ".unfinished", ".part")  # the last of earlier versions
_CHUNK_NBYTES = 64 << 10
_LARGEST_CHUNK = 2**32 - 1
_AT_ONCE = 32 << 20
LEFT_OUT = "left out before"  # of a row that failed when a file was made, which keeps no more of it


# ---- jobs, their files and their folder -----------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What is made."""

    function: str
    code: str  # digest and parts as of `code_version`
    parts: Mapping[str, str]
    seed: int
    rows: int
    schema: Schema
    columns: str  # as given
    chunk_rows: int | None
    max_bytes: int | None
    policy: Policy
    seeds_globals: bool
    shard_rows: int | None  # of a file, at most; None for all in one
    batch_rows: int  # of a call of ``batch``; 0 without
    versions: Mapping[str, str]  # of what had a hand in it
    extends: int = 0  # rows that come from files which are there already

    def as_json(self) -> dict[str, Any]:
        """For the journal."""
        values = {name: value for name, value in self.__dict__.items() if name != "schema"}
        return {"format": _FORMAT, **values, "parts": dict(self.parts), "form": self.schema.as_json(),
                "versions": dict(self.versions)}  # fmt: skip

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Job:
        """As `as_json` gives it, if this version of fastpipe did."""
        if content.get("format") != _FORMAT:
            raise GenerationError("it was made by another version of fastpipe")
        values = {name: value for name, value in content.items() if name not in ("format", "form")}
        return cls(**{"parts": {}, "extends": 0, **values, "schema": Schema.from_json(content["form"])})

    @property
    def shards(self) -> list[range]:
        """The rows of each file."""
        size = self.shard_rows or self.rows
        return [range(first, min(first + size, self.rows)) for first in range(0, self.rows, size)]

    def attributes(self, rows: range, skipped: Sequence[int], nan_rows: int) -> dict[str, Any]:
        """Return the attributes of a finished file, for people and for extending it."""
        # Neither what the function is made of, which may be long, nor how it came about.
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
    """Return the versions of what has a hand in the rows, and in the file."""
    h5py = require("h5py", extra="generation")
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
    }


def differences(one: Job, wanted: Job) -> list[str]:
    """Say in what a job that is there differs from the wanted one, but for the number of rows."""
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
    """Return a file's name: ``out`` of a single one, else with a number."""
    return out if count == 1 else out.with_name(f"{out.stem}-{number:05d}{out.suffix}")


def paths_of(out: Path) -> tuple[Path, ...]:
    """Return the files that are there under a name, or under that with numbers."""
    if os.path.lexists(out):
        return (out,)
    found: list[Path] = []
    while os.path.lexists(path := shard_path(out, len(found), 2)):
        found.append(path)
    return tuple(found)


@dataclass(frozen=True)
class Finished:
    """Finished files, in the order of their rows."""

    paths: tuple[Path, ...]
    job: Job
    skipped: tuple[int, ...]  # rows that are in none of them
    nan_rows: int

    @classmethod
    def at(cls, out: Path) -> Finished | None:
        """Return the files of a name; None if there are none, an OptionError if there is something else."""
        paths = paths_of(out)
        if not paths:
            return None
        heads = [_head(path) for path in paths]
        skipped, at = [], 0
        for path, head in zip(paths, heads, strict=True):
            if head[_ATTRIBUTE] != heads[0][_ATTRIBUTE]:
                raise OptionError(f"{path} is of another job than {paths[0]}: move one of them away")
            skipped += [*range(at, head["first_row"]), *head["skipped"]]
            at = head["last_row"]
        job = Job.from_json(json.loads(heads[0][_ATTRIBUTE]))
        skipped += range(at, job.rows)
        return cls(paths, job, tuple(skipped), heads[0]["nan_rows"])


def _head(path: Path) -> dict[str, Any]:
    """The attributes of a finished file."""
    h5py = require("h5py", extra="generation")
    try:
        require_regular(path, os.stat(path))  # the library would wait for a writer of a fifo
        with h5py.File(path, "r") as file:
            numbers = "first_row", "last_row", "nan_rows"
            found: dict[str, Any] = {name: int(file.attrs[name]) for name in numbers}
            found[_ATTRIBUTE] = str(file.attrs[_ATTRIBUTE])
            found["skipped"] = file.attrs.get("skipped", np.zeros(0, np.int64)).tolist()
    except (OSError, KeyError) as error:
        # HDF5's own have no number, and what is no file has this one.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise OptionError(
            f"{path} exists, and fastpipe.generate has not made it; name another file, or remove it"
        ) from None
    return found


class Folder(GrowingFolder):
    """The folder ``OUT.partial``, locked, in which a job's files grow."""

    def __init__(self, out: Path) -> None:
        super().__init__(out, GenerationError)

    def _check_own(self) -> None:
        there, own = os.listdir(self.folder), self._own()
        is_own = has_empty_lock(self.folder) and (JOURNAL in own or len(own) == len(there))
        if there and not is_own:
            raise OptionError(
                f"{self.folder} is not that of an unfinished job; move it away, or remove it, and try again"
            )

    def clear(self) -> None:
        """Remove what jobs have left, but for the journal, which is begun anew."""
        for name in self._own():
            if name not in (JOURNAL, LOCK):
                os.unlink(self.folder / name)

    def tidy(self, blocks: Sequence[Stored]) -> None:
        """Remove what was written and is not in the journal: where the disk was full, it is still."""
        ends: dict[str, int] = {}
        for one in blocks:
            ends[one.file] = max(ends.get(one.file, 0), one.begin + one.nbytes)
        for name in os.listdir(self.folder):
            if name.endswith((".unfinished", ".part")) or (name.endswith(".spool") and name not in ends):
                os.unlink(self.folder / name)
            elif name in ends:
                os.truncate(self.folder / name, ends[name])

    def remove(self) -> None:
        """Remove the folder, the journal last but for the lock; what others have put into it stays."""
        names = sorted(self._own(), key=lambda name: (name == LOCK, name == JOURNAL))
        for name in names:  # with the lock: nobody may take it in a folder that goes
            (self.folder / name).unlink(missing_ok=True)
        self.close()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _own(self) -> list[str]:
        """The names of what jobs leave."""
        own = JOURNAL, LOCK, FUNCTION
        return [one for one in os.listdir(self.folder) if one in own or one.endswith(_OWN_SUFFIXES)]


# ---- rows that are there already --------------------------------------------------------------------


def damaged(blocks: Sequence[Stored], folder: Path) -> list[Stored]:
    """Return blocks whose data is not what the journal says."""
    with ThreadPoolExecutor(available_cpus()) as pool:
        are_whole = pool.map(lambda one: one.is_whole(folder), blocks)
        return [one for one, is_whole in zip(blocks, are_whole, strict=True) if not is_whole]


class OldRows:
    """The rows of finished files, as blocks."""

    def __init__(self, paths: Sequence[Path], schema: Schema) -> None:
        h5py = require("h5py", extra="generation")
        self._schema = schema
        self._files = [h5py.File(path, "r") for path in paths]
        kept = [_kept(file) for file in self._files]
        self._rows = np.concatenate(kept)  # the row of each sample that is there, file by file
        self._starts = np.cumsum([0, *map(len, kept)])

    def block(self, first: int, last: int) -> Block:
        """Return rows as they would be made."""
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


def _files_with_rows(job: Job, blocks: Sequence[Stored]) -> dict[int, list[int]]:
    """For each file that has any rows, by its number, the rows that it lacks as they failed."""
    failed = sorted(pair for one in blocks for pair in one.failed)
    found, indices = {}, [index for index, _ in failed]
    for number, rows in enumerate(job.shards):
        skipped = indices[bisect_left(indices, rows.start) : bisect_left(indices, rows.stop)]
        if len(skipped) < len(rows):
            found[number] = skipped
    if not found:
        raise GenerationError(f"all {job.rows:,} rows failed, the first with {failed[0][1]}")
    return found


def finish(job: Job, folder: Path, blocks: Sequence[Stored], say: Callable[[str], None]) -> None:
    """Make files of rows that are all there; may be done again after it was cut off.

    Raises a GenerationError where all rows failed.
    """
    blocks = sorted(blocks, key=lambda one: one.first)
    firsts, lasts = [one.first for one in blocks], [one.last for one in blocks]
    # Of each ragged column, the greatest length.
    widths = [max(1, *lengths) for lengths in zip(*(one.longest for one in blocks), strict=True)]
    nan_rows = sum(one.with_nan for one in blocks)
    for number, skipped in _files_with_rows(job, blocks).items():
        rows = job.shards[number]
        some = blocks[bisect_right(lasts, rows.start) : bisect_left(firsts, rows.stop)]
        path, at = _made_file(folder, number), 0
        _create(path, job, len(rows) - len(skipped), widths, job.attributes(rows, skipped, nan_rows))
        with require("h5py", extra="generation").File(path, "r+") as file:
            for stored in some:
                indices = np.arange(stored.first, stored.last)
                is_in = (indices >= rows.start) & (indices < rows.stop)
                keep = np.flatnonzero(is_in & ~np.isin(indices, skipped))
                _write_rows(file, at, job.schema, stored.block(folder, job.schema), keep)
                at += len(keep)
        descriptor = open_regular(path)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        say(f"file {number + 1} of {len(job.shards)}")


def _create(path: Path, job: Job, rows: int, widths: Sequence[int], attributes: Mapping[str, Any]) -> None:
    """Make a file whose rows are still to be written; it takes all of its place on the disk."""
    h5py = require("h5py", extra="generation")
    creation, access = (h5py.h5p.create(kind) for kind in (h5py.h5p.FILE_CREATE, h5py.h5p.FILE_ACCESS))
    creation.set_obj_track_times(False)
    access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
    path.unlink(missing_ok=True)
    with h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_EXCL, creation, access)) as file:
        for column in job.schema.fixed:
            _create_dataset(file, column.name, column.element, (rows, *column.inner), job.chunk_rows)
        for column, width in zip(job.schema.ragged, widths, strict=True):
            if column.is_text:
                kind = h5py.string_dtype("utf-8", width)
                _create_dataset(file, column.name, kind, (rows,), job.chunk_rows)
                continue
            _create_dataset(file, column.name, column.element, (rows, width, *column.inner), job.chunk_rows)
            lengths = length_name(column.name)
            _create_dataset(file, lengths, np.dtype(np.int64), (rows,), job.chunk_rows)
            file[column.name].attrs["lengths"] = lengths
        file.attrs.update(attributes)
    if hasattr(os, "posix_fallocate"):  # the library does not survive a disk that is full
        descriptor = open_regular(path, os.O_RDWR)
        try:
            os.posix_fallocate(descriptor, 0, path.stat().st_size)
        finally:
            os.close(descriptor)


def _create_dataset(file: Any, name: str, dtype: Any, shape: tuple[int, ...], chunk_rows: int | None) -> None:
    h5py, nbytes = require("h5py"), int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
    wanted = _CHUNK_NBYTES // nbytes if chunk_rows is None else chunk_rows
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((max(1, min(wanted, shape[0], _LARGEST_CHUNK // nbytes)), *shape[1:]))
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)
    kind = h5py.h5t.py_create(dtype, logical=True)
    h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(shape), properties)


def _write_rows(file: Any, at: int, schema: Schema, block: Block, keep: npt.NDArray[np.int64]) -> None:
    """Write some rows of a block, ragged ones at the width of the longest."""
    if not len(keep):
        return
    here = slice(at, at + len(keep))
    for column, values in zip(schema.fixed, block.fixed, strict=True):
        file[column.name][here] = values if len(keep) == len(values) else values[keep]
    for column, lengths, flat in zip(schema.ragged, block.lengths, block.flat, strict=True):
        dataset, ends = file[column.name], np.cumsum(lengths)
        width = dataset.dtype.itemsize if column.is_text else dataset.shape[1]
        step = max(1, _AT_ONCE // (width * column.nbytes))  # so that padded rows do not fill memory
        for begin in range(0, len(keep), step):
            some = keep[begin : begin + step]
            padded = np.zeros((len(some), width, *column.inner), column.element)
            for place, row in enumerate(some):
                padded[place, : lengths[row]] = flat[ends[row] - lengths[row] : ends[row]]
            texts_or_rows = padded.view(dataset.dtype)[:, 0] if column.is_text else padded
            dataset[at + begin : at + begin + len(some)] = texts_or_rows
        if not column.is_text:
            file[length_name(column.name)][here] = lengths[keep]


def _made_file(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.h5"


def name_files(out: Path, folder: Path, job: Job, journal: Journal, old: Sequence[Path]) -> list[Path]:
    """Give finished files their names, for good; and remove old ones, of fewer rows, whose place they take.

    Raises an OptionError where there is something else of this name meanwhile.
    """
    numbers = list(_files_with_rows(job, journal.blocks))
    paths = [shard_path(out, place, len(numbers)) for place in range(len(numbers))]
    if not journal.is_naming:
        taken = [path for path in paths if os.path.lexists(path) and path not in old]
        if taken:
            raise OptionError(f"{taken[0]} has come meanwhile; move it away, and call again")
        journal.name()
    for number, path in zip(numbers, paths, strict=True):
        if (made := _made_file(folder, number)).exists():
            os.replace(made, path)
    for path in old:
        if path not in paths:
            path.unlink(missing_ok=True)
    sync_folder(out.parent)
    return paths
