"""A cache of images, as pixels or coefficients. An image is found by the file that it comes from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from fastpipe.core.cache_store import Entry, EntryStore
from fastpipe.core.caches import open_cache_store
from fastpipe.core.extras import require
from fastpipe.core.file_identity import FileIdentity, identify, identify_object
from fastpipe.core.native import native
from fastpipe.core.text import in_bytes
from fastpipe.core.types import Box, EncodedImage, Size, UInt8Array
from fastpipe.errors import OptionError
from fastpipe.images.pixels import fold, render
from fastpipe.images.steps import described_short_side, resized_size
from fastpipe.options import Cache, Decode

# In the order of KeptForm in fastpipe/native/kept.h.
_FORMS = {"pixels": "decoded images", "coefficients": "coefficients of JPEGs", "index": "indices of JPEGs"}
_ENOUGH = 32  # the number of images whose mean size predicts the size of other images


class Sizes(NamedTuple):
    """Number of images, bytes of all their pixels, and about the bytes of all their coefficients."""

    images: int = 0
    pixels: int = 0
    coefficients: int = 0

    def of(self, form: str) -> int:
        """Return about the bytes of all images in a form."""
        if form == "pixels":
            return self.pixels
        # An index takes a fiftieth of its file, and coefficients seven sixths of it.
        return self.coefficients if form == "coefficients" else self.coefficients // 60

    def plus(self, other: Sizes) -> Sizes:
        """Return the sizes of these images and others together."""
        return Sizes(*(one + more for one, more in zip(self, other, strict=True)))


class KeptBatch(NamedTuple):
    """What the native core needs to use the cache for one batch."""

    images: Any  # a ``native.KeptImages``
    most_nbytes: int  # the maximum size of an image to store, in bytes; 0 stores no images
    rules: str  # see ``ImageCache.identify``
    keep: Callable[[FileIdentity, UInt8Array, int, str], None]


class ImageCache:
    """A cache of images of files, for one set of decoding options.

    Python code uses pixels that are stored.  Only the native core uses coefficients.

    Args:
        store: the memory store or disk store; other datasets may share the store.
        tag: identifies all fixed settings that affect the decoded pixels.
        count: the number of the dataset's images.
        form: a name in ``_FORMS``, or ``"auto"``.
        needs_all: whether the cache is used only if all images fit, and stores an image only when the image
            is used a second time.  Otherwise, the cache stores images as long as they fit.
        sample: returns the paths of some of the dataset's images.  It is called if ``form`` is ``"auto"`` and
            images are stored at their first use: the form has to be chosen before.
        size: returns the size of the pixels to store for an image of a size.
        version: returns the listed version of an object in an object store, by its path.  None if the images
            are local files.
    """

    def __init__(
        self, store: EntryStore, tag: str, count: int, form: str, needs_all: bool,
        sample: Callable[[], Sequence[str]], size: Callable[[Size], Size],
        version: Callable[[str], bytes] | None = None,
    ) -> None:  # fmt: skip
        self.store = store
        self._tag, self._count, self._form, self._needs_all = tag, count, form, needs_all
        self._sample, self._size, self._version = sample, size, version
        self._tags: dict[tuple[str, str], bytes] = {}  # the hashed tags, by rules and form
        self._native: dict[tuple[str, str], Any] = {}  # the native cache of the last batch, by rules and form
        self._seen = Sizes()

    def describe(self, rules: str) -> str:
        """Return a line that says where images are stored.  ``rules`` is explained at ``identify``."""
        what = _FORMS[self._chosen(rules)]
        if self._form == "auto":
            what += ", or coefficients of JPEGs if those do not fit"
        where = "memory" if self.store.is_in_memory else "files"
        when = ", from their second use on and if all fit" if self._needs_all else ""
        count = self.store.refreshed()
        held = f"; the cache has {count:,} entries now" if count else ""
        return f"{what}  →  kept in {where}, up to {in_bytes(self.store.max_bytes)}{when}{held}"

    def _chosen(self, rules: str = "") -> str:
        """Return the form; choose it as soon as enough images are known."""
        if self._form == "auto":
            if not self._needs_all:
                self._form = self._form_of(self._sample(), rules)
            elif self._seen.images < _ENOUGH:
                return "pixels"
            else:
                self._form = self._form_by(self._seen)
        return self._form

    def _form_of(self, paths: Sequence[str], rules: str) -> str:
        """Return the form in which most of these images are stored already; if none is stored, the form that
        suits their sizes."""
        found = {form: self._count_in(form, paths, rules) for form in _FORMS}
        if any(found.values()):
            return max(found, key=found.__getitem__)
        return self._form_by(sizes_of(paths if self._version is None else [], self._size))

    def count_stored(self, paths: Sequence[str], rules: str) -> int:
        """Return how many of these images are stored."""
        return self._count_in(self._chosen(rules), paths, rules)

    def _count_in(self, form: str, paths: Sequence[str], rules: str) -> int:
        count = 0
        for path in paths if len(self.store) else ():
            with suppress(OSError):  # which is raised when the file is read
                count += self.store.find(self._identified(path, self._tag_in(rules, form)).digest) is not None
        return count

    def _form_by(self, sizes: Sizes) -> str:
        """Return the first form in which all images fit, if the others are like these."""
        forms = list(_FORMS) if sizes.coefficients else ["pixels"]
        if self._needs_all:  # an index gains too little for a cache that the user did not ask for
            forms = forms[:2]
        room = sizes.images * self.store.max_bytes
        return next((form for form in forms if self._count * sizes.of(form) <= room), forms[-1])

    def identify(self, path: str, rules: str = "") -> FileIdentity:
        """Identify a file by its present state, or an object by its listed version.

        ``rules`` identifies the settings that affect the pixels and may change while the program runs.

        Raises:
            OSError: there is no such file.
        """
        return self._identified(path, self._tag_of(rules))

    def _identified(self, path: str, tag: bytes) -> FileIdentity:
        if self._version is None:
            return identify(path, tag)
        return identify_object(self._version(path), path, tag)

    def _tag_of(self, rules: str) -> bytes:
        return self._tag_in(rules, self._chosen(rules))

    def _tag_in(self, rules: str, form: str) -> bytes:
        if (rules, form) not in self._tags:
            version = "" if form == "pixels" else f" {form} {native.coefficients_version()}"
            self._tags[rules, form] = hashlib.sha256(f"{self._tag}{version} {rules}".encode()).digest()
        return self._tags[rules, form]

    def begin_batch(
        self, rules: str, keep: Callable[[FileIdentity, UInt8Array, int, str], None]
    ) -> KeptBatch | None:
        """Return what the native core needs for a batch; None if the cache cannot contain or store images.

        ``keep`` is called for each image to store, with the file, its pixels, the file's pixel count and the
        rules.
        """
        form = self._chosen(rules)
        if not self.is_worth_asking:
            return None
        images = self._native.get((rules, form))
        if images is None:
            # Another thread may choose the form meanwhile: see ``saw``.
            images = self.store.images(
                self._tag_in(rules, form), marks=self._needs_all, form=list(_FORMS).index(form)
            )
            self._native = {(rules, form): images}
        self.store.refreshed()
        mean = self._mean() or 1
        most = self.store.max_bytes if self._fits(mean) and self.store.has_room(mean) else 0
        if self._needs_all and self._seen.images < _ENOUGH:  # this mean predicts little yet
            most //= max(self._count, 1)
        return KeptBatch(images, most, rules, keep)

    def find(self, file: FileIdentity) -> Entry | None:
        """Return the stored pixels of a file; None if no pixels of the file's present state are stored."""
        return self.store.find(file.digest) if self._chosen() == "pixels" else None

    def rows(self, entry: Entry, first: int, count: int) -> UInt8Array:
        """Return rows of an image, uint8 (count, width, channels). Raise an OSError if they were deleted."""
        return self.store.read(entry, first, count)

    def saw(self, sizes: Sizes) -> None:
        """Record the sizes of images that were decoded."""
        self._seen = self._seen.plus(sizes)

    def _mean(self) -> int:
        """Return the mean size of an entry for the images that were seen; 0 before any were."""
        return self._seen.of(self._chosen()) // self._seen.images if self._seen.images else 0

    @property
    def is_worth_asking(self) -> bool:
        """Return whether the cache may contain images or may store images."""
        if not self._needs_all or len(self.store) or self._seen.images < _ENOUGH:
            return True
        return self._count * self._mean() <= self.store.max_bytes

    def wants(self, file: FileIdentity, nbytes: int) -> bool:
        """Return whether pixels of this many bytes would be stored. If not, the caller need not decode the
        whole image."""
        if self._chosen() != "pixels" or not file.is_settled or not self.store.has_room(nbytes):
            return False
        if self._needs_all and not self.store.mark(file.digest):
            return False
        return self._fits(nbytes)

    def _fits(self, nbytes: int) -> bool:
        """Return whether all images fit, if each missing image has this many bytes."""
        if not self._needs_all:
            return True
        count = len(self.store)
        mean = self.store.allocated / count if count >= _ENOUGH else nbytes
        return self._count * mean <= self.store.max_bytes

    def keep(self, file: FileIdentity, pixels: UInt8Array, flags: int = 0) -> bool:
        """Store an image, uint8 (H, W, C), C-contiguous, or coefficients, uint8 (1, N, 1).

        Return whether they are stored now.
        """
        # Notes help processes that open the files later. Memory does not outlive its users.
        note = b"" if self.store.is_in_memory else file.note()
        return self.store.put(file.digest, pixels, flags, note)


