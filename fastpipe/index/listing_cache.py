"""The listings of stores, kept on disk: a store has no cheap way to tell what has changed in it.

So what is kept is used until somebody asks for a new listing, and the log says so.  One file holds
the class folders' names of one prefix; another, for each choice of extensions, the objects in them:
in JSON which folders, in arrays the rest.  Zip's checksums guard all of it, and whatever is wrong
with a file costs a listing.
"""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.index.kept import KeptFiles, member
from fastpipe.index.listing import Rows, joined_texts
from fastpipe.index.storage import Packed, offsets_of
from fastpipe.index.tables import SampleTable

__all__ = ["KeptFolders", "KeptRows", "ListingCache", "ListingKey", "age_in_words"]

_VERSION = 1


class ListingKey(NamedTuple):
    """What decides which objects a listing has.

    Args:
        store: its name, which tells it from all others.
        prefix: what all keys begin with.
        endings: the extensions; whoever compares keys ignores case.
    """

    store: str
    prefix: str
    endings: tuple[str, ...]

    def fields(self) -> list[Any]:
        """As JSON has it."""
        return ["listing", _VERSION, self.store, self.prefix, list(self.endings)]


class KeptFolders(NamedTuple):
    """The names of the class folders, and when they were listed: in nanoseconds since 1970."""

    listed: int
    names: list[str]


class KeptRows(NamedTuple):
    """What is in one class folder, and when it was listed."""

    listed: int
    rows: Rows


class ListingCache:
    """The files in which listings are kept.

    Args:
        path: their folder, which other kinds of files may share.  It is made when the first is written.
        now: the time in nanoseconds since 1970.  It is shown to people, and decides nothing.

    A folder that cannot be used costs one warning in each process.
    """

    def __init__(self, path: str | os.PathLike[str], *, now: Callable[[], int] = time.time_ns) -> None:
        self.path = Path(path)
        self.now = now
        self._files = KeptFiles(self.path, "The listing of the store is not kept, so it is listed each time")

    def load_folders(self, store: str, prefix: str) -> KeptFolders | None:
        """The class folders that were found before; None if there were none."""
        key = _folders_key(store, prefix)
        return self._files.load(key, lambda members: _read_folders(members, key))

    def save_folders(self, store: str, prefix: str, folders: KeptFolders) -> None:
        """Keep the names of the class folders."""
        key = _folders_key(store, prefix)
        self._files.save(key, lambda file: _write(file, {"key": key, "folders": folders}, {}))

    def load(self, key: ListingKey) -> dict[str, KeptRows]:
        """What was found before, by folder; nothing where nothing is kept or it is damaged."""
        return self._files.load(key.fields(), lambda members: _read_rows(members, key)) or {}

    def save(self, key: ListingKey, folders: Mapping[str, KeptRows]) -> None:
        """Keep what is in folders, in the place of what was kept before."""
        self._files.save(key.fields(), lambda file: _write_rows(file, key, folders))


def age_in_words(nanoseconds: int) -> str:
    """How long ago something was.

    >>> age_in_words(7300 * 10**9), age_in_words(86400 * 10**9), age_in_words(3)
    ('2 hours', '1 day', 'less than a minute')
    """
    seconds = nanoseconds // 10**9
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = seconds // length
            return f"{count} {unit}" if count == 1 else f"{count} {unit}s"
    return "less than a minute"


def _folders_key(store: str, prefix: str) -> list[Any]:
    return ["class folders", _VERSION, store, prefix]


def _read_folders(members: zipfile.ZipFile, key: list[Any]) -> KeptFolders | None:
    about = json.loads(member(members, "about", np.uint8).tobytes())
    if about["key"] != key:
        return None
    listed, names = about["folders"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"folders are called {names!r}")
    return KeptFolders(int(listed), names) if names else None


def _write_rows(file: BinaryIO, key: ListingKey, folders: Mapping[str, KeptRows]) -> None:
    about = [[name, kept.listed, len(kept.rows)] for name, kept in folders.items()]
    parts = [kept.rows for kept in folders.values()]
    arrays = {"sizes": np.concatenate([np.zeros(0, dtype=np.int64), *(part.sizes for part in parts)])}
    for name, texts in (
        ("path", [part.paths for part in parts]),
        ("version", [part.versions for part in parts]),
    ):
        joined = joined_texts(texts)
        arrays[f"{name}s"] = np.frombuffer(joined.block, dtype=np.uint8)
        arrays[f"{name}_lengths"] = joined.lengths.astype(np.int32)
    _write(file, {"key": key.fields(), "folders": about}, arrays)


def _write(file: BinaryIO, about: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    text = json.dumps(about, separators=(",", ":"))
    np.savez(file, about=np.frombuffer(text.encode(), dtype=np.uint8), **arrays)  # type: ignore[arg-type]


def _read_rows(members: zipfile.ZipFile, key: ListingKey) -> dict[str, KeptRows] | None:
    about = json.loads(member(members, "about", np.uint8).tobytes())
    if about["key"] != key.fields():
        return None
    sizes = member(members, "sizes", np.int64)
    paths, path_ends = _read_texts(members, "path", len(sizes))
    versions, version_ends = _read_texts(members, "version", len(sizes))
    found: dict[str, KeptRows] = {}
    first = 0
    for name, listed, count in about["folders"]:
        end = first + count
        if type(name) is not str or type(count) is not int or count < 0 or end > len(sizes):
            raise ValueError(f"a folder is described by {name!r}, {listed!r}, {count!r}")
        rows = Rows(
            _part(paths, path_ends, first, end), sizes[first:end], _part(versions, version_ends, first, end)
        )
        found[name] = KeptRows(int(listed), rows)
        first = end
    if first != len(sizes):
        raise ValueError(f"{len(sizes)} objects are in folders of {first}")
    return found


def _read_texts(members: zipfile.ZipFile, name: str, count: int) -> tuple[Packed, npt.NDArray[np.int64]]:
    """Texts, and where each begins.

    Raises:
        ValueError: they are no texts, or not as many.
    """
    block = member(members, f"{name}s", np.uint8).tobytes()
    lengths = member(members, f"{name}_lengths", np.int32).astype(np.int64)
    offsets = offsets_of(lengths)
    SampleTable.from_arrays(block, offsets, np.zeros(count, dtype=np.int64))  # checks them
    return Packed(memoryview(block), lengths), offsets


def _part(texts: Packed, offsets: npt.NDArray[np.int64], first: int, end: int) -> Packed:
    return Packed(texts.block[int(offsets[first]) : int(offsets[end])], texts.lengths[first:end])
