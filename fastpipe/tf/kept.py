"""Samples that are kept as they are before they are scaled: small, and the same in every epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastpipe.core.cache_store import Entry, EntryStore
from fastpipe.core.caches import open_store
from fastpipe.core.file_identity import FileIdentity, identify
from fastpipe.core.types import UInt8Array
from fastpipe.options import Cache
from fastpipe.tf.pixels import SampleMaker
from fastpipe.tf.rows import Column

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
        self._native: tuple[bytes, Any] | None = None
        self._tags: dict[tuple[str, int | None], bytes] = {}  # by rules

    def identify(self, row: int) -> FileIdentity:
        """Return what makes a row's sample: the file as it is now, the box, what a script changed of Pillow.

        Raises:
            OSError: there is no such file.
        """
        boxes, tag = self._column.boxes, self._tag_now()
        tag = tag if boxes is None else tag + boxes.edges[row].tobytes()
        return identify(self._column.paths[row], tag)

    def _tag_now(self) -> bytes:
        rules = self._reader.rules(), self._reader.limit
        found = self._tags.get(rules)
        if found is None:
            found = self._tags[rules] = hashlib.sha256(f"{self._tag} {rules}".encode()).digest()
        return found

    def find(self, identity: FileIdentity) -> Entry | None:
        """The sample, if it is kept."""
        return self.store.find(identity.digest)

    def begin_batch(self) -> tuple[Any, int]:
        """What the native core is told to find samples: a ``native.KeptImages``; and the most bytes of those
        that are to be kept."""
        tag = self._tag_now()
        if self._native is None or self._native[0] != tag:
            self._native = tag, self.store.images(tag, marks=False)
        self.store.refreshed()
        return self._native[1], self.store.max_bytes if self.store.has_room(1) else 0

    def keep(self, identity: FileIdentity, sample: UInt8Array, pixels: int) -> None:
        """Keep a sample, if there is room.

        Args:
            identity: of ``identify``.
            sample: uint8 (h, w, bytes of a pixel).
            pixels: of the image; one that Pillow warns of is to be opened each time.
        """
        if identity.is_settled and not self._reader.objects_to(pixels):
            note = b"" if self.store.is_in_memory else identity.note()
            self.store.put(identity.digest, sample, note=note)


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
