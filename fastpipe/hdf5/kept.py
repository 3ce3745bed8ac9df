"""Decoded chunks that are kept from one epoch to the next, found by their file's state and their number."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastpipe.core.cache_store import EntryStore, aligned
from fastpipe.core.caches import open_store
from fastpipe.core.file_identity import FileIdentity, identify
from fastpipe.core.text import in_bytes
from fastpipe.hdf5.files import SampleFiles
from fastpipe.hdf5.layout import Layout, in_blocks
from fastpipe.options import Cache

__all__ = ["ChunkKeeper", "KeptChunks", "chunk_nbytes", "decoded_nbytes"]

UInt8Array = npt.NDArray[np.uint8]

_MOST_NBYTES = 128 << 20  # of chunks that a batch hands over at once, to be kept


class KeptChunks:
    """The decoded chunks of one dataset of a file, in a store that may be that of others as well.

    Args:
        store: where they are kept.
        file: the file's state, and what is made of it, the dataset's name included.
        count: chunks of the dataset.
        nbytes: of each, decoded.
        is_second_use: keep a chunk only when it is decoded for the second time.

    Attributes:
        native: the ``native.KeptChunks`` that finds them.
    """

    def __init__(
        self, store: EntryStore, file: FileIdentity, count: int, nbytes: int, *, is_second_use: bool
    ) -> None:
        self._store, self._file, self._nbytes = store, file, nbytes
        self._note = b"" if store.is_in_memory else file.note()
        self.native = store.chunks(file.digest, count, nbytes, marks=is_second_use)

    def look(self) -> int:
        """Learn of chunks that other processes have kept; how many bytes of others a batch may hand over."""
        self._store.refreshed()
        is_wanted = self._file.is_settled and self._store.has_room(self._nbytes)
        return _MOST_NBYTES if is_wanted else 0

    def keep(self, numbers: Sequence[int], chunks: Sequence[UInt8Array]) -> None:
        """Keep decoded chunks, as far as there is room.

        Args:
            numbers: of the chunks.
            chunks: uint8 (nbytes,) each.
        """
        found = {self._digest(number): chunk for number, chunk in zip(numbers, chunks, strict=True)}
        if len(found) > 1 and self._store.put_all(list(found), list(found.values()), self._note) >= 0:
            return
        for digest, chunk in found.items():  # as many as there is room for
            self._store.put(digest, chunk.reshape(1, -1, 1), note=self._note)

    def _digest(self, number: int) -> bytes:
        return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16, key=self._file.digest).digest()


class ChunkKeeper:
    """Decides where the decoded chunks of some files are kept.

    Args:
        option: the dataset's.
        files: its files.

    Attributes:
        store: where; None for nowhere.
        note: that and why, in words.
        keeps_all: whether all of them will be there, sooner or later.
    """

    def __init__(self, option: Cache, files: SampleFiles) -> None:
        self.store: EntryStore | None = None
        self._is_auto = option.where == "auto"
        layouts = [layout for file in files.files for layout in file.layouts]
        nbytes = decoded_nbytes([layout for layout in layouts if self._may_keep(layout)])
        self.keeps_all = False
        if option.where == "off":
            self.note = "not kept (cache='off')"
        elif not nbytes:
            self.note = "none, as samples are read from the file as they are"
        else:
            store = open_store(option)
            if store is None:
                self.note = "not kept, as a cache cannot be had here"
                return
            self.keeps_all = nbytes <= store.max_bytes
            whole, room = in_bytes(nbytes), in_bytes(store.max_bytes)
            if self._is_auto and not self.keeps_all:
                self.note = f"not kept, as all of them are {whole}, and there is room for {room}"
                return
            self.store = store
            where = "memory" if store.is_in_memory else "files"
            when = ", from their second use on" if self._is_auto else ""
            much = whole if self.keeps_all else f"as many as fit: {room} of {whole}"
            self.note = f"kept in {where}, {much}{when}"

    def of(self, layout: Layout) -> KeptChunks | None:
        """Where the decoded chunks of one dataset of a file are kept, or None."""
        if self.store is None or not self._may_keep(layout):
            return None
        tag = hashlib.sha256(os.fsencode(f"hdf5 2 {layout.kind} {layout.name}")).digest()
        blocks, file = in_blocks(layout), identify(layout.file, tag)
        return KeptChunks(
            self.store, file, len(blocks.offsets), chunk_nbytes(blocks), is_second_use=self._is_auto
        )

    def _may_keep(self, layout: Layout) -> bool:
        """Whether there is something to gain: by itself fastpipe keeps only what has to be decoded, as the
        system keeps what it read from files."""
        if layout.kind in ("h5py", "compact"):
            return False
        return bool(layout.filters) or not self._is_auto


def decoded_nbytes(layouts: list[Layout]) -> int:
    """Bytes that all chunks take, decoded, where they are kept in memory."""
    return sum(len(layout.offsets) * aligned(chunk_nbytes(layout)) for layout in layouts)


def chunk_nbytes(layout: Layout) -> int:
    """Bytes of a chunk, decoded."""
    return layout.dtype.itemsize * math.prod(max(side, 1) for side in layout.chunk)
