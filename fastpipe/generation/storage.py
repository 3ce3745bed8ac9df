"""Blocks of rows on disk, and the journal that lists the complete blocks.

A *block* is a range of consecutive rows.  Rows of a fixed shape are written to their final position in the
file.  In a *ragged* column the lengths of rows differ, and all rows are stored with the length of the longest
row, which is unknown until all rows are made.  Until then the lengths and values are in a temporary file, the
*spool*.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.files import UNFINISHED, open_regular, retrying_open, sync_folder, write_whole
from fastpipe.generation.rows import Block

JOURNAL = "journal"
_MOST_NOTED = 20  # the journal lists the numbers of at most this many rows with NaN for each block


def data_file(folder: Path, shard: int) -> Path:
    """Return the path of the growing data file that becomes the finished file number ``shard``."""
    return folder / f"{shard:05d}.data"


def bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """Return an array's bytes, also for dtypes that Python's buffer protocol does not support."""
    if not array.size:
        return memoryview(b"")
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def write_all(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all bytes of ``view`` at an offset of a file."""
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a file and yield its descriptor; create the file if it is missing."""
    descriptor = retrying_open(open_regular, path, os.O_RDWR | os.O_CREAT)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Create or replace a file atomically, and flush the file to the disk."""
    unfinished = path.with_name(f"{path.name}{UNFINISHED}")
    write_whole(path, lambda file: file.write(content), sync=True, unfinished=unfinished)


class Region(NamedTuple):
    """The bytes of a file that hold the rows of one dataset."""

    begin: int  # offset of the first row, in bytes
    row_nbytes: int
    rows: int  # number of rows

    @property
    def end(self) -> int:
        return self.begin + self.rows * self.row_nbytes


