"""Samples that remember the batch they were made in, so that collating costs nothing.

A sample that the script looks at, or keeps, has memory of its own: it does not hold the batch.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import _utils, default_collate
from torch.utils.data._utils.collate import collate, collate_int_fn, collate_tensor_fn

from fastpipe.core.types import Key
from fastpipe.images.pixels import Conversion
from fastpipe.torch.lane_memory import is_in_lane

__all__ = [
    "BatchSample", "BatchSamples", "Unfinished", "Whole", "collate_unfinished", "collated", "entry",
    "samples_of",
]  # fmt: skip


class Whole:
    """A batch tensor of which some samples are the rows.

    Attributes:
        tensor: (N, C, H, W); None once no sample may be a view of it any more.
        end: what is still to be done to it, where the plan left its end out.
        key: of the random numbers of augmentations that are still to be done to it, if any are.
        is_taken: whether the tensor was handed out as a collated batch; a second collation
            of the same samples makes a copy, as any collation of torch's does.
    """

    __slots__ = ("__weakref__", "_rows", "end", "is_taken", "key", "tensor")

    def __init__(self, tensor: torch.Tensor, end: Conversion | None = None, key: Key | None = None) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.end, self.key = end, key
        self.is_taken = False
        self._rows: list[weakref.ref[torch.Tensor]] = []

    def row(self, tensor: torch.Tensor, kind: type) -> torch.Tensor:
        """Return a row of the tensor as a sample's image, of the class that the transform gives."""
        # No view to torch, which would keep the batch even when the image has memory of its own.
        image: torch.Tensor = torch.Tensor._make_subclass(kind, tensor)
        self._rows.append(weakref.ref(image))
        return image

    def cut_off(self, image: torch.Tensor) -> None:
        """Give a sample's image memory of its own, unless it is the only one."""
        tensor = self.tensor
        if tensor is None or (len(tensor) == 1 and not self.is_taken):
            return
        # What comes from a worker by its lane is cut off where it is received.
        if not (type(image) is torch.Tensor and is_in_lane(tensor)):
            with torch.inference_mode(False):
                image.data = image.clone()

    def release(self) -> None:
        """Give each sample that is still there memory of its own."""
        for row in self._rows:
            image = row()
            if image is not None and self.tensor is not None and _shares(image, self.tensor):
                self.cut_off(image)
        self._rows, self.tensor = [], None


def _shares(image: torch.Tensor, tensor: torch.Tensor) -> bool:
    return image.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


class BatchSample(tuple[Any, ...]):
    """``(image, target)`` as ``ImageFolder`` gives it.

    The image is a row of the batch's tensor until the script looks at it, or keeps it beyond the collation.
    From then on it has memory of its own.
    """

    whole: Whole | None = None  # of which the image is a row
    position = 0

    def alone(self) -> tuple[Any, ...]:
        """Return the sample as a plain tuple, whose image has memory of its own."""
        whole, self.whole = self.whole, None
        if whole is not None:
            whole.cut_off(entry(self, 0))
        return super().__getitem__(slice(None))

    def __getitem__(self, place: Any) -> Any:
        return self.alone()[place]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.alone())

    def __add__(self, other: Any) -> Any:
        return self.alone() + other

    def __radd__(self, other: Any) -> Any:
        return other + self.alone()

    def __mul__(self, times: SupportsIndex) -> Any:
        return self.alone() * times

    __rmul__ = __mul__

    def __reduce__(self) -> tuple[object, ...]:
        return (tuple, (self.alone(),))


def entry(sample: Any, place: int) -> Any:
    """Return an entry of a sample as it is, for a caller that does not keep it."""
    return tuple.__getitem__(sample, place) if type(sample) is BatchSample else sample[place]


class BatchSamples(Sequence[Any]):
    """The samples of a batch, in order, each made when it is looked at.

    Args:
        whole: the batch.
        kind: of the samples' images.
        targets: N targets: a list, or class indices, int64 (N,), which samples have as ``int``.
    """

    def __init__(self, whole: Whole, kind: type, targets: list[Any] | npt.NDArray[np.int64]) -> None:
        self.whole, self.targets = whole, targets
        self._kind = kind

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
        assert self.whole.tensor is not None
        return self._sample(position, self.whole.tensor[position])

    def __iter__(self) -> Iterator[BatchSample]:
        assert self.whole.tensor is not None
        return map(self._sample, itertools.count(), self.whole.tensor.unbind(0))

    def _sample(self, position: int, row: torch.Tensor) -> BatchSample:
        targets = self.targets
        target = targets.item(position) if isinstance(targets, np.ndarray) else targets[position]
        sample = BatchSample((self.whole.row(row, self._kind), target))
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
        kind: of the samples' images, which are rows of it.
        targets: as of ``BatchSamples``.
        end, key: as of ``Whole``.
    """
    return BatchSamples(Whole(tensor, end, key), kind, targets)


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
    elif type(samples) is list and type(next(iter(samples), None)) is BatchSample:
        whole = samples[0].whole
        end, key = (None, None) if whole is None else (whole.end, _key_of(samples))
    return Unfinished(collated(samples, default_collate), end, key)


def collated(samples: Any, collate_fn: Callable[[Any], Any]) -> Any:
    """Collate samples by a function.

    The script's own gets a list, and what it keeps of the samples has memory of its own.  ``default_collate``
    would make a sample only to find how it is collated.
    """
    if collate_fn is collate_unfinished:
        return collate_fn(samples)
    known = _utils.collate.default_collate_fn_map
    if collate_fn is default_collate and known.get(BatchSample) is _collate_samples:
        if type(samples) is BatchSamples and len(samples):
            return _collate_samples(samples, collate_fn_map=known)
        return collate_fn(samples)
    if type(samples) not in (list, BatchSamples):
        return collate_fn(samples)
    listed = list(samples)
    wholes = {id(one.whole): one.whole for one in listed if type(one) is BatchSample}
    data = collate_fn(listed)
    for whole in wholes.values():
        if whole is not None:
            whole.release()
    return data


def _key_of(samples: Sequence[BatchSample]) -> Key | None:
    """Of samples that were made together or, where others were left out, in several batches of an epoch."""
    wholes = [(sample.whole, sample.position) for sample in samples]
    first = wholes[0][0]
    if first is None or first.key is None:
        return None
    draws = [
        whole.key.draws[position] for whole, position in wholes if whole is not None and whole.key is not None
    ]
    return Key(first.key.seed, first.key.epoch, np.array(draws, np.int64))


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
    tensor = None if whole is None else whole.tensor
    if (
        stacks_as_usual
        and tensor is not None
        and not whole.is_taken
        and len(batch) == len(tensor)
        and all(
            type(sample) is BatchSample and sample.whole is whole and sample.position == position
            for position, sample in enumerate(batch)
        )
    ):
        images, whole.is_taken = tensor, True
    else:
        images = collate(tuple(entry(sample, 0) for sample in batch), collate_fn_map=collate_fn_map)
    # A tuple, as ``default_collate`` makes it: it hands back strings in the sequence they came in.
    return [images, collate(tuple(entry(sample, 1) for sample in batch), collate_fn_map=collate_fn_map)]


def _collate_targets(targets: list[Any] | npt.NDArray[np.int64], known: Any) -> Any:
    if isinstance(targets, np.ndarray):
        if known.get(int) is collate_int_fn:
            return torch.tensor(targets)
        targets = targets.tolist()
    return collate(tuple(targets), collate_fn_map=known)


_utils.collate.default_collate_fn_map[BatchSample] = _collate_samples
