"""Cache decoded chunks across epochs, and keep decoded chunks in memory while their samples are needed."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.cache_store import EntryStore, aligned
from fastpipe.core.caches import open_cache_store
from fastpipe.core.file_identity import FileIdentity, identify
from fastpipe.core.shared_chunks import UnitFile, private_units
from fastpipe.core.text import in_bytes
from fastpipe.hdf5.files import SampleFiles
from fastpipe.hdf5.layout import Layout, in_blocks
from fastpipe.options import Cache

UInt8Array = npt.NDArray[np.uint8]

_log = logging.getLogger("fastpipe.cache")


_MOST_NBYTES = 128 << 20  # the most bytes of chunks that one batch adds to the cache


class CachedChunks:
    """The cached chunks of one dataset of a file, in a store that several processes may share.

    ``file`` identifies the dataset and the state of its file.  The attribute ``native`` is a
    ``native.KeptChunks``, which finds cached chunks.  With ``is_second_use``, a chunk is cached only when it
    is decoded for the second time.
    """

    def __init__(
        self, store: EntryStore, file: FileIdentity, count: int, nbytes: int, *, is_second_use: bool
    ) -> None:
        self._store, self._file, self._nbytes = store, file, nbytes
        self._note = b"" if store.is_in_memory else file.note()
        self.native = store.chunks(file.digest, count, nbytes, marks=is_second_use)

    def look(self) -> int:
        """Find chunks cached by other processes; return how many bytes a batch may add to the cache."""
        self._store.refreshed()
        is_wanted = self._file.is_settled and self._store.has_room(self._nbytes)
        return _MOST_NBYTES if is_wanted else 0

    def keep(self, numbers: Sequence[int], chunks: Sequence[UInt8Array]) -> None:
        """Cache decoded ``chunks``, each uint8 (nbytes,), under their ``numbers`` until the store is full."""
        found = dict(zip(map(self._digest, numbers), chunks, strict=True))
        if len(found) > 1 and self._store.put_all(list(found), list(found.values()), self._note) >= 0:
            return
        for digest, chunk in found.items():
            self._store.put(digest, chunk.reshape(1, -1, 1), note=self._note)

    def _digest(self, number: int) -> bytes:
        return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16, key=self._file.digest).digest()


class ChunkCache:
    """The cache for the decoded chunks of some files.

    ``store`` contains the cached chunks.  If nothing is cached, ``store`` is None.  ``note`` is a text that
    says what is cached and where, or why nothing is cached.
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
            store = open_cache_store(option)
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

    def of(self, layout: Layout) -> CachedChunks | None:
        if self.store is None or not self._may_keep(layout):
            return None
        about = os.fsencode(f"hdf5 2 {layout.kind} {layout.name}")
        if layout.members:  # other keys may join other datasets under this name
            about += layout.offsets.tobytes()
        tag = hashlib.sha256(about).digest()
        blocks, file = in_blocks(layout), identify(layout.file, tag)
        return CachedChunks(
            self.store, file, len(blocks.offsets), chunk_nbytes(blocks), is_second_use=self._is_auto
        )

    def _may_keep(self, layout: Layout) -> bool:
        """Return True if the chunks of a layout may be cached.

        With ``cache="auto"``, only compressed chunks are cached, because the operating system already caches
        the bytes of files.
        """
        if layout.kind in ("h5py", "compact"):
            return False
        return bool(layout.filters) or not self._is_auto


def decoded_nbytes(layouts: list[Layout]) -> int:
    """Return the bytes that the decoded chunks of all ``layouts`` take in a cache."""
    return sum(len(layout.offsets) * aligned(chunk_nbytes(layout)) for layout in layouts)


def chunk_nbytes(layout: Layout) -> int:
    return layout.dtype.itemsize * math.prod(max(side, 1) for side in layout.chunk)


# The threads of a process share a ``ChunkMemory``.  The worker processes of a loader share the chunks of a
# shuffle window through ``SharedChunks``, because each worker makes different batches from these chunks.

