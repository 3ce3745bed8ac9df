"""Samples that refer to the batch in which they were made, so that collating these samples copies nothing.

If the script reads or keeps a sample, the sample gets its own memory.  The sample then does not keep the
memory of the whole batch in use.
"""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import _utils, default_collate
from torch.utils.data._utils.collate import collate, collate_int_fn, collate_tensor_fn

from fastpipe.core.array_samples import Form
from fastpipe.core.types import Key
from fastpipe.images.pixels import Conversion
from fastpipe.torch.transport import is_in_lane, stacked

# ---- images ------------------------------------------------------------------------------------------

_STACK = (collate_tensor_fn, stacked)  # functions that stack tensors as torch does


class BatchSample(tuple[Any, ...]):
    """The tuple ``(image, target)``, as ``ImageFolder`` returns it.

    The image is a row of the batch's tensor at first.  It gets its own memory when the script reads the
    sample, or keeps the sample after collating.
    """

    whole: BatchSamples | None = None  # the batch whose tensor contains the image as a row
    position = 0

    def alone(self) -> tuple[Any, ...]:
        """Return the sample as a plain tuple whose image has its own memory."""
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
    """Return an entry of a sample without copying it.  The caller must not keep the entry."""
    return tuple.__getitem__(sample, place) if type(sample) is BatchSample else sample[place]


class BatchSamples(Sequence[Any]):
    """The samples of a batch of images.  Each sample object is created when the sample is accessed.

    Attributes:
        tensor: the images, (N, C, H, W).  Each row becomes an image of the class ``kind``.  ``release`` sets
            ``tensor`` to None.
        end: the conversion of pixel values that must still be done, or None.
        key: the key for the random numbers of augmentations that must still be done, or None.
        is_taken: whether ``tensor`` was returned as a collated batch.  Collating again then makes a copy.
    """

    def __init__(
        self, tensor: torch.Tensor, kind: type, targets: list[Any] | npt.NDArray[np.int64],
        end: Conversion | None = None, key: Key | None = None,
    ) -> None:  # fmt: skip
        self.tensor: torch.Tensor | None = tensor
        self.targets, self.end, self.key = targets, end, key
        self.is_taken = False
        self._kind = kind
        self._rows: list[weakref.ref[torch.Tensor]] = []

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return list(self)[position]
        position = range(len(self))[position]
        assert self.tensor is not None
        return self._sample(position, self.tensor[position])

    def __iter__(self) -> Iterator[BatchSample]:
        assert self.tensor is not None
        return map(self._sample, itertools.count(), self.tensor.unbind(0))

    def _sample(self, position: int, row: torch.Tensor) -> BatchSample:
        targets = self.targets
        target = targets.item(position) if isinstance(targets, np.ndarray) else targets[position]
        # torch must not treat the image as a view, which would refer to the batch even with its own memory.
        image: torch.Tensor = torch.Tensor._make_subclass(self._kind, row)
        self._rows.append(weakref.ref(image))
        sample = BatchSample((image, target))
        sample.whole, sample.position = self, position
        return sample

    def cut_off(self, image: torch.Tensor) -> None:
        """Give a sample's image its own memory, except if it is the only image of a batch that is not
        collated."""
        tensor = self.tensor
        if tensor is None or (len(tensor) == 1 and not self.is_taken):
            return
        # If a worker sends an image of its lane (memory shared with the parent), the parent makes the copy.
        if not (type(image) is torch.Tensor and is_in_lane(tensor)):
            with torch.inference_mode(False):
                image.data = image.clone()

    def release(self) -> None:
        for row in self._rows:
            image = row()
            if image is not None and self.tensor is not None and _address(image) == _address(self.tensor):
                self.cut_off(image)
        self._rows, self.tensor, self.targets = [], None, []  # a kept sample refers to its own target


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Unfinished(NamedTuple):
    """A collated batch whose images still need some steps.  ``end`` is the conversion of pixel values that
    must still be done, and ``key`` the key for the augmentations.  Each is None if there is nothing to do."""

    batch: Any
    end: Conversion | None
    key: Key | None


def collate_unfinished(samples: Any) -> Unfinished:
    """Collate samples as ``default_collate`` does, and return the steps that their images still need."""
    end, key = None, None
    if type(samples) is BatchSamples:
        end, key = samples.end, samples.key
    elif type(samples) is list and type(next(iter(samples), None)) is BatchSample:
        whole = samples[0].whole
        end, key = (None, None) if whole is None else (whole.end, _key_of(samples))
    return Unfinished(collated(samples, default_collate), end, key)


