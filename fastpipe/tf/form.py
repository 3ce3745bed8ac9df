"""What an element of a dataset looks like: a tensor or a dict of them, and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from fastpipe.tf.rows import Column, Rows

__all__ = ["Form", "form_of"]

_ALONE = "image"  # name of the only image, where other inputs stand beside it


class Form(NamedTuple):
    """The form of elements.

    Attributes:
        names: of the images; empty where the input is the image itself.
        tabular: names of the other inputs.
        has_labels: whether an element is a pair.
        is_planar: images are (C, H, W).
        output: NumPy's name of their type.
    """

    names: Sequence[str]
    tabular: Sequence[str]
    has_labels: bool
    is_planar: bool
    output: str

    def element(self, images: Sequence[Any], tabular: Mapping[str, Any], labels: Any) -> Any:
        """An element of these parts."""
        inputs: Any = images[0]
        if self.names:
            inputs = {**dict(zip(self.names, images, strict=True)), **tabular}
        return (inputs, labels) if self.has_labels else inputs

    def signature(self, rows: Rows, batch: int | None) -> Any:
        """The type of batches of ``batch`` rows; None for any number."""
        images = [
            tf.TensorSpec((batch, *self.shape(column)), self.output) for column in rows.columns
        ]  # fmt: skip
        tabular = {
            name: tf.TensorSpec((batch, *values.shape[1:]), values.dtype)
            for name, values in rows.tabular.items()
        }
        labels = rows.labels
        spec = None if labels is None else tf.TensorSpec((batch, *labels.shape[1:]), labels.dtype)
        return self.element(images, tabular, spec)

    def shape(self, column: Column) -> tuple[int, int, int]:
        """Of an image."""
        (height, width), channels = column.spec.size, column.spec.channels
        return (channels, height, width) if self.is_planar else (height, width, channels)

    def laid_out(self, image: Any) -> Any:
        """An image, or a batch, (…, H, W, C), as elements have it: an array or a tensor."""
        if not self.is_planar:
            return image
        if isinstance(image, np.ndarray):
            return np.ascontiguousarray(np.moveaxis(image, -1, -3))
        rank = len(image.shape)
        return tf.transpose(image, [*range(rank - 3), rank - 1, rank - 3, rank - 2])


def form_of(rows: Rows, data_format: str, output: str) -> Form:
    """The form of a dataset of these rows."""
    names = [column.name or _ALONE for column in rows.columns]
    if len(names) == 1 and not rows.columns[0].name and not rows.tabular:
        names = []
    return Form(names, list(rows.tabular), rows.labels is not None, data_format == "channels_first", output)
