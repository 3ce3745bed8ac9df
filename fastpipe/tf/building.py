"""From the arguments of ``image_dataset`` to rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import numpy.typing as npt

from fastpipe.errors import OptionError
from fastpipe.tf.boxes import boxes_of
from fastpipe.tf.directory import list_directory
from fastpipe.tf.labels import as_tensor_slices, classes_of, formed, labels_of
from fastpipe.tf.options import Modality, check_choice, spec_of
from fastpipe.tf.rows import Column, Rows
from fastpipe.tf.table import Table, values_of

__all__ = ["Arguments", "data_format_of", "rows_of_directory", "rows_of_table"]

_LABEL_MODES = ("int", "categorical", "binary", None)


class Arguments(NamedTuple):
    """What both kinds of source are told; see ``image_dataset``."""

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


def rows_of_directory(directory: Any, arguments: Arguments, more: Mapping[str, Any]) -> list[Rows]:
    """The rows of a folder, or of its subsets for training and validation.

    Args:
        directory: the folder.
        arguments: of the call.
        more: further arguments of Keras's loader.
    """
    modality = arguments.modality
    if arguments.modalities is not None or arguments.tabular is not None:
        raise OptionError("modalities= and tabular= are for tables; a folder has one image in each sample")
    for name in ("files", "folder", "boxes"):
        if getattr(modality, name) is not None:
            raise OptionError(f"{name}= is for a list of files or a table; the source is a folder")
    spec = spec_of(modality, arguments.parity, arguments.aspect)
    listings = list_directory(directory, {
        **more, "labels": arguments.labels, "label_mode": arguments.label_mode,
        "class_names": None if arguments.class_names is None else list(arguments.class_names),
        "shuffle": arguments.shuffle, "seed": arguments.seed, "subset": arguments.subset,
        "validation_split": arguments.validation_split, "image_size": tuple(spec.size),
    })  # fmt: skip
    subsets = []
    for listing in listings:
        column = Column(
            "", listing.paths, None, spec, modality.scaling, modality.preprocess, bool(modality.thread_safe)
        )
        rows = Rows([column], None, None, {}, listing.class_names, np.arange(len(listing.paths)))
        if listing.labels is not None:
            rows = _with_labels(rows, as_tensor_slices(listing.labels), str(arguments.label_mode))
        subsets.append(rows)
    return subsets


def rows_of_table(source: Any, arguments: Arguments) -> list[Rows]:
    """The rows of a table or a list of files, or of its subsets for training and validation."""
    check_choice("label_mode", arguments.label_mode, _LABEL_MODES)
    table = Table(source)
    columns = [
        _column(table, name, modality, arguments)
        for name, modality in _modalities(arguments).items()
    ]  # fmt: skip
    tabular = {
        name: table.numbers(what, np.float32, f"tabular={{{name!r}: …}}")
        for name, what in (arguments.tabular or {}).items()
    }
    both = set(tabular) & {column.name for column in columns}
    if both:
        raise OptionError(f"the name {both.pop()!r} is both of a modality and in tabular=")
    rows = Rows(columns, None, None, tabular, None, np.arange(len(table)))
    labels = _label_column(table, arguments)
    if labels is not None:
        known = labels_of(labels, arguments.class_names, str(arguments.label_mode))
        rows = _with_labels(
            replace(rows, class_names=known.class_names), known.values, str(arguments.label_mode)
        )
    order = np.arange(len(rows))
    if arguments.shuffle and arguments.validation_split:
        np.random.RandomState(arguments.seed).shuffle(order)  # as Keras does before it splits
    return [rows.chosen(part) for part in _subsets(order, arguments)]


def _modalities(arguments: Arguments) -> dict[str, Modality]:
    if arguments.modalities is None:
        return {"": arguments.modality}
    if not arguments.modalities:
        raise OptionError("modalities={} has none: name at least one image, or leave the argument out")
    if arguments.modality.boxes is not None:
        raise OptionError("with modalities=, boxes are said for each of them: {'name': {'boxes': …}}")
    return {
        str(name): Modality.of(str(name), value).over(arguments.modality)
        for name, value in arguments.modalities.items()
    }


def _column(table: Table, name: str, modality: Modality, arguments: Arguments) -> Column:
    files = modality.files or (name if name in table else None)
    if files is None:
        files = next((one for one in ("files", "file", "filename", "path") if one in table), None)
    if files is None:
        which = f"modalities={{{name!r}: {{'files': …}}}}" if name else "files="
        raise OptionError(f"{which} must name the column of the file names; there are {table.names}")
    what = f"boxes of {name!r}" if name else "boxes="
    boxes = modality.boxes
    if boxes is not None:
        box_format = modality.box_format or "xyxy"
        boxes = boxes_of(table.numbers(boxes, np.float64, what), box_format, name or "boxes")
    try:
        spec = spec_of(modality, arguments.parity, arguments.aspect)
    except OptionError as error:
        raise OptionError(f"modality {name!r}: {error}" if name else str(error)) from None
    return Column(
        name, table.paths(files, modality.folder, f"files of {name!r}" if name else "files="), boxes, spec,
        modality.scaling, modality.preprocess, bool(modality.thread_safe),
    )  # fmt: skip


def _label_column(table: Table, arguments: Arguments) -> npt.NDArray[Any] | list[Any] | None:
    labels = arguments.labels
    if labels is None or arguments.label_mode is None:
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
                f"labels={labels!r} are names of columns, and as many as there are rows: give an array "
                "of labels, or table[names] for columns"
            )
        return table.beside(labels, "labels=")
    values = values_of(labels)
    if len(values) != len(table):
        shape = getattr(values, "shape", (len(values),))
        raise OptionError(f"labels has shape {shape}, the source has {len(table)} rows")
    return values


def _with_labels(rows: Rows, labels: npt.NDArray[Any], label_mode: str) -> Rows:
    names = rows.class_names or []
    if label_mode == "binary" and len(names) != 2:
        raise OptionError(f"label_mode='binary' is for two classes, but there are {names}")
    return replace(rows, labels=formed(labels, label_mode, len(names)), classes=classes_of(labels))


def _subsets(order: npt.NDArray[np.int64], arguments: Arguments) -> list[npt.NDArray[np.int64]]:
    """The rows for each subset that is asked for, split as Keras does."""
    split, subset = arguments.validation_split, arguments.subset
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


def data_format_of(data_format: str | None) -> str:
    """The memory order of images that is meant: Keras's own where None is given."""
    found = keras.config.image_data_format() if data_format is None else data_format
    check_choice("data_format", found, ("channels_last", "channels_first"))
    return str(found)
