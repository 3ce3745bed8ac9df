"""What the datasets of arrays have in common."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import tensorflow as tf

from fastpipe.core.text import printable
from fastpipe.errors import OptionError
from fastpipe.tf.array_stream import ArrayStream
from fastpipe.tf.assembling import streamed
from fastpipe.tf.augment import Augment
from fastpipe.tf.dataset import About, Dataset

__all__ = ["dataset_of_arrays"]

_log = logging.getLogger("fastpipe.tf")


def dataset_of_arrays(stream: ArrayStream, *, is_single: bool, augment: Callable[..., Any] | None) -> Dataset:
    """The dataset of a stream.

    Args:
        stream: makes its batches.
        is_single: whether elements are single samples.
        augment: of the dataset.

    Raises:
        OptionError: there is no image for ``augment``.
    """
    if isinstance(augment, Augment) and stream.form.is_tuple and not stream.form.is_pair:
        raise OptionError(
            "an Augment changes inputs, and hands labels through: name two datasets, or labels="
        )
    made = streamed(stream, is_single, augment)
    about = About(
        lambda: "\n".join(map(printable, stream.describe())), partial(_reference, stream, is_single), stream
    )
    dataset = Dataset(made, about)
    if _log.isEnabledFor(logging.INFO):  # a tour has to be planned for it
        _log.info(dataset.plan)
    return dataset


def _reference(stream: ArrayStream, is_single: bool) -> Dataset:
    living = weakref.ref(stream)  # TensorFlow never lets go of a function

    def elements() -> Iterator[Any]:
        found = living()
        assert found is not None
        yield from found.stock()

    made = tf.data.Dataset.from_generator(elements, output_signature=stream.signature(1)).unbatch()
    how = stream.batching
    made = made if is_single else made.batch(how.batch_size, drop_remainder=how.drop_remainder)
    return Dataset(made, About(lambda: "the format's own library", lambda: made, None, keeps=stream))
