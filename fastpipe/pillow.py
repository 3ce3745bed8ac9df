"""Pillow's JPEGs and PNGs, decoded by the native core when their pixels are needed.

:func:`register` replaces Pillow's openers of JPEGs and PNGs in this process.  ``Image.open`` then returns
images of a subclass of Pillow's ``JpegImageFile`` or ``PngImageFile``, with the same pixels, attributes and
errors.  The operations ``load``, ``convert("RGB")``, ``crop``, ``resize`` and mirroring of RGB images are
noted, not run.  When the pixels are needed, the native core runs all noted operations at once: of a JPEG it
decodes the region of the crop only.  Pillow runs all other methods, and decodes all files that the core does
not decode exactly as Pillow does.
"""

from __future__ import annotations

import functools
import io
import operator
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageFile, JpegImagePlugin, PngImagePlugin, __version__

from fastpipe.core.native import native
from fastpipe.core.types import UInt8Array
from fastpipe.errors import OptionError
from fastpipe.images.pillow_rules import FILTERS, decodes_as_pillow, pillow_filter
from fastpipe.images.reader import opens_own, read_to_end

_OLDEST = (11, 1)  # earlier versions have no property ``im`` that a subclass can replace
_BOX, _RESIZE, _FLIP = 6, 1, 4  # ``Step::Kind`` of fastpipe/native/geometry.h
_MIRRORED = {Image.Transpose.FLIP_LEFT_RIGHT: True, Image.Transpose.FLIP_TOP_BOTTOM: False}

_Opener = Callable[..., Any]
_replaced: dict[str, tuple[_Opener, Any]] = {}  # the openers that ``unregister`` restores, by format


def register() -> None:
    """Make Pillow decode JPEGs and PNGs lazily in this process, until :func:`unregister` is called.

    Your own ``Dataset`` with ``Image.open`` needs no other change.  Call this function in the process that
    opens the images: at the start of the script, or in ``worker_init_fn``.  ``FastLoader`` and ``accelerate``
    call it in the worker processes of datasets with code of their own.

    ``type(image)`` is then a subclass of Pillow's class, until the pixels have been needed by Pillow itself.

    Raises:
        OptionError: this Pillow cannot be served.  The message says why.

    >>> import fastpipe.pillow
    >>> from PIL import Image
    >>> path = getfixture("tmp_path") / "x.jpg"
    >>> Image.linear_gradient("L").save(path)
    >>> fastpipe.pillow.register()
    >>> image = Image.open(path).convert("RGB").crop((0, 0, 64, 64)).resize((32, 32))
    >>> image.size, image.getpixel((31, 31))
    ((32, 32), (62, 62, 62))
    >>> fastpipe.pillow.unregister()
    """
    if is_registered():
        return
    reason = why_not()
    if reason:
        raise OptionError(f"fastpipe cannot decode images for Pillow: {reason}")
    for lazy in (LazyJpegFile, LazyPngFile):
        opener, accept = _replaced[lazy.format] = Image.OPEN[lazy.format]
        Image.register_open(lazy.format, _lazily(opener, lazy), accept)


def _lazily(opener: _Opener, lazy: type[LazyJpegFile] | type[LazyPngFile]) -> _Opener:
    def opened(fp: Any, filename: Any = None) -> Any:
        image = opener(fp, filename)
        if type(image) is lazy._stock:
            image.__class__ = lazy
        return image

    opened.__module__ = __name__
    return opened


def unregister() -> None:
    """Restore Pillow's own openers.  Images that have been opened keep working."""
    for name, (opener, accept) in _replaced.items():
        Image.register_open(name, opener, accept)
    _replaced.clear()


def is_registered() -> bool:
    """Return whether this process decodes JPEGs and PNGs lazily."""
    return bool(_replaced)


def why_not() -> str:
    """Return the reason why :func:`register` would raise an error; "" if it would not."""
    if tuple(map(int, re.findall(r"\d+", __version__)[:2])) < _OLDEST:
        return f"Pillow {__version__} is older than {_OLDEST[0]}.{_OLDEST[1]}"
    if not opens_own():
        return "the script has its own plugin or decoder of JPEGs or PNGs"
    if not decodes_as_pillow():
        return (
            f"Pillow {__version__} decodes JPEGs to other pixels than libjpeg-turbo {native.jpeg_version()}"
        )
    return ""


class _Operation(NamedTuple):
    """A method of ``Image`` that was called, with its arguments."""

    name: str
    arguments: tuple[Any, ...]


