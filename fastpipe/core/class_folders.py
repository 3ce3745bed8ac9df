"""Find the classes and the samples of a folder that contains one folder for each class.

The results, their order and the errors are those of ``torchvision.datasets.folder``.
"""

from __future__ import annotations

import os
import queue
import stat
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from fastpipe.core.array_cache import Arrays, KeptFiles, default_folder
from fastpipe.core.file_identity import FileSystems, is_settled
from fastpipe.core.files import is_spent, retrying_open
from fastpipe.core.sample_tables import Packed, SampleTable, SampleTableBuilder, checked_offsets, pack_paths
from fastpipe.core.text import printable
from fastpipe.errors import OptionError
from fastpipe.options import Subset

T = TypeVar("T")
# Device, inode, time of modification and time of change, in nanoseconds.
Stamp = tuple[int, int, int, int]

# Listing mostly waits for the disk or the network, so the number of threads is larger than that of cores.
THREADS = 32
_TELL_EVERY_S = 0.25
_WINDOW_S = 0.05


@dataclass(frozen=True, slots=True)
class Folder(Generic[T]):
    """The listing of one folder.

    Attributes:
        path: path of the folder, relative to the root.
        stamp: numbers that change whenever the folder changes; None if no reliable numbers are available.
        folders: names of the folders in this folder.
        count: number of files that ``content`` represents.
        content: the object that ``Walker``'s function ``take`` returned for the files of this folder.
    """

    path: str
    stamp: Stamp | None
    folders: Sequence[str]
    count: int
    content: T


class _Task(NamedTuple):
    top: int  # number of the top folder that contains this folder
    path: str
    status: os.stat_result | None = None  # None if unknown
    is_top: bool = False


_Visit = tuple[int, Folder[T] | None, list[_Task]]


def waits(since: tuple[float, float]) -> bool:
    """Return whether at least 50 ms have passed, and this thread waited for more than half of that time.
    ``since`` contains ``perf_counter()`` and ``thread_time()`` from the beginning of that time."""
    passed, ran = time.perf_counter() - since[0], time.thread_time() - since[1]
    return passed >= _WINDOW_S and passed - ran > passed / 2


class Walker(Generic[T]):
    """Finds folders and their files, in the order of ``sorted(os.walk(top, followlinks=True))``.

    Every entry that is not a folder counts as a file, including broken links, fifos, and links in a loop that
    the operating system does not follow any more.  A folder that cannot be read is left out, with all
    folders and files in it.

    Args:
        prefix: prefix of all paths: a folder with its separator, or an empty string.
        take: a function that gets a folder's path and the names of its files.  It returns how many of these
            files are used, and an object that represents the used files.  Any thread may call it.
        known: the listings of a previous scan, by path.  A folder with the same stamp is not listed again.
        now: returns the current time on the clock of the file systems, in nanoseconds.
        is_waiting: returns whether the thread that lists folders has spent most of its time waiting.  It is
            called before each folder.
        on_progress: is called with the number of folders and of files found so far, a few times a second.
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
        self._is_waiting = is_waiting or partial(waits, (time.perf_counter(), time.thread_time()))
        self._on_progress, self._clock, self._told = on_progress, clock, clock()
        self._folders = self._files = 0
        self._remote = False

    def walk(self, tops: Sequence[str]) -> list[list[Folder[T]]]:
        """For each path in ``tops``, return a list of this folder and all folders below it, sorted by path.
        If a path is not a folder, its list is empty."""
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
        """Store the result for a folder in ``found``, and return the tasks to visit next."""
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
        """Return tasks that visit the known subfolders of a folder with an unchanged stamp.  Return None if
        the folder must be listed again although its stamp is unchanged."""
        path = self._prefix + task.path
        may_list = os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids)
        if not (may_list and self._file_systems.is_local(status.st_dev, path)):
            return None
        below = []
        for name in known.folders:
            inner = os.path.join(task.path, name)
            found = _status(self._prefix + inner)
            if found is None or not stat.S_ISDIR(found.st_mode):
                return None  # a link led to a folder before, and counts as a file now
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
            after = _status(path)  # another folder may have got this path before the listing
            if not is_old or after is None or _stamp(after) != stamp:
                stamp = None
        return Folder(inner, stamp, folders, *self._take(inner, files))


def _split(entries: Iterable[os.DirEntry[str]]) -> tuple[list[str], list[str], bool]:
    """Return the names of the folders, the names of all other entries, and whether the result is lasting.

    A lasting result can change only if the listed folder changes.  The result is not lasting if a link is not
    a folder now, because the link's target may become a folder.
    """
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


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):  # ValueError means a name that no file can have
        return None


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


# A file of the index contains the folders of one root for one choice of extensions.  The path, the stamp and
# the subfolders of each folder are stored as JSON.  The paths of the files are stored as two arrays.

_KEEP_FROM_S = 0.25
_VERSION = 1


class IndexCache:
    """Keeps the results of scans of datasets in files of a folder, for the next scan.

    Only scans that took longer than ``keep_from_s`` seconds are kept.  If the folder cannot be used, one
    warning is logged.  ``now`` returns the current time on the clock of the scanned file systems, in
    nanoseconds.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep_from_s: float = _KEEP_FROM_S,
        now: Callable[[], int] = time.time_ns,
    ) -> None:
        self.path = Path(path)
        self.keep_from_s = keep_from_s
        self.now = now
        self._files = KeptFiles(self.path, "The index of the dataset is not kept, so it is scanned each time")

    def load(self, key: list[Any]) -> dict[str, Folder[Packed]]:
        """Return the folders of a previous scan by path.  Without a scan, or after damage, return {}."""
        return self._files.load(key, _read) or {}

    def save(self, key: list[Any], folders: Sequence[Folder[Packed]]) -> None:
        """Save folders in place of the folders saved with ``key`` before.  All folders must have stamps."""
        described = [[one.path, one.stamp, list(one.folders), one.count] for one in folders]
        lengths = [np.zeros(0, dtype=np.int64), *(one.content.lengths for one in folders)]
        arrays: dict[str, npt.NDArray[Any]] = {
            "arena": np.frombuffer(b"".join(one.content.block for one in folders), dtype=np.uint8),
            "lengths": np.concatenate(lengths).astype(np.int32),
        }
        self._files.save(key, {"folders": described}, arrays)


