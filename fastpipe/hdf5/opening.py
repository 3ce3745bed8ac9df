"""HDF5 files as the library opens them, and what its errors say about a file."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

from fastpipe.core.bad_samples import is_of_machine
from fastpipe.core.extras import require
from fastpipe.core.files import hdf5_signature, is_hdf5, open_file, retrying_open
from fastpipe.errors import FastpipeError, HDF5Error
from fastpipe.hdf5.library import missing_filter_error, missing_filters

__all__ = ["library_errors", "open_library", "opened"]

# The flags of a superblock of version 3: a process has the file open for writing, and others may read it
# meanwhile (SWMR).  Superblocks of other versions have no such flags.
_FLAGS_VERSION, _WRITE, _SWMR = 3, 1, 4

# The errors that h5py raises about a file: the classes of its own table, and those of NumPy and Python about
# the values that it hands them.
_OF_LIBRARY = (ArithmeticError, KeyError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
_NO_FILTER = ("can't open directory", "can't find plugin", "plugins disabled", "is not registered")
_NO_MEMORY = ("memory allocation failed", "unable to allocate", "no space available for allocation")
_NO_OTHER_FILE = "external raw data file"


@contextmanager
def opened(path: str, shown: str = "") -> Iterator[Any]:
    """An open ``h5py.File``; see ``open_library``."""
    with open_library(path, shown) as file:
        yield file


def open_library(path: str, shown: str = "", **options: Any) -> Any:
    """Open a file for reading by the HDF5 library; in SWMR mode if the file says that it is written so.

    Args:
        path: the file.
        shown: what messages call it, if that is not its path.
        options: of ``h5py.File``.

    Returns:
        The ``h5py.File``.

    Raises:
        FileNotFoundError, PermissionError: as ``open`` raises them.
        HDF5Error: it is no HDF5 file, is damaged, or is open for writing; the message says what to do.
    """
    h5py = require("h5py", extra="hdf5")
    os.close(open_file(path))  # its errors are clearer than the library's
    try:
        try:
            file = retrying_open(h5py.File, path, "r", **options)
        except OSError:
            if not _is_written_by_swmr(path):
                raise
            file = retrying_open(h5py.File, path, "r", swmr=True, **options)
    except _OF_LIBRARY as error:
        raise _why_not_opened(error, path, shown or path) from error
    if file.mode != "r" and not file.swmr_mode:  # the library hands out the file as it is open already
        file.close()
        raise HDF5Error(f"{shown or path} is open for writing in this process: close it before it is read")
    return file


def _flags(path: str) -> int:
    """Return the flags in which a writer notes that it has a file open; 0 if the file has none."""
    at = hdf5_signature(path)
    if at is None:
        return 0
    with open(path, "rb", opener=open_file) as file:
        file.seek(at + 8)
        about = file.read(4)
    return about[3] if len(about) == 4 and about[0] == _FLAGS_VERSION else 0


def _is_written_by_swmr(path: str) -> bool:
    return _flags(path) & (_WRITE | _SWMR) == _WRITE | _SWMR


def _why_not_opened(error: Exception, path: str, shown: str) -> Exception:
    """Return the error for a file that the library does not open."""
    text, number = str(error), getattr(error, "errno", None)
    if "lock file" in text:
        if number in (errno.EAGAIN, errno.EACCES):
            return HDF5Error(
                f"{shown} is open for writing elsewhere: close it there, or set HDF5_USE_FILE_LOCKING=FALSE "
                "if nobody writes to it any more"
            )
        return HDF5Error(
            f"{shown} cannot be locked ({text}): if its file system has no locks, set "
            "HDF5_USE_FILE_LOCKING=FALSE"
        )
    if number is not None or isinstance(error, FastpipeError):
        return _with_place(error, shown)
    if _flags(path):
        return HDF5Error(
            f"{shown} is marked as open for writing: wait until its writer has closed it; or, if that was "
            "killed and no process writes to it any more, remove the mark with  h5clear -s FILE"
        )
    if not is_hdf5(path):
        return HDF5Error(f"{shown} is no HDF5 file")
    if "truncated file" in text:
        return HDF5Error(f"{shown} cannot be opened, it may be cut off: {text}")
    version = require("h5py", extra="hdf5").version.hdf5_version
    return HDF5Error(
        f"{shown} cannot be opened: {text}; it may be damaged, or need a newer HDF5 library than {version}"
    )


@contextmanager
def library_errors(where: str, damaged: type[HDF5Error] = HDF5Error, dataset: Any = None) -> Iterator[None]:
    """Turn what h5py raises about a file into errors that name it.

    Errors that are raised elsewhere are passed on as they are.  Errors of the machine, missing files and
    missing permissions keep their type.

    Args:
        where: what the message names: the file, and perhaps a dataset.
        damaged: the error that means damage.
        dataset: the ``h5py.Dataset`` that is read, if it is one: if the library has not all of its filters,
            that is the error.

    Raises:
        HDF5Error, MissingDependencyError: h5py raised an error.
    """
    try:
        yield
    except _OF_LIBRARY as error:
        if isinstance(error, FastpipeError) or not _is_raised_by_h5py(error):
            raise
        raise _meaning(error, where, damaged, dataset) from error


def _meaning(error: Exception, where: str, damaged: type[HDF5Error], dataset: Any) -> Exception:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    is_elsewhere = isinstance(error, (FileNotFoundError, PermissionError))
    if is_elsewhere or (is_of_machine(error) and isinstance(error, OSError)):
        return _with_place(error, where)
    if isinstance(error, MemoryError) or any(words in text.lower() for words in _NO_MEMORY):
        return HDF5Error(f"{where} cannot be read: it says that it takes more memory than there is ({text})")
    if _NO_OTHER_FILE in text:
        return HDF5Error(f"{where}: its values are in another file, which cannot be opened ({text})")
    steps = missing_filters(dataset) if dataset is not None and isinstance(error, OSError) else []
    if steps or any(words in text for words in _NO_FILTER):
        return missing_filter_error(where, steps[0] if steps else None)
    return damaged(f"{where} cannot be read, it may be damaged: {text}; restore it from a copy")


def _with_place(error: Exception, where: str) -> Exception:
    """Return an error of the system with the file's name; others as they are."""
    if not isinstance(error, OSError) or error.errno is None:
        return error
    return OSError(error.errno, f"{where}: {error.strerror}")


def _is_raised_by_h5py(error: BaseException) -> bool:
    names = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    called = itertools.takewhile(lambda name: name.partition(".")[0] != "fastpipe", reversed(names))
    return any(name.partition(".")[0] == "h5py" for name in called)