@dataclass(frozen=True)
class Layout:
    """Describes where each row is stored in the growing files of a folder."""

    folder: Path
    rows: int  # number of rows in all files
    shard_rows: int  # number of rows in each file
    regions: Sequence[Sequence[Region]]  # for each file, the regions of its columns of fixed shape

    @property
    def shards(self) -> int:
        return -(-self.rows // self.shard_rows)

    def shard(self, number: int) -> range:
        """Return the indices of the rows in file ``number``."""
        first = number * self.shard_rows
        return range(first, min(first + self.shard_rows, self.rows))

    def pieces(self, first: int, last: int) -> Iterator[tuple[int, range, int]]:
        """Split the rows ``first`` to ``last - 1`` by file.

        For each file, yield the file's number, the range of rows, and the index of the first of these rows
        within the file.
        """
        for number in range(first // self.shard_rows, -(-last // self.shard_rows)):
            shard = self.shard(number)
            rows = range(max(first, shard.start), min(last, shard.stop))
            yield number, rows, rows.start - shard.start


class Spooled(NamedTuple):
    """The place in a spool (temporary file) of a block's values in one ragged column."""

    file: str  # name of the spool
    begin: int  # offset in the spool, in bytes
    nbytes: int  # bytes of the lengths and values
    crc: int  # CRC-32 of these bytes
    longest: int  # length of the longest row


@dataclass(frozen=True)
class Stored:
    """The journal's record of a block of stored rows."""

    first: int
    last: int  # index after the last row
    crcs: tuple[int, ...]  # a CRC-32 for each column of fixed shape
    spooled: tuple[Spooled, ...]  # the position in a spool for each ragged column
    failed: tuple[tuple[int, str], ...] = ()  # rows that are left out: index and error of each
    with_nan: int = 0  # number of rows with NaN
    first_with_nan: tuple[int, ...] = ()  # indices of the first rows with NaN, at most ``_MOST_NOTED``
    nbytes: int = 0  # bytes of the values

    def as_json(self) -> dict[str, Any]:
        """Return the record as JSON-compatible values, for the journal."""
        found: dict[str, Any] = {"rows": (self.first, self.last), "crcs": self.crcs, "nbytes": self.nbytes}
        nan = (self.with_nan, self.first_with_nan) if self.with_nan else ()
        more = {"spooled": self.spooled, "failed": self.failed, "nan": nan}
        return found | {name: value for name, value in more.items() if value}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Stored:
        """Return the record from the values that ``as_json`` returned."""
        with_nan, rows = content.get("nan", (0, ()))
        spooled = tuple(Spooled(*one) for one in content.get("spooled", ()))
        failed = tuple((index, text) for index, text in content.get("failed", ()))
        (first, last), crcs = content["rows"], tuple(content["crcs"])
        return cls(first, last, crcs, spooled, failed, with_nan, tuple(rows), content["nbytes"])


def described(block: Block, spooled: tuple[Spooled, ...] = ()) -> Stored:
    """Return the journal's record of a block, with checksums of the values."""
    with_nan = block.rows_with_nan()
    return Stored(
        block.first, block.last, tuple(zlib.crc32(bytes_of(one)) for one in block.fixed), spooled,
        tuple((one.index, one.error) for one in block.failed),
        len(with_nan), tuple(with_nan[:_MOST_NOTED]), nbytes=block.nbytes,
    )  # fmt: skip


class Writer:
    """Writes blocks of rows to the growing files.

    Threads may share a writer.  Each process has its own writer and its own spool (temporary file).
    """

    def __init__(self, layout: Layout) -> None:
        self._layout, self._lock = layout, threading.Lock()
        self._spool, self._spool_end = f"{secrets.token_hex(4)}.spool", 0
        self._synced: set[Path] = set()

    def put(self, block: Block) -> Stored:
        """Write a block and return its record for the journal.

        Raises an OSError if the block cannot be written, for instance because the disk is full.
        """
        for number, rows, at in self._layout.pieces(block.first, block.last):
            with opened(data_file(self._layout.folder, number)) as descriptor:
                for array, region in zip(block.fixed, self._layout.regions[number], strict=True):
                    some = array[rows.start - block.first : rows.stop - block.first]
                    write_all(descriptor, bytes_of(some), region.begin + at * region.row_nbytes)
        spooled = [self._put_ragged(*one) for one in zip(block.lengths, block.flat, strict=True)]
        return described(block, tuple(spooled))

    def sync(self, blocks: Sequence[Stored]) -> None:
        """Flush the files of blocks to the disk; any process may have written the blocks."""
        folder = self._layout.folder
        paths = {folder / spooled.file for one in blocks for spooled in one.spooled}
        for one in blocks:
            paths |= {data_file(folder, piece[0]) for piece in self._layout.pieces(one.first, one.last)}
        for path in sorted(paths):
            with opened(path) as descriptor:
                os.fsync(descriptor)
        if not paths <= self._synced:
            sync_folder(folder)
            self._synced |= paths

    def _put_ragged(self, lengths: npt.NDArray[np.int64], flat: npt.NDArray[Any]) -> Spooled:
        views = [bytes_of(lengths), bytes_of(flat)]
        nbytes, crc = sum(map(len, views)), 0
        with self._lock:
            begin, self._spool_end = self._spool_end, self._spool_end + nbytes
        at = begin
        with opened(self._layout.folder / self._spool) as descriptor:
            for view in views:
                write_all(descriptor, view, at)
                at, crc = at + len(view), zlib.crc32(view, crc)
        return Spooled(self._spool, begin, nbytes, crc, int(lengths.max(initial=0)))


class Journal:
    """The journal: a file that lists the blocks of rows in a folder, with one line for each block.

    A line is written after its block is on the disk.  So the blocks in the journal exist even after a crash
    of the machine.  Each line begins with a checksum of the rest of the line.  The checksum detects an
    incomplete line.

    Attributes:
        job: the description of the rows and files to make.  It is None in a new journal.
        is_naming: True if all rows are done, and the files are being renamed to their final names.
        damaged: number of lines that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / JOURNAL
        self.job: dict[str, Any] | None = None
        self.blocks: list[Stored] = []
        self.is_naming, self.damaged = False, 0
        self._descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT)
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def begin(self, job: dict[str, Any]) -> None:
        """Replace the content of the journal with ``job``, the description of the rows and files to make."""
        os.ftruncate(self._descriptor, 0)
        self.job, self.blocks, self.is_naming, self.damaged = job, [], False, 0
        self._append([{"job": job}])
        sync_folder(self._folder)

    def add(self, blocks: Sequence[Stored]) -> None:
        """Append lines for blocks whose data is on the disk."""
        self._append([one.as_json() for one in blocks])
        self.blocks += blocks

    def name(self) -> None:
        """Record that the files are being renamed to their final names."""
        self._append([{"naming": True}])
        self.is_naming = True

    def drop(self, blocks: Sequence[Stored]) -> None:
        """Remove ``blocks``, whose stored data does not match the journal, from the journal."""
        gone = {(one.first, one.last) for one in blocks}
        kept = [one for one in self.blocks if (one.first, one.last) not in gone]
        lines = ({"job": self.job}, *(one.as_json() for one in kept))
        replace_file(self._path, "".join(map(_line, lines)).encode())
        os.close(self._descriptor)
        self._descriptor = open_regular(self._path, os.O_RDWR)
        self.blocks = kept

    def close(self) -> None:
        """Close the file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _append(self, entries: Sequence[dict[str, Any]]) -> None:
        """Append the lines of all entries; on an error append none of them."""
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        data = memoryview("".join(map(_line, entries)).encode())
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except BaseException:  # also an interrupt, because lines after an incomplete line would be lost
            os.ftruncate(self._descriptor, end)
            raise

    def _read(self) -> None:
        """Read all lines, and cut off an incomplete last line; rows of damaged lines count as missing."""
        whole = 0
        with open(self._path, "rb", opener=open_regular) as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                is_whole = len(line) > 9 and f"{zlib.crc32(line[9:-1]):08x}".encode() == line[:8]
                entry = json.loads(line[9:-1]) if is_whole else None
                if not isinstance(entry, dict):
                    self.damaged += 1
                elif "job" in entry:
                    self.job = entry["job"]
                elif "naming" in entry:
                    self.is_naming = True
                else:
                    self.blocks.append(Stored.from_json(entry))
        os.ftruncate(self._descriptor, whole)


def _line(entry: dict[str, Any]) -> str:
    text = json.dumps(entry, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x} {text}\n"