def default_index_cache() -> IndexCache | None:
    folder = default_folder()
    return None if folder is None else IndexCache(folder)


def _read(about: dict[str, Any], array: Arrays) -> dict[str, Folder[Packed]]:
    """Return the folders that a cache file describes.  Raise a ValueError if the file is inconsistent."""
    arena = array("arena", np.uint8).tobytes()
    lengths = array("lengths", np.int32).astype(np.int64)
    offsets = checked_offsets(arena, lengths)
    whole, first = memoryview(arena), 0
    found: dict[str, Folder[Packed]] = {}
    for path, stamp, folders, count in about["folders"]:
        if not (_all_are(str, [path, *folders]) and _all_are(int, [*stamp, count])):
            raise ValueError(f"a folder is described by {path!r}, {stamp!r}, {folders!r}, {count!r}")
        end = first + count
        if len(stamp) != 4 or count < 0 or end > len(lengths):
            raise ValueError(f"{path!r} has {count} files of {len(lengths)}, stamp {stamp}")
        block = whole[int(offsets[first]) : int(offsets[end])]
        found[path] = Folder(path, tuple(stamp), tuple(folders), count, Packed(block, lengths[first:end]))
        first = end
    if first != len(lengths):
        raise ValueError(f"{len(lengths)} files are in folders of {first}")
    return found


def _all_are(kind: type, values: Iterable[Any]) -> bool:
    return all(type(value) is kind for value in values)


def left_out(
    known: Mapping[str, Folder[Packed]], tops: Iterable[str], prefix: str
) -> dict[str, Folder[Packed]]:
    """Return those of the ``known`` folders whose class exists but is not among the scanned ``tops``."""
    above = {path: path.split(os.sep, 1)[0] for path in known}
    others = set(above.values()) - set(tops)
    there = {top for top in others if os.path.isdir(prefix + top)}
    return {path: folder for path, folder in known.items() if above[path] in there}


TORCHVISION_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

# The names of class folders, or a way to choose among the existing class folders.
Classes = Sequence[str] | Callable[[list[str]], Sequence[str]] | Subset

_NAMED_AT_MOST = 20


