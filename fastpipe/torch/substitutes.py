"""The samples of an image folder as items of work, and others in the place of bad ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from fastpipe.core.bad_samples import Item
from fastpipe.core.keys import another_of_its_class, sample_seed
from fastpipe.core.sample_tables import PackedPaths, SampleTable, paths_of
from fastpipe.core.types import Key

__all__ = ["Items", "item_of", "substitute_of"]


class Items(Sequence[Item]):
    """Some samples as items of work, each made when it is looked at.

    Args:
        samples: a table, or a list that the script put in its place.
        positions: int64 (N,), from 0.

    Attributes:
        positions: as given.
        samples: what there was when the items were asked for: flat arrays, or a list of (path, target).
    """

    def __init__(self, samples: Any, positions: npt.NDArray[np.int64]) -> None:
        self.positions = positions
        self.samples: Any = samples.frozen if isinstance(samples, SampleTable) else None
        self._numbers = positions.tolist()
        self._items: list[Item] | None = None
        if self.samples is None:
            self._items = [item_of(samples, position) for position in self._numbers]
            self.samples = [(item.path, item.target) for item in self._items]

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, number: int) -> Item: ...
    @overload
    def __getitem__(self, number: slice) -> list[Item]: ...
    def __getitem__(self, number: int | slice) -> Item | list[Item]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        if self._items is not None:
            return self._items[number]
        position = self._numbers[number]
        return Item(position, self.samples.path(position), self.samples.targets.item(position))

    def targets(self, numbers: Sequence[int]) -> list[Any] | npt.NDArray[np.int64]:
        """The targets of some of them: class indices of a table as an array."""
        if self._items is not None:
            return [self._items[number].target for number in numbers]
        positions = self.positions if len(numbers) == len(self) else self.positions[numbers]
        found: npt.NDArray[np.int64] = self.samples.targets[positions]
        return found

    def paths(self) -> list[str]:
        """Their paths."""
        if self._items is not None:
            return [item.path for item in self._items]
        return [self.samples.path(position) for position in self._numbers]

    def packed_paths(self) -> PackedPaths:
        """Their paths, as the native core takes them."""
        if self._items is not None:
            return paths_of(self.samples, np.arange(len(self)))
        return paths_of(self.samples, self.positions)

    def are_still_in(self, samples: Any) -> bool:
        """Whether these are still the samples of a dataset."""
        if self._items is None:
            return isinstance(samples, SampleTable) and samples.frozen is self.samples
        try:
            return all(item == item_of(samples, item.index) for item in self._items)
        except Exception:  # fewer samples, or targets that do not compare
            return False


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
