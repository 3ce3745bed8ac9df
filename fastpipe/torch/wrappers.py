"""The datasets inside torch's ``Subset`` and ``ConcatDataset``, and the innermost dataset of each sample."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Subset

Int64Array = npt.NDArray[np.int64]

# An innermost dataset, the positions of its samples in a list of indices, and the samples' indices in the
# innermost dataset.  Both arrays are int64 (N,).
Located = tuple[Any, Int64Array, Int64Array]

_LARGEST = np.iinfo(np.int64).max


def ends_of(dataset: Any) -> list[Any]:
    """Return the innermost datasets in the order of their samples; a dataset may occur several times."""
    if type(dataset) is Subset:
        return ends_of(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return [end for one in dataset.datasets for end in ends_of(one)]
    return [dataset]


def _is_a(dataset: Any, module: str, name: str) -> bool:
    """Return whether a dataset is an instance of a class, without importing the class's module."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(dataset, kind)


def is_rows(dataset: Any) -> bool:
    return _is_a(dataset, "fastpipe.torch.array_dataset", "RowsDataset")


def is_fast_folder(dataset: Any) -> bool:
    return _is_a(dataset, "fastpipe.torch.image_folder", "FastImageFolder")


def is_folder(dataset: Any) -> bool:
    """Return whether a dataset is torchvision's ``ImageFolder``."""
    return _is_a(dataset, "torchvision.datasets", "ImageFolder")


def integers(indices: Sequence[int] | Int64Array) -> Int64Array:
    """Return indices as int64 (N,)."""
    if isinstance(indices, np.ndarray) and indices.dtype == np.int64 and indices.ndim == 1:
        return indices.copy()  # a sampler may write the next indices into the same array
    asked = np.asarray(indices)
    if asked.size and asked.dtype.kind not in "iu":
        asked = np.array([operator.index(index) for index in indices], object)
    is_nested = asked.ndim > 1 and not all(hasattr(index, "__index__") for index in indices)  # tuples, lists
    if is_nested or asked.size != len(indices):
        raise TypeError(f"samples have one index each, got {indices!r}")
    if asked.dtype.kind in "uO" and asked.size and not -_LARGEST <= asked.min() <= asked.max() <= _LARGEST:
        raise IndexError(f"samples {asked.min()} to {asked.max()}, beyond the ends of any dataset")
    return asked.astype(np.int64).reshape(-1)


def positions_of(indices: Sequence[int] | Int64Array, length: int) -> Int64Array:
    """Return the positions of ``indices`` in a dataset of this length, counted from 0, as int64 (N,)."""
    positions = integers(indices)
    if (positions.view(np.uint64) < length).all():  # as uint64, negative indices are large
        return positions
    wrong = (positions < -length) | (positions >= length)
    if wrong.any():
        raise IndexError(f"sample {positions[wrong][0]} of a dataset of {length}")
    return np.where(positions < 0, positions + length, positions)


def located(dataset: Any, indices: Int64Array) -> list[Located]:
    """Return the innermost datasets that contain the samples at ``indices``, each with the positions and the
    indices of its samples (``Located``).  Raise the errors that ``Subset`` and ``ConcatDataset`` raise."""
    if type(dataset) is Subset:
        chosen = dataset.indices
        # The script may change the list at any time.  Converting the whole list for each batch would be slow.
        return located(dataset.dataset, integers([chosen[index] for index in indices.tolist()]))
    if type(dataset) is not ConcatDataset:
        return [(dataset, np.arange(len(indices)), indices)] if len(indices) else []
    ends = np.array(dataset.cumulative_sizes)
    if (indices < -ends[-1]).any():  # ConcatDataset raises the same error
        raise ValueError("absolute value of index should not exceed dataset length")
    indices = np.where(indices < 0, indices + ends[-1], indices)
    if (indices >= ends[-1]).any():
        raise IndexError(f"sample {indices.max()} of a dataset of {ends[-1]}")
    owners, firsts = np.searchsorted(ends, indices, side="right"), np.concatenate([[0], ends])
    found: dict[int, tuple[Any, list[Int64Array], list[Int64Array]]] = {}
    for owner in np.unique(owners).tolist():
        rows = np.flatnonzero(owners == owner)
        for end, inner, local in located(dataset.datasets[owner], indices[rows] - firsts[owner]):
            entry = found.setdefault(id(end), (end, [], []))
            entry[1].append(rows[inner])
            entry[2].append(local)
    made = []
    for end, parts, locals_ in found.values():
        places, inside = np.concatenate(parts), np.concatenate(locals_)
        order = np.argsort(places)
        made.append((end, places[order], inside[order]))
    return made


def indices_in(dataset: Any, base: Any, indices: Sequence[int] | Int64Array) -> tuple[Int64Array, Int64Array]:
    """Find the samples of ``base``, an innermost dataset, among ``indices``.  Return their positions in
    ``indices``, and their indices in ``base``, counted from 0."""
    for end, places, local in located(dataset, integers(indices)):
        if end is base:
            return places, np.where(local < 0, local + len(base), local)
    none = np.zeros(0, np.int64)
    return none, none


def numbers_of(dataset: Any, of: Callable[[Any], Int64Array]) -> Int64Array:
    """Return a number for each sample, for example its group, int64 (N,).  ``of`` returns such numbers for
    the samples of an innermost dataset, from 0.  In a ``ConcatDataset``, the numbers of a dataset begin after
    the largest number of the dataset before."""
    if type(dataset) is Subset:
        return numbers_of(dataset.dataset, of)[integers(dataset.indices)]
    if type(dataset) is ConcatDataset:
        first, found = 0, []
        for one in dataset.datasets:
            numbers = numbers_of(one, of)
            found.append(numbers + first)
            first += int(numbers.max(initial=-1)) + 1
        return np.concatenate(found)
    return np.asarray(of(dataset), np.int64)
