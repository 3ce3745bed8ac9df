"""The datasets that are replaced, as scripts write them; and those of who knows TensorFlow's operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.bench.tf.data import NUMBERS, SIDE, Setting, Table
from fastpipe.bench.tf.framework import tensorflow
from fastpipe.core.extras import require

__all__ = ["by_hand", "by_hand_antialiased", "by_pillow", "from_directory"]

Sample = Callable[[Any], Any]


def by_pillow(table: Table, batch_size: int, *, is_shuffled: bool, kept: str | None = None) -> Any:
    """Pillow in ``tf.py_function``: one call for each image of a sample.

    Args:
        table: the samples.
        batch_size: samples in a batch.
        is_shuffled: whether each epoch has an order of its own.
        kept: where ``Dataset.cache`` keeps the samples: a file, or in memory if it is empty; None keeps none.
    """
    tf, load = tensorflow(), _pillow()

    def sample(row: Any) -> Any:
        images = {}
        for name in table.boxes:
            image = tf.py_function(load, [row["file"], row[name]], tf.float32)
            image.set_shape((SIDE, SIDE, 3))
            images[name] = image
        if table.is_single:
            return images[name], row["label"]
        return {**images, NUMBERS: row[NUMBERS]}, row["label"]

    return _batches(table, sample, batch_size, is_shuffled, kept)


def by_hand(table: Table, batch_size: int, *, is_shuffled: bool) -> Any:
    """TensorFlow's operations, of which one decodes no more than the box; the resize is not antialiased.

    Args:
        table, batch_size, is_shuffled: as of `by_pillow`.
    """
    tf = tensorflow()

    def sample(row: Any) -> Any:
        left, top, right, bottom = tf.unstack(row["image"])
        window = tf.stack([top, left, bottom - top, right - left])
        image = tf.io.decode_and_crop_jpeg(tf.io.read_file(row["file"]), window, channels=3)
        return tf.image.resize(image, (SIDE, SIDE)), row["label"]

    return _batches(table, sample, batch_size, is_shuffled)


def by_hand_antialiased(table: Table, batch_size: int, *, is_shuffled: bool) -> Any:
    """TensorFlow's operations, nearer to Pillow's pixels.

    Args:
        table, batch_size, is_shuffled: as of `by_pillow`.
    """
    tf = tensorflow()

    def sample(row: Any) -> Any:
        left, top, right, bottom = tf.unstack(row["image"])
        image = tf.io.decode_jpeg(tf.io.read_file(row["file"]), channels=3)
        image = tf.image.crop_to_bounding_box(image, top, left, bottom - top, right - left)
        return tf.image.resize(image, (SIDE, SIDE), antialias=True), row["label"]

    return _batches(table, sample, batch_size, is_shuffled)


def from_directory(setting: Setting, *, is_shuffled: bool) -> Any:
    """Keras's loader at its defaults."""
    tensorflow()
    keras = require("keras", extra="tf")
    return keras.utils.image_dataset_from_directory(
        str(setting.folder), batch_size=setting.batch_size, shuffle=is_shuffled, seed=0, verbose=False
    )


def _pillow() -> Callable[[Any, Any], npt.NDArray[np.float32]]:
    """The function of the script's that loads an image."""
    image = require("PIL.Image", extra="image")

    def load(path: Any, box: Any) -> npt.NDArray[np.float32]:
        with image.open(path.numpy().decode()) as opened:
            part = opened.convert("RGB").crop(tuple(box.numpy().tolist()))
        return np.array(part.resize((SIDE, SIDE), image.Resampling.BILINEAR), np.float32)

    return load


def _batches(
    table: Table, sample: Sample, batch_size: int, is_shuffled: bool, kept: str | None = None
) -> Any:
    """A dataset of batches, in which each row is made by a function."""
    tf = tensorflow()
    made = tf.data.Dataset.from_tensor_slices(table.columns)
    if is_shuffled and kept is None:
        made = made.shuffle(len(table))
    made = made.map(sample, num_parallel_calls=tf.data.AUTOTUNE)
    if kept is not None:
        made = made.cache(kept)
        made = made.shuffle(len(table)) if is_shuffled else made
    return made.batch(batch_size).prefetch(tf.data.AUTOTUNE)
