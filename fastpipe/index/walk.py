"""List folders and all below: from what is known of them, in threads where they are slow."""

from __future__ import annotations

import os
import queue
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from fastpipe._files import is_spent, retrying_open
from fastpipe.index.file_systems import FileSystems, is_settled

__all__ = ["Folder", "Stamp", "Waiting", "Walker"]

T = TypeVar("T")
# Device, inode, and the times of the last change of content and of status, in nanoseconds.
Stamp = tuple[int, int, int, int]

# Listing waits for the disk or the network, so there may be many more threads than cores.
THREADS = 32
_TELL_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class Folder(Generic[T]):
    """One folder as it was found.

    Args:
        path: from the root; what the root's path is joined to.
        stamp: tells whether the folder has changed since; None if nothing can tell.
        folders: the names of the folders in it, and of links to folders.
        count: how many names ``content`` holds.
        content: what was made of the other names.
    """

    path: str
    stamp: Stamp | None
    folders: Sequence[str]
    count: int
    content: T


class _Task(NamedTuple):
    top: int  # which of the folders to walk this one is below
    path: str
    status: os.stat_result | None = None  # if somebody asked for it already
    is_top: bool = False


_Visit = tuple[int, Folder[T] | None, list[_Task]]


class Waiting:
    """Says when a thread spends its time waiting, so that other threads could work meanwhile.

    Args:
        clock: the time that passes, in seconds.
        busy: the time in which this thread has run.
    """

    _WINDOW_S = 0.05

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, busy: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock, self._busy = clock, busy
        self._since = clock(), busy()

    def __call__(self) -> bool:
        """Whether more than half of the time since the last answer, 50 ms or more, was waiting."""
        now = self._clock()
        passed = now - self._since[0]
        if passed < self._WINDOW_S:
            return False
        busy = self._busy()
        ran, self._since = busy - self._since[1], (now, busy)
        return passed - ran > passed / 2