def collated(samples: Any, collate_fn: Callable[[Any], Any]) -> Any:
    """Collate samples with ``collate_fn``.  The script's own function receives a list.  If this function
    keeps samples, these samples get their own memory."""
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
    """Return the common key (seed, epoch, positions) of ``samples``.  If bad samples were left out, the
    samples come from several batches."""
    first = samples[0].whole
    if first is None or first.key is None:
        return None
    keys = [(one.whole.key, one.position) for one in samples if one.whole is not None]
    draws = [key.draws[position] for key, position in keys if key is not None]
    return Key(first.key.seed, first.key.epoch, np.array(draws, np.int64))


def _collate_samples(
    batch: Sequence[Any], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None
) -> list[Any]:
    """Collate ``(image, target)`` tuples as ``default_collate`` does.  If the samples are a complete batch in
    its original order, do not copy the images."""
    stacks_as_usual = (collate_fn_map or {}).get(torch.Tensor) in _STACK
    if type(batch) is BatchSamples and stacks_as_usual and not batch.is_taken:
        batch.is_taken = True
        return [batch.tensor, _collate_targets(batch.targets, collate_fn_map)]
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
    # The targets are a tuple, as in ``default_collate``, which returns strings in the sequence it receives.
    return [images, collate(tuple(entry(sample, 1) for sample in batch), collate_fn_map=collate_fn_map)]


def _collate_targets(targets: list[Any] | npt.NDArray[np.int64], known: Any) -> Any:
    if isinstance(targets, np.ndarray):
        if known.get(int) is collate_int_fn:
            return torch.tensor(targets)
        targets = targets.tolist()
    return collate(tuple(targets), collate_fn_map=known)


_utils.collate.default_collate_fn_map[BatchSample] = _collate_samples


# ---- rows of arrays ----------------------------------------------------------------------------------


class Value(NamedTuple):
    """The type of one value of a sample; ``torch_dtype`` is None if torch does not support ``dtype``."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int
    torch_dtype: torch.dtype | None

    @classmethod
    def of(cls, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Value:
        return cls(dtype, shape, dtype.itemsize * math.prod(shape), torch_dtype(dtype))


class Part(NamedTuple):
    """What a batch contains from one HDF5 dataset or volume: ``array``, (N, …), and ``tensor``, which shares
    the array's memory.  ``tensor`` is None if torch does not support the dtype."""

    array: npt.NDArray[Any]
    tensor: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        if self.array.dtype != object:
            return self.array.nbytes
        return sum(one.nbytes for one in self.array.flat if isinstance(one, np.ndarray))

    def own(self, row: int) -> Any:
        """Return a row with its own memory."""
        # An array of objects has the values themselves, such as arrays of several shapes.
        is_own = self.array.dtype == object and self.array.ndim == 1
        return self.array[row] if is_own else copied(self.array[row])


class TupleSample(tuple[Any, ...]):
    """A tuple of values that is collated like a plain tuple, but without a copy if possible."""

    def __reduce__(self) -> tuple[object, ...]:
        return (tuple, (tuple(self),))


class DictSample(dict[Any, Any]):
    """A dict of values that is collated like a plain dict, but without a copy if possible."""

    def __reduce__(self) -> tuple[object, ...]:
        return (dict, (dict(self),))


class Row(np.ndarray[Any, Any]):
    """An array that is collated like a plain array, but without a copy if possible."""

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else np.asarray(array)  # results of computations are plain arrays

    def __reduce__(self) -> Any:
        return np.asarray(self).__reduce__()


_KINDS: dict[str, Callable[[Any], Any]] = {"tuple": TupleSample, "dict": DictSample}


