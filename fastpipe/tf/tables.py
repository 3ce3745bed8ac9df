"""Tables and folders of samples, and the labels of samples."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from fastpipe.core.casting import unheld
from fastpipe.errors import OptionError

_REMEDY = "leave the row out, fill it in, or give labels=None"


# ---- tables --------------------------------------------------------------------------------------


class Table:
    """A table of columns of the same length: a pandas or Polars data frame, a dict, or a list of file names.

    The argument ``what`` of the methods is the name of the user's argument, for error messages.
    """

    def __init__(self, source: Any) -> None:
        self._columns: dict[str, Any] = {}
        if isinstance(source, Mapping) or hasattr(source, "columns"):
            names = list(source.keys() if isinstance(source, Mapping) else source.columns)
            self._columns = {str(name): values_of(source[name]) for name in names}
        elif isinstance(source, (Sequence, np.ndarray)) and not isinstance(source, (str, bytes)):
            self._columns = {"files": values_of(source)}
        else:
            raise OptionError(
                "the source must be a folder, a list of files, a data frame or a dict of columns, got "
                f"{type(source).__name__}"
            )
        lengths = {name: len(column) for name, column in self._columns.items()}
        if len(set(lengths.values())) > 1:
            raise OptionError(f"the columns differ in length: {lengths}")
        self._length = next(iter(lengths.values()), 0)
        if not self._length:
            raise OptionError("there are no rows: a dataset needs at least one")

    def __len__(self) -> int:
        return self._length

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def column(self, name: str, what: str) -> npt.NDArray[Any] | list[Any]:
        """Return a column in the source's own form."""
        if name not in self._columns:
            raise OptionError(f"{what} names the column {name!r}, but there are only {self.names}")
        column: npt.NDArray[Any] | list[Any] = self._columns[name]
        return column

    def stack(self, names: Sequence[str], what: str) -> npt.NDArray[Any] | list[Any]:
        """Return several columns as one column with several values in each row."""
        columns = [self.column(name, what) for name in names]
        if all(isinstance(column, list) for column in columns):
            return [list(row) for row in zip(*columns, strict=True)]
        arrays = [np.asarray(column) for column in columns]
        kinds = {array.dtype.kind for array in arrays}
        if "U" in kinds and len(kinds) > 1:
            raise OptionError(f"{what}{list(names)!r} are texts and numbers: give columns of one kind")
        dtype = np.result_type(*arrays)
        if dtype.kind == "f":
            both = zip(arrays, names, strict=True)
            arrays = [_as_floats(array, dtype, f"{what}{name!r}") for array, name in both]
        return np.stack(arrays, axis=1)

    def paths(self, name: str, folder: str | os.PathLike[str] | None, what: str) -> list[str]:
        """Return the paths of a column of file names."""
        folder = "" if folder is None else os.fspath(folder)
        paths = []
        column = self.column(name, what)
        for row, value in enumerate(column.tolist() if isinstance(column, np.ndarray) else column):
            if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
                raise OptionError(
                    f"row {row} has no file name in column {name!r}, but {value!r}: leave the row out or "
                    "fill it in"
                )
            paths.append(os.path.join(folder, os.fspath(value)))
        return paths

    def numbers(self, name: Any, dtype: npt.DTypeLike, what: str) -> npt.NDArray[Any]:
        """Return the numbers of one column, (N,) or (N, K), or of several columns, (N, K), as floats of
        ``dtype``.

        ``name`` is the name of one column, the names of several columns, or the numbers themselves.
        """
        if isinstance(name, str):
            values = [self.column(name, what)]
        elif isinstance(name, (list, tuple)) and name and all(isinstance(one, str) for one in name):
            values = [self.column(one, what) for one in name]
        else:
            values = [values_of(name)]
        parts = [_real(value, dtype, what) for value in values]
        if len(parts) > 1:
            made = np.stack(parts, axis=1)
        else:
            made = parts[0].reshape(len(parts[0]), -1) if isinstance(name, (list, tuple)) else parts[0]
        if len(made) != len(self):
            raise OptionError(f"{what} has {len(made)} rows, the source has {len(self)}")
        return made


