"""The pixels of a sample from an encoded image: Pillow's bytes, or TensorFlow's floats."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import PIL.Image
import tensorflow as tf

from fastpipe.core.casting import unheld
from fastpipe.core.native import native
from fastpipe.core.types import Box, Size, UInt8Array
from fastpipe.errors import FastpipeError, OptionError
from fastpipe.images.cache import WholeImage
from fastpipe.images.pillow_rules import FILTERS, grey_is_known, pillow_filter
from fastpipe.images.pixels import Conversion, Region, draw, fold, part_of
from fastpipe.images.reader import ImageReader, converted
from fastpipe.images.steps import BOX, GREY, PROPORTION, RESIZE, described_step
from fastpipe.options import Decode
from fastpipe.tf.options import ImageSpec
from fastpipe.tf.rows import Boxes

Array = npt.NDArray[Any]

_MARGIN = 2  # the number of columns on each side of a part of a JPEG that must be decoded with the part
_KINDS = {3: 1, 1: 2}  # kinds of pixels that the native core decodes, by number of channels
_RESIZES = {"bilinear": 1, "nearest": 2}  # TensorFlow's methods that the native core supports


# ---- TensorFlow's operations ---------------------------------------------------------------------


def load(raw: Any, box: Any, spec: ImageSpec) -> Any:
    """Decode, crop and resample with TensorFlow operations, in a graph or outside a graph.

    ``box`` is int32 (4,) (top, left, height, width) or None.  Return float32 (H, W, C), 0 to 255.
    """
    return _resized(_decoded(raw, box, spec.channels, spec.parity), spec)


def _decoded(raw: Any, box: Any, channels: int, parity: str) -> Any:
    """Decode a file, or a box of its image: return uint8 (h, w, channels)."""
    method = "INTEGER_ACCURATE" if parity == "pil" else ""  # Pillow uses libjpeg's exact transform

    def of_jpeg() -> Any:
        if box is None:
            return tf.io.decode_jpeg(raw, channels=channels, dct_method=method)
        return _part_of_jpeg(raw, box, channels, method)

    def of_others() -> Any:
        image = tf.image.decode_image(raw, channels=channels, expand_animations=False)
        return image if box is None else tf.image.crop_to_bounding_box(image, *tf.unstack(box))

    if channels == 4 or (box is None and parity == "tf"):
        image = of_others()
    else:
        image = tf.cond(tf.io.is_jpeg(raw), of_jpeg, of_others)
    image.set_shape((None, None, channels))
    return image


def _part_of_jpeg(raw: Any, box: Any, channels: int, method: str) -> Any:
    """Decode a box of a JPEG to the pixels that the box has in the whole image.

    If TensorFlow decodes only the box, colours at the edges differ, because colours depend on neighbouring
    columns.
    """
    top, left, height, width = tf.unstack(box)
    end = tf.image.extract_jpeg_shape(raw)[1]
    inside = tf.debugging.Assert(left + width <= end, ["a box reaches outside its image:", box])
    with tf.control_dependencies([] if inside is None else [inside]):
        first, last = tf.maximum(left - _MARGIN, 0), tf.minimum(left + width + _MARGIN, end)
    window = tf.stack([top, first, height, last - first])
    part = tf.io.decode_and_crop_jpeg(raw, window, channels=channels, dct_method=method)
    return part[:, left - first : left - first + width]


def _resized(image: Any, spec: ImageSpec) -> Any:
    size = tuple(spec.size)
    if spec.aspect == "crop":
        made = keras.preprocessing.image.smart_resize(image, size, interpolation=spec.filter)
    elif spec.aspect == "pad":
        made = tf.image.resize_with_pad(image, *size, method=spec.filter, antialias=spec.antialias)
    else:
        made = tf.image.resize(image, size, method=spec.filter, antialias=spec.antialias)
    made = tf.cast(made, tf.float32)
    if spec.parity == "pil":
        made = tf.round(tf.clip_by_value(made, 0.0, 255.0))
    return tf.ensure_shape(made, (*size, spec.channels))


# ---- samples -------------------------------------------------------------------------------------


class Scaling(NamedTuple):
    """The scaling ``number * factor + offset`` from one NumPy dtype to another, each operation in float32.

    Floats that become bytes are clipped and rounded.  A factor of None means no scaling.
    """

    before: Any
    after: Any
    factor: float | None
    offset: float

    def apply(self, sample: Array, out: Array) -> None:
        """Scale ``sample``, and write the result to ``out``."""
        if self.after == np.uint8:
            out[:] = sample if self.before == np.uint8 else np.clip(np.rint(sample), 0, 255)
        elif self.factor is None:
            out[:] = sample
        else:
            np.multiply(sample, np.float32(self.factor), out=out)
            if self.offset or self.before != np.uint8:
                out += np.float32(self.offset)

    def as_native(self) -> tuple[int, float, float]:
        """Return the scaling in the native core's form."""
        of_bytes = self.before == np.uint8, self.after == np.uint8
        kinds = {(True, True): 0, (True, False): 1, (False, True): 3}
        kind = kinds.get(of_bytes, 0 if self.factor is None else 2)
        return kind, 1.0 if self.factor is None else self.factor, self.offset


