"""List the objects of a store, folder by folder, as packed rows."""

from __future__ import annotations

import bisect
import contextlib
import operator
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from fastpipe.index.listing import Rows
from fastpipe.index.walk import THREADS
from fastpipe.protocols import Store
from fastpipe.types import StoredObject

__all__ = ["Lister"]

_TELL_EVERY_S = 0.25
_SPLIT_FROM = 3  # the page of a folder from which on it may be worth more requests to have it sooner
_PACK_FROM = 1000  # objects of one folder: fewer cost more to pack than to leave as Python's objects


class _Task(NamedTuple):
    top: int  # which of the folders to list this one is, or is a part of
    inside: str  # that one: from the prefix on, with a slash behind it
    after: str = ""  # list only keys after this one,
    end: str = ""  # and before this one


class _Visit(NamedTuple):
    top: int
    found: dict[str, _Folder]  # by path, without the slash behind it
    rest: list[_Task]  # what is left for others to list


class Lister:
    """Lists folders with all below them, in threads.

    A store lists a folder page by page, so one folder is one thread's.  But where some have nothing to
    do, a long folder that has others in it is listed from several of these on, if the store can begin
    there (``objects_after``).

    Args:
        store: where they are.
        root: what all paths begin with, ending in a slash.
        prefix: what all keys have in its place: empty, or ending in a slash.
        endings: of the objects to take.
        on_progress: called with the number of folders and of objects so far, a few times a second.
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
        # What an ending with a slash in it is compared with: more of the path than the key may have.
        self._before = root if any("/" in ending for ending in endings) else ""
        self._told = time.monotonic()
        self._is_over = threading.Event()
        self._unfinished = 0
        self._pages: list[tuple[int, int]] = []  # of each, new folders and objects; threads append

    def listed(self, tops: Sequence[str]) -> list[Rows]:
        """What is below each of ``tops``, its folders sorted by path."""
        found: list[dict[str, _Folder]] = [{} for _ in tops]
        rows = [_NONE for _ in tops]
        left = [1 for _ in tops]
        tasks = [_Task(number, top) for number, top in enumerate(tops)]
        with contextlib.closing(self._visits(tasks)) as visits:
            for visit in visits:
                folders = found[visit.top]
                for name, folder in visit.found.items():
                    folders.setdefault(name, _Folder(name)).add_all(folder)
                left[visit.top] += len(visit.rest) - 1
                if not left[visit.top]:
                    rows[visit.top], found[visit.top] = _packed(folders), {}
        return rows

    def _visits(self, tasks: list[_Task]) -> Generator[_Visit, None, None]:
        """Do tasks, and those that come of them."""
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
        """List a folder with all below it, or a part of that."""
        folders: dict[str, _Folder] = {}
        may_split, last = not task.after and self._objects_after is not None, ""
        for number, page in enumerate(self._pages_of(task)):
            if self._is_over.is_set():
                break
            self._put(folders, page)
            if not may_split or not page:
                continue
            # A store that has another order than that of its keys cannot be listed in parts.
            may_split, last = _are_rising(page, last), page[-1].key
            is_long = number >= _SPLIT_FROM and self._unfinished < THREADS
            if may_split and is_long and self._is_deep(task, page):
                may_split = False
                if rest := self._parts(task, last):
                    return _Visit(task.top, folders, rest)
        return _Visit(task.top, folders, [])

    def _is_deep(self, task: _Task, page: Sequence[StoredObject]) -> bool:
        """Whether most objects of a page are in folders below."""
        cut = len(self._prefix + task.inside)
        return 2 * sum("/" in one.key[cut:] for one in page) > len(page)

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
        """What comes after a key, in parts that begin with folders; none if there are no folders."""
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

    def _put(self, folders: dict[str, _Folder], page: Sequence[StoredObject]) -> None:
        """Sort the objects of a page into their folders."""
        cut, before, endings = len(self._prefix), self._before, self._endings
        found: dict[str, list[tuple[str, int, str]]] = {}
        for key, size, version in page:
            rest = key[cut:]
            if (before + rest).lower().endswith(endings):
                folder, _, name = rest.rpartition("/")
                if name:  # else it stands for a folder
                    found.setdefault(folder, []).append((name, size, version))
        known = len(folders)
        for folder, objects in found.items():
            if folder not in folders:
                folders[folder] = _Folder(folder)
            folders[folder].add(objects)
        self._pages.append((len(folders) - known, sum(map(len, found.values()))))


class _Folder:
    """The objects of one folder: name, size and version of a few, and packed those before them."""

    def __init__(self, name: str) -> None:
        self.inside = f"{name}/" if name else ""
        self.few: list[tuple[str, int, str]] = []
        self.packed: list[Rows] = []
        self._last = ""
        self._is_sorted = True

    def add(self, objects: Sequence[tuple[str, int, str]]) -> None:
        """Append some."""
        self.few += objects
        if len(self.few) >= _PACK_FROM:
            self._pack()

    def add_all(self, other: _Folder) -> None:
        """Append those of another part of the folder."""
        self._is_sorted = other._is_sorted and not self.packed
        self._last = other._last
        self.packed += other.packed
        self.add(other.few)

    def rows(self) -> Rows:
        """All of them, sorted by name."""
        if self.few:
            self._pack()
        rows = Rows.joined(self.packed)
        if self._is_sorted:
            return rows
        paths = list(rows.each_path())  # which all begin with the same folder
        return rows.taken(sorted(range(len(paths)), key=paths.__getitem__))

    def _pack(self) -> None:
        self.few.sort()
        self._is_sorted = self._is_sorted and self._last < self.few[0][0]
        self._last = self.few[-1][0]
        names, sizes, versions = zip(*self.few, strict=True)
        self.packed.append(Rows.of(self.inside, names, sizes, versions))
        self.few = []


def _packed(folders: Mapping[str, _Folder]) -> Rows:
    """The objects of all folders, these sorted by path."""
    parts: list[Rows] = []
    few: list[tuple[str, int, str]] = []
    for name in sorted(folders):
        folder = folders[name]
        if folder.packed:
            parts += [_rows(few), folder.rows()]
            few = []
        else:
            few += [(folder.inside + name, size, version) for name, size, version in sorted(folder.few)]
    return Rows.joined([*parts, _rows(few)])


def _rows(objects: Sequence[tuple[str, int, str]]) -> Rows:
    paths, sizes, versions = zip(*objects, strict=True) if objects else ((), (), ())
    return Rows.of("", paths, sizes, versions)


def _are_rising(page: Sequence[StoredObject], last: str) -> bool:
    """Whether each key is after the one before it."""
    keys = [last, *(one.key for one in page)]
    return all(map(operator.lt, keys, keys[1:]))


_NONE = _rows([])
