"""Where the decoded chunks of a dataset's files are kept."""

from __future__ import annotations

import hashlib
import math

from fastpipe._sizes import in_bytes
from fastpipe.cache.chunks import ChunkCache, room_for
from fastpipe.cache.identity import identify
from fastpipe.cache.places import open_store
from fastpipe.cache.store import EntryStore
from fastpipe.options import Cache
from fastpipe.read.hdf5.files import SampleFiles
from fastpipe.read.hdf5.layout import Layout, in_blocks

__all__ = ["ChunkKeeper", "chunk_nbytes", "decoded_nbytes"]


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

    def of(self, descriptor: int, layout: Layout) -> ChunkCache | None:
        """Where the decoded chunks of one dataset of an open file are kept, or None."""
        if self.store is None or not self._may_keep(layout):
            return None
        tag = hashlib.sha256(f"hdf5 2 {layout.kind} {layout.name}".encode()).digest()
        file = identify(layout.file, tag, descriptor)
        return ChunkCache(self.store, file, len(in_blocks(layout).offsets), is_second_use=self._is_auto)

    def _may_keep(self, layout: Layout) -> bool:
        """Whether there is something to gain: by itself fastpipe keeps only what has to be decoded, as the
        system keeps what it read from files."""
        if layout.kind in ("h5py", "compact"):
            return False
        return bool(layout.filters) or not self._is_auto


def decoded_nbytes(layouts: list[Layout]) -> int:
    """Bytes of all chunks, decoded, where they are kept."""
    return sum(room_for(len(layout.offsets), chunk_nbytes(layout)) for layout in layouts)


def chunk_nbytes(layout: Layout) -> int:
    """Bytes of a chunk, decoded."""
    return layout.dtype.itemsize * math.prod(layout.chunk)
