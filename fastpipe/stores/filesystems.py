"""Stores for local folders and for every file system of fsspec."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from fastpipe.core.extras import require
from fastpipe.core.files import open_file
from fastpipe.core.text import printable
from fastpipe.core.types import FetchedObject, StoredObject
from fastpipe.errors import (
    FastpipeError,
    MissingDependencyError,
    OptionError,
    StoreAccessError,
    StoreBusyError,
    StoreError,
)
from fastpipe.stores.clients import PerProcess, StorageOptions, answer_error, changed, missing, no_answer
from fastpipe.stores.locations import Location

PAGE = 1000
# Names that file systems use for a value that changes with an object.  The first existing name is used.
_VERSIONS = (
    "ETag", "etag", "e_tag", "generation", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified",
    "updated", "modified", "created",
)  # fmt: skip
# The schemes of file systems that return an object's state without a request.
_NEAR = ("memory", "file", "local")


class FilesystemStore:
    """A ``core.types.Store`` on a file system of fsspec.

    An object's version consists of a value of the file system (ETag, modification time …) and the size.  For
    a remote object, ``get`` compares only the size, because comparing the value would take another request.
    """

    objects_after = None  # fsspec cannot begin a listing after a key

    def __init__(self, location: Location, options: StorageOptions) -> None:
        self._location, self._options = location, options
        self._opened: PerProcess[tuple[Any, str]] = PerProcess(self._open)

    @property
    def name(self) -> str:
        return self._location.store

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self._options!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._location, self._options)

    def folders(self, prefix: str) -> list[str]:
        fs, base = self._opened.get()
        path = self._location.path(prefix)
        with store_errors(path, self.name, self._options):
            try:
                found = fs.ls(f"{base}{prefix}".rstrip("/") or base, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                if not prefix:
                    raise
                return []
        keys = (_key(entry["name"], base) for entry in found if entry["type"] == "directory")
        names = {key.rstrip("/")[len(prefix) :] for key in keys if key.startswith(prefix)}
        return sorted(names - {""})

    def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        fs, base = self._opened.get()
        folder = prefix[: prefix.rfind("/") + 1]
        path = self._location.path(prefix)
        with store_errors(path, self.name, self._options):
            found = fs.find(f"{base}{folder}".rstrip("/") or base, detail=True)
            page = []
            for name, details in found.items():
                key = _key(name, base)
                if key.startswith(prefix) and not key.endswith("/"):
                    page.append(self._listed(fs, name, key, details))
        for start in range(0, len(page), PAGE):
            yield page[start : start + PAGE]

    def find(self, key: str) -> StoredObject:
        fs, base = self._opened.get()
        with store_errors(self._location.path(key), self.name, self._options):
            details = fs.info(f"{base}{key}")
            if details.get("type") == "directory":
                raise FileNotFoundError(key)
            return self._listed(fs, f"{base}{key}", key, details)

    def get(self, key: str, version: str = "") -> FetchedObject:
        fs, base = self._opened.get()
        path = self._location.path(key)
        with store_errors(path, self.name, self._options):
            data = bytes(fs.cat_file(f"{base}{key}"))
            near = self._location.scheme in _NEAR
            now = _version(fs.info(f"{base}{key}")) if near or _misses(version, len(data)) else version
        if version and now != version:
            raise changed(path, self.name)
        if _misses(now, len(data)):
            raise no_answer(path, self.name, f"{len(data)} bytes of {now.rpartition('-')[2]}")
        return FetchedObject(data, now)

    def get_range(self, key: str, start: int, stop: int, version: str = "") -> bytes:
        fs, base = self._opened.get()
        path = self._location.path(key)
        with store_errors(path, self.name, self._options):
            if version and self._location.scheme in _NEAR and _version(fs.info(f"{base}{key}")) != version:
                raise changed(path, self.name)
            return bytes(fs.cat_file(f"{base}{key}", start=start, end=stop)) if stop > start else b""

    def describe(self) -> str:
        return "fsspec"

    def close(self) -> None:
        self._opened.drop()

    def _open(self) -> tuple[Any, str]:
        """Open the file system without caches.  Return it, and the prefix that it needs before keys."""
        self._options.require(self._location.store)
        fsspec = require("fsspec", extra="s3")
        options = {**self._options, "use_listings_cache": False, "skip_instance_cache": True}
        with store_errors(self._location.store, self.name, self._options):
            try:
                fs, base = fsspec.core.url_to_fs(self._location.store, **options)
            except ImportError as error:
                said = self._options.hide(str(error))
                raise MissingDependencyError(f"{self._location.store} needs a package: {said}") from None
            except (TypeError, ValueError) as error:
                said = self._options.hide(str(error))
                raise OptionError(
                    f"{self._location.store} with storage_options={self._options!r}: {said}"
                ) from None
        return fs, base if base.endswith("/") else f"{base}/"

    def _listed(self, fs: Any, name: str, key: str, details: Mapping[str, Any]) -> StoredObject:
        if details.get("size") is None:
            details = fs.info(name)
        if details.get("size") is None:
            raise StoreError(f"{self._location.path(key)}: {self.name} does not tell how large it is")
        return StoredObject(key, int(details["size"]), _version(details))


@contextmanager
def store_errors(path: str, at: str, options: StorageOptions) -> Iterator[None]:
    """Convert a file system's errors to the errors of ``core.types.Store``, and hide secrets."""
    try:
        yield
    except FastpipeError:
        raise
    except Exception as error:
        raise _as_ours(error, path, at, options) from None


