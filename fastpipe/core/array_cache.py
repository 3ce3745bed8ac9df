"""Arrays that cost time to find, kept in files of a folder that is the user's alone.

Each file is an archive of arrays as NumPy writes them; zip's checksums guard all of it.  Whatever
is wrong with a file, or with the folder, costs what is kept there and never more.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from fastpipe.core.file_identity import is_settled
from fastpipe.core.private_folder import PrivateFolder, user_cache_folder

T = TypeVar("T")

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

    def load(self, key: object, read: Callable[[zipfile.ZipFile], T | None]) -> T | None:
        """What ``read`` makes of a file; None where there is none, or it is damaged.

        Args:
            key: names the file; anything that JSON can hold.
            read: gets the archive; what it raises is damage.
        """
        if not os.path.lexists(self.path):
            return None
        try:
            with PrivateFolder(self.path) as folder:
                descriptor = folder.open(_file_name(key), os.O_RDONLY)
                with os.fdopen(descriptor, "rb") as file:
                    with contextlib.suppress(OSError):
                        os.utime(file.fileno())  # in use: not to be removed
                    return _read(file, read)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error)
            return None

    def save(self, key: object, write: Callable[[BinaryIO], object]) -> None:
        """Write a file, in the place of the one with the same key."""
        try:
            with PrivateFolder(self.path) as folder:
                folder.write(_file_name(key), write)
                _remove_unused(folder)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if (self.path, self._warning) not in _warned:
            _warned.add((self.path, self._warning))
            _log.warning("%s: %s", self._warning, error)


def default_folder() -> Path | None:
    """The folder in the user's own cache folder; None for a user without a home, and on systems whose
    folders cannot be closed to others.
    """
    if not hasattr(os, "geteuid"):
        return None
    path = user_cache_folder() / "index"
    return path if path.is_absolute() else None


def member(members: zipfile.ZipFile, name: str, dtype: Any) -> npt.NDArray[Any]:
    """One array of the file.  Reading all of its bytes first is what makes zip check them."""
    content = io.BytesIO(members.read(f"{name}.npy"))
    array: npt.NDArray[Any] = np.lib.format.read_array(content, allow_pickle=False)
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape} and dtype {array.dtype}")
    return array


def _file_name(key: object) -> str:
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32] + _SUFFIX


def _read(file: BinaryIO, read: Callable[[zipfile.ZipFile], T | None]) -> T | None:
    try:
        with zipfile.ZipFile(file) as members:
            return read(members)
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


# ----------------------------------------------------------------------------------------------------
# Arrays that were made of a file at some cost, kept on disk for as long as the file is as it was.

_VERSION = 1


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
        return self._files.load(
            _named(status, about), lambda members: _read_arrays(members, _key(status, about))
        )

    def save(self, status: os.stat_result, about: str, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Keep arrays of one dimension in the place of what was kept of the same file before.

        ``status`` is the file's from before they were made.
        """
        if not is_settled(max(status.st_mtime_ns, status.st_ctime_ns), self.now()):
            return
        key = _key(status, about)
        self._files.save(_named(status, about), lambda file: _write(file, key, arrays))


def default_file_arrays() -> FileArrays | None:
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


def _read_arrays(members: zipfile.ZipFile, key: list[Any]) -> list[npt.NDArray[Any]] | None:
    about = json.loads(member(members, "about", np.dtype(np.uint8)).tobytes())
    if about["key"] != key:
        return None
    return [
        member(members, f"array{number}", np.dtype(dtype)) for number, dtype in enumerate(about["dtypes"])
    ]
