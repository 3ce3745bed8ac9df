"""``fastpipe.tf.Dataset``: a ``tf.data.Dataset`` whose batches are made by threads of this process."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from fastpipe.errors import ClosedError, OptionError
from fastpipe.tf.augment import Augment
from fastpipe.tf.stream import Batching, Stream

_DATA = tf.data.experimental


class About(NamedTuple):
    """Facts about a dataset, which stay true when its elements are changed by ``map`` or other methods."""

    plan: Callable[[], str]  # returns lines that say which engine makes each part
    reference: Callable[[], Any]  # returns an equal dataset that stock libraries make
    stream: Stream | None  # makes the batches in this process; None for the engine "graph"
    class_names: list[str] | None = None
    file_paths: Any = None
    keeps: Any = None  # another object that must live as long as the dataset


class Dataset(tf.data.Dataset):  # type: ignore[misc]  # TensorFlow ships no types
    """A ``tf.data.Dataset`` whose batches are made by fastpipe.

    Methods such as ``map``, ``batch``, ``prefetch`` and ``take`` return another ``Dataset``, which has the
    same properties and methods.
    """

    # Only three names of TensorFlow's internals are used: ``element_spec`` and ``_inputs``, which a subclass
    # must define, and ``_variant_tensor``.

    def __init__(self, dataset: Any, about: About) -> None:
        self._dataset, self._about = dataset, about
        super().__init__(dataset._variant_tensor)

    @property
    def element_spec(self) -> Any:
        """The type of the elements."""
        return self._dataset.element_spec

    def _inputs(self) -> list[Any]:
        return [self._dataset]

    @property
    def plan(self) -> str:
        """A text that says how the batches are made, by which engine and decoders, and what is cached."""
        return self._about.plan()

    @property
    def stage_seconds(self) -> dict[str, float]:
        """The seconds that this process has spent in each stage, such as ``"decode"``, summed over all
        threads. Empty for the engine ``"graph"``."""
        stream = self._about.stream
        return {} if stream is None else stream.clock.totals()

    def reference(self) -> Any:
        """Return a dataset of the same samples made by stock libraries, for comparison.

        Samples are in the order of the rows.  Images are made by ``tf.py_function`` with Pillow, or by
        TensorFlow operations.  Rows and patches are read by the formats' own libraries.
        """
        return self._about.reference()

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch.

        For example, after ``set_epoch(3)``, ``model.fit(…, initial_epoch=3)`` continues with the order of
        epoch 3.

        Raises:
            OptionError: the engine is ``"graph"``, which does not number epochs.
        """
        if self._about.stream is None:
            raise OptionError(
                "set_epoch needs engine='threads': TensorFlow's shuffle cannot start at a given epoch"
            )
        self._about.stream.set_epoch(epoch)


class ImageDataset(Dataset):
    """A :class:`fastpipe.tf.Dataset` of images, made by :func:`fastpipe.tf.image_dataset`.

    Attributes:
        class_names: the names of the classes, as in Keras's datasets; None if the labels have no names.
        file_paths: the files, in the order of the rows. If there are modalities, a dict of lists of files.
    """

    def __init__(self, dataset: Any, about: About) -> None:
        super().__init__(dataset, about)
        self.class_names, self.file_paths = about.class_names, about.file_paths


def _returning_own_type(name: str) -> Callable[..., Any]:
    method = getattr(tf.data.Dataset, name)

    @functools.wraps(method)
    def wrapped(self: Dataset, *arguments: Any, **options: Any) -> Any:
        return type(self)(method(self, *arguments, **options), self._about)

    return wrapped


for _name in (
    "apply", "batch", "cache", "enumerate", "filter", "map", "prefetch", "rebatch", "repeat",
    "shard", "shuffle", "skip", "take", "unbatch", "with_options",
):  # fmt: skip
    if hasattr(tf.data.Dataset, _name):
        setattr(Dataset, _name, _returning_own_type(_name))


# ---- from a stream to a tf.data.Dataset ----------------------------------------------------------


