"""Find the metadata and the existing chunks of Zarr arrays in object stores and network folders."""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.files import is_url
from fastpipe.core.sample_tables import FrozenSamples, offsets_of
from fastpipe.core.text import in_bytes
from fastpipe.core.types import Store
from fastpipe.errors import MissingDependencyError, OptionError, StoreError, VolumeError
from fastpipe.options import Stage
from fastpipe.stores.class_folders import scan_store
from fastpipe.stores.fetching import ObjectReader, new_reader
from fastpipe.stores.listing import Listing, Rows
from fastpipe.stores.locations import Location
from fastpipe.stores.opening import open_store
from fastpipe.stores.retrying import Retries, RetryingStore
from fastpipe.stores.stage import StageFolder
from fastpipe.volumes.opening import finished
from fastpipe.volumes.volume import LARGEST_UNIT, Int64Array, UnitGrid, Volume
from fastpipe.volumes.zarr import METADATA, ZarrArray, ZarrVolume, is_zarr, parsed

_log = logging.getLogger("fastpipe.stage")

_AT_A_TIME = 16  # number of volumes whose metadata are requested at a time
_HURRIED = Retries(tries=2)  # few retries, if tensorstore may be able to read the arrays instead
_WEB = ("http", "https")
_OF_TENSORSTORE = ("s3://", "gs://", "http://", "https://", "file://", "memory://")  # URLs for tensorstore
_UNREADABLE = (
    "that goes with Zarr whose chunks are in no shards, and compressed by blosc, zstd, gzip, zlib or nothing"
)


class RemoteVolumes:
    """A dataset's Zarr arrays whose chunks are objects in stores, or files in network folders.

    ``stage`` describes the local folder for copies of the chunks.  Without such a folder, it is None.
    """

    def __init__(
        self, paths: Iterable[str], storage_options: Mapping[str, Any] | None, stage: Stage | None
    ) -> None:
        self._stage = stage
        # True if the user gave an option that requires reading chunk by chunk, which tensorstore cannot do.
        self._must = stage is not None or storage_options is not None
        if stage is not None:
            StageFolder(stage).close()  # check now that the stage is usable
        paths = list(dict.fromkeys(paths))
        stores: dict[tuple[str, str], ChunkStore] = {}
        asked = [self._asked(path, storage_options, stores) for path in paths]
        policy = Retries() if self._must else _HURRIED  # retries of requests for metadata
        with ThreadPoolExecutor(min(_AT_A_TIME, len(paths)) or 1, "fastpipe-volumes") as pool:
            found = list(pool.map(partial(_seen, policy), asked))
        self._found: dict[str, tuple[ZarrArray, RemoteChunks]] = {}
        for path, seen in zip(paths, found, strict=True):
            if isinstance(seen, Exception):
                self._refuse(path, seen)
            else:
                store, prefix, array, listing = seen
                self._found[path] = array, store.add(path, prefix, array, listing)
        self.stores = [store for store in stores.values() if store.parts]
        for store in self.stores:
            store.complete()

    def volume(self, path: str, place: str) -> Volume | None:
        found = self._found.get(path)
        return None if found is None else finished(ZarrVolume(path.rstrip("/"), *found), place)

    def close(self) -> None:
        """End the threads of this process, and release the stage and the connections."""
        for store in self.stores:
            store.close()

    @property
    def downloaded(self) -> tuple[int, int]:
        found = [store.downloaded for store in self.stores]
        return sum(count for count, _ in found), sum(nbytes for _, nbytes in found)

    @property
    def is_shared(self) -> bool:
        """True if all processes share fetched objects, through the stage."""
        return self._stage is not None

    def _asked(
        self, path: str, options: Mapping[str, Any] | None, stores: dict[tuple[str, str], ChunkStore]
    ) -> tuple[ChunkStore, str] | Exception:
        """Return the array's store and the prefix of its keys; return an error if access is impossible."""
        try:
            location = Location.of(path)
            if location.scheme in _WEB:
                return VolumeError(
                    f"{path} cannot be read chunk by chunk, because chunks cannot be listed over HTTP: "
                    "leave stage= and storage_options= out, or name its bucket (s3://…, gs://…)"
                )
            root = path if location.scheme else "/"
            prefix = location.prefix if location.scheme else f"{os.path.abspath(path).strip('/')}/"
            key = location.scheme, location.bucket if location.scheme else "/"
            if key not in stores:
                store, inside = open_store(root, options if location.scheme else None)
                stores[key] = ChunkStore(store, inside, self._stage)
            return stores[key], prefix
        except (OptionError, MissingDependencyError) as error:
            return error

    def _refuse(self, path: str, why: Exception) -> None:
        """Raise ``why``, the reason why fastpipe cannot read an array, unless tensorstore may read it."""
        is_missing = isinstance(why, MissingDependencyError) and not path.startswith(_OF_TENSORSTORE)
        if self._must or is_missing:
            raise why
        _log.info("%s is left to tensorstore: %s", path, str(why))