def values_of(column: Any) -> npt.NDArray[Any] | list[Any]:
    """Return a column as an array if the column has a dtype, otherwise as a list."""
    if hasattr(column, "to_numpy"):
        column = column.to_numpy()
    if isinstance(column, np.ndarray) and column.ndim:
        return column
    if isinstance(column, (str, bytes, np.ndarray)) or not isinstance(column, Iterable):
        raise OptionError(f"a column must have a value for each row, got {column!r}")
    return list(column)


def _real(values: npt.NDArray[Any] | list[Any], dtype: npt.DTypeLike, what: str) -> npt.NDArray[Any]:
    """Return a column as real numbers, (N,), or (N, K) if the column's elements are sequences."""
    plain = values.tolist() if isinstance(values, np.ndarray) and values.dtype == object else values
    try:
        array = np.asarray(plain)
    except ValueError as error:
        raise OptionError(f"{what} must be numbers, as many in each row: {error}") from None
    if array.dtype.kind not in "biuf":
        other = next((one for one in plain if not isinstance(one, (int, float))), plain[0])
        raise OptionError(f"{what} must be numbers, as many in each row, got {other!r}")
    return _as_floats(array, dtype, what)


def _as_floats(values: npt.NDArray[Any], dtype: npt.DTypeLike, what: str) -> npt.NDArray[Any]:
    """Return real numbers as floats of ``dtype``. Whole numbers must be exact; other numbers are rounded."""
    lost = np.argwhere(unheld(values, np.dtype(dtype)))
    if len(lost):
        value = values[tuple(lost[0])].item()
        raise OptionError(
            f"row {lost[0][0]} of {what} has {value!r}, which {np.dtype(dtype)} cannot hold: make it "
            "smaller, or, where it is an identifier, number the rows"
        )
    return values.astype(dtype)


# ---- labels --------------------------------------------------------------------------------------


def as_tensor_slices(values: Any) -> npt.NDArray[Any]:
    """Convert a list or an array as ``tf.data.Dataset.from_tensor_slices`` does.

    >>> as_tensor_slices([1, 2**40]).dtype, as_tensor_slices([0.5]).dtype
    (dtype('int64'), dtype('float32'))
    """
    with tf.device("CPU:0"):
        made: npt.NDArray[Any] = tf.convert_to_tensor(values).numpy()
    return made


def labels_of(
    values: Any, class_names: Sequence[Any] | None, label_mode: str
) -> tuple[npt.NDArray[Any], list[str] | None]:
    """Return a table's labels and the names of their classes (None if the labels are plain numbers).

    Names become int32 indices into the sorted names, or into ``class_names``.  Numbers, one or several per
    row, get the dtypes that ``as_tensor_slices`` gives.
    """
    # pandas and Polars make object arrays of columns of lists. Object arrays have no dtype for their
    # elements.
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
        return made, [str(one) for one in np.unique(made).tolist()] if is_class else None
    if made.ndim > 1 or made.dtype.kind == "c":
        raise OptionError(
            f"row 0 has the label {given[0]!r}: label_mode={label_mode!r} is for one real number in each "
            "row; label_mode='int' gives labels as they are, as in Keras"
        )
    names = np.unique(made).tolist()
    if label_mode == "categorical":
        made = _indices(made, len(names))
    else:
        _as_floats(made, np.float32, "labels=")
    return made, [f"{one:g}" if isinstance(one, float) else str(one) for one in names]


