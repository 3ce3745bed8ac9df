"""Samples that are kept as they are before they are scaled: small, and the same in every epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastpipe.cache.entries import Entry
from fastpipe.cache.identity import FileIdentity, identify
from fastpipe.cache.places import open_store
from fastpipe.cache.store import EntryStore
from fastpipe.options import Cache
from fastpipe.tf.pixels import SampleMaker
from fastpipe.tf.rows import Column
from fastpipe.types import Size, UInt8Array

__all__ = ["KeptColumn", "open_kept"]


class KeptColumn:
    """The kept samples of one column; other columns and datasets with the same images share them.

    Args:
        store: where they are.
        column: of the table.
        maker: makes its samples.
    """

    def __init__(self, store: EntryStore, column: Column, maker: SampleMaker) -> None:
        self.store, self._column, self._reader = store, column, maker.reader
        # Of a column whose samples the script's code has a part in, what that code is given is kept.
        self._tag = f"{maker.tag} {'cut' if column.preprocess else 'made'}"
        self._tags: dict[tuple[str, int | None], bytes] = {}  # by rules

    def identify(self, row: int) -> FileIdentity:
        """Return what makes a row's sample: the file as it is now, the box, what a script changed of Pillow.

        Raises:
            OSError: there is no such file.
        """
        return self._identify(row, self._tag_now())

    def _tag_now(self) -> bytes:
        rules = self._reader.rules(), self._reader.limit
        found = self._tags.get(rules)
        if found is None:
            found = self._tags[rules] = hashlib.sha256(f"{self._tag} {rules}".encode()).digest()
        return found

    def _identify(self, row: int, tag: bytes) -> FileIdentity:
        boxes = self._column.boxes
        tag = tag if boxes is None else tag + boxes.edges[row].tobytes()
        return identify(self._column.paths[row], tag)

    def find(self, identity: FileIdentity) -> Entry | None:
        """The sample, if it is kept."""
        return self.store.find(identity.digest)

    def keep(self, identity: FileIdentity, sample: UInt8Array, size: Size) -> None:
        """Keep a sample, if there is room.

        Args:
            identity: of ``identify``.
            sample: uint8 (h, w, bytes of a pixel).
            size: of the image; one that Pillow warns of is to be opened each time.
        """
        if identity.is_settled and not self._reader.objects_to(size.height * size.width):
            note = b"" if self.store.is_in_memory else identity.note()
            self.store.put(identity.digest, sample, note=note)

    def places(self, rows: Sequence[int]) -> npt.NDArray[np.int64] | None:
        """Where the samples of these rows are in ``store.mapped``; None unless all are there."""
        if self.store.mapped is None:
            return None
        places, tag = np.empty(len(rows), np.int64), self._tag_now()
        for number, row in enumerate(rows):
            try:
                entry = self.find(self._identify(row, tag))
            except OSError:
                return None  # whoever makes the sample says what is wrong
            if entry is None:
                return None
            places[number] = entry.offset
        return places


def open_kept(
    option: Cache, columns: Sequence[Column], makers: Sequence[SampleMaker]
) -> list[KeptColumn] | None:
    """The kept samples that an option asks for; None where none are kept.

    ``"auto"`` is memory, where all samples fit.

    Raises:
        CacheError: the folder that the option names cannot be used.
    """
    if option.where == "off":
        return None
    store = open_store(option)
    if store is None:
        return None
    if option.where == "auto":
        needed = sum(
            len(column.paths) * column.spec.elements * np.dtype(maker.word).itemsize
            for column, maker in zip(columns, makers, strict=True)
        )
        if needed > store.max_bytes:
            return None
    return [KeptColumn(store, column, maker) for column, maker in zip(columns, makers, strict=True)]