def remote_volumes(
    given: Iterable[Any], storage_options: Mapping[str, Any] | None, stage: Stage | None
) -> RemoteVolumes | None:
    """Return a ``RemoteVolumes`` for the remote volumes in ``given``; None if no volume is remote."""
    paths = [os.fspath(one) for one in given if isinstance(one, (str, os.PathLike))]
    urls = [path for path in paths if is_url(path)]
    first = paths[0] if paths else "an array"
    if storage_options is not None and not urls:
        raise OptionError(
            f"storage_options= is for a volume that is a URL, such as 's3://bucket/scan.zarr'; got {first!r}"
        )
    if not urls and stage is None:
        return None
    # Without URLs, a stage means that the paths are network folders or mounts.  With URLs, paths are local.
    far = urls or [path for path in paths if is_zarr(path)]
    if not far:
        raise OptionError(
            f"stage= is for Zarr arrays, whose chunks are staged one by one; got {first!r}: leave it "
            "out, or make a copy of that kind: fastpipe repack"
        )
    return RemoteVolumes(far, storage_options, stage)


def _seen(
    policy: Retries, asked: tuple[ChunkStore, str] | Exception
) -> tuple[ChunkStore, str, ZarrArray, Listing] | Exception:
    """Return an array's store, the prefix of its keys, its metadata and the list of its objects.

    If this module cannot read the array, return the error.
    """
    if isinstance(asked, Exception):
        return asked
    store, prefix = asked
    try:
        array = _array(RetryingStore(store.bare, policy), store.location, prefix)
        UnitGrid(array.shape, array.chunk)  # raises an error if the array has too many chunks
        _, listing = scan_store(
            store.asking, store.location.path(prefix), prefix, {"": 0}, extensions="", allow_empty=True
        )  # fmt: skip
        return store, prefix, array, listing
    except (StoreError, VolumeError, FileNotFoundError, MissingDependencyError) as error:
        return error
    except OverflowError as error:
        url = store.location.path(prefix).rstrip("/")
        return VolumeError(f"{url} claims to be larger than anything that can be read: {error}")


def _array(store: Store, location: Location, prefix: str) -> ZarrArray:
    url, what = location.path(prefix).rstrip("/"), "is no Zarr array"
    for name in METADATA:
        try:
            content = store.get(f"{prefix}{name}").data
        except FileNotFoundError:
            continue
        found = parsed(f"{url}/{name}", content)
        if isinstance(found, ZarrArray) and found.chunk_nbytes > LARGEST_UNIT:
            found = f"its chunks have {in_bytes(found.chunk_nbytes)}"
        if isinstance(found, str):
            raise VolumeError(
                f"{url} cannot be read chunk by chunk, as {found}: {_UNREADABLE}. Leave stage= and "
                "storage_options= out, and tensorstore reads it, or make a copy of that kind: fastpipe repack"
            )
        if found is not None:
            return found
        what = "is a Zarr group"
        break
    inside = store.folders(prefix)
    if inside or what == "is a Zarr group":
        names = ", ".join(inside) or "nothing"
        raise VolumeError(f"{url} {what}; name an array in it behind a slash: it has {names}")
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)