class PillowPixels:
    """Makes samples that equal ``Image.open(path).convert(…).crop(box).resize(size)``, in any thread."""

    word = np.uint8  # the NumPy dtype of a sample's numbers

    def __init__(self, spec: ImageSpec, reader: ImageReader) -> None:
        self._spec, self.reader = spec, reader
        self._filter = pillow_filter(FILTERS[spec.filter])
        self._steps: list[Any] | None = None  # the steps from a box to a sample; None if Pillow makes samples
        if self._filter is not None and (spec.channels != 1 or grey_is_known()):
            mode, order = self._filter
            resize = described_step(RESIZE, size=tuple(spec.size), filter=mode, order=order)
            steps = [described_step(GREY, channels=1)] if spec.channels == 1 else []
            self._steps = None if resize is None else [*steps, described_step(BOX, outside=2), resize]
        self._how = Conversion("bytes", spec.channels, interleaved=True)
        # The tag holds everything that affects samples, except the reader's rules.
        self.tag = f"pillow {spec} {reader.settings()}"
        # The libjpeg transform with which a batch decoder gives these pixels.  The attribute is None for
        # images with transparency, because Pillow decodes images with transparency.
        self.dct: Literal["exact"] | None = None if spec.channels == 4 else "exact"

    def describe(self) -> str:
        """Return a line that names the decoders."""
        return self.reader.describe(reads_png=self._spec.channels == 3)

    def native(self, boxes: Boxes | None, scaling: Scaling, keeps: bool) -> Any:
        """Return the ``native.ImagePlan`` for these boxes; None if the native core cannot make the samples.

        If ``keeps`` is True, the plan also delivers samples for the cache.
        """
        if self._spec.channels == 4 or self._steps is None or not self.reader.is_native:
            return None
        assert self._filter is not None
        return _native_plan((self._spec, boxes), self.reader, self._filter, 0, scaling, keeps)

    def open(self, blob: bytes, path: str) -> Any:
        """Read an image's header. Raise the errors of ``ImageReader.open``."""
        if self._spec.channels == 4:
            return _PillowImage(self.reader.open_pillow(blob, path))
        return self.reader.open(blob, path)

    def make(self, image: Any, box: Box | None, out: Array) -> None:
        """Decode and resample the needed part of an opened image to ``out``, ``word`` (H * W * C,)."""
        box = _proportioned(box or Box(0, 0, *image.size), self._spec)
        region = self._region(image, box)
        if region is not None:
            draw(image, region, self._how, out)
            return
        resampling = getattr(PIL.Image.Resampling, self._spec.filter.upper())
        part = _cropped(self._converted(image), box)
        out[:] = np.asarray(part.resize(self._spec.size[::-1], resampling)).reshape(-1)

    def cut(self, image: Any, box: Box | None) -> UInt8Array:
        """Return the box of an opened image without resampling: uint8 (h, w, C)."""
        box = box or Box(0, 0, *image.size)
        if self._spec.channels == 3 and _is_inside(box, image.size):
            pixels: UInt8Array = image.region(box)
            return pixels
        return np.asarray(_cropped(self._converted(image), box)).reshape(box.height, box.width, -1)

    def part(self, image: Any, box: Box | None, *, is_cut: bool) -> Box | None:
        """Return the part of an opened image that a batch decoder may decode; None if ``make`` or ``cut``
        must decode it.

        ``is_cut`` says whether the part is for ``cut`` instead of ``make``.
        """
        if isinstance(image, _PillowImage) or image.encoded() is None:
            return None
        box = box or Box(0, 0, *image.size)
        if is_cut:
            return box if self._spec.channels == 3 and _is_inside(box, image.size) else None
        region = self._region(image, _proportioned(box, self._spec))
        return None if region is None else part_of(image, region)

    def resize(self, pixels: UInt8Array, out: Array) -> None:
        """Resample an image, uint8 (h, w, C), as ``make`` does."""
        size = Size(*pixels.shape[:2])
        if self._spec.channels == 3:
            self.make(WholeImage(size, lambda first, count: pixels[first : first + count], dict), None, out)
        else:
            self.make(_PillowImage(_as_pillow(pixels)), None, out)

    def _region(self, image: Any, box: Box) -> Region | None:
        """Return the ``Region`` from which the kernels make the sample; None if Pillow makes the sample."""
        if self._steps is None or isinstance(image, _PillowImage):
            return None
        edges = box.left, box.top, box.left + box.width, box.top + box.height
        return fold(self._steps, image.size, edges)

    def _converted(self, image: Any) -> Any:
        return converted(image.pil(), {1: "L", 3: "RGB", 4: "RGBA"}[self._spec.channels])


