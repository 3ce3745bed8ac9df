"""What the datasets of arrays have in common."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from fastpipe.errors import OptionError
from fastpipe.options import BadSamples, Shard, Shuffle
from fastpipe.tf.array_form import ArrayForm
from fastpipe.tf.array_stream import ArrayStream
from fastpipe.tf.assembling import streamed
from fastpipe.tf.augment import Augment
from fastpipe.tf.dataset import About, Dataset
from fastpipe.tf.ranks import shard_of
from fastpipe.tf.streaming import Batching

__all__ = ["batching_of", "dataset_of_arrays"]

_log = logging.getLogger("fastpipe.tf")

_SINGLES = 32  # samples made together, where the script wants single ones


def batching_of(
    batch_size: int | None, drop_remainder: bool, shuffle: bool | Shuffle, seed: int | None,
    shard: Shard | Literal["auto"] | tf.distribute.InputContext | None,
    bad_samples: BadSamples | Literal["raise", "replace", "skip"],
) -> Batching:  # fmt: skip
    """These arguments of a script.

    Raises:
        OptionError: one cannot work.
    """
    if batch_size is not None and operator.index(batch_size) < 1:
        raise OptionError(f"batch_size must be a number from 1, or None for single samples, got {batch_size}")
    if not isinstance(shuffle, (bool, Shuffle)):
        raise OptionError(f"shuffle must be True, False or a fastpipe.Shuffle, got {shuffle!r}")
    drawn = int(np.random.randint(1_000_000)) if seed is None else operator.index(seed)
    part = shard_of(shard, is_shuffled=bool(shuffle), seed=seed)
    return Batching(
        batch_size or _SINGLES, drop_remainder and batch_size is not None, shuffle, drawn, part,
        BadSamples.of(bad_samples),
    )  # fmt: skip


def dataset_of_arrays(
    stream: ArrayStream, form: ArrayForm, *, is_single: bool, augment: Callable[..., Any] | None
) -> Dataset:
    """The dataset of a stream.

    Args:
        stream: makes its batches.
        form: of the elements.
        is_single: whether elements are single samples.
        augment: of the dataset.

    Raises:
        OptionError: there is no image for ``augment``.
    """
    if isinstance(augment, Augment) and form.is_tuple and not form.is_pair:
        raise OptionError(
            "an Augment changes inputs, and hands labels through: name two datasets, or labels="
        )
    made = streamed(stream, is_single, augment)
    about = About(lambda: "\n".join(stream.describe()), partial(_reference, stream, is_single), stream)
    dataset = Dataset(made, about)
    _log.info("%s", dataset.plan)
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
