"""Evaluation by file: batches that contain all segments of some files, and one result for each file."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fastpipe.core.casting import unheld
from fastpipe.errors import OptionError
from fastpipe.torch.loader import FastLoader
from fastpipe.torch.wrappers import is_rows, numbers_of

_HOW = ("mean", "max", "vote")
_INT64 = np.dtype(np.int64)


def group_batches(
    dataset: Any, k: int, *, groups: Any = None, num_workers: int = 0, device: Any = None
) -> GroupBatches:
    """Make batches that contain all samples of ``k`` files, with the file number of each sample.

    Use this function for models that process segments of files and are evaluated by file.  One large batch
    for several files is faster than a small batch for each file.

    Args:
        dataset: any dataset with a length; it is read through a :class:`fastpipe.FastLoader`.
        k: number of files in a batch, at least 1.
        groups: integers (N,): the number of each sample's file, in any order.  Default for a
            ``FastHDF5Dataset`` with ``sample_dims`` of 2 or more: the index along the first dimension.
            Default for rows of datasets that a key with ``*`` names: the number of the dataset.
            Default for other datasets of several files or volumes: the number of the file or volume.
        num_workers, device: as for :class:`fastpipe.FastLoader`.

    Returns:
        An iterable with a length that can be iterated over any number of times.  It yields pairs.  The first
        item is a batch, as ``default_collate`` makes it.  The second item is the group number of each sample
        in the batch, int64 (S,).  Groups come in ascending order.  The samples of a group stay together, in
        the dataset's order.

    Raises:
        OptionError: ``k`` is below 1, the groups are unknown, or the dataset skips bad samples.

    >>> import numpy as np
    >>> segments = torch.utils.data.TensorDataset(torch.arange(6))
    >>> for (batch,), files in group_batches(segments, 2, groups=[0, 0, 1, 1, 1, 2]):
    ...     print(batch.tolist(), files.tolist())
    [0, 1, 2, 3, 4] [0, 0, 1, 1, 1]
    [5] [2]
    """
    k = operator.index(k)
    if k < 1:
        raise OptionError(f"group_batches(k=…) must be a number from 1, got {k}")
    ids = numbers_of(dataset, _own_ids) if groups is None else np.asarray(groups)
    if ids.shape != (len(dataset),) or ids.dtype.kind not in "iu" or unheld(ids, _INT64).any():
        raise OptionError(
            f"groups must be one integer for each of the {len(dataset)} samples, within int64, got "
            f"{ids.dtype} of shape {ids.shape}"
        )
    order = np.argsort(ids, kind="stable")
    sorted_ids = ids[order].astype(np.int64)
    cuts = np.flatnonzero(np.diff(sorted_ids, prepend=sorted_ids[:1] - 1))[k::k]
    parts, batches = (np.split(values, cuts) if len(ids) else [] for values in (sorted_ids, order))
    loader: FastLoader[Any] = FastLoader(
        dataset, batch_sampler=[part.tolist() for part in batches], num_workers=num_workers, device=device
    )
    source = loader._source()
    if source is not None and source.skips:
        raise OptionError(
            "bad_samples='skip' leaves samples out of a batch, and group_batches() would not know which: "
            "use bad_samples='raise' or 'replace'"
        )
    return GroupBatches(loader, k, list(map(torch.from_numpy, parts)))


@dataclass(eq=False)
class GroupBatches:
    """The result of ``group_batches``.  ``loader`` reads the batches, each with ``k`` groups.  ``ids``
    contains the group numbers of the samples in each batch."""

    loader: FastLoader[Any]
    k: int
    ids: list[torch.Tensor]

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[tuple[Any, torch.Tensor]]:
        return zip(self.loader, self.ids, strict=True)


class Reduced(NamedTuple):
    """The result of ``segment_reduce``: one value for each group.

    Attributes:
        groups: int64 (G,): the numbers of the groups that have samples, in ascending order.
        values: (G, …): the reduced value of each group.
    """

    groups: torch.Tensor
    values: torch.Tensor


def segment_reduce(
    values: torch.Tensor, groups: torch.Tensor, how: Literal["mean", "max", "vote"] = "mean"
) -> Reduced:
    """Reduce the values of samples to one value for each group, on the device of ``values``.

    Args:
        values: (S, …): a model's output for each sample.
        groups: integers (S,): the group number of each sample, in any order.
        how: ``"mean"`` and ``"max"`` reduce each element.  The mean of integers has torch's default dtype.
            For ``"vote"``, ``values`` are scores (S, C) of C classes, or votes, integers (S,).  A sample's
            vote is the class with the largest score.  The result is the class with the most votes in each
            group, int64 (G,).  If several classes have equally many votes, it is the smallest class number.

    Raises:
        OptionError: shapes do not match, or ``how`` is unknown.

    >>> scores = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
    >>> segment_reduce(scores, torch.tensor([7, 7, 9]), "mean")
    Reduced(groups=tensor([7, 9]), values=tensor([[0.7500, 0.2500],
            [0.2000, 0.8000]]))
    >>> segment_reduce(scores, torch.tensor([7, 7, 9]), "vote").values
    tensor([0, 1])
    """
    if how not in _HOW:
        raise OptionError(f"segment_reduce(how=…) must be one of {', '.join(map(repr, _HOW))}; got {how!r}")
    if groups.ndim != 1 or values.ndim < 1 or len(values) != len(groups):
        raise OptionError(
            f"segment_reduce() takes values (S, …) and groups (S,), got {tuple(values.shape)} and "
            f"{tuple(groups.shape)}"
        )
    if groups.is_floating_point() or groups.is_complex() or groups.dtype == torch.bool:
        raise OptionError(f"segment_reduce() takes groups of integers, got {groups.dtype}")
    if groups.dtype == torch.uint64 and (groups.view(torch.int64) < 0).any():
        raise OptionError("segment_reduce() takes groups within int64: number them anew")
    groups = groups.to(torch.int64)
    found, places, counts = torch.unique(groups.to(values.device), return_inverse=True, return_counts=True)
    if how == "vote":
        return Reduced(found, _most_voted(values, places, len(found)))
    if how == "max":
        shape = (len(found), *values.shape[1:])
        index = places.view(-1, *[1] * (values.ndim - 1)).expand_as(values)
        made = values.new_empty(shape)
        return Reduced(found, made.scatter_reduce(0, index, values, "amax", include_self=False))
    if not (values.is_floating_point() or values.is_complex()):
        values = values.to(torch.get_default_dtype())
    total = values.new_zeros((len(found), *values.shape[1:])).index_add(0, places, values)
    return Reduced(found, total / counts.view(-1, *[1] * (values.ndim - 1)))


def _most_voted(values: torch.Tensor, places: torch.Tensor, groups: int) -> torch.Tensor:
    if values.ndim == 2 and values.shape[1]:
        classes, votes = values.shape[1], values.argmax(1)
    elif values.ndim == 1 and not values.is_floating_point() and not values.is_complex():
        votes = values.to(torch.int64)
        if len(votes) and int(votes.min()) < 0:
            raise OptionError(f"votes are numbers of classes from 0, got {int(votes.min())}")
        classes = int(votes.max()) + 1 if len(votes) else 1
    else:
        raise OptionError(
            "votes are scores (S, C) of at least one class, or integers (S,), got "
            f"{values.dtype} of shape {tuple(values.shape)}"
        )
    counts = torch.zeros((groups, classes), dtype=torch.int64, device=values.device)
    counts.view(-1).index_add_(0, places * classes + votes, torch.ones_like(votes))
    return counts.argmax(1)  # if several classes have equally many votes, the first class


def _own_ids(base: Any) -> npt.NDArray[np.int64]:
    found: npt.NDArray[Any] | None = base._places_in_files() if is_rows(base) else None
    if found is None:
        raise OptionError(
            f"this {type(base).__name__} does not know the file of each sample: pass groups=, one integer "
            "for each sample"
        )
    return found
