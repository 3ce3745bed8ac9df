"""Arrays that were made of a file at some cost, kept on disk for as long as the file is as it was."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from fastpipe._private_folder import PrivateFolder
from fastpipe.index.cache import default_index_cache, member, remove_unused

__all__ = ["FileArrays", "default_file_arrays"]

_log = logging.getLogger("fastpipe.index")

_VERSION = 1
# A file that changes twice within a tick of the file system's clock may look as after the first time.
_SETTLED_NS = 2_100_000_000
_warned: set[Path] = set()


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

    def load(self, status: os.stat_result, about: str) -> list[npt.NDArray[Any]] | None:
        """The arrays that were kept of a file in this state; None where there are none.

        Args:
            status: the file's.
            about: what they are.
        """
        if not os.path.lexists(self.path):
            return None
        try:
            with PrivateFolder(self.path) as folder:
                descriptor = folder.open(_file_name(status, about), os.O_RDONLY)
                with os.fdopen(descriptor, "rb") as file:
                    with contextlib.suppress(OSError):
                        os.utime(file.fileno())  # in use: not to be removed
                    return _read(file, _key(status, about))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error)
            return None

    def save(self, status: os.stat_result, about: str, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Keep arrays of numbers of one dimension, in the place of what was kept of the same file before.

        Args:
            status: the file's, from before they were made.
            about: what they are.
            arrays: the arrays.
        """
        if self.now() - max(status.st_mtime_ns, status.st_ctime_ns) < _SETTLED_NS:
            return
        try:
            with PrivateFolder(self.path) as folder:
                folder.write(
                    _file_name(status, about), lambda file: _write(file, _key(status, about), arrays)
                )
                remove_unused(folder)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if self.path not in _warned:
            _warned.add(self.path)
            _log.warning("Where chunks are is not kept, so each file is asked each time: %s", error)


def default_file_arrays() -> FileArrays | None:
    """Those in the user's own cache folder; None where there is none."""
    cache = default_index_cache()
    return None if cache is None else FileArrays(cache.path)


def _key(status: os.stat_result, about: str) -> list[Any]:
    state = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    return ["arrays", _VERSION, about, *state]


def _file_name(status: os.stat_result, about: str) -> str:
    # Not the whole state: what was kept of the file as it was before is written over.
    named = json.dumps(["arrays", about, status.st_dev, status.st_ino])
    return hashlib.sha256(named.encode()).hexdigest()[:32] + ".npz"


def _write(file: BinaryIO, key: list[Any], arrays: Sequence[npt.NDArray[Any]]) -> None:
    text = json.dumps({"key": key, "dtypes": [array.dtype.str for array in arrays]})
    members = {f"array{number}": array for number, array in enumerate(arrays)}
    np.savez(file, about=np.frombuffer(text.encode(), np.uint8), **members)  # type: ignore[arg-type]


def _read(file: BinaryIO, key: list[Any]) -> list[npt.NDArray[Any]] | None:
    try:
        with zipfile.ZipFile(file) as members:
            about = json.loads(member(members, "about", np.dtype(np.uint8)).tobytes())
            if about["key"] != key:
                return None
            return [
                member(members, f"array{number}", np.dtype(dtype))
                for number, dtype in enumerate(about["dtypes"])
            ]
    except Exception:  # a damaged file can fail in any of the ways of zipfile, json and NumPy
        _log.debug("Kept arrays cannot be read, and are made anew", exc_info=True)
        return None