def open_cache(
    option: Cache, decode: Decode, tag: str, count: int, path: Callable[[int], str],
    size: Callable[[Size], Size], version: Callable[[str], bytes] | None,
) -> ImageCache | None:  # fmt: skip
    """Return the cache that an option requests; None if the cache is off or unavailable.

    ``path`` returns the path of an image by its number.  The other arguments are those of ``ImageCache``.
    """
    if option.where == "off":
        return None
    store = open_cache_store(option)
    if store is None:
        return None

    def sample() -> Sequence[str]:
        return [path(number) for number in range(0, count, max(1, count // _ENOUGH))]

    form = option.form if _keeps_coefficients(decode) else "pixels"
    return ImageCache(store, tag, count, form, option.where == "auto", sample, size, version)


def check_form(option: Cache, decode: Decode) -> None:
    """Raise an OptionError if the form that a cache names does not work with these decoding options."""
    if option.where != "off" and option.form not in ("auto", "pixels") and not _keeps_coefficients(decode):
        raise OptionError(
            f"Cache(form={option.form!r}) keeps what the native core makes images from, and {decode!r} makes "
            "them in another way. Leave out one of the two."
        )


def _keeps_coefficients(decode: Decode) -> bool:
    return decode.backend not in ("pillow", "dali")


def sizes_of(paths: Sequence[str], size: Callable[[Size], Size]) -> Sizes:
    """Return the sizes of files: of those that are JPEGs, or of none if most are something else."""
    sizes = Sizes()
    for found in native.read_files([os.fsencode(path) for path in paths]):
        if found is not None and found[1][0]:
            content, (height, width, *_) = found
            to = size(Size(height, width))
            sizes = sizes.plus(Sizes(1, 3 * to.height * to.width, len(content) * 7 // 6))
    return sizes if 2 * sizes.images >= len(paths) else Sizes()


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
