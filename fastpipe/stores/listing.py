"""List the objects of a store, folder by folder, as rows in flat arrays."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import operator
import os
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.array_cache import Arrays, KeptFiles
from fastpipe.core.class_folders import THREADS
from fastpipe.core.sample_tables import FrozenSamples, Packed, checked_offsets, offsets_of, pack_paths
from fastpipe.core.types import Store, StoredObject

# A listing is stored in flat arrays, as ``FrozenSamples``, and needs almost no memory in worker processes.

Int64Array = npt.NDArray[np.int64]

_NAME_NBYTES = 16
_CHUNK = 1 << 12  # number of rows that are Python objects at a time, because these need much more memory


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some objects of a store: their paths, sizes and versions.

    ``paths`` are the objects' paths relative to the dataset's root, all different.  ``sizes``, int64 (N,),
    are in bytes.  ``versions`` are the versions that the store reports.  A version may be empty.
    """

    paths: Packed
    sizes: Int64Array
    versions: Packed

    @classmethod
    def of(cls, folder: str, names: Sequence[str], sizes: Sequence[int], versions: Sequence[str]) -> Rows:
        return cls(pack_paths(folder, names), np.array(sizes, dtype=np.int64), pack_paths("", versions))

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        if len(parts) == 1:
            return parts[0]
        sizes = np.concatenate([np.zeros(0, dtype=np.int64), *(part.sizes for part in parts)])
        paths = joined_texts([part.paths for part in parts])
        return cls(paths, sizes, joined_texts([part.versions for part in parts]))

    def __len__(self) -> int:
        return len(self.sizes)

    def each_path(self) -> Iterator[str]:
        return _texts(self.paths)

    def taken(self, numbers: Sequence[int]) -> Rows:
        paths, versions = list(_texts(self.paths)), list(_texts(self.versions))
        return Rows(
            pack_paths("", [paths[number] for number in numbers]),
            self.sizes[np.array(numbers, dtype=np.intp)],
            pack_paths("", [versions[number] for number in numbers]),
        )