class _Source:
    """An encoded JPEG, or decoded pixels.  All images that were made from it share it.

    Attributes:
        file: the encoded JPEG; None if the whole image has been decoded.
        pixels: uint8 (H, W, 3), after the whole image has been decoded.
    """

    # Regions that the image before was asked for.  Scripts ask each image for as many.
    usual_regions = 1

    def __init__(self, file: bytes | None, size: tuple[int, int], pixels: UInt8Array | None) -> None:
        self.file = file if pixels is None else None
        self.pixels = pixels
        self._has_choice = pixels is None  # of decoding regions, or the whole image once
        self._width, self._height = size
        self._regions = 0

    def __del__(self) -> None:
        if self._has_choice:
            type(self).usual_regions = max(1, self._regions)

    def draw(self, operations: Sequence[_Operation]) -> UInt8Array | None:
        """Return the pixels, uint8 (H, W, 3); None if Pillow has to make them."""
        self._regions += 1
        steps, numbers = _described(operations)
        # Two regions of random crops take about as long to decode as the whole image.
        is_whole = not any(one.name == "crop" for one in operations) or self._regions > 2
        if self.file is not None and (is_whole or self.usual_regions > 1):
            self.pixels = native.decode(self.file, 0, 0, self._height, self._width)
            self.file = self.file if self.pixels is None else None
        if self.pixels is None:
            return None if self.file is None else native.draw_jpeg(self.file, steps, numbers)
        return native.draw_pixels(self.pixels, steps, numbers) if operations else self.pixels

    def by_pillow(self) -> Any:
        """Return a new RGB image with all pixels, which Pillow decodes once."""
        if self.pixels is None:
            image = JpegImagePlugin.JpegImageFile(io.BytesIO(self.file or b""))
            self.pixels, self.file = np.asarray(image.convert("RGB")), None
        return Image.fromarray(self.pixels)


def _described(operations: Sequence[_Operation]) -> tuple[list[Any], np.ndarray[Any, Any]]:
    """Return the operations as native steps, and the numbers that these steps read."""
    steps, numbers = [], [0.0]
    for name, arguments in operations:
        if name == "crop":
            steps.append(_step(_BOX, draw=len(numbers)))
            numbers += map(float, arguments[0])
        elif name == "resize":
            (width, height), resample = arguments
            mode, order = _filter(resample) or (0, 0)
            steps.append(_step(_RESIZE, size=(height, width), filter=mode, order=order))
        else:
            # Each probability is above the number at 0.
            steps.append(_step(_FLIP, probability=1.0, horizontal=_MIRRORED[arguments[0]]))
    return steps, np.array(numbers)


@functools.lru_cache(256)
def _step(kind: int, **fields: Any) -> Any:
    step = native.Step()
    step.kind = kind
    for name, value in fields.items():
        setattr(step, name, value)
    return step


@functools.cache
def _filter(resample: int) -> tuple[int, int] | None:
    """Return the kernels' filter with Pillow's results, and the order of its passes; None if none has."""
    name = Image.Resampling(resample).name.lower()
    return pillow_filter(FILTERS[name]) if name in FILTERS else None


