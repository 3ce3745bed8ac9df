"""Stores for S3 buckets: obstore reads without the GIL, and s3fs supports all options and keys."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from fastpipe.core.extras import require
from fastpipe.core.types import FetchedObject, StoredObject
from fastpipe.errors import FastpipeError, OptionError, StoreAccessError, StoreError
from fastpipe.stores.clients import (
    PerProcess,
    StorageOptions,
    answer_error,
    changed,
    may_use_obstore,
    missing,
    no_answer,
)
from fastpipe.stores.filesystems import answered, store_errors
from fastpipe.stores.locations import Location

_CONNECT = timedelta(seconds=10)
_READ = timedelta(seconds=30)
_WHOLE = timedelta(minutes=10)  # obstore's default, 30 s, is too short for large objects on slow networks
_KNOWN = {
    "anon", "client_kwargs", "endpoint_url", "key", "password", "profile", "requester_pays", "secret",
    "token", "username",
}  # fmt: skip
_KNOWN_CLIENT = {"endpoint_url", "region_name"}
# How long obstore uses credentials.  The time must be longer than obstore's margin of 5 minutes, and shorter
# than the 15 minutes in which botocore renews credentials.
_CREDENTIALS_FOR = timedelta(minutes=14)
_ENDPOINT = re.compile(
    r"https?://(\S*@)?([\w.-]+|\[[\da-f:.]+\])(:[1-6]?\d{1,4})?(/[\w.~%/+=-]*)?", re.IGNORECASE | re.ASCII
)
_REGION = re.compile(r"[a-zA-Z0-9-]{1,63}")
_ANY_REGION = "us-east-1"
_CONNECTIONS = 128


@dataclass(frozen=True)
class S3Settings:
    """The user's options for an S3 store, with missing values from the environment and AWS's configuration.

    ``endpoint`` is empty for Amazon's endpoint, and ``region`` is empty if unknown.  ``region_is_given`` is
    True if the region comes from the options, and not from a setting for all buckets.
    """

    options: StorageOptions
    endpoint: str
    region: str
    region_is_given: bool

    @classmethod
    def of(cls, options: StorageOptions) -> S3Settings:
        """Read the options and the environment."""
        client: Mapping[str, Any] = options.get("client_kwargs") or {}
        config = _configured(options)
        endpoint = options.get("endpoint_url") or client.get("endpoint_url") or _endpoint(config)
        if endpoint and not _ENDPOINT.fullmatch(str(endpoint)):  # obstore would panic
            raise OptionError("storage_options' endpoint_url must be a URL, such as 'http://localhost:9000'")
        if "@" in str(endpoint).partition("://")[2].partition("/")[0]:
            raise OptionError("storage_options' endpoint_url has credentials: pass them as key and secret")
        if bool(_first(options, "key", "username")) != bool(_first(options, "secret", "password")):
            raise OptionError("storage_options need both key and secret, and one of them is missing")
        given = client.get("region_name")
        common = (os.environ.get(name) for name in ("AWS_REGION", "AWS_DEFAULT_REGION"))
        region = given or next(filter(None, common), None) or config.get("region") or ""
        if region and not _REGION.fullmatch(str(region)):  # obstore would panic
            raise OptionError(f"{region!r} is not a region name, such as 'us-east-1': check storage_options")
        return cls(options, str(endpoint or "").rstrip("/"), str(region), bool(given))

    @property
    def unknown(self) -> list[str]:
        """Return the names of options that only s3fs supports."""
        client = self.options.get("client_kwargs") or {}
        services = ["a profile's services"] if "services" in _configured(self.options) else []
        return sorted({*self.options} - _KNOWN) + sorted({*client} - _KNOWN_CLIENT) + services

    def obstore(self, region: str) -> dict[str, Any]:
        """Return the arguments of ``obstore.store.S3Store``, except the bucket.

        obstore and s3fs read different environment variables.  So the arguments set everything that obstore
        would read from the environment.
        """
        anon = bool(self.options.get("anon"))
        arguments: dict[str, Any] = {
            "region": region or self.region or _ANY_REGION,
            "skip_signature": anon,
            "request_payer": bool(self.options.get("requester_pays")),
            "virtual_hosted_style_request": False,
            "client_options": {
                "allow_http": self.endpoint.startswith("http://"),
                "connect_timeout": _CONNECT,
                "read_timeout": _READ,
                "timeout": _WHOLE,
            },
            "retry_config": {"max_retries": 0},
        }
        if self.endpoint:
            arguments["endpoint"] = self.endpoint
        if not anon:
            arguments["credential_provider"] = self._credentials()
        return arguments

    @staticmethod
    def s3fs() -> dict[str, Any]:
        """Return the default values for s3fs's argument ``config_kwargs``."""
        return {
            "max_pool_connections": _CONNECTIONS,
            "retries": {"total_max_attempts": 1},
            "connect_timeout": _CONNECT.total_seconds(),
            "read_timeout": _READ.total_seconds(),
        }

    def _credentials(self) -> Any:
        """Return a credential provider for obstore.  obstore then does not search for credentials itself."""
        key, secret = _first(self.options, "key", "username"), _first(self.options, "secret", "password")
        if key:
            given = {"access_key_id": key, "secret_access_key": secret, "token": self.options.get("token")}
            return lambda: {**given, "expires_at": None}
        with _readable():
            found = _session(self.options).get_credentials()
        if found is None:
            raise StoreAccessError(
                "no credentials for S3 in storage_options, the environment, ~/.aws or this machine's role. "
                "Pass storage_options={'key': …, 'secret': …}, or {'anon': True} for a public bucket, or "
                "set AWS_PROFILE"
            )

        def credentials() -> dict[str, Any]:
            with _readable():
                now = found.get_frozen_credentials()
            return {
                "access_key_id": now.access_key,
                "secret_access_key": now.secret_key,
                "token": now.token,
                "expires_at": datetime.now(timezone.utc) + _CREDENTIALS_FOR,
            }

        return credentials


