"""From an encoded image to the pixels of a sample: Pillow's bytes, or TensorFlow's floats."""

from __future__ import annotations

import threading
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import PIL.Image
import simplejpeg
import tensorflow as tf

from fastpipe.images.geometry import Crop, Grey, Operation, Region, fold
from fastpipe.images.pillow import FILTERS, pillow_resize
from fastpipe.images.pixels import Conversion, draw, part_of
from fastpipe.images.reader import ImageReader
from fastpipe.images.whole import WholeImage
from fastpipe.options import Decode
from fastpipe.tf.graph_ops import MARGIN, decoded, resized
from fastpipe.tf.options import ImageSpec
from fastpipe.tf.sample_kernels import bilinear_scratch, resize_bilinear
from fastpipe.types import Box, Size, UInt8Array

__all__ = ["OpenedImage", "PillowPixels", "SampleMaker", "TensorFlowPixels", "maker_of"]


class OpenedImage(Protocol):
    """An image whose size is known."""

    @property
    def size(self) -> Size: ...


class SampleMaker(Protocol):
    """Makes samples of images.  May be used by any number of threads.

    Attributes:
        word: NumPy type of a sample's numbers: uint8, or float32 from 0 to 255.
        tag: all that makes a difference to them, in words, but the reader's rules.
        reader: opens images, and knows the limits of those.
        dct: libjpeg's transform, by which a decoder of batches gives these pixels; None where none does.
    """

    @property
    def word(self) -> Any: ...

    @property
    def tag(self) -> str: ...

    @property
    def reader(self) -> ImageReader: ...

    @property
    def dct(self) -> Literal["exact", "fast"] | None: ...

    def describe(self) -> str:
        """Who decodes, in one line."""

    def open(self, blob: bytes, path: str) -> Any:
        """Look at an image's header; the errors of ``ImageReader.open``."""

    def make(self, image: Any, box: Box | None, out: npt.NDArray[Any]) -> None:
        """Decode what is needed of an opened image and resample it, into (H * W * C,) of ``word``."""

    def cut(self, image: Any, box: Box | None) -> UInt8Array:
        """The box of an opened image as it is: uint8 (h, w, C)."""

    def part(self, image: Any, box: Box | None, *, is_cut: bool) -> Box | None:
        """What of an opened image a decoder of batches may decode for ``make``, or for ``cut``; None where
        this object has to."""

    def resize(self, pixels: UInt8Array, out: npt.NDArray[Any]) -> None:
        """Resample an image, uint8 (h, w, C), as ``make`` does."""


def maker_of(spec: ImageSpec, decode: Decode) -> SampleMaker:
    """The maker of a spec."""
    reader = ImageReader(decode)
    return PillowPixels(spec, reader) if spec.parity == "pil" else TensorFlowPixels(spec, reader)


