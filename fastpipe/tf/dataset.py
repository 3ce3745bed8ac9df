"""``tf.data.Dataset`` with what a script asks of the datasets that fastpipe makes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from fastpipe.errors import OptionError
from fastpipe.tf.streaming import Stream

__all__ = ["About", "Dataset", "ImageDataset"]


class About(NamedTuple):
    """What is known of a dataset, whatever is done to its elements.

    Attributes:
        plan: which engine makes what, in lines.
        stock: makes the dataset of stock parts that gives the same.
        stream: what makes its batches in this process, or None.
        class_names: names of the labels, or None.
        file_paths: the files of images, in the order of the rows; of several modalities a dict of them.
        keeps: what else has to live as long as the dataset.
    """

    plan: Callable[[], str]
    stock: Callable[[], Any]
    stream: Stream | None
    class_names: list[str] | None = None
    file_paths: Any = None
    keeps: Any = None


class Dataset(tf.data.Dataset):  # type: ignore[misc]  # TensorFlow ships no types
    """A ``tf.data.Dataset`` whose batches are made by fastpipe.

    Its own methods, such as ``map``, ``batch``, ``prefetch`` or ``take``, give another that knows the same.
    """

    # The two names that a subclass has to have, ``element_spec`` and ``_inputs``, and ``_variant_tensor`` are
    # all of TensorFlow's insides that are touched.

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
        """What makes the batches, how, and what is kept."""
        return self._about.plan()

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Seconds spent in this process, by stage, summed over the threads; empty for the engine
        ``"graph"``."""
        stream = self._about.stream
        return {} if stream is None else stream.clock.totals()

    def reference(self) -> Any:
        """The same samples from stock parts, to compare with, one after the other in the order of the rows:
        images by ``tf.py_function`` with Pillow, or with TensorFlow's operations; rows and patches by the
        formats' own libraries."""
        return self._about.stock()

    def set_epoch(self, epoch: int) -> None:
        """Number the epoch that is begun next: ``model.fit(…, initial_epoch=3)`` goes on with the order of
        epoch 3 after ``set_epoch(3)``.

        Raises:
            OptionError: the engine ``"graph"`` has no numbers of epochs.
        """
        if self._about.stream is None:
            raise OptionError("set_epoch needs engine='threads': TensorFlow's shuffle cannot go to an epoch")
        self._about.stream.set_epoch(epoch)


class ImageDataset(Dataset):
    """A :class:`fastpipe.tf.Dataset` of images, made by :func:`fastpipe.tf.image_dataset`.

    Attributes:
        class_names: names of the labels, as Keras's datasets have them; None without.
        file_paths: the files, in the order of the rows; for modalities, a dict of them.
    """

    def __init__(self, dataset: Any, about: About) -> None:
        super().__init__(dataset, about)
        self.class_names, self.file_paths = about.class_names, about.file_paths


def _kept(name: str) -> Callable[..., Any]:
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
        setattr(Dataset, _name, _kept(_name))