class _PillowImage(NamedTuple):
    """An image that Pillow opened, with any channels."""

    opened: Any

    @property
    def size(self) -> Size:
        return Size(self.opened.height, self.opened.width)

    def pil(self) -> Any:
        return self.opened


class TensorFlowPixels:
    """Makes samples that equal ``tf.image.decode_image``, ``crop_to_bounding_box`` and ``resize``."""

    word = np.float32

    def __init__(self, spec: ImageSpec, reader: ImageReader) -> None:
        self._spec, self.reader = spec, reader
        is_plain = (not spec.antialias or spec.filter == "nearest") and spec.aspect is None
        self._resize = _RESIZES.get(spec.filter) if is_plain else None
        self.tag = f"tensorflow {tf.__version__} {spec} {reader.settings()}"
        # TensorFlow's grey is the file's own luma, which is not computed from colours.
        self.dct: Literal["fast"] | None = "fast" if spec.channels == 3 else None

    def describe(self) -> str:
        return "JPEG  →  native core, by TensorFlow's default transform; other images  →  TensorFlow"

    def native(self, boxes: Boxes | None, scaling: Scaling, keeps: bool) -> Any:
        if self._resize is None or self._spec.channels == 4:
            return None
        return _native_plan((self._spec, boxes), self.reader, (0, 0), self._resize, scaling, keeps)

    def open(self, blob: bytes, path: str) -> Any:
        try:
            size, is_plain = self.reader.look_at(blob, path)
        except FastpipeError:
            raise
        except (OSError, SyntaxError, ValueError) as error:  # Pillow refuses files that TensorFlow reads
            if self.reader.decode.max_pixels is not None:
                raise
            try:
                whole = _decoded(blob, None, self._spec.channels, "tf").numpy()
            except tf.errors.OpError:
                raise error from None
            return _TensorFlowImage(blob, Size(*whole.shape[:2]), self._spec.channels, False, whole)
        return _TensorFlowImage(blob, size, self._spec.channels, is_plain)

    def make(self, image: Any, box: Box | None, out: Array) -> None:
        self.resize(self.cut(image, box), out)

    def cut(self, image: Any, box: Box | None) -> UInt8Array:
        pixels: UInt8Array = image.region(box or Box(0, 0, *image.size))
        return pixels

    def part(self, image: Any, box: Box | None, *, is_cut: bool) -> Box | None:
        if self.dct is None or image.encoded() is None:
            return None
        return box or Box(0, 0, *image.size)

    def resize(self, pixels: UInt8Array, out: Array) -> None:
        if self._resize is None:
            out[:] = _resized(pixels, self._spec).numpy().reshape(-1)
        else:
            shape = (*self._spec.size, pixels.shape[2])
            native.resize_as_tensorflow(np.ascontiguousarray(pixels), self._resize, out.reshape(shape))