class _Lazy(Image.Image):
    """An image whose pixels have not been needed yet.

    If Pillow itself needs the pixels, the image becomes one of Pillow's own class.  This may happen in any
    method.  So methods call those of ``Image``, which Pillow's class for JPEGs does not override, instead of
    those of ``super()``.
    """

    _stock: type[Image.Image]  # the class that the image would have without fastpipe
    _noted: tuple[_Source, tuple[_Operation, ...]]

    def _notes(self) -> tuple[_Source, tuple[_Operation, ...]] | None:
        """Return what the image was made from, and the operations; None if it is Pillow's own now."""
        return self.__dict__.get("_noted")

    # ---- operations that are noted -------------------------------------------------------------------

    def load(self) -> Any:
        return _Pixels(self)

    def convert(self, mode: Any = None, *arguments: Any, **options: Any) -> Any:
        is_plain = mode == "RGB" and not arguments and not options and "transparency" not in self.info
        if is_plain and (noted := self._notes()) is not None:
            return _image_of(self, self._size, *noted)
        return Image.Image.convert(self, mode, *arguments, **options)

    def copy(self) -> Any:
        if self._mode == "RGB" and (noted := self._notes()) is not None:
            return _image_of(self, self._size, *noted)
        return Image.Image.copy(self)

    __copy__ = copy

    def crop(self, box: Any = None) -> Any:
        width, height = self._size
        if box is None or box == (0, 0, width, height):
            return self.copy()
        if (edges := _rounded(box)) is not None:
            left, top, right, bottom = edges
            size, limit = (right - left, bottom - top), Image.MAX_IMAGE_PIXELS
            is_inside = 0 <= left < right <= width and 0 <= top < bottom <= height
            is_plain = is_inside and (limit is None or size[0] * size[1] <= limit)
            if is_plain and (made := self._after("crop", (edges,), size)) is not None:
                return made
        return Image.Image.crop(self, box)

    def resize(
        self, size: Any, resample: Any = None, box: Any = None, reducing_gap: float | None = None
    ) -> Any:
        to, mode = _whole(size), Image.Resampling.BICUBIC if resample is None else resample
        is_plain = box is None and reducing_gap is None and mode in list(Image.Resampling)
        if to is not None and min(to) > 0 and is_plain and _filter(mode) is not None:
            if to == self._size:
                return self.copy()
            if (made := self._after("resize", (to, mode), to)) is not None:
                return made
        return Image.Image.resize(self, size, resample, box, reducing_gap)

    def transpose(self, method: Any) -> Any:
        if method in _MIRRORED and (made := self._after("transpose", (method,), self._size)) is not None:
            return made
        return Image.Image.transpose(self, method)

    def _after(self, name: str, arguments: tuple[Any, ...], size: tuple[int, int]) -> Any:
        """Return a new image, after one more operation; None if it cannot be noted."""
        if self._mode != "RGB" or (noted := self._notes()) is None:
            return None
        source, operations = noted
        if name == "resize" and any(one.name == name for one in operations):  # each resize rounds
            return None
        return _image_of(self, size, source, (*operations, _Operation(name, arguments)))

    # ---- pixels --------------------------------------------------------------------------------------

    @property
    def im(self) -> Any:
        if "_noted" not in self.__dict__:
            return Image.Image.im.fget(self)  # type: ignore[attr-defined]
        self._decode()
        return self.im

    @im.setter
    def im(self, im: Any) -> None:
        self._im = im
        self._become_stock()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if (pixels := self._pixels()) is not None:
            return {"version": 3, "shape": pixels.shape, "typestr": "|u1", "data": pixels}
        found: dict[str, Any] = Image.Image.__array_interface__.fget(self)  # type: ignore[attr-defined]
        return found

    def _pixels(self) -> UInt8Array | None:
        """Return the pixels, read-only uint8 (H, W, 3); None if Pillow has to make them."""
        if self._mode != "RGB" or (noted := self._notes()) is None:
            return None
        pixels: UInt8Array | None = self.__dict__.get("_drawn")
        if pixels is None and (pixels := noted[0].draw(noted[1])) is not None:
            pixels.flags.writeable = False
            self._drawn = pixels
        return pixels

    def _decode(self) -> None:
        """Make this image what it would be without fastpipe."""
        # A grey image is only noted if an RGB image was made from it.
        noted = self._notes() if self._mode == "RGB" else self.__dict__.get("_noted")
        if noted is None:
            if isinstance(self, _Lazy):
                self._become_stock()
            return
        pixels = self._pixels()
        if pixels is not None:
            image = Image.frombytes("RGB", self._size, pixels)
        else:
            image = noted[0].by_pillow()
            if self._mode != image.mode:
                image = image.convert(self._mode)
            for name, arguments in noted[1]:
                image = getattr(image, name)(*arguments)
            image.load()
        self.im = image.im

    def _become_stock(self) -> None:
        for name in ("_noted", "_drawn"):
            self.__dict__.pop(name, None)
        self.__class__ = self._stock  # type: ignore[assignment]

    def close(self) -> None:
        self._become_stock()
        self.close()

    def __eq__(self, other: object) -> bool:
        for image in (self, other):
            if isinstance(image, _Lazy):
                image._decode()
        return bool(self == other)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._decode()
        return self.__reduce_ex__(protocol)


class _LazyImage(_Lazy):
    """An image that was made from a file by operations that are noted."""

    _stock = Image.Image


class _LazyFile(_Lazy, ImageFile.ImageFile):
    """A file that Pillow has opened."""

    def load(self) -> Any:
        if self._mode == "RGB" and self._notes() is not None:
            return super().load()
        if isinstance(self, _Lazy):
            self._decode()
        return self.load()

    def _notes(self) -> tuple[_Source, tuple[_Operation, ...]] | None:
        if "_noted" in self.__dict__:
            return self._noted
        source = self._read() if self._is_usual() else None
        if source is None:
            self._become_stock()
            return None
        _end_file(self)
        self._noted = source, ()
        return self._noted

    def _is_usual(self) -> bool:
        """Return whether Pillow would decode the file now, in one piece and with its own decoder."""
        if len(self.tile) != 1 or self.decoderconfig or self._im is not None or self.fp is None:
            return False
        return self.tile[0][1] == (0, 0, *self._size) and self.tile[0][0] not in Image.DECODERS

    @abstractmethod
    def _read(self) -> _Source | None:
        """Read the file, if its pixels are certain to be Pillow's and without an error."""

    def _file(self) -> bytes:
        assert self.fp is not None
        self.fp.seek(0)
        return self.fp.read()


