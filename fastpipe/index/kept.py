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
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from fastpipe._private_folder import PrivateFolder, user_cache_folder

__all__ = ["KeptFiles", "default_folder", "member"]

T = TypeVar("T")

_log = logging.getLogger("fastpipe.index")

_SUFFIX = ".npz"
_UNUSED_S = 90 * 86400.0
_warned: set[tuple[Path, str]] = set()


class KeptFiles:
    """The files of one kind in a folder, which other kinds may share.

    Args:
        path: the folder.  It is made when the first file is written.
        warning: what a folder that cannot be used costs; logged once in each process, with the reason.
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
    folders cannot be closed to others."""
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
