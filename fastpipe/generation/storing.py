"""Where the rows of blocks go, and what is noted of each block.

Rows of one shape are written to the place in the file that they will have.  Of ragged rows nobody knows
theirs before the longest is known: they wait in a *spool*, as lengths and values.  Workers of a cluster may
see the folder through caches of their own, which mix up what two of them write to one file; each of their
blocks is a file of its own, a *part*, which the parent puts into place.
"""

from __future__ import annotations

import io
import os
import secrets
import threading
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.files import is_tight, open_regular, retrying_open, sync_folder
from fastpipe.core.text import printable
from fastpipe.generation.blocks import Block, Failure
from fastpipe.generation.form import Form
from fastpipe.generation.layout import Region
from fastpipe.hdf5.checkpoints import write_all, write_whole

__all__ = ["Nowhere", "Parts", "Places", "Stored", "Stores", "bytes_of", "data_file"]

_MOST_OPEN = 64  # files, of which there may be thousands
_MOST_NOTED = 20  # rows with NaN of a block, by number


def data_file(folder: Path, shard: int) -> Path:
    """The file that grows to be a shard."""
    return folder / f"{shard:05d}.data"


@dataclass(frozen=True)
class Places:
    """Where rows are in the files.

    Attributes:
        folder: in which they grow.
        rows, shard_rows: of all, and of each file.
        regions: of each file, where the rows of each column of one shape are.
    """

    folder: Path
    rows: int
    shard_rows: int
    regions: Sequence[Sequence[Region]]

    def pieces(self, first: int, last: int) -> list[tuple[int, range, int]]:
        """The rows of a block by file: its number, the rows, and the first one's place in it."""
        found = []
        for number in range(first // self.shard_rows, -(-last // self.shard_rows)):
            shard = self.shard(number)
            rows = range(max(first, shard.start), min(last, shard.stop))
            found.append((number, rows, rows.start - shard.start))
        return found

    def shard(self, number: int) -> range:
        """The rows of a file."""
        first = number * self.shard_rows
        return range(first, min(first + self.shard_rows, self.rows))

    @property
    def shards(self) -> int:
        """How many files there are."""
        return -(-self.rows // self.shard_rows)


@dataclass(frozen=True)
class Spooled:
    """A ragged column of a block, in a spool.

    Attributes:
        file: the spool's name.
        begin, nbytes: where in it: int64 lengths, and the values.
        crc: of these bytes.
        longest: the greatest length.
    """

    file: str
    begin: int
    nbytes: int
    crc: int
    longest: int


@dataclass(frozen=True)
class Stored:
    """What is noted of a block that is stored.

    Attributes:
        first, last: its rows.
        crcs: of each column of one shape.
        spooled: of each ragged column.
        failed: rows that are left out, with what was wrong.
        with_nan: how many rows have NaN.
        first_with_nan: the first of them.
        part: the file that holds it; "" where it is in place.
        nbytes: of its values.
    """

    first: int
    last: int
    crcs: tuple[int, ...]
    spooled: tuple[Spooled, ...]
    failed: tuple[tuple[int, str], ...] = ()
    with_nan: int = 0
    first_with_nan: tuple[int, ...] = ()
    part: str = ""
    nbytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """For the journal."""
        found: dict[str, Any] = {"rows": [self.first, self.last], "crcs": self.crcs, "nbytes": self.nbytes}
        if self.spooled:
            found["spooled"] = [
                [one.file, one.begin, one.nbytes, one.crc, one.longest] for one in self.spooled
            ]
        if self.failed:
            found["failed"] = self.failed
        if self.with_nan:
            found["nan"] = [self.with_nan, self.first_with_nan]
        return found

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Stored:
        """As `as_json` gives it."""
        count, rows = content.get("nan", (0, ()))
        first, last = content["rows"]
        return cls(
            first, last, tuple(content["crcs"]), tuple(Spooled(*one) for one in content.get("spooled", ())),
            tuple((index, text) for index, text in content.get("failed", ())), count, tuple(rows),
            nbytes=content["nbytes"],
        )  # fmt: skip


class Stores:
    """Writes blocks into place.  Safe between threads; processes have one each.

    Args:
        places: where rows are.

    Its spool is a file of its own, made when it is needed.
    """

    def __init__(self, places: Places) -> None:
        self._places, self._lock = places, threading.Lock()
        self._files: dict[str, _Open] = {}  # the one that was used last is the last
        self._spool, self._spool_end = "", 0
        self._synced: set[str] = set()  # names

    def put(self, block: Block) -> Stored:
        """Write a block.

        Raises:
            OSError: the disk is full, for instance.
        """
        for number, rows, at in self._places.pieces(block.first, block.last):
            with self.file(data_file(self._places.folder, number).name) as descriptor:
                for array, region in zip(block.fixed, self._places.regions[number], strict=True):
                    some = array[rows.start - block.first : rows.stop - block.first]
                    write_all(descriptor, bytes_of(some), region.begin + at * region.row_nbytes)
        spooled = [self._put_ragged(*one) for one in zip(block.lengths, block.flat, strict=True)]
        return _noted(block, tuple(spooled))

    @contextmanager
    def file(self, name: str) -> Iterator[int]:
        """The descriptor of a file of the folder, which is made if it is missing; for a ``with`` block."""
        with self._lock:
            one, too_many = self._files.pop(name, None), 0
            if one is None:
                one = _Open(retrying_open(open_regular, self._places.folder / name, os.O_RDWR | os.O_CREAT))
                too_many = 1 if is_tight(one.descriptor) else max(len(self._files) + 1 - _MOST_OPEN, 0)
            self._files[name] = one
            one.users += 1
            idle = [key for key, other in self._files.items() if not other.users]
            for key in idle[:too_many]:
                os.close(self._files.pop(key).descriptor)
        try:
            yield one.descriptor
        finally:
            with self._lock:
                one.users -= 1

    def sync(self, blocks: Sequence[Stored]) -> None:
        """Have blocks on the disk, whichever process has written them."""
        names = {spooled.file for one in blocks for spooled in one.spooled}
        for one in blocks:
            pieces = self._places.pieces(one.first, one.last)
            names |= {data_file(self._places.folder, number).name for number, _, _ in pieces}
        for name in sorted(names):
            with self.file(name) as descriptor:
                os.fsync(descriptor)
        if not names <= self._synced:
            sync_folder(self._places.folder)
            self._synced |= names

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            files, self._files = self._files, {}
        for one in files.values():
            os.close(one.descriptor)

    def _put_ragged(self, lengths: npt.NDArray[np.int64], flat: npt.NDArray[Any]) -> Spooled:
        views = [bytes_of(lengths), bytes_of(flat)]
        nbytes, crc = sum(map(len, views)), 0
        with self._lock:
            self._spool = self._spool or f"{secrets.token_hex(4)}.spool"
            begin, self._spool_end = self._spool_end, self._spool_end + nbytes
        at = begin
        with self.file(self._spool) as descriptor:
            for view in views:
                write_all(descriptor, view, at)
                at, crc = at + len(view), zlib.crc32(view, crc)
        return Spooled(self._spool, begin, nbytes, crc, int(lengths.max(initial=0)))


@dataclass
class _Open:
    """A file that is open, and how many use it just now."""

    descriptor: int
    users: int = 0


class Parts:
    """Writes each block to a file of its own, whole, with checksums: an ``.npz`` of NumPy's.

    Args:
        folder: of the parts, which all workers see.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, block: Block) -> Stored:
        """Write a block.

        Raises:
            OSError: the disk is full, for instance.
        """
        content = io.BytesIO()
        np.savez(content, *block.fixed, *block.lengths, *block.flat)
        name = f"{block.first}-{block.last}-{secrets.token_hex(4)}.part"
        write_whole(self._folder / name, [content.getbuffer()])
        return replace(_noted(block, ()), part=name)

    @staticmethod
    def taken(folder: Path, form: Form, stored: Stored) -> Block:
        """Read a block back, and check it.

        Args:
            folder: of the parts.
            form: of samples.
            stored: what its worker told.

        Raises:
            OSError: it is not there, or not what was written.
        """
        path = folder / stored.part
        try:
            with open(path, "rb", opener=open_regular) as part, np.load(part, allow_pickle=False) as file:
                arrays = [file[f"arr_{number}"] for number in range(len(file.files))]
        except (zipfile.BadZipFile, KeyError, ValueError, EOFError) as error:
            raise OSError(printable(f"{path} holds other bytes than were written to it: {error}")) from error
        at, half = len(form.fixed), len(form.fixed) + len(form.ragged)
        failed = [Failure(index, text) for index, text in stored.failed]
        return Block(stored.first, stored.last, arrays[:at], arrays[at:half], arrays[half:], failed)


class Nowhere:
    """Keeps nothing: to see how fast blocks are made."""

    def put(self, block: Block) -> Stored:
        """What would be noted of the block."""
        return _noted(block, ())


def _noted(block: Block, spooled: tuple[Spooled, ...]) -> Stored:
    with_nan = block.rows_with_nan()
    return Stored(
        block.first, block.last, tuple(zlib.crc32(bytes_of(one)) for one in block.fixed), spooled,
        tuple((one.index, one.error) for one in block.failed),
        len(with_nan), tuple(with_nan[:_MOST_NOTED]), nbytes=block.nbytes,
    )  # fmt: skip


def bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """An array's bytes, also of types that Python's buffers do not know."""
    if not array.size:
        return memoryview(b"")
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)
