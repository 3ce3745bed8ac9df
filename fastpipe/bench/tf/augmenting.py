"""Datasets that augment batches in memory: mirroring, rotation, brightness and contrast."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import fastpipe
from fastpipe.bench.tf.data import SIDE, Setting
from fastpipe.bench.tf.framework import tensorflow
from fastpipe.bench.tf.scripts import by_pillow
from fastpipe.core.extras import require

__all__ = ["by_augment", "by_keras", "by_operations", "by_stateless_operations"]

DEGREES, PART = 10, 0.2
_LEVELS = PART * 255  # of brightness, where it is added


def by_augment(setting: Setting) -> Any:
    """``fastpipe.tf.Augment``."""
    layer = fastpipe.tf.Augment(horizontal_flip=0.5, rotation=DEGREES, brightness=PART, contrast=PART, seed=0)
    return _batchwise(setting, layer)


def by_keras(setting: Setting) -> Any:
    """Keras's layers, one after the other."""
    tensorflow()
    keras = require("keras", extra="tf")
    layers = keras.layers
    model = keras.Sequential([
        layers.RandomFlip("horizontal", seed=0),
        layers.RandomRotation(DEGREES / 360, fill_mode="constant", seed=0),
        layers.RandomBrightness(PART, seed=0),
        layers.RandomContrast((PART, PART), seed=0),  # of one number, factors are 1 to 1 + PART
    ])  # fmt: skip
    return _batchwise(setting, lambda images: model(images, training=True))


def by_operations(setting: Setting) -> Any:
    """``tf.image.random_…``, image by image."""
    tf = tensorflow()

    def change(image: Any) -> Any:
        image = tf.image.random_flip_left_right(image)
        image = _rotated(tf, image, tf.random.uniform((), -1.0, 1.0))
        image = tf.image.random_brightness(image, _LEVELS)
        return tf.image.random_contrast(image, 1 - PART, 1 + PART)

    return _imagewise(setting, change, is_seeded=False)


def by_stateless_operations(setting: Setting) -> Any:
    """``tf.image.stateless_random_…``, image by image, with seeds that are counted."""
    tf = tensorflow()

    def change(image: Any, number: Any) -> Any:
        seeds = [tf.stack([number, tf.constant(kind, tf.int64)]) for kind in range(4)]
        image = tf.image.stateless_random_flip_left_right(image, seeds[0])
        image = _rotated(tf, image, tf.random.stateless_uniform((), seeds[1], -1.0, 1.0))
        image = tf.image.stateless_random_brightness(image, _LEVELS, seeds[2])
        return tf.image.stateless_random_contrast(image, 1 - PART, 1 + PART, seeds[3])

    return _imagewise(setting, change, is_seeded=True)


def _batchwise(setting: Setting, change: Callable[[Any], Any]) -> Any:
    """A batch, again and again, changed as a whole."""
    tf = tensorflow()
    made = tf.data.Dataset.from_tensors(_images(setting)).repeat(setting.lengths.batches)
    return made.map(change, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def _imagewise(setting: Setting, change: Callable[..., Any], *, is_seeded: bool) -> Any:
    """A batch, again and again, of which each image is changed before they are put together."""
    tf = tensorflow()
    made = tf.data.Dataset.from_tensor_slices(_images(setting)).repeat(setting.lengths.batches)
    if is_seeded:
        made = tf.data.Dataset.zip((made, tf.data.Dataset.counter()))
    made = made.map(change, num_parallel_calls=tf.data.AUTOTUNE)
    return made.batch(setting.batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def _images(setting: Setting) -> Any:
    """A full batch of crops, float32 (N, 128, 128, 3) of 0 to 255."""
    table = setting.photos.table(setting.batch_size)
    return next(iter(by_pillow(table, setting.batch_size, is_shuffled=False)))[0]


def _rotated(tf: Any, image: Any, part: Any) -> Any:
    """An image rotated about its centre by a part of the greatest angle.

    ``tf.image`` has no such function; this is TensorFlow Addons'.

    Args:
        tf: the package; a graph is made of what runs here, where it is not imported.
        image: float32 (128, 128, 3).
        part: from -1 to 1.
    """
    angle = part * math.radians(DEGREES)
    sine, cosine, centre = tf.sin(angle), tf.cos(angle), (SIDE - 1) / 2
    right = centre - cosine * centre + sine * centre
    down = centre - sine * centre - cosine * centre
    matrix = tf.stack([cosine, -sine, right, sine, cosine, down, 0.0, 0.0])
    made = tf.raw_ops.ImageProjectiveTransformV3(
        images=image[None], transforms=matrix[None], output_shape=[SIDE, SIDE], fill_value=0.0,
        interpolation="BILINEAR", fill_mode="CONSTANT",
    )  # fmt: skip
    return tf.ensure_shape(made[0], (SIDE, SIDE, 3))
