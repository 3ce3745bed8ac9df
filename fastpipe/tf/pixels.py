"""From an encoded image to the pixels of a sample: Pillow's bytes, or TensorFlow's floats."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import PIL.Image
import tensorflow as tf

from fastpipe.core.native import native
from fastpipe.core.types import Box, Size, UInt8Array
from fastpipe.images.cache import WholeImage
from fastpipe.images.pillow import FILTERS, grey_is_known, pillow_filter
from fastpipe.images.pixels import Conversion, Region, draw, fold, part_of
from fastpipe.images.reader import ImageReader, converted
from fastpipe.images.steps import BOX, GREY, PROPORTION, RESIZE, described_step
from fastpipe.options import Decode
from fastpipe.tf.boxes import Boxes
from fastpipe.tf.graph_ops import decoded, resized
from fastpipe.tf.options import ImageSpec

__all__ = ["OpenedImage", "PillowPixels", "SampleMaker", "Scaling", "TensorFlowPixels", "maker_of"]


class Scaling(NamedTuple):
    """What becomes of a sample's numbers at last: ``number * factor + offset``, each operation in float32.

    Attributes:
        before, after: NumPy types; floats that become bytes are clipped and rounded.
        factor, offset: None for no scaling.
    """

    before: Any
    after: Any
    factor: float | None
    offset: float

    def apply(self, sample: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Scale a sample."""
        if self.after == np.uint8:
            out[:] = sample if self.before == np.uint8 else np.clip(np.rint(sample), 0, 255)
        elif self.factor is None:
            out[:] = sample
        else:
            np.multiply(sample, np.float32(self.factor), out=out)
            if self.offset or self.before != np.uint8:
                out += np.float32(self.offset)

    def as_native(self) -> tuple[int, float, float]:
        """The same, as the native core takes it."""
        bytes_before, bytes_after = self.before == np.uint8, self.after == np.uint8
        if bytes_before or bytes_after:
            kind = 0 if bytes_before and bytes_after else 1 if bytes_before else 3
        else:
            kind = 0 if self.factor is None else 2
        return kind, 1.0 if self.factor is None else self.factor, self.offset


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

    def native(self, boxes: Boxes | None, scaling: Scaling, keeps: bool) -> Any:
        """What the native core is told to make samples of these boxes and scale them, and whether it is to be
        given those to be kept: a ``native.ImagePlan``; None where it cannot make them."""

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
        self._filter = pillow_filter(FILTERS[spec.filter])
        self._steps: list[Any] | None = None  # from a box to a sample; None where Pillow has to be asked
        if self._filter is not None and (spec.channels != 1 or grey_is_known()):
            mode, order = self._filter
            resize = described_step(RESIZE, size=tuple(spec.size), filter=mode, order=order)
            steps = [described_step(GREY, channels=1)] if spec.channels == 1 else []
            self._steps = None if resize is None else [*steps, described_step(BOX, outside=2), resize]
        self._how = Conversion("bytes", spec.channels, interleaved=True)
        self.tag = f"pillow {spec} {reader.settings()}"
        # Images with transparency are opened by Pillow, whatever their format.
        self.dct: Literal["exact"] | None = None if spec.channels == 4 else "exact"

    def describe(self) -> str:
        return self.reader.describe()

    def native(self, boxes: Boxes | None, scaling: Scaling, keeps: bool) -> Any:
        if self._spec.channels == 4 or self._steps is None or not self.reader.is_native:
            return None
        assert self._filter is not None
        return _native_plan((self._spec, boxes), self.reader, self._filter, 0, scaling, keeps)

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
        if self._steps is None or isinstance(image, _OfPillow):
            return None
        edges = box.left, box.top, box.left + box.width, box.top + box.height
        return fold(self._steps, image.size, edges)

    def _by_pillow(self, image: Any, box: Box) -> npt.NDArray[Any]:
        resampling = getattr(PIL.Image.Resampling, self._spec.filter.upper())
        part = _cropped(self._converted(image), box)
        return np.asarray(part.resize(self._spec.size[::-1], resampling))

    def _converted(self, image: Any) -> Any:
        return converted(image.pil(), {1: "L", 3: "RGB", 4: "RGBA"}[self._spec.channels])


