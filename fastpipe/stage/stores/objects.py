"""Buckets of S3 by obstore: requests and lists are made without the GIL."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from fastpipe.core.extras import require
from fastpipe.core.types import FetchedObject, StoredObject
from fastpipe.errors import FastpipeError, OptionError, StoreAccessError, StoreError
from fastpipe.stage.stores.locations import Location
from fastpipe.stage.stores.processes import PerProcess, may_use_obstore
from fastpipe.stage.stores.refusals import changed, missing, refusal, silence
from fastpipe.stage.stores.s3_options import S3Settings
from fastpipe.stage.stores.s3fs_objects import S3fsStore, first_of, s3_name
from fastpipe.stage.stores.secrets import StorageOptions

__all__ = ["ObjectStore"]

_PAGE = 1000
_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})")
_AFTER_THE_END = "416"
_CODE = re.compile(r"<Code>(\w+)</Code>")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_URL = re.compile(r"\S+://\S+")


class ObjectStore:
    """A bucket, by obstore's client.

    What obstore cannot do goes through s3fs: keys that are no paths for it (``../x``, ``a//b``), lists that
    have such keys, and everything in a process that was forked from one in which obstore was used.

    Args:
        location: which.
        options: as s3fs takes them.
    """

    def __init__(self, location: Location, options: StorageOptions) -> None:
        self._location, self._options = location, options
        self._settings = S3Settings.of(options)
        self._plain = S3fsStore(location, options)
        self.name = s3_name(location, self._settings)
        self._opened: PerProcess[Any] = PerProcess(self._open)
        self._obstore: Any = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self._options!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._location, self._options)

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below a prefix."""
        if not self._can_list(prefix):
            return self._plain.folders(prefix)
        store = self._opened.get()
        try:
            found = self._obstore.list_with_delimiter(store, prefix or None)["common_prefixes"]
        except Exception as error:
            if _is_odd(error):
                return self._plain.folders(prefix)
            raise self._ours(error, prefix) from None
        return sorted({one[len(prefix) :] for one in found} - {""})

    def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        """All objects whose keys begin with a prefix, in pages."""
        return self.objects_after(prefix, "")

    def objects_after(self, prefix: str, after: str) -> Iterator[Sequence[StoredObject]]:
        """Those of them that come after a key."""
        # Without a prefix the key "/x" would be listed as "x".
        if not prefix or not self._can_list(prefix):
            yield from self._plain.objects_after(prefix, after)
            return
        try:
            store = self._opened.get()
            empty: set[str] = set()
            pages = iter(self._obstore.list(store, prefix, offset=after or None, chunk_size=_PAGE))
            while (page := next(pages, None)) is not None:
                if found := self._listed(store, prefix, page, empty):
                    yield found
                    after = found[-1].key
            return
        except Exception as error:
            if not _is_odd(error):
                raise self._ours(error, prefix) from None
        yield from self._plain.objects_after(prefix, after)

    def find(self, key: str) -> StoredObject:
        """One object, as it is listed."""
        return first_of(self.objects(key), key, self._location.path(key), self.name)

    def get(self, key: str, version: str = "") -> FetchedObject:
        """An object's whole content."""
        return self._fetch(key, version, None)

    def get_range(self, key: str, start: int, stop: int, version: str = "") -> bytes:
        """A part of an object."""
        return self._fetch(key, version, (start, stop)).data if stop > start else b""

    def describe(self) -> str:
        """What reads it, in a word."""
        return "obstore" if may_use_obstore() else "s3fs"

    def close(self) -> None:
        """Let go of connections."""
        self._opened.drop()
        self._plain.close()

    def _open(self) -> Any:
        path = self._location.store
        self._options.require(path)
        # Amazon's buckets are asked for by their region; s3fs learns it when it is sent elsewhere, and so it
        # is asked.  Other servers have one for all.
        settings = self._settings
        region = "" if settings.endpoint or settings.region_is_given else self._plain.region()
        arguments = settings.obstore(region)
        self._obstore, stores = require("obstore", extra="s3"), require("obstore.store", extra="s3")
        try:
            return stores.S3Store(self._location.bucket, **arguments)
        except Exception as error:
            said = self._options.hide(str(error).partition("\n")[0])
            raise OptionError(f"{path} with storage_options={self._options!r}: {said}") from None

    def _can_list(self, prefix: str) -> bool:
        """A prefix that is no folder, or no path, is none that obstore knows."""
        return may_use_obstore() and prefix[:1] != "/" and (not prefix or prefix[-1] == "/")

    def _fetch(self, key: str, version: str, part: tuple[int, int] | None) -> FetchedObject:
        # Slashes at the ends would silently be taken away.
        if not may_use_obstore() or not key or key[0] == "/" or key[-1] == "/":
            return self._by_s3fs(key, version, part)
        options: dict[str, Any] | None = None
        if version and version[:2] != "W/":
            options = {"if_match": version}
        if part:
            options = {**(options or {}), "range": part}
        try:
            store = self._opened.get()
            result = self._obstore.get(store, key, options=options)
            meta = result.meta
            data = bytes(result.bytes())
        except Exception as error:
            if _is_odd(error):
                return self._by_s3fs(key, version, part)
            if part is not None and (found := _STATUS.search(str(error))) and found[1] == _AFTER_THE_END:
                return FetchedObject(b"", version)
            raise self._ours(error, key) from None
        size = meta["size"] if part is None else max(min(part[1], meta["size"]) - part[0], 0)
        if len(data) != size:
            raise silence(self._location.path(key), self.name, f"{len(data)} bytes of {size}")
        now = meta["e_tag"] or ""
        if version and now and now != version:
            raise changed(self._location.path(key), self.name)
        return FetchedObject(data, now)

    def _by_s3fs(self, key: str, version: str, part: tuple[int, int] | None) -> FetchedObject:
        if part is None:
            return self._plain.get(key, version)
        return FetchedObject(self._plain.get_range(key, *part, version), version)

    def _listed(self, store: Any, prefix: str, page: Sequence[Any], empty: set[str]) -> list[StoredObject]:
        """Of a page as obstore has it, in which the folder ``x/`` is an empty object ``x``.

        Args:
            empty: those that were found to be objects; more are added.
        """
        return [
            StoredObject(one["path"], one["size"], one["e_tag"] or "")
            for one in page
            if one["path"].startswith(prefix)
            and (one["size"] or self._is_empty_object(store, one["path"], empty))
        ]

    def _is_empty_object(self, store: Any, key: str, empty: set[str]) -> bool:
        """Whether there is an empty object of this name, which has not been listed already."""
        try:
            is_new = key not in empty and self._obstore.head(store, key)["size"] == 0
        except FileNotFoundError:
            return False
        if is_new:
            empty.add(key)
        return is_new

    def _ours(self, error: Exception, key: str) -> Exception:
        """What obstore raises, as one of our errors.  Its message is the one place that has status and code;
        it goes on with headers and the server's whole answer, and so only those are taken from it."""
        if isinstance(error, FastpipeError):
            return error
        path = self._location.path(key)
        text = str(error)
        status, code = _STATUS.search(text), _CODE.search(text)
        if status:
            return refusal(path, self.name, int(status[1]), code[1] if code else "")
        kind = type(error).__name__
        if kind == "FileNotFoundError":
            return missing(path, self.name)
        if kind == "PreconditionError":
            return changed(path, self.name)
        first = text.partition("\n")[0].rpartition(" - ")[2]
        why = _KIND.search(text)
        first = self._options.hide(_URL.sub("…", first))[:300] + (f" ({why[1]})" if why else "")
        if kind in ("PermissionDeniedError", "UnauthenticatedError"):
            return StoreAccessError(f"{path}: {self.name} does not let these credentials in: {first}")
        if kind == "GenericError":
            return silence(path, self.name, first)
        return StoreError(f"{path}: {kind}: {first}") if _is_of_obstore(error) else error


def _is_of_obstore(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] == "obstore"


def _is_odd(error: Exception) -> bool:
    """Whether obstore does not take a key for one."""
    return type(error) is ValueError or type(error).__name__ == "InvalidPathError"
