"""Buckets of S3 by s3fs: with every option and every key, and with the work done in Python."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastpipe.core.extras import require
from fastpipe.core.types import FetchedObject, StoredObject
from fastpipe.stage.stores.filesystems import answered, translated
from fastpipe.stage.stores.locations import Location
from fastpipe.stage.stores.processes import PerProcess
from fastpipe.stage.stores.refusals import changed, missing, silence
from fastpipe.stage.stores.s3_options import S3Settings
from fastpipe.stage.stores.secrets import StorageOptions

__all__ = ["S3fsStore", "first_of", "s3_name"]

_PAGE = 1000
_REFUSALS = (301, 307, 400, 403, 404)
_AFTER_THE_END = 416


def s3_name(location: Location, settings: S3Settings) -> str:
    """What tells a bucket from all others."""
    return f"s3://{location.bucket}" + (f" at {settings.endpoint}" if settings.endpoint else "")


class S3fsStore:
    """A bucket, by s3fs's client.

    Args:
        location: which.
        options: s3fs's.
    """

    def __init__(self, location: Location, options: StorageOptions) -> None:
        self._location, self._options = location, options
        self.name = s3_name(location, S3Settings.of(options))
        self._opened: PerProcess[Any] = PerProcess(self._open)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self._options!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._location, self._options)

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below a prefix."""
        found: set[str] = set()
        for answer in self._pages(prefix, Delimiter="/"):
            found |= {one["Prefix"][len(prefix) : -1] for one in answer.get("CommonPrefixes", ())}
        return sorted(found - {""})

    def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        """All objects whose keys begin with a prefix, in pages."""
        return self.objects_after(prefix, "")

    def objects_after(self, prefix: str, after: str) -> Iterator[Sequence[StoredObject]]:
        """Those of them that come after a key."""
        for answer in self._pages(prefix, **({"StartAfter": after} if after else {})):
            yield [
                StoredObject(one["Key"], one["Size"], one.get("ETag", ""))
                for one in answer.get("Contents", ())
                if not one["Key"].endswith("/")
            ]

    def find(self, key: str) -> StoredObject:
        """One object, as it is listed."""
        return first_of(self.objects(key), key, self._location.path(key), self.name)

    def get(self, key: str, version: str = "") -> FetchedObject:
        """An object's whole content."""
        return self._fetch(key, version, {})

    def get_range(self, key: str, start: int, stop: int, version: str = "") -> bytes:
        """A part of an object."""
        if stop <= start:
            return b""
        return self._fetch(key, version, {"Range": f"bytes={start}-{stop - 1}"}).data

    def region(self) -> str:
        """The bucket's; empty where the server has no word for it."""
        path = self._location.store
        fs = self._opened.get()
        with translated(path, self.name, self._options):
            try:
                answer = fs.call_s3("head_bucket", Bucket=self._location.bucket)
            except Exception as error:
                # It is in the answer too to those who may not do this.
                answer = getattr(error.__cause__, "response", None)
                if not isinstance(answer, Mapping) or answered(error)[0] not in _REFUSALS:
                    raise
        return _region(answer)

    def describe(self) -> str:
        """What reads it, in a word."""
        return "s3fs"

    def close(self) -> None:
        """End connections."""
        fs = self._opened.drop()
        if fs is not None and getattr(fs, "_s3creator", None) is not None:
            with contextlib.suppress(Exception):  # the loop may have ended before
                self._do(fs, lambda: fs._s3creator.__aexit__(None, None, None))

    def _open(self) -> Any:
        self._options.require(self._location.store)
        options = {
            **self._options,
            "config_kwargs": {**S3Settings.s3fs(), **(self._options.get("config_kwargs") or {})},
            "use_listings_cache": False,
            "skip_instance_cache": True,
        }
        fs = require("s3fs", extra="s3").S3FileSystem(**options)
        fs.retries = 1  # who asks again, and when, is not decided here
        return fs

    def _fetch(self, key: str, version: str, more: dict[str, str]) -> FetchedObject:
        fs = self._opened.get()
        path = self._location.path(key)
        if not key:
            raise missing(path, self.name)
        condition = {"IfMatch": version} if version and not version.startswith("W/") else {}

        async def read() -> tuple[bytes, dict[str, Any]]:
            bucket = self._location.bucket
            answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, **condition, **more)
            async with answer["Body"] as body:
                return await body.read(), answer

        with translated(path, self.name, self._options):
            try:
                data, answer = self._do(fs, read)
            except Exception as error:
                if "Range" in more and answered(error)[0] == _AFTER_THE_END:
                    return FetchedObject(b"", version)
                raise
        if len(data) != answer["ContentLength"]:
            raise silence(path, self.name, f"{len(data)} bytes of {answer['ContentLength']}")
        found = answer.get("ETag", "")
        if version and found and found != version:
            raise changed(path, self.name)
        return FetchedObject(data, found)

    def _pages(self, prefix: str, **more: str) -> Iterator[dict[str, Any]]:
        fs = self._opened.get()
        path = self._location.path(prefix)
        asked = {"Bucket": self._location.bucket, "Prefix": prefix, "MaxKeys": _PAGE, **more}
        while True:
            with translated(path, self.name, self._options):
                answer = fs.call_s3("list_objects_v2", **asked)
            yield answer
            if not answer.get("IsTruncated"):
                return
            asked["ContinuationToken"] = answer["NextContinuationToken"]

    @staticmethod
    def _do(fs: Any, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run on the event loop that s3fs's clients belong to."""
        return require("fsspec.asyn", extra="s3").sync(fs.loop, work)


def first_of(pages: Iterable[Sequence[StoredObject]], key: str, path: str, at: str) -> StoredObject:
    """The object of a key, from a list of those whose keys begin with it, of which it is the first.

    Args:
        pages: the list.
        key: its key.
        path, at: what messages call it, and the store.

    Raises:
        FileNotFoundError: there is none.
    """
    found = next((one for page in pages for one in page if one.key == key), None)
    if found is None:
        raise missing(path, at)
    return found


def _region(answer: Any) -> str:
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(headers.get("x-amz-bucket-region", ""))
