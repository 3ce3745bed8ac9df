"""The samples of an image folder as items of work, and others in the place of bad ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._replacing import another_of_its_class
from fastpipe.engine.bad import Item
from fastpipe.index.tables import SampleTable
from fastpipe.transform.keys import sample_seed
from fastpipe.types import Key

__all__ = ["item_of", "substitute_of"]


def item_of(samples: Any, position: int) -> Item:
    """A sample of a table, or of a list that the script put in its place."""
    if isinstance(samples, SampleTable):
        return Item(position, samples.path(position), samples.target(position))
    path, target = samples[position]
    return Item(position, os.fspath(path), target)


def substitute_of(samples: Any, items: Sequence[Item], key: Key, number: int, attempt: int) -> Item | None:
    """Another sample of the same class: the ``attempt``-th of them in an order that the key of the one it
    replaces draws; None where there is none.

    Args:
        samples: of the dataset.
        items, key: of the batch.
        number: which of the items is replaced.
        attempt: from 1.
    """
    item = items[number]
    seed = sample_seed(key.seed, key.epoch, int(key.draws[number]))
    classes = _classes_of(samples)
    other = another_of_its_class(classes, classes[item.index], item.index, seed, attempt)
    return None if other is None else item_of(samples, other)


def _classes_of(samples: Any) -> npt.NDArray[Any]:
    """The class of each sample: its target; one for all where targets are neither integers nor texts."""
    if isinstance(samples, SampleTable) and samples.is_flat:
        return samples.targets_array()
    targets = [sample[1] for sample in samples]
    if not all(isinstance(target, (int, np.integer, str)) for target in targets):
        return np.zeros(len(targets), np.int64)
    # Objects: in an array of their own type, 1 and "1", or two integers beyond int64, may be the same.
    return np.array(targets, object)
