"""Zarr arrays in folders of this machine, read without a library in between.

Of a chunk that Blosc compressed, only those of its blocks are read and decompressed that a patch needs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastpipe._sizes import in_bytes
from fastpipe.read.chunks.errors import ChunkError
from fastpipe.read.chunks.scratch import STORED, scratch
from fastpipe.read.chunks.stored import read_fully
from fastpipe.read.volumes import blosc
from fastpipe.read.volumes.codecs import DECODE
from fastpipe.read.volumes.grid import UnitGrid
from fastpipe.read.volumes.state import folder_state
from fastpipe.read.volumes.volume import DamagedUnitError, UnitReader, Volume
from fastpipe.read.volumes.zarr_metadata import ZarrArray

__all__ = ["ZarrVolume"]

UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

_LOOKED_AT = 64  # chunks, to find one that was written
_LEAST_UNIT = 1 << 17  # bytes of a part of a chunk that is remembered by itself


class ZarrVolume(Volume, UnitReader):
    """An array of the kind that ``zarr_array`` describes.

    Args:
        path: its folder.
        array: what its metadata say.
    """

    def __init__(self, path: str, array: ZarrArray) -> None:
        self.name, self._array = path, array
        self.shape, self.dtype = array.shape, array.dtype
        self._chunks = UnitGrid(array.shape, array.chunk)
        self._chunk_nbytes = math.prod(array.chunk) * array.dtype.itemsize
        # Units are slabs of a chunk along its first dimension of more than one element, where it has one.
        self._axis = next((dim for dim, side in enumerate(array.chunk) if side > 1), 0)
        slab = self._slab()
        unit = [*array.chunk[: self._axis], slab, *array.chunk[self._axis + 1 :]] if array.chunk else []
        self.grid = UnitGrid(array.shape, unit)
        self._pieces = array.chunk[self._axis] // slab if array.chunk else 1
        self.how = self._describe()

    def _metadata_file(self) -> str:
        file = os.path.join(self.name, "zarr.json")
        return file if os.path.exists(file) else os.path.join(self.name, ".zarray")

    def _describe(self) -> str:
        array = self._array
        codec = "not compressed" if array.codec == "none" else array.codec
        parts = f", in {self._pieces} parts" if self._pieces > 1 else ""
        chunk = "×".join(map(str, array.chunk))
        return f"Zarr, chunks of {chunk} ({in_bytes(self._chunk_nbytes)}; {codec}){parts}"

    def _slab(self) -> int:
        """How much of a chunk can be decoded by itself, along the first dimension that it has."""
        array = self._array
        if not array.chunk:
            return 1
        side = array.chunk[self._axis]
        row = self._chunk_nbytes // side
        if array.codec == "blosc":
            header = self._some_header()
            if header is None or row % header.itemsize:
                return side
            least = header.block
        elif array.codec == "none":
            least = row
        else:
            return side
        wanted = max(least, _LEAST_UNIT)
        # A slab is to consist of whole blocks, as otherwise some would be decompressed twice.
        for slab in range(1, side):
            if side % slab == 0 and slab * row >= wanted and (slab * row) % least == 0:
                return slab
        return side

    def _some_header(self) -> blosc.BloscHeader | None:
        """The header of a chunk that was written: all of an array's are compressed alike."""
        step = max(1, self._chunks.count // _LOOKED_AT)
        for number in range(0, self._chunks.count, step):
            try:
                with open(self._file(number), "rb") as file:
                    return blosc.BloscHeader.of(file.read(blosc.HEADER_NBYTES), self._chunk_nbytes)
            except (FileNotFoundError, ChunkError):
                continue
        return None

    def _file(self, chunk: int) -> str:
        return os.path.join(self.name, *self._array.key(self._chunks.place(chunk)).split("/"))

    @property
    def fill(self) -> bytes:
        """As its metadata say."""
        return self._array.fill

    def open(self) -> UnitReader:
        """Nothing stays open: a chunk is a file."""
        return self

    def stored_in(self, numbers: Int64Array) -> Int64Array:
        """The chunks of units."""
        inner = math.prod(self.grid.counts[self._axis + 1 :])
        along = self.grid.counts[self._axis] if self.grid.counts else 1
        rest, last = np.divmod(numbers, inner)
        outer, at = np.divmod(rest, along)
        chunks: Int64Array = (outer * self._along_chunks + at // self._pieces) * inner + last
        return chunks

    @property
    def _along_chunks(self) -> int:
        return self._chunks.counts[self._axis] if self._chunks.counts else 1

    def _pieces_of(self, numbers: Int64Array) -> Int64Array:
        inner = math.prod(self.grid.counts[self._axis + 1 :])
        along = self.grid.counts[self._axis] if self.grid.counts else 1
        pieces: Int64Array = numbers // inner % along % self._pieces
        return pieces

    def state(self) -> tuple[str, str]:
        """The state of its metadata and of all of its chunks: some seconds for a million of them."""
        count, nbytes, latest = folder_state(self.name)
        file = self._metadata_file()
        return file, f"zarr {os.path.abspath(self.name)} {count} files, {nbytes} bytes, {latest} ns"

    def read(self, numbers: Int64Array, outs: Sequence[UInt8Array]) -> None:
        """Read units, those of one chunk together."""
        chunks, pieces = self.stored_in(numbers), self._pieces_of(numbers) * self.unit_nbytes
        for chunk in np.unique(chunks).tolist():
            which = np.flatnonzero(chunks == chunk).tolist()
            self._read_chunk(chunk, [(int(pieces[at]), outs[at]) for at in which])

    def _read_chunk(self, chunk: int, parts: Sequence[tuple[int, UInt8Array]]) -> None:
        """Read parts of a chunk: for each where it begins, and its memory."""
        path = self._file(chunk)
        try:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except FileNotFoundError:
            self._check_still_there()
            fill = np.frombuffer(self._array.fill, np.uint8)
            for _, out in parts:
                out.reshape(-1, len(fill))[:] = fill
            return
        try:
            self._decode(descriptor, parts)
        except (ValueError, RuntimeError) as error:
            raise DamagedUnitError(f"{path}, the chunk at {self._where(chunk)}: {error}") from None
        except OSError as error:
            error.filename = error.filename or path
            raise
        finally:
            os.close(descriptor)

    def _check_still_there(self) -> None:
        """A chunk that is not there was never written, unless all of the volume is gone."""
        os.stat(self._metadata_file())

    def _where(self, chunk: int) -> str:
        box = ", ".join(f"{part.start}:{part.stop}" for part in self._chunks.box(chunk))
        return f"[{box}]"

    def _decode(self, descriptor: int, parts: Sequence[tuple[int, UInt8Array]]) -> None:
        size, codec = os.fstat(descriptor).st_size, self._array.codec
        if codec == "blosc":
            blosc.read_parts(descriptor, size, self._chunk_nbytes, parts, scratch(STORED, size))
            return
        if codec == "none":
            if size != self._chunk_nbytes:
                raise ValueError(f"it has {size} bytes in the place of {self._chunk_nbytes}")
            for begin, out in parts:
                read_fully(descriptor, out, begin)
            return
        ((_, out),) = parts
        stored = scratch(STORED, size)
        read_fully(descriptor, stored, 0)
        DECODE[codec](stored, out)
