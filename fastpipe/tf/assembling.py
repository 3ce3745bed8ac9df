"""From rows and options to a dataset."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from fastpipe.errors import ClosedError, OptionError
from fastpipe.tf.augment import Augment
from fastpipe.tf.dataset import About, ImageDataset
from fastpipe.tf.form import Form, form_of
from fastpipe.tf.graph import graph_dataset, why_not_graph
from fastpipe.tf.reference import reference_dataset
from fastpipe.tf.rows import Rows
from fastpipe.tf.stream import RowStream, StreamOptions

__all__ = ["dataset_of"]

_log = logging.getLogger("fastpipe.tf")


def dataset_of(
    rows: Rows,
    options: StreamOptions,
    engine: str,
    is_single: bool,
    data_format: str,
    augment: Callable[..., Any] | None,
) -> ImageDataset:
    """The dataset of some rows.

    Args:
        rows: all of them.
        options: how they become batches.
        engine: ``"threads"``, ``"graph"`` or ``"auto"``.
        is_single: whether elements are single samples.
        data_format: Keras's word for the memory order of images.
        augment: of ``image_dataset``.

    Raises:
        OptionError: the engine cannot make them.
    """
    form = form_of(rows, data_format, options.output)
    why_not = why_not_graph(rows, options)
    if engine == "graph" and why_not:
        raise OptionError(f"engine='graph' cannot make these samples: {why_not}. engine='threads' can")
    stream = None if engine == "graph" else RowStream(rows, options)
    if stream is None:
        made = graph_dataset(rows, options, form)
    else:
        made = _streamed(stream, form, augment if isinstance(augment, Augment) else None)
        augment = None if isinstance(augment, Augment) else augment
    if is_single:
        made = made.unbatch()
        if stream is not None and options.bad_samples.policy != "skip":
            made = made.apply(tf.data.experimental.assert_cardinality(stream.samples))
    made = made.prefetch(tf.data.AUTOTUNE if stream is None else 2)
    if augment is not None:
        made = made.map(augment, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(2)
    settings = tf.data.Options()
    # What is in no files has one policy that is right: without it TensorFlow tries another, and says so.
    policy = tf.data.experimental.AutoShardPolicy
    chosen = policy.DATA if options.shard is None else policy.OFF
    settings.experimental_distribute.auto_shard_policy = chosen
    # Nothing is to be tuned, and where TensorFlow tunes, an epoch's end waits for the thread that does.
    settings.autotune.enabled = stream is None
    plan = _plan(rows, stream, why_not)
    _log.info("%s", plan)
    names = rows.class_names
    paths: Any = {column.name: list(column.paths) for column in rows.columns}
    about = About(
        None if names is None else list(names), paths.get("", paths), plan,
        partial(reference_dataset, rows, form, options.batch_size, options.drop_remainder), stream,
    )  # fmt: skip
    return ImageDataset(made.with_options(settings), about)


def _streamed(stream: RowStream, form: Form, augment: Augment | None) -> Any:
    """Batches of this process's threads as a ``tf.data.Dataset``, augmented by their places' numbers."""
    rows, options = stream.rows, stream.options
    # TensorFlow never lets go of this function; the dataset that is returned keeps the stream, as long as
    # somebody has it, or one made from it, or an iterator.
    living = weakref.ref(stream)

    def elements() -> Iterator[Any]:
        found = living()
        if found is None:
            raise ClosedError("a dataset was iterated over that nobody refers to any more: keep a reference")
        for made in found.next_epoch():
            images = [form.laid_out(image) for image in made.images]
            tabular = {name: values[made.rows] for name, values in found.rows.tabular.items()}
            labels = found.rows.labels
            element = form.element(images, tabular, None if labels is None else labels[made.rows])
            yield element if augment is None else (element, (np.int64(made.epoch), made.draws))

    size = options.batch_size if options.drop_remainder else None
    signature = form.signature(rows, size)
    if augment is not None:
        place = (tf.TensorSpec((), tf.int64), tf.TensorSpec((size,), tf.int64))
        signature = (signature, place)
    made = tf.data.Dataset.from_generator(elements, output_signature=signature)
    if augment is not None:
        made = made.prefetch(2).map(
            partial(_augmented, augment, options.seed, form.has_labels), num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )  # fmt: skip
    if options.bad_samples.policy == "skip":
        return made
    return made.apply(tf.data.experimental.assert_cardinality(len(stream)))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _augmented(augment: Augment, seed: int, has_labels: bool, element: Any, place: Any) -> Any:
    """A batch, changed by numbers of (seed, epoch, position)."""
    inputs, labels = element if has_labels else (element, None)
    return augment(inputs, labels, key=(seed, *place))


def _plan(rows: Rows, stream: RowStream | None, why_not: str) -> str:
    """What makes the samples, in lines."""
    if stream is None:
        lines = ["engine  →  graph: TensorFlow's operations"]
    else:
        lines = ["engine  →  threads of this process" + (f"; not graph: {why_not}" if why_not else "")]
        lines += stream.runtime.describe()
    for column in rows.columns:
        spec = column.spec
        whose = "Pillow" if spec.parity == "pil" else "TensorFlow"
        box = "whole image" if column.boxes is None else "its box"
        lines.append(
            f"{column.name or 'image'}  →  {box} at {spec.size.height} × {spec.size.width}, {spec.filter} as "
            f"{whose} does"
        )
    return "\n".join(lines)
