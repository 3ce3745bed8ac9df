"""What an element of a dataset of arrays looks like, and of which types its tensors are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from fastpipe.core.array_samples import Form
from fastpipe.errors import OptionError

__all__ = ["ArrayForm", "Value"]


class Value(NamedTuple):
    """One of a sample's values.

    Attributes:
        name: of it, for messages.
        dtype, shape: of its array.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class ArrayForm:
    """The form of elements.

    Args:
        form: of the inputs.
        values: of a sample; where there is one more than the form has, the last is the label.
        channels_of: of how many dimensions patches are, where what is in front of them becomes the last
            dimension; None to leave arrays as they are stored.

    Raises:
        OptionError: TensorFlow has no type for a value, or it has too many dimensions.
    """

    def __init__(self, form: Form, values: Sequence[Value], channels_of: int | None = None) -> None:
        self._form, self.values, self._channels_of = form, values, channels_of
        self._has_labels = len(values) > len(form.names)
        self.types = [_type_of(value) for value in values]
        for value in values if channels_of is not None else ():
            if len(value.shape) > (channels_of or 0) + 1:
                raise OptionError(
                    f"channels='last' takes one dimension in front of those of a patch; {value.name} has the "
                    f"sample shape {value.shape}: leave it out, and transpose in a map"
                )

    @property
    def is_pair(self) -> bool:
        """Whether an element is a pair of inputs and labels."""
        return self._has_labels or (self._form.kind == "tuple" and len(self.values) == 2)

    @property
    def is_tuple(self) -> bool:
        """Whether an element is a tuple."""
        return self._has_labels or self._form.kind == "tuple"

    def element(self, parts: Sequence[Any]) -> Any:
        """An element of these parts, one for each value."""
        if not self._has_labels:
            return self._form.sample(parts)
        return self._form.sample(parts[:-1]), parts[-1]

    def of(self, arrays: Sequence[npt.NDArray[Any]]) -> Any:
        """A batch of these arrays, (n, …), as TensorFlow takes it."""
        return self.element([self._native(array) for array in arrays])

    def signature(self, batch: int | None) -> Any:
        """The type of batches of so many samples; None for any number."""
        specs = [
            tf.TensorSpec((batch, *self._laid_out(value.shape)), kind)
            for value, kind in zip(self.values, self.types, strict=True)
        ]
        return self.element(specs)

    def _native(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if not array.dtype.isnative:  # TensorFlow knows the machine's order of bytes only
            array = array.astype(array.dtype.newbyteorder("="))
        if self._channels_of is None:
            return array
        if array.ndim == self._channels_of + 1:
            return array[..., None]
        return np.ascontiguousarray(np.moveaxis(array, 1, -1))

    def _laid_out(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self._channels_of is None:
            return shape
        return (*shape, 1) if len(shape) == self._channels_of else (*shape[1:], shape[0])


def _type_of(value: Value) -> Any:
    """TensorFlow's type of a value's elements."""
    dtype = value.dtype
    if dtype.kind == "S" or (dtype.kind == "O" and _is_text(dtype)):
        return tf.string
    try:
        if dtype.kind not in "OVUmM":
            return tf.as_dtype(dtype.newbyteorder("="))
    except TypeError:
        pass
    raise OptionError(
        f"{value.name} has elements of {dtype}, for which TensorFlow has no type: leave it out, or store "
        "numbers in its place"
    )


def _is_text(dtype: np.dtype[Any]) -> bool:
    """Whether objects are h5py's strings of any length, and not arrays of any length."""
    metadata: Mapping[str, Any] = dtype.metadata or {}
    return metadata.get("vlen") in (str, bytes)
