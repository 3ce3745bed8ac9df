"""Which volumes belong together: lists, patterns and tables of paths."""

from __future__ import annotations

import csv
import glob
import os
from collections.abc import Sequence
from typing import Any

from fastpipe.errors import OptionError

__all__ = ["ROLES", "matched_volumes", "roles_of"]

ROLES = ("volume", "labels", "mask")


def matched_volumes(volume: Any, labels: Any = None, mask: Any = None) -> list[list[Any]]:
    """The volumes, their labels and their masks, as far as there are such.

    Args:
        volume: a path, a pattern such as ``"cases/*/image.zarr"``, an array, or a sequence of some; or a
            table: a sequence of tuples (volume, labels[, mask]), or the path of a ``.csv`` file with
            columns of these names.
        labels, mask: the same for the labels and masks, in the same order; without a table.

    Returns:
        One list for each of volume, labels and mask that was given; equally long.

    Raises:
        OptionError: they do not fit together, or there are none.
    """
    if _is_table(volume):
        if labels is not None or mask is not None:
            raise OptionError("labels= and mask= are columns of the table that volume= is: leave them out")
        columns = _columns(volume)
    else:
        columns = {"volume": _several(volume, "volume")}
        columns |= {
            name: _several(given, name)
            for name, given in (("labels", labels), ("mask", mask))
            if given is not None
        }
    counts = {name: len(column) for name, column in columns.items()}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{count} for {name}=" for name, count in counts.items())
        raise OptionError(f"there must be equally many of volume, labels and mask, got {said}")
    if not counts["volume"]:
        raise OptionError("volume= names no volumes")
    return list(columns.values())


def roles_of(volume: Any, labels: Any, mask: Any) -> list[str]:
    """The names of what ``matched_volumes`` gives."""
    if _is_table(volume):
        return list(_columns(volume))
    return [name for name, given in zip(ROLES, (volume, labels, mask), strict=True) if given is not None]


def _is_table(volume: Any) -> bool:
    if isinstance(volume, (str, os.PathLike)):
        return os.fspath(volume).endswith(".csv")
    return isinstance(volume, Sequence) and bool(volume) and all(isinstance(row, tuple) for row in volume)


def _columns(table: Any) -> dict[str, list[Any]]:
    if isinstance(table, (str, os.PathLike)):
        return _columns_of_file(os.fspath(table))
    widths = {len(row) for row in table}
    if len(widths) > 1 or not 1 <= len(table[0]) <= len(ROLES):
        raise OptionError(
            f"a table's rows must be tuples (volume, labels[, mask]), got some of {sorted(widths)} values"
        )
    return {name: [row[place] for row in table] for place, name in enumerate(ROLES[: len(table[0])])}


def _columns_of_file(path: str) -> dict[str, list[Any]]:
    """Paths in such a file are from its folder on."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
        names = list(rows[0]) if rows else []
    if "volume" not in names or not set(names) <= set(ROLES):
        raise OptionError(f"{path} must have a column volume, and may have labels and mask; it has {names}")
    empty = [number for number, row in enumerate(rows) if not all(row.values())]
    if empty:
        raise OptionError(f"{path}: row {empty[0] + 2} is not filled in")
    folder = os.path.dirname(path)
    return {
        name: [path if "://" in path else os.path.join(folder, path) for path in (row[name] for row in rows)]
        for name in ROLES
        if name in names
    }


def _several(given: Any, name: str) -> list[Any]:
    if isinstance(given, (str, os.PathLike)):
        path = os.fspath(given)
        if "://" not in path and glob.has_magic(path) and not os.path.exists(path):
            found = sorted(glob.glob(path, recursive=True))
            if not found:
                raise OptionError(f"{name}={path!r} matches nothing")
            return list(found)
        return [given]
    return list(given) if isinstance(given, (list, tuple)) else [given]
