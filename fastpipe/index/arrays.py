"""Arrays that were made of a file at some cost, kept on disk for as long as the file is as it was."""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from fastpipe.index.file_systems import is_settled
from fastpipe.index.kept import KeptFiles, default_folder, member

__all__ = ["FileArrays", "default_file_arrays"]

_VERSION = 1


class FileArrays:
    """Keeps arrays about files.

    Args:
        path: the folder for them.  It is made when the first is written.
        now: the time in nanoseconds, on the clock of the files' file system.

    Whatever is wrong with it costs the making of the arrays, and one warning in each process.
    """

    def __init__(self, path: str | os.PathLike[str], *, now: Callable[[], int] = time.time_ns) -> None:
        self.path = Path(path)
        self.now = now
        self._files = KeptFiles(self.path, "Where chunks are is not kept, so each file is asked each time")

    def load(self, status: os.stat_result, about: str) -> list[npt.NDArray[Any]] | None:
        """The arrays that were kept of a file in this state; None where there are none.

        Args:
            status: the file's.
            about: what they are.
        """
        return self._files.load(_named(status, about), lambda members: _read(members, _key(status, about)))

    def save(self, status: os.stat_result, about: str, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Keep arrays of numbers of one dimension, in the place of what was kept of the same file before.

        Args:
            status: the file's, from before they were made.
            about: what they are.
            arrays: the arrays.
        """
        if not is_settled(max(status.st_mtime_ns, status.st_ctime_ns), self.now()):
            return
        key = _key(status, about)
        self._files.save(_named(status, about), lambda file: _write(file, key, arrays))


def default_file_arrays() -> FileArrays | None:
    """Those in the user's own cache folder; None where there is none."""
    folder = default_folder()
    return None if folder is None else FileArrays(folder)


def _key(status: os.stat_result, about: str) -> list[Any]:
    state = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    return ["arrays", _VERSION, about, *state]


def _named(status: os.stat_result, about: str) -> list[Any]:
    # Not the whole state: what was kept of the file as it was before is written over.
    return ["arrays", about, status.st_dev, status.st_ino]


def _write(file: BinaryIO, key: list[Any], arrays: Sequence[npt.NDArray[Any]]) -> None:
    text = json.dumps({"key": key, "dtypes": [array.dtype.str for array in arrays]})
    members = {f"array{number}": array for number, array in enumerate(arrays)}
    np.savez(file, about=np.frombuffer(text.encode(), np.uint8), **members)  # type: ignore[arg-type]


def _read(members: zipfile.ZipFile, key: list[Any]) -> list[npt.NDArray[Any]] | None:
    about = json.loads(member(members, "about", np.dtype(np.uint8)).tobytes())
    if about["key"] != key:
        return None
    return [
        member(members, f"array{number}", np.dtype(dtype)) for number, dtype in enumerate(about["dtypes"])
    ]
