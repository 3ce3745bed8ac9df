"""Open the store of a URL or a folder's path."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from fastpipe.core.types import Store
from fastpipe.errors import OptionError
from fastpipe.stores.clients import StorageOptions
from fastpipe.stores.filesystems import FilesystemStore, FolderStore
from fastpipe.stores.locations import Location
from fastpipe.stores.s3 import ObjectStore, S3fsStore, S3Settings

_log = logging.getLogger("fastpipe.stage")

_S3 = ("s3", "s3a")
# s3fs handles all other names, such as the name of an access point.
_PLAIN_BUCKET = re.compile(r"[A-Za-z0-9._-]+")
_FOLDERS = ("", "file", "local")


def open_store(
    root: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> tuple[Store, Location]:
    """Return the store of a dataset, and the dataset's location in the store, without a request.

    ``root`` is a folder, or a URL such as ``s3://bucket/train`` of any file system that fsspec supports.
    ``storage_options`` are the options of fsspec's file system for the URL.
    """
    location, options = Location.of(root), StorageOptions(storage_options)
    if location.scheme in _FOLDERS:
        if options:
            raise OptionError(f"storage_options={options!r} are for stores, and {location.root} is a folder")
        return FolderStore(location), location
    if location.scheme not in _S3:
        return FilesystemStore(location, options), location
    unknown = S3Settings.of(options).unknown
    if not _PLAIN_BUCKET.fullmatch(location.bucket):
        unknown.append(f"buckets called {location.bucket!r}")
    if unknown or importlib.util.find_spec("obstore") is None:
        why = f"obstore does not know {', '.join(unknown)}" if unknown else "obstore is not installed"
        _log.info("%s is read by s3fs, which takes more time: %s", location.root, why)
        return S3fsStore(location, options), location
    return ObjectStore(location, options), location
