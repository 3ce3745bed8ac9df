"""Tables of Arrow with a column of encoded images in files: Hugging Face's datasets, and .arrow files."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fastpipe.core.archive_paths import place_of, version_of
from fastpipe.core.extras import require
from fastpipe.errors import OptionError

_MAPS = "/proc/self/maps"
_REMEDY = (
    "They must be in .arrow files that are not compressed, as load_dataset() of the package datasets makes "
    "them of Parquet files"
)


class _Mapped(NamedTuple):
    """A part of a file that is mapped into memory."""

    start: int
    end: int
    offset: int
    path: str


def is_arrow(table: Any) -> bool:
    """Return whether a table is a ``datasets.Dataset``, a ``pyarrow.Table`` or the path of an .arrow file."""
    if isinstance(table, (str, os.PathLike)):
        return os.fsdecode(table).lower().endswith(".arrow")
    return hasattr(table, "column_names") and (hasattr(table, "schema") or hasattr(table, "cache_files"))


def read_arrow(
    table: Any, image: Any, names: Sequence[Any], check: Callable[[Any, list[Any]], int]
) -> dict[Any, list[Any]]:
    """Return the columns ``names`` of a table, and its images as paths of their places in files.

    Args:
        table: see ``is_arrow``.
        image: a column of bytes, or of Hugging Face's feature ``Image``: structs of ``bytes`` and ``path``.
        names: other columns.
        check: raises an error if a column is not among all columns.

    Raises:
        OptionError: an image is not in a file, or is missing.
    """
    table, rows = _table_and_rows(table)
    for name in (image, *names):
        check(name, list(table.column_names))
    paths = list(_paths(table.column(image), image))
    columns = {name: table.column(name).to_pylist() for name in names} | {image: paths}
    if rows is not None:
        columns = {name: [values[row] for row in rows] for name, values in columns.items()}
    return columns


def _table_and_rows(table: Any) -> tuple[Any, list[int] | None]:
    """Return a ``pyarrow.Table`` whose buffers are mapped files, and the rows to take, None for all."""
    if isinstance(table, (str, os.PathLike)):
        arrow = require("pyarrow", package="pyarrow")
        source = arrow.memory_map(os.fspath(table))
        try:
            return arrow.ipc.open_stream(source).read_all(), None
        except arrow.ArrowInvalid:  # it has the form of a file, not of a stream
            return arrow.ipc.open_file(source).read_all(), None
    if not hasattr(table, "cache_files"):
        return table, None
    if not hasattr(table, "_indices"):  # select(), filter(), shuffle() and train_test_split() store them
        raise OptionError(
            "this version of the package datasets is not known. Pass dataset.with_format('arrow')[:], a table"
        )
    indices = table._indices
    rows = None if indices is None else indices.column(0).to_pylist()
    count = len(table.data) if rows is None else len(rows)
    if len(table) != count:
        raise OptionError(f"a dataset of {len(table)} rows has {count} rows in its table")
    return table.data.table, rows


def _paths(column: Any, name: str) -> Iterator[str]:
    mapped = _mapped_files()
    versions: dict[str, int] = {}
    row = 0
    for chunk in column.chunks:
        texts: list[Any] = [None] * len(chunk)
        if str(chunk.type).startswith("struct"):
            fields = dict(zip((field.name for field in chunk.type), chunk.flatten(), strict=True))
            if "bytes" not in fields:
                raise OptionError(f"column {name!r} has structs without the field 'bytes': {chunk.type}")
            chunk, texts = fields["bytes"], fields["path"].to_pylist() if "path" in fields else texts
        if str(chunk.type) not in ("binary", "large_binary"):
            raise OptionError(f"column {name!r} must have bytes of images, got {chunk.type}")
        validity = chunk.is_valid().to_numpy(zero_copy_only=False)
        ends = _ends(chunk)
        for place, (is_valid, text) in enumerate(zip(validity.tolist(), texts, strict=True)):
            if is_valid:
                start, end = ends[place], ends[place + 1]
                yield _path(mapped, versions, start, end, os.path.basename(text or "") or f"{row}", name)
            elif text:
                yield text
            else:
                raise OptionError(f"row {row} has no image in column {name!r}. Leave the row out")
            row += 1


def _ends(chunk: Any) -> list[int]:
    """Return the address at which each value begins, and the end of the last one."""
    _, offsets, data = chunk.buffers()
    kind = np.int64 if str(chunk.type) == "large_binary" else np.int32
    if offsets is None or data is None:  # there are no values, or only null
        return [0] * (len(chunk) + 1)
    within = np.frombuffer(offsets, kind)[chunk.offset : chunk.offset + len(chunk) + 1]
    found: list[int] = (within.astype(np.int64) + data.address).tolist()
    return found or [0]


def _path(
    mapped: Sequence[_Mapped], versions: dict[str, int], start: int, end: int, shown: str, name: str
) -> str:  # fmt: skip
    place = bisect.bisect_right(mapped, start, key=lambda one: one.start) - 1
    if place < 0 or end > mapped[place].end:
        raise OptionError(f"images of column {name!r} are in memory, not in a file. {_REMEDY}")
    found = mapped[place]
    if found.path not in versions:
        versions[found.path] = version_of(os.stat(found.path))
    offset = start - found.start + found.offset
    return f"{found.path}/@{place_of(offset, end - start, None, versions[found.path])}/{shown}"


def _mapped_files() -> list[_Mapped]:
    """Return the parts of files that are mapped into this process, by address."""
    found: list[_Mapped] = []
    try:
        with open(_MAPS, encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                fields = line.rstrip("\n").split(None, 5)
                if len(fields) == 6 and fields[5].startswith("/"):
                    start, end = (int(part, 16) for part in fields[0].split("-"))
                    found.append(_Mapped(start, end, int(fields[2], 16), fields[5]))
    except OSError as error:
        raise OptionError(f"where images of a table lie is only known on Linux: {error}") from error
    return found
