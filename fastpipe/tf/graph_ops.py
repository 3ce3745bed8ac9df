"""Images by TensorFlow's operations alone: for graphs, and where there is no kernel."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from fastpipe.tf.options import ImageSpec

__all__ = ["decoded", "load", "resized"]

_MARGIN = 2  # columns beside a part of a JPEG that have to be decoded with it


def load(raw: Any, box: Any, spec: ImageSpec) -> Any:
    """Decode, crop and resample, in or outside a graph.

    Args:
        raw: a string tensor, the file's content.
        box: int32 (4,): top, left, height, width; None for the whole image.
        spec: what becomes of it.

    Returns:
        float32 (H, W, C), 0 to 255; for Pillow's pixels, whole numbers.
    """
    return resized(decoded(raw, box, spec.channels, spec.parity), spec)


def decoded(raw: Any, box: Any, channels: int, parity: str) -> Any:
    """Decode a file, or a box of it: uint8 (h, w, channels).

    With Pillow's decoding in mind JPEGs are decoded by the exact transform that it uses.
    """
    method = "INTEGER_ACCURATE" if parity == "pil" else ""

    def whole() -> Any:
        return tf.image.decode_image(raw, channels=channels, expand_animations=False)

    def of_jpeg() -> Any:
        if box is None:
            return tf.io.decode_jpeg(raw, channels=channels, dct_method=method)
        return _part_of_jpeg(raw, box, channels, method)

    def of_others() -> Any:
        image = whole()
        return image if box is None else tf.image.crop_to_bounding_box(image, *tf.unstack(box))

    if channels == 4 or (box is None and parity == "tf"):
        image = of_others()
    else:
        image = tf.cond(tf.io.is_jpeg(raw), of_jpeg, of_others)
    image.set_shape((None, None, channels))
    return image


def _part_of_jpeg(raw: Any, box: Any, channels: int, method: str) -> Any:
    """A box of a JPEG, as it is in the whole image: at the edges of what TensorFlow decodes alone, colours
    differ, as they are made of those of the columns beside."""
    top, left, height, width = tf.unstack(box)
    end = tf.image.extract_jpeg_shape(raw)[1]
    inside = tf.debugging.Assert(left + width <= end, ["a box reaches outside its image:", box])
    with tf.control_dependencies([] if inside is None else [inside]):
        first, last = tf.maximum(left - _MARGIN, 0), tf.minimum(left + width + _MARGIN, end)
    window = tf.stack([top, first, height, last - first])
    part = tf.io.decode_and_crop_jpeg(raw, window, channels=channels, dct_method=method)
    return part[:, left - first : left - first + width]


def resized(image: Any, spec: ImageSpec) -> Any:
    """Resample: float32 (H, W, C)."""
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