def stream_dataset(stream: Stream, is_single: bool, augment: Callable[..., Any] | None) -> Any:
    """Return a plain ``tf.data.Dataset`` of a stream's batches, or of single samples if ``is_single``.

    ``augment`` is a function, None, or an ``Augment``. An ``Augment`` draws its random numbers from the seed,
    the epoch and the position of a sample.
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
        made = map_function(made, augment)
    return made.with_options(dataset_options(stream.batching, is_streamed=True))


def _batches(stream: Stream, augment: Augment | None) -> Any:
    batching = stream.batching
    # TensorFlow never releases this function, so the function holds no reference to the stream.  The returned
    # dataset, the datasets made from it and their iterators keep the stream alive.
    living = weakref.ref(stream)

    def elements() -> Iterator[Any]:
        found = living()
        if found is None:
            raise ClosedError("the dataset was deleted before it was iterated over: keep a reference to it")
        _reuse_freed_memory()
        with closing(found.next_epoch()) as batches:
            while True:
                with _delay_exit() as goes_on:
                    batch = next(batches, None) if goes_on else None
                    if batch is None:
                        return
                    element = found.element(batch)
                yield element if augment is None else (element, (np.int64(batch.epoch), batch.draws))

    def augmented(element: Any, place: Any) -> Any:
        assert augment is not None
        inputs, labels = element if isinstance(element, tuple) else (element, None)
        return augment(inputs, labels, key=(batching.seed, *place))

    size = batching.batch_size if batching.drop_remainder else None
    signature = stream.signature(size)
    if augment is not None:
        place = (tf.TensorSpec((), tf.int64), tf.TensorSpec((size,), tf.int64))
        signature = (signature, place)
    made = tf.data.Dataset.from_generator(elements, output_signature=signature)
    if augment is not None:
        change = tf.autograph.experimental.do_not_convert(augmented)
        if stream.has_code:
            made = made.map(change)
        else:
            made = made.prefetch(2).map(change, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    if batching.bad_samples.policy == "skip":
        return made
    return made.apply(_DATA.assert_cardinality(len(stream)))


def dataset_options(batching: Batching, *, is_streamed: bool) -> Any:
    """Return the ``tf.data.Options`` of a dataset."""
    options = tf.data.Options()
    # Data that is not in files needs this policy. Otherwise TensorFlow tries another policy and warns.
    policy = _DATA.AutoShardPolicy
    options.experimental_distribute.auto_shard_policy = policy.DATA if batching.shard is None else policy.OFF
    # No option needs tuning. With autotuning, the end of an epoch waits for the tuning thread.
    options.autotune.enabled = not is_streamed
    return options


# ``_READING`` are stateful operations that only read. ``_ANEW`` are random operations that restart with each
# iterator.
_READING = {"Assert", "LookupTableFindV2", "LookupTableSizeV2", "ReadVariableOp", "ResourceGather"}
_ANEW = {
    "Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoissonV2", "RandomShuffle",
    "RandomStandardNormal", "RandomUniform", "RandomUniformInt", "SampleDistortedBoundingBox",
    "SampleDistortedBoundingBoxV2", "TruncatedNormal",
}  # fmt: skip


def map_function(made: Any, function: Callable[..., Any]) -> Any:
    """Apply the user's function to each element of a dataset, and return the new dataset.

    The function's random numbers and side effects depend only on which batches the script has received, not
    on the timing of threads.  A function with state is called for one element after the other.  If the
    function's state outlives the iterator (variables, Python objects), the function is called only when the
    element is requested.
    """
    traced = tf.function(lambda *parts: function(*parts))
    spec = made.element_spec
    graph = traced.get_concrete_function(*(spec if isinstance(spec, tuple) else (spec,))).graph
    state = {one.type for one in graph.get_operations() if one.op_def and one.op_def.is_stateful} - _READING
    if not state:
        return made.map(traced, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(2)
    return made.map(traced).prefetch(2) if state <= _ANEW else made.map(traced)


# ---- the end of the interpreter ------------------------------------------------------------------

_SETTLED_S = 0.05  # a thread that left this long ago does not return: buffers are full, or the epoch is over
_LEAVE_S = 10.0

_changed = threading.Condition()
_inside = 0
_left_s = 0.0
_is_ending = False
_is_registered = False


@contextmanager
def _delay_exit() -> Iterator[bool]:
    """Make the interpreter's exit wait for code in a TensorFlow thread. Yield False if the epoch must end.

    During shutdown, Python ends a thread that requests the GIL.  TensorFlow would then wait for this thread
    forever when the thread's iterator is freed.
    """
    global _inside, _left_s, _is_registered
    with _changed:
        _inside += 1
        if not _is_registered:  # late: the function registered last is called first, before threads end
            _is_registered = True
            atexit.register(_wait_for_threads)
    try:
        yield not _is_ending
    finally:
        with _changed:
            _inside -= 1
            _left_s = time.monotonic()
            _changed.notify_all()


def _wait_for_threads() -> None:
    global _is_ending
    _is_ending = True
    deadline = time.monotonic() + _LEAVE_S
    with _changed:
        while (now := time.monotonic()) < deadline:
            settled = _left_s + _SETTLED_S
            if not _inside and now >= settled:
                return
            _changed.wait(deadline - now if _inside else settled - now)


# ---- malloc --------------------------------------------------------------------------------------

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_LARGEST = 32 << 20  # the greatest threshold to which glibc raises itself when such memory is freed

_is_done = False


def _reuse_freed_memory() -> None:
    """Let glibc reuse freed memory, as glibc does by default, unless the environment sets a threshold.

    The first generator dataset of a process makes TensorFlow set ``M_TRIM_THRESHOLD`` to 128 KiB.  glibc then
    no longer raises ``M_MMAP_THRESHOLD``, and each larger block is mapped again.  This mapping takes a tenth
    of the time that decoding images takes.  Call this function after TensorFlow has set the threshold.
    """
    global _is_done
    if _is_done:
        return
    _is_done = True
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    settings = ("mmap_threshold", "trim_threshold")
    if any(f"MALLOC_{name.upper()}_" in os.environ or name in tunables for name in settings):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST)  # twice M_MMAP_THRESHOLD, as in glibc
