"""Rows of images: files, boxes, labels and further inputs, made from the arguments of ``image_dataset``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from fastpipe.core.types import Box, Size
from fastpipe.errors import OptionError
from fastpipe.tf.options import ImageSpec, Modality, check_choice, spec_of
from fastpipe.tf.tables import (
    Table,
    as_tensor_slices,
    classes_of,
    form_labels,
    labels_of,
    list_directory,
    values_of,
)  # fmt: skip

# ---- boxes ---------------------------------------------------------------------------------------


class BadBoxError(ValueError):
    """The error for a box that is not inside its image."""

    remedy = "Correct the box"  # in the message of the bad sample


@dataclass(frozen=True)
class Boxes:
    """The boxes (parts of images to use) of a column of images."""

    edges: npt.NDArray[np.float64]  # (N, 4): left, top, right, bottom
    is_relative: bool  # whether edges are fractions of the image instead of pixels

    @classmethod
    def of(cls, values: Any, box_format: str, name: str) -> Boxes:
        """Return a table's numbers, (N, 4), as boxes; ``name`` is the column's name, for error messages.

        >>> Boxes.of([[10, 20, 30, 40]], "xywh", "photo").edges
        array([[10., 20., 40., 60.]])
        """
        try:
            numbers = np.asarray(values, np.float64)
        except (TypeError, ValueError):
            raise OptionError(f"boxes of {name!r} must be four numbers for each row") from None
        if numbers.ndim != 2 or numbers.shape[1] != 4:
            raise OptionError(
                f"boxes of {name!r} must be four numbers for each row, got an array of shape {numbers.shape}"
            )
        is_relative = box_format.startswith("rel_")
        order = box_format.removeprefix("rel_")
        first, second = numbers[:, :2], numbers[:, 2:]
        if order == "yxyx":
            edges = numbers[:, [1, 0, 3, 2]]
        elif order == "xywh":
            edges = np.hstack([first, first + second])
        elif order == "center_xywh":
            edges = np.hstack([first - second / 2, first + second / 2])
        else:
            edges = numbers
        # TensorFlow operations count pixels in int32.
        is_bad = ~(np.abs(edges) < 2**31).all(axis=1) | (edges[:, 2:] <= edges[:, :2]).any(axis=1)
        if is_bad.any():
            row = int(np.flatnonzero(is_bad)[0])
            raise OptionError(
                f"row {row}: the box {numbers[row].tolist()} of {name!r} is empty, endless or no numbers, as "
                f"box_format={box_format!r} reads it: correct it, leave the row out, or name another "
                "box_format"
            )
        if is_relative and edges.size and np.abs(edges).max() > 2:
            row = int(np.flatnonzero((np.abs(edges) > 2).any(axis=1))[0])
            raise OptionError(
                f"row {row}: the box {numbers[row].tolist()} of {name!r} is in pixels, but box_format="
                f"{box_format!r} means parts of the image, from 0 to 1"
            )
        return cls(np.ascontiguousarray(edges), is_relative)

    def box(self, row: int, image: Size, outside: Literal["error", "clip", "pad"]) -> Box:
        """Return the box of a row in its image, in whole pixels, rounded as ``PIL.Image.crop`` rounds."""
        left, top, right, bottom = self.edges[row].tolist()
        if self.is_relative:
            left, right = left * image.width, right * image.width
            top, bottom = top * image.height, bottom * image.height
        left, top, right, bottom = round(left), round(top), round(right), round(bottom)
        if outside == "clip":
            left, top = max(left, 0), max(top, 0)
            right, bottom = min(right, image.width), min(bottom, image.height)
        is_inside = left >= 0 and top >= 0 and right <= image.width and bottom <= image.height
        if outside == "error" and not is_inside:
            raise BadBoxError(
                f"the box from ({left}, {top}) to ({right}, {bottom}), x before y, reaches outside the image "
                f"of {image.width} × {image.height} pixels: correct it, or say outside='clip' or, for black "
                "there, outside='pad'"
            )
        if right <= left or bottom <= top:
            raise BadBoxError(
                f"the box from ({left}, {top}) to ({right}, {bottom}), x before y, has no pixels: correct it "
                "or leave the row out"
            )
        return Box(top, left, bottom - top, right - left)


# ---- rows ----------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of images, with one image per row."""

    name: str  # the name of the modality; empty if there is only one image
    paths: Sequence[str]
    boxes: Boxes | None  # the parts to use; None for whole images
    spec: ImageSpec
    rescale: tuple[float, float] | None  # factor and offset
    preprocess: Callable[..., Any] | None
    thread_safe: bool


