"""Folders as stores: local ones, and what is mounted."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence

from fastpipe.core.files import open_regular
from fastpipe.core.text import printable
from fastpipe.core.types import FetchedObject, StoredObject
from fastpipe.errors import StoreAccessError, StoreBusyError, StoreError
from fastpipe.stage.stores.filesystems import PAGE
from fastpipe.stage.stores.locations import Location
from fastpipe.stage.stores.refusals import changed, silence

__all__ = ["FolderStore"]


class FolderStore:
    """A folder, whose files' keys are their paths below it.  A version is time and size.

    Args:
        location: without a scheme, or ``file://``.
    """

    objects_after = None  # a folder is listed as the file system gives it

    def __init__(self, location: Location) -> None:
        self._location = location
        self._folder = location.bucket if not location.scheme else "/"

    @property
    def name(self) -> str:
        """The folder's path."""
        return self._location.store

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._location,)

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below a prefix."""
        try:
            with os.scandir(self._path(prefix)) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except OSError as error:
            self._check_absent(error, prefix)
            return []

    def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        """All files whose keys begin with a prefix, in pages.  Links to folders are followed."""
        page: list[StoredObject] = []
        try:
            for found in self._walk(prefix[: prefix.rfind("/") + 1], prefix, frozenset()):
                page.append(found)
                if len(page) == PAGE:
                    yield page
                    page = []
        except OSError as error:
            self._check_absent(error, prefix)
        if page:
            yield page

    def find(self, key: str) -> StoredObject:
        """One file, as it would be listed."""
        try:
            status = os.stat(self._path(key))
        except OSError as error:
            raise self._ours(error, key) from error
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(printable(f"{self._location.path(key)} is no file"))
        return StoredObject(key, status.st_size, _version(status))

    def get(self, key: str, version: str = "") -> FetchedObject:
        """A file's whole content."""
        try:
            with open(self._path(key), "rb", buffering=0, opener=_opened) as file:
                data, status = file.read(), os.fstat(file.fileno())
        except OSError as error:
            raise self._ours(error, key) from error
        now = _version(status)
        if version and now != version:
            raise changed(self._location.path(key), self.name)
        if len(data) != status.st_size:
            raise silence(self._location.path(key), self.name, f"{len(data)} bytes of {status.st_size}")
        return FetchedObject(data, now)

    def get_range(self, key: str, start: int, stop: int, version: str = "") -> bytes:
        """A part of a file."""
        try:
            with open(self._path(key), "rb", buffering=0, opener=_opened) as file:
                if version and _version(os.fstat(file.fileno())) != version:
                    raise changed(self._location.path(key), self.name)
                return os.pread(file.fileno(), max(stop - start, 0), start)
        except OSError as error:
            raise self._ours(error, key) from error

    def describe(self) -> str:
        """What reads it, in a word."""
        return "files"

    def close(self) -> None:
        """Nothing is open."""

    def _path(self, key: str) -> str:
        """Of a file; a key that would lead out of the folder has none."""
        if (".." in key and ".." in key.split("/")) or "\0" in key:
            raise FileNotFoundError(printable(key))
        return os.path.join(self._folder, key.lstrip("/"))

    def _walk(self, folder: str, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[StoredObject]:
        """Files below a folder; ``above`` is where links must not lead back to."""
        status = os.stat(self._path(folder))
        here = above | {(status.st_dev, status.st_ino)}
        below = []
        with os.scandir(self._path(folder)) as entries:
            for entry in entries:
                key = f"{folder}{entry.name}"
                if not key.startswith(prefix) and not prefix.startswith(f"{key}/"):
                    continue
                if entry.is_dir():
                    below.append(key)
                elif entry.is_file():
                    found = entry.stat()
                    yield StoredObject(key, found.st_size, _version(found))
        for key in sorted(below):
            status = os.stat(self._path(key))
            if (status.st_dev, status.st_ino) not in here:
                yield from self._walk(f"{key}/", prefix, here)

    def _check_absent(self, error: OSError, prefix: str) -> None:
        """Below what is not there, or is a file, nothing is found; but the store itself must be there."""
        absent = isinstance(error, (FileNotFoundError, NotADirectoryError))
        if not absent or not os.path.isdir(self._folder):
            raise self._ours(error, prefix) from error

    def _ours(self, error: OSError, key: str) -> OSError:
        path = self._location.path(key)
        if isinstance(error, StoreError):
            return error
        if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            if key and not key.endswith("/") and not _has_anything(self._folder):  # an object was listed
                where = f"the folder {self._folder!r} is empty, or not there"
                return StoreError(f"{path} is not there: {where}. Is it still mounted?")
            return FileNotFoundError(printable(f"{path} is not there: it was removed since it was listed"))
        if isinstance(error, PermissionError):
            return StoreAccessError(f"{path} may not be read by this user ({error.strerror})")
        if isinstance(error, (TimeoutError, InterruptedError, ConnectionError)):
            return StoreBusyError(f"{path}: {error.strerror}")
        return StoreError(f"{path}: {error.strerror or error}")


def _opened(path: str, flags: int) -> int:
    return open_regular(path, flags, follows=True)


def _has_anything(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except OSError:
        return False


def _version(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns}-{status.st_size}"
