"""Read and decode the chunks of an HDF5 dataset without the HDF5 library's lock."""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.files import open_file
from fastpipe.core.native import native
from fastpipe.core.reads import ChunkError, read_bytes
from fastpipe.errors import HDF5Error
from fastpipe.hdf5.filters import BLOSC2, decode_chunk, described
from fastpipe.hdf5.layout import Layout, grid_of, in_blocks
from fastpipe.hdf5.library import has_blosc2

UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]


class FileState(NamedTuple):
    """The identity of a file's content.

    The inode's time of change (ctime) is not part of the identity, because renaming a file changes the ctime
    and keeps the content.  If a process is writing the file in SWMR mode (single writer, multiple readers),
    only device and inode are compared, and the other fields are -1.
    """

    device: int
    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, status: os.stat_result, *, is_written: bool = False) -> FileState:
        """Return a file's state; set ``is_written`` if a SWMR writer may have the file open."""
        if is_written:
            return cls(status.st_dev, status.st_ino, -1, -1)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def fits(self, status: os.stat_result) -> bool:
        return FileState.of(status, is_written=self.size < 0) == self

    def check(self, where: int | str, shown: str) -> None:
        """Raise an ``HDF5Error`` if the file has changed; ``where`` is its path or its descriptor."""
        if not self.fits(os.stat(where)):
            raise self.changed(shown)

    def changed(self, shown: str) -> HDF5Error:
        return HDF5Error(
            f"{shown} has changed since it was opened; make the dataset anew when it is complete"
        )


class ChunkReader:
    """A reader of the chunks of one dataset, which must not have the layout kind ``"h5py"``.  Thread-safe.

    ``file`` is a shared ``native.DataFile``.  ``memory`` is a ``native.UnitMemory`` with decoded chunks for
    the next batches.  ``first_key`` is the key of the dataset's first chunk in ``memory``.
    ``kept`` is a ``native.KeptChunks``, which finds cached chunks.  ``dataset`` is the
    ``native.ChunkedDataset``, and ``nbytes`` is the size of a decoded chunk in bytes.
    """

    def __init__(
        self,
        layout: Layout,
        state: FileState,
        sample_dims: int = 1,
        *,
        file: Any = None,
        memory: Any = None,
        first_key: int = 0,
        kept: Any = None,
    ) -> None:
        self.layout, self._state = layout, state
        if any(step.code == BLOSC2 for step in layout.filters):
            has_blosc2()  # passes the functions of c-blosc2 to the native core, once in each process
        # A chunk side of 0, as in an empty dataset, would cause a division by zero.
        chunk = [max(side, 1) for side in layout.chunk]
        self.nbytes = layout.dtype.itemsize * math.prod(chunk)
        count = math.prod(grid_of(layout.shape, chunk))
        self.dataset = native.ChunkedDataset(
            file or data_file(layout.file, state), layout.shape, chunk, layout.dtype.itemsize, sample_dims,
            [described(step) for step in layout.filters], layout.offsets[:count], layout.sizes[:count],
            layout.masks[:count], layout.fill,
            layout.inside if layout.kind == "compact" and count else None, memory, first_key, kept,
        )  # fmt: skip

    def in_blocks(self) -> ChunkReader:
        """Return a reader that treats contiguous data as chunks of about a megabyte."""
        return ChunkReader(in_blocks(self.layout), self._state)

    def decode(self, numbers: Int64Array, out: UInt8Array) -> None:
        """Decode the chunks with these ``numbers`` into ``out``: uint8 (N, nbytes), C-contiguous.

        Each of these chunks must exist in the file.  Raises a ``ChunkError`` if the file is damaged, and an
        ``HDF5Error`` if the file was changed or replaced.
        """
        if self.layout.kind == "compact":
            out[:] = np.frombuffer(self.layout.inside, np.uint8)
            return
        done = self.dataset.decode(numbers, out)
        while done < len(numbers):  # the native core failed to decode this chunk
            out[done] = self.decode_alone(int(numbers[done]))
            done += 1 + self.dataset.decode(numbers[done + 1 :], out[done + 1 :])

    def decode_alone(self, number: int) -> UInt8Array:
        """Decode a chunk filter by filter, for a precise error message; return it as uint8 (nbytes,)."""
        layout = self.layout
        if layout.kind == "compact":
            return np.frombuffer(layout.inside, np.uint8)
        try:
            with open(layout.file, "rb", buffering=0, opener=open_file) as file:
                self._state.check(file.fileno(), layout.shown or layout.file)
                stored = read_bytes(file.fileno(), int(layout.offsets[number]), int(layout.sizes[number]))
            if layout.filters:
                return decode_chunk(stored, layout.filters, int(layout.masks[number]), self.nbytes)
        except ChunkError as error:
            raise ChunkError(f"{self.where(number)}: {error}") from None
        # The last block of contiguous data may be shorter, so zeros fill the rest.
        return np.frombuffer(stored[: self.nbytes].ljust(self.nbytes, b"\0"), np.uint8)

    def where(self, number: int) -> str:
        """Return a description of a chunk for messages."""
        layout, name = self.layout, self.layout.name
        if layout.kind != "chunked":
            return f"{layout.shown or layout.file}, dataset {name}"
        grid = grid_of(layout.shape, layout.chunk)
        corner = [int(at) for at in np.unravel_index(number, grid)]
        sides = list(zip(corner, layout.chunk, layout.shape, strict=True))
        if layout.members:  # the first dimension counts datasets
            name, sides, number = layout.members[corner[0]], sides[1:], number % max(1, math.prod(grid[1:]))
            if math.prod(grid[1:]) == 1:
                return f"{layout.shown or layout.file}, dataset {name}"
        box = ", ".join(f"{at * side}:{min((at + 1) * side, size)}" for at, side, size in sides)
        return f"{layout.shown or layout.file}, dataset {name}, chunk {number} at [{box}]"


def data_file(path: str, state: FileState) -> Any:
    return native.data_file(os.fsencode(path), state)
