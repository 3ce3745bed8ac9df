"""Zarr arrays in folders of this machine, and in stores of objects, read without a library in between.

Of a chunk in a file that Blosc compressed, only those of its blocks are read and decompressed that a patch
needs.  An object is fetched as a whole, and then all of it is decoded: that costs less than it took to come.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.core.files import open_file
from fastpipe.core.native import native
from fastpipe.core.reads import ChunkError, read_fully
from fastpipe.core.text import in_bytes
from fastpipe.core.types import ChunkObjects
from fastpipe.volumes.codecs import BLOSC_HEADER, BloscHeader, decode
from fastpipe.volumes.volume import DamagedUnitError, UnitGrid, UnitReader, Volume, box_text, folder_state
from fastpipe.volumes.zarr_metadata import ZarrArray, even_parts

__all__ = ["ZarrVolume"]

UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

_LOOKED_AT = 64  # chunks, to find one that was written
_LEAST_UNIT = 1 << 17  # bytes of a part of a chunk that is remembered by itself
_LARGEST_CHUNK = 1 << 48  # bytes: no machine holds more, and there is no file of it
_OVERHEAD = 1 << 16  # that a stored chunk may be larger than twice its content


class ZarrVolume(Volume, UnitReader):
    """An array of the kind that ``zarr_array`` describes.

    Args:
        path: its folder, or its URL.
        array: what its metadata say.
        objects: its chunks, where they are objects; None where they are files in the folder.

    Attributes:
        objects: as given.
        chunks: its chunks.
    """

    def __init__(self, path: str, array: ZarrArray, objects: ChunkObjects | None = None) -> None:
        self.name, self._array, self.objects = path, array, objects
        self.shape, self.dtype = array.shape, array.dtype
        self.chunks = UnitGrid(array.shape, array.chunk)
        self._chunk_nbytes = array.chunk_nbytes
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
        how = f"Zarr, chunks of {chunk} ({in_bytes(self._chunk_nbytes)}; {codec}){parts}"
        return how if self.objects is None else f"{how}, {self.objects.how}"

    def _slab(self) -> int:
        """How much of a chunk can be decoded by itself, along the first dimension that it has."""
        array = self._array
        if not array.chunk:
            return 1
        side = array.chunk[self._axis]
        row = self._chunk_nbytes // side
        # Of objects never a part, also where they are staged: the order of a tour must not depend on that.
        if self.objects is not None or self._chunk_nbytes > _LARGEST_CHUNK:
            return side
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
        slabs = (slab * row for slab in even_parts(side))
        return next((slab // row for slab in slabs if slab >= wanted and slab % least == 0), side)

    def _some_header(self) -> BloscHeader | None:
        """The header of a chunk that was written: all of an array's are compressed alike."""
        step = max(1, self.chunks.count // _LOOKED_AT)
        for number in range(0, self.chunks.count, step):
            try:
                with open(self._file(number), "rb", opener=open_file) as file:
                    return BloscHeader.of(file.read(BLOSC_HEADER), self._chunk_nbytes)
            except (FileNotFoundError, ChunkError):
                continue
        return None

    def _file(self, chunk: int) -> str:
        return os.path.join(self.name, *self._array.key(self.chunks.place(chunk)).split("/"))

    @property
    def fill(self) -> bytes:
        """As its metadata say."""
        return self._array.fill

    def native_source(self) -> Any | None:
        """Its folder; None where its chunks are objects."""
        array = self._array
        if self.objects is not None:
            return None
        return native.volume_in_files(
            os.fsencode(os.path.join(self.name, "")), os.fsencode(self._metadata_file()), array.prefix,
            array.separator, array.shape, array.chunk, array.dtype.itemsize, array.codec, array.fill,
        )  # fmt: skip

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
        return self.chunks.counts[self._axis] if self.chunks.counts else 1

    def _pieces_of(self, numbers: Int64Array) -> Int64Array:
        inner = math.prod(self.grid.counts[self._axis + 1 :])
        along = self.grid.counts[self._axis] if self.grid.counts else 1
        pieces: Int64Array = numbers // inner % along % self._pieces
        return pieces

    def state(self) -> tuple[str, str]:
        """The state of its metadata and of all of its chunks: some seconds for a million of them."""
        if self.objects is not None:
            return "", f"zarr {self.objects.state}"
        count, nbytes, latest = folder_state(self.name)
        file = self._metadata_file()
        return file, f"zarr {os.path.abspath(self.name)} {count} files, {nbytes} bytes, {latest} ns"

    def read(self, numbers: Int64Array, outs: Sequence[UInt8Array]) -> None:
        """Read units, those of one chunk together."""
        chunks, pieces = self.stored_in(numbers), self._pieces_of(numbers) * self.unit_nbytes
        several = np.unique(chunks).tolist()
        with nullcontext() if self.objects is None else self.objects.together(several):
            for chunk in several:
                which = np.flatnonzero(chunks == chunk).tolist()
                self._read_chunk(chunk, [(int(pieces[at]), outs[at]) for at in which])

    def _read_chunk(self, chunk: int, parts: Sequence[tuple[int, UInt8Array]]) -> None:
        """Read parts of a chunk: for each where it begins, and its memory."""
        if self.objects is not None:
            self._read_object(self.objects, chunk, parts)
            return
        path = self._file(chunk)
        try:
            descriptor = open_file(path)
        except FileNotFoundError:
            self._check_still_there()
            self._fill(parts)
            return
        try:
            self._decode(descriptor, parts)
        except ChunkError as error:
            raise DamagedUnitError(f"{path}, the chunk at {self._where(chunk)}: {error}") from None
        except OSError as error:
            error.filename = error.filename or path
            raise
        finally:
            os.close(descriptor)

    def _read_object(
        self, objects: ChunkObjects, chunk: int, parts: Sequence[tuple[int, UInt8Array]]
    ) -> None:
        try:
            data = objects.read(chunk)
            if data is None:
                self._fill(parts)
            else:
                self._decode_all(data, parts)
            return
        except FileNotFoundError:  # what was never written had not been listed
            why = "it was listed, and is not there any more"
        except ChunkError as error:
            why = str(error)
        raise DamagedUnitError(f"{objects.path(chunk)}, the chunk at {self._where(chunk)}: {why}")

    def _decode_all(self, stored: Any, parts: Sequence[tuple[int, UInt8Array]]) -> None:
        if len(parts) == 1 and len(parts[0][1]) == self._chunk_nbytes:
            decode(self._array.codec, stored, parts[0][1])
            return
        whole = np.empty(self._chunk_nbytes, np.uint8)
        decode(self._array.codec, stored, whole)
        for begin, out in parts:
            out[:] = whole[begin : begin + len(out)]

    def _fill(self, parts: Sequence[tuple[int, UInt8Array]]) -> None:
        fill = np.frombuffer(self._array.fill, np.uint8)
        for _, out in parts:
            out.reshape(-1, len(fill))[:] = fill

    def _check_still_there(self) -> None:
        """A chunk that is not there was never written, unless all of the volume is gone."""
        os.stat(self._metadata_file())

    def _where(self, chunk: int) -> str:
        return box_text(self.chunks.box(chunk))

    def _decode(self, descriptor: int, parts: Sequence[tuple[int, UInt8Array]]) -> None:
        size = os.fstat(descriptor).st_size
        if size > 2 * self._chunk_nbytes + _OVERHEAD:  # before memory is taken for it
            raise ChunkError(f"it has {size} bytes, more than any chunk of {self._chunk_nbytes}")
        stored = np.empty(size, np.uint8)
        read_fully(descriptor, stored, 0)
        self._decode_all(stored, parts)
