"""Decoded chunks of a dataset, found by the file they were decoded from and their number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastpipe.cache.entries import aligned
from fastpipe.cache.identity import FileIdentity
from fastpipe.cache.store import EntryStore

__all__ = ["ChunkCache", "room_for"]

UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]


def room_for(chunks: int, nbytes: int) -> int:
    """Bytes of a store in memory that so many chunks of so many bytes take."""
    return chunks * aligned(nbytes)


class ChunkCache:
    """The decoded chunks of one dataset of a file, in a store that may be that of others as well.

    Where each lies is remembered in one array, so that a batch of any size is looked up at once.

    Args:
        store: where they are kept.
        file: the file's state, and what is made of it, the dataset's name included.
        count: chunks of the dataset.
        is_second_use: keep a chunk only when it is decoded for the second time.
    """

    def __init__(self, store: EntryStore, file: FileIdentity, count: int, *, is_second_use: bool) -> None:
        self._store, self._file = store, file
        self._is_second_use = is_second_use
        self._places = np.full(count, -1, np.int64)
        # Entries of the store that are not by this object, when a chunk was last looked for: only later
        # ones may be it.
        self._looked = np.zeros(count, np.int64)
        self._own = 0
        self._note = b"" if store.is_in_memory else file.note()

    @property
    def memory(self) -> UInt8Array | None:
        """The store's bytes; None where they are read from ``descriptor``."""
        return self._store.mapped

    @property
    def descriptor(self) -> int:
        """The store's file."""
        return self._store.descriptors[0]

    def places(self, numbers: Int64Array) -> Int64Array:
        """Where chunks of these numbers begin; -1 for those not kept."""
        found: Int64Array = self._places[numbers]
        missing = np.unique(numbers[found < 0])
        if not len(missing):
            return found
        known = self._store.refreshed() - self._own
        missing = missing[self._looked[missing] < known]
        self._looked[missing] = known
        for number in missing.tolist():
            self._find(number)
        return self._places[numbers] if len(missing) else found

    def keep(self, numbers: Int64Array, chunks: Sequence[UInt8Array]) -> None:
        """Keep decoded chunks, as far as there is room.

        Args:
            numbers: int64 (N,), of the chunks.
            chunks: uint8 (M,) each.
        """
        if not len(numbers) or not self._file.is_settled or not self._store.has_room(chunks[0].nbytes):
            return
        places = np.flatnonzero(self._places[numbers] < 0).tolist()
        digests = {place: self._digest(int(numbers[place])) for place in places}
        if self._is_second_use:
            places = [place for place in places if self._store.mark(digests[place])]
        if len(places) > 1:
            arrays = [chunks[place] for place in places]
            offset = self._store.put_all([digests[place] for place in places], arrays, self._note)
            if offset >= 0:
                step = aligned(arrays[0].nbytes + len(self._note))
                self._places[numbers[places]] = offset + step * np.arange(len(places))
                self._own += len(places)
                return
        for place in places:  # as many as there is room for
            if self._store.put(digests[place], chunks[place].reshape(1, -1, 1), note=self._note):
                self._find(int(numbers[place]))

    def _find(self, number: int) -> None:
        entry = self._store.find(self._digest(number))
        if entry is not None:
            self._places[number] = entry.offset

    def _digest(self, number: int) -> bytes:
        return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16, key=self._file.digest).digest()
