"""Labels of a table: from what it says to what a batch has, in Keras's forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.errors import OptionError

__all__ = ["Labels", "formed", "labels_of"]


class Labels(NamedTuple):
    """Labels of samples.

    Attributes:
        values: int64 (N,): classes, or whole numbers as they were given.
        class_names: of the classes.
    """

    values: npt.NDArray[np.int64]
    class_names: list[str]


def labels_of(values: npt.NDArray[Any], class_names: Sequence[Any] | None) -> Labels:
    """Labels as a table has them: whole numbers are taken as they are, unless ``class_names`` has them,
    names become their places among the sorted names, or in ``class_names``.

    Args:
        values: (N,), strings or whole numbers.
        class_names: the classes, or None for those that occur.

    Raises:
        OptionError: a label is none of the classes, or no label at all.
    """
    given = values.tolist()
    for row, value in enumerate(given):
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            if isinstance(value, float) and value.is_integer():
                given[row] = int(value)
                continue
            raise OptionError(
                f"row {row} has the label {value!r}: labels are names or whole numbers; leave the row out, "
                "fill it in, or give labels=None"
            )
    names = sorted(set(given), key=lambda one: (isinstance(one, str), one))
    if class_names is None and all(isinstance(one, int) for one in names):
        return Labels(np.array(given, np.int64), [str(one) for one in names])
    places = {name: number for number, name in enumerate(names if class_names is None else class_names)}
    for row, value in enumerate(given):
        if value not in places:
            raise OptionError(
                f"row {row} has the label {value!r}, which is none of class_names="
                f"{list(class_names or ())!r}: add it there or leave the row out"
            )
    return Labels(np.array([places[value] for value in given], np.int64), [str(name) for name in places])


def formed(labels: npt.NDArray[np.int64], label_mode: str, count: int) -> npt.NDArray[Any]:
    """Labels as a batch has them.

    Args:
        labels: (N,).
        label_mode: ``"int"`` gives int32 (N,), ``"binary"`` float32 (N, 1), ``"categorical"`` float32
            (N, count), one of them 1.
        count: of the classes.

    >>> formed(np.array([1, 0]), "categorical", 2)
    array([[0., 1.],
           [1., 0.]], dtype=float32)
    """
    if label_mode == "binary":
        return labels.astype(np.float32)[:, None]
    if label_mode == "categorical":
        is_it: npt.NDArray[Any] = labels[:, None] == np.arange(count)
        return is_it.astype(np.float32)
    return labels.astype(np.int32)
