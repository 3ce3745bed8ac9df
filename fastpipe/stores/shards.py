"""Tar shards in a store: finding them, listing their samples, and reading their members."""

from __future__ import annotations

import errno
import fnmatch
import io
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fastpipe.core.archive_paths import changed_archive, split_member
from fastpipe.core.archives import Archive
from fastpipe.core.sample_tables import SampleTableBuilder, pack_paths
from fastpipe.core.shards import Samples, braced, samples_of_shards
from fastpipe.core.types import FetchedObject, Store, StoredObject
from fastpipe.errors import ObjectChangedError, OptionError
from fastpipe.stores.listing import Listing
from fastpipe.stores.locations import Location

_BLOCK = 2 << 20  # bytes of a request while a shard is listed
_THREADS = 16
_MAGIC = re.compile(r"[*?[]")
# Other stores do not check the version of an object of which a part is requested.
_SCHEMES = ("s3", "s3a", "memory", "file", "local")


def find_shards(store: Store, location: Location, patterns: Sequence[str]) -> list[StoredObject]:
    """Return the objects that URLs name, with ``*`` and ``?``, and with braces as WebDataset has them.

    Raises:
        FileNotFoundError: there is no such object.
        OptionError: a URL is not in the store, or is not of S3.
    """
    if location.scheme not in _SCHEMES:
        raise OptionError(
            f"{patterns[0]!r} must be in S3: parts of objects in other stores may be of a newer version. "
            "Copy the shards to a local disk"
        )
    keys: list[str] = []
    for url in (url for pattern in patterns for url in braced(pattern)):
        try:
            keys.append(location.key(url))
        except ValueError as error:
            raise OptionError(
                f"{error}: make a dataset for each bucket, and a ConcatDataset of them"
            ) from None

    def found(key: str) -> list[StoredObject]:
        before, *pattern = _MAGIC.split(key, maxsplit=1)
        if not pattern:
            return [store.find(key)]
        folder = before[: before.rfind("/") + 1]
        there = (one for page in store.objects(folder) for one in page)
        matching = [
            one for one in there if one.key.count("/") == key.count("/") and fnmatch.fnmatchcase(one.key, key)
        ]
        if not matching:
            raise FileNotFoundError(errno.ENOENT, "no object matches the pattern", location.path(key))
        return sorted(matching)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="fastpipe-list") as pool:
        return [one for objects in pool.map(found, keys) for one in objects]


def read_remote_shards(
    store: Store, location: Location, shards: Sequence[StoredObject], image: str, names: Sequence[str],
    keeps: bool,
) -> tuple[Samples, Listing]:  # fmt: skip
    """Return the samples of tar files in a store, as ``read_shards``, and the listing of their images.

    Each shard is read up to its end, except files of more than 2 MiB.
    """
    objects = {location.path(one.key): one for one in shards}
    archives = [
        Archive(location.path(one.key), [store.name, one.key], [one.size, one.version], _number_of(one), 0)
        for one in shards
    ]
    keeps = keeps and all(one.version for one in shards)
    samples = samples_of_shards(archives, image, names, keeps, lambda url: _ObjectFile(store, objects[url]))
    sizes, versions = [], []
    for path in samples.images:
        member = split_member(path)
        assert member is not None
        sizes.append(member.nbytes)
        versions.append(objects[member.archive].version)
    builder = SampleTableBuilder(location.store)
    builder.add("", [path[len(location.store) :] for path in samples.images], 0)
    paths = builder.build().frozen
    assert paths is not None
    return samples, Listing(paths, "", np.array(sizes, np.int64), pack_paths("", versions))


def _number_of(shard: StoredObject) -> int:
    return zlib.crc32(f"{shard.size} {shard.version}".encode())


class _ObjectFile(io.RawIOBase):
    """An object of a store, as a file that is open for reading.  It fetches a block at a time."""

    def __init__(self, store: Store, found: StoredObject) -> None:
        self._store, self._found = store, found
        self._at, self._start, self._block = 0, 0, b""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence == os.SEEK_SET
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        parts, end = [], self._found.size if count < 0 else min(self._at + count, self._found.size)
        while self._at < end:
            if not self._start <= self._at < self._start + len(self._block):
                key, size, version = self._found
                self._start, stop = self._at, min(self._at + _BLOCK, size)
                self._block = self._store.get_range(key, self._at, stop, version)
                if not self._block:
                    break
            begin = self._at - self._start
            parts.append(self._block[begin : begin + end - self._at])
            self._at += len(parts[-1])
        return b"".join(parts)


class ShardStore:
    """A ``core.types.Store`` in which members of tar files are objects.

    The key of a member is its path without the URL of the store (see ``core.archive_paths``), and its version
    is that of the tar file.  All else is as in ``store``.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def name(self) -> str:
        return self._store.name

    @property
    def objects_after(self) -> Callable[[str, str], Iterator[Sequence[StoredObject]]] | None:
        return self._store.objects_after

    def folders(self, prefix: str) -> list[str]:
        return self._store.folders(prefix)

    def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        return self._store.objects(prefix)

    def find(self, key: str) -> StoredObject:
        return self._store.find(key)

    def get(self, key: str, version: str = "") -> FetchedObject:
        """Return a member.  Raise a ChangedArchiveError if its tar file has another version."""
        member = split_member(key)
        if member is None:
            return self._store.get(key, version)
        end = member.offset + member.nbytes
        try:
            data = self._store.get_range(member.archive, member.offset, end, version)
        except ObjectChangedError as error:
            raise changed_archive(key) from error
        if len(data) != member.nbytes:
            raise OSError(errno.EIO, f"the archive ends after {len(data)} of {member.nbytes} bytes", key)
        return FetchedObject(data, version)

    def get_range(self, key: str, start: int, stop: int, version: str = "") -> bytes:
        return self._store.get_range(key, start, stop, version)

    def describe(self) -> str:
        return self._store.describe()

    def close(self) -> None:
        self._store.close()
