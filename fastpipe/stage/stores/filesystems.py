"""Stores by fsspec: whatever it has a file system for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from fastpipe.core.extras import require
from fastpipe.core.types import FetchedObject, StoredObject
from fastpipe.errors import FastpipeError, MissingDependencyError, OptionError, StoreAccessError, StoreError
from fastpipe.stage.stores.locations import Location
from fastpipe.stage.stores.processes import PerProcess
from fastpipe.stage.stores.refusals import changed, missing, refusal, silence
from fastpipe.stage.stores.secrets import StorageOptions

__all__ = ["PAGE", "FilesystemStore", "answered", "translated"]

PAGE = 1000
# What file systems call what changes with an object; the first that one has is taken.
_VERSIONS = (
    "ETag", "etag", "e_tag", "generation", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified",
    "updated", "modified", "created",
)  # fmt: skip
# Those that answer without a request.
_NEAR = ("memory", "file", "local")


class FilesystemStore:
    """A store by a file system of fsspec's.

    A version is what the file system has for one (ETag, modification time …) and the size; of an object that
    is far away only the size is compared, since asking for more would be one more request for each object.

    Args:
        location: which.
        options: the file system's.
    """

    objects_after = None  # fsspec has no such list

    def __init__(self, location: Location, options: StorageOptions) -> None:
        self._location, self._options = location, options
        self._opened: PerProcess[tuple[Any, str]] = PerProcess(self._open)

    @property
    def name(self) -> str:
        """The URL of its beginning."""
        return self._location.store

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self._options!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._location, self._options)

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below a prefix."""
        fs, base = self._opened.get()
        path = self._location.path(prefix)
        with translated(path, self.name, self._options):
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
        """All objects whose keys begin with a prefix, in pages."""
        fs, base = self._opened.get()
        folder = prefix[: prefix.rfind("/") + 1]
        path = self._location.path(prefix)
        with translated(path, self.name, self._options):
            found = fs.find(f"{base}{folder}".rstrip("/") or base, detail=True)
            page = []
            for name, details in found.items():
                key = _key(name, base)
                if key.startswith(prefix) and not key.endswith("/"):
                    page.append(self._listed(fs, name, key, details))
        for start in range(0, len(page), PAGE):
            yield page[start : start + PAGE]

    def find(self, key: str) -> StoredObject:
        """One object, as it would be listed."""
        fs, base = self._opened.get()
        with translated(self._location.path(key), self.name, self._options):
            details = fs.info(f"{base}{key}")
            if details.get("type") == "directory":
                raise FileNotFoundError(key)
            return self._listed(fs, f"{base}{key}", key, details)

    def get(self, key: str, version: str = "") -> FetchedObject:
        """An object's whole content."""
        fs, base = self._opened.get()
        path = self._location.path(key)
        with translated(path, self.name, self._options):
            data = bytes(fs.cat_file(f"{base}{key}"))
            near = self._location.scheme in _NEAR
            now = _version(fs.info(f"{base}{key}")) if near or _misses(version, len(data)) else version
        if version and now != version:
            raise changed(path, self.name)
        if _misses(now, len(data)):
            raise silence(path, self.name, f"{len(data)} bytes of {now.rpartition('-')[2]}")
        return FetchedObject(data, now)

    def get_range(self, key: str, start: int, stop: int, version: str = "") -> bytes:
        """A part of an object."""
        fs, base = self._opened.get()
        path = self._location.path(key)
        with translated(path, self.name, self._options):
            if version and self._location.scheme in _NEAR and _version(fs.info(f"{base}{key}")) != version:
                raise changed(path, self.name)
            return bytes(fs.cat_file(f"{base}{key}", start=start, end=stop)) if stop > start else b""

    def describe(self) -> str:
        """What reads it, in a word."""
        return "fsspec"

    def close(self) -> None:
        """Forget the file system."""
        self._opened.drop()

    def _open(self) -> tuple[Any, str]:
        """The file system, and what it puts before keys.  Its lists are not kept, nor is it itself for
        others: who asks a second time wants to see what is there now."""
        self._options.require(self._location.store)
        fsspec = require("fsspec", extra="s3")
        options = {**self._options, "use_listings_cache": False, "skip_instance_cache": True}
        with translated(self._location.store, self.name, self._options):
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


class translated:  # noqa: N801 - used as a statement
    """Raises what a file system raises as the errors of ``protocols.Store``, without secrets.

    Args:
        path: what is asked for.
        at: the store, in words.
        options: with its secrets.
    """

    def __init__(self, path: str, at: str, options: StorageOptions) -> None:
        self._path, self._at, self._options = path, at, options

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, FastpipeError):
            raise self._as_ours(error) from None

    def _as_ours(self, error: Exception) -> Exception:
        status, code = answered(error)
        if status or code:
            return refusal(self._path, self._at, status, code)
        said = self._options.hide(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
        if _is_silence(error):  # which fsspec's HTTP takes for a missing file
            return silence(self._path, self._at, said)
        if isinstance(error, (FileNotFoundError, UnicodeEncodeError, NotADirectoryError, IsADirectoryError)):
            return missing(self._path, self._at)
        if isinstance(error, ImportError):
            return MissingDependencyError(f"{self._path} needs a package: {said}")
        if isinstance(error, PermissionError) or _is_a(error, *_NO_CREDENTIALS):
            return StoreAccessError(f"{self._path}: {said}. Pass credentials as storage_options=…")
        if isinstance(error, TypeError):  # of a client that does not take an option
            return OptionError(f"{self._path} with storage_options={self._options!r}: {said}")
        if isinstance(error, (OSError, ValueError)) or type(error).__module__ != "builtins":
            return StoreError(f"{self._path}: {said}. See to the URL and to storage_options")
        return error


_NO_CREDENTIALS = (
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError", "SSOError",
    "CredentialRetrievalError", "GoogleAuthError", "ClientAuthenticationError",
)  # fmt: skip


def answered(error: BaseException) -> tuple[int, str]:
    """Status and code of an answer of HTTP, as botocore, aiohttp, Google's and Azure's clients have them."""
    for one in (error, error.__cause__):
        if _is_a(one, "HttpProcessingError") or _is_a(getattr(one, "__cause__", None), "HttpProcessingError"):
            return 0, ""  # aiohttp's word for what it cannot read, with a status of its own
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
    """Whether the connection failed, and not the request.  The clients that are under fsspec's file systems
    have errors of their own for that, known by the names of their bases."""
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
    """Of what a file system calls an object.  Some of them write a slash before it, and some do not."""
    return name[len(base) :] if name.startswith(base) else name.lstrip("/")[len(base.lstrip("/")) :]


def _version(details: Mapping[str, Any]) -> str:
    """Empty where a file system has none."""
    found = next((details[name] for name in _VERSIONS if details.get(name)), None)
    if isinstance(found, datetime):  # also where a list has seconds
        found = found.timestamp()
    return "" if found is None else f"{found}-{details.get('size')}"


def _misses(version: str, size: int) -> bool:
    """Whether a version says that an object has another size."""
    said = version.rpartition("-")[2]
    return said.isdecimal() and int(said) != size