class Listing:
    """The objects of a dataset's samples.  Object (row) number i belongs to the dataset's sample i.

    Each sample takes the bytes of its version and 16 bytes more.  ``paths`` begin with the dataset's root.
    An object's key begins with ``prefix`` where its path begins with the root.  ``sizes``, int64 (N,), are in
    bytes.

    >>> paths = FrozenSamples(b"a/1.jpga/2.jpg", np.array([0, 7, 14]), np.zeros(2, np.int64), "s3://photos/of/")
    >>> listing = Listing(paths, "of/", np.array([10, 20]), pack_paths("", ["x", "y"]))
    >>> listing.find("s3://photos/of/a/2.jpg"), listing.key(1), listing.size(1), listing.version(1)
    (1, 'of/a/2.jpg', 20, 'y')
    """

    def __init__(self, paths: FrozenSamples, prefix: str, sizes: Int64Array, versions: Packed) -> None:
        self.paths = paths
        self.prefix = prefix
        self.sizes = sizes.view()
        self.sizes.flags.writeable = False
        self._versions = bytes(versions.block)
        self._version_offsets = offsets_of(versions.lengths)
        self._digest: bytes | None = None
        # Ascending hashes of the paths, and the row of each hash.
        self._places: tuple[Int64Array, Int64Array] | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def path(self, row: int) -> str:
        return self.paths.path(row)

    def key(self, row: int) -> str:
        return self.prefix + self._rest(row).decode("utf-8", "surrogatepass")

    def size(self, row: int) -> int:
        return self.sizes.item(row)

    def version(self, row: int) -> str:
        """Return the version of the object in ``row``.  It is empty if the store has no versions."""
        return self._version(row).decode("utf-8", "surrogatepass")

    def name(self, row: int, store_name: str) -> bytes:
        """Return 16 bytes that identify an object and its version, the same in all listings of the store."""
        digest = hashlib.blake2b(digest_size=_NAME_NBYTES)
        key = _encoded(self.prefix) + self._rest(row)
        for part in (_encoded(store_name), key, self._version(row), b"%d" % self.size(row)):
            _feed(digest, part)
        return digest.digest()

    @property
    def digest(self) -> bytes:
        """Return 16 bytes that identify the root, the objects, their order, their sizes and versions."""
        if self._digest is None:
            digest = hashlib.blake2b(digest_size=_NAME_NBYTES)
            texts = (_encoded(self.paths.prefix), _encoded(self.prefix), self.paths.arena, self._versions)
            for text in texts:
                _feed(digest, text)
            for array in (self.paths.offsets, self._version_offsets, self.sizes):
                _feed(digest, np.ascontiguousarray(array, dtype="<i8").data)
            self._digest = digest.digest()
        return self._digest

    def find(self, path: str) -> int:
        """Return a path's first row, or -1 if the path was not listed.  The first call builds a table."""
        root = self.paths.prefix
        if not path.startswith(root):
            return -1
        rest = _encoded(path[len(root) :])
        if self._places is None:
            offsets, arena = self.paths.offsets, self.paths.arena
            parts = (offsets[at : at + _CHUNK + 1].tolist() for at in range(0, len(self), _CHUNK))
            each = (hash(arena[start:end]) for part in parts for start, end in pairwise(part))
            hashes = np.fromiter(each, np.int64, count=len(self))
            rows = np.argsort(hashes, kind="stable")
            self._places = hashes[rows], rows
        hashes, rows = self._places
        at = int(hashes.searchsorted(hash(rest)))
        while at < len(hashes) and hashes[at] == hash(rest):
            if self._rest(rows.item(at)) == rest:
                return int(rows[at])
            at += 1
        return -1

    def _rest(self, row: int) -> bytes:
        offsets = self.paths.offsets
        return self.paths.arena[offsets.item(row) : offsets.item(row + 1)]

    def _version(self, row: int) -> bytes:
        offsets = self._version_offsets
        return self._versions[offsets.item(row) : offsets.item(row + 1)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Listing:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_places": None}  # Python's hashes differ between processes

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.sizes.flags.writeable = False


def joined_texts(parts: Sequence[Packed]) -> Packed:
    lengths = [np.zeros(0, dtype=np.int64), *(part.lengths for part in parts)]
    return Packed(b"".join(part.block for part in parts), np.concatenate(lengths))


def _texts(packed: Packed) -> Iterator[str]:
    block, start = bytes(packed.block), 0
    for end in np.cumsum(packed.lengths).tolist():
        yield block[start:end].decode("utf-8", "surrogatepass")
        start = end


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _feed(digest: hashlib.blake2b, part: bytes | memoryview) -> None:
    """Add a part and its length to a digest.  So different sequences of parts give different digests."""
    digest.update((part.nbytes if isinstance(part, memoryview) else len(part)).to_bytes(8, "little"))
    digest.update(part)


# A store has no cheap way to report changes.  So a cached listing is used, with a message in the log, until a
# new listing is requested.

_VERSION = 1


class ListingKey(NamedTuple):
    """Identifies a cached listing: the store, the prefix of all keys, and the extensions of the files."""

    store: str
    prefix: str
    endings: tuple[str, ...]

    def fields(self) -> list[Any]:
        return ["listing", _VERSION, self.store, self.prefix, list(self.endings)]


class KeptFolders(NamedTuple):
    """The names of the class folders, and the time of their listing in nanoseconds since 1970."""

    listed: int
    names: list[str]


class KeptRows(NamedTuple):
    """The content of one class folder, and the time of its listing in nanoseconds since 1970."""

    listed: int
    rows: Rows


class ListingCache:
    """A cache of listings, in files of a folder that may also contain other files.

    ``now`` returns nanoseconds since 1970, which are only shown to users.  If the folder cannot be used, each
    process logs one warning.
    """

    def __init__(self, path: str | os.PathLike[str], *, now: Callable[[], int] = time.time_ns) -> None:
        self.path = Path(path)
        self.now = now
        self._files = KeptFiles(self.path, "The listing of the store is not kept, so it is listed each time")

    def load_folders(self, store: str, prefix: str) -> KeptFolders | None:
        """Return the cached class folders; None if they are not in the cache."""
        return self._files.load(["class folders", _VERSION, store, prefix], _read_folders)

    def save_folders(self, store: str, prefix: str, folders: KeptFolders) -> None:
        self._files.save(["class folders", _VERSION, store, prefix], {"folders": folders}, {})

    def load(self, key: ListingKey) -> dict[str, KeptRows]:
        """Return the cached objects by folder.  Return {} if there are none, or if the file is damaged."""
        return self._files.load(key.fields(), _read_rows) or {}

    def save(self, key: ListingKey, folders: Mapping[str, KeptRows]) -> None:
        """Store the content of folders, in place of the content that was stored with ``key`` before."""
        about = [[name, kept.listed, len(kept.rows)] for name, kept in folders.items()]
        rows = Rows.joined([kept.rows for kept in folders.values()])
        arrays = {"sizes": rows.sizes}
        for name, texts in (("path", rows.paths), ("version", rows.versions)):
            arrays[f"{name}s"] = np.frombuffer(texts.block, dtype=np.uint8)
            arrays[f"{name}_lengths"] = texts.lengths.astype(np.int32)
        self._files.save(key.fields(), {"folders": about}, arrays)


def age_in_words(nanoseconds: int) -> str:
    """Return a duration in nanoseconds as text, rounded down to days, hours or minutes.

    >>> age_in_words(7300 * 10**9), age_in_words(86400 * 10**9), age_in_words(3)
    ('2 hours', '1 day', 'less than a minute')
    """
    seconds = nanoseconds // 10**9
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = seconds // length
            return f"{count} {unit}" if count == 1 else f"{count} {unit}s"
    return "less than a minute"


def _read_folders(about: dict[str, Any], array: Arrays) -> KeptFolders | None:
    listed, names = about["folders"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"folders are called {names!r}")
    return KeptFolders(int(listed), names) if names else None


def _read_rows(about: dict[str, Any], array: Arrays) -> dict[str, KeptRows]:
    sizes = array("sizes", np.int64)
    paths, path_ends = _read_texts(array, "path", len(sizes))
    versions, version_ends = _read_texts(array, "version", len(sizes))
    found: dict[str, KeptRows] = {}
    first = 0
    for name, listed, count in about["folders"]:
        end = first + count
        if type(name) is not str or type(count) is not int or count < 0 or end > len(sizes):
            raise ValueError(f"a folder is described by {name!r}, {listed!r}, {count!r}")
        rows = Rows(
            _part(paths, path_ends, first, end), sizes[first:end], _part(versions, version_ends, first, end)
        )
        found[name] = KeptRows(int(listed), rows)
        first = end
    if first != len(sizes):
        raise ValueError(f"{len(sizes)} objects are in folders of {first}")
    return found


def _read_texts(array: Arrays, name: str, count: int) -> tuple[Packed, npt.NDArray[np.int64]]:
    """Return texts and the offset of each.  Raise a ValueError for invalid texts, or if not ``count``."""
    block = array(f"{name}s", np.uint8).tobytes()
    lengths = array(f"{name}_lengths", np.int32).astype(np.int64)
    if len(lengths) != count:
        raise ValueError(f"{len(lengths)} {name}s of {count} objects")
    return Packed(memoryview(block), lengths), checked_offsets(block, lengths)


def _part(texts: Packed, offsets: npt.NDArray[np.int64], first: int, end: int) -> Packed:
    return Packed(texts.block[int(offsets[first]) : int(offsets[end])], texts.lengths[first:end])


_TELL_EVERY_S = 0.25
_SPLIT_FROM = 3  # from this page of a folder on, a listing with parallel requests may be worthwhile

# For each folder (without a final slash): the name, size and version of each object in it.
_Found = dict[str, list[tuple[str, int, str]]]


class _Task(NamedTuple):
    top: int  # number of the top folder that contains the folder
    inside: str  # the folder's path relative to the prefix, with a final slash
    after: str = ""  # list only keys that follow this key
    end: str = ""  # list only keys that precede this key


class _Visit(NamedTuple):
    top: int
    found: _Found
    rest: list[_Task]  # the remaining parts of the folder, for other threads


class Lister:
    """Lists folders and everything in them, with threads.  The arguments are those of ``scan_store``.

    A store lists a folder page by page, so one thread lists a folder.  But if threads are idle, and the store
    can begin a listing after a key (``objects_after``), several threads list a long folder with subfolders.
    Each thread then lists a range of the folder's keys.
    """

    def __init__(
        self,
        store: Store,
        root: str,
        prefix: str,
        endings: tuple[str, ...],
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self.root = root
        self._store, self._prefix, self._endings, self._on_progress = store, prefix, endings, on_progress
        self._objects_after = store.objects_after
        # Extensions that contain a slash are compared with the full path.
        self._before = root if any("/" in ending for ending in endings) else ""
        self._told = time.monotonic()
        self._is_over = threading.Event()
        self._unfinished = 0
        # For each page, the number of new folders and of new objects.  Threads append.
        self._pages: list[tuple[int, int]] = []

    def listed(self, tops: Sequence[str]) -> list[Rows]:
        """For each folder in ``tops``, return all objects below it, sorted by folder and name."""
        found: list[_Found] = [{} for _ in tops]
        rows = [_rows({}) for _ in tops]
        left = [1 for _ in tops]
        tasks = [_Task(number, top) for number, top in enumerate(tops)]
        with contextlib.closing(self._visits(tasks)) as visits:
            for visit in visits:
                for folder, objects in visit.found.items():
                    known = found[visit.top].setdefault(folder, objects)
                    if known is not objects:
                        known.extend(objects)
                left[visit.top] += len(visit.rest) - 1
                if not left[visit.top]:
                    rows[visit.top], found[visit.top] = _rows(found[visit.top]), {}
        return rows

    def _visits(self, tasks: list[_Task]) -> Generator[_Visit, None, None]:
        """Run ``tasks`` and the tasks that result from them, and yield the result of each."""
        done: queue.SimpleQueue[Future[_Visit]] = queue.SimpleQueue()
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="fastpipe-list")
        self._is_over.clear()
        self._unfinished = 0
        try:
            while tasks or self._unfinished:
                self._unfinished += len(tasks)
                for task in tasks:
                    pool.submit(self._visit, task).add_done_callback(done.put)
                tasks = []
                self._tell()
                try:
                    finished = done.get(timeout=_TELL_EVERY_S)
                except queue.Empty:
                    continue
                self._unfinished -= 1
                visit = finished.result()
                yield visit
                tasks = visit.rest
        finally:
            self._is_over.set()
            pool.shutdown(cancel_futures=True)

    def _tell(self) -> None:
        now = time.monotonic()
        if self._on_progress is not None and now - self._told >= _TELL_EVERY_S:
            self._told = now
            pages = self._pages.copy()
            self._on_progress(sum(page[0] for page in pages), sum(page[1] for page in pages))

    def _visit(self, task: _Task) -> _Visit:
        """List a folder and everything in it, or the range of keys that the task describes."""
        found: _Found = {}
        may_split, last = not task.after and self._objects_after is not None, ""
        cut = len(self._prefix + task.inside)
        for number, page in enumerate(self._pages_of(task)):
            if self._is_over.is_set():
                break
            self._put(found, page)
            if not may_split or not page:
                continue
            # If the store does not list in the order of keys, the folder cannot be listed in parts.
            may_split, last = _are_rising(page, last), page[-1].key
            is_long = number >= _SPLIT_FROM and self._unfinished < THREADS
            # Split only if most objects are in subfolders.
            if may_split and is_long and 2 * sum("/" in one.key[cut:] for one in page) > len(page):
                may_split = False
                if rest := self._parts(task, last):
                    return _Visit(task.top, found, rest)
        return _Visit(task.top, found, [])

    def _pages_of(self, task: _Task) -> Iterator[Sequence[StoredObject]]:
        prefix = self._prefix + task.inside
        if not task.after:
            yield from self._store.objects(prefix)
            return
        assert self._objects_after is not None
        for page in self._objects_after(prefix, task.after):
            yield [one for one in page if task.after < one.key and (not task.end or one.key < task.end)]
            if task.end and page and page[-1].key >= task.end:
                return

    def _parts(self, task: _Task, last: str) -> list[_Task]:
        """Divide the keys after ``last`` at subfolders, and return a task for each part.  Return no task if
        no subfolder follows ``last``."""
        prefix = self._prefix + task.inside
        starts = sorted(f"{prefix}{name}/" for name in self._store.folders(prefix))
        starts = starts[bisect.bisect_right(starts, last) :]
        if not starts:
            return []
        chosen = [last, *starts[:: -(-len(starts) // THREADS)]]
        return [
            _Task(task.top, task.inside, after, end)
            for after, end in zip(chosen, [*chosen[1:], ""], strict=True)
        ]

    def _put(self, found: _Found, page: Sequence[StoredObject]) -> None:
        """Sort the objects of a page into their folders."""
        cut, known, count = len(self._prefix), len(found), 0
        for key, size, version in page:
            rest = key[cut:]
            if (self._before + rest).lower().endswith(self._endings):
                folder, _, name = rest.rpartition("/")
                if name:  # an object without a name only marks a folder
                    found.setdefault(folder, []).append((name, size, version))
                    count += 1
        self._pages.append((len(found) - known, count))


def _rows(found: _Found) -> Rows:
    """Return the objects of all folders, sorted by folder and name.  Remove the objects from ``found``."""
    objects = _taken(found)
    parts = [Rows.of("", (), (), ())]
    while some := list(islice(objects, _CHUNK)):
        parts.append(Rows.of("", *zip(*some, strict=True)))
    return Rows.joined(parts)


def _taken(found: _Found) -> Iterator[tuple[str, int, str]]:
    for folder in sorted(found):
        objects = found.pop(folder)
        objects.sort(reverse=True)
        while objects:
            name, size, version = objects.pop()
            yield f"{folder}/{name}" if folder else name, size, version


def _are_rising(page: Sequence[StoredObject], last: str) -> bool:
    keys = [last, *(one.key for one in page)]
    return all(map(operator.lt, keys, keys[1:]))