class _OfPillow:
    """An image of Pillow's, whatever its channels are."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened
        self.size = Size(opened.height, opened.width)

    def pil(self) -> Any:
        return self._opened


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

    def region(self, box: Box) -> UInt8Array:
        """A part of the image: uint8 (h, w, C)."""
        if self._given is not None and self._given[0] == box:
            return self._given[1]
        pixels: UInt8Array | None = None
        if self._is_plain and self._channels != 4:
            pixels = native.decode(self._blob, *box, _KINDS[self._channels])
        if pixels is None:  # also what libjpeg only warns of: TensorFlow decides whether it is an error
            if self._whole is None:
                self._whole = decoded(self._blob, None, self._channels, "tf").numpy()
            pixels = self._whole[box.top : box.top + box.height, box.left : box.left + box.width]
        return pixels


_KINDS = {3: 1, 1: 2}  # of pixels that the native core decodes, by channels
_RESIZES = {"bilinear": 1, "nearest": 2}  # that it has


class TensorFlowPixels:
    """Samples as ``tf.image.decode_image``, ``crop_to_bounding_box`` and ``resize`` give them.

    Args:
        spec: what becomes of an image.
        reader: knows the limits of images that are opened.
    """

    word = np.float32

    def __init__(self, spec: ImageSpec, reader: ImageReader) -> None:
        self._spec, self.reader = spec, reader
        is_plain = (not spec.antialias or spec.filter == "nearest") and spec.aspect is None
        self._resize = _RESIZES.get(spec.filter) if is_plain else None
        self.tag = f"tensorflow {tf.__version__} {spec} {reader.settings()}"
        # TensorFlow's grey is the file's own, not one of its colours.
        self.dct: Literal["fast"] | None = "fast" if spec.channels == 3 else None

    def describe(self) -> str:
        return "JPEG  →  libjpeg-turbo, by TensorFlow's default transform; other images  →  TensorFlow"

    def native(self, boxes: Boxes | None, scaling: Scaling, keeps: bool) -> Any:
        if self._resize is None or self._spec.channels == 4:
            return None
        return _native_plan((self._spec, boxes), self.reader, (0, 0), self._resize, scaling, keeps)

    def open(self, blob: bytes, path: str) -> Any:
        size, is_plain = self.reader.look_at(blob, path)
        return _TensorFlowImage(blob, size, self._spec.channels, is_plain)

    def make(self, image: Any, box: Box | None, out: npt.NDArray[Any]) -> None:
        self.resize(self.cut(image, box), out)

    def resize(self, pixels: UInt8Array, out: npt.NDArray[Any]) -> None:
        if self._resize is None:
            out[:] = resized(pixels, self._spec).numpy().reshape(-1)
        else:
            shape = (*self._spec.size, pixels.shape[2])
            native.resize_as_tensorflow(np.ascontiguousarray(pixels), self._resize, out.reshape(shape))

    def cut(self, image: Any, box: Box | None) -> UInt8Array:
        pixels: UInt8Array = image.region(box or Box(0, 0, *image.size))
        return pixels

    def part(self, image: Any, box: Box | None, *, is_cut: bool) -> Box | None:
        if self.dct is None or image.encoded() is None:
            return None
        return box or Box(0, 0, *image.size)


def _native_plan(
    column: tuple[ImageSpec, Boxes | None], reader: ImageReader, filter_: tuple[int, int], parity: int,
    scaling: Scaling, keeps: bool,
) -> Any:  # fmt: skip
    """What the native core is told of a column: a ``native.ImagePlan``; None where a number does not fit.

    Args:
        column: what becomes of its images, and their boxes.
        reader: whose limits they have.
        filter_: of a resize of Pillow's, and the order of its passes.
        parity: 0 for Pillow's pixels; 1, 2 for TensorFlow's, resized bilinearly or to the nearest.
        scaling, keeps: as of ``SampleMaker.native``.
    """
    spec, boxes = column
    size, steps = tuple(spec.size), []
    proportion: dict[str, Any] = {}
    if spec.aspect is not None:
        proportion = {"size": size, "pads": spec.aspect == "pad"}
    if spec.channels == 1 and parity == 0:
        steps.append(described_step(GREY, channels=1))
    if boxes is not None:
        outside = ("error", "clip", "pad").index(spec.outside)
        steps.append(described_step(BOX, is_relative=boxes.is_relative, outside=outside, **proportion))
    elif proportion:
        steps.append(described_step(PROPORTION, **proportion))
    steps.append(described_step(RESIZE, size=size, filter=filter_[0], order=filter_[1]))
    if None in steps:
        return None
    limit, decode = reader.most_pixels, reader.decode
    return native.ImagePlan(
        steps, Conversion("bytes", spec.channels, interleaved=True).native, 0 if boxes is None else 4,
        -1 if limit is None else limit, parity == 0 and decode.exif, parity == 0 and decode.scaled,
        parity=parity, scaling=scaling.as_native(), keeps_samples=keeps,
    )  # fmt: skip


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
