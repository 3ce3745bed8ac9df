"""Where images come from: a cache of decoded ones, or their files."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastpipe.core.types import Box, EncodedImage, Size, UInt8Array
from fastpipe.images.cache import ShortSide, WholeImage
from fastpipe.images.reader import ImageReader, JpegHeader, PillowImage, read_many

if TYPE_CHECKING:
    from fastpipe.core.cache_store import Entry
    from fastpipe.core.file_identity import FileIdentity
    from fastpipe.images.cache import ImageCache, KeptBatch

__all__ = ["ImageSource"]

_log = logging.getLogger("fastpipe.cache")

# Flags of a kept image.  The first: Pillow's ``info`` of it is empty; otherwise it takes the file to have
# it: a JPEG's header, but a whole decode of others.  The others: the pixels of its file, at most so many.
_NO_INFO = 1
_MOST_PIXELS = (1 << 31) - 1


class Found(NamedTuple):
    """What ``read`` gives: a file's content, a kept image, or both halves of the way to one.

    Attributes:
        blob: the file's content.
        file, entry: of the cache.
        header: of a file that is a JPEG; None of others, False where nobody has looked.
        rules: of Pillow, under which the cache was asked.
    """

    blob: bytes | None
    file: FileIdentity | None
    entry: Entry | None
    header: JpegHeader | Literal[False] | None = False
    rules: str = ""


class ImageSource:
    """Reads and opens images; keeps decoded ones if there is a cache.

    Args:
        read: a path to a file's content.
        reader: opens that.
        short_side: makes images smaller, or None.
        cache: where decoded images are kept, or None.
        version: of images that are no files, what tells one version of them from others.
    """

    def __init__(
        self,
        read: Callable[[str], bytes],
        reader: ImageReader,
        short_side: ShortSide | None,
        cache: ImageCache | None,
        version: Callable[[str], bytes] | None = None,
    ) -> None:
        self._read, self._reader, self._version = read, reader, version
        self._short_side, self._cache = short_side, cache

    def read(self, path: str, file: bytes | None = None) -> Found:
        """A kept image of this file as it is now, else the file's content, which may be given."""
        if self._cache is None:
            return Found(self._read(path) if file is None else file, None, None)
        version, rules, cache = self._version, self._reader.rules(), self._cache
        which = cache.identify_object(version(path), path, rules) if version else cache.identify(path, rules)
        entry = cache.find(which)
        if entry is not None and self._reader.objects_to(entry.flags >> 1):
            entry = None  # to decode it may be an error now
        if entry is None and file is None:
            file = self._read(path)
        return Found(None if entry else file, which, entry, False, rules)

    def begin_batch(self) -> KeptBatch | None:
        """Where the native core looks for the decoded images of a batch; None where it need not."""
        if self._cache is None:
            return None
        return self._cache.begin_batch(self._reader.rules(), self._keep_pixels)

    def info_in(self, blob: bytes, path: str) -> dict[Any, Any]:
        """What Pillow says of an encoded file."""
        return dict(self._reader.open_pillow(blob, path).info)

    def read_past(self, path: str) -> Found:
        """The file's content, of an image that is not to be kept."""
        return Found(self._read(path), None, None)

    @staticmethod
    def read_many_past(paths: Sequence[str]) -> list[Found | None]:
        """As ``read_past``, of many files of this machine at once; None in the place of those that it has to
        be asked for."""
        return [one and Found(one[0], None, None, one[1]) for one in read_many(paths)]

    def open(self, found: Found, path: str) -> EncodedImage:
        """Open what ``read`` gave."""
        if found.entry is not None:
            return self._kept(found.entry, path)
        assert found.blob is not None
        image = self._reader.open(found.blob, path, found.header)
        to = image.size if self._short_side is None else self._short_side.size(image.size)
        cache, file = self._cache, found.file
        keeps = (
            cache is not None and file is not None and image.may_be_kept
            and cache.wants(file, to.height * to.width * 3)
        )  # fmt: skip
        if to == image.size and not keeps:
            return image
        make = _Once(image, None if to == image.size else self._short_side)
        if keeps:
            assert file is not None
            make.keep = partial(self._keep, file, found.rules)
        return WholeImage(to, make.rows, image.info)

    def _keep(self, file: FileIdentity, rules: str, image: EncodedImage, pixels: UInt8Array) -> None:
        """Keep an image that was opened."""
        has_none = isinstance(image, PillowImage) and not image.info()
        height, width = image.size
        self._keep_pixels(file, pixels, height * width, rules, has_info=not has_none)

    def _keep_pixels(
        self, file: FileIdentity, pixels: UInt8Array, count: int, rules: str, has_info: bool = True
    ) -> None:
        """Keep an image whose file has so many pixels, unless the rules have changed since that was read."""
        if self._cache is not None and self._reader.rules() == rules:
            flags = min(count, _MOST_PIXELS) << 1 | (0 if has_info else _NO_INFO)
            self._cache.keep(file, pixels, flags)

    def _kept(self, entry: Entry, path: str) -> WholeImage:
        height, width, _ = entry.shape
        info: Callable[[], dict[Any, Any]] = dict if entry.flags & _NO_INFO else partial(self._info, path)
        return WholeImage(Size(height, width), partial(self._rows, entry, path), info)

    def _rows(self, entry: Entry, path: str, first: int, count: int) -> UInt8Array:
        assert self._cache is not None
        try:
            return self._cache.rows(entry, first, count)
        except OSError as error:
            _log.warning("a kept image cannot be read any more, the file is decoded instead: %s", str(error))
            image = self._reader.open(self._read(path), path)
            to = image.size if self._short_side is None else self._short_side.size(image.size)
            if to != entry.shape[:2]:
                raise OSError(errno.ESTALE, "the file was replaced while it was read", path) from error
            make = _Once(image, None if to == image.size else self._short_side)
            return make.rows(first, count)

    def _info(self, path: str) -> dict[Any, Any]:
        return self._reader.open(self._read(path), path).info()


class _Once:
    """Decodes an image whole, once.

    Attributes:
        keep: called with the image and its pixels then, where that is wanted.
    """

    def __init__(self, image: EncodedImage, short_side: ShortSide | None) -> None:
        self._image, self._short_side = image, short_side
        self.keep: Callable[[EncodedImage, UInt8Array], None] | None = None
        self._pixels: UInt8Array | None = None

    def rows(self, first: int, count: int) -> UInt8Array:
        """Rows of the whole image."""
        if self._pixels is None:
            self._pixels = self._make()
            if self.keep is not None:
                self.keep(self._image, self._pixels)
        return self._pixels[first : first + count]

    def _make(self) -> UInt8Array:
        if self._short_side is not None:
            return self._short_side.pixels(self._image)
        return self._image.region(Box(0, 0, *self._image.size))
