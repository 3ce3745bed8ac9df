"""The engine ``"graph"``, of TensorFlow's operations alone, and the reference that tests compare with."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import tensorflow as tf

from fastpipe.core.types import Box, Size
from fastpipe.options import Decode
from fastpipe.tf.image_stream import ImageOptions
from fastpipe.tf.pixels import load
from fastpipe.tf.rows import Column, Form, Rows
from fastpipe.tf.stream import Batching

_FORMATS = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
_MAGIC = (b"\x89PNG", b"BM", b"GIF8")  # of all but JPEG
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def why_not_graph(rows: Rows, batching: Batching, options: ImageOptions) -> str:
    """Return why TensorFlow's operations cannot make these samples; empty if they can."""
    for column in rows.columns:
        why = _why_not(column)
        if why:
            return f"{why} (of {column.name!r})" if column.name else why
    if batching.bad_samples.policy == "replace":
        return "it cannot replace bad samples; it can skip them"
    if batching.bad_samples.log is not None or batching.bad_samples.max_errors is not None:
        return "it cannot count bad samples"
    if options.cache.where in ("ram", "disk"):
        return "it keeps nothing by itself: call .cache() on the dataset, and leave cache= out"
    if options.decode != Decode():
        return f"{options.decode} is for fastpipe's decoders"
    return ""


def _why_not(column: Column) -> str:
    spec = column.spec
    if column.preprocess is not None:
        return "preprocess= is the script's Python"
    if spec.parity == "pil" and (spec.filter != "bilinear" or spec.channels != 3 or spec.aspect):
        return "only a bilinear resize of RGB images is Pillow's within 1/255 there"
    if spec.outside != "error":
        return f"outside={spec.outside!r} needs the size of each image beforehand"
    if column.boxes is not None and column.boxes.is_relative:
        return "boxes in parts of the image need its size beforehand"
    other = next((path for path in column.paths if not path.lower().endswith(_FORMATS)), None)
    return f"TensorFlow does not decode {os.path.splitext(other)[1] or other!r} files" if other else ""


def graph_dataset(rows: Rows, batching: Batching, form: Form) -> Any:
    """Return the dataset, batched; serialisable."""
    slices: dict[str, Any] = {f"tabular {name}": values for name, values in rows.tabular.items()}
    for number, column in enumerate(rows.columns):
        slices[f"path {number}"] = list(map(os.fsencode, column.paths))
        if column.boxes is not None:
            edges = np.rint(column.boxes.edges).astype(np.int32)
            slices[f"box {number}"] = np.hstack([edges[:, [1, 0]], (edges[:, 2:] - edges[:, :2])[:, ::-1]])
    if rows.labels is not None:
        slices["labels"] = rows.labels
    made = tf.data.Dataset.from_tensor_slices(slices)
    if batching.shuffle:
        made = made.shuffle(len(rows), seed=batching.seed, reshuffle_each_iteration=True)
    if batching.shard is not None:
        made = made.shard(batching.shard.world, batching.shard.rank)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def sample(row: Any) -> Any:
        images = [
            _image(column, row[f"path {number}"], row.get(f"box {number}"), form)
            for number, column in enumerate(rows.columns)
        ]
        tabular = {name: row[f"tabular {name}"] for name in form.tabular}
        return form.element(images, tabular, row.get("labels"))

    made = made.map(sample, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    if batching.bad_samples.policy == "skip":
        made = made.ignore_errors(log_warning=True)
    return made.batch(
        batching.batch_size, drop_remainder=batching.drop_remainder, num_parallel_calls=tf.data.AUTOTUNE
    )


def _image(column: Column, path: Any, box: Any, form: Form) -> Any:
    raw = tf.io.read_file(path)
    kinds = [tf.io.is_jpeg(raw), *(tf.strings.substr(raw, 0, len(start)) == start for start in _MAGIC)]
    name = f" ({column.name})" if column.name else ""
    known = tf.debugging.Assert(
        tf.reduce_any(tf.stack(kinds)), [f"this file{name} is no JPEG, PNG, BMP or GIF image:", path]
    )
    with tf.control_dependencies([known] if known is not None else []):
        raw = tf.identity(raw)
    image = load(raw, box, column.spec)
    if column.rescale is not None:
        image = image * tf.constant(column.rescale[0], tf.float32)
        if column.rescale[1]:
            image += tf.constant(column.rescale[1], tf.float32)
    return _finished(image, form)


def _finished(image: Any, form: Form) -> Any:
    """Return an image, float32 (H, W, C), in the type and order of memory that elements have."""
    if form.output == "uint8":
        image = tf.clip_by_value(tf.round(image), 0, 255)
    return form.arrange(tf.cast(image, form.output))


# ---- the reference -------------------------------------------------------------------------------


def reference_dataset(rows: Rows, form: Form, batch_size: int, drop_remainder: bool) -> Any:
    """Return the rows in their order, made one by one by ``tf.py_function``, as batches."""

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def sample(row: Any) -> Any:
        images = []
        for column in rows.columns:
            image = tf.py_function(partial(_reference_image, column), [row], tf.float32)
            image.set_shape((*column.spec.size, column.spec.channels))
            images.append(_finished(image, form))
        tabular = {name: tf.gather(rows.tabular[name], row) for name in form.tabular}
        return form.element(images, tabular, None if rows.labels is None else tf.gather(rows.labels, row))

    made = tf.data.Dataset.range(len(rows)).map(sample, num_parallel_calls=tf.data.AUTOTUNE)
    return made.batch(batch_size, drop_remainder=drop_remainder)


def _reference_image(column: Column, number: Any) -> npt.NDArray[np.float32]:
    row = int(number)
    spec, path = column.spec, column.paths[row]
    made: npt.NDArray[np.float32]
    if spec.parity == "pil":
        with PIL.Image.open(path) as opened:
            image = opened.convert(_MODES[spec.channels])
        size = Size(image.height, image.width)
        box = Box(0, 0, *size) if column.boxes is None else column.boxes.box(row, size, spec.outside)
        part = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
        part = part.resize(spec.size[::-1], PIL.Image.Resampling[spec.filter.upper()])
        made = np.asarray(part, np.float32).reshape(*spec.size, spec.channels)
    else:
        raw, region = tf.io.read_file(path), None
        if column.boxes is not None:
            whole = tf.image.decode_image(raw, expand_animations=False)
            region = tf.constant(column.boxes.box(row, Size(*whole.shape[:2]), spec.outside), tf.int32)
        made = load(raw, region, spec).numpy()
    if column.rescale is not None:
        made = made * np.float32(column.rescale[0]) + np.float32(column.rescale[1])
    return made