class LazySamples(MutableSequence[Any]):
    """Replaces the list of a batch's samples, and creates each sample only when the sample is accessed.

    A sample that the script accesses gets its own memory.  A script that keeps the sample therefore does not
    keep the memory of the whole batch.  ``views`` contains the samples as views of the batch's memory.
    """

    def __init__(self, views: Sequence[Any] = ()) -> None:
        self._views = views
        self._seen: dict[int, Any] = {}  # samples returned to user code, by number
        self._changed: list[Any] | None = None  # the list as changed by user code

    def _view(self, number: int) -> Any:
        return self._views[number]

    def _own(self, number: int) -> Any:
        return copied(self._view(number))

    def _count(self) -> int:
        return len(self._views)

    def __len__(self) -> int:
        return self._count() if self._changed is None else len(self._changed)

    def __getitem__(self, number: Any) -> Any:
        if self._changed is not None:
            return self._changed[number]
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        if sys._getframe(1).f_code is collate.__code__:  # torch's collate reads only the sample's type
            return self._view(number)
        if number not in self._seen:
            self._seen[number] = self._own(number)
        return self._seen[number]

    def __setitem__(self, number: Any, value: Any) -> None:
        self._list()[number] = value

    def __delitem__(self, number: Any) -> None:
        del self._list()[number]

    def insert(self, number: int, value: Any) -> None:
        self._list().insert(number, value)

    def sort(self, *, key: Callable[[Any], Any] | None = None, reverse: bool = False) -> None:
        self._list().sort(key=key, reverse=reverse)

    def _list(self) -> list[Any]:
        if self._changed is None:
            self._changed = list(self)
        return self._changed

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"

    @property
    def is_whole(self) -> bool:
        """True if user code has neither changed nor accessed any of the samples."""
        return self._changed is None and not self._seen

    def peek(self) -> Any:
        """Return the first sample.  The caller must not keep it."""
        return self._view(0) if self.is_whole else self[0]

    def to_collate(self) -> list[Any]:
        """Return the samples as a list.  The caller must not keep them."""
        return list(map(self._view, range(self._count()))) if self.is_whole else self._list()


class SampleRows(LazySamples):
    def __init__(self, form: Form, parts: Sequence[Part]) -> None:
        super().__init__()
        self._form, self._parts = form, parts
        self._is_taken = False

    def _count(self) -> int:
        return len(self._parts[0].array)

    def _view(self, number: int) -> Any:
        return self._sample([part.array[number] for part in self._parts])

    def _own(self, number: int) -> Any:
        return self._sample([part.own(number) for part in self._parts])

    def _sample(self, values: Sequence[Any]) -> Any:
        if self._form.kind == "value":
            value = values[0]
            return value.view(Row) if isinstance(value, np.ndarray) and not value.dtype.hasobject else value
        return _KINDS[self._form.kind](self._form.sample(values))

    def collated(self, collate_fn_map: Mapping[Any, Any]) -> Any:
        """Return the batch as ``default_collate`` makes it.  Only the first call returns tensors without a
        copy."""
        is_first, self._is_taken = not self._is_taken, True
        values = []
        for part in self._parts:
            if part.tensor is not None:
                values.append(part.tensor if is_first else part.tensor.clone())
            elif torch_dtype(native := part.array.dtype.newbyteorder("=")) is not None:
                values.append(torch.from_numpy(part.array.astype(native)))
            else:
                # torch collates one column of tuples as a tuple, and returns a tuple of strings unchanged.
                column = tuple(part.array) if self._form.kind == "tuple" else list(part.array)
                values.append(_collated(column, collate_fn_map))
        # For tuples ``default_collate`` returns a list.
        return values if self._form.kind == "tuple" else self._form.sample(values)


def copied(sample: Any) -> Any:
    """Return a copy of a sample, or of one value of a sample, that has its own memory."""
    if isinstance(sample, TupleSample):
        return TupleSample(map(copied, sample))
    if isinstance(sample, DictSample):
        return DictSample({key: copied(value) for key, value in sample.items()})
    # A single element of a compound dtype (``np.void``) is also a view of the batch's memory.
    return sample.copy() if isinstance(sample, (np.ndarray, np.void)) else sample


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):
        return None


def _collate(batch: Any, *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None) -> Any:
    """Collate samples of arrays as ``default_collate`` does."""
    functions = collate_fn_map or {}
    if isinstance(batch, SampleRows) and batch.is_whole and functions.get(torch.Tensor) in _STACK:
        return batch.collated(functions)
    batch = batch.to_collate() if isinstance(batch, LazySamples) else batch
    first = batch[0]
    if isinstance(first, dict):
        return {key: _collated([sample[key] for sample in batch], functions) for key in first}
    if isinstance(first, tuple):
        return [_collated(values, functions) for values in zip(*batch, strict=True)]
    return _collated([np.asarray(row) for row in batch], functions)


def _collated(values: Sequence[Any], functions: Mapping[Any, Any]) -> Any:
    """Collate values as torch does.  Arrays that do not have the machine's byte order are converted first."""
    native = type(values)(  # type: ignore[call-arg]
        value.astype(value.dtype.newbyteorder("="))
        if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.isnative
        else value
        for value in values
    )
    return collate(native, collate_fn_map=dict(functions))


_utils.collate.default_collate_fn_map.update(dict.fromkeys((TupleSample, DictSample, Row), _collate))
