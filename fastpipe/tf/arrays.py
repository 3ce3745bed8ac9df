"""``hdf5_dataset`` and ``patch_dataset``: datasets of rows of HDF5 files and of patches of volumes."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from fastpipe.core.array_samples import BatchReader, Form
from fastpipe.core.bad_samples import why_nothing_is_left
from fastpipe.core.clock import StageClock
from fastpipe.core.machine import default_threads
from fastpipe.core.order import Arrangement, Groups, Tour, default_window, order_of
from fastpipe.core.pool import Process, ThreadPool
from fastpipe.core.reads import PendingRead
from fastpipe.core.text import printable
from fastpipe.core.types import Key
from fastpipe.errors import OptionError
from fastpipe.options import BadSamples, Cache, Rescale, Shard, Shuffle, Stage, ZScore
from fastpipe.sampling import Sampling
from fastpipe.tf.augment import Augment
from fastpipe.tf.dataset import About, Dataset, stream_dataset
from fastpipe.tf.options import check_choice
from fastpipe.tf.stream import AHEAD, IN_FLIGHT, Batch, Batching, PendingBatch, Stream, batching_of

Int64Array = npt.NDArray[np.int64]

_log = logging.getLogger("fastpipe.tf")


def hdf5_dataset(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    keys: str | Sequence[str] | Mapping[str, str],
    labels: str | None = None,
    batch_size: int | None = 32,
    shuffle: bool | Shuffle = True,
    seed: int | None = None,
    *,
    rows: Any = None,
    sample_dims: int | None = None,
    drop_remainder: bool = False,
    augment: Callable[..., Any] | None = None,
    cache: Cache | Literal["auto", "ram", "disk", "off"] = "auto",
    shard: Shard | Literal["auto"] | tf.distribute.InputContext | None = None,
    bad_samples: BadSamples | Literal["raise", "replace", "skip"] = "raise",
    stage: Stage | str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    threads: int | Literal["auto"] = "auto",
) -> Dataset:
    """Create a ``tf.data.Dataset`` of the rows of HDF5 datasets, with the values that ``h5py`` gives.

    The dataset replaces a generator over an ``h5py.File``, in which one thread reads row by row and
    decompresses a chunk again for every row of the chunk.  Here several threads read and decode chunks
    without the HDF5 library's lock, and keep the chunks in a cache if they fit.

    Args:
        path: an HDF5 file, or several files whose rows are concatenated.  If ``stage`` is given, URLs are
            accepted as well.
        keys: the inputs. A dataset's path in the file gives tensors. A sequence of paths gives tuples (Keras
            takes a pair as inputs and labels). A mapping from names to paths gives dicts.
        labels: the path of the dataset with the labels. Elements are then pairs of inputs and labels.
        batch_size: the number of rows per batch; None for single rows.
        shuffle: whether to draw a new order for each epoch.  ``Shuffle(window=…, unit="group")`` shuffles
            chunks, and then shuffles the rows of some chunks at a time, so that each chunk is decoded only
            once.
        seed: orders depend only on the seed and the epoch.  Default: a number from NumPy's global generator.
        rows: the rows to use, such as the rows of a fold, as indices, a mask (N,) or a slice.
        sample_dims: the number of leading dimensions that count rows.  With 0, each dataset is a sample; see
            :class:`fastpipe.FastHDF5Dataset`, also for keys with ``*`` and ``@``.
        drop_remainder: whether to leave out the last batch if it is smaller.
        augment: a :class:`fastpipe.tf.Augment`, or a function that is called for each batch with (inputs,
            labels), or with inputs.  The random numbers of an ``Augment`` depend only on the seed, the epoch
            and a sample's position.
        cache: where decoded chunks are kept, given as a :class:`fastpipe.Cache` or its ``where``; see
            :class:`fastpipe.FastHDF5Dataset`.
        shard: this process's part of each epoch; see :func:`fastpipe.tf.image_dataset`.
        bad_samples: how to handle rows that cannot be read, given as a :class:`fastpipe.BadSamples` or its
            policy's name.
        stage: a folder on a local disk, or a :class:`fastpipe.Stage`. Whole files are copied from URLs to the
            folder.
        storage_options: credentials and endpoint for URLs, as the fsspec file system of the URLs takes them.
        threads: the number of reading threads; ``"auto"`` is the number of cores.

    Returns:
        A :class:`fastpipe.tf.Dataset` of tensors (n, …) with the datasets' dtypes. Texts are ``tf.string``.

    Raises:
        FileNotFoundError, PermissionError: as ``open`` raises them.
        KeyError: the file has no such dataset.
        HDF5Error: the file is not HDF5, is damaged, or is open for writing in another process.
        StageError, StoreError: see :class:`fastpipe.FastHDF5Dataset`.
        OptionError: an option is invalid, TensorFlow has no dtype for a dataset's elements, samples differ in
            shape or dtype, or there are no rows.

    Errors during iteration name the row and the file.

    >>> import h5py, os, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = os.path.join(folder.name, "speech.h5")
    >>> with h5py.File(path, "w") as file:
    ...     file["mels"] = np.zeros((100, 64, 128), np.float32)
    ...     file["words"] = np.arange(100)
    >>> train = hdf5_dataset(path, {"mel": "mels"}, "words", seed=0, rows=slice(0, 80))
    >>> [(inputs["mel"].shape, words.shape) for inputs, words in train.take(1)]
    [(TensorShape([32, 64, 128]), TensorShape([32]))]
    >>> folder.cleanup()
    """
    # Import the HDF5 code and the volume code only when they are used.
    from fastpipe.hdf5.samples import H5pyRows, HDF5Samples

    form = Form.of(keys)
    if labels is not None and not isinstance(labels, str):
        raise OptionError(f"labels must be the path of a dataset in the file, got {labels!r}")
    names = form.names if labels is None else (*form.names, labels)
    samples = HDF5Samples(
        _this_process, path, list(names), sample_dims=sample_dims, cache=cache, bad_samples=bad_samples,
        threads=threads, stage=stage, storage_options=storage_options,
    )  # fmt: skip
    samples._files.check_alike()
    chosen = _selected_rows(rows, len(samples))
    draws = isinstance(augment, Augment)
    batching = batching_of(batch_size, drop_remainder, shuffle, seed, shard, bad_samples, draws=draws)
    arrangement = None
    if isinstance(shuffle, Shuffle) and shuffle.unit == "group":
        window = shuffle.window or default_window([samples])
        samples._expect_window(window)
        arrangement = Groups(samples.locality_groups()[chosen], window)
    values = [_Value(name, *kind) for name, kind in zip(names, samples.kinds, strict=True)]
    shape = _ArrayForm(form, values)

    def by_h5py() -> Iterator[Any]:
        stock = H5pyRows(samples._files, samples._form)
        for row in chosen.tolist():
            yield shape.batch([np.asarray(value)[None] for value in stock.values(row)])

    stream = _ArrayStream(samples, chosen, batching, arrangement, shape, by_h5py)
    return _arrays_dataset(stream, batch_size is None, augment)


def _selected_rows(rows: Any, count: int) -> Int64Array:
    """Return the rows that the argument ``rows=`` selects."""
    every = np.arange(count)
    try:
        if rows is not None and not isinstance(rows, slice):
            index = np.asarray(rows)
            rows = index if index.size else index.astype(np.int64)
        chosen = every if rows is None else np.atleast_1d(every[rows])
    except (IndexError, TypeError, ValueError) as error:
        raise OptionError(
            f"rows= must be whole numbers below {count}, a mask ({count},) or a slice: {error}"
        ) from None
    if not len(chosen):
        raise OptionError("there are no rows: a dataset needs at least one")
    return chosen.astype(np.int64)


def patch_dataset(
    volume: Any,
    patch_size: Sequence[int],
    labels: Any = None,
    batch_size: int | None = 2,
    shuffle: bool | Shuffle = True,
    seed: int | None = None,
    *,
    mask: Any = None,
    channel_dim: int | Sequence[int] | None = None,
    orientation: str | None = None,
    sampling: Sampling | None = None,
    padding: Any = "error",
    channels: Literal["as_stored", "last"] = "as_stored",
    normalize: ZScore | Rescale | None = None,
    nan: Literal["keep", "error"] | float = "keep",
    drop_remainder: bool = False,
    augment: Callable[..., Any] | None = None,
    cache: Cache | Literal["auto", "ram", "off"] = "auto",
    shard: Shard | Literal["auto"] | tf.distribute.InputContext | None = None,
    bad_samples: BadSamples | Literal["raise", "replace", "skip"] = "raise",
    stage: Stage | str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    threads: int | Literal["auto"] = "auto",
) -> Dataset:
    """Create a ``tf.data.Dataset`` of patches of volumes, with the values that NumPy slicing gives.

    The dataset replaces a generator that slices a Zarr array or an image.  Chunks that were decoded for a
    patch are kept for later patches, within a memory budget.

    Args:
        volume, patch_size, labels, mask, channel_dim, orientation, sampling, padding, normalize, nan, cache,
            stage, storage_options: see :class:`fastpipe.FastPatchDataset`.
        batch_size: the number of patches per batch; None for single patches.
        shuffle: whether to draw a new order for each epoch.  With ``Shuffle(unit="group")``, few chunks are
            decoded more than once.
        seed: the positions of patches and their orders depend only on the seed and the epoch.  Default: a
            number from NumPy's global generator.
        channels: the position of channels in tensors, the dimensions along which patches are not cut:
            ``"as_stored"``, or ``"last"`` for Keras's layers.  With ``"last"``, patches have exactly one
            channel dimension, which has size 1 if the volume has no channels.
        drop_remainder: whether to leave out the last batch if it is smaller.
        augment: a function that is called for each batch with (inputs, labels), or with inputs. For
            two-dimensional patches with channels last, ``augment`` may also be a
            :class:`fastpipe.tf.Augment`.
        shard: this process's part of each epoch; see :func:`fastpipe.tf.image_dataset`.
        bad_samples: how to handle patches that cannot be read, given as a :class:`fastpipe.BadSamples` or its
            policy's name.
        threads: the number of reading threads; ``"auto"`` is the number of cores.

    Returns:
        A :class:`fastpipe.tf.Dataset` of tensors (n, \\*channels, \\*patch_size) of the volume's dtype, or
        float32 with ``normalize``. If labels or a mask are given, elements are tuples (volume, labels[,
        mask]).

    Raises:
        FileNotFoundError, PermissionError: as ``open`` raises them.
        VolumeError: a volume cannot be opened, or is damaged.
        StoreError: a store gives an unusable answer.
        OptionError: an option is invalid, or the volumes do not fit together.

    Errors during iteration name the volume and the position.

    >>> volume = np.arange(4 * 6 * 6, dtype=np.uint16).reshape(4, 6, 6)
    >>> from fastpipe.sampling import Grid
    >>> patches = patch_dataset(volume, (2, 3, 3), sampling=Grid(), channels="last", shuffle=False)
    >>> [batch.shape for batch in patches.take(1)]
    [TensorShape([2, 2, 3, 3, 1])]
    """
    from fastpipe.volumes.samples import PatchSamples
    from fastpipe.volumes.sources import Given

    check_choice("channels", channels, ("as_stored", "last"))
    samples = PatchSamples(
        _this_process, Given(volume, labels, mask, stage, storage_options, channel_dim, orientation),
        patch_size, sampling=sampling, padding=padding, margin=0, normalize=normalize, cache=cache, nan=nan,
        bad_samples=bad_samples, threads=threads,
    )  # fmt: skip
    draws = samples._places.is_random or isinstance(augment, Augment)
    batching = batching_of(batch_size, drop_remainder, shuffle, seed, shard, bad_samples, draws=draws)
    samples.seed = batching.seed
    values = [_Value(name, *kind) for name, kind in zip(samples._form.names, samples.kinds, strict=True)]
    form = _ArrayForm(samples._form, values, len(samples.patch_size) if channels == "last" else None)
    arrangement = None
    if isinstance(shuffle, Shuffle) and shuffle.unit == "group":
        window = samples._tour_window() if shuffle.window is None else shuffle.window
        arrangement = Tour(samples, [samples], window, partial(samples._tour_ranks, window))

    def by_slicing() -> Iterator[Any]:
        stock = samples._sliced()
        for index in range(len(stock)):
            yield form.batch([value[None] for value in stock.values(index, batching.seed, 0)])

    stream = _ArrayStream(samples, np.arange(len(samples)), batching, arrangement, form, by_slicing)
    return _arrays_dataset(stream, batch_size is None, augment)


def _this_process(threads: int | str, name: str) -> Process:
    """Return the context in which this process makes batches, with a dataset's threads. Batches are not sent
    to other processes."""
    return Process(ThreadPool(default_threads() if threads == "auto" else int(threads), name))


def _arrays_dataset(stream: _ArrayStream, is_single: bool, augment: Callable[..., Any] | None) -> Dataset:
    if isinstance(augment, Augment) and not stream.form.suits_augment:
        raise OptionError(
            "an Augment changes inputs and passes labels through: name two datasets, or pass labels="
        )
    made = stream_dataset(stream, is_single, augment)
    reference = partial(_reference, stream, is_single)
    about = About(lambda: "\n".join(map(printable, stream.describe())), reference, stream)
    dataset = Dataset(made, about)
    if _log.isEnabledFor(logging.INFO):  # the text needs the plan of the order, which takes time
        _log.info(dataset.plan)
    return dataset


def _reference(stream: _ArrayStream, is_single: bool) -> Dataset:
    living = weakref.ref(stream)  # TensorFlow never releases a function

    def elements() -> Iterator[Any]:
        found = living()
        assert found is not None
        yield from found.stock()

    made = tf.data.Dataset.from_generator(elements, output_signature=stream.signature(1)).unbatch()
    how = stream.batching
    made = made if is_single else made.batch(how.batch_size, drop_remainder=how.drop_remainder)
    return Dataset(made, About(lambda: "the format's own library", lambda: made, None, keeps=stream))


class _ArrayStream(Stream):
    """The batches of rows of HDF5 datasets, or of patches of volumes.

    ``rows``, int64 (N,), are an epoch's samples.  ``arrangement`` holds the groups to shuffle.  If
    ``arrangement`` is None, single samples are shuffled.  ``stock`` yields the samples in order, in batches
    of one sample, read by the formats' own libraries.
    """

    def __init__(
        self,
        samples: BatchReader,
        rows: Int64Array,
        batching: Batching,
        arrangement: Arrangement | None,
        form: _ArrayForm,
        stock: Callable[[], Iterator[Any]],
    ) -> None:
        super().__init__(batching)
        self.stock, self.form = stock, form
        self._reader, self._rows, self._arrangement = samples, rows, arrangement

    @property
    def count(self) -> int:
        return len(self._rows)

    @property
    def clock(self) -> StageClock:
        clock: StageClock = self._runtime().clock
        return clock

    def element(self, batch: Batch) -> Any:
        return self.form.batch(batch.arrays)

    def signature(self, batch_size: int | None) -> Any:
        return self.form.signature(batch_size)

    def describe(self) -> list[str]:
        pool = self._runtime().pool
        lines = [f"threads  →  {1 if pool is None else pool.threads}", *self._reader.plan.lines]
        if not self.batching.shuffle:
            return [*lines, "order  →  the dataset's"]
        how = "" if self._arrangement is None else f", by {self._arrangement.describe()}"
        return [*lines, f"order  →  shuffled by seed={self.batching.seed}{how}"]

    def _order(self, epoch: int) -> Int64Array:
        seed = self.batching.seed if self.batching.shuffle else None
        return self._rows[np.asarray(order_of(self.count, seed, epoch, self._arrangement), np.int64)]

    def _expect(self, batches: Callable[[], Iterator[Int64Array]], epoch: int) -> None:
        self._reader.follow(batches, self.batching.seed, epoch)

    def _begin(self, samples: Int64Array, draws: Int64Array, epoch: int) -> PendingBatch:
        runtime = self._runtime()
        arrays = [
            np.empty((len(samples), *value.shape), value.dtype)
            if value.dtype.hasobject
            else slots.take((len(samples), *value.shape), value.dtype)
            for value, slots in zip(self.form.values, runtime.slots, strict=True)
        ]
        key = Key(self.batching.seed, epoch, draws)
        reading = self._reader._reading(samples, samples, key, True, runtime, arrays)
        pending = PendingRead(runtime.threads, reading)

        def finish() -> Batch:
            there: Sequence[int] = pending.wait()
            batch = Batch(arrays, samples, draws, epoch)
            if len(there) == len(samples):
                return batch
            if not there and (error := why_nothing_is_left(pending.left_out, len(samples))):
                raise error
            return batch.select(np.asarray(there, np.int64))

        return PendingBatch(finish, pending.cancel)

    def _runtime(self) -> Any:
        runtime = self._reader._running()
        for slots in runtime.slots:
            slots.keep = max(slots.keep, AHEAD + IN_FLIGHT)
        return runtime


# ---- elements ------------------------------------------------------------------------------------


class _Value(NamedTuple):
    """One value of a sample: its name for messages, and the dtype and the shape of its array."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class _ArrayForm:
    """The structure of elements, and the TensorFlow dtypes of their tensors.

    If there is one value more than the structure has, the last value is the label.  ``channels_of`` is the
    number of dimensions of patches. The dimension in front of these dimensions then becomes the last
    dimension.  If ``channels_of`` is None, arrays are not changed.
    """

    def __init__(self, form: Form, values: Sequence[_Value], channels_of: int | None = None) -> None:
        self._form, self.values, self._channels_of = form, values, channels_of
        self._has_labels = len(values) > len(form.names)
        self._types = [_type_of(value) for value in values]
        for value in values if channels_of is not None else ():
            if len(value.shape) > (channels_of or 0) + 1:
                raise OptionError(
                    f"channels='last' takes one dimension in front of those of a patch; {value.name} has the "
                    f"sample shape {value.shape}: leave it out, and transpose in a map"
                )

    @property
    def suits_augment(self) -> bool:
        """True if an element is inputs, or a pair of inputs and labels, so that an Augment can change the
        element."""
        return self._has_labels or self._form.kind != "tuple" or len(self.values) == 2

    def batch(self, arrays: Sequence[npt.NDArray[Any]]) -> Any:
        """Return a batch of these arrays, (n, …), as TensorFlow takes it."""
        return self._element([self._native(array) for array in arrays])

    def signature(self, batch_size: int | None) -> Any:
        """Return the type of batches with this number of samples; None means any number."""
        return self._element([
            tf.TensorSpec((batch_size, *self._arranged(value.shape)), kind)
            for value, kind in zip(self.values, self._types, strict=True)
        ])  # fmt: skip

    def _element(self, parts: Sequence[Any]) -> Any:
        if not self._has_labels:
            return self._form.sample(parts)
        return self._form.sample(parts[:-1]), parts[-1]

    def _native(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if not array.dtype.isnative:  # TensorFlow supports only the machine's byte order
            array = array.astype(array.dtype.newbyteorder("="))
        if self._channels_of is None:
            return array
        if array.ndim == self._channels_of + 1:
            return array[..., None]
        return np.ascontiguousarray(np.moveaxis(array, 1, -1))

    def _arranged(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self._channels_of is None:
            return shape
        return (*shape, 1) if len(shape) == self._channels_of else (*shape[1:], shape[0])


def _type_of(value: _Value) -> Any:
    """Return the TensorFlow dtype of a value's elements."""
    dtype = value.dtype
    metadata: Mapping[str, Any] = dtype.metadata or {}  # from h5py: objects may be texts or arrays
    if dtype.kind == "S" or (dtype.kind == "O" and metadata.get("vlen") in (str, bytes)):
        return tf.string
    try:
        if dtype.kind not in "OVUmM":
            return tf.as_dtype(dtype.newbyteorder("="))
    except TypeError:
        pass
    raise OptionError(
        f"{value.name} has elements of {dtype}, for which TensorFlow has no type: leave it out, or store "
        "numbers in its place"
    )