def _indices(labels: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Check labels that must be indices of ``count`` classes, and return them as int64."""
    is_bad = (labels != np.floor(labels)) | (labels < 0) | (labels >= count)
    if is_bad.any():
        row = int(np.flatnonzero(is_bad)[0])
        raise OptionError(
            f"row {row} has the label {labels[row].item()!r}, which is not an index of the {count} "
            "classes, as label_mode='categorical' needs: name the classes in class_names=, or use "
            "label_mode='int'"
        )
    return labels.astype(np.int64)


def _classes(given: list[Any], class_names: Sequence[Any] | None) -> tuple[npt.NDArray[Any], list[str]]:
    """Return labels as indices into names, and these names: the sorted labels, or ``class_names``."""
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
    return np.array([places[value] for value in given], np.int32), [str(name) for name in places]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _refused(given: list[Any]) -> str:
    """Return why TensorFlow cannot convert the labels: a row has no TensorFlow dtype, or rows differ."""
    for row, value in enumerate(given):
        try:
            as_tensor_slices([value])
        except (TypeError, ValueError):
            return f"row {row} has {value!r}, for which TensorFlow has no type"
    return "rows differ in shape or type, make them alike"


def form_labels(labels: npt.NDArray[Any], label_mode: str, count: int) -> npt.NDArray[Any]:
    """Return labels, (N, …), in the form of ``label_mode``: (N, …) for ``"int"``, (N, …, 1) for ``"binary"``,
    and (N, …, count) for ``"categorical"``.

    >>> form_labels(np.array([1, 0]), "categorical", 2)
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
    """Return the class of each sample, int64 (N,), from labels (N, …); None if labels are no classes."""
    if labels.ndim != 1 or labels.dtype.kind not in "biuO":
        return None
    if labels.dtype.kind != "O" and np.can_cast(labels.dtype, np.int64):
        return labels.astype(np.int64)
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


# ---- folders that contain a folder for each class ------------------------------------------------


def list_directory(
    directory: str | os.PathLike[str], arguments: dict[str, Any]
) -> list[tuple[list[str], list[int] | None, list[str] | None]]:
    """List a folder with ``keras.utils.image_dataset_from_directory``.

    Keras also checks the arguments, prints its usual output and chooses a subset.  Return the paths, the
    labels and the class names of each subset, in Keras's order. The labels and the class names may be None.
    """
    directory = os.fspath(directory)
    if not os.path.isdir(directory):
        raise OptionError(
            f"there is no folder {directory!r}: give a folder of images, a list of files, or a table"
        )
    given = arguments["labels"]
    if isinstance(given, (list, tuple)):  # because Keras shuffles the given list in place
        arguments = {**arguments, "labels": list(given)}
    made = keras.utils.image_dataset_from_directory(directory, **arguments)
    subsets = made if isinstance(made, (list, tuple)) else [made]
    labels: list[Any] = [None] * len(subsets)
    if given is not None and arguments["label_mode"] is not None:
        if isinstance(given, str):
            labels = [_labels_in(directory, one) for one in subsets]
        else:
            labels = _split_labels(list(given), [len(one.file_paths) for one in subsets], arguments)
    return [(one.file_paths, own, one.class_names) for one, own in zip(subsets, labels, strict=True)]


def _labels_in(directory: str, stock: Any) -> list[int]:
    """Return the class of each file: the first folder below the directory."""
    number = {name: n for n, name in enumerate(stock.class_names)}
    start = len(os.path.join(directory, ""))

    def class_of(path: str) -> int:
        first = path.split(os.sep, 1)[0]
        if first in number:
            return number[first]
        # A class may also be named by a path, such as "train/cats".
        return number[max((name for name in number if path.startswith(name + os.sep)), key=len)]

    return [class_of(path[start:]) for path in stock.file_paths]


def _split_labels(labels: list[int], counts: list[int], arguments: dict[str, Any]) -> list[list[int]]:
    """Shuffle and split the user's labels, as Keras does."""
    if arguments["shuffle"]:
        np.random.RandomState(arguments["seed"]).shuffle(labels)
    if arguments["subset"] == "both":
        return [labels[: counts[0]], labels[-counts[1] :]]
    if arguments["subset"] == "training":
        return [labels[: counts[0]]]
    return [labels[len(labels) - counts[0] :]]
