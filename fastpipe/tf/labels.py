"""Labels: from what a script says to what a batch has, in Keras's forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from fastpipe.errors import OptionError
from fastpipe.tf.table import held

__all__ = ["Labels", "as_tensor_slices", "classes_of", "formed", "labels_of"]

_REMEDY = "leave the row out, fill it in, or give labels=None"


class Labels(NamedTuple):
    """Labels of samples.

    Attributes:
        values: (N,) or (N, …), in the type that ``tf.data.Dataset.from_tensor_slices`` gives them; int32
            where names became their places among the classes.
        class_names: of the classes; None where labels are numbers that name no class.
    """

    values: npt.NDArray[Any]
    class_names: list[str] | None


def as_tensor_slices(values: Any) -> npt.NDArray[Any]:
    """Return what ``tf.data.Dataset.from_tensor_slices`` makes of a list or an array: Python's integers
    become int32, or int64 where one needs it, its floats float32; arrays keep their types; texts are bytes.

    Raises:
        TypeError, ValueError: TensorFlow has no type for them.

    >>> as_tensor_slices([1, 2**40]).dtype, as_tensor_slices([0.5]).dtype
    (dtype('int64'), dtype('float32'))
    """
    with tf.device("CPU:0"):
        made: npt.NDArray[Any] = tf.convert_to_tensor(values).numpy()
    return made


def labels_of(values: Any, class_names: Sequence[Any] | None, label_mode: str) -> Labels:
    """Return labels as a table has them: names become their places among the sorted names, or in
    ``class_names``; numbers, one or several of each row, are taken as they are.

    Args:
        values: (N, …), a list or an array.
        class_names: the classes, or None for those that occur.
        label_mode: Keras's word for what a batch has.

    Raises:
        OptionError: a label is none of the classes, no label at all, or one that ``label_mode`` cannot form.
    """
    # Arrays of objects, such as pandas and Polars make of a column of lists, have no type of their own.
    if isinstance(values, np.ndarray) and values.dtype == object:
        values = values.tolist()
    given = values.tolist() if isinstance(values, np.ndarray) else [_plain(value) for value in values]
    if class_names is not None or any(isinstance(value, str) for value in given):
        return _classes(given, class_names)
    for row, value in enumerate(given):
        if not isinstance(value, (bool, int, float, complex, list, tuple)) or value != value:
            raise OptionError(f"row {row} has the label {value!r}: labels are names or numbers; {_REMEDY}")
    try:
        made = as_tensor_slices(values)
    except (TypeError, ValueError) as error:
        raise OptionError(f"labels: {_refused(given)}: {error}") from None
    if label_mode == "int":
        is_class = made.ndim == 1 and made.dtype.kind in "biu"
        return Labels(made, [str(one) for one in np.unique(made).tolist()] if is_class else None)
    if made.ndim > 1 or made.dtype.kind == "c":
        raise OptionError(
            f"row 0 has the label {given[0]!r}: label_mode={label_mode!r} is for one real number in each "
            "row; label_mode='int' gives labels as they are, as in Keras"
        )
    names = np.unique(made).tolist()
    if label_mode == "categorical":
        made = _indices(made, len(names))
    else:
        held(made, np.float32, "labels=")
    return Labels(made, [f"{one:g}" if isinstance(one, float) else str(one) for one in names])


def _indices(labels: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Labels that are to be places among so many classes."""
    is_bad = (labels != np.floor(labels)) | (labels < 0) | (labels >= count)
    if is_bad.any():
        row = int(np.flatnonzero(is_bad)[0])
        raise OptionError(
            f"row {row} has the label {labels[row].item()!r}, which is no place among {count} classes, "
            "counted from 0, as label_mode='categorical' needs: name the classes in class_names=, or use "
            "label_mode='int'"
        )
    return labels.astype(np.int64)


def _classes(given: list[Any], class_names: Sequence[Any] | None) -> Labels:
    """Labels that are names, or named in ``class_names``: int32 places among these."""
    for row, value in enumerate(given):
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            if isinstance(value, float) and value.is_integer():
                given[row] = int(value)
                continue
            raise OptionError(
                f"row {row} has the label {value!r}: labels of classes are names or whole numbers; {_REMEDY}"
            )
    names = sorted(set(given), key=lambda one: (isinstance(one, str), one))
    places = {name: number for number, name in enumerate(names if class_names is None else class_names)}
    for row, value in enumerate(given):
        if value not in places:
            raise OptionError(
                f"row {row} has the label {value!r}, which is none of class_names="
                f"{list(class_names or ())!r}: add it there or leave the row out"
            )
    return Labels(np.array([places[value] for value in given], np.int32), [str(name) for name in places])


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _refused(given: list[Any]) -> str:
    """The first row that TensorFlow has no type for by itself, or all of them together."""
    for row, value in enumerate(given):
        try:
            as_tensor_slices([value])
        except (TypeError, ValueError):
            return f"row {row} has {value!r}, for which TensorFlow has no type"
    return "rows differ in shape or type, make them alike"


def formed(labels: npt.NDArray[Any], label_mode: str, count: int) -> npt.NDArray[Any]:
    """Labels as a batch has them.

    Args:
        labels: (N, …).
        label_mode: ``"int"`` gives them as they are, ``"binary"`` float32 (N, …, 1), ``"categorical"``
            float32 (N, …, count), one of them 1.
        count: of the classes.

    Raises:
        OptionError: they are texts, and no numbers.

    >>> formed(np.array([1, 0]), "categorical", 2)
    array([[0., 1.],
           [1., 0.]], dtype=float32)
    """
    if label_mode == "int":
        return labels
    if labels.dtype.kind == "O":
        raise OptionError(
            f"label_mode={label_mode!r} is for numbers, but row 0 has the label {labels.flat[0]!r}: number "
            "the classes, or use label_mode='int', which gives texts"
        )
    if label_mode == "binary":
        return labels.astype(np.float32)[..., None]
    is_it: npt.NDArray[Any] = labels[..., None] == np.arange(count)
    return is_it.astype(np.float32)


def classes_of(labels: npt.NDArray[Any]) -> npt.NDArray[np.int64] | None:
    """Return which samples are alike, int64 (N,), for labels (N, …); None where they are measurements, of
    which no two need be the same."""
    if labels.ndim != 1 or labels.dtype.kind not in "biuO":
        return None
    if labels.dtype.kind != "O" and np.can_cast(labels.dtype, np.int64):
        return labels.astype(np.int64)
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)
