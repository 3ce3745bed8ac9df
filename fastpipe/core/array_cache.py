"""A cache for arrays that are expensive to compute, in files of a private folder.

Each file is an ``.npz`` archive of NumPy.  One array of the archive contains a text in JSON.  The checksums
of the zip format protect all arrays.  After an error in a file or folder, the arrays are computed again.
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
# A function that returns a one-dimensional array for the array's name and dtype.
Arrays = Callable[[str, Any], npt.NDArray[Any]]

_log = logging.getLogger("fastpipe.index")

_SUFFIX = ".npz"
_UNUSED_S = 90 * 86400.0
_warned: set[tuple[Path, str]] = set()


class KeptFiles:
    """Saves arrays under keys, in cache files of a private folder.

    Several objects of this class may share the folder.  The first write creates the folder.  If the folder
    cannot be used, each process logs ``warning`` once, with the reason.
    """

    def __init__(self, path: Path, warning: str) -> None:
        self.path = path
        self._warning = warning

    def load(self, key: Any, read: Callable[[dict[str, Any], Arrays], T]) -> T | None:
        """Return the result of ``read`` for the data saved with ``key``.

        Return None if no data are saved, or if the file is damaged.  ``read`` gets the dict ``about`` that
        was saved, and a function that returns the arrays.  An error of ``read`` means a damaged file.
        """
        if not os.path.lexists(self.path):
            return None
        try:
            with PrivateFolder(self.path) as folder:
                descriptor = folder.open(_file_name(key), os.O_RDONLY)
                with os.fdopen(descriptor, "rb") as file:
                    with contextlib.suppress(OSError):
                        os.utime(file.fileno())  # marks the file as in use
                    return _read(file, key, read)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error)
            return None

    def save(self, key: Any, about: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Save one-dimensional arrays, and the dict ``about`` as JSON.  Replace earlier data of ``key``."""
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
    """Return fastpipe's index folder in the user's cache folder.

    Return None for a user without a home folder, and on systems where folders cannot be private.
    """
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
                content = io.BytesIO(members.read(f"{name}.npy"))  # read completely, so that zip checks it
                found: npt.NDArray[Any] = np.lib.format.read_array(content, allow_pickle=False)
                if found.dtype != dtype or found.ndim != 1:
                    raise ValueError(f"{name} has shape {found.shape} and dtype {found.dtype}")
                return found

            about = json.loads(array("about", np.uint8).tobytes())
            return read(about, array) if about["key"] == key else None
    except Exception:  # a damaged file can cause any error of zipfile, json and NumPy
        _log.debug("A kept file cannot be read, and is made anew", exc_info=True)
        return None


def _remove_unused(folder: PrivateFolder) -> None:
    """Remove the files that no process has opened for a long time."""
    for name in folder.names():
        if not name.endswith(_SUFFIX):
            continue
        with contextlib.suppress(OSError):
            with os.fdopen(folder.open(name, os.O_RDONLY), "rb") as file:
                unused = time.time() - os.fstat(file.fileno()).st_mtime
            if unused > _UNUSED_S:
                folder.remove(name)


class FileArrays:
    """A cache for arrays that were computed from files.  A file's arrays are valid until the file changes.

    ``now`` returns the current time on the clock of the files' file system, in nanoseconds.  After an error
    the arrays are computed again, and each process logs one warning.
    """

    def __init__(self, path: str | os.PathLike[str], *, now: Callable[[], int] = time.time_ns) -> None:
        self.path = Path(path)
        self.now = now
        self._files = KeptFiles(self.path, "Where chunks are is not kept, so each file is asked each time")

    def load(self, status: os.stat_result, about: str) -> list[npt.NDArray[Any]] | None:
        """Return the arrays that were saved for a file with ``status`` under the name ``about``, or None."""

        def read(kept: dict[str, Any], array: Arrays) -> list[npt.NDArray[Any]] | None:
            if kept["state"] != _state(status):
                return None
            return [array(f"array{number}", np.dtype(dtype)) for number, dtype in enumerate(kept["dtypes"])]

        return self._files.load(_key(status, about), read)

    def save(self, status: os.stat_result, about: str, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Save one-dimensional arrays of a file under the name ``about``, in place of earlier arrays.

        ``status`` is the file's status before the arrays were computed.
        """
        if is_settled(max(status.st_mtime_ns, status.st_ctime_ns), self.now()):
            kept = {"state": _state(status), "dtypes": [array.dtype.str for array in arrays]}
            members = {f"array{number}": array for number, array in enumerate(arrays)}
            self._files.save(_key(status, about), kept, members)


def default_file_arrays() -> FileArrays | None:
    folder = default_folder()
    return None if folder is None else FileArrays(folder)


def _key(status: os.stat_result, about: str) -> list[Any]:
    # The key does not include the file's state, so the arrays of a former state are overwritten.
    return ["arrays", about, status.st_dev, status.st_ino]


def _state(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
