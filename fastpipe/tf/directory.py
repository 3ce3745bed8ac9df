"""Samples of a folder with a folder for each class, as Keras lists them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from fastpipe.errors import OptionError

__all__ = ["Listing", "list_directory"]


class Listing(NamedTuple):
    """What Keras makes of a folder, or of one subset of it.

    Attributes:
        paths: of the files, in its order.
        labels: of them; None without.
        class_names: their names, or None.
    """

    paths: list[str]
    labels: list[int] | None
    class_names: list[str] | None


def list_directory(directory: str | os.PathLike[str], arguments: dict[str, Any]) -> list[Listing]:
    """List a folder by ``keras.utils.image_dataset_from_directory``, which also checks the arguments,
    prints what it prints, and chooses a subset.

    Args:
        directory: the folder.
        arguments: Keras's; ``seed`` is not None.

    Returns:
        One listing, or those for training and for validation where the subset is ``"both"``.

    Raises:
        ValueError: Keras's own, for its arguments.
        OptionError: there is no such folder.
    """
    directory = os.fspath(directory)
    if not os.path.isdir(directory):
        raise OptionError(
            f"there is no folder {directory!r}: give a folder of images, a list of files, or a table"
        )
    labels = arguments["labels"]
    if isinstance(labels, (list, tuple)):  # Keras shuffles the script's own list
        arguments = {**arguments, "labels": list(labels)}
    made = keras.utils.image_dataset_from_directory(directory, **arguments)
    subsets = made if isinstance(made, (list, tuple)) else [made]
    has_labels = labels is not None and arguments["label_mode"] is not None
    if has_labels and not isinstance(labels, str):
        return _with_given_labels(subsets, list(labels), arguments)
    return [
        Listing(one.file_paths, _labels_of(directory, one) if has_labels else None, one.class_names)
        for one in subsets
    ]


def _labels_of(directory: str, stock: Any) -> list[int]:
    """The class of each file: the first folder below the directory."""
    number = {name: n for n, name in enumerate(stock.class_names)}
    start = len(os.path.join(directory, ""))
    return [_class_of(path[start:], number) for path in stock.file_paths]


def _class_of(path: str, number: dict[str, int]) -> int:
    first = path.split(os.sep, 1)[0]
    if first in number:
        return number[first]
    # A class may be named by a path as well, such as "train/cats".
    return number[max((name for name in number if path.startswith(name + os.sep)), key=len)]


def _with_given_labels(stocks: Sequence[Any], labels: list[int], arguments: dict[str, Any]) -> list[Listing]:
    """Labels that the script gave, which Keras shuffles and cuts as it does the files."""
    if arguments["shuffle"]:
        np.random.RandomState(arguments["seed"]).shuffle(labels)
    count = sum(len(one.file_paths) for one in stocks)
    if arguments["subset"] in ("training", "both"):
        parts = [labels[: len(stocks[0].file_paths)], labels[-len(stocks[-1].file_paths) :]]
    else:
        parts = [labels[len(labels) - count :]]
    return [Listing(one.file_paths, part, one.class_names) for one, part in zip(stocks, parts, strict=False)]
