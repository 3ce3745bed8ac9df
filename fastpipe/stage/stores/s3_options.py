"""What s3fs's options mean, for those that obstore knows too."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from fastpipe.core.extras import require
from fastpipe.errors import OptionError, StoreAccessError
from fastpipe.stage.stores.secrets import StorageOptions

__all__ = ["S3Settings"]

_CONNECT = timedelta(seconds=10)
_READ = timedelta(seconds=30)
_WHOLE = timedelta(minutes=10)  # obstore's own limit is 30 s, in which a slow line carries no large object
_KNOWN = {
    "anon", "client_kwargs", "endpoint_url", "key", "password", "profile", "requester_pays", "secret",
    "token", "username",
}  # fmt: skip
_KNOWN_CLIENT = {"endpoint_url", "region_name"}
# Longer than obstore's own margin of 5 minutes, and shorter than the 15 in which botocore renews credentials.
_CREDENTIALS_FOR = timedelta(minutes=14)
_ENDPOINT = re.compile(
    r"https?://(\S*@)?([\w.-]+|\[[\da-f:.]+\])(:[1-6]?\d{1,4})?(/[\w.~%/+=-]*)?", re.IGNORECASE | re.ASCII
)
_REGION = re.compile(r"[a-zA-Z0-9-]{1,63}")
_ANY_REGION = "us-east-1"
_CONNECTIONS = 128


@dataclass(frozen=True)
class S3Settings:
    """An S3 store's options, with what the environment adds to them.

    Attributes:
        options: as they were given.
        endpoint: the server's URL; empty for Amazon's own.
        region: empty where nobody has said it.
        region_is_given: whether it is the options' own, not one for all buckets.
    """

    options: StorageOptions
    endpoint: str
    region: str
    region_is_given: bool

    @classmethod
    def of(cls, options: StorageOptions) -> S3Settings:
        """Read options and environment.

        Raises:
            OptionError: they contradict each other, or have credentials where these would be seen.
        """
        client: Mapping[str, Any] = options.get("client_kwargs") or {}
        config = _configured(options)
        endpoint = options.get("endpoint_url") or client.get("endpoint_url") or _endpoint(config)
        if endpoint and not _ENDPOINT.fullmatch(str(endpoint)):  # over which obstore panics
            raise OptionError("storage_options' endpoint_url must be a URL, such as 'http://localhost:9000'")
        if "@" in str(endpoint).partition("://")[2].partition("/")[0]:
            raise OptionError("storage_options' endpoint_url has credentials: pass them as key and secret")
        if bool(_first(options, "key", "username")) != bool(_first(options, "secret", "password")):
            raise OptionError("storage_options need both key and secret, and one of them is missing")
        given = client.get("region_name")
        common = (os.environ.get(name) for name in ("AWS_REGION", "AWS_DEFAULT_REGION"))
        region = given or next(filter(None, common), None) or config.get("region") or ""
        if region and not _REGION.fullmatch(str(region)):  # the same
            raise OptionError(f"{region!r} is no region's name, such as 'us-east-1': see to storage_options")
        return cls(options, str(endpoint or "").rstrip("/"), str(region), bool(given))

    @property
    def unknown(self) -> list[str]:
        """Names of options that only s3fs knows."""
        client = self.options.get("client_kwargs") or {}
        services = ["a profile's services"] if "services" in _configured(self.options) else []
        return sorted({*self.options} - _KNOWN) + sorted({*client} - _KNOWN_CLIENT) + services

    def obstore(self, region: str) -> dict[str, Any]:
        """Arguments of ``obstore.store.S3Store`` beside the bucket.

        All that the environment could say otherwise is said, since obstore reads other variables than s3fs.

        Args:
            region: the bucket's, as the server says; empty where it does not.
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
        """What s3fs's ``config_kwargs`` are to say where they do not."""
        return {
            "max_pool_connections": _CONNECTIONS,
            "retries": {"total_max_attempts": 1},
            "connect_timeout": _CONNECT.total_seconds(),
            "read_timeout": _READ.total_seconds(),
        }

    def _credentials(self) -> Any:
        """What obstore asks for credentials, so that it looks for none itself."""
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
    """botocore's, which comes with s3fs and finds credentials in all the places that s3fs does."""
    return require("botocore.session", extra="s3").Session(profile=options.get("profile"))


def _configured(options: StorageOptions) -> Mapping[str, Any]:
    """The profile's part of ~/.aws/config."""
    with _readable():
        return dict(_session(options).get_scoped_config())


@contextmanager
def _readable() -> Iterator[None]:
    """Raise a ``StoreAccessError`` where botocore finds no profile, or cannot read credentials."""
    try:
        yield
    except require("botocore.exceptions", extra="s3").BotoCoreError as error:
        raise StoreAccessError(f"{error}: see to storage_options' profile, AWS_PROFILE and ~/.aws") from None


def _endpoint(config: Mapping[str, Any]) -> str:
    """As botocore finds it."""
    if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return ""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    found = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return found or str(config.get("endpoint_url") or "")
