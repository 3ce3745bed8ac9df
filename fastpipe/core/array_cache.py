"""Arrays that cost time to find, kept in files of a folder that is the user's alone.

Each file is an archive of arrays as NumPy writes them, one of which has the rest as JSON; zip's checksums
guard all of it.  Whatever is wrong with a file, or with the folder, costs what is kept there and never more.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fastpipe.core.file_identity import is_settled
from fastpipe.core.private_folder import PrivateFolder, user_cache_folder

T = TypeVar("T")
# Gives an array of one dimension by its name and type.
Arrays = Callable[[str, Any], npt.NDArray[Any]]

_log = logging.getLogger("fastpipe.index")

_SUFFIX = ".npz"
_UNUSED_S = 90 * 86400.0
_warned: set[tuple[Path, str]] = set()


class KeptFiles:
    """The files of one kind in a folder, which other kinds may share; it is made when the first is written.

    ``warning`` says what a folder that cannot be used costs: logged once in each process, with the reason.
    """

    def __init__(self, path: Path, warning: str) -> None:
        self.path = path
        self._warning = warning

    def load(self, key: Any, read: Callable[[dict[str, Any], Arrays], T]) -> T | None:
        """Return what ``read`` makes of what was kept under a key; None where there is nothing, or it is
        damaged.

        It gets what was saved beside the arrays, and these; what it raises is damage.
        """
        if not os.path.lexists(self.path):
            return None
        try:
            with PrivateFolder(self.path) as folder:
                descriptor = folder.open(_file_name(key), os.O_RDONLY)
                with os.fdopen(descriptor, "rb") as file:
                    with contextlib.suppress(OSError):
                        os.utime(file.fileno())  # in use: not to be removed
                    return _read(file, key, read)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error)
            return None

    def save(self, key: Any, about: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Keep arrays of one dimension, and what JSON can hold, in the place of what has the same key."""
        text = json.dumps({"key": key, **about}, separators=(",", ":"))
        all_of_it = {"about": np.frombuffer(text.encode(), np.uint8), **arrays}
        try:
            with PrivateFolder(self.path) as folder:
                folder.write(_file_name(key), lambda file: np.savez(file, **all_of_it))  # type: ignore[arg-type]
                _remove_unused(folder)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if (self.path, self._warning) not in _warned:
            _warned.add((self.path, self._warning))
            _log.warning("%s: %s", self._warning, error)


def default_folder() -> Path | None:
    """The folder in the user's own cache folder; None for a user without a home, and on systems whose
    folders cannot be closed to others."""
    if not hasattr(os, "geteuid"):
        return None
    path = user_cache_folder() / "index"
    return path if path.is_absolute() else None


def _file_name(key: Any) -> str:
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32] + _SUFFIX


def _read(file: Any, key: Any, read: Callable[[dict[str, Any], Arrays], T]) -> T | None:
    try:
        with zipfile.ZipFile(file) as members:

            def array(name: str, dtype: Any) -> npt.NDArray[Any]:
                content = io.BytesIO(members.read(f"{name}.npy"))  # all of it: then zip checks it
                found: npt.NDArray[Any] = np.lib.format.read_array(content, allow_pickle=False)
                if found.dtype != dtype or found.ndim != 1:
                    raise ValueError(f"{name} has shape {found.shape} and dtype {found.dtype}")
                return found

            about = json.loads(array("about", np.uint8).tobytes())
            return read(about, array) if about["key"] == key else None
    except Exception:  # a damaged file can fail in any of the ways of zipfile, json and NumPy
        _log.debug("A kept file cannot be read, and is made anew", exc_info=True)
        return None


def _remove_unused(folder: PrivateFolder) -> None:
    """Remove the files that nobody has opened for long."""
    for name in folder.names():
        if not name.endswith(_SUFFIX):
            continue
        with contextlib.suppress(OSError):
            with os.fdopen(folder.open(name, os.O_RDONLY), "rb") as file:
                unused = time.time() - os.fstat(file.fileno()).st_mtime
            if unused > _UNUSED_S:
                folder.remove(name)


class FileArrays:
    """Keeps arrays about files, each for as long as its file is as it was.

    ``now`` gives nanoseconds on the clock of the files' file system.  Whatever is wrong costs the making of
    the arrays, and one warning in each process.
    """

    def __init__(self, path: str | os.PathLike[str], *, now: Callable[[], int] = time.time_ns) -> None:
        self.path = Path(path)
        self.now = now
        self._files = KeptFiles(self.path, "Where chunks are is not kept, so each file is asked each time")

    def load(self, status: os.stat_result, about: str) -> list[npt.NDArray[Any]] | None:
        """The arrays of ``about`` that were kept of a file in this state; None where there are none."""

        def read(kept: dict[str, Any], array: Arrays) -> list[npt.NDArray[Any]] | None:
            if kept["state"] != _state(status):
                return None
            return [array(f"array{number}", np.dtype(dtype)) for number, dtype in enumerate(kept["dtypes"])]

        return self._files.load(_key(status, about), read)

    def save(self, status: os.stat_result, about: str, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Keep arrays of one dimension in the place of what was kept of the same file before.

        ``status`` is the file's from before they were made.
        """
        if is_settled(max(status.st_mtime_ns, status.st_ctime_ns), self.now()):
            kept = {"state": _state(status), "dtypes": [array.dtype.str for array in arrays]}
            members = {f"array{number}": array for number, array in enumerate(arrays)}
            self._files.save(_key(status, about), kept, members)


def default_file_arrays() -> FileArrays | None:
    folder = default_folder()
    return None if folder is None else FileArrays(folder)


def _key(status: os.stat_result, about: str) -> list[Any]:
    # Not the whole state: what was kept of the file as it was before is written over.
    return ["arrays", about, status.st_dev, status.st_ino]


def _state(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
