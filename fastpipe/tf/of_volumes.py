"""``patch_dataset``: patches of volumes as a ``tf.data.Dataset``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from fastpipe.core.order import Tour
from fastpipe.options import BadSamples, Cache, Shard, Shuffle, Stage
from fastpipe.sampling import Sampling
from fastpipe.tf.array_form import ArrayForm, Value
from fastpipe.tf.array_stream import ArrayStream, this_process
from fastpipe.tf.arrays import dataset_of_arrays
from fastpipe.tf.augment import Augment
from fastpipe.tf.batching import batching_of
from fastpipe.tf.dataset import Dataset
from fastpipe.tf.options import check_choice
from fastpipe.volumes.samples import PatchSamples

__all__ = ["patch_dataset"]


def patch_dataset(
    volume: Any,
    patch_size: Sequence[int],
    labels: Any = None,
    batch_size: int | None = 2,
    shuffle: bool | Shuffle = True,
    seed: int | None = None,
    *,
    mask: Any = None,
    sampling: Sampling | None = None,
    padding: Any = "error",
    channels: Literal["as_stored", "last"] = "as_stored",
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
    """A ``tf.data.Dataset`` of patches of volumes, as NumPy cuts them from the whole array.

    It takes the place of a generator that slices a Zarr array or an image: what is decoded for a patch is
    remembered, within a budget, for those that follow.

    Args:
        volume, patch_size, labels, mask, sampling, padding, nan, cache, stage, storage_options: as for
            :class:`fastpipe.FastPatchDataset`.
        batch_size: patches in a batch; None for single patches.
        shuffle: each epoch has an order of its own; ``Shuffle(unit="group")`` is one that decodes little more
            than it uses.
        seed: makes places and orders a function of (seed, epoch).  Without one, a number of NumPy's global
            generator is taken.
        channels: where dimensions in front of those that patches are cut along are: ``"as_stored"``, or
            ``"last"``, as Keras's layers have them: there is one then, of size 1 where there is none.
        drop_remainder: leave out the last batch if it is smaller.
        augment: a function of (inputs, labels), or of inputs, for each batch; or, for patches of two
            dimensions with their channels last, a :class:`fastpipe.tf.Augment`.
        shard: this process's part of each epoch, as for :func:`fastpipe.tf.image_dataset`.
        bad_samples: what happens to patches that cannot be read, a :class:`fastpipe.BadSamples` or its
            policy's name.
        threads: reading threads; ``"auto"`` is the number of cores.

    Returns:
        :class:`fastpipe.tf.Dataset` of tensors (n, \\*channels, \\*patch_size) of the volume's type; with
        labels, or a mask, of tuples (volume, labels[, mask]).

    Raises:
        FileNotFoundError, PermissionError: as ``open`` raises them.
        VolumeError: a volume cannot be opened, or is damaged.
        StoreError: a store does not answer as it must.
        OptionError: an option's value cannot work, or the volumes do not fit together.

    While it is iterated over, an error names volume and place.

    >>> volume = np.arange(4 * 6 * 6, dtype=np.uint16).reshape(4, 6, 6)
    >>> from fastpipe.sampling import Grid
    >>> patches = patch_dataset(volume, (2, 3, 3), sampling=Grid(), channels="last", shuffle=False)
    >>> [batch.shape for batch in patches.take(1)]
    [TensorShape([2, 2, 3, 3, 1])]
    """
    check_choice("channels", channels, ("as_stored", "last"))
    samples = PatchSamples(
        this_process, volume, patch_size, labels=labels, mask=mask, sampling=sampling, padding=padding,
        margin=0, cache=cache, stage=stage, storage_options=storage_options, nan=nan, bad_samples=bad_samples,
        threads=threads,
    )  # fmt: skip
    draws = samples._places.is_random or isinstance(augment, Augment)
    batching = batching_of(batch_size, drop_remainder, shuffle, seed, shard, bad_samples, draws=draws)
    samples.seed = batching.seed
    values = [Value(name, *kind) for name, kind in zip(samples._form.names, samples.kinds, strict=True)]
    form = ArrayForm(samples._form, values, len(samples.patch_size) if channels == "last" else None)
    arrangement = None
    if isinstance(shuffle, Shuffle) and shuffle.unit == "group":
        window = samples._tour_window() if shuffle.window is None else shuffle.window
        arrangement = Tour(samples, [samples], window, partial(samples._tour_ranks, window))

    def by_slicing() -> Iterator[Any]:
        stock = samples._sliced()
        for index in range(len(stock)):
            yield form.of([value[None] for value in stock.values(index, batching.seed, 0)])

    stream = ArrayStream(samples, np.arange(len(samples)), batching, arrangement, form, by_slicing)
    return dataset_of_arrays(stream, is_single=batch_size is None, augment=augment)