def _as_ours(error: Exception, path: str, at: str, options: StorageOptions) -> Exception:
    status, code = answered(error)
    if status or code:
        return answer_error(path, at, status, code)
    said = options.hide(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
    if _is_silence(error):  # tested first: fsspec's HTTP reports a failed connection as a missing file
        return no_answer(path, at, said)
    if isinstance(error, (FileNotFoundError, UnicodeEncodeError, NotADirectoryError, IsADirectoryError)):
        return missing(path, at)
    if isinstance(error, ImportError):
        return MissingDependencyError(f"{path} needs a package: {said}")
    if isinstance(error, PermissionError) or _is_a(error, *_NO_CREDENTIALS):
        return StoreAccessError(f"{path}: {said}. Pass credentials as storage_options=…")
    if isinstance(error, TypeError):  # an option that the client does not accept
        return OptionError(f"{path} with storage_options={options!r}: {said}")
    if isinstance(error, (OSError, ValueError)) or type(error).__module__ != "builtins":
        return StoreError(f"{path}: {said}. See to the URL and to storage_options")
    return error


_NO_CREDENTIALS = (
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError", "SSOError",
    "CredentialRetrievalError", "GoogleAuthError", "ClientAuthenticationError",
)  # fmt: skip


def answered(error: BaseException) -> tuple[int, str]:
    """Return the HTTP status and the error code from an error of botocore, aiohttp, Google or Azure."""
    for one in (error, error.__cause__):
        if _is_a(one, "HttpProcessingError") or _is_a(getattr(one, "__cause__", None), "HttpProcessingError"):
            return 0, ""  # aiohttp raises this for an unreadable answer, with a status of its own choice
        response = getattr(one, "response", None)
        if isinstance(response, Mapping):  # botocore's ClientError
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = str(response.get("Error", {}).get("Code", ""))
            return int(status), "" if code.isdecimal() else code
        for name in ("status", "status_code", "code"):
            status = getattr(one, name, None)
            if isinstance(status, int) and 300 <= status < 600:
                return status, ""
    return 0, ""


def _is_silence(error: BaseException | None) -> bool:
    """Return whether an error means that the connection failed.  The errors are compared by name, because
    each client has its own classes."""
    while error is not None:
        if isinstance(error, (ConnectionError, TimeoutError, asyncio.TimeoutError)):
            return True
        if _is_a(error, *_SILENT):
            return True
        error = error.__cause__
    return False


def _is_a(error: object, *names: str) -> bool:
    return any(base.__name__ in names for base in type(error).__mro__)


_SILENT = (
    "ConnectionError", "FSTimeoutError", "ClientConnectionError", "ClientPayloadError", "HTTPClientError",
    "IncompleteReadError", "ResponseStreamingError", "ServiceRequestError", "ServiceResponseError",
    "ResponseParserError", "IncompleteRead", "HttpProcessingError", "FlexibleChecksumError",
)  # fmt: skip


def _key(name: str, base: str) -> str:
    """Return an object's key from its name in a file system.  The name may begin with a slash."""
    return name[len(base) :] if name.startswith(base) else name.lstrip("/")[len(base.lstrip("/")) :]


def _version(details: Mapping[str, Any]) -> str:
    """Return an object's version; empty if the file system has none."""
    found = next((details[name] for name in _VERSIONS if details.get(name)), None)
    if isinstance(found, datetime):  # with or without fractions of a second
        found = found.timestamp()
    return "" if found is None else f"{found}-{details.get('size')}"


def _misses(version: str, size: int) -> bool:
    """Return whether ``version`` contains another size than ``size``."""
    said = version.rpartition("-")[2]
    return said.isdecimal() and int(said) != size


class FolderStore:
    """A ``core.types.Store`` of a folder.  Keys are paths relative to the folder.  A file's version consists
    of its modification time and size."""

    objects_after = None  # the file system decides the order of a listing, so it cannot begin after a key

    def __init__(self, location: Location) -> None:
        self._location = location
        self._folder = location.bucket if not location.scheme else "/"

    @property
    def name(self) -> str:
        return self._location.store

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._location,)

    def folders(self, prefix: str) -> list[str]:
        try:
            with os.scandir(self._path(prefix)) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except OSError as error:
            self._check_absent(error, prefix)
            return []

    def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        """Yield the files whose keys begin with ``prefix``, page by page.  Links to folders are followed."""
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
        try:
            status = os.stat(self._path(key))
        except OSError as error:
            raise self._ours(error, key) from error
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(printable(f"{self._location.path(key)} is no file"))
        return StoredObject(key, status.st_size, _state_of(status))

    def get(self, key: str, version: str = "") -> FetchedObject:
        try:
            with open(self._path(key), "rb", buffering=0, opener=open_file) as file:
                data, status = file.read(), os.fstat(file.fileno())
        except OSError as error:
            raise self._ours(error, key) from error
        now = _state_of(status)
        if version and now != version:
            raise changed(self._location.path(key), self.name)
        if len(data) != status.st_size:
            raise no_answer(self._location.path(key), self.name, f"{len(data)} bytes of {status.st_size}")
        return FetchedObject(data, now)

    def get_range(self, key: str, start: int, stop: int, version: str = "") -> bytes:
        try:
            with open(self._path(key), "rb", buffering=0, opener=open_file) as file:
                if version and _state_of(os.fstat(file.fileno())) != version:
                    raise changed(self._location.path(key), self.name)
                return os.pread(file.fileno(), max(stop - start, 0), start)
        except OSError as error:
            raise self._ours(error, key) from error

    def describe(self) -> str:
        return "files"

    def close(self) -> None:
        pass

    def _path(self, key: str) -> str:
        if (".." in key and ".." in key.split("/")) or "\0" in key:
            raise FileNotFoundError(printable(key))
        return os.path.join(self._folder, key.lstrip("/"))

    def _walk(self, folder: str, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[StoredObject]:
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
                    yield StoredObject(key, found.st_size, _state_of(found))
        for key in sorted(below):
            status = os.stat(self._path(key))
            if (status.st_dev, status.st_ino) not in here:
                yield from self._walk(f"{key}/", prefix, here)

    def _check_absent(self, error: OSError, prefix: str) -> None:
        """Raise an error unless ``error`` only means that a folder inside the store is missing."""
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
            was_listed = key and not key.endswith("/")
            why = ": it was removed since it was listed" if was_listed else ""
            return FileNotFoundError(printable(f"{path} is not there{why}"))
        if isinstance(error, PermissionError):
            return StoreAccessError(f"{path} may not be read by this user ({error.strerror})")
        if isinstance(error, (TimeoutError, InterruptedError, ConnectionError)):
            return StoreBusyError(f"{path}: {error.strerror}")
        return StoreError(f"{path}: {error.strerror or error}")


def _has_anything(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except OSError:
        return False


def _state_of(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns}-{status.st_size}"