class PillowPixels:
    """Samples as ``Image.open(path).convert(…).crop(box).resize(size)`` gives them.

    Args:
        spec: what becomes of an image.
        reader: opens images.
    """

    word = np.uint8

    def __init__(self, spec: ImageSpec, reader: ImageReader) -> None:
        self._spec, self.reader = spec, reader
        self._mode = FILTERS[spec.filter]
        self._how = Conversion("bytes", spec.channels, interleaved=True)
        self.tag = f"pillow {spec} {reader.settings()}"
        # Images with transparency are opened by Pillow, whatever their format.
        self.dct: Literal["exact"] | None = None if spec.channels == 4 else "exact"

    def describe(self) -> str:
        return self.reader.describe()

    def open(self, blob: bytes, path: str) -> Any:
        if self._spec.channels == 4:
            return _OfPillow(self.reader.open_pillow(blob, path))
        return self.reader.open(blob, path)

    def make(self, image: Any, box: Box | None, out: npt.NDArray[Any]) -> None:
        box = _proportioned(box or Box(0, 0, *image.size), self._spec)
        region = self._region(image, box)
        if region is None:
            out[:] = self._by_pillow(image, box).reshape(-1)
        else:
            draw(image, region, self._how, out)

    def cut(self, image: Any, box: Box | None) -> UInt8Array:
        box = box or Box(0, 0, *image.size)
        if self._spec.channels == 3 and _is_inside(box, image.size):
            pixels: UInt8Array = image.region(box)
            return pixels
        return np.asarray(_cropped(self._converted(image), box)).reshape(box.height, box.width, -1)

    def part(self, image: Any, box: Box | None, *, is_cut: bool) -> Box | None:
        if isinstance(image, _OfPillow) or image.encoded() is None:
            return None
        box = box or Box(0, 0, *image.size)
        if is_cut:
            return box if self._spec.channels == 3 and _is_inside(box, image.size) else None
        region = self._region(image, _proportioned(box, self._spec))
        return None if region is None else part_of(image, region)

    def resize(self, pixels: UInt8Array, out: npt.NDArray[Any]) -> None:
        size = Size(*pixels.shape[:2])
        if self._spec.channels == 3:
            self.make(WholeImage(size, lambda first, count: pixels[first : first + count], dict), None, out)
        else:
            image = PIL.Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
            self.make(_OfPillow(image), None, out)

    def _region(self, image: Any, box: Box) -> Region | None:
        """All that becomes of a box, for the kernels; None where Pillow has to be asked."""
        resize = pillow_resize(self._mode, Size(box.height, box.width), self._spec.size)
        if resize is None or isinstance(image, _OfPillow):
            return None
        operations: list[Operation] = [Grey(1)] if self._spec.channels == 1 else []
        return fold([*operations, Crop(box), resize], image.size)

    def _by_pillow(self, image: Any, box: Box) -> npt.NDArray[Any]:
        resampling = getattr(PIL.Image.Resampling, self._spec.filter.upper())
        part = _cropped(self._converted(image), box)
        return np.asarray(part.resize(self._spec.size[::-1], resampling))

    def _converted(self, image: Any) -> Any:
        return image.pil().convert({1: "L", 3: "RGB", 4: "RGBA"}[self._spec.channels])


class _OfPillow:
    """An image of Pillow's, whatever its channels are."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened
        self.size = Size(opened.height, opened.width)

    def pil(self) -> Any:
        return self._opened


class _Scratch(threading.local):
    """Memory that a thread uses again for each image: to map it anew takes a fifth of decoding."""

    def __init__(self) -> None:
        self._places = np.empty(0, np.uint32)
        self._numbers = np.empty(0, np.float32)
        self._bytes = np.empty(0, np.uint8)

    def bytes(self, size: int) -> UInt8Array:
        if size > _LARGEST_KEPT:
            return np.empty(size, np.uint8)
        if self._bytes.size < size:
            self._bytes = np.empty(size, np.uint8)
        return self._bytes[:size]

    def numbers(self, sizes: tuple[int, int]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
        if self._places.size < sizes[0] or self._numbers.size < sizes[1]:
            self._places, self._numbers = np.empty(sizes[0], np.uint32), np.empty(sizes[1], np.float32)
        return self._places, self._numbers


_LARGEST_KEPT = 1 << 25  # bytes: one enormous image must not cost memory for ever
_scratch = _Scratch()


class _TensorFlowImage:
    """An image for TensorFlow's pixels: decoded once it is needed, but for its size where a header has it."""

    def __init__(self, blob: bytes, size: Size, channels: int, is_plain: bool) -> None:
        self.size = size
        self._blob, self._channels, self._is_plain = blob, channels, is_plain
        self._whole: UInt8Array | None = None
        self._given: tuple[Box, UInt8Array] | None = None

    def encoded(self) -> bytes | None:
        return self._blob if self._is_plain else None

    def give(self, box: Box, pixels: UInt8Array) -> None:
        self._given = box, pixels

    def whole(self) -> UInt8Array:
        if self._whole is None:
            self._whole = self._by_simplejpeg() if self._is_plain and self._channels == 3 else None
        if self._whole is None:
            self._whole = decoded(self._blob, None, self._channels, "tf").numpy()
        return self._whole

    def _by_simplejpeg(self) -> UInt8Array | None:
        memory = _scratch.bytes(self.size.height * self.size.width * 3)
        try:
            # TensorFlow's default is the fast transform, whose pixels differ from the exact one's.
            pixels: UInt8Array = simplejpeg.decode_jpeg(self._blob, fastdct=True, buffer=memory)
            return pixels
        except ValueError:  # also of what libjpeg only warns of: TensorFlow decides whether it is an error
            return None

    def region(self, box: Box) -> tuple[UInt8Array, Box]:
        """Pixels, and where in them the box is."""
        if self._given is not None and self._given[0] == box:
            return self._given[1], Box(0, 0, box.height, box.width)
        if self._whole is None and self._is_plain and self._channels == 3 and box != Box(0, 0, *self.size):
            first, last = max(box.left - MARGIN, 0), min(box.left + box.width + MARGIN, self.size.width)
            window = (box.top, first, box.height, last - first)
            part = tf.raw_ops.DecodeAndCropJpeg(contents=self._blob, crop_window=window, channels=3)
            return part.numpy(), Box(0, box.left - first, box.height, box.width)
        return self.whole(), box


