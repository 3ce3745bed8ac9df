"""Opening of encoded images. The decoder of a file is chosen by the file's content."""

from __future__ import annotations

import io
import logging
import os
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from fastpipe.core.clock import ranged
from fastpipe.core.extras import require
from fastpipe.core.native import native
from fastpipe.core.types import Box, ReducedImage, Size, UInt8Array
from fastpipe.errors import MissingDependencyError, OptionError
from fastpipe.images.pillow_rules import decodes_as_pillow
from fastpipe.options import Decode

_log = logging.getLogger("fastpipe.read")

# Pillow's defaults. Pillow raises an error for PNGs with more text.
_TEXT_CHUNK, _TEXT_MEMORY = 1 << 20, 64 << 20
_CODECS = ("jpg", "libjpeg_turbo", "jpg_2000", "libtiff", "webp", "avif")
# Formats that only some builds of Pillow support: the feature, Pillow's plugin, and a pattern for the first
# bytes of a file.
_OPTIONAL = {
    "webp": ("WebPImagePlugin", rb"RIFF.{4}WEBPVP8"),
    "avif": ("AvifImagePlugin", rb".{4}ftypavi[fs]"),
}
# Pillow's messages about missing libraries, and Pillow's feature name for each decoder name.
_NO_DECODER = re.compile(r"decoder (\w+) not available")
_NO_GHOSTSCRIPT = "Unable to locate Ghostscript"
_FEATURES = {"jpeg2k": "jpg_2000", "jpeg": "jpg", "zip": "zlib"}
# The formats that the native core decodes: the bytes of a file that plugins receive, and Pillow's decoder.
_NATIVE_FORMATS = {
    "JPEG": (b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01", "jpeg"),
    "PNG": (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "zip"),
}


class _Plugins(NamedTuple):
    """Pillow's plugins at the last check. The first three fields are copies of Pillow's tables."""

    order: Sequence[str]
    openers: Mapping[str, Any]
    decoders: Mapping[str, Any]
    changes: tuple[str, ...]  # a script's changes to the plugins, as text
    own: frozenset[str]  # the formats of ``_NATIVE_FORMATS`` that Pillow's own plugins open and decode


_plugins = _Plugins((), {}, {}, (), frozenset(_NATIVE_FORMATS))
_formats: set[str] = set()  # Pillow's own formats ever registered in this process; Pillow loads some late


class ImageReader:
    """A reader that opens encoded images as :class:`fastpipe.core.types.EncodedImage` objects.

    The native core decodes trusted JPEGs: complete JPEGs of kinds that it decodes to Pillow's pixels. In
    batches, it decodes trusted PNGs, too.  Pillow decodes all other files, and files that the native core
    cannot decode.  Pillow also decides whether a damaged file is an error.  Any number of threads may use the
    reader.  Pickling stores only its options.

    >>> ImageReader(Decode()).open(b"GIF89a", "x.gif")
    Traceback (most recent call last):
        ...
    PIL.UnidentifiedImageError: cannot identify image file 'x.gif'
    """

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self._image = require("PIL.Image", extra="image")
        self._file = require("PIL.ImageFile", extra="image")
        self._ops = require("PIL.ImageOps", extra="image")
        # True if the script requests Pillow, or if Pillow decodes differently from the native core.
        self._by_pillow = decode.backend == "pillow" or not decodes_as_pillow()

    def __reduce__(self) -> tuple[object, ...]:
        return (ImageReader, (self.decode,))

    def describe(self, *, reads_png: bool = True) -> str:
        """Return a line that names the decoders in use.

        ``reads_png`` says whether the native core may decode PNGs.
        """
        version = require("PIL", extra="image").__version__
        name = "Pillow-SIMD" if ".post" in version else "Pillow"
        pillow = f"{name} {version}"
        if self._by_pillow:
            return f"images  →  {pillow}"
        png = "PNG  →  libdeflate; " if reads_png else ""
        return f"JPEG  →  native core, only the region that is needed; {png}other images  →  {pillow}"

    @property
    def is_native(self) -> bool:
        """Return whether the native core decodes JPEGs and PNGs at present. The user may change Pillow's
        plugins and limits at any time."""
        return not self._by_pillow and opens_own() and _text_limits() == (_TEXT_CHUNK, _TEXT_MEMORY)

    @property
    def most_pixels(self) -> int | None:
        """Return the number of pixels above which decoding warns or fails, with Pillow's present settings."""
        limits = [limit for limit in (self.limit, self.decode.max_pixels) if limit is not None]
        return min(limits, default=None)

    def open(
        self, blob: bytes, path: str, header: JpegHeader | Literal[False] | None = False
    ) -> _FastImage | PillowImage:
        """Open an encoded image. Its pixels are decoded on demand.

        ``path`` is used in messages.  ``header`` is the result of ``read_jpeg_header``, or False if the
        caller has not read the header.

        Raises:
            OSError: Pillow cannot identify the image.
            PIL.Image.DecompressionBombError: the image has more pixels than Pillow's policy allows.
            OptionError: the image has more pixels than ``Decode(max_pixels=…)`` allows.
        """
        if self._by_pillow:
            header = None
        elif header is False:
            header = read_jpeg_header(blob)
        if header is not None and header.trusted and not (self.decode.exif and header.orientation != 1):
            pixels = header.height * header.width
            self._check_pixels(pixels, path)
            if not self.objects_to(pixels) and "JPEG" in _plugins_of(self._image).own:
                return _FastImage(self, blob, path, header)
        return PillowImage(self, blob, path)

    def look_at(self, blob: bytes, path: str) -> tuple[Size, bool]:
        """Return an image's size, and whether the image is a trusted JPEG (see the class), for other
        decoders."""
        header = read_jpeg_header(blob)
        if header is not None and header.trusted:
            pixels = header.height * header.width
            self._check_pixels(pixels, path)
            if not self.objects_to(pixels):
                return Size(header.height, header.width), True
        image = self.open_pillow(blob, path)
        return Size(image.height, image.width), False

    @property
    def limit(self) -> int | None:
        """Return the number of pixels above which Pillow, with its present settings, warns or raises."""
        limit: int | None = self._image.MAX_IMAGE_PIXELS
        return limit

    def objects_to(self, pixels: int) -> bool:
        """Return whether Pillow, with its present settings, warns or raises an error for this many pixels."""
        return self.limit is not None and pixels > self.limit

    def open_pillow(self, blob: bytes, path: str) -> Any:
        """Return the image as Pillow opens it lazily; an error message contains ``path``."""
        try:
            image = self._image.open(io.BytesIO(blob))
        except self._image.UnidentifiedImageError as error:
            _require_feature_of(blob, path)
            raise self._image.UnidentifiedImageError(f"cannot identify image file {path!r}") from error
        self._check_pixels(image.width * image.height, path)
        return image

    def settings(self) -> str:
        """Return a text of all settings that affect pixels or errors, except the settings in ``rules``."""
        decode = replace(self.decode, gpu_share=None)  # this reader does not decode on a GPU
        return f"{decode!r} {self.describe()} {_codec_versions()}"

    def rules(self) -> str:
        """Return a text of the user's changes to Pillow (settings and plugins) that affect pixels, or that
        affect which files can be opened.

        Return "" if the user has not changed Pillow since its import.  The call is fast enough to be made for
        each image.
        """
        # Other settings, such as GifImagePlugin.LOADING_STRATEGY, do not affect RGB images.
        truncated = self._file.LOAD_TRUNCATED_IMAGES
        texts = _text_limits()
        plugins = _plugins_of(self._image).changes
        if not truncated and not plugins and texts == (_TEXT_CHUNK, _TEXT_MEMORY):
            return ""
        return f"{bool(truncated)} {texts} {plugins}"

    def convert(self, image: Any) -> Any:
        """Convert an opened image as torchvision's default loader does, and apply the EXIF orientation if
        requested."""
        image = converted(image, "RGB")
        return self._ops.exif_transpose(image) if self.decode.exif else image

    def fast_region(self, blob: bytes, box: Box) -> UInt8Array | None:
        """Return the native core's pixels for a part of a trusted JPEG; None if decoding fails."""
        found: UInt8Array | None = native.decode(blob, *box)
        return found

    def _check_pixels(self, pixels: int, path: str) -> None:
        limit = self.decode.max_pixels
        if limit is not None and pixels > limit:
            raise OptionError(
                f"{path!r} has {pixels} pixels, more than Decode(max_pixels={limit}) allows; "
                "raise the limit if the file is what it should be"
            )


def _plugins_of(image: Any) -> _Plugins:
    """Return the facts about Pillow's plugins. Collect the facts again if the plugins have changed."""
    global _plugins
    found = _plugins
    if found.openers == image.OPEN and found.order == image.ID and found.decoders == image.DECODERS:
        return found
    order, openers, decoders = list(image.ID), dict(image.OPEN), dict(image.DECODERS)
    usable = [name for name in order if name in openers]
    own = [name for name in usable if _is_pillows(openers[name][0])]
    _formats.update(own)
    # Each text gives the number of Pillow's own plugins before the script's plugin. Plugins that Pillow loads
    # late come after the script's plugin.
    changes = [
        f"{sum(one in own for one in usable[:place])} {name}: {_named(openers[name][0])}"
        for place, name in enumerate(usable)
        if name not in own
    ]
    changes += [f"no {name}" for name in sorted(_formats.difference(usable))]
    changes += [f"{name}: {_named(made)}" for name, made in decoders.items() if not _is_pillows(made)]
    own_formats = []
    for name, (begin, decoder) in _NATIVE_FORMATS.items():
        # Pillow tries plugins in order.  Plugins of Pillow that are not loaded yet come last.
        before = usable[: usable.index(name)] if name in own else usable
        is_taken = any(_takes(openers[one][1], begin) for one in before if one not in own)
        if f"no {name}" not in changes and decoder not in decoders and not is_taken:
            own_formats.append(name)
    _plugins = found = _Plugins(order, openers, decoders, tuple(changes), frozenset(own_formats))
    return found


def _text_limits() -> tuple[int, int]:
    """Return Pillow's present limits on the text in PNGs."""
    # Pillow loads this module on first use. Another thread may be importing the module now.
    png = sys.modules.get("PIL.PngImagePlugin")
    return getattr(png, "MAX_TEXT_CHUNK", _TEXT_CHUNK), getattr(png, "MAX_TEXT_MEMORY", _TEXT_MEMORY)


def converted(image: Any, mode: str) -> Any:
    """Convert a Pillow image with ``Image.convert``. If a library is missing, the error names the library."""
    try:
        return image.convert(mode)
    except OSError as error:
        lacks = _NO_DECODER.search(str(error))
        if lacks is not None:
            feature = _FEATURES.get(lacks[1], lacks[1])
            raise _missing(f"a {image.format} image", feature) from error
        if _NO_GHOSTSCRIPT in str(error):
            raise MissingDependencyError(
                "an EPS image is drawn by Ghostscript, which is not installed: apt-get install ghostscript"
            ) from error
        raise


def _require_feature_of(blob: bytes, path: str) -> None:
    """Raise an error if the file has a format that this build of Pillow does not support."""
    features = require("PIL.features", extra="image")
    for feature, (plugin, pattern) in _OPTIONAL.items():
        if re.match(pattern, blob, re.DOTALL) is None:
            continue
        is_known = feature in features.modules or feature in features.features
        is_there = getattr(sys.modules.get(f"PIL.{plugin}"), "SUPPORTED", True)
        if is_known and not (is_there and features.check(feature)):
            raise _missing(repr(path), feature)


def _missing(what: str, feature: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"{what} cannot be decoded, as this Pillow was built without {feature!r} ('python -m PIL' lists "
        "what it has): pip install --force-reinstall pillow"
    )


def load_image(blob: bytes) -> Any:
    """Return an encoded image as torchvision's default loader returns that of a file."""
    return require("PIL.Image", extra="image").open(io.BytesIO(blob)).convert("RGB")


def opens_own() -> bool:
    """Return whether Pillow's own plugins and decoders serve JPEGs and PNGs at present."""
    return len(_plugins_of(require("PIL.Image", extra="image")).own) == len(_NATIVE_FORMATS)


def read_to_end(image: Any) -> None:
    """Have Pillow read all chunks of an opened PNG without decoding its pixels. Texts may follow the
    pixels."""
    image.fp.seek(image.tile[0][2])
    image.load_prepare()
    while image.load_read(1 << 20):
        pass
    image.tile = []
    image.load_end()


def _is_pillows(made: Any) -> bool:
    """Return whether a plugin, or an image's class, is Pillow's, or that of ``fastpipe.pillow``."""
    return str(getattr(made, "__module__", "")).startswith(("PIL.", "fastpipe.pillow"))


def _named(made: Any) -> str:
    return f"{getattr(made, '__module__', '')}.{getattr(made, '__qualname__', repr(made))}"


def _takes(accept: Any, begin: bytes) -> bool:
    """Return whether a Pillow plugin would try to open a file with these first bytes, by its function
    ``accept``. Errors are treated as Pillow treats them."""
    try:
        answer = accept is None or accept(begin)
    except (SyntaxError, IndexError, TypeError, struct.error):
        return False
    return bool(answer) and not isinstance(answer, str)


def _codec_versions() -> str:
    """Return the versions of decoding libraries, because builds of one Pillow version may use different
    libraries."""
    features = require("PIL.features", extra="image")
    known = {*features.modules, *features.codecs, *features.features}
    found = {name: features.version(name) for name in _CODECS if name in known}
    return repr({**found, "native": native.jpeg_version()})


class _Image:
    """An image whose header has been read. Its pixels have not been decoded yet."""

    def rows(self, top: int, count: int) -> None:
        return None

    def reduced(self, factor: int) -> ReducedImage | None:
        return None

    def encoded(self) -> bytes | None:
        return None

    def give(self, box: Box, pixels: UInt8Array) -> None:
        raise AssertionError("what Pillow opens it decodes")


class PillowImage(_Image):
    """An image that Pillow decodes."""

    def __init__(self, reader: ImageReader, blob: bytes, path: str) -> None:
        self._reader = reader
        self._opened = reader.open_pillow(blob, path)
        # Pillow versions below 11 apply the orientation of TIFFs while they decode the pixels.
        decodes_now = reader.decode.exif or self._opened.format == "TIFF"
        self._turned: Any = reader.convert(self._opened) if decodes_now else None

    @property
    def may_be_kept(self) -> bool:
        """Return whether a cache may store the image. The user's own Pillow plugins may decode the same file
        to other pixels each time."""
        return _is_pillows(type(self._opened))

    @property
    def size(self) -> Size:
        width, height = (self._turned or self._opened).size
        if not (width and height):  # Pillow has only the name of this format, and raises an error
            width, height = self.pil().size
        return Size(height, width)

    def region(self, box: Box) -> UInt8Array:
        image = self.pil()
        if box != Box(0, 0, *self.size):
            # Decode first: Pillow gives pixels in small pieces, and a thread needs the GIL for each piece.
            image = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
        return np.asarray(image)

    def pil(self) -> Any:
        if self._turned is None:
            self._turned = self._reader.convert(self._opened)
        return self._turned

    def info(self) -> dict[Any, Any]:
        return dict(self.pil().info)


class _FastImage(_Image):
    """A trusted JPEG: the native core decodes it to Pillow's pixels."""

    may_be_kept = True

    def __init__(self, reader: ImageReader, blob: bytes, path: str, header: JpegHeader) -> None:
        self._reader, self._blob, self._path = reader, blob, path
        self._given: tuple[Box, UInt8Array] | None = None
        self.size = Size(header.height, header.width)

    def encoded(self) -> bytes:
        return self._blob

    def give(self, box: Box, pixels: UInt8Array) -> None:
        self._given = box, pixels

    def region(self, box: Box) -> UInt8Array:
        if self._given is not None and self._given[0] == box:
            return self._given[1]
        pixels = self._reader.fast_region(self._blob, box)
        return PillowImage(self._reader, self._blob, self._path).region(box) if pixels is None else pixels

    def reduced(self, factor: int) -> _ReducedImage | None:
        return _ReducedImage(self._blob, self.size, factor) if self._reader.decode.scaled else None

    def info(self) -> dict[Any, Any]:
        return dict(self._reader.open_pillow(self._blob, self._path).info)

    def pil(self) -> Any:
        # User code receives this image. It is Pillow's own image with ``info`` (EXIF, ICC profile …).
        return PillowImage(self._reader, self._blob, self._path).pil()


class _ReducedImage:
    """A JPEG that the native core decodes at 1 / 2, 1 / 4 or 1 / 8 of its size."""

    def __init__(self, blob: bytes, size: Size, factor: int) -> None:
        self._blob, self._factor = blob, factor
        self.size = Size(-(-size.height // factor), -(-size.width // factor))

    def rows(self, count: int) -> UInt8Array | None:
        """Return at least ``count`` rows from the top, in full width; None if the rows are not available."""
        found: UInt8Array | None = native.decode_reduced(self._blob, self._factor, count)
        return found


class JpegHeader(NamedTuple):
    """The facts in a JPEG's header. The EXIF orientation is not applied to the height and width.

    Attributes:
        trusted: True if the fast decoders give Pillow's pixels for this kind of JPEG, and the file contains
            all of its scans. Pillow decides about truncated and damaged files.
        orientation: the EXIF orientation 1 … 8; 1 if there is no orientation. The value is 0 if only Pillow
            can read the orientation, because the tag is in XMP data or has an unusual form.
    """

    height: int
    width: int
    trusted: bool
    orientation: int


def read_jpeg_header(blob: bytes) -> JpegHeader | None:
    """Read a JPEG's segments up to its first scan. Return None if ``blob`` is no JPEG, or is damaged before
    the first scan."""
    header = JpegHeader(*native.read_jpeg_header(blob))
    return header if header.height else None


@ranged("read")
def read_many(paths: Sequence[str]) -> list[tuple[bytes, JpegHeader | None] | None]:
    """Read regular files. Return each file's bytes and JPEG header (None if the file is no JPEG).

    The result is None for a file that cannot be read.  Call ``read_file`` for this file to raise the error.
    """
    found: list[tuple[bytes, JpegHeader | None] | None] = []
    for one in native.read_files([os.fsencode(path) for path in paths]):
        if one is None:
            found.append(None)
        else:
            blob, header = one[0], JpegHeader(*one[1])
            found.append((blob, header if header.height else None))
    return found
