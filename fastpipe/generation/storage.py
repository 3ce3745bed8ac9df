"""Blocks on disk, and the journal of those that are complete.

Rows of one shape are written to the place in the file that they will have.  The place of ragged rows depends
on the longest, which is unknown until the end: they wait in a *spool*, as lengths and values.
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
_MOST_NOTED = 20  # rows with NaN of a block, by number


def data_file(folder: Path, shard: int) -> Path:
    """Return the file that grows to be a shard."""
    return folder / f"{shard:05d}.data"


def bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """Return an array's bytes, also of types that Python's buffers do not know."""
    if not array.size:
        return memoryview(b"")
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def write_all(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all bytes at a place of a file."""
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Give the descriptor of a file, which is made if it is missing."""
    descriptor = retrying_open(open_regular, path, os.O_RDWR | os.O_CREAT)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Make or replace a file, on the disk when this returns: all of it or nothing."""
    unfinished = path.with_name(f"{path.name}{UNFINISHED}")
    write_whole(path, lambda file: file.write(content), sync=True, unfinished=unfinished)


class Region(NamedTuple):
    """Where a dataset's rows are in a file, in bytes."""

    begin: int
    row_nbytes: int
    rows: int

    @property
    def end(self) -> int:
        return self.begin + self.rows * self.row_nbytes


@dataclass(frozen=True)
class Layout:
    """Where rows are in the files that grow in a folder."""

    folder: Path
    rows: int
    shard_rows: int  # of each file
    regions: Sequence[Sequence[Region]]  # for each file those of the columns of one shape

    @property
    def shards(self) -> int:
        return -(-self.rows // self.shard_rows)

    def shard(self, number: int) -> range:
        """The rows of a file."""
        first = number * self.shard_rows
        return range(first, min(first + self.shard_rows, self.rows))

    def pieces(self, first: int, last: int) -> Iterator[tuple[int, range, int]]:
        """The rows of a block by file: its number, the rows, and the first one's place in it."""
        for number in range(first // self.shard_rows, -(-last // self.shard_rows)):
            shard = self.shard(number)
            rows = range(max(first, shard.start), min(last, shard.stop))
            yield number, rows, rows.start - shard.start


class Spooled(NamedTuple):
    """A ragged column of a block in a spool."""

    file: str
    begin: int
    nbytes: int
    crc: int
    longest: int  # length of a row


@dataclass(frozen=True)
class Stored:
    """What the journal says of a block."""

    first: int
    last: int  # the row behind its last one
    crcs: tuple[int, ...]  # of each column of one shape
    spooled: tuple[Spooled, ...]
    failed: tuple[tuple[int, str], ...] = ()  # rows that are left out, with the error
    with_nan: int = 0  # rows
    first_with_nan: tuple[int, ...] = ()
    nbytes: int = 0  # of its values

    def as_json(self) -> dict[str, Any]:
        """For the journal."""
        found: dict[str, Any] = {"rows": (self.first, self.last), "crcs": self.crcs, "nbytes": self.nbytes}
        nan = (self.with_nan, self.first_with_nan) if self.with_nan else ()
        more = {"spooled": self.spooled, "failed": self.failed, "nan": nan}
        return found | {name: value for name, value in more.items() if value}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Stored:
        """As `as_json` gives it."""
        with_nan, rows = content.get("nan", (0, ()))
        spooled = tuple(Spooled(*one) for one in content.get("spooled", ()))
        failed = tuple((index, text) for index, text in content.get("failed", ()))
        (first, last), crcs = content["rows"], tuple(content["crcs"])
        return cls(first, last, crcs, spooled, failed, with_nan, tuple(rows), content["nbytes"])


def described(block: Block, spooled: tuple[Spooled, ...] = ()) -> Stored:
    """Return what the journal says of a block."""
    with_nan = block.rows_with_nan()
    return Stored(
        block.first, block.last, tuple(zlib.crc32(bytes_of(one)) for one in block.fixed), spooled,
        tuple((one.index, one.error) for one in block.failed),
        len(with_nan), tuple(with_nan[:_MOST_NOTED]), nbytes=block.nbytes,
    )  # fmt: skip


class Writer:
    """Writes blocks into place.  Safe between threads; processes have one each, with a spool of its own."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._lock = layout, threading.Lock()
        self._spool, self._spool_end = f"{secrets.token_hex(4)}.spool", 0
        self._synced: set[Path] = set()

    def put(self, block: Block) -> Stored:
        """Write a block; raises an OSError where the disk is full, for instance."""
        for number, rows, at in self._layout.pieces(block.first, block.last):
            with opened(data_file(self._layout.folder, number)) as descriptor:
                for array, region in zip(block.fixed, self._layout.regions[number], strict=True):
                    some = array[rows.start - block.first : rows.stop - block.first]
                    write_all(descriptor, bytes_of(some), region.begin + at * region.row_nbytes)
        spooled = [self._put_ragged(*one) for one in zip(block.lengths, block.flat, strict=True)]
        return described(block, tuple(spooled))

    def sync(self, blocks: Sequence[Stored]) -> None:
        """Wait until blocks are on the disk, whichever process has written them."""
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
    """The journal of a folder: a line for each block, written after the block is on the disk.

    So what it says is there after the machine failed, too.  A line begins with the checksum of the rest, so
    that one that was cut off is not taken for a whole one.

    Attributes:
        job: what is made; None in a new journal.
        is_naming: whether all is done, and files are getting their names.
        damaged: how many lines cannot be read any more.
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
        """Begin anew."""
        os.ftruncate(self._descriptor, 0)
        self.job, self.blocks, self.is_naming, self.damaged = job, [], False, 0
        self._append([{"job": job}])
        sync_folder(self._folder)

    def add(self, blocks: Sequence[Stored]) -> None:
        """Add blocks whose data is on the disk."""
        self._append([one.as_json() for one in blocks])
        self.blocks += blocks

    def name(self) -> None:
        """Note that files are getting their names."""
        self._append([{"naming": True}])
        self.is_naming = True

    def drop(self, blocks: Sequence[Stored]) -> None:
        """Remove blocks that are not there as the journal says."""
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
        """Write lines behind the others, or none."""
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        data = memoryview("".join(map(_line, entries)).encode())
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except BaseException:  # an interrupt, too: lines behind half a line are lost
            os.ftruncate(self._descriptor, end)
            raise

    def _read(self) -> None:
        """Read all lines; cut off a last one that is not whole.  Rows of damaged ones are missing."""
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