_LEAST_NBYTES = 1 << 22  # the least memory for decoded chunks, which matters without a shuffle window
_LEAST_SHARED = 1 << 15  # bytes of a chunk; sharing a smaller chunk takes longer than decoding it
_WHY = "worker processes decode their chunks each for itself: %s"


class _Chunks(NamedTuple):
    total: int
    first_keys: dict[tuple[int, int], int]  # by (file, dataset): the key of the first chunk in the memory
    in_group: int  # the most chunks that a group of samples needs


def _sizes(files: SampleFiles, leading: int) -> dict[int, _Chunks]:
    """Count the chunks with filters by decoded size; dataset ``leading`` defines the groups of samples."""
    found: dict[int, _Chunks] = {}
    samples = files.samples_in_group(leading)
    for number, file in enumerate(files.files):
        for place, layout in enumerate(file.layouts):
            if not layout.filters:
                continue
            nbytes, geometry = chunk_nbytes(layout), file.geometry(place)
            size = found.get(nbytes, _Chunks(0, {}, 0))
            size.first_keys[number, place] = size.total
            more = geometry.parts * -(-samples // max(geometry.group_size, 1)) if number == 0 else 0
            found[nbytes] = _Chunks(size.total + len(layout.offsets), size.first_keys, size.in_group + more)
    return found


class SharedChunks:
    """Shared memory for decoded chunks, created by the parent of worker processes.  Picklable.

    A group consists of the samples that lie in the same chunks of the dataset with index ``leading``.  The
    memory has room for the chunks of ``groups`` groups.
    """

    def __init__(self, files: SampleFiles, leading: int, groups: int) -> None:
        self._files: dict[int, UnitFile | None] = {}
        try:
            for nbytes, size in _sizes(files, leading).items():
                if nbytes >= _LEAST_SHARED and size.total:
                    self._files[nbytes] = UnitFile(size.total, max(1, groups * size.in_group), nbytes)
        except OSError as error:
            _log.info(_WHY, error)

    def opened(self) -> Iterator[tuple[int, Any]]:
        """Yield each chunk size in bytes, and this process's ``native.UnitMemory`` for such chunks."""
        try:
            for nbytes, file in self._files.items():
                if file is not None:
                    yield nbytes, file.opened()
        except OSError as error:
            _log.info(_WHY, error)


class ChunkMemory:
    """Memory of ``nbytes`` bytes in one process for decoded chunks whose samples are still needed.

    A group consists of the samples that lie in the same chunks of the dataset with index ``leading``.
    ``groups`` is the number of groups that are needed at the same time.  If samples come in any order,
    ``groups`` is 0.  ``shared`` is the memory that worker processes share.
    """

    def __init__(
        self, files: SampleFiles, leading: int, groups: int, shared: SharedChunks | None = None
    ) -> None:
        self._sizes = _sizes(files, leading)
        self._units: dict[int, Any] = dict(shared.opened()) if shared is not None else {}
        self.nbytes = sum(nbytes * units.slots for nbytes, units in self._units.items())
        for nbytes, size in self._sizes.items():
            if nbytes in self._units or not size.total:
                continue
            few = max(4 * size.in_group, _LEAST_NBYTES // nbytes)
            slots = min(size.total, max(few, groups * size.in_group))
            try:
                self._units[nbytes] = private_units(size.total, slots, nbytes)
            except (OSError, ValueError, OverflowError):  # without this memory, each batch decodes its chunks
                continue
            self.nbytes += slots * nbytes

    def of(self, number: int, place: int, nbytes: int) -> tuple[Any, int]:
        """Return the ``native.UnitMemory`` for a dataset of a file, and the key of the dataset's first chunk.

        If the dataset has no memory, None replaces the ``native.UnitMemory``.  ``number`` is the index of the
        file, and ``place`` is the index of the dataset.
        """
        size = self._sizes.get(nbytes)
        first = None if size is None else size.first_keys.get((number, place))
        return (None, 0) if first is None else (self._units.get(nbytes), first)
