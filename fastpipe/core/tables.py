"""Tables of samples: data frames of pandas and Polars, CSV and JSON files, archives, and rows that are dicts.

A table is read column by column, and only the columns that are used.  The packages pandas and Polars are not
imported: a data frame is an object with ``columns`` and with ``table[column].to_list()``.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fastpipe.core.arrow_tables import is_arrow, read_arrow
from fastpipe.core.files import is_url
from fastpipe.core.lmdb_files import is_lmdb, read_lmdb
from fastpipe.core.sample_tables import FrozenRecords, FrozenTargets, RowTable, SampleTable
from fastpipe.core.shards import Samples, read_shards, shard_paths
from fastpipe.errors import OptionError

_KINDS = (
    "a table is a pandas or Polars DataFrame, a .csv, .json, .jsonl, .tar or .lmdb file, or an iterable of "
    "dicts"
)
_REMEDY = "Leave the row out"
_SHOWN = 50  # an error lists at most so many columns
_LONGEST = 80  # characters of a value in an error

# Other texts that Python converts, such as "007", "1_000", "nan" and "inf", may be names.
_INTEGER = re.compile(r"\s*[+-]?(0|[1-9]\d*)\s*", re.ASCII)
_FLOAT = re.compile(r"\s*[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+)(e[+-]?\d+)?\s*", re.ASCII | re.IGNORECASE)


ReadShards = Callable[[Sequence[str], str, Sequence[str], bool], Samples]


class DataFrame(Protocol):
    """A table like those of pandas and Polars."""

    @property
    def columns(self) -> Any: ...
    def __getitem__(self, name: Any, /) -> Any: ...


class _Columns(NamedTuple):
    """The columns of a table that are used.

    Attributes:
        values: the values of each column, lists of the same length.
        where: a function that names a row, for errors.
        is_text: whether all values are texts that may stand for numbers.
    """

    values: dict[Any, list[Any]]
    where: Callable[[int], str]
    is_text: bool = False


def is_table(samples: Any) -> bool:
    """Return whether ``samples`` can only be a table, and not an iterable of pairs."""
    return isinstance(samples, (str, os.PathLike)) or is_arrow(samples) or _is_frame(samples)


def read_table(
    table: Any, image: Any, target: Any, root: str | os.PathLike[str] = "", classes: Sequence[str] = (),
    keeps: bool = True, read_remote: ReadShards | None = None,
) -> SampleTable | RowTable:  # fmt: skip
    """Return the samples (path, target) of a table.

    Integers of one target column are stored as an int64 array (N,), and floats as a float64 array (N,).  All
    other values are stored as they are.  Targets are Python objects when they are accessed: int, float, str,
    or the object that the table has.

    Args:
        table: a DataFrame, the path of a file, paths or a pattern of tar files or LMDBs, or an iterable of
            dicts.
        image: the column of the images' paths.
        target: a column, whose values are the targets; several columns, for targets that are tuples; or a
            dict whose values are columns, for targets that are dicts with the same keys.
        root: the base folder of relative paths.
        classes: names of classes.  Texts of the column ``target`` are replaced with their indices.
        keeps: whether to keep the list of what is in archives for the next time.
        read_remote: reads tar files in a store, whose URLs ``table`` has, as ``read_shards``.

    Raises:
        OptionError: there is no such table or column, or a value is missing or does not fit.  The message
            names the row and the column.

    >>> rows = [{"file": "1.jpg", "x": 1, "y": 2.5}, {"file": "2.jpg", "x": 3, "y": 4}]
    >>> read_table(rows, "file", "x")
    [('1.jpg', 1), ('2.jpg', 3)]
    >>> read_table(rows, "file", ["x", "y"], root="photos")
    [('photos/1.jpg', (1, 2.5)), ('photos/2.jpg', (3, 4.0))]
    >>> read_table([*rows, {"file": "3.jpg", "x": None}], "file", "x")
    Traceback (most recent call last):
        ...
    fastpipe.errors.OptionError: row 2 (counted from 0) has None in column 'x'. Leave the row out
    """
    is_one = isinstance(target, str) or not isinstance(target, Iterable)
    names = [target] if is_one else list(target.values() if isinstance(target, Mapping) else target)
    if not names or not all(isinstance(name, (str, int)) for name in (image, *names)):
        raise OptionError(
            f"image must name one column and target at least one, got image={image!r}, target={target!r}"
        )
    if classes and not is_one:
        raise OptionError(
            f"classes= names the classes of one target column, got target={target!r}: name the column of the "
            "classes, or replace the texts in the table with indices"
        )
    others = list(dict.fromkeys(name for name in names if name != image))
    if read_remote is not None:
        columns = _of_archives(table, image, others, root, keeps, read_remote)
    elif archives := _archives_of(table):
        read = read_shards if _is_shard(archives[0]) else read_lmdb
        columns = _of_archives(archives, image, others, root, keeps, read)
    elif is_arrow(table):
        columns = _Columns(read_arrow(table, image, others, _place), _row)
    else:
        columns = _columns_of(table, [image, *others])
    if not columns.values[image]:
        raise OptionError("the table has no rows: is it empty, or filtered away?")
    paths = columns.values[image] if read_remote is not None else _paths(columns, image, root)
    targets = [_stored(_targets(columns, name, classes)) for name in names]
    if not is_one:
        return RowTable(paths, FrozenRecords(targets, list(target) if isinstance(target, Mapping) else None))
    (found,) = targets
    if isinstance(found, FrozenTargets) and found.array.dtype == np.int64:
        return SampleTable.from_columns(paths, found.array)
    return RowTable(paths, found)


def why_not_local(text: str, root: str | os.PathLike[str]) -> str:
    """Return why an image is not a file of this machine, as the rest of a sentence; empty if it is one."""
    if not is_url(text) and not is_url(os.fspath(root)):
        return ""
    return (
        f"must be a file of this machine, got {text!r} in {root!r}. "
        'For a bucket use FastImageFolder("s3://bucket/folder", …), which fetches images ahead'
    )


# ---- columns -------------------------------------------------------------------------------------


def _columns_of(table: Any, names: Sequence[Any]) -> _Columns:
    if isinstance(table, (str, os.PathLike)):
        suffix = os.path.splitext(os.fsdecode(table))[1].lower()
        if suffix == ".csv":
            return _of_csv(table, names)
        if suffix in (".json", ".jsonl"):
            return _of_json(table, names)
        raise OptionError(
            f"{os.fspath(table)!r}: {_KINDS}. Read other files with pandas or Polars, and Parquet files that "
            "contain images with load_dataset() of the package datasets"
        )
    if _is_frame(table):
        return _of_frame(table, names)
    if isinstance(table, Mapping) or not isinstance(table, Iterable):
        raise OptionError(f"{_KINDS}; got {type(table).__name__}")
    return _of_rows(table, names, _row)


def remote_shards(table: Any) -> list[str]:
    """Return the URLs of tar files, or their patterns, if a table consists of such URLs."""
    patterns = _names_of(table)
    return patterns if all(is_url(pattern) and _is_shard(pattern) for pattern in patterns) else []


def _names_of(table: Any) -> list[str]:
    """Return the paths, URLs and patterns that a table consists of, if it does."""
    given = [table] if isinstance(table, (str, os.PathLike)) else table
    if not isinstance(given, (list, tuple)) or not all(isinstance(one, (str, os.PathLike)) for one in given):
        return []
    return [os.fsdecode(one) for one in given]


def _archives_of(table: Any) -> list[str]:
    """Return the paths of tar files or LMDBs, if a table consists of such files."""
    patterns = _names_of(table)
    if not all(map(_is_shard, patterns)) and not all(map(is_lmdb, patterns)):
        return []
    return [path for pattern in patterns for path in shard_paths(pattern)]


def _is_shard(path: str) -> bool:
    return path.lower().endswith(".tar")


def _of_archives(
    paths: Sequence[str], image: Any, names: Sequence[Any], root: str | os.PathLike[str], keeps: bool,
    read: ReadShards,
) -> _Columns:  # fmt: skip
    if os.fspath(root) or not all(isinstance(name, str) for name in (image, *names)):
        how = 'extensions, such as image="jpg", target="cls"'
        if not _is_shard(paths[0]):
            how = 'keys, such as image="image-*", target="label-*"'
        raise OptionError(
            f"archives contain their images, so leave root= out, and name columns by {how}; "
            f"got image={image!r}, root={root!r}"
        )
    samples = read(paths, image, names, keeps)
    return _Columns({**samples.columns, image: samples.images}, samples.where)


def _is_frame(table: Any) -> bool:
    columns = getattr(table, "columns", None)
    return columns is not None and not callable(columns)  # SQLAlchemy's results have a method of this name


def _row(number: int) -> str:
    return f"row {number} (counted from 0)"


def _place(name: Any, columns: Sequence[Any]) -> int:
    """Return the position of a column."""
    if (count := columns.count(name)) == 1:
        return columns.index(name)
    if count:
        raise OptionError(f"the table has {count} columns {name!r}: give each its own name")
    shown = ", ".join(map(repr, columns[:_SHOWN])) + (", …" if len(columns) > _SHOWN else "")
    raise OptionError(f"the table has no column {name!r}. Its columns are {shown or 'none'}")


def _of_frame(table: DataFrame, names: Sequence[Any]) -> _Columns:
    columns, values = list(table.columns), {}
    for name in names:
        _place(name, columns)
        try:
            values[name] = table[name].to_list()
        except (AttributeError, TypeError) as error:
            raise OptionError(
                f"column {name!r} of a {type(table).__name__} has no to_list() ({error}): {_KINDS}"
            ) from error
    return _Columns(values, _row)


def _of_rows(rows: Iterable[Any], names: Sequence[Any], where: Callable[[int], str]) -> _Columns:
    values: dict[Any, list[Any]] = {name: [] for name in names}
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise OptionError(f"{where(number)} must be a dict of columns, got {row!r}: {_KINDS}")
        for name, column in values.items():
            if name not in row:
                try:
                    _place(name, list(row))
                except OptionError as error:
                    raise OptionError(f"{where(number)}: {error}") from None
            column.append(row[name])
    return _Columns(values, where)


def _of_csv(path: str | os.PathLike[str], names: Sequence[Any]) -> _Columns:
    lines = array("q")
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        try:
            header = next(rows, [])
            values: dict[Any, list[Any]] = {name: [] for name in names}
            places = [(column, _place(name, header)) for name, column in values.items()]
            for row in rows:
                if not row:  # an empty line
                    continue
                if len(row) != len(header):
                    raise OptionError(
                        f"line {rows.line_num} of {os.fspath(path)} has {len(row)} cells, and the first line "
                        f"has {len(header)}"
                    )
                lines.append(rows.line_num)
                for column, place in places:
                    column.append(row[place])
        except csv.Error as error:
            raise OptionError(f"line {rows.line_num} of {os.fspath(path)}: {error}") from error
        except UnicodeDecodeError as error:
            raise OptionError(f"{os.fspath(path)}: {error}. Save the table as UTF-8") from error
    return _Columns(values, _line_of(path, lines), is_text=True)


def _of_json(path: str | os.PathLike[str], names: Sequence[Any]) -> _Columns:
    lines = array("q")

    def rows(file: Iterable[str]) -> Iterator[Any]:
        for number, line in enumerate(file, 1):
            if line.strip():
                lines.append(number)
                yield json.loads(line)

    with open(path, encoding="utf-8-sig") as file:
        try:
            is_list = file.read(_SHOWN).lstrip().startswith("[")
            file.seek(0)
            if is_list:
                return _of_rows(json.load(file), names, _row)
            return _of_rows(rows(file), names, _line_of(path, lines))
        except json.JSONDecodeError as error:
            line = f"line {lines[-1]} of " if lines else ""
            raise OptionError(f"{line}{os.fspath(path)}: {error}") from error
        except UnicodeDecodeError as error:
            raise OptionError(f"{os.fspath(path)}: {error}. Save the table as UTF-8") from error


def _line_of(path: str | os.PathLike[str], lines: Sequence[int]) -> Callable[[int], str]:
    return lambda number: f"line {lines[number]} of {os.fspath(path)}"


# ---- values --------------------------------------------------------------------------------------


def _paths(columns: _Columns, name: Any, root: str | os.PathLike[str]) -> list[str]:
    paths = []
    for number, value in enumerate(columns.values[name]):
        if not isinstance(value, (str, os.PathLike)) or not (text := os.fsdecode(value)):
            raise OptionError(
                f"{columns.where(number)} has {repr(value)[:_LONGEST]} in column {name!r} of the images, "
                f"which must be a path. {_REMEDY}"
            )
        if problem := why_not_local(text, root):
            raise OptionError(f"{columns.where(number)}, column {name!r}, {problem}")
        paths.append(os.path.join(root, text))
    return paths


def _targets(columns: _Columns, name: Any, classes: Sequence[str]) -> list[Any]:
    values, where = columns.values[name], columns.where
    for number, value in enumerate(values):
        if _is_missing(value) or (columns.is_text and not value.strip()):
            raise OptionError(f"{where(number)} has {value!r} in column {name!r}. {_REMEDY}")
    if columns.is_text:
        values = _numbers_of_texts(values, name, classes, where)
    values = _of_one_type(values, name, where)
    return _class_indices(values, name, classes, where) if classes else values


def _is_missing(value: Any) -> bool:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # pandas.NA, pandas.NaT
        return True
    return isinstance(value, (float, np.floating)) and value != value


def _numbers_of_texts(
    texts: list[str], name: Any, classes: Sequence[str], where: Callable[[int], str]
) -> list[Any]:  # fmt: skip
    """Return the numbers of a column whose cells are all numbers, and the texts of any other column."""
    if classes and not (set(texts).isdisjoint(classes) and all(map(_INTEGER.fullmatch, texts))):
        return texts  # names of classes may look like numbers
    numbers = [_number(text) for text in texts]
    others = numbers.count(None)
    if others in (0, len(texts)):
        return texts if others else numbers
    text = numbers.index(None)
    number = next(number for number, value in enumerate(numbers) if value is not None)
    raise OptionError(
        f"column {name!r} has numbers and texts: {where(number)} has {texts[number]!r}, {where(text)} has "
        f"{texts[text]!r}. Correct the file, or, if all are texts, pass csv.DictReader(file), which converts "
        "no text"
    )


def _number(text: str) -> int | float | None:
    if _INTEGER.fullmatch(text):
        return int(text)
    value = float(text) if _FLOAT.fullmatch(text) else math.inf
    return None if math.isinf(value) else value


def _of_one_type(values: list[Any], name: Any, where: Callable[[int], str]) -> list[Any]:
    """Return values of one type.  Integers among floats become floats, so that all batches have one dtype."""
    kinds = set(map(type, values))
    if len(kinds) == 1:
        return values
    if kinds != {int, float}:
        first = type(values[0])
        other = next(number for number, value in enumerate(values) if type(value) is not first)
        raise OptionError(
            f"column {name!r} has values of several types: {where(0)} has {values[0]!r} ({first.__name__}), "
            f"{where(other)} has {values[other]!r} ({type(values[other]).__name__}). Give it one type"
        )
    for number, value in enumerate(values):
        if abs(value) > 2**53 and type(value) is int:
            raise OptionError(
                f"{where(number)} has {value} in column {name!r}, which also has floats: float64 may not "
                "hold such a large integer. Give the column one type"
            )
    return [float(value) for value in values]


def _class_indices(
    values: list[Any], name: Any, classes: Sequence[str], where: Callable[[int], str]
) -> list[Any]:  # fmt: skip
    """Replace names of classes with their indices, and check indices."""
    indices: list[Any] = [None]
    if isinstance(values[0], str) or type(values[0]) is int:
        known = classes if isinstance(values[0], str) else range(len(classes))
        places = {one: index for index, one in enumerate(known)}
        indices = [places.get(value) for value in values]
    if None in indices:
        number = indices.index(None)
        raise OptionError(
            f"{where(number)} has {values[number]!r} in column {name!r}, which is neither a name nor an "
            f"index of the {len(classes)} classes. Add it to classes=, or leave the row out"
        )
    return indices


def _stored(values: list[Any]) -> FrozenTargets | list[Any]:
    """Return a column in the form that takes the least memory."""
    if type(values[0]) is float:
        return FrozenTargets(np.array(values, dtype=np.float64))
    return FrozenTargets.from_items(values) or values