class _TensorFlowImage:
    """An image for TensorFlow's pixels. Only its header is read until its pixels are needed."""

    def __init__(
        self, blob: bytes, size: Size, channels: int, is_plain: bool, whole: UInt8Array | None = None
    ) -> None:
        self.size = size
        self._blob, self._channels, self._is_plain = blob, channels, is_plain
        self._whole = whole
        self._given: tuple[Box, UInt8Array] | None = None

    def encoded(self) -> bytes | None:
        return self._blob if self._is_plain else None

    def give(self, box: Box, pixels: UInt8Array) -> None:
        self._given = box, pixels

    def region(self, box: Box) -> UInt8Array:
        """Return a part of the image: uint8 (h, w, C)."""
        if self._given is not None and self._given[0] == box:
            return self._given[1]
        pixels: UInt8Array | None = None
        if self._is_plain and self._channels != 4:
            pixels = native.decode(self._blob, *box, _KINDS[self._channels])
        if pixels is None:  # also if libjpeg only warns: TensorFlow decides whether the warning is an error
            if self._whole is None:
                self._whole = _decoded(self._blob, None, self._channels, "tf").numpy()
            pixels = self._whole[box.top : box.top + box.height, box.left : box.left + box.width]
        return pixels


PixelMaker = PillowPixels | TensorFlowPixels


def pixel_maker(spec: ImageSpec, decode: Decode) -> PixelMaker:
    """Return the object that makes Pillow's or TensorFlow's pixels, as ``spec`` requires."""
    reader = ImageReader(decode)
    return PillowPixels(spec, reader) if spec.parity == "pil" else TensorFlowPixels(spec, reader)


def _native_plan(
    column: tuple[ImageSpec, Boxes | None], reader: ImageReader, filter_: tuple[int, int], parity: int,
    scaling: Scaling, keeps: bool,
) -> Any:  # fmt: skip
    """Return the ``native.ImagePlan`` of a column; None if a number does not fit into the native core's
    types.

    ``filter_`` is the filter of Pillow's resize, and the order of its two passes.  ``parity`` is 0 for
    Pillow's pixels, 1 for TensorFlow's pixels resized bilinearly, and 2 for TensorFlow's pixels resized to
    the nearest pixel.
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
        # Pillow converts palettes to grey with other roundings than colours.
        reads_png=parity == 0 and spec.channels == 3,
    )  # fmt: skip


def _proportioned(box: Box, spec: ImageSpec) -> Box:
    """Shrink or enlarge a box to the result's proportions, as Keras does."""
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


def _as_pillow(pixels: UInt8Array) -> Any:
    return PIL.Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


# ---- the script's own code -----------------------------------------------------------------------


class Preprocessing:
    """A function of the user that is called with the used part of an image; see ``image_dataset``."""

    def __init__(
        self, function: Callable[..., Any], name: str, spec: ImageSpec, output: np.dtype[Any]
    ) -> None:
        self._function, self._spec, self._output = function, spec, output
        self._of = f" of {name!r}" if name else ""
        try:
            self._takes_rng = "rng" in inspect.signature(function).parameters
        except (TypeError, ValueError):  # built-in functions have no signature
            self._takes_rng = False

    def run(self, pixels: UInt8Array, row: int, seed: int) -> Array:
        """Call the function with an image, uint8 (h, w, C); ``row`` is used in error messages.

        Return uint8 (h, w, C), which must still be resampled, or the final float32 (H, W, C).
        """
        more = {"rng": np.random.default_rng(seed)} if self._takes_rng else {}
        made = np.asarray(self._function(_as_pillow(pixels), **more))
        if made.ndim == 2:
            made = made[:, :, None]
        size, channels = self._spec.size, self._spec.channels
        if made.dtype == np.uint8 and made.ndim == 3 and made.shape[2] == channels and made.size:
            return np.ascontiguousarray(made)
        if made.dtype.kind == "f" and made.shape == (*size, channels):
            if self._output.kind == "u" or unheld(made, self._output).any():
                raise OptionError(
                    f"row {row}: preprocess{self._of} returned {made.dtype} of {made.min()} to {made.max()}, "
                    f"which output={self._output.name!r} cannot hold: return uint8, or take output='float32'"
                )
            return made.astype(np.float32)
        raise OptionError(
            f"row {row}: preprocess{self._of} returned {made.dtype} of shape {made.shape}: it must return an "
            f"image with {channels} channels, or uint8 (h, w, {channels}), which are resized afterwards, or "
            f"floats of shape {(*size, channels)}, which are taken as they are"
        )