@dataclass(frozen=True)
class Rows:
    """All samples: their images, labels and further inputs."""

    columns: Sequence[Column]
    labels: npt.NDArray[Any] | None  # (N, …), in the form of a batch
    classes: npt.NDArray[np.int64] | None  # (N,): the class of each sample
    tabular: dict[str, npt.NDArray[np.float32]]  # further inputs by name, (N,) or (N, K)
    class_names: list[str] | None
    numbers: npt.NDArray[np.int64]  # (N,), row numbers in the script's table, for messages

    def __len__(self) -> int:
        return len(self.numbers)

    def select(self, rows: npt.NDArray[np.int64]) -> Rows:
        """Return some of the rows, in the order of ``rows``."""
        columns = [
            column._replace(
                paths=[column.paths[row] for row in rows.tolist()],
                boxes=None if column.boxes is None else replace(column.boxes, edges=column.boxes.edges[rows]),
            )
            for column in self.columns
        ]
        return replace(
            self,
            columns=columns,
            labels=None if self.labels is None else self.labels[rows],
            classes=None if self.classes is None else self.classes[rows],
            tabular={name: values[rows] for name, values in self.tabular.items()},
            numbers=self.numbers[rows],
        )

    def with_labels(self, labels: npt.NDArray[Any], label_mode: str) -> Rows:
        """Return the rows with these labels, in Keras's form."""
        names = self.class_names or []
        if label_mode == "binary" and len(names) != 2:
            raise OptionError(f"label_mode='binary' is for two classes, but there are {names}")
        return replace(self, labels=form_labels(labels, label_mode, len(names)), classes=classes_of(labels))


class Form(NamedTuple):
    """The structure of a dataset's elements."""

    names: Sequence[str]  # names of the images; empty if the input is the image itself
    tabular: Sequence[str]  # names of the other inputs
    has_labels: bool
    is_planar: bool  # whether images are (C, H, W)
    output: str  # NumPy's name of the images' dtype

    @classmethod
    def of(cls, rows: Rows, data_format: str, output: str) -> Form:
        """Return the structure of a dataset of these rows."""
        names = [column.name or "image" for column in rows.columns]
        if len(names) == 1 and not rows.columns[0].name and not rows.tabular:
            names = []
        return cls(
            names, list(rows.tabular), rows.labels is not None, data_format == "channels_first", output
        )

    def element(self, images: Sequence[Any], tabular: Mapping[str, Any], labels: Any) -> Any:
        """Return the element that has these images, further inputs and labels."""
        inputs: Any = images[0]
        if self.names:
            inputs = {**dict(zip(self.names, images, strict=True)), **tabular}
        return (inputs, labels) if self.has_labels else inputs

    def signature(self, rows: Rows, batch_size: int | None) -> Any:
        """Return the type of batches with this number of rows; None means any number."""

        def spec(shape: tuple[int, ...], dtype: Any) -> Any:
            return tf.TensorSpec((batch_size, *shape), dtype)

        images = []
        for column in rows.columns:
            (height, width), channels = column.spec.size, column.spec.channels
            shape = (channels, height, width) if self.is_planar else (height, width, channels)
            images.append(spec(shape, self.output))
        tabular = {name: spec(values.shape[1:], values.dtype) for name, values in rows.tabular.items()}
        labels = rows.labels
        return self.element(images, tabular, None if labels is None else spec(labels.shape[1:], labels.dtype))

    def arrange(self, image: Any) -> Any:
        """Return an image or a batch, (…, H, W, C), array or tensor, in the elements' memory order."""
        if not self.is_planar:
            return image
        if isinstance(image, np.ndarray):
            return np.ascontiguousarray(np.moveaxis(image, -1, -3))
        rank = len(image.shape)
        return tf.transpose(image, [*range(rank - 3), rank - 1, rank - 3, rank - 2])


# ---- rows from the arguments of image_dataset ----------------------------------------------------


class RowOptions(NamedTuple):
    """The arguments of ``image_dataset`` that define the rows."""

    labels: Any
    label_mode: str | None
    class_names: Sequence[Any] | None
    shuffle: bool
    seed: int
    validation_split: float | None
    subset: str | None
    aspect: Literal["crop", "pad"] | None
    parity: Literal["pil", "tf"]
    modality: Modality
    modalities: Mapping[str, Any] | None
    tabular: Mapping[str, Any] | None


def rows_of_directory(directory: Any, options: RowOptions, more: Mapping[str, Any]) -> list[Rows]:
    """Return the rows of a folder, or of each subset. ``more`` are further arguments of Keras's loader."""
    modality = options.modality
    if os.path.isfile(directory):
        raise OptionError(
            f"{directory!r} is a file, and no folder of images: pass a table as pandas reads it, such as "
            f"pandas.read_csv({directory!r})"
        )
    if options.modalities is not None or options.tabular is not None:
        raise OptionError("modalities= and tabular= are for tables; a folder has one image in each sample")
    for name in ("files", "folder", "boxes"):
        if getattr(modality, name) is not None:
            raise OptionError(f"{name}= is for a list of files or a table; the source is a folder")
    spec = spec_of(modality, options.parity, options.aspect)
    listings = list_directory(directory, {
        **more, "labels": options.labels, "label_mode": options.label_mode,
        "class_names": None if options.class_names is None else list(options.class_names),
        "shuffle": options.shuffle, "seed": options.seed, "subset": options.subset,
        "validation_split": options.validation_split, "image_size": tuple(spec.size),
    })  # fmt: skip
    subsets = []
    for paths, labels, class_names in listings:
        column = Column(
            "", paths, None, spec, modality.scaling, modality.preprocess, bool(modality.thread_safe)
        )
        rows = Rows([column], None, None, {}, class_names, np.arange(len(paths)))
        if labels is not None:
            rows = rows.with_labels(as_tensor_slices(labels), str(options.label_mode))
        subsets.append(rows)
    return subsets