class LazyJpegFile(_LazyFile, JpegImagePlugin.JpegImageFile):
    """A JPEG that Pillow has opened."""

    _stock = JpegImagePlugin.JpegImageFile

    def _read(self) -> _Source | None:
        codec, _, offset, arguments = self.tile[0]
        if codec != "jpeg" or offset != 0 or arguments != (self._mode, "") or self._mode not in ("L", "RGB"):
            return None
        file = self._file()
        kind = native.probe_jpeg(file)
        pixels = None
        if kind == 2:
            pixels = native.decode(file, 0, 0, self._size[1], self._size[0])
        is_fit = kind == 1 or pixels is not None
        return _Source(file, self._size, pixels) if is_fit else None


class LazyPngFile(_LazyFile, PngImagePlugin.PngImageFile):
    """A PNG that Pillow has opened.  Operations are noted if it is RGB."""

    _stock = PngImagePlugin.PngImageFile

    def _notes(self) -> tuple[_Source, tuple[_Operation, ...]] | None:
        if self._mode == "RGB":
            return super()._notes()
        self._decode()
        return None

    def _decode(self) -> None:
        """Make this image what it would be without fastpipe."""
        if self._mode == "RGB":
            super()._decode()
            return
        rows = self._rows()
        if rows is None:
            self._become_stock()
            return
        # It is an image of Pillow's class from here on.
        self.im = Image.frombytes(self._mode, self._size, rows, "raw", self.tile[0][3]).im
        read_to_end(self)
        _end_file(self)

    def _read(self) -> _Source | None:
        if (rows := self._rows()) is None:
            return None
        if self.tile[0][3] != "RGB":  # of 16 bits
            rows = np.asarray(Image.frombytes("RGB", self._size, rows, "raw", self.tile[0][3]))
        pixels = rows.reshape(self._size[1], self._size[0], 3)
        self._im = Image.new("RGB", (1, 1)).im  # so that Pillow allocates no memory for the pixels
        try:
            read_to_end(self)
        except BaseException:
            self.im = Image.frombytes("RGB", self._size, pixels).im
            raise
        self._im = None
        return _Source(None, self._size, pixels)

    def _rows(self) -> UInt8Array | None:
        """Return the rows as the file stores them; None if Pillow has to decode them."""
        if not self._is_usual() or self.tile[0][0] != "zip" or self.info.get("interlace"):
            return None
        rows: UInt8Array | None = native.png_rows(self._file())
        return rows


def _end_file(image: Any) -> None:
    """Do what Pillow does after it has decoded an image."""
    image.tile, image.map = [], None
    image.readonly = 0
    if image._exclusive_fp and image._close_exclusive_fp_after_loading:
        image._close_fp()
    image.fp = None


def _image_of(
    image: Image.Image, size: tuple[int, int], source: _Source, operations: tuple[_Operation, ...]
) -> _LazyImage:
    """Return a new image, as a method of ``image`` would."""
    new = _LazyImage()
    new._mode, new._size = "RGB", size
    new.info = image._copy_info() if hasattr(image, "_copy_info") else image.info.copy()
    new._noted = source, operations
    return new


class _Pixels:
    """The pixels of an image, as ``load`` returns them.  Access to a pixel decodes the image."""

    def __init__(self, image: _Lazy) -> None:
        self._image = image

    def __getitem__(self, xy: Any) -> Any:
        return self._access()[xy]

    def __setitem__(self, xy: Any, colour: Any) -> None:
        self._access()[xy] = colour

    def _access(self) -> Any:
        self._image._decode()
        return self._image.load()


def _rounded(box: Any) -> tuple[int, ...] | None:
    """Return the edges of a box as Pillow rounds them; None if they are not four numbers."""
    try:
        edges = tuple(map(int, map(round, box)))
    except (TypeError, ValueError, OverflowError):
        return None
    return edges if len(edges) == 4 else None


def _whole(size: Any) -> tuple[int, int] | None:
    """Return a width and a height; None if they are not two whole numbers."""
    try:
        width, height = map(operator.index, size)
    except (TypeError, ValueError):
        return None
    return width, height