def find_classes(
    directory: str | os.PathLike[str], classes: Classes | None = None
) -> tuple[list[str], dict[str, int]]:
    """Find the class folders of a dataset.  Return their names, and a dict from names to class indices.

    ``classes`` may be the names of the folders to take, in this order.  ``classes`` may also be a function
    that receives the sorted names of all folders and returns the names to take.  If ``classes`` is a
    ``Subset``, the chosen folders are sorted by name.  If ``classes`` is None, all folders are taken, sorted.

    Raises:
        FileNotFoundError: the directory does not exist, or contains no folder.
        OptionError: ``classes`` is empty, names a folder twice, names a missing folder, or is a ``Subset`` of
            more classes than exist.
        TypeError: ``classes`` is not, and does not return, a sequence of strings.
    """
    return choose_classes(
        directory, (entry.name for entry in retrying_open(os.scandir, directory) if entry.is_dir()), classes
    )


def choose_classes(
    directory: str | os.PathLike[str], names: Iterable[str], classes: Classes | None
) -> tuple[list[str], dict[str, int]]:
    """Choose classes among ``names``, which may be in any order, as ``find_classes`` does."""
    found = sorted(names)
    if not found:
        raise FileNotFoundError(printable(f"Couldn't find any class folder in {directory}."))
    if classes is None:
        chosen = found
    elif isinstance(classes, Subset):
        chosen = classes.select(found)
    else:
        chosen = _checked(directory, found, classes(list(found)) if callable(classes) else classes)
    return chosen, {name: index for index, name in enumerate(chosen)}


def _checked(directory: str | os.PathLike[str], found: list[str], classes: Sequence[str]) -> list[str]:
    if isinstance(classes, str):
        raise TypeError(f"classes=… must be a sequence of folder names, got the string {classes!r}")
    if not isinstance(classes, Iterable):
        raise TypeError(f"classes=… must be, or return, a sequence of folder names, got {classes!r}")
    names = list(classes)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"classes=… must hold strings, got {name!r} of type {type(name).__name__}")
    if not names:
        raise OptionError("classes=… must name at least one folder, got none; leave it out to take all")
    existing, unique = set(found), set(names)
    missing = [name for name in names if name not in existing]
    if missing:
        raise OptionError(
            f"classes=… names folders that are not in {os.fspath(directory)!r}: {_listed(missing)}. "
            f"The folders there are: {_listed(found)}"
        )
    if len(unique) != len(names):
        twice = sorted(name for name in unique if names.count(name) > 1)
        raise OptionError(f"classes=… must name every folder once; named more than once: {_listed(twice)}")
    return names


def _listed(names: Sequence[str]) -> str:
    """Return the names in quotes.  A long list is shortened."""
    text = ", ".join(map(repr, names[:_NAMED_AT_MOST]))
    more = len(names) - _NAMED_AT_MOST
    return text if more <= 0 else f"{text} and {more} more"


