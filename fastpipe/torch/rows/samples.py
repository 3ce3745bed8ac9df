"""Samples that are rows of a batch's arrays: collated without a copy, and copied when they are looked at."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import _utils
from torch.utils.data._utils.collate import collate, collate_tensor_fn

from fastpipe.core.array_samples import Form

__all__ = [
    "DictSample", "LazySamples", "Part", "Row", "SampleRows", "TupleSample", "Value", "copied", "torch_dtype",
]  # fmt: skip


class Value(NamedTuple):
    """What one of a sample's values is.

    Attributes:
        dtype: of its elements.
        shape: of its array.
        nbytes: of that.
        torch_dtype: torch's for the same bytes; None where it has none.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int
    torch_dtype: torch.dtype | None

    @classmethod
    def of(cls, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Value:
        """The value of these elements, which are no arrays themselves, and this shape."""
        return cls(dtype, shape, dtype.itemsize * math.prod(shape), torch_dtype(dtype))


class Part(NamedTuple):
    """One dataset's rows of a batch.

    Attributes:
        array: (N, *sample_shape), of the dataset's dtype.
        tensor: over the same memory; None where torch has not that dtype.
    """

    array: npt.NDArray[Any]
    tensor: torch.Tensor | None


class TupleSample(tuple[Any, ...]):
    """A tuple that collates as one, without a copy where it can."""

    def __reduce__(self) -> tuple[object, ...]:
        return (tuple, (tuple(self),))


class DictSample(dict[Any, Any]):
    """A dict that collates as one, without a copy where it can."""

    def __reduce__(self) -> tuple[object, ...]:
        return (dict, (dict(self),))


class Row(np.ndarray[Any, Any]):
    """An array that collates as one, without a copy where it can."""

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else np.asarray(array)  # what is computed of it is an array

    def __reduce__(self) -> Any:
        return np.asarray(self).__reduce__()


_KINDS: dict[str, Callable[[Any], Any]] = {"tuple": TupleSample, "dict": DictSample}


class LazySamples(MutableSequence[Any]):
    """The samples of a batch, in the place of a list: each is made when it is asked for.

    One that the script asks for has memory of its own, so that whoever keeps it does not keep the batch.

    Args:
        views: the samples, as views of the batch.
    """

    def __init__(self, views: Sequence[Any]) -> None:
        self._views = views
        self._seen: dict[int, Any] = {}  # what user code was handed, by numbers
        self._changed: list[Any] | None = None  # what user code has made of it

    def __len__(self) -> int:
        return len(self._views) if self._changed is None else len(self._changed)

    @overload
    def __getitem__(self, number: int) -> Any: ...

    @overload
    def __getitem__(self, number: slice) -> list[Any]: ...

    def __getitem__(self, number: int | slice) -> Any:
        if self._changed is not None:
            return self._changed[number]
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        if sys._getframe(1).f_code is collate.__code__:  # which looks at the first for its type
            return self._views[number]
        number = range(len(self))[number]
        if number not in self._seen:
            self._seen[number] = copied(self._views[number])
        return self._seen[number]

    def __setitem__(self, number: Any, value: Any) -> None:
        self._list()[number] = value

    def __delitem__(self, number: Any) -> None:
        del self._list()[number]

    def insert(self, number: int, value: Any) -> None:
        """As a list's."""
        self._list().insert(number, value)

    def sort(self, *, key: Callable[[Any], Any] | None = None, reverse: bool = False) -> None:
        """As a list's, which collate functions like to use."""
        self._list().sort(key=key, reverse=reverse)

    def _list(self) -> list[Any]:
        if self._changed is None:
            self._changed = list(self)
        return self._changed

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"

    @property
    def is_whole(self) -> bool:
        """Whether the samples are still those that were read, in their order, and user code has seen none."""
        return self._changed is None and not self._seen

    def peek(self) -> Any:
        """The first sample, for a caller that does not keep it."""
        return self._views[0] if self.is_whole else self[0]

    def to_collate(self) -> list[Any]:
        """The samples, for a caller that does not keep them."""
        return list(self._views) if self.is_whole else self._list()


class _Views(Sequence[Any]):
    """The samples of a batch's arrays, as views of them."""

    def __init__(self, form: Form, parts: Sequence[Part]) -> None:
        self._form, self._parts = form, parts

    def __len__(self) -> int:
        return len(self._parts[0].array)

    def __getitem__(self, number: Any) -> Any:
        values = [part.array[number] for part in self._parts]
        if self._form.kind == "value":
            value = values[0]
            return value.view(Row) if isinstance(value, np.ndarray) and not value.dtype.hasobject else value
        return _KINDS[self._form.kind](self._form.sample(values))


class SampleRows(LazySamples):
    """Samples that are rows of a batch's arrays.

    Args:
        form: what a sample is made of.
        parts: the batch's arrays.
    """

    def __init__(self, form: Form, parts: Sequence[Part]) -> None:
        super().__init__(_Views(form, parts))
        self._form, self._parts = form, parts
        self._is_taken = False

    def collated(self, collate_fn_map: Mapping[Any, Any]) -> Any:
        """The batch as ``default_collate`` makes it; the first time without a copy."""
        is_first, self._is_taken = not self._is_taken, True
        values = []
        for part in self._parts:
            if part.tensor is not None:
                values.append(part.tensor if is_first else part.tensor.clone())
            elif torch_dtype(native := part.array.dtype.newbyteorder("=")) is not None:
                values.append(torch.from_numpy(part.array.astype(native)))
            else:
                # What torch has of tuples are tuples, which it returns as they are where they hold strings.
                column = tuple(part.array) if self._form.kind == "tuple" else list(part.array)
                values.append(_collated(column, collate_fn_map))
        # A list, as ``default_collate`` makes it of tuples.
        return values if self._form.kind == "tuple" else self._form.sample(values)


def copied(sample: Any) -> Any:
    """Return a sample, or a value of one, with memory of its own."""
    if isinstance(sample, TupleSample):
        return TupleSample(map(copied, sample))
    if isinstance(sample, DictSample):
        return DictSample({key: copied(value) for key, value in sample.items()})
    # A single element of a compound type is a view as well.
    return sample.copy() if isinstance(sample, (np.ndarray, np.void)) else sample


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """torch's type of the same bytes; None where it has none."""
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):
        return None


def _collate(batch: Any, *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None) -> Any:
    """What ``default_collate`` makes of rows."""
    functions = collate_fn_map or {}
    if isinstance(batch, SampleRows) and batch.is_whole and functions.get(torch.Tensor) is collate_tensor_fn:
        return batch.collated(functions)
    batch = batch.to_collate() if isinstance(batch, LazySamples) else batch
    first = batch[0]
    if isinstance(first, dict):
        return {key: _collated([sample[key] for sample in batch], functions) for key in first}
    if isinstance(first, tuple):
        return [_collated(values, functions) for values in zip(*batch, strict=True)]
    return _collated([np.asarray(row) for row in batch], functions)


def _collated(values: Sequence[Any], functions: Mapping[Any, Any]) -> Any:
    """As torch collates them, but for the order of bytes, of which torch knows the machine's only."""
    native = type(values)(  # type: ignore[call-arg]
        value.astype(value.dtype.newbyteorder("="))
        if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.isnative
        else value
        for value in values
    )
    return collate(native, collate_fn_map=dict(functions))


_utils.collate.default_collate_fn_map.update(dict.fromkeys((TupleSample, DictSample, Row), _collate))
