"""Samples that remember the batch they were made in, so that collating costs nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import _utils, default_collate
from torch.utils.data._utils.collate import collate, collate_int_fn, collate_tensor_fn

from fastpipe.images.pixels import Conversion
from fastpipe.images.ramp import of_kind
from fastpipe.types import Key

__all__ = [
    "BatchSample", "BatchSamples", "Unfinished", "Whole", "collate_unfinished", "collated", "samples_of",
]  # fmt: skip


class Whole:
    """A batch tensor of which some samples are the rows.

    Attributes:
        tensor: (N, C, H, W).
        end: what is still to be done to it, where the plan left its end out.
        key: of the random numbers of augmentations that are still to be done to it, if any are.
        is_taken: whether the tensor was handed out as a collated batch; a second collation
            of the same samples makes a copy, as any collation of torch's does.
    """

    __slots__ = ("end", "is_taken", "key", "tensor")

    def __init__(self, tensor: torch.Tensor, end: Conversion | None = None, key: Key | None = None) -> None:
        self.tensor, self.end, self.key = tensor, end, key
        self.is_taken = False


class BatchSample(tuple[Any, ...]):
    """``(image, target)`` as ``ImageFolder`` gives it; ``image`` is a row of a batch tensor."""

    whole: Whole
    position: int

    def __reduce__(self) -> tuple[object, ...]:
        # Alone, a sample is a plain tuple: pickling it must not take the batch along.
        return (tuple, (tuple(self),))


class BatchSamples(Sequence[Any]):
    """The samples of a batch, in order, each made when it is looked at.

    Args:
        whole: the batch.
        row: of the batch's tensor and a position, a view of the type that the transform gives.
        targets: N targets: a list, or class indices, int64 (N,), which samples have as ``int``.
    """

    def __init__(
        self, whole: Whole, row: Callable[[torch.Tensor], Any], targets: list[Any] | npt.NDArray[np.int64]
    ) -> None:
        self.whole, self.targets = whole, targets
        self._row = row

    def __len__(self) -> int:
        return len(self.targets)

    @overload
    def __getitem__(self, position: int) -> BatchSample: ...
    @overload
    def __getitem__(self, position: slice) -> list[BatchSample]: ...
    def __getitem__(self, position: int | slice) -> BatchSample | list[BatchSample]:
        if isinstance(position, slice):
            return list(self)[position]
        position = range(len(self))[position]
        return self._sample(position, self.whole.tensor[position])

    def __iter__(self) -> Iterator[BatchSample]:
        return map(self._sample, itertools.count(), self.whole.tensor.unbind(0))

    def _sample(self, position: int, row: torch.Tensor) -> BatchSample:
        targets = self.targets
        target = targets.item(position) if isinstance(targets, np.ndarray) else targets[position]
        sample = BatchSample((self._row(row), target))
        sample.whole, sample.position = self.whole, position
        return sample


def samples_of(
    tensor: torch.Tensor,
    kind: type,
    targets: list[Any] | npt.NDArray[np.int64],
    end: Conversion | None = None,
    key: Key | None = None,
) -> BatchSamples:
    """The samples of a batch, in order.

    Args:
        tensor: (N, C, H, W).
        kind: of the samples' images, which are views of it.
        targets: as of ``BatchSamples``.
        end, key: as of ``Whole``.
    """
    return BatchSamples(Whole(tensor, end, key), partial(of_kind, kind=kind), targets)


class Unfinished(NamedTuple):
    """A batch as ``default_collate`` makes it, and what is still to be done to its images."""

    batch: Any
    end: Conversion | None
    key: Key | None


def collate_unfinished(samples: Any) -> Unfinished:
    """``default_collate`` of samples whose plan may have left its end out."""
    end, key = None, None
    if type(samples) is BatchSamples:
        end, key = samples.whole.end, samples.whole.key
    elif samples and type(samples[0]) is BatchSample:
        end, key = samples[0].whole.end, _key_of(samples)
    return Unfinished(collated(samples, default_collate), end, key)


def collated(samples: Any, collate_fn: Callable[[Any], Any]) -> Any:
    """Collate samples by a function.

    The script's own gets a list.  ``default_collate`` would make a sample only to find how it is collated.
    """
    if type(samples) is not BatchSamples or collate_fn is collate_unfinished:
        return collate_fn(samples)
    known = _utils.collate.default_collate_fn_map
    if collate_fn is default_collate and len(samples) and known.get(BatchSample) is _collate_samples:
        return _collate_samples(samples, collate_fn_map=known)
    return collate_fn(list(samples))


def _key_of(samples: Sequence[BatchSample]) -> Key | None:
    """Of samples that were made together or, where others were left out, in several batches of an epoch."""
    first = samples[0].whole.key
    if first is None:
        return None
    draws = [sample.whole.key.draws[sample.position] for sample in samples if sample.whole.key is not None]
    return Key(first.seed, first.epoch, np.array(draws, np.int64))


def _collate_samples(
    batch: Sequence[Any], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None
) -> list[Any]:
    """What ``default_collate`` makes of ``(image, target)`` tuples, without copying the images
    when the batch is complete and in order."""
    stacks_as_usual = (collate_fn_map or {}).get(torch.Tensor) is collate_tensor_fn
    if type(batch) is BatchSamples and stacks_as_usual and not batch.whole.is_taken:
        batch.whole.is_taken = True
        return [batch.whole.tensor, _collate_targets(batch.targets, collate_fn_map)]
    whole = batch[0].whole
    if (
        stacks_as_usual
        and not whole.is_taken
        and len(batch) == len(whole.tensor)
        and all(
            type(sample) is BatchSample and sample.whole is whole and sample.position == position
            for position, sample in enumerate(batch)
        )
    ):
        images, whole.is_taken = whole.tensor, True
    else:
        images = collate(tuple(sample[0] for sample in batch), collate_fn_map=collate_fn_map)
    # A tuple, as ``default_collate`` makes it: it hands back strings in the sequence they came in.
    return [images, collate(tuple(sample[1] for sample in batch), collate_fn_map=collate_fn_map)]


def _collate_targets(targets: list[Any] | npt.NDArray[np.int64], known: Any) -> Any:
    if isinstance(targets, np.ndarray):
        if known.get(int) is collate_int_fn:
            return torch.tensor(targets)
        targets = targets.tolist()
    return collate(tuple(targets), collate_fn_map=known)


_utils.collate.default_collate_fn_map[BatchSample] = _collate_samples
