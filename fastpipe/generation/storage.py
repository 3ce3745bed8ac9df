"""Blocks on disk, and the journal of those that are complete.

A block's values are in a *spool*, one file for each process that writes: arrays one behind the other.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import threading
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.files import UNFINISHED, open_regular, retrying_open, sync_folder, write_whole
from fastpipe.generation.columns import Schema
from fastpipe.generation.rows import Block, Failure

JOURNAL = "journal"
_MOST_NOTED = 20  # rows with NaN of a block, by number


def replace_file(path: Path, content: bytes) -> None:
    """Make or replace a file, on the disk when this returns: all of it or nothing."""
    unfinished = path.with_name(f"{path.name}{UNFINISHED}")
    write_whole(path, lambda file: file.write(content), sync=True, unfinished=unfinished)


@dataclass(frozen=True)
class Stored:
    """What the journal says of a block."""

    first: int
    last: int  # the row behind its last one
    file: str  # the spool with its values
    begin: int
    nbytes: int
    crc: int
    longest: tuple[int, ...] = ()  # length of a row, for each ragged column
    failed: tuple[tuple[int, str], ...] = ()  # rows that are left out, with the error
    with_nan: int = 0  # rows
    first_with_nan: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For the journal."""
        found = asdict(self)
        return {"rows": [found.pop("first"), found.pop("last")], **found}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Stored:
        """As `as_json` gives it."""
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
        first, last = values.pop("rows")
        values["failed"] = tuple((index, text) for index, text in content["failed"])
        return cls(first, last, **values)

    def read(self, folder: Path) -> bytes:
        """Return the bytes of the block, which may be damaged, or fewer."""
        try:
            descriptor = open_regular(folder / self.file)
        except FileNotFoundError:
            return b""
        try:
            parts, left = [], self.nbytes
            while left and (part := os.pread(descriptor, left, self.begin + self.nbytes - left)):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)
        finally:
            os.close(descriptor)

    def is_whole(self, folder: Path) -> bool:
        """Whether the data is what the journal says."""
        try:
            data = self.read(folder)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False  # the disk has lost it; to be made again is what can be done
        return len(data) == self.nbytes and zlib.crc32(data) == self.crc

    def block(self, folder: Path, schema: Schema) -> Block:
        """Return the block."""
        data, at, rows = self.read(folder), 0, self.last - self.first

        def take(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
            nonlocal at
            array: npt.NDArray[Any] = np.empty(shape, dtype)
            view = _bytes_of(array)
            view[:], at = data[at : at + len(view)], at + len(view)
            return array

        fixed = [take((rows, *one.inner), one.element) for one in schema.fixed]
        lengths = [take((rows,), np.int64) for _ in schema.ragged]
        both = zip(schema.ragged, lengths, strict=True)
        flat = [take((int(some.sum()), *one.inner), one.element) for one, some in both]
        failed = [Failure(*one) for one in self.failed]
        return Block(self.first, self.last, fixed, lengths, flat, failed)


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """An array's bytes, also of types that Python's buffers do not know."""
    if not array.size:
        return memoryview(bytearray())
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def described(block: Block, file: str = "", begin: int = 0, crc: int = 0) -> Stored:
    """Return what the journal says of a block, which is in a spool."""
    with_nan = block.rows_with_nan()
    return Stored(
        block.first, block.last, file, begin, block.nbytes, crc,
        tuple(int(one.max(initial=0)) for one in block.lengths),
        tuple((one.index, one.error) for one in block.failed), len(with_nan), tuple(with_nan[:_MOST_NOTED]),
    )  # fmt: skip


class Writer:
    """Writes blocks in a folder.  Safe between threads; processes have one each, with a spool of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock = folder, threading.Lock()
        self._spool, self._end = f"{secrets.token_hex(4)}.spool", 0
        self._synced: set[str] = set()

    def put(self, block: Block) -> Stored:
        """Write a block; raises an OSError where the disk is full, for instance."""
        with self._lock:
            begin, self._end = self._end, self._end + block.nbytes
        at, crc = begin, 0
        descriptor = self._opened(self._spool)
        try:
            for view in map(_bytes_of, block.arrays):
                crc = zlib.crc32(view, crc)
                while view:
                    done = os.pwrite(descriptor, view, at)
                    view, at = view[done:], at + done
        finally:
            os.close(descriptor)
        return described(block, self._spool, begin, crc)

    def sync(self, blocks: Sequence[Stored]) -> None:
        """Wait until blocks are on the disk, whichever process has written them."""
        names = {one.file for one in blocks}
        for name in sorted(names):
            descriptor = self._opened(name)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        if not names <= self._synced:
            sync_folder(self.folder)
            self._synced |= names

    def _opened(self, name: str) -> int:
        return retrying_open(open_regular, self.folder / name, os.O_RDWR | os.O_CREAT)


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
                elif "file" in entry:
                    self.blocks.append(Stored.from_json(entry))
                else:  # of an earlier version
                    self.damaged += 1
        os.ftruncate(self._descriptor, whole)


def _line(entry: dict[str, Any]) -> str:
    text = json.dumps(entry, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x} {text}\n"
