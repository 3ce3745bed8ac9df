"""A cache of images: their pixels, or their coefficients. An image is found by the file that it comes from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fastpipe.core.cache_store import Entry, EntryStore
from fastpipe.core.caches import open_cache_store
from fastpipe.core.extras import require
from fastpipe.core.file_identity import FileIdentity, identify, identify_object
from fastpipe.core.native import native
from fastpipe.core.types import Box, EncodedImage, Size, UInt8Array
from fastpipe.images.pixels import fold, render
from fastpipe.images.steps import described_short_side, resized_size
from fastpipe.options import Cache

_ENOUGH = 32  # the number of entries whose mean size predicts the size of other entries


class KeptBatch(NamedTuple):
    """What the native core needs to use the cache for one batch."""

    images: Any  # a ``native.KeptImages``
    most_nbytes: int  # the maximum size of an image to store, in bytes; 0 stores no images
    rules: str  # see ``ImageCache.identify``
    keep: Callable[[FileIdentity, UInt8Array, int, str], None]


class ImageCache:
    """A cache of images of files, for one set of decoding options.  Python code uses the pixels that are stored;
    only the native core uses coefficients.

    Args:
        store: the memory store or disk store; other datasets may share the store.
        tag: identifies all fixed settings that affect the decoded pixels.
        expected: the number of the dataset's images, or None. If a number is given, the cache is used only if
            all images fit, and stores an image only when the image is used a second time. If None is given,
            the cache stores images as long as they fit.
        form: ``"pixels"`` or ``"coefficients"``.
    """

    def __init__(self, store: EntryStore, tag: str, expected: int | None = None, form: str = "pixels") -> None:
        self.store = store
        self._is_of_pixels = form == "pixels"
        self._tag = tag if self._is_of_pixels else f"{tag} {native.coefficients_version()}"
        self._expected = expected
        self._tags: dict[str, bytes] = {}  # the hashed tags, by rules
        self._native: dict[str, Any] = {}  # the native cache of the last batch, by rules
        self._seen = self._seen_nbytes = 0

    def describe(self) -> str:
        """Return a line that says where images are stored."""
        where = "memory" if self.store.is_in_memory else "files"
        when = "" if self._expected is None else ", from their second use on and if all fit"
        what = "decoded images" if self._is_of_pixels else "coefficients of JPEGs"
        return f"{what}  →  kept in {where}, up to {self.store.max_bytes / 1e9:.1f} GB{when}"

    def identify(self, path: str, rules: str = "") -> FileIdentity:
        """Identify a file by its present state. Raise an OSError if there is no file.

        ``rules`` identifies the settings that affect the pixels and may change while the program runs.
        """
        return identify(path, self._tag_of(rules))

    def identify_object(self, version: bytes, path: str, rules: str = "") -> FileIdentity:
        """Identify an object in an object store by the version that it had when the store was listed."""
        return identify_object(version, path, self._tag_of(rules))

    def _tag_of(self, rules: str) -> bytes:
        if rules not in self._tags:
            self._tags[rules] = hashlib.sha256(f"{self._tag} {rules}".encode()).digest()
        return self._tags[rules]

    def begin_batch(
        self, rules: str, keep: Callable[[FileIdentity, UInt8Array, int, str], None]
    ) -> KeptBatch | None:
        """Return what the native core needs for a batch; None if the cache cannot contain or store images.

        ``keep`` is called for each image to store, with the file, its pixels, the file's pixel count and the
        rules.
        """
        if not self.is_worth_asking:
            return None
        images = self._native.get(rules)
        if images is None:
            images = self.store.images(
                self._tag_of(rules),
                marks=self._expected is not None,
                of_coefficients=not self._is_of_pixels,
            )
            self._native = {rules: images}
        self.store.refreshed()
        mean = self._seen_nbytes // self._seen if self._seen else 1
        most = self.store.max_bytes if self._fits(mean) and self.store.has_room(mean) else 0
        return KeptBatch(images, most // max(self._expected or 1, 1), rules, keep)

    def find(self, file: FileIdentity) -> Entry | None:
        """Return the stored pixels of a file; None if no pixels of the file's present state are stored."""
        return self.store.find(file.digest) if self._is_of_pixels else None

    def rows(self, entry: Entry, first: int, count: int) -> UInt8Array:
        """Return rows of an image, uint8 (count, width, channels). Raise an OSError if they were deleted."""
        return self.store.read(entry, first, count)

    def saw(self, images: int, pixels: int, coefficients: int) -> None:
        """Record that this number of images were decoded, and how many bytes all of their pixels, and about how
        many bytes all of their coefficients take."""
        self._seen += images
        self._seen_nbytes += pixels if self._is_of_pixels else coefficients

    @property
    def is_worth_asking(self) -> bool:
        """Return whether the cache may contain images or may store images."""
        if self._expected is None or len(self.store) or self._seen < _ENOUGH:
            return True
        return self._expected * self._seen_nbytes / self._seen <= self.store.max_bytes

    def wants(self, file: FileIdentity, nbytes: int) -> bool:
        """Return whether pixels of this many bytes would be stored. If not, the caller need not decode the
        whole image."""
        if not self._is_of_pixels or not file.is_settled or not self.store.has_room(nbytes):
            return False
        if self._expected is not None and not self.store.mark(file.digest):
            return False
        return self._fits(nbytes)

    def _fits(self, nbytes: int) -> bool:
        """Return whether all images fit, if each missing image has this many bytes."""
        if self._expected is None:
            return True
        count = len(self.store)
        mean = self.store.allocated / count if count >= _ENOUGH else nbytes
        return self._expected * mean <= self.store.max_bytes

    def keep(self, file: FileIdentity, pixels: UInt8Array, flags: int = 0) -> bool:
        """Store an image, uint8 (H, W, C), C-contiguous, or coefficients, uint8 (1, N, 1). Return whether they are
        stored now."""
        # Notes help processes that open the files later. Memory does not outlive its users.
        note = b"" if self.store.is_in_memory else file.note()
        return self.store.put(file.digest, pixels, flags, note)