class TensorFlowPixels:
    """Samples as ``tf.image.decode_image``, ``crop_to_bounding_box`` and ``resize`` give them.

    Args:
        spec: what becomes of an image.
        reader: knows the limits of images that are opened.
    """

    word = np.float32

    def __init__(self, spec: ImageSpec, reader: ImageReader) -> None:
        self._spec, self.reader = spec, reader
        self._has_kernel = spec.filter == "bilinear" and not spec.antialias and spec.aspect is None
        self.tag = f"tensorflow {tf.__version__} {spec} {reader.settings()}"
        # TensorFlow's grey is the file's own, not one of its colours.
        self.dct: Literal["fast"] | None = "fast" if spec.channels == 3 else None

    def describe(self) -> str:
        return "images  →  simplejpeg and TensorFlow, by its default transform"

    def open(self, blob: bytes, path: str) -> Any:
        size, is_plain = self.reader.look_at(blob, path)
        return _TensorFlowImage(blob, size, self._spec.channels, is_plain)

    def make(self, image: Any, box: Box | None, out: npt.NDArray[Any]) -> None:
        box = box or Box(0, 0, *image.size)
        if not self._has_kernel:
            out[:] = resized(self.cut(image, box), self._spec).numpy().reshape(-1)
            return
        pixels, part = image.region(box)
        self._resample(pixels, part, out)

    def resize(self, pixels: UInt8Array, out: npt.NDArray[Any]) -> None:
        if self._has_kernel:
            self._resample(pixels, Box(0, 0, *pixels.shape[:2]), out)
        else:
            out[:] = resized(pixels, self._spec).numpy().reshape(-1)

    def _resample(self, pixels: UInt8Array, part: Box, out: npt.NDArray[Any]) -> None:
        width, channels = pixels.shape[1:]
        size = self._spec.size
        places, numbers = _scratch.numbers(bilinear_scratch(part.width, channels, *size))
        start = (part.top * width + part.left) * channels
        resize_bilinear(
            pixels.reshape(-1), start, width * channels, part.height, part.width, channels, *size, places,
            numbers, out,
        )  # fmt: skip

    def cut(self, image: Any, box: Box | None) -> UInt8Array:
        pixels, part = image.region(box or Box(0, 0, *image.size))
        cut: UInt8Array = pixels[part.top : part.top + part.height, part.left : part.left + part.width]
        return cut

    def part(self, image: Any, box: Box | None, *, is_cut: bool) -> Box | None:
        if self.dct is None or image.encoded() is None:
            return None
        return box or Box(0, 0, *image.size)


def _proportioned(box: Box, spec: ImageSpec) -> Box:
    """A box made smaller, or larger, to have the proportions of the result, as Keras does."""
    if spec.aspect is None:
        return box
    height, width = spec.size
    tall = int(np.float32(box.width * height) / np.float32(width))
    wide = int(np.float32(box.height * width) / np.float32(height))
    if spec.aspect == "crop":
        tall, wide = max(min(box.height, tall), 1), max(min(box.width, wide), 1)
    else:
        tall, wide = max(box.height, tall), max(box.width, wide)
    top, left = (box.height - tall) // 2, (box.width - wide) // 2
    return Box(box.top + top, box.left + left, tall, wide)


def _is_inside(box: Box, image: Size) -> bool:
    return (
        box.top >= 0 and box.left >= 0 and box.top + box.height <= image.height
        and box.left + box.width <= image.width
    )  # fmt: skip


def _cropped(image: Any, box: Box) -> Any:
    return image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