class ChunkStore:
    """An object store, with the list of the dataset's chunks in this store.

    Each chunk is an object in the store.  The index of an object in the list is called its *row*.  ``bare``
    is the store itself, and ``asking`` is the store with retries for failed requests.
    """

    def __init__(self, bare: Store, location: Location, stage: Stage | None) -> None:
        self.bare, self.location, self._stage = bare, location, stage
        self.asking = RetryingStore(bare)
        self.parts: list[Rows] = []  # the rows of each array, until ``complete`` joins them
        self._count = 0
        self._listing: Listing | None = None
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._reader: ObjectReader | None = None
        self._pid = os.getpid()
        self._given_up: deque[_Reads] = deque()
        self._living: Counter[int] = Counter()  # for each row: how often running batches need the row

    def __getstate__(self) -> dict[str, Any]:
        own = ("_lock", "_reader", "_pid", "_given_up", "_living")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._begin()

    @property
    def how(self) -> str:
        near = "fetched ahead" if self._stage is None else f"staged in {str(self._stage.dir)!r}"
        return f"by {self.asking.describe()}, {near}"

    def add(self, path: str, prefix: str, array: ZarrArray, listing: Listing) -> RemoteChunks:
        counts = [-(-size // side) for size, side in zip(array.shape, array.chunk, strict=True)]
        numbers, rows = [], []
        for row in range(len(listing)):
            place = array.place(listing.key(row)[len(prefix) :])
            if place is not None:
                numbers.append(int(np.ravel_multi_index(place, counts)) if place else 0)
                rows.append(row)
        order = np.argsort(np.array(numbers, np.int64), kind="stable")
        rows = [rows[at] for at in order.tolist()]
        keys, versions = [listing.key(row) for row in rows], [listing.version(row) for row in rows]
        self.parts.append(Rows.of("", keys, [listing.size(row) for row in rows], versions))
        first, self._count = self._count, self._count + len(rows)
        state = f"{path} {listing.digest.hex()}"
        return RemoteChunks(self, prefix, array, counts, first, np.array(numbers, np.int64)[order], state)

    def complete(self) -> None:
        rows = Rows.joined(self.parts)
        paths = FrozenSamples(
            bytes(rows.paths.block), offsets_of(rows.paths.lengths), np.zeros(len(rows), np.int64),
            self.location.store,
        )  # fmt: skip
        self._listing = Listing(paths, "", rows.sizes, rows.versions)
        self.parts = []

    def reader(self) -> ObjectReader:
        self._be_here()
        if self._reader is None:
            with self._lock:
                if self._reader is None:
                    assert self._listing is not None
                    self._reader = new_reader(self.bare, self._listing, self._stage, self.location.key)
        return self._reader

    def _be_here(self) -> None:
        """Reinitialise if this process is a forked child."""
        if self._pid != os.getpid():
            self._begin()

    def need(self, rows: Int64Array, needed: Needed) -> None:
        """Announce the reads of a batch: each object will be read as often as ``rows`` contains its row."""
        reader = self.reader()
        self.settle()
        if len(rows):
            with self._lock:
                self._living.update(rows.tolist())
            needed.add(self, rows.tolist())
            reader.need(rows)

    def are_needed(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """Return True for each object in ``rows`` that running batches already need: bool (N,)."""
        self.settle()
        return np.array([self._living[row] > 0 for row in rows.tolist()], np.bool_)

    def settle(self) -> None:
        """Release the objects that finished batches announced but did not read."""
        self._be_here()
        while self._given_up:
            try:
                reads = self._given_up.popleft()
            except IndexError:  # another thread has removed the last entry
                return
            with self._lock:
                self._living.subtract(reads.rows)
                self._living += Counter()  # remove zero counts
            rows = np.array(list(reads.left.elements()), np.int64)
            if len(rows) and self._reader is not None:
                self._reader.forgo(rows, were_needed=True)

    def give_up(self, reads: _Reads) -> None:
        """Mark a batch as finished.  The garbage collector may call this method in any thread."""
        if reads.pid == self._pid == os.getpid():  # not in a child process, which has only a copy
            self._given_up.append(reads)

    def are_here(self, rows: Int64Array) -> None:
        """Cancel the prefetched reads of the objects ``rows``: their decoded units are already in memory."""
        if len(rows) and self._reader is not None and self._pid == os.getpid():
            self._reader.forgo(rows, were_needed=False)

    @property
    def downloaded(self) -> tuple[int, int]:
        is_mine = self._reader is not None and self._pid == os.getpid()
        return self._reader.counted() if is_mine and self._reader is not None else (0, 0)

    def close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and self._pid == os.getpid():
            reader.close()


class _Reads(NamedTuple):
    """The objects that a batch reads in process ``pid``; ``left`` counts each object's remaining reads."""

    pid: int
    rows: list[int]
    left: Counter[int]


class Needed:
    """The stored objects that a batch will read.  Deleting a ``Needed`` releases its unread objects."""

    def __init__(self) -> None:
        self._reads: dict[ChunkStore, _Reads] = {}
        self._lock = threading.Lock()

    def add(self, store: ChunkStore, rows: list[int]) -> None:
        """Add the ``rows`` that will be read from a store; call this method once for each store."""
        reads = self._reads[store] = _Reads(os.getpid(), rows, Counter(rows))
        weakref.finalize(self, store.give_up, reads).atexit = False

    def was_read(self, store: ChunkStore, row: int) -> None:
        with self._lock:
            reads = self._reads.get(store)
            if reads is not None and reads.left[row] > 0:
                reads.left[row] -= 1

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Return a context in which all reads by this thread count as reads of this batch."""
        before = _current.set(self)
        try:
            yield
        finally:
            _current.reset(before)


_current: ContextVar[Needed | None] = ContextVar("_current", default=None)  # the batch that a thread reads


class RemoteChunks:
    """The chunks of an array in an object store.  This class has the interface ``core.types.ChunkObjects``.

    ``numbers`` contains the numbers of the existing chunks in ascending order.
    """

    def __init__(
        self, store: ChunkStore, prefix: str, array: ZarrArray, counts: Sequence[int], first: int,
        numbers: Int64Array, state: str,
    ) -> None:  # fmt: skip
        self.store, self.state, self.how = store, state, store.how
        self._prefix, self._array, self._counts = prefix, array, tuple(counts)
        self._first, self._numbers = first, numbers

    def path(self, chunk: int) -> str:
        place = tuple(int(at) for at in np.unravel_index(chunk, self._counts))
        return self.store.location.path(f"{self._prefix}{self._array.key(place)}")

    def rows(self, chunks: Int64Array) -> Int64Array:
        """Return each chunk's index in the store's list of objects; -1 for a chunk that was never written."""
        if not len(self._numbers):
            return np.full(len(chunks), -1, np.int64)
        places = np.minimum(np.searchsorted(self._numbers, chunks), len(self._numbers) - 1)
        return np.where(self._numbers[places] == chunks, places + self._first, -1)

    def read(self, chunk: int) -> bytes | None:
        """Return the content of a chunk's object; None if the chunk was never written."""
        row = int(self.rows(np.array([chunk]))[0])
        if row < 0:
            return None
        try:
            return self.store.reader().read("", row)
        finally:
            if (needed := _current.get()) is not None:
                needed.was_read(self.store, row)

    @contextmanager
    def together(self, chunks: Sequence[int]) -> Iterator[None]:
        """Return a context in which the caller reads each of ``chunks``; chunks are fetched in parallel."""
        if _current.get() is not None or len(chunks) < 2:  # a batch has announced the chunks already
            yield
            return
        needed = Needed()
        rows = self.rows(np.array(chunks, np.int64))
        self.store.need(rows[rows >= 0], needed)
        with needed.reading():
            yield