class Walker(Generic[T]):
    """Finds folders with their files, as ``sorted(os.walk(top, followlinks=True))`` does.

    Whatever is not a folder is a file: broken links, fifos, and links in a loop once the
    operating system gives up following them.  A folder that cannot be read is left out,
    with all below it.

    Args:
        prefix: what the paths below are appended to: a folder with its separator, or nothing.
        take: makes of a folder's path and the names in it what is to be kept of them; called from
            threads.  Returns how many it kept, and them.
        known: folders as they were found before, by path.  One whose stamp is the same is not
            listed again.
        now: the time in nanoseconds, on the clock of the file systems.
        file_systems: which of them can be relied on.
        is_waiting: whether listing in one thread is mostly waiting; asked after each folder.
        on_progress: called with the number of folders and files so far, a few times a second.
        clock: the time that passes, in seconds.
    """

    def __init__(
        self,
        prefix: str,
        take: Callable[[str, list[str]], tuple[int, T]],
        *,
        known: Mapping[str, Folder[T]] | None = None,
        now: Callable[[], int] = time.time_ns,
        file_systems: FileSystems | None = None,
        is_waiting: Callable[[], bool] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefix, self._take, self._now = prefix, take, now
        self._known = known or {}
        self._file_systems = file_systems or FileSystems()
        self._is_waiting = is_waiting or Waiting()
        self._on_progress, self._clock, self._told = on_progress, clock, clock()
        self._folders = self._files = 0
        self._remote = False

    def walk(self, tops: Sequence[str]) -> list[list[Folder[T]]]:
        """For each of ``tops`` it and all folders below, sorted by path; empty if it is no folder."""
        found: list[list[Folder[T]]] = [[] for _ in tops]
        pending = [_Task(number, path, is_top=True) for number, path in enumerate(tops)]
        pending.reverse()
        while pending and not (len(pending) > 1 and (self._remote or self._is_waiting())):
            pending += self._put(found, self._visit(pending.pop()))
        if pending:
            self._walk_in_threads(pending, found)
        for folders in found:
            folders.sort(key=lambda folder: folder.path)
        return found

    def _walk_in_threads(self, tasks: Iterable[_Task], found: list[list[Folder[T]]]) -> None:
        done: queue.SimpleQueue[Future[_Visit[T]]] = queue.SimpleQueue()
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="fastpipe-scan")
        unfinished = 0
        try:
            while True:
                for task in tasks:
                    pool.submit(self._visit, task).add_done_callback(done.put)
                    unfinished += 1
                if unfinished == 0:
                    return
                tasks = ()
                try:
                    tasks = self._put(found, done.get(timeout=_TELL_EVERY_S).result())
                    unfinished -= 1
                except queue.Empty:
                    self._tell()
        finally:
            pool.shutdown(cancel_futures=True)

    def _put(self, found: list[list[Folder[T]]], visit: _Visit[T]) -> list[_Task]:
        """Keep what was found of a folder; returns what is to be visited next."""
        top, folder, below = visit
        if folder is not None:
            found[top].append(folder)
            self._folders += 1
            self._files += folder.count
            self._tell()
        return below

    def _tell(self) -> None:
        now = self._clock()
        if self._on_progress is not None and now - self._told >= _TELL_EVERY_S:
            self._told = now
            self._on_progress(self._folders, self._files)

    def _visit(self, task: _Task) -> _Visit[T]:
        path = self._prefix + task.path
        status = task.status or _status(path)
        if task.is_top and (status is None or not stat.S_ISDIR(status.st_mode)):
            return task.top, None, []
        known = self._known.get(task.path)
        if known is not None and status is not None and known.stamp == _stamp(status):
            below = self._unchanged_below(task, known, status)
            if below is not None:
                return task.top, known, below
        folder = self._list(task.path, status)
        names = () if folder is None else folder.folders
        return task.top, folder, [_Task(task.top, os.path.join(task.path, name)) for name in names]

    def _unchanged_below(self, task: _Task, known: Folder[T], status: os.stat_result) -> list[_Task] | None:
        """What is below a folder with the same stamp; None if it must be listed all the same."""
        path = self._prefix + task.path
        if not self._file_systems.is_local(status.st_dev, path) or not _may_list(path):
            return None
        below = []
        for name in known.folders:
            inner = os.path.join(task.path, name)
            found = _status(self._prefix + inner)
            if found is None or not stat.S_ISDIR(found.st_mode):
                return None  # a link that led to a folder, and is a file from now on
            below.append(_Task(task.top, inner, found))
        return below

    def _list(self, inner: str, status: os.stat_result | None) -> Folder[T] | None:
        path, before = self._prefix + inner, self._now()
        if status is not None and self._file_systems.is_remote(status.st_dev, path):
            self._remote = True
        try:
            with retrying_open(os.scandir, path) as entries:
                folders, files, lasting = _split(entries)
        except OSError as error:
            if is_spent(error):
                raise
            return None
        stamp = None
        if lasting and status is not None and self._file_systems.is_local(status.st_dev, path):
            stamp = _stamp(status)
            is_old = is_settled(max(stamp[2:]), before)
            after = _status(path)  # else another folder may have taken its name before it was listed
            if not is_old or after is None or _stamp(after) != stamp:
                stamp = None
        return Folder(inner, stamp, folders, *self._take(inner, files))


def _split(entries: Iterable[os.DirEntry[str]]) -> tuple[list[str], list[str], bool]:
    """The names of the folders, and of everything else; and whether only a change of the folder
    could make them others, as it could not where links lead to what may become a folder."""
    folders: list[str] = []
    files: list[str] = []
    lasting = True
    for entry in entries:
        try:
            is_folder = entry.is_dir()
            lasting = lasting and (is_folder or not entry.is_symlink())
        except OSError:
            is_folder = lasting = False
        if is_folder:
            folders.append(entry.name)
        else:
            files.append(entry.name)
    return folders, files, lasting


def _may_list(path: str) -> bool:
    return os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
