"""``hdf5_dataset``: rows of HDF5 datasets as a ``tf.data.Dataset``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from fastpipe.core.array_samples import Form
from fastpipe.core.order import Groups, default_window
from fastpipe.errors import OptionError
from fastpipe.hdf5.samples import HDF5Samples
from fastpipe.hdf5.stock import H5pyRows
from fastpipe.options import BadSamples, Cache, Shard, Shuffle, Stage
from fastpipe.tf.array_form import ArrayForm, Value
from fastpipe.tf.array_stream import ArrayStream, this_process
from fastpipe.tf.arrays import dataset_of_arrays
from fastpipe.tf.augment import Augment
from fastpipe.tf.batching import batching_of
from fastpipe.tf.dataset import Dataset

__all__ = ["hdf5_dataset"]


def hdf5_dataset(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    keys: str | Sequence[str] | Mapping[str, str],
    labels: str | None = None,
    batch_size: int | None = 32,
    shuffle: bool | Shuffle = True,
    seed: int | None = None,
    *,
    rows: Any = None,
    sample_dims: int = 1,
    drop_remainder: bool = False,
    augment: Callable[..., Any] | None = None,
    cache: Cache | Literal["auto", "ram", "disk", "off"] = "auto",
    shard: Shard | Literal["auto"] | tf.distribute.InputContext | None = None,
    bad_samples: BadSamples | Literal["raise", "replace", "skip"] = "raise",
    stage: Stage | str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    threads: int | Literal["auto"] = "auto",
) -> Dataset:
    """A ``tf.data.Dataset`` of the rows of HDF5 datasets, as ``h5py`` gives them.

    It takes the place of a generator over an ``h5py.File``, in which one thread reads row by row and inflates
    each chunk once for every row in it: chunks are read and decoded in threads, without the HDF5 library's
    lock, and kept where they fit.

    Args:
        path: an HDF5 file; or several, whose rows follow each other.  With a ``stage``, also URLs.
        keys: a dataset's path in the file, for inputs that are a tensor; a sequence of paths, for tuples, of
            which two are inputs and labels to Keras; or a mapping to paths, for dicts.
        labels: path of the dataset with the labels: elements are then pairs of inputs and labels.
        batch_size: rows in a batch; None for single rows.
        shuffle: each epoch has an order of its own; ``Shuffle(window=…, unit="group")`` shuffles chunks, and
            then the rows of some of them, each decoded once.
        seed: makes orders a function of (seed, epoch).  Without one, a number of NumPy's global generator is
            taken.
        rows: those that are used, such as the rows of a fold: whole numbers, a mask (N,), or a slice.
        sample_dims: how many of the first dimensions count rows.
        drop_remainder: leave out the last batch if it is smaller.
        augment: a :class:`fastpipe.tf.Augment`, whose numbers are then a function of (seed, epoch, position);
            or a function of (inputs, labels), or of inputs, for each batch.
        cache: where decoded chunks are kept, a :class:`fastpipe.Cache` or its ``where``; see
            :class:`fastpipe.FastHDF5Dataset`.
        shard: this process's part of each epoch, as for :func:`fastpipe.tf.image_dataset`.
        bad_samples: what happens to rows that cannot be read, a :class:`fastpipe.BadSamples` or its policy's
            name.
        stage: a folder on a local disk, or a :class:`fastpipe.Stage`, to which files that are URLs are copied
            whole.
        storage_options: for URLs: credentials and endpoint, as fsspec's file system for them takes them.
        threads: reading threads; ``"auto"`` is the number of cores.

    Returns:
        :class:`fastpipe.tf.Dataset` of tensors (n, …) of the datasets' types; texts are ``tf.string``.

    Raises:
        FileNotFoundError, PermissionError: as ``open`` raises them.
        KeyError: the file has no such dataset.
        HDF5Error: it is no HDF5 file, it is damaged, or somebody has it open for writing.
        StageError, StoreError: as for :class:`fastpipe.FastHDF5Dataset`.
        OptionError: an option's value cannot work, TensorFlow has no type for a dataset's elements, or there
            are no rows.

    While it is iterated over, an error names row and file.

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
    form = Form.of(keys)
    if labels is not None and not isinstance(labels, str):
        raise OptionError(f"labels= is the path of a dataset in the file, got {labels!r}")
    names = form.names if labels is None else (*form.names, labels)
    samples = HDF5Samples(
        this_process, path, list(names), sample_dims=sample_dims, cache=cache, bad_samples=bad_samples,
        threads=threads, stage=stage, storage_options=storage_options,
    )  # fmt: skip
    chosen = _chosen(rows, len(samples))
    batching = batching_of(
        batch_size, drop_remainder, shuffle, seed, shard, bad_samples, draws=isinstance(augment, Augment)
    )  # fmt: skip
    arrangement = None
    if isinstance(shuffle, Shuffle) and shuffle.unit == "group":
        window = shuffle.window or default_window([samples])
        samples._expect_window(window)
        arrangement = Groups(samples.locality_groups()[chosen], window)
    values = [Value(name, *kind) for name, kind in zip(names, samples.kinds, strict=True)]
    shape = ArrayForm(form, values)

    def by_h5py() -> Iterator[Any]:
        stock = H5pyRows(samples._files, samples._form)
        for row in chosen.tolist():
            yield shape.of([np.asarray(value)[None] for value in stock.values(row)])

    stream = ArrayStream(samples, chosen, batching, arrangement, shape, by_h5py)
    return dataset_of_arrays(stream, is_single=batch_size is None, augment=augment)


def _chosen(rows: Any, count: int) -> npt.NDArray[np.int64]:
    """The rows that ``rows=`` means: int64 (N,).

    Raises:
        OptionError: they are none, or not in the file.
    """
    every = np.arange(count)
    try:
        chosen = (
            every if rows is None else np.atleast_1d(every[rows if isinstance(rows, slice) else _index(rows)])
        )
    except (IndexError, TypeError, ValueError) as error:
        raise OptionError(
            f"rows= must be whole numbers below {count}, a mask ({count},) or a slice: {error}"
        ) from None
    if not len(chosen):
        raise OptionError("there are no rows: a dataset needs at least one")
    return chosen.astype(np.int64)


def _index(rows: Any) -> npt.NDArray[Any]:
    index = np.asarray(rows)
    return index.astype(np.int64) if not index.size else index