def open_cache(option: Cache, tag: str, count: int) -> ImageCache | None:
    """Return the cache that an option requests; None if the cache is off or unavailable.

    ``tag`` is passed to ``ImageCache``. ``count`` is the number of images in the dataset.
    """
    if option.where == "off":
        return None
    store = open_cache_store(option)
    if store is None:
        return None
    return ImageCache(store, tag, count if option.where == "auto" else None, option.form)


# ---- whole images: images with stored rows, and images that are shrunk before all other steps ---------


class WholeImage:
    """An image whose pixels come from a function that returns rows, not from a file.

    Args:
        size: the size of the image.
        rows: called with the first row and a number of rows, and returns these rows, uint8 (count, width, 3),
            C-contiguous. Users of the rows do not write to them, and do not keep them longer than the image.
        info: returns Pillow's ``info`` of the image.
    """

    def __init__(
        self, size: Size, rows: Callable[[int, int], UInt8Array], info: Callable[[], dict[Any, Any]]
    ) -> None:
        self.size = size
        self.rows = rows
        self.info = info

    def region(self, box: Box) -> UInt8Array:
        """Return a rectangle of the image."""
        rows = self.rows(box.top, box.height)
        return np.ascontiguousarray(rows[:, box.left : box.left + box.width])

    def reduced(self, factor: int) -> None:
        """Return None: decoding at a reduced size would save nothing."""

    def encoded(self) -> None:
        """Return None: the image is decoded already, or the whole image must be decoded for the cache."""

    def give(self, box: Box, pixels: UInt8Array) -> None:
        """Raise an error, because other code never decodes a part of this image."""
        raise AssertionError("the pixels of a whole image come as rows")

    def pil(self) -> Any:
        """Return the image for user code, as Pillow would open it."""
        image = require("PIL.Image", extra="image").fromarray(self.rows(0, self.size.height))
        image.info = self.info()
        return image


class ShortSide:
    """Resizes images whose shorter side is longer than ``side``, as ``torchvision.transforms.Resize`` does.

    >>> ShortSide(256).size(Size(375, 500))
    Size(height=256, width=341)
    """

    def __init__(self, side: int) -> None:
        self.side = side
        self._step = described_short_side(side)
        self._resize = require("torchvision.transforms", extra="torch").Resize(side)

    def size(self, image: Size) -> Size:
        """Return the size of an image after the resize."""
        return image if min(image) <= self.side else resized_size(self._resize, image)

    def pixels(self, image: EncodedImage) -> UInt8Array:
        """Return a whole image, resized: uint8 (H, W, 3)."""
        to = self.size(image.size)
        steps = [] if to == image.size else [self._step]
        region = None if None in steps else fold(steps, image.size)
        return np.asarray(self._resize(image.pil())) if region is None else render(image, region)