def rows_of_table(source: Any, options: RowOptions) -> list[Rows]:
    """Return the rows of a table or a list of files, or of each subset for training and validation."""
    check_choice("label_mode", options.label_mode, ("int", "categorical", "binary", None))
    table = Table(source)
    columns = [_column(table, name, modality, options) for name, modality in _modalities(options).items()]
    tabular = {
        name: table.numbers(what, np.float32, f"tabular={{{name!r}: …}}")
        for name, what in (options.tabular or {}).items()
    }
    both = set(tabular) & {column.name for column in columns}
    if both:
        raise OptionError(f"the name {both.pop()!r} is both of a modality and in tabular=")
    rows = Rows(columns, None, None, tabular, None, np.arange(len(table)))
    given = _given_labels(table, options)
    if given is not None:
        label_mode = str(options.label_mode)
        labels, class_names = labels_of(given, options.class_names, label_mode)
        rows = replace(rows, class_names=class_names).with_labels(labels, label_mode)
    order = np.arange(len(rows))
    if options.shuffle and options.validation_split:
        np.random.RandomState(options.seed).shuffle(order)  # Keras also shuffles before it splits
    return [rows.select(part) for part in _subsets(order, options)]


def _modalities(options: RowOptions) -> dict[str, Modality]:
    if options.modalities is None:
        return {"": options.modality}
    if not options.modalities:
        raise OptionError("modalities={} has none: name at least one image, or leave the argument out")
    if options.modality.boxes is not None:
        raise OptionError("with modalities=, pass boxes for each of them: {'name': {'boxes': …}}")
    return {
        str(name): Modality.of(str(name), value).over(options.modality)
        for name, value in options.modalities.items()
    }


def _column(table: Table, name: str, modality: Modality, options: RowOptions) -> Column:
    files = modality.files or (name if name in table else None)
    if files is None:
        files = next((one for one in ("files", "file", "filename", "path") if one in table), None)
    if files is None:
        which = f"modalities={{{name!r}: {{'files': …}}}}" if name else "files="
        raise OptionError(
            f"{which} must name the column of the file names; there are {table.names}. Without it, a column "
            "'files', 'file', 'filename' or 'path' is taken"
        )
    boxes = modality.boxes
    if boxes is not None:
        numbers = table.numbers(boxes, np.float64, f"boxes of {name!r}" if name else "boxes=")
        boxes = Boxes.of(numbers, modality.box_format or "xyxy", name or "boxes")
    try:
        spec = spec_of(modality, options.parity, options.aspect)
    except OptionError as error:
        raise OptionError(f"modality {name!r}: {error}" if name else str(error)) from None
    paths = table.paths(files, modality.folder, f"files of {name!r}" if name else "files=")
    return Column(name, paths, boxes, spec, modality.scaling, modality.preprocess, bool(modality.thread_safe))


def _given_labels(table: Table, options: RowOptions) -> npt.NDArray[Any] | list[Any] | None:
    labels = options.labels
    if labels is None or options.label_mode is None:
        return None
    if isinstance(labels, str):
        if labels == "inferred":
            labels = next((name for name in ("label", "labels") if name in table), None)
            if labels is None:
                raise OptionError(
                    f"labels= must name a column, be a list of labels, or None; there are {table.names}"
                )
        return table.column(labels, "labels=")
    are_names = isinstance(labels, (list, tuple)) and all(isinstance(one, str) for one in labels)
    if are_names and len(labels) and all(one in table for one in labels):
        if len(labels) == len(table):
            raise OptionError(
                f"labels={labels!r} are column names, but as many as there are rows: give an array "
                "of labels, or table[names] for columns"
            )
        return table.stack(labels, "labels=")
    values = values_of(labels)
    if len(values) != len(table):
        shape = getattr(values, "shape", (len(values),))
        raise OptionError(f"labels has shape {shape}, the source has {len(table)} rows")
    return values


def _subsets(order: npt.NDArray[np.int64], options: RowOptions) -> list[npt.NDArray[np.int64]]:
    """Return the rows of each requested subset, split as Keras does."""
    split, subset = options.validation_split, options.subset
    if not split:
        if subset is not None:
            raise OptionError(f"subset={subset!r} needs validation_split=")
        return [order]
    check_choice("subset", subset, ("training", "validation", "both"))
    if not 0 < split < 1:
        raise OptionError(f"validation_split must be between 0 and 1, got {split}")
    count = int(split * len(order))
    if not count:
        raise OptionError(f"validation_split={split} of {len(order)} rows leaves none for validation")
    parts = {"training": [order[:-count]], "validation": [order[-count:]]}
    return parts.get(str(subset), [order[:-count], order[-count:]])