def _first(options: StorageOptions, *names: str) -> Any:
    return next((options[name] for name in names if options.get(name)), None)


def _session(options: StorageOptions) -> Any:
    """Return a botocore session that finds the same credentials as s3fs."""
    return require("botocore.session", extra="s3").Session(profile=options.get("profile"))


def _configured(options: StorageOptions) -> Mapping[str, Any]:
    """Return the profile's section of ~/.aws/config."""
    with _readable():
        return dict(_session(options).get_scoped_config())


@contextmanager
def _readable() -> Iterator[None]:
    """Raise a ``StoreAccessError`` if botocore does not find the profile or cannot read credentials."""
    require("botocore", extra="s3")
    try:
        yield
    except require("botocore.exceptions").BotoCoreError as error:
        raise StoreAccessError(f"{error}: see to storage_options' profile, AWS_PROFILE and ~/.aws") from None


def _endpoint(config: Mapping[str, Any]) -> str:
    """Return the endpoint that botocore would use."""
    if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return ""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    found = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return found or str(config.get("endpoint_url") or "")


_PAGE = 1000
_REFUSALS = (301, 307, 400, 403, 404)
_AFTER_THE_END = 416


class S3fsStore:
    """A ``core.types.Store`` that reads a bucket with s3fs.

    s3fs supports all options and keys, but its work is done in Python.
    """

    def __init__(self, location: Location, options: StorageOptions) -> None:
        self._location, self._options = location, options
        self._settings = settings = S3Settings.of(options)
        self.name = f"s3://{location.bucket}" + (f" at {settings.endpoint}" if settings.endpoint else "")
        self._opened: PerProcess[Any] = PerProcess(self._open)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self._options!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._location, self._options)

    def folders(self, prefix: str) -> list[str]:
        found: set[str] = set()
        for answer in self._pages(prefix, Delimiter="/"):
            found |= {one["Prefix"][len(prefix) : -1] for one in answer.get("CommonPrefixes", ())}
        return sorted(found - {""})

    def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        return self.objects_after(prefix, "")

    def objects_after(self, prefix: str, after: str) -> Iterator[Sequence[StoredObject]]:
        for answer in self._pages(prefix, **({"StartAfter": after} if after else {})):
            yield [
                StoredObject(one["Key"], one["Size"], one.get("ETag", ""))
                for one in answer.get("Contents", ())
                if not one["Key"].endswith("/")
            ]

    def find(self, key: str) -> StoredObject:
        found = next((one for page in self.objects(key) for one in page if one.key == key), None)
        if found is None:
            raise missing(self._location.path(key), self.name)
        return found

    def get(self, key: str, version: str = "") -> FetchedObject:
        return self._fetch(key, version, None)

    def get_range(self, key: str, start: int, stop: int, version: str = "") -> bytes:
        return self._fetch(key, version, (start, stop)).data if stop > start else b""

    def region(self) -> str:
        """Return the bucket's region; an empty string if the server does not report a region."""
        path = self._location.store
        fs = self._opened.get()
        with store_errors(path, self.name, self._options):
            try:
                answer = fs.call_s3("head_bucket", Bucket=self._location.bucket)
            except Exception as error:
                # The answer to a request without permission also contains the region.
                answer = getattr(error.__cause__, "response", None)
                if not isinstance(answer, Mapping) or answered(error)[0] not in _REFUSALS:
                    raise
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        return str(headers.get("x-amz-bucket-region", ""))

    def describe(self) -> str:
        return "s3fs"

    def close(self) -> None:
        fs = self._opened.drop()
        if fs is not None and getattr(fs, "_s3creator", None) is not None:
            with contextlib.suppress(Exception):  # the event loop may have ended already
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
        fs.retries = 1  # ``RetryingStore`` retries
        return fs

    def _fetch(self, key: str, version: str, part: tuple[int, int] | None) -> FetchedObject:
        fs = self._opened.get()
        path = self._location.path(key)
        if not key:
            raise missing(path, self.name)
        asked = {"Range": f"bytes={part[0]}-{part[1] - 1}"} if part else {}
        if version and not version.startswith("W/"):
            asked["IfMatch"] = version

        async def read() -> tuple[bytes, dict[str, Any]]:
            bucket = self._location.bucket
            answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, **asked)
            async with answer["Body"] as body:
                return await body.read(), answer

        with store_errors(path, self.name, self._options):
            try:
                data, answer = self._do(fs, read)
            except Exception as error:
                if part and answered(error)[0] == _AFTER_THE_END:
                    return FetchedObject(b"", version)
                raise
        if len(data) != answer["ContentLength"]:
            raise no_answer(path, self.name, f"{len(data)} bytes of {answer['ContentLength']}")
        found = answer.get("ETag", "")
        if version and found and found != version:
            raise changed(path, self.name)
        return FetchedObject(data, found)

    def _pages(self, prefix: str, **more: str) -> Iterator[dict[str, Any]]:
        fs = self._opened.get()
        path = self._location.path(prefix)
        asked = {"Bucket": self._location.bucket, "Prefix": prefix, "MaxKeys": _PAGE, **more}
        while True:
            with store_errors(path, self.name, self._options):
                answer = fs.call_s3("list_objects_v2", **asked)
            yield answer
            if not answer.get("IsTruncated"):
                return
            asked["ContinuationToken"] = answer["NextContinuationToken"]

    @staticmethod
    def _do(fs: Any, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run ``work`` on the event loop of s3fs's clients."""
        return require("fsspec.asyn", extra="s3").sync(fs.loop, work)


_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_URL = re.compile(r"\S+://\S+")


class ObjectStore(S3fsStore):
    """A ``core.types.Store`` that reads a bucket with obstore, which makes requests without the GIL.

    s3fs handles the requests that obstore does not support: objects with keys that obstore does not accept as
    paths (``../x``, ``a//b``), and listings with such keys.  s3fs also handles all requests in a process that
    was forked after obstore had been imported.
    """

    def __init__(self, location: Location, options: StorageOptions) -> None:
        super().__init__(location, options)
        self._client: PerProcess[Any] = PerProcess(self._open_client)
        self._obstore: Any = None

    def folders(self, prefix: str) -> list[str]:
        if not self._can_list(prefix):
            return super().folders(prefix)
        store = self._client.get()
        try:
            found = self._obstore.list_with_delimiter(store, prefix or None)["common_prefixes"]
        except Exception as error:
            if _is_odd(error):
                return super().folders(prefix)
            raise self._ours(error, prefix) from None
        return sorted({one[len(prefix) :] for one in found} - {""})

    def objects_after(self, prefix: str, after: str) -> Iterator[Sequence[StoredObject]]:
        # Without a prefix, obstore would list the key "/x" as "x".
        if not prefix or not self._can_list(prefix):
            yield from super().objects_after(prefix, after)
            return
        try:
            store = self._client.get()
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
        yield from super().objects_after(prefix, after)

    def describe(self) -> str:
        return "obstore" if may_use_obstore() else "s3fs"

    def close(self) -> None:
        self._client.drop()
        super().close()

    def _open_client(self) -> Any:
        path = self._location.store
        self._options.require(path)
        # For Amazon's buckets, obstore needs the bucket's region, which ``region`` gets by s3fs.  Other
        # servers have one region for all buckets.
        settings = self._settings
        region = "" if settings.endpoint or settings.region_is_given else self.region()
        arguments = settings.obstore(region)
        self._obstore, stores = require("obstore", extra="s3"), require("obstore.store", extra="s3")
        try:
            return stores.S3Store(self._location.bucket, **arguments)
        except Exception as error:
            said = self._options.hide(str(error).partition("\n")[0])
            raise OptionError(f"{path} with storage_options={self._options!r}: {said}") from None

    def _can_list(self, prefix: str) -> bool:
        """Return whether obstore can list ``prefix``: a folder that does not begin with a slash."""
        return may_use_obstore() and prefix[:1] != "/" and (not prefix or prefix[-1] == "/")

    def _fetch(self, key: str, version: str, part: tuple[int, int] | None) -> FetchedObject:
        # obstore would remove leading and final slashes silently.
        if not may_use_obstore() or not key or key[0] == "/" or key[-1] == "/":
            return super()._fetch(key, version, part)
        options: dict[str, Any] | None = None
        if version and version[:2] != "W/":
            options = {"if_match": version}
        if part:
            options = {**(options or {}), "range": part}
        try:
            store = self._client.get()
            result = self._obstore.get(store, key, options=options)
            meta = result.meta
            data = bytes(result.bytes())
        except Exception as error:
            if _is_odd(error):
                return super()._fetch(key, version, part)
            if part is not None and (found := _STATUS.search(str(error))) and int(found[1]) == _AFTER_THE_END:
                return FetchedObject(b"", version)
            raise self._ours(error, key) from None
        size = meta["size"] if part is None else max(min(part[1], meta["size"]) - part[0], 0)
        if len(data) != size:
            raise no_answer(self._location.path(key), self.name, f"{len(data)} bytes of {size}")
        now = meta["e_tag"] or ""
        if version and now and now != version:
            raise changed(self._location.path(key), self.name)
        return FetchedObject(data, now)

    def _listed(self, store: Any, prefix: str, page: Sequence[Any], empty: set[str]) -> list[StoredObject]:
        """Return the objects of a page, without folders.  obstore lists a folder ``x/`` as an empty ``x``."""
        return [
            StoredObject(one["path"], one["size"], one["e_tag"] or "")
            for one in page
            if one["path"].startswith(prefix)
            and (one["size"] or self._is_empty_object(store, one["path"], empty))
        ]

    def _is_empty_object(self, store: Any, key: str, empty: set[str]) -> bool:
        try:
            is_new = key not in empty and self._obstore.head(store, key)["size"] == 0
        except FileNotFoundError:
            return False
        if is_new:
            empty.add(key)
        return is_new

    def _ours(self, error: Exception, key: str) -> Exception:
        if isinstance(error, FastpipeError):
            return error
        path = self._location.path(key)
        text = str(error)
        status, code = _STATUS.search(text), _CODE.search(text)
        if status:
            return answer_error(path, self.name, int(status[1]), code[1] if code else "")
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
            return no_answer(path, self.name, first)
        is_of_obstore = type(error).__module__.partition(".")[0] == "obstore"
        return StoreError(f"{path}: {kind}: {first}") if is_of_obstore else error


def _is_odd(error: Exception) -> bool:
    """Return whether an error means that obstore does not accept a key."""
    return type(error) is ValueError or type(error).__name__ == "InvalidPathError"
