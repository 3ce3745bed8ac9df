"""Zarr arrays that are somewhere else: what they are, and which of their chunks there are."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastpipe.errors import MissingDependencyError, OptionError, StoreError, VolumeError
from fastpipe.index.listing import Listing
from fastpipe.index.remote import scan_store
from fastpipe.options import Stage
from fastpipe.protocols import Store
from fastpipe.stage.folder import StageFolder
from fastpipe.stage.stores import Location, Retries, RetryingStore, is_url, open_store
from fastpipe.volumes.opening import zarr_of_objects
from fastpipe.volumes.remote_chunks import ChunkStore, RemoteChunks
from fastpipe.volumes.volume import Volume
from fastpipe.volumes.zarr_metadata import METADATA, ZarrArray, is_zarr, parsed

__all__ = ["RemoteVolumes", "remote_volumes"]

_log = logging.getLogger("fastpipe.stage")

_AT_A_TIME = 16  # volumes whose metadata are asked for
_HURRIED = Retries(tries=2)  # where tensorstore may know better how to get there
_WEB = ("http", "https")
_UNREADABLE = (
    "that goes with Zarr whose chunks are in no shards, and compressed by blosc, zstd, gzip, zlib or nothing"
)


class RemoteVolumes:
    """The Zarr arrays of a dataset whose chunks are objects of stores, or files of folders that are far away.

    Args:
        storage_options: as fsspec's file system for their URLs takes them.
        stage: where chunks are copied near, or None.

    Attributes:
        stores: where their chunks are.
    """

    def __init__(self, storage_options: Mapping[str, Any] | None, stage: Stage | None) -> None:
        self._options, self._stage = storage_options, stage
        # Whether something was asked for that only is possible chunk by chunk.
        self._must = stage is not None or storage_options is not None
        self.stores: list[ChunkStore] = []
        self._found: dict[str, tuple[ZarrArray, RemoteChunks]] = {}

    def look(self, paths: Sequence[str]) -> None:
        """Find arrays, and which of their chunks there are; those that are not to be read here are left out.

        Args:
            paths: their URLs, or folders.

        Raises:
            FileNotFoundError: there is nothing.
            VolumeError: one is damaged; or, with a stage or options, it cannot be read chunk by chunk.
            OptionError: a URL cannot work.
            StoreError: a store does not answer as it must.
        """
        if self._stage is not None:
            StageFolder(self._stage).close()  # whether it can be used shows now
        paths = list(dict.fromkeys(paths))
        stores: dict[tuple[str, str], ChunkStore] = {}
        asked = [self._asked(path, stores) for path in paths]
        with ThreadPoolExecutor(min(_AT_A_TIME, len(paths)) or 1, "fastpipe-volumes") as pool:
            found = list(
                pool.map(lambda one: None if one is None else _seen(one[0], one[1], self._policy), asked)
            )
        for path, one, seen in zip(paths, asked, found, strict=True):
            if one is None or seen is None:
                self._refuse(path, None)
            elif isinstance(seen, Exception):
                self._refuse(path, seen)
            else:
                self._found[path] = seen[0], one[0].add(path, one[1], *seen)
        self.stores = [store for store in stores.values() if store.is_used]
        for store in self.stores:
            store.complete()
        self._options = None  # stores have them, and say them to nobody

    def volume(self, path: str, place: str) -> Volume | None:
        """One that was found.

        Args:
            path: as it was looked for.
            place: which argument it is, for messages.
        """
        found = self._found.get(path)
        return None if found is None else zarr_of_objects(_shown(path), *found, place)

    def close(self) -> None:
        """End the threads of this process, and let go of the stage and of connections."""
        for store in self.stores:
            store.close()

    @property
    def downloaded(self) -> tuple[int, int]:
        """Objects and bytes that this process has fetched."""
        found = [store.downloaded for store in self.stores]
        return sum(count for count, _ in found), sum(nbytes for _, nbytes in found)

    @property
    def is_shared(self) -> bool:
        """Whether processes find here what one of them has fetched."""
        return self._stage is not None

    @property
    def _policy(self) -> Retries:
        """How often metadata are asked for."""
        return Retries() if self._must else _HURRIED

    def _asked(self, path: str, stores: dict[tuple[str, str], ChunkStore]) -> tuple[ChunkStore, str] | None:
        """Where to ask for an array, and what its keys begin with; None where nobody can list it."""
        try:
            location = Location.of(path)
            if location.scheme in _WEB:  # which chunks there are cannot be known
                return None
            root = path if location.scheme else "/"
            prefix = location.prefix if location.scheme else f"{os.path.abspath(path).strip('/')}/"
            key = location.scheme, location.bucket if location.scheme else "/"
            if key not in stores:
                store, inside = open_store(root, self._options if location.scheme else None)
                stores[key] = ChunkStore(store, inside, self._stage)
            return stores[key], prefix
        except (OptionError, MissingDependencyError):
            if self._must:
                raise
            return None

    def _refuse(self, path: str, why: Exception | None) -> None:
        """Say that an array cannot be read here, if nobody else can."""
        if not self._must:
            if why is not None:
                _log.info("%s is left to tensorstore: %s", path, str(why))
            return
        if why is None:
            why = VolumeError(
                f"{path} cannot be read chunk by chunk, as over HTTP nobody can say which chunks there are: "
                "leave stage= and storage_options= out, or name its bucket (s3://…, gs://…)"
            )
        raise why


def remote_volumes(
    given: Iterable[Any], storage_options: Mapping[str, Any] | None, stage: Stage | None
) -> RemoteVolumes | None:
    """What brings the chunks of volumes here; None where all of them are in local files.

    Args:
        given: paths, URLs and arrays.
        storage_options, stage: as for ``RemoteVolumes``.

    Raises:
        OptionError: an option is given that has no effect for these.
        Others: as of ``RemoteVolumes.look``.
    """
    paths = [os.fspath(one) for one in given if isinstance(one, (str, os.PathLike))]
    urls = [path for path in paths if is_url(path)]
    first = paths[0] if paths else "an array"
    if storage_options is not None and not urls:
        raise OptionError(
            f"storage_options= is for a volume that is a URL, such as 's3://bucket/scan.zarr'; got {first!r}"
        )
    if not urls and stage is None:
        return None
    # Beside a URL a path is one of this machine; else it is a folder of a network, or a mount.
    far = urls or [path for path in paths if is_zarr(path)]
    if not far:
        raise OptionError(
            f"stage= is for Zarr arrays, whose chunks are copied near one by one; got {first!r}: leave it "
            "out, or make a copy of that kind: fastpipe repack"
        )
    remote = RemoteVolumes(storage_options, stage)
    remote.look(far)
    return remote


def _seen(store: ChunkStore, prefix: str, policy: Retries) -> tuple[ZarrArray, Listing] | Exception:
    """An array below a prefix, and the objects there; an error where it cannot be read here."""
    try:
        array = _array(RetryingStore(store.bare, policy), store.location, prefix)
        _, listing = scan_store(
            store.asking, store.location.path(prefix), prefix, {"": 0}, extensions="", allow_empty=True
        )  # fmt: skip
        return array, listing
    except (StoreError, VolumeError, FileNotFoundError, MissingDependencyError) as error:
        return error


def _array(store: Store, location: Location, prefix: str) -> ZarrArray:
    url = location.path(prefix).rstrip("/")
    is_group = False
    for name in METADATA:
        try:
            content = store.get(f"{prefix}{name}").data
        except FileNotFoundError:
            continue
        found = parsed(f"{url}/{name}", content)
        if isinstance(found, str):
            raise VolumeError(
                f"{url} cannot be read chunk by chunk, as {found}: {_UNREADABLE}. Leave stage= and "
                "storage_options= out, and tensorstore reads it, or make a copy of that kind: fastpipe repack"
            )
        if found is not None:
            return found
        is_group = True
        break
    inside = store.folders(prefix)
    if is_group or inside:
        what = "is a Zarr group" if is_group else "is no Zarr array"
        names = ", ".join(inside) or "nothing"
        raise VolumeError(f"{url} {what}; name an array in it behind a slash: it has {names}")
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)


def _shown(path: str) -> str:
    """What a volume is called."""
    return path.rstrip("/") if is_url(path) else path