def scan_folder(
    directory: str | os.PathLike[str],
    class_to_idx: Mapping[str, int],
    *,
    extensions: str | Sequence[str] | None = None,
    is_valid_file: Callable[[str], bool] | None = None,
    allow_empty: bool = False,
    cache: IndexCache | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> SampleTable:
    """Find all samples in the class folders, and return them as a table of ``(path, class index)``.

    The classes are sorted by name, the folders of a class are sorted by their path as a string, and the files
    of a folder are sorted by name.  Links to folders are followed.  Folders that cannot be read are skipped.

    Args:
        directory: the folder that contains one folder for each class; ``~`` is expanded.
        class_to_idx: the names of the class folders to scan, and their class indices.
        extensions: the extension or extensions of the files to take, in lower case.  Case of the files' names
            is ignored.
        is_valid_file: a function that returns whether to take a path.  Pass either this or ``extensions``.
        allow_empty: whether a class may have no file.  If not, a class without files is a FileNotFoundError.
        cache: the cache of scans.  Folders that have not changed since a cached scan are not listed again.
            The cache is not used with ``is_valid_file``, because this function may depend on anything.
        on_progress: is called a few times a second with the number of folders and of files found.
    """
    directory = os.path.expanduser(directory)
    check_scan(class_to_idx, extensions, is_valid_file)
    names = sorted(class_to_idx)
    prefix, tops = _below(directory, names)
    builder = SampleTableBuilder(prefix)
    empty: list[str] = []
    if is_valid_file is not None:
        listed = Walker(prefix, _listed_names, on_progress=on_progress).walk(tops)
        found: Iterable[list[Packed]] = (_packed(prefix, folders, is_valid_file) for folders in listed)
    else:
        assert extensions is not None
        found = _find_by_extension(directory, prefix, tops, extensions, cache, on_progress)
    for name, folders in zip(names, found, strict=True):
        before = len(builder)
        for paths in folders:
            builder.add_packed(paths, class_to_idx[name])
        if len(builder) == before:
            empty.append(name)
    if empty and not allow_empty:
        raise FileNotFoundError(empty_message(empty, extensions))
    return builder.build()


def check_scan(
    class_to_idx: Mapping[str, int],
    extensions: str | Sequence[str] | None,
    is_valid_file: Callable[[str], bool] | None,
) -> None:
    """Raise torchvision's errors for options that torchvision does not accept."""
    if not class_to_idx:
        raise ValueError("'class_to_index' must have at least one entry to collect any samples.")
    if (extensions is None) == (is_valid_file is None):
        raise ValueError("Both extensions and is_valid_file cannot be None or not None at the same time")


def _below(directory: str, names: Sequence[str]) -> tuple[str, list[str]]:
    prefix = os.path.join(directory, "")
    tops = [os.path.join(directory, name) for name in names]
    if not all(top.startswith(prefix) for top in tops):  # a name is an absolute path
        prefix = ""
    return prefix, [top[len(prefix) :] for top in tops]


def _find_by_extension(
    directory: str,
    prefix: str,
    tops: Sequence[str],
    extensions: str | Sequence[str],
    cache: IndexCache | None,
    on_progress: Callable[[int, int], None] | None,
) -> list[list[Packed]]:
    endings = (extensions,) if isinstance(extensions, str) else tuple(extensions)
    # An ending that contains a separator is compared with the path, not only with the file's name.
    by_path = any(separator in "".join(endings) for separator in filter(None, (os.sep, os.altsep)))

    def take(folder: str, names: list[str]) -> tuple[int, Packed]:
        inside = os.path.join(folder, "")
        names.sort()
        if by_path:
            taken = [name for name in names if (prefix + inside + name).lower().endswith(endings)]
        else:
            taken = [name for name in names if name.lower().endswith(endings)]
        return len(taken), pack_paths(inside, taken)

    key = None if cache is None or by_path or not prefix else _key(directory, endings)
    if cache is None or key is None:
        found = Walker(prefix, take, on_progress=on_progress).walk(tops)
        return [[folder.content for folder in folders] for folders in found]
    start = time.perf_counter()
    known = cache.load(key)
    found = Walker(prefix, take, known=known, now=cache.now, on_progress=on_progress).walk(tops)
    lasting = {folder.path: folder for folders in found for folder in folders if folder.stamp is not None}
    is_new = any(known.get(path) is not folder for path, folder in lasting.items())
    if is_new and time.perf_counter() - start > cache.keep_from_s:
        cache.save(key, list({**left_out(known, tops, prefix), **lasting}.values()))
    return [[folder.content for folder in folders] for folders in found]


def _key(directory: str, endings: tuple[str, ...]) -> list[Any] | None:
    """Return the key of a folder's scan in the cache; None if the folder cannot be read.  The key does not
    change if the folder is moved."""
    try:
        status = os.stat(directory)
    except (OSError, ValueError):
        return None
    decoding = [sys.getfilesystemencoding(), sys.getfilesystemencodeerrors(), os.sep]
    return [_VERSION, status.st_dev, status.st_ino, list(endings), decoding]


def _listed_names(folder: str, names: list[str]) -> tuple[int, list[str]]:
    names.sort()
    return len(names), names


def _packed(
    prefix: str, folders: Sequence[Folder[list[str]]], is_valid_file: Callable[[str], bool]
) -> list[Packed]:
    packed = []
    for folder in folders:
        inside = os.path.join(folder.path, "")
        before = prefix + inside
        packed.append(pack_paths(inside, [name for name in folder.content if is_valid_file(before + name)]))
    return packed


def empty_message(empty: Sequence[str], extensions: str | Sequence[str] | None) -> str:
    """Return torchvision's error message about classes without files."""
    message = printable(f"Found no valid file for the classes {', '.join(empty)}. ")
    if extensions is None:
        return message
    supported = extensions if isinstance(extensions, str) else ", ".join(extensions)
    return message + f"Supported extensions are: {supported}"
