"""From what makes batches to a dataset."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from fastpipe.core.casting import unheld
from fastpipe.core.text import printable
from fastpipe.errors import ClosedError, OptionError
from fastpipe.tf.augment import Augment
from fastpipe.tf.dataset import About, ImageDataset
from fastpipe.tf.ending import at_work
from fastpipe.tf.form import form_of
from fastpipe.tf.graph import graph_dataset, why_not_graph
from fastpipe.tf.malloc import reuse_freed_memory
from fastpipe.tf.reference import reference_dataset
from fastpipe.tf.rows import Column, Rows
from fastpipe.tf.stream import Making, RowStream
from fastpipe.tf.streaming import Batching, Stream

__all__ = ["dataset_of_rows", "streamed"]

_log = logging.getLogger("fastpipe.tf")

_DATA = tf.data.experimental


def dataset_of_rows(
    rows: Rows,
    batching: Batching,
    making: Making,
    engine: str,
    is_single: bool,
    data_format: str,
    augment: Callable[..., Any] | None,
) -> ImageDataset:
    """The dataset of some rows of images.

    Args:
        rows: all of them.
        batching: how they become batches.
        making: how their images are made.
        engine: ``"threads"``, ``"graph"`` or ``"auto"``.
        is_single: whether elements are single samples.
        data_format: Keras's word for the memory order of images.
        augment: of ``image_dataset``.

    Raises:
        OptionError: the engine cannot make them.
    """
    for column in rows.columns:
        _check_scale(column, making.output)
    form = form_of(rows, data_format, making.output)
    why_not = why_not_graph(rows, batching, making)
    if engine == "graph" and why_not:
        raise OptionError(f"engine='graph' cannot make these samples: {why_not}. engine='threads' can")
    stream = None if engine == "graph" else RowStream(rows, batching, making, form)
    if stream is None:
        made = graph_dataset(rows, batching, form)
        made = (made.unbatch() if is_single else made).prefetch(tf.data.AUTOTUNE)
        made = made if augment is None else _mapped(made, augment)
        made = made.with_options(_settings(batching, is_streamed=False))
    else:
        made = streamed(stream, is_single, augment)
    plan = _plan(rows, stream, why_not)
    _log.info(plan)  # lines, which are printable
    names = rows.class_names
    paths: Any = {column.name: list(column.paths) for column in rows.columns}
    about = About(
        lambda: plan, partial(reference_dataset, rows, form, batching.batch_size, batching.drop_remainder),
        stream, None if names is None else list(names), paths.get("", paths),
    )  # fmt: skip
    return ImageDataset(made, about)


def _check_scale(column: Column, output: str) -> None:
    """Refuse a scale whose images are of another type, or beyond the largest number of it."""
    of = f" of {column.name!r}" if column.name else ""
    if column.rescale is not None and output == "uint8":
        raise OptionError(f"rescale= makes floats: it cannot go with output='uint8'{of}")
    scale, offset = column.rescale or (1.0, 0.0)
    ends = np.array([offset, 255 * scale + offset])
    if output != "uint8" and unheld(ends, np.dtype(output)).any():
        raise OptionError(
            f"rescale={column.rescale}{of} makes images from {ends.min()} to {ends.max()}, which "
            f"output={output!r} cannot hold: take a smaller factor, or output='float32'"
        )


def streamed(stream: Stream, is_single: bool, augment: Callable[..., Any] | None) -> Any:
    """A stream as a plain ``tf.data.Dataset``.

    Args:
        stream: makes its batches.
        is_single: whether elements are single samples.
        augment: an ``Augment``, whose numbers are then those of seed, epoch and position; or a function for
            each element; or None.
    """
    keyed = augment if isinstance(augment, Augment) else None
    made = _batches(stream, keyed)
    if is_single:
        made = made.unbatch()
        if stream.batching.bad_samples.policy != "skip":
            made = made.apply(_DATA.assert_cardinality(stream.samples))
    if not stream.has_code:
        made = made.prefetch(2)
    if augment is not None and keyed is None:
        made = _mapped(made, augment)
    return made.with_options(_settings(stream.batching, is_streamed=True))


def _settings(batching: Batching, *, is_streamed: bool) -> Any:
    settings = tf.data.Options()
    # What is in no files has one policy that is right: without it TensorFlow tries another, and says so.
    policy = _DATA.AutoShardPolicy
    settings.experimental_distribute.auto_shard_policy = policy.DATA if batching.shard is None else policy.OFF
    # Nothing is to be tuned, and where TensorFlow tunes, an epoch's end waits for the thread that does.
    settings.autotune.enabled = not is_streamed
    return settings


# Stateful operations that only read, and those whose numbers begin anew with each iterator.
_READING = {"Assert", "LookupTableFindV2", "LookupTableSizeV2", "ReadVariableOp", "ResourceGather"}
_ANEW = {
    "Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoissonV2", "RandomShuffle",
    "RandomStandardNormal", "RandomUniform", "RandomUniformInt", "SampleDistortedBoundingBox",
    "SampleDistortedBoundingBoxV2", "TruncatedNormal",
}  # fmt: skip


def _mapped(made: Any, function: Callable[..., Any]) -> Any:
    """Elements as a function of the script's changes them.

            lines.append("preprocess  →  when a batch is asked for; with thread_safe=True ahead, in threads")
    is called for one element after the other, and where the state outlives the iterator, as variables and
    Python do, only when the element is asked for.
    """
    traced = tf.function(lambda *parts: function(*parts))
    spec = made.element_spec
    graph = traced.get_concrete_function(*(spec if isinstance(spec, tuple) else (spec,))).graph
    state = {one.type for one in graph.get_operations() if one.op_def and one.op_def.is_stateful} - _READING
    if not state:
        return made.map(traced, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(2)
    return made.map(traced).prefetch(2) if state <= _ANEW else made.map(traced)


def _batches(stream: Stream, augment: Augment | None) -> Any:
    """Batches of this process's threads as a ``tf.data.Dataset``, augmented by their places' numbers."""
    batching = stream.batching
    # TensorFlow never lets go of this function; the dataset that is returned keeps the stream, as long as
    # somebody has it, or one made from it, or an iterator.
    living = weakref.ref(stream)

    def elements() -> Iterator[Any]:
        found = living()
        if found is None:
            raise ClosedError("a dataset was iterated over that nobody refers to any more: keep a reference")
        reuse_freed_memory()
        with closing(found.next_epoch()) as batches:
            while True:
                with at_work() as goes_on:
                    made = next(batches, None) if goes_on else None
                    if made is None:
                        return
                    element = found.element(made)
                yield element if augment is None else (element, (np.int64(made.epoch), made.draws))

    size = batching.batch_size if batching.drop_remainder else None
    signature = stream.signature(size)
    if augment is not None:
        place = (tf.TensorSpec((), tf.int64), tf.TensorSpec((size,), tf.int64))
        signature = (signature, place)
    made = tf.data.Dataset.from_generator(elements, output_signature=signature)
    if augment is not None:
        changed = partial(_augmented, augment, batching.seed)
        if stream.has_code:
            made = made.map(changed)
        else:
            made = made.prefetch(2).map(changed, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    if batching.bad_samples.policy == "skip":
        return made
    return made.apply(_DATA.assert_cardinality(len(stream)))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _augmented(augment: Augment, seed: int, element: Any, place: Any) -> Any:
    """A batch, changed by numbers of (seed, epoch, position)."""
    inputs, labels = element if isinstance(element, tuple) else (element, None)
    return augment(inputs, labels, key=(seed, *place))


def _plan(rows: Rows, stream: RowStream | None, why_not: str) -> str:
    """What makes the samples, in lines."""
    if stream is None:
        lines = ["engine  →  graph: TensorFlow's operations"]
    else:
        lines = ["engine  →  threads of this process" + (f"; not graph: {why_not}" if why_not else "")]
        lines += stream.describe()
        if stream.has_code:
            lines.append("preprocess  →  when a batch is asked for; thread_safe=True: ahead, in threads")
    for column in rows.columns:
        spec = column.spec
        whose = "Pillow" if spec.parity == "pil" else "TensorFlow"
        box = "whole image" if column.boxes is None else "its box"
        lines.append(
            f"{column.name or 'image'}  →  {box} at {spec.size.height} × {spec.size.width}, {spec.filter} as "
            f"{whose} does"
        )
    return "\n".join(map(printable, lines))
