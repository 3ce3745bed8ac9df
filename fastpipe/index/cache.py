"""What a scan found, kept on disk: opened again, only folders that have changed are listed.

A file holds the folders of one root, for one choice of extensions: in JSON where each is, its
stamp and the folders in it; in two arrays the paths of its files.  Zip's checksums guard all of
it.  Whatever is wrong with a file, or with the folder it is in, costs a scan and never more.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.index.kept import KeptFiles, default_folder, member
from fastpipe.index.storage import Packed
from fastpipe.index.tables import SampleTable
from fastpipe.index.walk import Folder

__all__ = ["CacheKey", "IndexCache", "default_index_cache", "left_out"]

_KEEP_FROM_S = 0.25
_VERSION = 1


class CacheKey(NamedTuple):
    """What decides which names a scan takes.

    Args:
        device, inode: the root, however its path is spelled and wherever it is moved.
        endings: the extensions; whoever compares names ignores case.
    """

    device: int
    inode: int
    endings: tuple[str, ...]

    def fields(self) -> list[Any]:
        """As JSON has it; with what decides how the system's names become strings."""
        decoding = [sys.getfilesystemencoding(), sys.getfilesystemencodeerrors(), os.sep]
        return [_VERSION, self.device, self.inode, list(self.endings), decoding]


class IndexCache:
    """The files in which scans are kept.

    Args:
        path: their folder.  It is made when the first of them is written.
        keep_from_s: scans that take less are not worth a file.
        now: the time in nanoseconds, on the clock of the file systems that are scanned.

    A folder that cannot be used costs one warning in each process.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep_from_s: float = _KEEP_FROM_S,
        now: Callable[[], int] = time.time_ns,
    ) -> None:
        self.path = Path(path)
        self.keep_from_s = keep_from_s
        self.now = now
        self._files = KeptFiles(self.path, "The index of the dataset is not kept, so it is scanned each time")

    def load(self, key: CacheKey) -> dict[str, Folder[Packed]]:
        """The folders of an earlier scan, by path; none where nothing is kept or it is damaged."""
        return self._files.load(key.fields(), lambda members: _read(members, key)) or {}

    def save(self, key: CacheKey, folders: Sequence[Folder[Packed]]) -> None:
        """Keep folders, all of which have stamps, in the place of what was kept before."""
        self._files.save(key.fields(), lambda file: _write(file, key, folders))


def default_index_cache() -> IndexCache | None:
    """The cache in the user's own cache folder; None where there is none."""
    folder = default_folder()
    return None if folder is None else IndexCache(folder)


def _write(file: BinaryIO, key: CacheKey, folders: Sequence[Folder[Packed]]) -> None:
    described = [[one.path, one.stamp, list(one.folders), one.count] for one in folders]
    text = json.dumps({"key": key.fields(), "folders": described}, separators=(",", ":"))
    lengths = [np.zeros(0, dtype=np.int64), *(one.content.lengths for one in folders)]
    np.savez(
        file,
        folders=np.frombuffer(text.encode(), dtype=np.uint8),
        arena=np.frombuffer(b"".join(one.content.block for one in folders), dtype=np.uint8),
        lengths=np.concatenate(lengths).astype(np.int32),
    )


def _read(members: zipfile.ZipFile, key: CacheKey) -> dict[str, Folder[Packed]] | None:
    text = json.loads(member(members, "folders", np.uint8).tobytes())
    if text["key"] != key.fields():
        return None
    arena = member(members, "arena", np.uint8).tobytes()
    lengths = member(members, "lengths", np.int32).astype(np.int64)
    return {folder.path: folder for folder in _folders(text["folders"], arena, lengths)}


def _folders(
    described: Sequence[Sequence[Any]], arena: bytes, lengths: npt.NDArray[np.int64]
) -> Iterable[Folder[Packed]]:
    """The folders that the parts of a file describe.

    Raises:
        ValueError: the parts do not fit together.
    """
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    SampleTable.from_arrays(arena, offsets, np.zeros(len(lengths), dtype=np.int64))  # checks them
    whole, first = memoryview(arena), 0
    for path, stamp, folders, count in described:
        if not (_all_are(str, [path, *folders]) and _all_are(int, [*stamp, count])):
            raise ValueError(f"a folder is described by {path!r}, {stamp!r}, {folders!r}, {count!r}")
        end = first + count
        if len(stamp) != 4 or count < 0 or end > len(lengths):
            raise ValueError(f"{path!r} has {count} files of {len(lengths)}, stamp {stamp}")
        block = whole[int(offsets[first]) : int(offsets[end])]
        yield Folder(path, tuple(stamp), tuple(folders), count, Packed(block, lengths[first:end]))
        first = end
    if first != len(lengths):
        raise ValueError(f"{len(lengths)} files are in folders of {first}")


def _all_are(kind: type, values: Iterable[Any]) -> bool:
    return all(type(value) is kind for value in values)


def left_out(
    known: Mapping[str, Folder[Packed]], tops: Iterable[str], prefix: str
) -> dict[str, Folder[Packed]]:
    """Known folders of classes that this scan left out, and that are still there."""
    above = {path: path.split(os.sep, 1)[0] for path in known}
    others = set(above.values()) - set(tops)
    there = {top for top in others if os.path.isdir(prefix + top)}
    return {path: folder for path, folder in known.items() if above[path] in there}
