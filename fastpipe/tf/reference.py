"""The same samples as stock parts make them: the oracle of tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import tensorflow as tf

from fastpipe.core.types import Box, Size
from fastpipe.tf.form import Form
from fastpipe.tf.graph_ops import load
from fastpipe.tf.rows import Column, Rows

__all__ = ["reference_dataset"]

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def reference_dataset(rows: Rows, form: Form, batch_size: int, drop_remainder: bool) -> Any:
    """The rows in their order, one after the other through ``tf.py_function``, as batches."""

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def sample(row: Any) -> Any:
        images = []
        for column in rows.columns:
            image = tf.py_function(lambda n, column=column: _image(column, int(n)), [row], tf.float32)
            image.set_shape((*column.spec.size, column.spec.channels))
            if form.output == "uint8":
                image = tf.clip_by_value(tf.round(image), 0, 255)
            images.append(form.laid_out(tf.cast(image, form.output)))
        tabular = {name: tf.gather(rows.tabular[name], row) for name in form.tabular}
        return form.element(images, tabular, None if rows.labels is None else tf.gather(rows.labels, row))

    made = tf.data.Dataset.range(len(rows)).map(sample, num_parallel_calls=tf.data.AUTOTUNE)
    return made.batch(batch_size, drop_remainder=drop_remainder)


def _image(column: Column, row: int) -> npt.NDArray[np.float32]:
    spec, path = column.spec, column.paths[row]
    made = _of_pillow(column, row) if spec.parity == "pil" else None
    if made is None:
        raw, box = tf.io.read_file(path), None
        if column.boxes is not None:
            image = tf.image.decode_image(raw, expand_animations=False)
            box = tf.constant(column.boxes.of(row, Size(*image.shape[:2]), spec.outside), tf.int32)
        made = load(raw, box, spec).numpy()
    assert made is not None
    if column.rescale is not None:
        made = made * np.float32(column.rescale[0]) + np.float32(column.rescale[1])
    return made


def _of_pillow(column: Column, row: int) -> npt.NDArray[np.float32]:
    spec = column.spec
    with PIL.Image.open(column.paths[row]) as opened:
        image = opened.convert(_MODES[spec.channels])
    size = Size(image.height, image.width)
    box = Box(0, 0, *size) if column.boxes is None else column.boxes.of(row, size, spec.outside)
    part = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
    return np.asarray(
        part.resize(spec.size[::-1], PIL.Image.Resampling[spec.filter.upper()]), np.float32
    ).reshape(*spec.size, spec.channels)
