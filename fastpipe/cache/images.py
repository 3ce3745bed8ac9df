"""Decoded images, found by the file they were decoded from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.cache.entries import Entry
from fastpipe.cache.identity import FileIdentity, identify, identify_object
from fastpipe.cache.places import open_store
from fastpipe.cache.store import EntryStore
from fastpipe.options import Cache

__all__ = ["ImageCache", "KeptBatch", "open_cache"]

UInt8Array = npt.NDArray[np.uint8]

_ENOUGH = 32  # entries whose mean size says how large the others will be


class KeptBatch(NamedTuple):
    """Where the native core looks for the images of a batch.

    Attributes:
        images: a ``native.KeptImages``.
        most_nbytes: of images that are to be kept; 0 where none is.
        rules: as of ``ImageCache.identify``.
        keep: called with what is to be kept, and the rules.
    """

    images: Any
    most_nbytes: int
    rules: str
    keep: Callable[[FileIdentity, UInt8Array, int, str], None]


class ImageCache:
    """Decoded images of files, each for one way to decode.

    Args:
        store: where they are kept; may be that of other datasets as well.
        tag: everything about decoding that makes a difference to the pixels, and stays the same.
        expected: images that this dataset has, for a cache that is only used if all of them
            fit and for those that come up a second time; None for one that takes all it can.
    """

    def __init__(self, store: EntryStore, tag: str, expected: int | None = None) -> None:
        self.store = store
        self._tag, self._expected = tag, expected
        self._tags: dict[str, bytes] = {}  # by rules
        self._native: dict[str, Any] = {}  # the last, by rules
        self._seen = self._seen_nbytes = 0

    def describe(self) -> str:
        """Where images are kept, in one line."""
        where = "memory" if self.store.is_in_memory else "files"
        when = "" if self._expected is None else ", from their second use on and if all fit"
        return f"decoded images  →  kept in {where}, up to {self.store.max_bytes / 1e9:.1f} GB{when}"

    def identify(self, path: str, rules: str = "") -> FileIdentity:
        """Identify a file by its present state.

        Args:
            path: the file.
            rules: what else makes a difference to the pixels, and may change while the program runs.

        Raises:
            OSError: there is no such file.
        """
        return identify(path, self._tag_of(rules))

    def identify_object(self, version: bytes, path: str, rules: str = "") -> FileIdentity:
        """Identify an object in a store by its state as it was listed."""
        return identify_object(version, path, self._tag_of(rules))

    def _tag_of(self, rules: str) -> bytes:
        found = self._tags.get(rules)
        if found is None:
            found = self._tags[rules] = hashlib.sha256(f"{self._tag} {rules}".encode()).digest()
        return found

    def begin_batch(
        self, rules: str, keep: Callable[[FileIdentity, UInt8Array, int, str], None]
    ) -> KeptBatch | None:
        """What the native core is told to find the images of a batch; None where none may be there, nor be
        put there.

        Args:
            rules: as of ``identify``.
            keep: called for each that is to be kept: the file, its pixels, how many pixels the file has, and
                the rules.
        """
        if not self.is_worth_asking:
            return None
        images = self._native.get(rules)
        if images is None:
            images = self.store.images(self._tag_of(rules), marks=self._expected is not None)
            self._native = {rules: images}
        self.store.refreshed()
        mean = self._seen_nbytes // self._seen if self._seen else 1
        most = self.store.max_bytes if self._fits(mean) and self.store.has_room(mean) else 0
        return KeptBatch(images, most // max(self._expected or 1, 1), rules, keep)

    def find(self, file: FileIdentity) -> Entry | None:
        """The image of a file in this state."""
        return self.store.find(file.digest)

    def rows(self, entry: Entry, first: int, count: int) -> UInt8Array:
        """Rows of an image: uint8 (count, width, channels).

        Raises:
            OSError: they cannot be read any more.
        """
        return self.store.read(entry, first, count)

    def saw(self, images: int, nbytes: int) -> None:
        """Hear how large decoded images are."""
        self._seen, self._seen_nbytes = self._seen + images, self._seen_nbytes + nbytes

    @property
    def is_worth_asking(self) -> bool:
        """Whether images may be there, or may be put there."""
        if self._expected is None or len(self.store) or self._seen < _ENOUGH:
            return True
        return self._expected * self._seen_nbytes / self._seen <= self.store.max_bytes

    def wants(self, file: FileIdentity, nbytes: int) -> bool:
        """Whether an image of this many bytes would be kept: only then is it worth decoding whole."""
        if not file.is_settled or not self.store.has_room(nbytes):
            return False
        if self._expected is not None and not self.store.mark(file.digest):
            return False
        return self._fits(nbytes)

    def _fits(self, nbytes: int) -> bool:
        """Whether all images fit, if those that are not there yet are of so many bytes."""
        if self._expected is None:
            return True
        count = len(self.store)
        mean = self.store.allocated / count if count >= _ENOUGH else nbytes
        return self._expected * mean <= self.store.max_bytes

    def keep(self, file: FileIdentity, pixels: UInt8Array, flags: int = 0) -> bool:
        """Keep an image: uint8 (H, W, C), C-contiguous.  Returns whether it is kept now."""
        # Who opens files later looks at the notes; memory goes with those who use it.
        note = b"" if self.store.is_in_memory else file.note()
        return self.store.put(file.digest, pixels, flags, note)


def open_cache(option: Cache, tag: str, count: int) -> ImageCache | None:
    """The cache that an option asks for; None if it is off or cannot be had.

    Args:
        option: the option.
        tag: everything about decoding that makes a difference to the pixels.
        count: number of images of the dataset.

    Raises:
        CacheError: the folder that the option names cannot be used.
    """
    if option.where == "off":
        return None
    store = open_store(option)
    return None if store is None else ImageCache(store, tag, count if option.where == "auto" else None)
