"""The location of a dataset in a store: a URL that is split into its parts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from fastpipe.core.extras import require
from fastpipe.core.files import SCHEME
from fastpipe.errors import OptionError

_CHAIN = re.compile(r"::[a-z][a-z0-9+.\-]+://", re.IGNORECASE)
# In Azure's "container@account" the @ does not separate a user from a host.
_NAMES_ACCOUNT = ("abfs", "abfss", "wasb", "wasbs", "az", "adl")
_WEB = ("http", "https")
_LOCAL = ("file", "local")
_S3 = ("s3", "s3a")
_VERSION = "?versionId="  # how s3fs writes an object's version in a key


@dataclass(frozen=True)
class Location:
    """The location of a dataset in a store.

    ``bucket`` is a bucket, the host of another store, or a local folder.  For a local folder, ``scheme`` is
    empty.  All keys of the dataset begin with ``prefix``, which is empty or ends in a slash.

    >>> place = Location.of("s3://bucket/train")
    >>> place.root, place.path("train/dog/x.jpg"), place.key("s3://bucket/train/dog/x.jpg")
    ('s3://bucket/train/', 's3://bucket/train/dog/x.jpg', 'train/dog/x.jpg')
    """

    scheme: str
    bucket: str
    prefix: str

    @classmethod
    def of(cls, root: str | os.PathLike[str]) -> Location:
        """Return the location for a URL or for a folder's path."""
        text = os.fspath(root)
        found = SCHEME.match(text)
        if found is None:
            return cls("", os.path.abspath(os.path.expanduser(text)), "")
        scheme, rest = found[1].lower(), text[found.end() :]
        if "::" in scheme or _CHAIN.search(rest):
            scheme = scheme.partition("::")[0]
            raise OptionError(f"{scheme}::… is a chain of file systems: pass the URL of the last one alone")
        bucket, prefix = _split(scheme, rest)
        _check(scheme, bucket, prefix)
        prefix = prefix.rstrip("/")
        return cls(scheme, bucket, f"{prefix}/" if prefix else "")

    @property
    def root(self) -> str:
        """Return the URL or folder of the dataset, ending in a slash."""
        return self.path(self.prefix)

    @property
    def store(self) -> str:
        return self.path("")

    def path(self, key: str) -> str:
        if self.scheme:
            return f"{self.scheme}://{self.bucket}/{key}"
        return f"{self.bucket.rstrip('/')}/{key}"

    def key(self, path: str) -> str:
        """Return the key of an object from its full URL.  Raise a ``ValueError`` for another store's URL."""
        if not path.startswith(self.store):
            raise ValueError(f"{path} is not in {self.store}")
        return path[len(self.store) :]


def _split(scheme: str, rest: str) -> tuple[str, str]:
    """Split a URL into the bucket and the prefix of keys, as fsspec's file systems do."""
    if scheme in _LOCAL:  # a relative path starts in the current folder
        return "", os.path.join(os.getcwd(), os.path.expanduser(rest)).lstrip("/")
    if scheme in _S3 and rest.startswith("arn:"):  # the name of an access point may contain slashes
        s3fs = require("s3fs", extra="s3")
        # An asynchronous file system starts no thread for an event loop; the thread would not survive a fork.
        parser = s3fs.S3FileSystem(anon=True, asynchronous=True, skip_instance_cache=True, version_aware=True)
        bucket, key, version = parser.split_path(rest)
        return bucket, key if version is None else f"{key}{_VERSION}{version}"
    bucket, _, prefix = rest.partition("/")
    return bucket, prefix


def _check(scheme: str, bucket: str, prefix: str) -> None:
    """Raise an OptionError for a URL that cannot work.  Messages do not show the parts of the URL that may
    contain a secret."""
    user, has_user, host = bucket.rpartition("@")
    if has_user and (":" in user or scheme not in (*_NAMES_ACCOUNT, "sftp", "ssh", "ftp", "hdfs", "smb")):
        raise OptionError(
            f"{scheme}://…@{host} has credentials in it, which would get into logs and errors: pass them as "
            "storage_options, or let the environment or a credentials file have them"
        )
    if scheme in _WEB and ("?" in bucket or "?" in prefix):
        raise OptionError(
            f"{scheme}://{bucket.partition('?')[0]}/… must end before its '?': keys are put behind it"
        )
    if scheme in _S3 and _VERSION in prefix:
        raise OptionError(
            f"{scheme}://{bucket}/{prefix} names one version of an object, and the newest one is read: leave "
            f"{_VERSION}… out, or copy that version to a key of its own"
        )
    if not bucket and scheme not in ("memory", *_LOCAL):
        raise OptionError(f"{scheme}://{prefix} names no bucket: write {scheme}://bucket/folder")
